"""Rates and quantiles of a deployment from differences of its counters, and an hour of them. Pure.

A `Sample` holds the counters at one moment. Rates compare the newest with one 5 s before it, quantiles with one a
minute before it. Times are of the monotonic clock: a step of the wall clock changes nothing. A counter that went back
(its worker or its engine was restarted) has not grown: no rate is negative, and none is the whole count.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.gateway.config import Slo
from penstock.gateway.metrics.cost import Spending, cost_between
from penstock.gateway.metrics.counters import Distribution, Family
from penstock.wire.announcement import EngineLoad, GatewayView
from penstock.wire.live import HISTORY_S, PERIOD_S, Cost, History, Rates

QUANTILE_S = 60.0
_SLACK_S = 0.5  # timers are late, never early
_ERRORS = frozenset(("broken", "no_replica", "late", "queue_full"))  # not what clients caused themselves
NO_REPLICA = "none"  # the series of answers that the gateway gave itself


class Buckets(NamedTuple):
    """A histogram by replica, and of all; `bounds` are upper ends."""

    bounds: tuple[float, ...]
    counts: dict[str, list[int]]
    total: list[int]


class EngineTokens(NamedTuple):
    """What an engine counted until `at_s`, by its node's clock; 0 where the node does not say."""

    prompt: float
    output: float
    cached: float
    at_s: float


class Sample(NamedTuple):
    """Counters at the time `at`. `engines`: by replica, where the engine reports them; `ledger`: tokens
    of prompts and answers by model."""

    at: float
    n_requests: float
    n_errors: float
    engines: dict[str, EngineTokens]
    ledger: dict[str, tuple[float, float]]
    ttft: Buckets
    itl: Buckets
    tpot: Buckets


def take_sample(
    families: Iterable[Family], distributions: Iterable[Distribution], view: GatewayView, at: float
) -> Sample:
    counts = dict(families)
    outcomes = [(dict(labels)["outcome"], n) for labels, n in counts.get("requests_total", {}).items()]
    tokens = {(dict(labels)["model"], dict(labels)["kind"]): n for labels, n in counts.get("tokens_total", {}).items()}
    histograms = {each[0]: each for each in distributions}
    loads = {row.announcement.replica: row.announcement.load for row in view.replicas}
    return Sample(
        at=at,
        n_requests=sum(n for _, n in outcomes),
        n_errors=sum(n for outcome, n in outcomes if outcome in _ERRORS),
        engines={name: _totals(load) for name, load in loads.items() if load is not None},
        ledger={model: (tokens.get((model, "prompt"), 0.0), tokens.get((model, "output"), 0.0)) for model, _ in tokens},
        ttft=_buckets(histograms, "time_to_first_token_seconds"),
        itl=_buckets(histograms, "chunk_gap_seconds"),
        tpot=_buckets(histograms, "time_per_output_token_seconds"),
    )


def _totals(load: EngineLoad) -> EngineTokens:
    return EngineTokens(*map(finite, (load.prompt_tokens, load.output_tokens, load.cached_tokens, load.at_s)))


def _buckets(histograms: Mapping[str, Distribution], name: str) -> Buckets:
    """A histogram whose models are added up; empty where there is none of that name."""
    _, bounds, samples = histograms.get(name, (name, (), {}))
    counts: dict[str, list[int]] = {}
    for labels, (row, _) in samples.items():
        replica = dict(labels)["replica"]
        if replica != NO_REPLICA:
            # A list of our own: the counters' grows on.
            counts[replica] = list(map(operator.add, counts[replica], row)) if replica in counts else [*row]
    return Buckets(bounds, counts, list(map(sum, zip(*counts.values(), strict=True))))


def finite(value: float) -> float:
    """0 for what is no number: an engine may report anything."""
    return value if math.isfinite(value) else 0.0


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the counts lie, interpolated in its bucket, as Prometheus does it.

    Above the last bound it is that bound. None without counts.

    >>> quantile((1.0, 2.0), (0, 10, 0), 0.5)
    1.5
    """
    rank, n_below = share * sum(counts), 0
    if rank == 0:
        return None
    for index, bound in enumerate(bounds):
        if n_below + counts[index] >= rank:
            start = bounds[index - 1] if index else 0.0
            return round(start + (bound - start) * (rank - n_below) / counts[index], 6)
        n_below += counts[index]
    return bounds[-1]


class Span:
    """What happened between two samples."""

    def __init__(self, older: Sample, newer: Sample) -> None:
        self._older, self._newer = older, newer
        self.seconds = newer.at - older.at

    def per_s(self, before: float, after: float) -> float:
        return _per_s(before, after, self.seconds)

    def requests_per_s(self) -> tuple[float, float]:
        """All, and those that failed."""
        older, newer = self._older, self._newer
        return self.per_s(older.n_requests, newer.n_requests), self.per_s(older.n_errors, newer.n_errors)

    def engine_tokens_per_s(self, replica: str) -> tuple[float, float] | None:
        """Of prompts and of answers, as the engine counts them; None where it does not, or has just come.

        Over the time between the node's readings: it reads every 2 s, and 5 s hold two of them or three.
        """
        before, after = self._older.engines.get(replica), self._newer.engines.get(replica)
        if before is None or after is None:
            return None
        seconds = after.at_s - before.at_s if before.at_s and after.at_s else self.seconds
        if seconds <= 0:
            return None
        return _per_s(before.prompt, after.prompt, seconds), _per_s(before.output, after.output, seconds)

    def cache_hits(self, replica: str) -> float | None:
        before, after = self._older.engines.get(replica), self._newer.engines.get(replica)
        if before is None or after is None or after.prompt <= before.prompt:
            return None
        return round(min(1.0, max(0.0, after.cached - before.cached) / (after.prompt - before.prompt)), 4)

    def ledger_tokens_per_s(self, model: str) -> tuple[float, float] | None:
        after = self._newer.ledger.get(model)
        if after is None:
            return None
        before = self._older.ledger.get(model, (0.0, 0.0))
        return self.per_s(before[0], after[0]), self.per_s(before[1], after[1])

    def ttft_s(self, replica: str | None = None) -> tuple[float | None, float | None]:
        """The median and the 99th percentile, of one replica or of all."""
        return _middle_and_tail(self._older.ttft, self._newer.ttft, replica)

    def itl_s(self, replica: str | None = None) -> tuple[float | None, float | None]:
        return _middle_and_tail(self._older.itl, self._newer.itl, replica)

    def kept(self, slo: Slo) -> Kept:
        """How many requests there were, and how many of them kept the promises."""
        ttft = _within(self._older.ttft, self._newer.ttft, slo.ttft_ms)
        return Kept(*ttft, *_within(self._older.tpot, self._newer.tpot, slo.tpot_ms))


def _per_s(before: float, after: float, seconds: float) -> float:
    return round(max(0.0, after - before) / seconds, 3) if seconds > 0 else 0.0


class Kept(NamedTuple):
    n_ttft: int = 0
    n_ttft_kept: int = 0
    n_tpot: int = 0
    n_tpot_kept: int = 0


def _growth(older: Buckets, newer: Buckets, replica: str | None) -> list[int]:
    before = older.total if replica is None else older.counts.get(replica, [])
    after = newer.total if replica is None else newer.counts.get(replica, [])
    return [max(0, n) for n in map(operator.sub, after, before)] if before else after


def _middle_and_tail(older: Buckets, newer: Buckets, replica: str | None) -> tuple[float | None, float | None]:
    counts = _growth(older, newer, replica)
    return quantile(newer.bounds, counts, 0.5), quantile(newer.bounds, counts, 0.99)


def _within(older: Buckets, newer: Buckets, bound_ms: float | None) -> tuple[int, int]:
    """All, and those at or under the promise: exact where it is a bound of the buckets, else those surely under it."""
    if bound_ms is None:
        return 0, 0
    counts = _growth(older, newer, None)
    return sum(counts), sum(counts[: bisect_right(newer.bounds, bound_ms / 1000)])


class _Row(NamedTuple):
    at: float
    rates: Rates
    kept: Kept
    spending: Spending


class LiveHistory:
    """The samples of the last minute, and a row for each PERIOD_S of the last hour."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._rows: deque[_Row] = deque(maxlen=round(HISTORY_S / PERIOD_S))
        self._last_row: Sample | None = None

    def is_row_due(self, now: float) -> bool:
        return self._last_row is None or now - self._last_row.at >= PERIOD_S - _SLACK_S

    def add(self, sample: Sample) -> None:
        """Keeps one sample a second for the rates, and one each PERIOD_S for the quantiles."""
        self._samples.append(sample)
        keep: list[Sample] = []
        for each in self._samples:
            age_s = sample.at - each.at
            is_recent = age_s <= PERIOD_S + 2 * _SLACK_S
            is_spaced = not keep or each.at - keep[-1].at >= PERIOD_S - _SLACK_S
            if age_s <= QUANTILE_S + PERIOD_S and (is_recent or is_spaced):
                keep.append(each)
        self._samples = deque(keep)

    def add_row(self, sample: Sample, rates: Rates, slo: Slo, spending: Spending) -> None:
        kept = Span(self._last_row, sample).kept(slo) if self._last_row is not None else Kept()
        self._last_row = sample
        self._rows.append(_Row(sample.at, rates, kept, spending))

    def span(self, newest: Sample, seconds: float) -> Span:
        """From the youngest sample that is at least so old, or the oldest, to `newest`."""
        older = newest
        for sample in self._samples:
            if older is newest or newest.at - sample.at >= seconds - _SLACK_S:
                older = sample
        return Span(older, newest)

    def kept(self) -> Kept:
        """Of the last hour."""
        columns = list(zip(*(row.kept for row in self._rows), strict=True))
        return Kept(*map(sum, columns)) if columns else Kept()

    def cost(self, gpu_hour_usd: float | None) -> Cost:
        """Of the last hour."""
        return cost_between(self._rows[0].spending, self._rows[-1].spending, gpu_hour_usd) if self._rows else Cost()

    def write(self, now: float, wall_s: float) -> History:
        """`wall_s`: the Unix time of `now`. The rows' times follow from it, so that they stand in order always."""
        columns = {name: [getattr(row.rates, name) for row in self._rows] for name in Rates.__struct_fields__}
        columns["at"] = [round(wall_s - (now - row.at), 3) for row in self._rows]
        return History(PERIOD_S, columns)
