"""The charts of a report from runs of a load test: what is drawn, without drawing it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.bench.report.svg import Chart, Point, Series, thinned
from penstock.bench.results.folder import Request, Result
from penstock.bench.results.stats import percentile

_CDF_POINTS = 200
_MOST_DOTS = 1500
_TIMES = (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token"), ("e2el_ms", "whole request"))


def of_runs(runs: Sequence[Result]) -> list[Chart]:
    """All charts that the runs have rows for. Of several runs the distributions, of one its course too."""
    charts = [_cdf(runs, title, name) for name, title in _TIMES]
    charts.append(_gaps_cdf(runs))
    if len(runs) == 1:
        charts += [*_course(runs[0]), *_engine(runs[0])]
    return [chart for chart in charts if chart.has_points]


def curve(points: Sequence[tuple[str, float, Result]], label: str) -> list[Chart]:
    """Throughput against latency, and latency against what was offered: (layout, offered, run) of a sweep."""
    names = list(dict.fromkeys(name for name, _, _ in points))

    def lines(x: Callable[[float, Result], float | None], y: str) -> tuple[Series, ...]:
        series = []
        for name in names:
            own = [(x(offered, run), run.number(y)) for layout, offered, run in points if layout == name]
            pairs = sorted((a, b) for a, b in own if a is not None and b is not None)
            series.append(Series(name, tuple(pairs)))
        return tuple(series)

    charts = []
    for metric, words in (("p99_ttft_ms", "p99 TTFT, ms"), ("median_tpot_ms", "median TPOT, ms")):
        series = lines(lambda _, run: run.number("output_throughput"), metric)
        charts.append(Chart(f"throughput against {words.split(',')[0]}", "output tokens/s", words, series))
    series = lines(lambda offered, _: offered, "output_throughput")
    charts.append(Chart(f"output tokens/s by {label}", label, "output tokens/s", series))
    series = lines(lambda offered, _: offered, "p99_e2el_ms")
    charts.append(Chart(f"p99 of whole requests by {label}", label, "ms", series))
    return [chart for chart in charts if chart.has_points]


def _cdf(runs: Sequence[Result], title: str, name: str) -> Chart:
    series = []
    for run in runs:
        values = sorted(value for request in run.done if (value := getattr(request, name)) is not None)
        series.append(Series(run.name, _cdf_points(values)))
    return Chart(f"{title}: share of requests", "ms", "share", tuple(series), _is_wide(series), begins_at_zero=False)


def _gaps_cdf(runs: Sequence[Result]) -> Chart:
    """Tokens that came together have no gap: they count in the share, so a curve may begin above 0."""
    whole = [(run.name, _cdf_points(sorted(run.gaps))) for run in runs]
    series = [Series(name, tuple(point for point in points if point[0] > 0)) for name, points in whole]
    return Chart(
        "gaps between tokens: share of gaps", "ms", "share", tuple(series), _is_wide(series), begins_at_zero=False
    )


def _cdf_points(ordered: Sequence[float]) -> tuple[Point, ...]:
    if not ordered:
        return ()
    steps = min(_CDF_POINTS, len(ordered))
    return tuple((percentile(ordered, at / steps), at / steps) for at in range(steps + 1))


def _is_wide(series: Sequence[Series]) -> bool:
    values = [x for line in series for x, _ in line.points if x > 0]
    return bool(values) and max(values) > 50 * min(values)


def _course(run: Result) -> list[Chart]:
    ends = [request.end_s for request in run.requests if request.end_s is not None]
    if not ends:
        return []
    width = max(1.0, math.ceil(max(ends) / 120))
    n_slices = math.ceil(max(ends) / width) or 1

    def rate(times: Sequence[tuple[float, float]]) -> tuple[Point, ...]:
        sums = [0.0] * n_slices
        for at, amount in times:
            sums[min(n_slices - 1, max(0, int(at / width)))] += amount
        return tuple(((index + 0.5) * width, total / width) for index, total in enumerate(sums))

    done = [(request.end_s or 0.0, request) for request in run.done if request.end_s is not None]
    intended = Series("to be sent", rate([(request.intended_s, 1.0) for request in run.requests]))
    answered = Series("answered", rate([(at, 1.0) for at, _ in done]))
    failed = Series("failed", rate([(r.end_s or r.intended_s, 1.0) for r in run.requests if not r.is_ok]))
    lines = (intended, answered, failed) if len(run.done) < len(run.requests) else (intended, answered)
    counted = [(at, float(request.output_tokens)) for at, request in done if request.output_tokens is not None]
    # Some answers' tokens alone would be drawn as a lower rate.
    tokens = (Series("output tokens", rate(counted)),) if len(counted) == len(done) else ()
    dots = [(request.intended_s, request.ttft_ms) for request in run.done if request.ttft_ms is not None]
    in_flight = Series("in flight", _in_flight(run.requests, width, n_slices))
    first_tokens = Series("TTFT", thinned(dots, _MOST_DOTS), "dots")
    return [
        Chart("requests a second", "seconds", "requests/s", lines),
        Chart("output tokens a second, by when answers ended", "seconds", "tokens/s", tokens),
        Chart("requests in flight, mean of each slice", "seconds", "requests", (in_flight,)),
        Chart("time to first token, each request", "seconds", "ms", (first_tokens,)),
    ]


def _in_flight(requests: Sequence[Request], width: float, n_slices: int) -> tuple[Point, ...]:
    sums = [0.0] * n_slices
    for request in requests:
        begun, end = request.intended_s, request.end_s
        if end is None:
            continue
        for index in range(max(0, int(begun / width)), min(n_slices - 1, int(end / width)) + 1):
            sums[index] += max(0.0, min(end, (index + 1) * width) - max(begun, index * width))
    return tuple(((index + 0.5) * width, total / width) for index, total in enumerate(sums))


def _engine(run: Result) -> list[Chart]:
    sources = list(dict.fromkeys(row.source for row in run.engine))

    def series(column: str, words: str) -> list[Series]:
        lines = []
        for index, source in enumerate(sources):
            name = words if len(sources) == 1 else f"{words} {index + 1}"
            rows = [(row.time_s, row.values.get(column)) for row in run.engine if row.source == source]
            points = thinned([(time_s, value) for time_s, value in rows if value is not None])
            lines += [Series(name, points)] if points else []
        return lines

    both = (*series("running", "running"), *series("waiting", "waiting"))
    return [
        Chart("the engine: requests", "seconds", "requests", both),
        Chart("the engine: KV cache in use", "seconds", "share", tuple(series("kv_use", "KV cache"))),
    ]
