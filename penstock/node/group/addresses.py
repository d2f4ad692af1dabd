"""How the nodes of one replica form a group: the address of each for the others, and what prevents it. Pure.

Rank 0 decides before anything loads. Whether the nodes reach each other is a check of `doctor`.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping, Sequence

import msgspec

from penstock.errors import Problem
from penstock.hardware import Interface, NodeFacts, catalog
from penstock.planner import Plan
from penstock.wire.announcement import NodeView

_MUST_MATCH = ("penstock", "vllm", "ray")
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_NEAR = 0.8
# Set by NVIDIA's CUDA images for themselves (https://gitlab.com/nvidia/container-images/cuda, Dockerfiles).
_OF_IMAGES = {"NCCL_VERSION"}


class Introduction(msgspec.Struct, frozen=True):
    """What a node posts when a group forms. `address`: its end of a connection to the gateway."""

    facts: NodeFacts
    address: str | None = None


class GroupNode(msgspec.Struct, frozen=True):
    """A node of a formation: its address for the others, on which interface, and its GPUs."""

    rank: int
    host: str
    address: str
    interface: str
    gpus: tuple[int, ...] = ()


class Formation(msgspec.Struct, frozen=True):
    """Rank 0's decision. `master_port` is free on rank 0's node; `ray_port` is 0 without Ray.

    `ray_token`: of this start's Ray cluster, whose job API runs code. It is only in the memory of nodes and gateways.
    """

    nodes: tuple[GroupNode, ...]
    master_port: int
    ray_port: int = 0
    ray_token: str = ""

    @property
    def head(self) -> GroupNode:
        return self.nodes[0]


def choose_addresses(nodes: Sequence[Introduction], wanted: str | None = None) -> list[Interface] | Problem:
    """The interface of every node, by rank; or which node has none.

    A node uses the interface by which it reaches the gateway. Where that is loopback (a tunnel, or the gateway's own
    machine) it uses one in a network that all have. `wanted` overrides it: a network (CIDR), or interface names as
    NCCL takes them.
    """
    is_one_machine = len({node.facts.host for node in nodes}) == 1
    options: list[list[Interface]] = []
    for rank, node in enumerate(nodes):
        # A bridge of containers may have the same address on every machine: it leads to the node itself.
        others = [other.facts for other in nodes if other.facts.host != node.facts.host]
        elsewhere = {interface.address for facts in others for interface in facts.interfaces}
        usable = [
            interface
            for interface in node.facts.interfaces
            if interface.address not in elsewhere
            and (is_one_machine or not interface.is_loopback)
            and (wanted is None or is_wanted(interface, wanted))
        ]
        if not usable:
            return _no_interface(rank, node.facts, wanted)
        to_gateway = [row for row in usable if row.address == node.address and not row.is_loopback]
        options.append(usable if wanted is not None else to_gateway or usable)
    return best_of(options)


def best_of(options: Sequence[Sequence[Interface]]) -> list[Interface]:
    """One interface of each node: of one network if all share one; InfiniBand first, then the faster."""
    for network in _common_networks(options):
        return [next(interface for interface in row if _network(interface) == network) for row in options]
    return [min(row, key=_worth) for row in options]


def _no_interface(rank: int, facts: NodeFacts, wanted: str | None) -> Problem:
    names = ", ".join(f"{interface.name} {interface.address}" for interface in facts.interfaces) or "none"
    lacks, hint = "address that the other nodes could reach", "connect it to the network of the other nodes"
    if wanted is not None:
        lacks = f"interface of {wanted} for the other nodes"
        hint = "change hardware.network, or NCCL_SOCKET_IFNAME in engine.env; without either penstock chooses"
    return Problem("", f"{facts.host} (rank {rank}) has no {lacks} (it has {names})", hint)


def is_wanted(interface: Interface, wanted: str) -> bool:
    """Whether an interface is in that network (CIDR), or has such a name: a prefix, `=name` exactly, `^name` excluded.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    if "/" in wanted:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(wanted, strict=False)
    if wanted.startswith("^"):
        return not any(interface.name.startswith(word) for word in wanted[1:].split(","))
    if wanted.startswith("="):
        return interface.name in wanted[1:].split(",")
    return any(interface.name.startswith(word.strip()) for word in wanted.split(","))


def _network(interface: Interface) -> str:
    return str(ipaddress.ip_network(f"{interface.address}/{interface.prefix_length}", strict=False))


def _worth(interface: Interface) -> tuple[bool, bool, bool, int, str]:
    """Sorts the best first."""
    return (
        interface.is_loopback,
        interface.is_virtual,
        not interface.is_infiniband,
        -(interface.speed_mbps or 0),
        interface.name,
    )


def _common_networks(options: Sequence[Sequence[Interface]]) -> list[str]:
    """Networks in which every node has an address, the best first: the worst node counts."""
    everywhere = set.intersection(*({_network(interface) for interface in row} for row in options))
    worth = {
        network: max(min(_worth(interface) for interface in row if _network(interface) == network) for row in options)
        for network in everywhere
    }
    return sorted(everywhere, key=lambda network: worth[network])


def problems(plan: Plan, facts: Sequence[NodeFacts]) -> list[Problem]:
    """All that keeps these nodes from serving `plan` together: versions that differ, GPUs that are missing."""
    problems, head = version_problems(facts, is_ray=plan.executor == "ray"), facts[0]
    if plan.executor == "ray" and "ray" not in head.machine.versions:
        words = f"ray is not installed on {head.host}"
        problems.append(Problem("engine.executor", words, "pip install ray, or use mp"))
    hint = "its driver, CUDA_VISIBLE_DEVICES, or what the scheduler allocated (nvidia-smi there)"
    for rank, node in enumerate(facts):
        if plan.device == "cuda" and len(node.machine.gpus) < plan.ranks_each:
            words = f"{node.host} (rank {rank}) shows {len(node.machine.gpus)} GPUs, {plan.ranks_each} are needed"
            problems.append(Problem("", words, hint))
    return problems


def version_problems(facts: Sequence[NodeFacts], *, is_ray: bool) -> list[Problem]:
    """Packages whose version differs from that on rank 0; Ray's counts only with `is_ray`."""
    head, *others = facts
    return [
        Problem(
            "",
            f"{package} is {_version(package, node) or 'not installed'} on {node.host} (rank {rank}), "
            f"{_version(package, head) or 'not installed'} on {head.host} (rank 0)",
            f"install the same {package} on every node",
        )
        for package in (*_MUST_MATCH, "python")
        if is_ray or package != "ray"
        for rank, node in enumerate(others, 1)
        if _version(package, node) != _version(package, head)
    ]


def _version(package: str, facts: NodeFacts) -> str | None:
    """Without Python's patch level."""
    version = facts.machine.versions.get(package)
    return ".".join(version.split(".")[:2]) if version and package == "python" else version


def variable_warnings(environment: Mapping[str, str]) -> list[str]:
    """Unknown variables with the prefix of NCCL, Gloo or vLLM: they have no effect."""
    known, warnings = catalog.known_variables() | _OF_IMAGES, []
    for name in sorted(environment):
        if not name.startswith(("NCCL_", "GLOO_", "VLLM_")) or name in known:
            continue
        close = difflib.get_close_matches(name, known, 1, _NEAR)
        guess = f"; did you mean {close[0]}?" if close else ""
        warnings.append(f"{name} is no variable that NCCL, Gloo or vLLM know: it does nothing{guess}")
    return warnings


def network_environment(node: GroupNode) -> dict[str, str]:
    """Makes vLLM, NCCL and Gloo use the node's chosen address."""
    return {"VLLM_HOST_IP": node.address} | dict.fromkeys(INTERFACE_VARIABLES, node.interface)


def wanted_network(plan: Plan) -> str | None:
    """The user's interface in engine.env, else the network (CIDR) in hardware.network."""
    return next((plan.env[name] for name in INTERFACE_VARIABLES if plan.env.get(name)), plan.network)


def ranks_of(plan: Plan, node: int) -> tuple[int, ...]:
    """The engine's ranks on that node: vLLM assigns them node by node."""
    return tuple(range(node * plan.ranks_each, (node + 1) * plan.ranks_each))


def as_views(plan: Plan, formation: Formation, gone: Mapping[int, str] = {}) -> tuple[NodeView, ...]:
    """The nodes for an announcement. `gone`: why, by rank of the node."""
    return tuple(
        NodeView(
            rank=node.rank,
            host=node.host,
            state="gone" if node.rank in gone else "here",
            address=node.address,
            interface=node.interface,
            gpus=tuple(map(str, node.gpus)),
            ranks=ranks_of(plan, node.rank),
            reason=gone.get(node.rank),
        )
        for node in formation.nodes
    )


def table(nodes: Sequence[NodeView]) -> list[str]:
    """Lines with node, address, GPUs and ranks."""
    rows = [("node", "address", "GPUs", "ranks")]
    for node in nodes:
        gpus = ",".join(node.gpus) or "-"
        ranks = f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else ",".join(map(str, node.ranks))
        rows.append((f"{node.rank} {node.host}", f"{node.address} ({node.interface})", gpus, ranks))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
