"""Bytes and seconds, as people read them."""

from __future__ import annotations

from penstock import text
from penstock.text import GIB, MIB


def test_bytes_are_written() -> None:
    shown = {0: "0 B", 7: "7 B", 1023: "1023 B", 1536: "1.5 KiB", 64 * MIB: "64.0 MiB", 100 * MIB: "100 MiB"}
    shown |= {int(171.4 * GIB): "171 GiB", 3 * 2**39: "1.5 TiB", -2 * GIB: "-2.0 GiB"}
    assert {n_bytes: text.show_bytes(n_bytes) for n_bytes in shown} == shown


def test_seconds_are_written() -> None:
    shown = {0: "0 ms", 0.0123: "12 ms", 0.9999: "1.0 s", 3.21: "3.2 s", 59.94: "59.9 s", 59.97: "1m00s", 75: "1m15s"}
    shown |= {3599.9: "59m59s", 7500: "2h05m", 200_000: "2d07h"}
    assert {seconds: text.show_seconds(seconds) for seconds in shown} == shown


def test_a_flag_has_one_name_however_it_is_written() -> None:
    assert text.bare_flag("--max_model_len") == text.bare_flag("max-model-len") == "max-model-len"


def test_money_is_dollars_and_cents() -> None:
    shown = {0: "$0.00", 1234.5: "$1,234.50", 0.5: "$0.50", 0.000012: "$0.000012", 0.0204: "$0.0204"}
    assert {value: text.show_usd(value) for value in shown} == shown
