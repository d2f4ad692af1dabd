"""Which address each node gets, what forbids a formation, and warnings about variables that do nothing."""

from __future__ import annotations

import msgspec
import pytest
from samples import cpu_machine, demo_plan, gpu_machine

from penstock.errors import Problem
from penstock.hardware import Interface, Machine, NodeFacts
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation, Spot
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


def all_reached(facts: list[NodeFacts], *, but: tuple[str, ...] = ()) -> dict[int, dict[int, list[str]]]:
    """Every node reaches every address of every other that is no loopback and not among `but`."""
    rows = range(len(facts))
    return {
        i: {j: [o.address for o in facts[j].interfaces if not o.is_loopback and o.address not in but] for j in rows}
        for i in rows
    }


def chosen(facts: list[NodeFacts], reached: dict[int, dict[int, list[str]]], wanted: str | None = None) -> list[str]:
    found = addresses.choose_addresses(facts, reached, wanted)
    assert isinstance(found, list), found
    return [f"{one.name} {one.address}" for one in found]


def refused(facts: list[NodeFacts], reached: dict[int, dict[int, list[str]]], wanted: str | None = None) -> str:
    found = addresses.choose_addresses(facts, reached, wanted)
    assert isinstance(found, Problem), found
    return str(found)


def test_infiniband_before_ethernet_before_a_bridge_of_containers() -> None:
    facts = [node(0, DOCKER, ETH, IB, LO), node(1, DOCKER, ETH, IB, LO)]
    reached = all_reached(facts, but=("172.17.0.1",))
    assert chosen(facts, reached) == ["ib0 10.9.0.1", "ib0 10.9.0.2"]
    assert chosen(facts, all_reached(facts, but=("172.17.0.1", "10.9.0.2"))) == ["eth0 10.0.0.1", "eth0 10.0.0.2"]


def test_one_network_for_all_is_taken_before_a_mixture() -> None:
    # Node 1 has no InfiniBand: node 0 then uses Ethernet too.
    facts = [node(0, ETH, IB), node(1, ETH)]
    assert chosen(facts, all_reached(facts)) == ["eth0 10.0.0.1", "eth0 10.0.0.2"]


def test_networks_that_differ_but_are_routed_will_do() -> None:
    other = Interface("ens5", "10.77.3.{}", 24)
    facts = [node(0, ETH), node(1, other)]
    assert chosen(facts, all_reached(facts)) == ["eth0 10.0.0.1", "ens5 10.77.3.2"]


def test_an_address_that_only_some_nodes_reach_is_not_taken() -> None:
    facts = [node(0, ETH, IB), node(1, ETH, IB), node(2, ETH, IB)]
    reached = all_reached(facts)
    reached[2][1] = ["10.0.0.2"]
    assert chosen(facts, reached) == ["eth0 10.0.0.1", "eth0 10.0.0.2", "eth0 10.0.0.3"]


def test_nodes_on_one_host_may_use_loopback() -> None:
    facts = [node(0, LO), node(0, LO)]
    assert chosen(facts, {0: {1: ["127.0.0.1"]}, 1: {0: ["127.0.0.1"]}}) == ["lo 127.0.0.1", "lo 127.0.0.1"]


def test_a_node_nobody_reaches_is_named_with_its_addresses() -> None:
    facts = [node(0, ETH), node(1, ETH, DOCKER)]
    text = refused(facts, all_reached(facts, but=("10.0.0.2", "172.17.0.1")))
    assert text == (
        "node1 (rank 1) is not reached from node0 (open the network between them; its addresses: "
        "10.0.0.2 (eth0), 172.17.0.1 (docker0))"
    )


def test_addresses_that_each_reach_half_are_not_enough() -> None:
    facts = [node(0, ETH, IB), node(1, ETH, IB), node(2, ETH, IB)]
    reached = all_reached(facts)
    reached[0][2], reached[1][2] = ["10.0.0.3"], ["10.9.0.3"]
    assert "node2 (rank 2) has no address that all other nodes reach" in refused(facts, reached)


@pytest.mark.parametrize("wanted", ["eth", "=eth0", "^ib,docker", "eth0"])
def test_the_users_interface_is_taken_in_nccls_words(wanted: str) -> None:
    facts = [node(0, ETH, IB), node(1, ETH, IB)]
    assert chosen(facts, all_reached(facts), wanted) == ["eth0 10.0.0.1", "eth0 10.0.0.2"]


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    facts = [node(0, ETH), node(1, ETH)]
    text = refused(facts, all_reached(facts), "ib0")
    assert text.startswith("engine.env: no interface ib0 of node0 is reached by the other nodes (it has eth0)")
    assert "those that are reached: eth0" in text


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
    made = Formation((Spot(0, "a", "10.0.0.1", "eth0", (0, 1)), Spot(1, "bb", "10.0.0.2", "eth0", (2, 3))), 1)
    assert addresses.table(addresses.as_views(plan, made)) == [
        "node  address          GPUs  ranks",
        "0 a   10.0.0.1 (eth0)  0,1   0-1",
        "1 bb  10.0.0.2 (eth0)  2,3   2-3",
    ]


def test_one_interface_is_set_for_vllm_nccl_and_gloo_together() -> None:
    assert addresses.network_environment(Spot(1, "b", "10.0.0.2", "eth0")) == {
        "VLLM_HOST_IP": "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }


def test_what_images_set_for_themselves_is_no_misspelling() -> None:
    assert addresses.variable_warnings({"NCCL_VERSION": "2.28.3-1"}) == []
