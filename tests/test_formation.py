"""Which address each node gets, what forbids a formation, and warnings about variables that do nothing."""

from __future__ import annotations

import itertools
import socket

import msgspec
import pytest
from samples import cpu_machine, demo_plan, gpu_machine

from penstock.engines import Command
from penstock.errors import Problem
from penstock.hardware import Interface, Machine, NodeFacts, detect
from penstock.node.group import addresses, ray
from penstock.node.group.addresses import Formation, GroupNode, Introduction
from penstock.spec.deployment import Parallel

ETH = Interface("eth0", "10.0.0.{}", 24, 10_000)
IB = Interface("ib0", "10.9.0.{}", 16, 200_000, is_infiniband=True)
DOCKER = Interface("docker0", "172.17.0.1", 16, None, is_virtual=True)
LO = Interface("lo", "127.0.0.1", 8)
VERSIONS = {"python": "3.11.7", "penstock": "1.0", "vllm": "0.33.0", "ray": "2.60.0"}


def node(number: int, *interfaces: Interface, machine: Machine | None = None, **versions: str) -> NodeFacts:
    machine = msgspec.structs.replace(machine or cpu_machine(), host=f"node{number}", versions=VERSIONS | versions)
    rows = tuple(msgspec.structs.replace(row, address=row.address.format(number + 1)) for row in interfaces)
    return NodeFacts(f"node{number}", machine, rows, 1 << 30)


def both(*interfaces: Interface) -> list[NodeFacts]:
    return [node(0, *interfaces), node(1, *interfaces)]


def chosen(facts: list[NodeFacts], addresses_to_gateway: str = "", wanted: str | None = None) -> str:
    """The chosen interfaces, or why there are none. `addresses_to_gateway`: by rank, as words; "-" is unknown."""
    words = addresses_to_gateway.split() or ["-"] * len(facts)
    nodes = [Introduction(row, None if word == "-" else word) for row, word in zip(facts, words, strict=True)]
    interfaces = addresses.choose_addresses(nodes, wanted)
    if isinstance(interfaces, Problem):
        return str(interfaces)
    return ", ".join(f"{row.name} {row.address}" for row in interfaces)


ALL = both(DOCKER, ETH, IB, LO)
ON_ETH, ON_IB = "eth0 10.0.0.1, eth0 10.0.0.2", "ib0 10.9.0.1, ib0 10.9.0.2"


@pytest.mark.parametrize(
    ("facts", "to_gateway", "interfaces"),
    [
        pytest.param(ALL, "10.0.0.1 10.0.0.2", ON_ETH, id="its way to the gateway"),
        pytest.param(ALL, "10.9.0.1 10.9.0.2", ON_IB, id="its way to the gateway over InfiniBand"),
        pytest.param(ALL, "127.0.0.1 10.0.0.2", ON_ETH, id="from the gateway's machine, the network of the others"),
        pytest.param(ALL, "127.0.0.1 127.0.0.1", ON_IB, id="over tunnels, InfiniBand before Ethernet"),
        pytest.param(ALL, "- -", ON_IB, id="unknown, InfiniBand before Ethernet"),
        pytest.param(both(DOCKER, ETH), "- -", ON_ETH, id="Ethernet before a bridge of containers"),
        pytest.param([node(0, ETH, IB), node(1, ETH)], "- -", ON_ETH, id="only one has InfiniBand"),
        # Their bridges of containers have one network in common, and lead nowhere.
        pytest.param(
            [node(0, ETH, DOCKER), node(1, Interface("ens5", "10.77.3.{}", 24), DOCKER)],
            "- -",
            "eth0 10.0.0.1, ens5 10.77.3.2",
            id="networks that differ are routed",
        ),
        pytest.param(
            [node(0, LO), node(0, LO)], "127.0.0.1 127.0.0.1", "lo 127.0.0.1, lo 127.0.0.1", id="one machine, loopback"
        ),
    ],
)
def test_the_address_of_each_node_for_the_others(facts: list[NodeFacts], to_gateway: str, interfaces: str) -> None:
    assert chosen(facts, to_gateway) == interfaces


@pytest.mark.parametrize("wanted", ["eth", "=eth0", "^ib,docker,lo", "eth0", "10.0.0.0/24", "10.0.0.7/8"])
def test_the_users_interface_or_network_overrides_the_way_to_the_gateway(wanted: str) -> None:
    facts = both(ETH, LO) if wanted == "10.0.0.7/8" else ALL
    assert chosen(facts, "10.9.0.1 10.9.0.2", wanted) == ON_ETH
    plan = demo_plan("vllm", network="10.9.0.0/16")
    assert addresses.wanted_network(plan) == "10.9.0.0/16"
    assert addresses.wanted_network(msgspec.structs.replace(plan, env={"NCCL_SOCKET_IFNAME": wanted})) == wanted


def test_a_node_without_an_address_or_the_wanted_interface_is_named_with_what_it_has() -> None:
    text = chosen([node(0, ETH), node(1, LO)])
    assert text.startswith("node1 (rank 1) has no address that the other nodes could reach (it has lo 127.0.0.1)")
    for wanted in ("ib0", "10.9.0.0/16"):
        words = f"node0 (rank 0) has no interface of {wanted} for the other nodes (it has eth0 10.0.0.1)"
        assert chosen(both(ETH), wanted=wanted).startswith(words)


PLAN = demo_plan("vllm", n_nodes=2, layout=Parallel(tensor=2), executor="ray")


def test_every_difference_of_versions_is_reported_at_once() -> None:
    assert addresses.problems(PLAN, [node(0, ETH), node(1, ETH, python="3.11.2")]) == []
    without_ray = msgspec.structs.replace(PLAN, executor="mp")
    assert addresses.problems(without_ray, [node(0, ETH), node(1, ETH, ray="2.54.0")]) == []
    other = node(1, ETH, python="3.12.1", vllm="0.32.0", ray="2.54.0")
    assert [str(problem) for problem in addresses.problems(PLAN, [node(0, ETH), other])] == [
        "vllm is 0.32.0 on node1 (rank 1), 0.33.0 on node0 (rank 0) (install the same vllm on every node)",
        "ray is 2.54.0 on node1 (rank 1), 2.60.0 on node0 (rank 0) (install the same ray on every node)",
        "python is 3.12 on node1 (rank 1), 3.11 on node0 (rank 0) (install the same python on every node)",
    ]


def test_a_node_that_lacks_a_gpu_is_named() -> None:
    plan = msgspec.structs.replace(PLAN, device="cuda", layout=Parallel(tensor=4))
    facts = [node(0, ETH, machine=gpu_machine(2)), node(1, ETH, machine=gpu_machine(1))]
    (problem,) = addresses.problems(plan, facts)
    assert problem.message == "node1 (rank 1) shows 1 GPUs, 2 are needed"


def test_an_unknown_variable_is_reported_with_a_similar_one() -> None:
    of_images = "NCCL_VERSION"
    names = ("NCCL_SOCKET_IFNAM", "NCCL_DEBUG", "VLLM_HOST_IP", "HF_HOME", "NCCL_ZZZ_Q", of_images)
    assert addresses.variable_warnings(dict.fromkeys(names, "1")) == [
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
    sockets = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
    env = addresses.network_environment(GroupNode(1, "b", "10.0.0.2", "eth0"))
    assert env == {"VLLM_HOST_IP": "10.0.0.2", **sockets}


ONE_NODE = Formation((GroupNode(0, "head", "127.0.0.1", "lo"),), master_port=6001, ray_port=6000, ray_token="secret")


@pytest.mark.loopback
def test_all_parts_of_ray_get_different_ports_also_when_the_kernel_offers_one_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offers = itertools.chain.from_iterable((port, port, 6000, 6001) for port in itertools.count(7000))
    monkeypatch.setattr(socket.socket, "getsockname", lambda _self: ("127.0.0.1", next(offers)))
    argv = ray.start(demo_plan(), ONE_NODE, 0, "/folder", Command(("vllm",), {})).argv
    ports = [int(value) for name, value in itertools.pairwise(argv) if name.endswith("port") and "worker" not in name]
    assert len({*ports, ONE_NODE.master_port}) == len(ports) + 1 == 10


@pytest.mark.loopback
def test_the_token_of_ray_is_in_the_environment_only_and_replaces_the_users() -> None:
    theirs = Command(("vllm",), {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "theirs"})
    command = ray.start(demo_plan(), ONE_NODE, 0, "/folder", theirs)
    assert (command.env["RAY_AUTH_MODE"], command.env["RAY_AUTH_TOKEN"]) == ("token", "secret")
    assert not any("secret" in word for word in (*command.argv, *ray.check("127.0.0.1:6000", 1, 1, 60.0).argv))


@pytest.mark.loopback
@pytest.mark.parametrize(("version", "is_shown"), [("2.51.2", False), ("2.52.0", True), ("3.0.0.dev0", True)])
def test_a_proxy_leads_only_to_a_dashboard_that_asks_for_a_token(
    monkeypatch: pytest.MonkeyPatch, version: str, is_shown: bool
) -> None:
    assert ray.dashboard_words() is None
    monkeypatch.setattr(detect, "versions", lambda: {"ray": version})
    monkeypatch.setenv("PENSTOCK_RAY_DASHBOARD_PORT", "8100")
    monkeypatch.setenv("PENSTOCK_RAY_DASHBOARD_URL", "https://read-only-x.domain")
    argv = ray.start(demo_plan(), ONE_NODE, 0, "/folder", Command(("vllm",))).argv
    assert (argv[argv.index("--dashboard-port") + 1] == "8100") == is_shown
    words = ray.dashboard_words()
    assert words is not None and ("https://read-only-x.domain" in words) == is_shown
