"""The table of all metrics: engines' pages as recorded are in it, and old names lead to present ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.engines.vllm import names as vllm_names
from penstock.observe import names
from penstock.testing.fake_engine.metrics import Metrics
from penstock.testing.fake_engine.options import Options
from penstock.wire import prometheus

GOLDEN = Path(__file__).parent / "golden"
TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
LABELS = re.compile(r'(\w+)="')


@pytest.mark.parametrize("page", ["vllm-0.32.0/metrics.txt", "llamacpp/metrics.txt"])
def test_the_table_has_every_family_of_a_recorded_page(page: str) -> None:
    text = (GOLDEN / page).read_text("utf-8")
    families = {row.name: row for row in names.rows()}
    for name, kind in TYPE.findall(text):
        if not name.endswith("_created"):
            assert families[name].kind == kind, name
    known = names.samples()
    for line in text.splitlines():
        name = re.split(r"[{ ]", line)[0]
        if line[0] != "#" and name in known and not name.endswith("_info"):  # whose labels are settings
            assert set(LABELS.findall(line)) - {"le"} <= set(known[name].labels), line


def test_the_fake_engine_speaks_names_of_the_table() -> None:
    shown = {name for name, _ in TYPE.findall(Metrics(Options(model="m")).page()) if name.startswith("vllm:")}
    assert shown and shown <= {row.name for row in names.rows()}


def test_names_are_unique_and_renames_lead_to_one_of_them() -> None:
    rows = names.rows()
    known = {row.name for row in rows}
    assert len(known) == len(rows)
    assert {row.source for row in rows} == {"penstock", "vllm", "llamacpp"}
    assert names.prefixes() == ("vllm:", "llamacpp:")
    assert all(rename.name in known and rename.old not in known for rename in names.renames())
    assert ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm") in names.renames()


def test_a_histogram_is_asked_for_by_its_parts() -> None:
    known = names.samples()
    assert known["vllm:time_to_first_token_seconds_bucket"].kind == "histogram"
    assert "vllm:time_to_first_token_seconds" not in known and "vllm:iteration_tokens_total_count" in known
    assert known["penstock_request_seconds_sum"].unit == "seconds"
    assert known["vllm:num_requests_running"].labels == ("replica", "node", "deployment", "model_name", "engine")


def test_series_of_a_page_are_summed_over_their_labels_and_other_lines_skipped() -> None:
    text = '# HELP a x\n# TYPE a counter\na{x="1"} 2\na{x="2",y="}"} 3.5\n\nb 1\n'
    assert prometheus.parse(text) == {"a": 5.5, "b": 1.0}
    assert prometheus.parse('a{x="1"} 1e3 1700000000\nb +Inf\n') == {"a": 1000.0, "b": float("inf")}
    assert prometheus.parse("a\nb x\nc{\nd{} \n<html>\ne 1") == {"e": 1.0}
    recorded = prometheus.parse((GOLDEN / "vllm-0.32.0/metrics.txt").read_text())
    watched = {vllm_names.RUNNING, vllm_names.WAITING, *vllm_names.ITERATIONS}
    assert watched <= recorded.keys(), "what penstock watches is in the metrics of real vLLM"
