"""Bytes and seconds as people read them, flags as they write them. GiB is 2**30, GB is 10**9."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


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


def printable(text: str) -> str:
    """Untrusted text for a terminal: control characters become spaces, line ends stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)


def bare_flag(text: str) -> str:
    """One name for all ways to write a flag: "--max_model_len" -> "max-model-len"."""
    return text.lstrip("-").replace("_", "-")


def show_usd(value: float) -> str:
    """Dollars and cents, below a dollar down to a millionth: 1234.5 -> "$1,234.50", 0.000012 -> "$0.000012"."""
    if not value or value >= 1:
        return f"${value:,.2f}"
    whole, _, cents = f"{value:.6f}".partition(".")
    return f"${whole}.{cents.rstrip('0').ljust(2, '0')}"
