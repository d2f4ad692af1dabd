"""The network between nodes: which reach each other, the time of an all-reduce, and its effect on the plan.

Pure except `planned`, which reads the measurements of earlier starts as the planner does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.deployment import planning
from penstock.deployment.doctor.nodes import SurveyedNode
from penstock.errors import Finding, PenstockError
from penstock.hardware import Interface, Machine, catalog
from penstock.hardware.catalog import LinkFacts
from penstock.hardware.topology import rewired
from penstock.models import Facts
from penstock.node.checks.all_reduce import Collective
from penstock.node.group.addresses import INTERFACE_VARIABLES, best_of, is_wanted
from penstock.planner.request import Sizing
from penstock.planner.speed.collectives import Fabric, allreduce_us, collective_hops, node_gbs
from penstock.spec.deployment import Deployment, Parallel
from penstock.text import show_bytes, show_seconds

# A share of an interface's line rate under which something is wrong: TCP through NCCL reaches 0.6 to 0.9 of it.
_LITTLE_NCCL, _LITTLE_GLOO = 0.3, 0.03
_SLOWER = 1.1
_BROKEN = 2.0
_FAR_S = 0.002  # machines of one data centre are 0.02 to 0.5 ms apart


class Route(msgspec.Struct, frozen=True):
    """The interfaces that the nodes use for each other, in the order of the nodes that answered."""

    nodes: tuple[SurveyedNode, ...]
    interfaces: tuple[Interface, ...]


def of_reach(
    nodes: Sequence[SurveyedNode], times: Mapping[int, Mapping[int, Mapping[str, float]]], deployment: Deployment
) -> tuple[list[Finding], Route | None]:
    """The interface for each node so that all others reach it, or why there is none.

    `times[i][j]`: seconds by address of rank j, as rank i reached them.
    """
    wanted = next(
        (deployment.engine.variables[name] for name in INTERFACE_VARIABLES if deployment.engine.env.get(name)),
        deployment.hardware.subnet,
    )
    options: list[list[Interface]] = []
    for node in nodes:
        others = [other for other in nodes if other.rank != node.rank]
        reached_by = {other.name: set(times.get(other.rank, {}).get(node.rank, ())) for other in others}
        usable = [
            interface
            for interface in node.check.facts.interfaces
            if all(interface.address in addresses for addresses in reached_by.values())
        ]
        chosen = [interface for interface in usable if wanted is None or is_wanted(interface, wanted)]
        if not chosen:
            return [_unreached(node, reached_by, usable, wanted)], None
        options.append(chosen)
    route = Route(tuple(nodes), tuple(best_of(options)))
    ways = ", ".join(
        f"{node.name} {interface.address} ({interface.name})"
        for node, interface in zip(nodes, route.interfaces, strict=True)
    )
    return [Finding("network", "ok", f"all nodes reach each other: {ways}"), *_mtu(route), _far(route, times)], route


def _mtu(route: Route) -> Iterator[Finding]:
    """Connections open over interfaces of several MTUs; large messages may then never arrive."""
    sizes = {node.name: row.mtu for node, row in zip(route.nodes, route.interfaces, strict=True) if row.mtu}
    if len(set(sizes.values())) > 1:
        text = f"packets have several sizes (MTU): {', '.join(f'{name} {mtu}' for name, mtu in sizes.items())}"
        cure = f"Set one MTU on all: ip link set dev {route.interfaces[0].name} mtu {min(sizes.values())}"
        yield Finding("network", "warning", text, cure)


def _unreached(
    node: SurveyedNode, reached_by: Mapping[str, set[str]], usable: Sequence[Interface], wanted: str | None
) -> Finding:
    interfaces = [interface for interface in node.check.facts.interfaces if not interface.is_loopback]
    addresses = ", ".join(f"{interface.address} ({interface.name})" for interface in interfaces) or "none but loopback"
    blind = [name for name, found in reached_by.items() if not found]
    if usable:
        others = ", ".join(f"{interface.address} ({interface.name})" for interface in usable)
        which = f"in {wanted}" if "/" in (wanted or "") else wanted
        return Finding(
            "network",
            "bad",
            f"no interface {which} of {node.name} is reached by the other nodes (it has {addresses})",
            f"change hardware.network or NCCL_SOCKET_IFNAME; those that are reached: {others}",
        )
    if blind:
        message = f"{node.name} (rank {node.rank}) is not reached from {', '.join(blind)}"
        return Finding("network", "bad", message, f"open the network between them; its addresses: {addresses}")
    message = f"{node.name} (rank {node.rank}) has no address that all other nodes reach"
    return Finding("network", "bad", message, f"its addresses: {addresses}; each of them is reached by some only")


def _far(route: Route, times: Mapping[int, Mapping[int, Mapping[str, float]]]) -> Finding:
    rows = []
    for node in route.nodes:
        for other, interface in zip(route.nodes, route.interfaces, strict=True):
            took_s = times.get(node.rank, {}).get(other.rank, {}).get(interface.address)
            if node.rank != other.rank and took_s is not None:
                rows.append((took_s, node.name, other.name))
    if not rows:
        return Finding("distance", "ok", "not measured")
    worst, least = max(rows), min(rows)
    text = f"a connection takes {worst[0] * 1e3:.2f} ms ({worst[1]} to {worst[2]})"
    if len(rows) > 2:
        text += f", at least {least[0] * 1e3:.2f} ms"
    cure = "Use nodes of one data centre, on one switch."
    return Finding("distance", "warning" if worst[0] > _FAR_S else "ok", text, cure)


def of_collective(result: Collective, route: Route) -> Finding:
    """The all-reduce that was measured, against the line rate of the interface."""
    names = "/".join(sorted({interface.name for interface in route.interfaces}))
    if result.error is not None or not result.sizes:
        return Finding(
            "all-reduce", "bad", f"{result.backend} over {names}: {result.error or 'no answer'}", _cure(result)
        )
    small, large = result.sizes[0], max(result.sizes, key=result.bus_gbs)
    where = f"over {names}" if result.n_nodes > 1 else "inside one node"
    text = (
        f"{result.backend}, {result.n_ranks} ranks {where}: bus bandwidth {result.bus_gbs(large):.2f} GB/s at "
        f"{show_bytes(large.n_bytes)}, {show_bytes(small.n_bytes)} in {show_seconds_fine(small.took_s)}"
    )
    if result.network and result.n_nodes > 1:
        text += f"; NCCL: {result.network}"
    if result.n_nodes == 1:
        return Finding("all-reduce", "ok", text)
    if (
        result.backend == "nccl"
        and any(interface.is_infiniband for interface in route.interfaces)
        and "Socket" in (result.network or "")
    ):
        cure = "Check NCCL_IB_HCA, the container's /dev/infiniband and ulimit -l: NCCL found no InfiniBand device."
        return Finding("all-reduce", "warning", f"{text}; it fell back to TCP", cure)
    line_gbs = min(((interface.speed_mbps or 0) / 8000 for interface in route.interfaces), default=0.0)
    least = _LITTLE_NCCL if result.backend == "nccl" else _LITTLE_GLOO
    if result.node_gbs(large) < least * line_gbs:
        cure = "Check the interface's errors (ip -s link), its MTU and its other traffic, or choose another interface."
        return Finding("all-reduce", "warning", f"{text}; the line rate is {line_gbs:g} GB/s", cure)
    return Finding("all-reduce", "ok", text)


def show_seconds_fine(seconds: float) -> str:
    """Times of collectives: 0.000342 -> "342 us", 0.0123 -> "12 ms"."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else show_seconds(seconds)


def _cure(result: Collective) -> str:
    error = result.error or ""
    if "import torch" in error:
        return "Install torch with the engine: it does not load there."
    if error.startswith("join"):
        return "Open all TCP ports between the nodes: rank 0, Gloo and NCCL choose their ports."
    return "Set NCCL_DEBUG=INFO in engine.env to see more; NCCL_SOCKET_IFNAME chooses the interface."


def measured_link(result: Collective) -> LinkFacts:
    """The measured network in the planner's terms: the rate of a machine, and the time of one hop."""
    large = max(result.sizes, key=result.node_gbs)
    hop_us = result.sizes[0].took_s * 1e6 / collective_hops(result.n_nodes)
    is_rdma = (result.network or "").startswith("IB")
    return LinkFacts(
        "measured",
        "penstock doctor",
        transport="rdma" if is_rdma else "tcp",
        gbs_measured_nccl=result.node_gbs(large),
        step_latency_us=(hop_us, hop_us),
    )


def inside(result: Collective, machine: Machine) -> Finding | None:
    """The GPUs of one machine against the planner's assumption. None without a measurement.

    H200, 2 ranks, 256 MiB: 897 us measured on 2026-11-20.
    """
    if not result.sizes or not machine.gpus:
        return None
    card = planning.card_of(machine.gpus)
    card = card if machine.links is None else rewired(card, machine.links)
    large = result.sizes[-1]
    assumed_us = allreduce_us(Fabric(card, result.n_ranks), result.n_ranks, large.n_bytes).likely
    text = (
        f"{show_bytes(large.n_bytes)} between the {result.n_ranks} GPUs takes {show_seconds_fine(large.took_s)}, "
        f"the plan assumes {show_seconds_fine(assumed_us / 1e6)} ({card.id})"
    )
    is_slow = large.took_s * 1e6 > _BROKEN * assumed_us
    cure = "Look for links that are down (nvidia-smi topo -m), or peer-to-peer that is off (IOMMU, ACS)."
    return Finding("planner", "warning" if is_slow else "ok", text, cure)


def on_cpus(result: Collective, layout: Parallel | None, n_layers: int) -> Finding | None:
    """The cost of the network where speed is not planned: the all-reduces of a split by tensor over nodes."""
    if not result.sizes or layout is None or result.n_nodes < 2:
        return None
    small = result.sizes[0]
    each = f"{show_bytes(small.n_bytes)} all-reduce takes {show_seconds_fine(small.took_s)}"
    if layout.tensor * layout.data <= layout.n_ranks // result.n_nodes:
        text = f"a {each}; this plan splits by pipeline over nodes, which sends once per token and stage"
        return Finding("planner", "ok", text)
    # Two in every layer (attention, MLP) and one after the embedding: 81 in a model of 40 layers.
    n_times = 2 * n_layers + 1
    took_s = n_times * small.took_s
    text = (
        f"a {each}, a token waits for {n_times} of them: {show_seconds_fine(took_s)} per token (an estimate); "
        f"by pipeline it would wait for {result.n_nodes - 1} hand-over(s)"
    )
    cure = f"parallel: {{tensor: 1, pipeline: {layout.n_ranks}}} may be faster."
    return Finding("planner", "warning" if took_s > 0.05 else "ok", text, cure)


def planned(
    deployment: Deployment, whole: Facts, machine: Machine, version: str, n_replicas: int, result: Collective
) -> Finding | None:
    """The planner's answer with the measured network, next to that with the assumed one; None without a speed."""
    link = measured_link(result)

    def ask(asked: Deployment, network: LinkFacts | None) -> Sizing | None:
        try:
            return planning.size(asked, whole, machine, version, n_replicas, network).sizing
        except PenstockError:
            return None

    before, after = ask(deployment, None), ask(deployment, link)
    free = ask(msgspec.structs.replace(deployment, parallel="auto"), link)
    if before is None or after is None or before.speed is None or after.speed is None:
        return None
    was, now = before.speed.tpot_ms.likely, after.speed.tpot_ms.likely
    named = catalog.link(deployment.hardware.link) if deployment.hardware.link else None
    fabric = Fabric(planning.card_of(machine.gpus), max(1, len(machine.gpus)), deployment.hardware.nodes, named)
    kind = named.id if named is not None else "no network is named: ten-gigabit Ethernet"
    text = (
        f"{link.gbs_measured_nccl or 0:.1f} GB/s per node measured, the plan assumed {node_gbs(fabric):.1f} ({kind}): "
        f"TPOT {now:.1f} ms instead of {was:.1f} ms (estimates)"
    )
    if free is not None and free.layout is not None and free.layout != after.layout:
        better, fix = _better(free.layout, len(machine.gpus))
        return Finding("planner", "warning", f"{text}; {better}", fix)
    cure = "Fix the network, correct hardware.network, or split by pipeline over nodes."
    return Finding("planner", "warning" if now > was * _SLOWER else "ok", text, cure)


def _better(cut: Parallel, gpus_per_node: int) -> tuple[str, str]:
    words = f"tensor {cut.tensor}, pipeline {cut.pipeline}, data {cut.data}"
    if cut.n_ranks <= gpus_per_node:
        return (
            f"one node alone is faster with this network ({words})",
            "hardware.nodes: 1 and more replicas, or fix the network.",
        )
    return (
        f"the better layout over this network is {words}",
        f"parallel: {{tensor: {cut.tensor}, pipeline: {cut.pipeline}, data: {cut.data}}}, or fix the network.",
    )
