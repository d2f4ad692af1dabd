"""Times of collectives: measured tables inside a machine, hops and bandwidth between machines. Microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.hardware.catalog import AllReduce, GpuFacts, LinkFacts
from penstock.planner.ranges import Range, exact

# One hop of a collective between machines, by how NCCL drives the link; for links whose row has no measured value.
# rdma: NCCL's tuning model (src/graph/tuning.cc, hwLat for NET). efa, tcp: estimates.
_HOP_US: Mapping[str, Range] = {
    "nvlink": Range(1, 2, 4),
    "pcie": Range(2, 4, 8),
    "rdma": Range(4, 8.5, 28),
    "efa": Range(10, 25, 60),
    "tcp": Range(60, 330, 580),
}
# Where in a row's measured interval the likely value is: without CUDA graphs, and in a captured graph.
_EAGER_SHARE, _CAPTURED_SHARE = 0.65, 0.0
# The message (8 x 5120 x 2 bytes) that measured hops were measured with: only what is beyond it costs bandwidth.
_MEASURED_BYTES = 80 * 1024
# A network that is not named: ten-gigabit Ethernet over TCP.
_UNKNOWN_GBS = 1.25
_IN_STEP_US = 1.5  # on top of a table's time inside a model's step: launch, and waiting for the slowest rank
_FITTED_US, _KERNEL_US = 13.5, 5.0  # the fit's all-reduce in all, and the kernel's part of it
COMM_EFFICIENCY = 0.61  # bandwidth inside a step against the nominal link rate
_SMALL, _MIDDLE = 16 * 1024, 2**20


class Fabric(msgspec.Struct, frozen=True):
    """Equal machines and what joins them. `network` None: not named; ten-gigabit TCP is assumed."""

    gpu: GpuFacts
    gpus_per_node: int
    n_nodes: int = 1
    network: LinkFacts | None = None

    @property
    def n_gpus(self) -> int:
        return self.gpus_per_node * self.n_nodes

    @property
    def domain_gpus(self) -> int:
        """GPUs joined by the fast link: one node's, or an NVLink rack's (GB200: 72 over 18 nodes of 4)."""
        nvlink = self.gpu.nvlink
        if nvlink and nvlink.domain_gpus and self.gpus_per_node == nvlink.gpus_per_host:
            return min(self.n_gpus, nvlink.domain_gpus)
        return self.gpus_per_node

    def n_domains(self, n_ranks: int, n_groups: int = 1) -> int:
        """Fast link domains that the worst of `n_groups` groups of neighbouring ranks touches.
        On machines of 6, one group of 4 stays inside, of two the second straddles."""
        size = self.domain_gpus
        if n_ranks > size:
            return math.ceil(n_ranks / size)
        firsts = (n_ranks * group for group in range(min(n_groups, size)))
        straddles = any(first // size != (first + n_ranks - 1) // size for first in firsts)
        return 2 if straddles else 1


def hop_us(fabric: Fabric, *, is_captured: bool = True) -> Range:
    """One hop between machines, microseconds.  pod-network-tcp: 370-580 measured, in a CUDA graph 370 likely."""
    link = fabric.network
    if link is None:
        return _HOP_US["tcp"]
    if link.step_latency_us is not None:
        low, high = link.step_latency_us
        return Range(low, low + (high - low) * (_CAPTURED_SHARE if is_captured else _EAGER_SHARE), high)
    return _HOP_US[link.transport]


def node_gbs(fabric: Fabric) -> float:
    """GB/s in one direction that a whole machine gets into the network with NCCL: measured, or nominal x 0.61.
    NVLink machines have an RDMA card for every GPU; other cards count once a machine."""
    link, per_node = fabric.network, fabric.gpus_per_node
    if link is None:
        return _UNKNOWN_GBS * COMM_EFFICIENCY
    measured = link.gbs_measured_nccl or link.plan_gbs
    if measured:
        return measured
    if link.gbs_per_dir_per_node:
        return link.gbs_per_dir_per_node * COMM_EFFICIENCY
    per_gpu = link.gbs_per_gpu or link.gbs_per_dir_per_gpu
    if per_gpu:
        return per_gpu * per_node * COMM_EFFICIENCY
    has_card_each = link.transport == "rdma" and fabric.gpu.nvlink is not None
    return (link.gbs_per_dir or _UNKNOWN_GBS) * (per_node if has_card_each else 1) * COMM_EFFICIENCY


def allreduce_us(fabric: Fabric, n_ranks: int, n_bytes: float, n_groups: int = 1, *, is_captured: bool = True) -> Range:
    """An all-reduce of `n_bytes` over neighbouring ranks, `n_groups` at once, in microseconds; 0 for one rank.
    Over m machines: inside each, then between them, each passing 2(m-1)/m of the message (a ring, or a tree).
    H100, 8 ranks, 16 KiB: 5.2 + 1.5 = 6.7 us likely. Two one-GPU pods, 80 KiB: 2 hops x 370 = 740 us."""
    if n_ranks == 1:
        return Range(0, 0, 0)
    n_domains = fabric.n_domains(n_ranks, n_groups)
    inside = _inside_us(fabric.gpu, math.ceil(n_ranks / n_domains), n_bytes)
    if n_domains == 1:
        return inside
    hop, n_hops = hop_us(fabric, is_captured=is_captured), collective_hops(n_domains)
    is_measured = fabric.network is not None and fabric.network.step_latency_us is not None
    beyond = max(0.0, n_bytes - _MEASURED_BYTES) if is_measured else n_bytes
    return inside + hop * n_hops + exact(beyond * 2 * (n_domains - 1) / n_domains / (node_gbs(fabric) * 1e3))


def collective_hops(n: int) -> int:
    """Network hops of an all-reduce over n machines: the fewer of a ring's 2(n-1) and a tree's 2 log2 n."""
    return 0 if n < 2 else min(2 * (n - 1), 2 * math.ceil(math.log2(n)))


def all_to_all_us(fabric: Fabric, n_ranks: int, n_bytes: float, *, is_captured: bool = True) -> Range:
    """Every rank sends `n_bytes` in all, spread evenly over the others (expert dispatch or combine). Microseconds."""
    if n_ranks == 1:
        return Range(0, 0, 0)
    n_domains = fabric.n_domains(n_ranks)
    table = _table(fabric.gpu)
    inside = n_bytes / n_domains / (fabric.gpu.peer_gbs * COMM_EFFICIENCY * 1e3)
    start = _by_ranks(table.us_16KiB, min(n_ranks, fabric.domain_gpus)) + _IN_STEP_US
    if n_domains == 1:
        return Range(0.7 * start + inside, start + inside, 2 * start + inside)
    leaving = n_bytes * fabric.domain_gpus * (n_domains - 1) / n_domains / (node_gbs(fabric) * 1e3)
    hop = hop_us(fabric, is_captured=is_captured)
    return Range(hop.low, 2 * hop.likely, 2 * hop.high) + exact(start + inside + leaving)


def send_us(fabric: Fabric, n_bytes: float, *, is_between_nodes: bool) -> Range:
    """One pipeline stage hands `n_bytes` to the next, in microseconds; between machines one hop."""
    if not is_between_nodes:
        start = _table(fabric.gpu).us_16KiB[2]
        rate = _table(fabric.gpu).bus_gbs_large[2] * 1e3
        return Range(start + n_bytes / rate, start + _IN_STEP_US + n_bytes / rate, 3 * start + n_bytes / rate)
    return hop_us(fabric) + exact(n_bytes / (node_gbs(fabric) * 1e3))


def n_boundaries_between_nodes(fabric: Fabric, tensor: int, pipeline: int) -> int:
    """How many of the pipeline - 1 boundaries lie between two machines. 8 GPUs, TP 4, PP 4: one of three."""
    ends = [tensor * stage for stage in range(1, pipeline)]
    return sum(1 for end in ends if (end - 1) // fabric.domain_gpus != end // fabric.domain_gpus)


def _inside_us(gpu: GpuFacts, n_ranks: int, n_bytes: float) -> Range:
    if n_ranks == 1:
        return Range(0, 0, 0)
    likely = _table_us(_table(gpu), n_ranks, n_bytes)
    # Low: the kernel alone. High: the fit's 13.5 us and, for a table measured on another card, half as much again.
    borrowed = 1.5 if _table(gpu).borrowed_from else 1.0
    return Range(likely, likely + _IN_STEP_US, borrowed * likely + _FITTED_US - _KERNEL_US)


def _table(gpu: GpuFacts) -> AllReduce:
    assert gpu.allreduce is not None, f"{gpu.id} has no all-reduce table"
    return gpu.allreduce


def _table_us(table: AllReduce, n_ranks: int, n_bytes: float) -> float:
    small, middle = _by_ranks(table.us_16KiB, n_ranks), _by_ranks(table.us_1MiB, n_ranks)
    if n_bytes <= _SMALL:
        return small
    if n_bytes <= _MIDDLE:
        share = math.log(n_bytes / _SMALL) / math.log(_MIDDLE / _SMALL)
        return small * math.exp(share * math.log(middle / small))
    rate = _by_ranks(table.bus_gbs_large, n_ranks, is_rate=True) * 1e3
    return middle + (n_bytes - _MIDDLE) * 2 * (n_ranks - 1) / n_ranks / rate


def _by_ranks(row: Mapping[int, float], n_ranks: int, *, is_rate: bool = False) -> float:
    """Of the next measured number of GPUs; beyond the last, times grow with log2 n and rates stay."""
    known = sorted(row)
    for n in known:
        if n_ranks <= n:
            return row[n]
    last = known[-1]
    growth = 1.0 if is_rate else math.log2(n_ranks) / math.log2(last)
    return row[last] * growth
