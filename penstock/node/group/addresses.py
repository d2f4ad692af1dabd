"""How the nodes of one replica become one: which address each of them has for the others, and what forbids it. Pure.

Every node tells its facts and which addresses of the others it reached; the first node decides with these functions
before anything loads.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.errors import Problem
from penstock.hardware import Interface, NodeFacts, catalog
from penstock.planner import Plan
from penstock.wire.announcement import NodeView

_MUST_MATCH = ("penstock", "vllm", "ray")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_NEAR = 0.8
# Set by NVIDIA's CUDA images for themselves (https://gitlab.com/nvidia/container-images/cuda, Dockerfiles).
_OF_IMAGES = {"NCCL_VERSION"}


class Spot(msgspec.Struct, frozen=True):
    """A node's part in a formation: its address for the others on that interface, and the GPUs that it gives."""

    rank: int
    host: str
    address: str
    interface: str
    gpus: tuple[int, ...] = ()


class Formation(msgspec.Struct, frozen=True):
    """What the first node decided. `master_port` is free on the first node; `ray_port` is 0 without Ray."""

    spots: tuple[Spot, ...]
    master_port: int
    ray_port: int = 0

    @property
    def head(self) -> Spot:
        return self.spots[0]


def choose_addresses(
    facts: Sequence[NodeFacts], reached: Mapping[int, Mapping[int, Iterable[str]]], wanted: str | None = None
) -> list[Interface] | Problem:
    """The interface of every node, by rank, so that all others reach it; or why there is none.

    `reached[i][j]` are the addresses of rank j that rank i reached. `wanted` is the user's interface name (as
    NCCL_SOCKET_IFNAME has it: a prefix, `=name` for the exact one, several with commas). One network that all have is
    taken before a mixture; then InfiniBand, the faster, the one that is no bridge of containers.
    """
    options: list[list[Interface]] = []
    for rank, node in enumerate(facts):
        usable = [
            one
            for one in node.interfaces
            if all(one.address in reached.get(other, {}).get(rank, ()) for other in range(len(facts)) if other != rank)
        ]
        if not usable:
            return _unreachable(rank, facts, reached)
        chosen = [one for one in usable if wanted is None or _is_wanted(one.name, wanted)]
        if not chosen:
            names = ", ".join(one.name for one in node.interfaces)
            others = ", ".join(one.name for one in usable)
            return Problem(
                "engine.env",
                f"no interface {wanted} of {node.host} is reached by the other nodes (it has {names})",
                f"those that are reached: {others}; remove NCCL_SOCKET_IFNAME to let penstock choose",
            )
        options.append(chosen)
    for network in _common_networks(options):
        return [next(one for one in row if _network(one) == network) for row in options]
    return [min(row, key=_worth) for row in options]


def _unreachable(rank: int, facts: Sequence[NodeFacts], reached: Mapping[int, Mapping[int, Iterable[str]]]) -> Problem:
    addresses = ", ".join(f"{one.address} ({one.name})" for one in facts[rank].interfaces if not one.is_loopback)
    blind = [
        facts[other].host
        for other in range(len(facts))
        if other != rank and not set(reached.get(other, {}).get(rank, ()))
    ]
    if blind:
        return Problem(
            "", f"{facts[rank].host} (rank {rank}) is not reached from {', '.join(blind)}",
            f"open the network between them; its addresses: {addresses or 'none but loopback'}",
        )  # fmt: skip
    return Problem(
        "", f"{facts[rank].host} (rank {rank}) has no address that all other nodes reach",
        f"its addresses: {addresses}; each of them is reached by some only",
    )  # fmt: skip


def _is_wanted(name: str, wanted: str) -> bool:
    # NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    if wanted.startswith("^"):
        return not any(name.startswith(word) for word in wanted[1:].split(","))
    if wanted.startswith("="):
        return name in wanted[1:].split(",")
    return any(name.startswith(word.strip()) for word in wanted.split(","))


def _network(one: Interface) -> str:
    return str(ipaddress.ip_network(f"{one.address}/{one.prefix_length}", strict=False))


def _worth(one: Interface) -> tuple[bool, bool, bool, int, str]:
    """Sorts the best first."""
    return (one.is_loopback, one.is_virtual, not one.is_infiniband, -(one.speed_mbps or 0), one.name)


def _common_networks(options: Sequence[Sequence[Interface]]) -> list[str]:
    """Networks that every node has an address in, the best first: its worst node counts."""
    everywhere = set.intersection(*({_network(one) for one in row} for row in options))
    worth = {
        network: max(min(_worth(one) for one in row if _network(one) == network) for row in options)
        for network in everywhere
    }
    return sorted(everywhere, key=lambda network: worth[network])


def problems(plan: Plan, facts: Sequence[NodeFacts]) -> list[Problem]:
    """All that keeps these nodes from serving `plan` together: versions that differ, GPUs that are missing."""
    found, head = version_problems(facts, is_ray=plan.executor == "ray"), facts[0]
    if plan.executor == "ray" and "ray" not in head.machine.versions:
        found.append(Problem("engine.executor", f"ray is not installed on {head.host}", "pip install ray, or use mp"))
    if plan.device == "cuda":
        for rank, node in enumerate(facts):
            n_gpus = len(node.machine.gpus)
            if n_gpus < plan.ranks_each:
                hint = "its driver, CUDA_VISIBLE_DEVICES, or what the scheduler gave (nvidia-smi there)"
                found.append(
                    Problem("", f"{node.host} (rank {rank}) shows {n_gpus} GPUs, {plan.ranks_each} are needed", hint)
                )
    return found


def version_problems(facts: Sequence[NodeFacts], *, is_ray: bool) -> list[Problem]:
    """What is installed in another version than on the first node. Without `is_ray` Ray's own does not matter."""
    found: list[Problem] = []
    head = facts[0]
    for package in (*_MUST_MATCH, "python"):
        told = {rank: _comparable(package, node.machine.versions.get(package)) for rank, node in enumerate(facts)}
        if package == "ray" and not is_ray:
            continue
        for rank, version in told.items():
            if version != told[0]:
                other = facts[rank]
                found.append(
                    Problem(
                        "",
                        f"{package} is {version or 'not installed'} on {other.host} (rank {rank}), "
                        f"{told[0] or 'not installed'} on {head.host} (rank 0)",
                        f"install the same {package} on every node",
                    )
                )
    return found


def _comparable(package: str, version: str | None) -> str | None:
    """Python's patch level does not matter to its packages."""
    if version is None:
        return None
    return ".".join(version.split(".")[:2]) if package == "python" else version


def variable_warnings(environment: Mapping[str, str]) -> list[str]:
    """Variables whose names look like those of NCCL, Gloo or vLLM and are none: they do nothing."""
    known, warnings = catalog.known_variables() | _OF_IMAGES, []
    for name in sorted(environment):
        if not name.startswith(("NCCL_", "GLOO_", "VLLM_")) or name in known:
            continue
        close = difflib.get_close_matches(name, known, 1, _NEAR)
        guess = f"; did you mean {close[0]}?" if close else ""
        warnings.append(f"{name} is no variable that NCCL, Gloo or vLLM know: it does nothing{guess}")
    return warnings


def network_environment(spot: Spot) -> dict[str, str]:
    """What makes vLLM, NCCL and Gloo of that node use its chosen address, all of them together."""
    return {"VLLM_HOST_IP": spot.address} | dict.fromkeys(_INTERFACE_VARIABLES, spot.interface)


def wanted_interface(plan: Plan) -> str | None:
    """The interface that the user set, in the words of NCCL or Gloo."""
    return next((plan.env[name] for name in _INTERFACE_VARIABLES if plan.env.get(name)), None)


def ranks_of(plan: Plan, node: int) -> tuple[int, ...]:
    """The engine's ranks on that node: vLLM gives them out node by node."""
    return tuple(range(node * plan.ranks_each, (node + 1) * plan.ranks_each))


def as_views(plan: Plan, formation: Formation, gone: Mapping[int, str] = {}) -> tuple[NodeView, ...]:
    """The nodes for an announcement. `gone`: why, by rank of the node."""
    return tuple(
        NodeView(
            rank=spot.rank,
            host=spot.host,
            state="gone" if spot.rank in gone else "here",
            address=spot.address,
            interface=spot.interface,
            gpus=tuple(map(str, spot.gpus)),
            ranks=ranks_of(plan, spot.rank),
            reason=gone.get(spot.rank),
        )
        for spot in formation.spots
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
