"""`penstock metrics` without a Prometheus: its text, its refusals, the names."""

from __future__ import annotations

import math

from launching import call

from penstock.cli import metrics
from penstock.observe import queries
from penstock.observe.queries import Series

USUAL = {"deployment": "one", "instance": "127.0.0.1:1", "job": "penstock", "target": "local"}


def test_answers_of_every_kind_are_series() -> None:
    vector = {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [1.5, "NaN"]}]}
    (row,) = queries.series_of(vector)
    assert row.labels == {"a": "b"} and math.isnan(row.points[0][1])
    matrix = {"resultType": "matrix", "result": [{"metric": {}, "values": [[1, "2"], [3, "+Inf"]]}]}
    assert queries.series_of(matrix) == [Series({}, ((1.0, 2.0), (3.0, math.inf)))]
    assert queries.series_of({"resultType": "scalar", "result": [1, "7"]}) == [Series({}, ((1.0, 7.0),))]


def test_a_table_leaves_out_labels_that_are_the_same_everywhere() -> None:
    rows = [Series({"__name__": "up", **USUAL, "replica": name}, ((1.0, 1.0),)) for name in ("0", "1")]
    assert metrics.series_text(rows, is_range=False).splitlines() == [
        "SERIES         VALUE",
        "up{replica=0}      1",
        "up{replica=1}      1",
    ]
    mixed = [*rows, Series({"__name__": "up", **USUAL, "job": "engines"}, ((1.0, 0.0),))]
    assert "up{job=engines}" in metrics.series_text(mixed, is_range=False)
    hostile = metrics.series_text([Series({"model": 'x"}\n\x1b[31m{'}, ((1.0, 1.0),))], is_range=False)
    assert len(hostile.splitlines()) == 2 and "\x1b" not in hostile


def test_a_range_shows_its_bounds_and_its_course_with_gaps() -> None:
    row = Series({"model": "m"}, tuple((float(at), float(at)) for at in range(8)))
    line = metrics.series_text([row], is_range=True).splitlines()[1]
    assert line.split() == ["model=m", "7", "0", "7", "▁▂▃▄▅▆▇█"]
    assert len(metrics.blocks([float(at) for at in range(1000)])) <= 60
    assert metrics.blocks([1.0, math.nan, 1.0]) == "▁ ▁"
    assert metrics.blocks([math.inf]) == " " and metrics.blocks([]) == ""


def test_what_makes_no_sense_is_refused() -> None:
    for words, message in {
        "up --alerts": "cannot do a query and --alerts together",
        "--range 1h": "--range and --step are for a query",
        "up --step 15s": "--step needs --range",
        "up": "cannot choose a deployment: none runs",
    }.items():
        done = call("metrics", *words.split())
        assert done.code == 2 and message in done.err


def test_names_are_those_of_gateway_and_engines_with_their_old_ones() -> None:
    facts = call("metrics", "--names", "--json").json
    names = {row["name"] for row in facts["metrics"]}
    assert {"penstock_requests_total", "vllm:kv_cache_usage_perc"} <= names
    renamed = {"old": "vllm:gpu_cache_usage_perc", "name": "vllm:kv_cache_usage_perc", "source": "vllm"}
    assert renamed in facts["renames"]
    assert "vllm:gpu_cache_usage_perc" in call("metrics", "--names").out
