"""Bytes and seconds as people write and read them. GiB is 2**30, GB is 10**9."""

from __future__ import annotations

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30

# https://physics.nist.gov/cuu/Units/binary.html: SI prefixes are decimal, IEC prefixes are binary. A bare
# K/M/G/T is binary here, as vLLM's own --kv-cache-memory-bytes reads it.
_BYTES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Bytes in "64M", "1.5 GiB", "2GB" or "1024". Raises ValueError for anything else."""
    return int(_parse(text, _BYTES, "bytes"))


def parse_seconds(text: str) -> float:
    """Seconds in "90", "250ms", "5m" or "1.5h". Raises ValueError for anything else."""
    return _parse(text, _SECONDS, "seconds")


def _parse(text: str, table: dict[str, float] | dict[str, int], what: str) -> float:
    match = _QUANTITY.match(text)
    factor = table.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a number of {what}")
    return float(match.group(1)) * factor


def show_bytes(n_bytes: float) -> str:
    """Binary units, one decimal below 100: 1536 -> "1.5 KiB", 7 -> "7 B"."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n_bytes) >= size:
            value = n_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """0.0123 -> "12 ms", 3.21 -> "3.2 s", 75 -> "1m15s", 7500 -> "2h05m", 200000 -> "2d07h"."""
    if seconds < 0.9995:  # what would be shown as 1000 ms, or below as 60.0 s, goes to the next unit
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = max(60, int(seconds))
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
