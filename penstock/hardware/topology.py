"""How the GPUs of one machine are joined, read from nvidia-smi, and the catalogue's card corrected by it. Pure.

`topo -m` gives what lies between each two GPUs, `topo -p2p r` which can read whose memory, `nvlink --status` the
rates."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping

from penstock.hardware import Links, catalog
from penstock.hardware.catalog import GpuFacts

_GPU = re.compile(r"GPU(\d+)\Z")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV(\d+)\Z")
_RATE = re.compile(r"Link \d+: ([\d.]+) GB/s")
# From near to far: https://docs.nvidia.com/deploy/nvidia-smi/ (topo -m). "PSB" is what older drivers call PXB.
_PCIE_WORDS = ("PIX", "PSB", "PXB", "PHB", "NODE", "SYS", "SOC")

Matrix = Mapping[tuple[int, int], str]


def parse_matrix(text: str) -> Matrix:
    """The word between each two GPUs of a table of `nvidia-smi topo`; empty when it has none.
    "GPU0 X NV18" under "GPU0 GPU1" -> {(0, 1): "NV18"}. Network cards and affinities are left out."""
    words_between: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ESCAPE.sub("", text).splitlines():
        words = line.split()
        numbers = [int(match[1]) for word in words if (match := _GPU.match(word))]
        if not columns and numbers and _GPU.match(words[0]) and "X" not in words:
            columns = numbers
        elif columns and words and (row := _GPU.match(words[0])):
            for column, word in zip(columns, words[1:], strict=False):
                if int(row[1]) != column:
                    words_between[int(row[1]), column] = word
    return words_between


def parse_rate(text: str) -> float | None:
    """GB/s in one direction of the GPU with the least NVLink: the sum of its active links. None when there are none."""
    rates = [math.fsum(map(float, _RATE.findall(part))) for part in re.split(r"(?m)^GPU ", _ESCAPE.sub("", text))[1:]]
    active = [rate for rate in rates if rate]
    return min(active) if active else None


def links_of(topology: Matrix, peers: Matrix, gbs: float | None, indices: Collection[int]) -> Links | None:
    """What joins the GPUs of these indices; None when the table lacks one."""
    gpus = sorted(indices)
    pairs = list(itertools.permutations(gpus, 2))
    if not gpus or any(pair not in topology for pair in pairs):
        return None
    joined = min(len(group) for group in _groups(gpus, topology))
    pcie = [topology[pair] for pair in pairs if topology[pair] in _PCIE_WORDS]
    can = {peers[pair] == "OK" for pair in pairs} if all(pair in peers for pair in pairs) else set[bool]()
    return Links(
        n_gpus=len(gpus),
        joined=joined,
        gbs=gbs if joined > 1 else None,
        farthest=max(pcie, key=_PCIE_WORDS.index) if pcie and joined < len(gpus) else None,
        has_peer_to_peer=all(can) if can else None,
    )


def rewired(gpu: GpuFacts, links: Links) -> GpuFacts:
    """The card as this machine joins it: without NVLink where there is none, or with a bridge's."""
    if links.joined >= links.n_gpus and (gpu.nvlink is not None or links.n_gpus == 1):
        return gpu
    plain = catalog.over_pcie(gpu)
    return catalog.bridged(plain, links.joined, links.gbs) if links.joined > 1 else plain


def _groups(gpus: list[int], topology: Matrix) -> list[set[int]]:
    """GPUs that NVLink joins, directly or through another: V100s in a cube are one group."""
    left, groups = set(gpus), []
    while left:
        group, new = set[int](), {min(left)}
        while new:
            group |= new
            new = {b for (a, b), way in topology.items() if a in group and b in left - group and _NVLINK.match(way)}
        groups.append(group)
        left -= group
    return groups
