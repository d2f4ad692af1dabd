"""The report: stands alone, is whole HTML, draws what the rows say, and tells predicted beside measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_samples import write_run

from penstock.bench import calibrate
from penstock.bench.report import figures, html, svg
from penstock.bench.report.svg import Chart, Series
from penstock.bench.results import folder
from penstock.bench.results.folder import Result

TTFT, TPOT = {"low": 70, "likely": 95, "high": 150}, {"low": 5, "likely": 6, "high": 7}
PLAN = {"speed": {"ttft_ms": TTFT, "tpot_ms": TPOT, "output_tokens_per_s": None, "requests_per_s": {"low": 1}}}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return folder.load(write_run(tmp_path_factory.mktemp("bench") / "one", 3))


class Page(HTMLParser):
    """Fails on a tag that is not closed, and keeps the words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.words = list[str](), list[str]()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_is_whole_needs_nothing_from_outside_and_shows_predicted_and_measured(one: Result) -> None:
    text = html.page([one], PLAN)
    Page(text)
    assert not re.search(r"<script|<link|src=|href=|@import|url\(", text)
    assert 'name="viewport"' in text and "@media print" in text and "prefers-color-scheme" in text
    assert "@media(max-width:600px)" in text and '<td data-name="p99">' in text  # a phone shows all columns
    words = " ".join(Page(html.page([one])).words)
    for shown in ("valid", "requests/s", "TTFT p99, ms", "time to first token, each request", "vllm 0.32.0", "8%"):
        assert shown in words
    assert html.number_text(one.number("p99_ttft_ms")) in words
    found = calibrate.pairs(one, PLAN)
    assert [pair.words for pair in found] == ["mean TTFT, ms", "mean TPOT, ms"]
    assert [pair.is_inside for pair in found] == [True, False]
    assert found[1].off == pytest.approx(6 / (one.number("mean_tpot_ms") or 1) - 1)
    assert "predicted is off by" in text and "predicted" not in words and calibrate.pairs(one, {"speed": None}) == []


def test_several_runs_stand_beside_each_other(one: Result, tmp_path: Path) -> None:
    why = ["late by 80 ms <p99>"]
    two = folder.load(write_run(tmp_path / "two & more", 4, valid=False, invalid_because=why))
    words = Page(html.page([one, two])).words
    assert "two & more" in words and "Side by side" in words and "not valid: late by 80 ms <p99>" in words
    (tmp_path / "result.json").write_text('{"completed": 3}')
    assert "Drawn" not in Page(html.page([folder.load(tmp_path)])).words  # a summary alone


def test_the_charts_of_a_run_say_what_its_rows_say(one: Result) -> None:
    found = {chart.title: chart for chart in figures.of_runs([one])}
    assert len(found) == 10
    cdf = found["time to first token: share of requests"].series[0].points
    assert cdf[0][1] == 0 and cdf[-1] == (one.number("max_ttft_ms"), 1.0)
    assert [y for _, y in cdf] == sorted(y for _, y in cdf)
    per_s = found["requests a second"].series
    assert [series.name for series in per_s] == ["to be sent", "answered", "failed"]
    assert sum(y for _, y in per_s[0].points) == pytest.approx(300)
    assert sum(y for _, y in per_s[2].points) == pytest.approx(6)
    in_flight = found["requests in flight, mean of each slice"].series[0].points
    # Little's law: the mean number in flight over the run is the sum of all stays over its length.
    stays = sum((request.end_s or 0) - request.intended_s for request in one.requests)
    assert sum(y for _, y in in_flight) * (in_flight[1][0] - in_flight[0][0]) == pytest.approx(stays)
    assert [series.name for series in found["the engine: requests"].series] == ["running", "waiting"]


def test_a_sweep_has_its_curve_and_its_table(one: Result) -> None:
    points = [html.SweepPoint("TP 1", rate, one, rate < 3, "p99_ttft_ms 700 is over 500") for rate in (4.0, 1.0)]
    words = Page(html.sweep_page(points, "requests/s", "p99_ttft at most 500 ms", ["TP 1: 2.9 requests/s"])).words
    assert "throughput against p99 TTFT" in words and "no: p99_ttft_ms 700 is over 500" in words
    assert Page(html.sweep_page([], "requests/s", "", [])).words


@pytest.mark.parametrize(
    "points", [(), ((0.0, 0.0),), ((5.0, 7.0), (5.0, 7.0)), ((-1.0, 2.0), (3.0, 1e9)), ((0.0, 1e-9), (1e-9, 2e-9))]
)
@pytest.mark.parametrize("is_log", [True, False])
def test_any_points_make_a_drawing_inside_its_frame(points: tuple[svg.Point, ...], is_log: bool) -> None:
    chart = Chart("a < b & c", "x", "y", (Series("one", points), Series("two", points, "dots")), is_log)
    root = ElementTree.fromstring(svg.svg(chart))
    for line in root.iter("polyline"):
        for pair in (line.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 460 and 0 <= y <= 290


def test_ticks_and_numbers_as_people_write_them() -> None:
    assert [svg.tick_text(value) for value in (0.5, 1500, 12000, 3e6)] == ["0.5", "1500", "12k", "3M"]
    few = svg.thinned(many := [(float(x), 0.0) for x in range(10_000)], 100)
    assert len(few) == 100 and few[0] == many[0] and few[-1] == many[-1]
    numbers = (None, 0.0312, 0.9, 12.345, 12345.6, 7.0)
    assert [html.number_text(value) for value in numbers] == ["-", "0.031", "0.90", "12.3", "12,346", "7"]
