"""Bytes and seconds, read and written."""

from __future__ import annotations

import pytest

from penstock import units
from penstock.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024),
        ("7 B", 7),
        ("64M", 64 * MIB),
        ("64MiB", 64 * MIB),
        ("64 mb", 64_000_000),
        ("1.5 GiB", 1536 * MIB),
        ("2GB", 2_000_000_000),
        ("1t", 1024 * GIB),
        ("1TB", 10**12),
        (" 3k ", 3 * KIB),
        ("0", 0),
    ],
)
def test_bytes_are_read(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("250ms", 0.25), ("5m", 300), ("1.5h", 5400), ("2 d", 172_800), ("3s", 3)]
)
def test_seconds_are_read(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "1 2", "1.2.3", "5 parsecs", "GiB", "١"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        units.parse_bytes(text)
    with pytest.raises(ValueError, match="is not a number of seconds"):
        units.parse_seconds(text)


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(0, "0 B"), (7, "7 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 * MIB, "64.0 MiB"), (100 * MIB, "100 MiB")]
    + [(171.4 * GIB, "171 GiB"), (1.5 * 2**40, "1.5 TiB"), (-2 * GIB, "-2.0 GiB")],
)
def test_bytes_are_written(n_bytes: float, expected: str) -> None:
    assert units.show_bytes(n_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 ms"), (0.0123, "12 ms"), (0.9999, "1.0 s"), (3.21, "3.2 s"), (59.94, "59.9 s"), (59.97, "1m00s")]
    + [(75, "1m15s"), (3599.9, "59m59s"), (7500, "2h05m"), (200_000, "2d07h")],
)
def test_seconds_are_written(seconds: float, expected: str) -> None:
    assert units.show_seconds(seconds) == expected
