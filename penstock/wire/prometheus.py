"""Reads Prometheus text. Series are summed over their labels: what is compared are totals of one process."""

from __future__ import annotations


def parse(text: str) -> dict[str, float]:
    """Sample name -> sum over its label sets: 'a{x="1"} 2\\na{x="2"} 3' gives {"a": 5.0}. Skips other lines."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        name, brace, rest = line.partition("{")
        if brace:
            value = rest.rpartition("}")[2]
        else:
            name, _, value = line.partition(" ")
        try:
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        except (ValueError, IndexError):
            continue
    return sums
