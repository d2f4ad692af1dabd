"""How long weights take to come from a disk, at best. Pure."""

from __future__ import annotations


def bytes_per_node(weights_bytes: int, n_nodes: int) -> int:
    """What a node must read of a checkpoint at least: its share.

    vLLM maps the files and copies what its ranks keep, so a cut over nodes reads less on each; matrices that are cut by
    columns touch every page all the same, so it may read up to the whole. 141 GB over 2 nodes: 70.5 GB at least.
    """
    return -(-weights_bytes // n_nodes)


def load_time_s(n_bytes_per_node: float, bytes_per_s: float) -> float:
    """Seconds to read that many bytes at a measured rate: no start loads faster, and most take longer.

    131 GiB at 2.0 GB/s: 140.7e9 / 2.0e9 = 70.3 s.
    """
    return n_bytes_per_node / bytes_per_s
