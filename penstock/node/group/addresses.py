"""How the nodes of one replica become a group: which address each has for the others, and what forbids it. Pure.

Every node introduces itself with its facts and the address by which it reaches the gateway; rank 0 decides with these
functions before anything loads. Whether the nodes reach each other is for `doctor` to try.
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
    """What a node posts when a group forms. `address`: its end of a connection to the gateway, None when unknown."""

    facts: NodeFacts
    address: str | None = None


class GroupNode(msgspec.Struct, frozen=True):
    """A node of a formation: its address for the others, the interface that has it, and the GPUs that it gives."""

    rank: int
    host: str
    address: str
    interface: str
    gpus: tuple[int, ...] = ()


class Formation(msgspec.Struct, frozen=True):
    """What rank 0 decided. `master_port` is free on rank 0's node; `ray_port` is 0 without Ray."""

    nodes: tuple[GroupNode, ...]
    master_port: int
    ray_port: int = 0

    @property
    def head(self) -> GroupNode:
        return self.nodes[0]


def choose_addresses(nodes: Sequence[Introduction], wanted: str | None = None) -> list[Interface] | Problem:
    """The interface of every node, by rank; or which node has none.

    A node takes the interface by which it reaches the gateway. Where that is loopback (a tunnel, or the gateway's own
    machine) it takes one in a network that all have. `wanted` overrides it: a network (CIDR), or interface names in
    NCCL's words.
    """
    is_one_machine = len({node.facts.host for node in nodes}) == 1
    options: list[list[Interface]] = []
    for rank, node in enumerate(nodes):
        # A bridge of containers may have the same address on every machine: it leads to the node itself.
        elsewhere = {
            interface.address
            for other in nodes
            if other.facts.host != node.facts.host
            for interface in other.facts.interfaces
        }
        usable = [
            interface
            for interface in node.facts.interfaces
            if interface.address not in elsewhere and (is_one_machine or not interface.is_loopback)
        ]
        if wanted is not None:
            usable = [interface for interface in usable if is_wanted(interface, wanted)]
        if not usable:
            return _no_interface(rank, node.facts, wanted)
        towards_gateway = [
            interface for interface in usable if interface.address == node.address and not interface.is_loopback
        ]
        options.append(usable if wanted is not None else towards_gateway or usable)
    return best_of(options)


def best_of(options: Sequence[Sequence[Interface]]) -> list[Interface]:
    """One interface of each node: in one network that all have before a mixture; InfiniBand first, then the faster."""
    for network in _common_networks(options):
        return [next(interface for interface in row if _network(interface) == network) for row in options]
    return [min(row, key=_worth) for row in options]


def _no_interface(rank: int, facts: NodeFacts, wanted: str | None) -> Problem:
    names = ", ".join(f"{interface.name} {interface.address}" for interface in facts.interfaces) or "none"
    if wanted is None:
        return Problem(
            "",
            f"{facts.host} (rank {rank}) has no address that the other nodes could reach (it has {names})",
            "connect it to the network of the other nodes",
        )
    return Problem(
        "",
        f"{facts.host} (rank {rank}) has no interface of {wanted} for the other nodes (it has {names})",
        "change hardware.network, or NCCL_SOCKET_IFNAME in engine.env; without either penstock chooses",
    )


def is_wanted(interface: Interface, wanted: str) -> bool:
    """Whether an interface is in that network (CIDR), or is named so: a prefix, `=name` exactly, `^name` not that one.

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
    """Networks that every node has an address in, the best first: its worst node counts."""
    everywhere = set.intersection(*({_network(interface) for interface in row} for row in options))
    worth = {
        network: max(min(_worth(interface) for interface in row if _network(interface) == network) for row in options)
        for network in everywhere
    }
    return sorted(everywhere, key=lambda network: worth[network])


def problems(plan: Plan, facts: Sequence[NodeFacts]) -> list[Problem]:
    """All that keeps these nodes from serving `plan` together: versions that differ, GPUs that are missing."""
    found, head = version_problems(facts, is_ray=plan.executor == "ray"), facts[0]
    if plan.executor == "ray" and "ray" not in head.machine.versions:
        found.append(Problem("engine.executor", f"ray is not installed on {head.host}", "pip install ray, or use mp"))
    hint = "its driver, CUDA_VISIBLE_DEVICES, or what the scheduler gave (nvidia-smi there)"
    return found + [
        Problem(
            "", f"{node.host} (rank {rank}) shows {len(node.machine.gpus)} GPUs, {plan.ranks_each} are needed", hint
        )
        for rank, node in enumerate(facts)
        if plan.device == "cuda" and len(node.machine.gpus) < plan.ranks_each
    ]


def version_problems(facts: Sequence[NodeFacts], *, is_ray: bool) -> list[Problem]:
    """Packages whose version differs from that on rank 0. Without `is_ray` Ray's does not matter."""
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
    """Without Python's patch level, which does not matter to its packages."""
    version = facts.machine.versions.get(package)
    return ".".join(version.split(".")[:2]) if version and package == "python" else version


def variable_warnings(environment: Mapping[str, str]) -> list[str]:
    """Variables that are named like those of NCCL, Gloo or vLLM and are unknown: they do nothing."""
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
    """What the user set: the interface in engine.env, else the network (CIDR) in hardware.network."""
    return next((plan.env[name] for name in INTERFACE_VARIABLES if plan.env.get(name)), plan.network)


def ranks_of(plan: Plan, node: int) -> tuple[int, ...]:
    """The engine's ranks on that node: vLLM gives them out node by node."""
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
    """Node, address, GPUs and ranks as lines of text."""
    rows = [("node", "address", "GPUs", "ranks")]
    for node in nodes:
        gpus = ",".join(node.gpus) or "-"
        ranks = f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else ",".join(map(str, node.ranks))
        rows.append((f"{node.rank} {node.host}", f"{node.address} ({node.interface})", gpus, ranks))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
