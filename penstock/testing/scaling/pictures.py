"""What is drawn of a simulation: replicas over the load, and the promises kept, both over time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.report.svg import Chart, Point, Series
from penstock.deployment.autoscale import Policy
from penstock.testing.scaling.comparison import OURS, Row
from penstock.testing.scaling.simulator import Outcome
from penstock.testing.scaling.traces import Trace

_MINUTE_S, _FIVE_MINUTES_S = 60.0, 300.0


def charts(trace: Trace, policy: Policy, rows: Sequence[Row]) -> tuple[Chart, Chart]:
    """Replicas that cost, of penstock and of the best other; and the share of each five minutes in time."""
    ours = next(row for row in rows if row.name == OURS)
    others = [row for row in rows if row is not ours and not row.name.startswith("always")]
    shown = [ours, *sorted(others, key=lambda row: -row.scores.attainment)[:1]]
    replicas = [Series("load", _load(trace, policy)), *(Series(row.name, _paid(row.outcome)) for row in shown)]
    kept = [Series(row.name, _in_time(row.outcome, policy.ttft_s)) for row in (ours, *others)]
    title = f"{trace.name}, start {policy.start_s:g} s"
    return (
        Chart(f"{title}: replicas", "minutes", "replicas", tuple(replicas)),
        Chart(f"{title}: first tokens in {policy.ttft_s:g} s", "minutes", "% in 5 min", tuple(kept)),
    )


def _load(trace: Trace, policy: Policy) -> tuple[Point, ...]:
    work: dict[int, float] = dict.fromkeys(range(int(trace.duration_s // _MINUTE_S) + 1), 0.0)
    for arrival in trace.arrivals:
        seconds = arrival.prompt_tokens / policy.prefill_tokens_s + arrival.output_tokens / policy.decode_tokens_s
        work[int(arrival.t // _MINUTE_S)] += seconds
    return tuple((float(minute), seconds / _MINUTE_S) for minute, seconds in work.items())


def _paid(outcome: Outcome) -> tuple[Point, ...]:
    """The corners of the steps."""
    points: list[Point] = []
    for second, number in enumerate(outcome.paid):
        if points and points[-1][1] == number and second < len(outcome.paid) - 1:
            continue
        if points and points[-1][1] != number:
            points.append((second / _MINUTE_S, points[-1][1]))
        points.append((second / _MINUTE_S, float(number)))
    return tuple(points)


def _in_time(outcome: Outcome, ttft_s: float) -> tuple[Point, ...]:
    rows: dict[int, list[int]] = {}
    for arrived, wait in zip(outcome.arrived_s, outcome.ttft_s, strict=True):
        row = rows.setdefault(int(arrived // _FIVE_MINUTES_S), [0, 0])
        row[0] += wait <= ttft_s
        row[1] += 1
    return tuple((index * 5.0, 100.0 * kept / total) for index, (kept, total) in sorted(rows.items()))
