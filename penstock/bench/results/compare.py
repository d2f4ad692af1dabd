"""What changed between two runs of a load test, and whether it is more than noise. Pure.

An interval sees the noise inside each run alone, not what differs between two starts of the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.bench.results import bootstrap, folder
from penstock.bench.results.folder import Request, Result
from penstock.bench.results.stats import percentile

Verdict = Literal["better", "worse", "no difference beyond noise", "unknown"]
_QUANTILES = ((0.5, "median"), (0.99, "p99"))
_TIMES = ("ttft_ms", "tpot_ms", "e2el_ms")
_LEAST = 8


class Change(msgspec.Struct, frozen=True):
    """One number of both runs by vLLM's name; the interval is of B - A, at 95%, None where it is unknown."""

    name: str
    a: float
    b: float
    low: float | None
    high: float | None
    verdict: Verdict

    @property
    def share(self) -> float | None:
        """The change in parts of A: 0.1 is a tenth more; None where A is 0."""
        return (self.b - self.a) / self.a if self.a else None


class Comparison(msgspec.Struct, frozen=True):
    """`unlike`: what differs besides the thing under test; `notes`: what to know before believing."""

    a: str
    b: str
    changes: tuple[Change, ...]
    unlike: tuple[str, ...]
    notes: tuple[str, ...]


def compare(a: Result, b: Result, seed: int = 0) -> Comparison:
    changes = [*_rates(a, b, seed), *_latencies(a, b, seed)]
    notes = [f"{run.name} is not valid: {run.invalid_because}" for run in (a, b) if run.invalid_because]
    if notes:
        changes = [Change(change.name, change.a, change.b, None, None, "unknown") for change in changes]
    elif unknown := [change.name for change in changes if change.verdict == "unknown"]:
        notes.append(
            f"unknown ({', '.join(unknown)}): too few requests are independent, since they waited together or the run "
            "drifts. Run longer, or at a lower load"
        )
    for run in (a, b):
        if any(None in (request.input_tokens, request.output_tokens) for request in run.done):
            notes.append(f"token rates are not compared: answers of {run.name} had no usage")
        if len(run.done) < _LEAST:
            notes.append(f"{run.name} has no usable rows in {folder.REQUESTS}")
        n_failed = len(run.requests) - len(run.done)
        if n_failed:
            notes.append(f"{n_failed} of {len(run.requests)} requests of {run.name} failed: its times leave them out")
    if changes:
        notes.append(f"{len(changes)} numbers are compared at 95% each: about one in twenty differs by chance alone")
    return Comparison(a.name, b.name, tuple(changes), tuple(folder.differences(a, b)), tuple(notes))


def text(comparison: Comparison) -> str:
    lines = [f"A  {comparison.a}", f"B  {comparison.b}", ""]
    if comparison.unlike:
        lines += ["not alike (compare like with like):", *(f"  {line}" for line in comparison.unlike), ""]
    if comparison.changes:
        lines.append(f"{'':26}{'A':>12}{'B':>12}{'B - A, 95% interval':>28}")
        for change in comparison.changes:
            share = "" if change.share is None else f"{change.share:+.1%} "
            interval = "" if change.low is None else f"{change.low:+.2f} to {change.high:+.2f}"
            lines.append(f"{change.name:26}{change.a:12.2f}{change.b:12.2f}{interval:>28}  {share}{change.verdict}")
        lines.append("")
    lines += [f"note: {note}" for note in comparison.notes]
    return "\n".join(lines).rstrip()


def _rates(a: Result, b: Result, seed: int) -> list[Change]:
    changes = []
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        slices = [_slices(run, name) for run in (a, b)]
        if all(slices):
            interval = bootstrap.mean_difference(slices[0], slices[1], seed)
            changes.append(_change(name, interval, is_more_better=True))
    return changes


def _slices(run: Result, name: str) -> list[float]:
    done = [request for request in run.done if request.end_s is not None]
    if len(done) < _LEAST:
        return []
    ends = [request.end_s or 0.0 for request in done]
    amounts = [amount for request in done if (amount := _amount(request, name)) is not None]
    if len(amounts) < len(done):
        return []
    duration_s = run.number("duration") or max(ends)
    return bootstrap.by_slices(ends, amounts, max(duration_s, max(ends), 1e-9))


def _amount(request: Request, name: str) -> float | None:
    """What a request adds to a rate; None where it was not counted."""
    if name == "request_throughput":
        return 1.0
    if request.output_tokens is None or name == "output_throughput":
        return request.output_tokens
    return None if request.input_tokens is None else request.input_tokens + request.output_tokens


def _latencies(a: Result, b: Result, seed: int) -> list[Change]:
    changes = []
    for time in _TIMES:
        both = [_times(run.done, time) for run in (a, b)]
        if any(len(values) < _LEAST for values in both):
            continue
        is_steady = all(map(bootstrap.is_steady, both))
        for share, word in _QUANTILES:
            name = f"{word}_{time}"
            interval = bootstrap.quantile_difference(both[0], both[1], share, seed) if is_steady else None
            if interval is not None:
                changes.append(_change(name, interval, is_more_better=False))
            else:
                here, there = (percentile(sorted(values), share) for values in both)
                changes.append(Change(name, here, there, None, None, "unknown"))
    return changes


def _times(requests: Sequence[Request], name: str) -> list[float]:
    """In order of sending: what waits together is slow together."""
    ordered = sorted(requests, key=lambda request: request.intended_s)
    return [value for request in ordered if (value := getattr(request, name)) is not None]


def _change(name: str, interval: bootstrap.Interval, is_more_better: bool) -> Change:
    verdict: Verdict = "no difference beyond noise"
    if not interval.is_noise:
        verdict = "better" if (interval.low > 0) == is_more_better else "worse"
    return Change(name, interval.a, interval.b, interval.low, interval.high, verdict)
