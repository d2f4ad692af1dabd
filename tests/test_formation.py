"""Which address each node gets, what forbids a formation, and warnings about variables that do nothing."""

from __future__ import annotations

import msgspec
import pytest
from samples import cpu_machine, demo_plan, gpu_machine

from penstock.errors import Problem
from penstock.hardware import Interface, Machine, NodeFacts
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation, GroupNode, Introduction
from penstock.spec.deployment import Parallel

ETH = Interface("eth0", "10.0.0.{}", 24, 10_000)
IB = Interface("ib0", "10.9.0.{}", 16, 200_000, is_infiniband=True)
DOCKER = Interface("docker0", "172.17.0.1", 16, None, is_virtual=True)
LO = Interface("lo", "127.0.0.1", 8)
VERSIONS = {"python": "3.11.7", "penstock": "1.0", "vllm": "0.33.0", "ray": "2.60.0"}


def node(number: int, *interfaces: Interface, machine: Machine | None = None, **versions: str) -> NodeFacts:
    made = machine or cpu_machine()
    made = msgspec.structs.replace(made, host=f"node{number}", versions=VERSIONS | versions)
    rows = tuple(msgspec.structs.replace(one, address=one.address.format(number + 1)) for one in interfaces)
    return NodeFacts(f"node{number}", made, rows, 1 << 30)


def chosen(facts: list[NodeFacts], addresses_to_gateway: str = "", wanted: str | None = None) -> str:
    """The chosen interfaces, or why there are none. `addresses_to_gateway`: by rank, as words; "-" is unknown."""
    words = addresses_to_gateway.split() or ["-"] * len(facts)
    nodes = [Introduction(row, None if word == "-" else word) for row, word in zip(facts, words, strict=True)]
    found = addresses.choose_addresses(nodes, wanted)
    if isinstance(found, Problem):
        return str(found)
    return ", ".join(f"{one.name} {one.address}" for one in found)


BOTH = [node(0, DOCKER, ETH, IB, LO), node(1, DOCKER, ETH, IB, LO)]


def test_a_node_uses_the_address_by_which_it_reaches_the_gateway() -> None:
    assert chosen(BOTH, "10.0.0.1 10.0.0.2") == "eth0 10.0.0.1, eth0 10.0.0.2"
    assert chosen(BOTH, "10.9.0.1 10.9.0.2") == "ib0 10.9.0.1, ib0 10.9.0.2"


def test_a_node_that_reaches_the_gateway_over_loopback_joins_the_network_of_the_others() -> None:
    assert chosen(BOTH, "127.0.0.1 10.0.0.2") == "eth0 10.0.0.1, eth0 10.0.0.2"


@pytest.mark.parametrize("unknown", ["127.0.0.1 127.0.0.1", "- -"], ids=["tunnels", "unknown"])
def test_without_a_way_to_the_gateway_infiniband_is_before_ethernet_before_a_bridge_of_containers(unknown: str) -> None:
    assert chosen(BOTH, unknown) == "ib0 10.9.0.1, ib0 10.9.0.2"
    assert chosen([node(0, DOCKER, ETH), node(1, DOCKER, ETH)], unknown) == "eth0 10.0.0.1, eth0 10.0.0.2"
    # Node 1 has no InfiniBand: node 0 then uses Ethernet too.
    assert chosen([node(0, ETH, IB), node(1, ETH)], unknown) == "eth0 10.0.0.1, eth0 10.0.0.2"


def test_networks_that_differ_but_are_routed_will_do() -> None:
    other = Interface("ens5", "10.77.3.{}", 24)
    # Their bridges of containers have one network in common, and lead nowhere.
    assert chosen([node(0, ETH, DOCKER), node(1, other, DOCKER)]) == "eth0 10.0.0.1, ens5 10.77.3.2"


def test_nodes_on_one_machine_may_use_loopback() -> None:
    assert chosen([node(0, LO), node(0, LO)], "127.0.0.1 127.0.0.1") == "lo 127.0.0.1, lo 127.0.0.1"


def test_a_node_without_an_address_for_the_others_is_named() -> None:
    text = chosen([node(0, ETH), node(1, LO)])
    assert text.startswith("node1 (rank 1) has no address that the other nodes could reach (it has lo 127.0.0.1)")


@pytest.mark.parametrize("wanted", ["eth", "=eth0", "^ib,docker,lo", "eth0", "10.0.0.0/24", "10.0.0.7/8"])
def test_the_users_interface_or_network_is_taken_before_the_way_to_the_gateway(wanted: str) -> None:
    facts = [node(0, ETH, LO), node(1, ETH, LO)] if wanted == "10.0.0.7/8" else BOTH
    assert chosen(facts, "10.9.0.1 10.9.0.2", wanted) == "eth0 10.0.0.1, eth0 10.0.0.2"


@pytest.mark.parametrize("wanted", ["ib0", "10.9.0.0/16"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    text = chosen([node(0, ETH), node(1, ETH)], wanted=wanted)
    assert text.startswith(f"node0 (rank 0) has no interface of {wanted} for the other nodes (it has eth0 10.0.0.1)")


def test_the_users_interface_is_before_the_users_network() -> None:
    plan = demo_plan("vllm", network="10.9.0.0/16")
    assert addresses.wanted_network(plan) == "10.9.0.0/16"
    assert addresses.wanted_network(msgspec.structs.replace(plan, env={"NCCL_SOCKET_IFNAME": "eth0"})) == "eth0"


PLAN = demo_plan("vllm", n_nodes=2, layout=Parallel(tensor=2), executor="ray")


def test_equal_nodes_have_no_problem() -> None:
    assert addresses.problems(PLAN, [node(0, ETH), node(1, ETH, python="3.11.2")]) == []


def test_every_difference_of_versions_is_told_at_once() -> None:
    other = node(1, ETH, python="3.12.1", vllm="0.32.0", ray="2.54.0")
    found = [str(problem) for problem in addresses.problems(PLAN, [node(0, ETH), other])]
    assert found == [
        "vllm is 0.32.0 on node1 (rank 1), 0.33.0 on node0 (rank 0) (install the same vllm on every node)",
        "ray is 2.54.0 on node1 (rank 1), 2.60.0 on node0 (rank 0) (install the same ray on every node)",
        "python is 3.12 on node1 (rank 1), 3.11 on node0 (rank 0) (install the same python on every node)",
    ]


def test_rays_version_does_not_matter_without_ray() -> None:
    plan = msgspec.structs.replace(PLAN, executor="mp")
    assert addresses.problems(plan, [node(0, ETH), node(1, ETH, ray="2.54.0")]) == []


def test_a_node_that_lacks_a_gpu_is_named() -> None:
    plan = msgspec.structs.replace(PLAN, device="cuda", layout=Parallel(tensor=4))
    facts = [node(0, ETH, machine=gpu_machine(2)), node(1, ETH, machine=gpu_machine(1))]
    assert [problem.message for problem in addresses.problems(plan, facts)] == [
        "node1 (rank 1) shows 1 GPUs, 2 are needed"
    ]


def test_a_misspelt_variable_is_told_with_the_right_one() -> None:
    told = {"NCCL_SOCKET_IFNAM": "ib0", "NCCL_DEBUG": "INFO", "VLLM_HOST_IP": "x", "HF_HOME": "y", "NCCL_ZZZ_Q": "1"}
    assert addresses.variable_warnings(told) == [
        "NCCL_SOCKET_IFNAM is no variable that NCCL, Gloo or vLLM know: it does nothing; "
        "did you mean NCCL_SOCKET_IFNAME?",
        "NCCL_ZZZ_Q is no variable that NCCL, Gloo or vLLM know: it does nothing",
    ]


def test_the_table_says_node_address_gpus_and_ranks() -> None:
    plan = msgspec.structs.replace(PLAN, layout=Parallel(tensor=2, pipeline=2))
    made = Formation((GroupNode(0, "a", "10.0.0.1", "eth0", (0, 1)), GroupNode(1, "bb", "10.0.0.2", "eth0", (2, 3))), 1)
    assert addresses.table(addresses.as_views(plan, made)) == [
        "node  address          GPUs  ranks",
        "0 a   10.0.0.1 (eth0)  0,1   0-1",
        "1 bb  10.0.0.2 (eth0)  2,3   2-3",
    ]


def test_one_interface_is_set_for_vllm_nccl_and_gloo_together() -> None:
    assert addresses.network_environment(GroupNode(1, "b", "10.0.0.2", "eth0")) == {
        "VLLM_HOST_IP": "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }


def test_what_images_set_for_themselves_is_no_misspelling() -> None:
    assert addresses.variable_warnings({"NCCL_VERSION": "2.28.3-1"}) == []
