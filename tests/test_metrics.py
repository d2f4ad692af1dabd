"""Prometheus text, read."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.vllm import names
from penstock.wire import prometheus

GOLDEN = Path(__file__).parent / "golden" / "vllm-0.32.0" / "metrics.txt"


def test_series_are_summed_over_their_labels_and_other_lines_skipped() -> None:
    text = '# HELP a x\n# TYPE a counter\na{x="1"} 2\na{x="2",y="}"} 3.5\n\nb 1\n'
    assert prometheus.parse(text) == {"a": 5.5, "b": 1.0}
    assert prometheus.parse('a{x="1"} 1e3 1700000000\nb +Inf\n') == {"a": 1000.0, "b": float("inf")}
    assert prometheus.parse("a\nb x\nc{\nd{} \n<html>\ne 1") == {"e": 1.0}


def test_what_penstock_watches_is_in_the_metrics_of_real_vllm() -> None:
    samples = prometheus.parse(GOLDEN.read_text())
    assert {names.RUNNING, names.WAITING, *names.ITERATIONS} <= samples.keys()
