"""Counters of the gateway and their Prometheus text, version 0.0.4. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
Labels take values from a bounded set: declared models, announced replicas (MAX_SERIES pairs, the rest are "other"),
status codes. Not prometheus_client: counting a request costs 0.8 us here, 3.2 to 6.3 us there (7.4 to 10.7 us in its
mode for several processes).
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Literal, get_args

from penstock.wire.announcement import GatewayView
from penstock.wire.metric_names import METRICS, PREFIX

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 1024

# Seconds. Gaps begin at a fast model's token and end where people think that it hangs.
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
OWN_S = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)

Outcome = Literal["complete", "client_gone", "broken", "no_replica", "queue_full", "late", "refused"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Labels = tuple[tuple[str, str], ...]
Family = tuple[str, Mapping[Labels, float]]  # a name of METRICS, values by labels
# A name of METRICS, upper ends of the buckets, and by labels the counts of the buckets and the sum.
Distribution = tuple[str, tuple[float, ...], Mapping[Labels, tuple[list[int], float]]]
# How several workers' values of one series make one; "each" is not in here: any of them does.
_JOINS: Final[dict[str, Callable[[float, float], float]]] = {"sum": operator.add, "least": min, "most": max}
_REFUSED = frozenset(("no_replica", "queue_full", "refused"))


class Histogram:
    """Counts per bucket; `bounds` are upper ends, inclusive."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """As `observe` of each: 30 ns a value, where that takes 150."""
        ordered, at = sorted(values), 0
        self.sum += sum(ordered)
        for index, bound in enumerate(self.bounds):
            end = bisect_right(ordered, bound, at)
            self.counts[index] += end - at
            at = end
            if end == len(ordered):
                return
        self.counts[-1] += len(ordered) - at

    def state(self) -> tuple[list[int], float]:
        return self.counts, self.sum


def with_bound(bounds: tuple[float, ...], promised_ms: float | None) -> tuple[float, ...]:
    """The bounds with a promise in milliseconds among them: the share of values within it is exact only at a bound."""
    return bounds if promised_ms is None else tuple(sorted({*bounds, promised_ms / 1000}))


class Series:
    __slots__ = ("codes", "duration_s", "first_byte_s", "first_token_s", "gap_s", "output_token_s")

    def __init__(self, first_token_bounds: tuple[float, ...], output_token_bounds: tuple[float, ...]) -> None:
        self.codes: Counter[int] = Counter()
        self.first_byte_s = Histogram(LATENCY_S)
        self.gap_s = Histogram(GAP_S)
        self.duration_s = Histogram(LATENCY_S)
        self.first_token_s = Histogram(first_token_bounds)
        self.output_token_s = Histogram(output_token_bounds)


class Counters:
    """Counts since the gateway started; every routed request has exactly one outcome.

    `own_s`: a request's time in the gateway, without waiting for a replica and without the engine.
    """

    def __init__(self, models: Iterable[str] = (), ttft_ms: float | None = None, tpot_ms: float | None = None) -> None:
        self.ttft_s = None if ttft_ms is None else ttft_ms / 1000
        self.first_token_bounds = with_bound(LATENCY_S, ttft_ms)
        self.output_token_bounds = with_bound(GAP_S, tpot_ms)
        self.n_requests = 0
        models = tuple(models)
        # From 0 on: what a series began with is no increase to Prometheus, so that it would miss the first failures.
        self.outcomes: Counter[tuple[str, Outcome]] = Counter(
            {(model, outcome): 0 for model in models for outcome in OUTCOMES}
        )
        self.retries: Counter[str] = Counter(dict.fromkeys(models, 0))
        self.n_connect_failures = 0
        # Bytes of bodies; and of requests with known usage, bytes and the prompt tokens that no cache had.
        self.n_body_bytes = self.n_known_bytes = self.n_known_tokens = 0
        self.own_s = Histogram(OWN_S)
        self.hold_s = defaultdict[str, Histogram](lambda: Histogram(LATENCY_S))  # by model
        self._series: dict[tuple[str, str], Series] = {}

    def n_ended(self) -> int:
        """Requests that ended, without those that their key's quota refused."""
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome != "refused")

    def n_served(self) -> int:
        """Requests that ended, without those that the gateway refused."""
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome not in _REFUSED)

    def series(self, model: str, replica: str) -> Series:
        """The counters of a declared model and a replica; "none" is the gateway itself."""
        series = self._series.get((model, replica))
        if series is None:
            name = replica if len(self._series) < MAX_SERIES else "other"
            series = Series(self.first_token_bounds, self.output_token_bounds)
            series = self._series.setdefault((model, name), series)
        return series

    def note_hold(self, model: str, hold_s: float) -> None:
        self.hold_s[model].observe(hold_s)

    def all_series(self) -> Iterator[tuple[Labels, Series]]:
        for (model, replica), series in self._series.items():
            yield (("model", model), ("replica", replica)), series


def families(
    counters: Counters,
    view: GatewayView,
    waiting: Mapping[str, int],
    ready: Mapping[str, int],
    ejections: Mapping[str, int],
) -> list[Family]:
    """`waiting` requests and `ready` replicas are by model and of now, `ejections` so far by replica."""
    in_flight: dict[Labels, float] = {
        (("model", row.announcement.model), ("replica", row.announcement.replica)): row.in_flight
        for row in view.replicas
    }
    codes: dict[Labels, float] = {
        (*labels, ("code", str(code))): n for labels, row in counters.all_series() for code, n in row.codes.items()
    }
    return [
        ("requests_total", {(("model", model), ("outcome", end)): n for (model, end), n in counters.outcomes.items()}),
        ("responses_total", codes),
        ("requests_in_flight", in_flight),
        ("requests_waiting", _by("model", waiting)),
        ("replicas_ready", _by("model", ready)),
        ("retries_total", _by("model", counters.retries)),
        ("ejections_total", _by("replica", ejections)),
        ("connect_failures_total", {(): counters.n_connect_failures}),
    ]


def distributions(counters: Counters) -> list[Distribution]:
    def by_series(name: str, bounds: tuple[float, ...], histogram: Callable[[Series], Histogram]) -> Distribution:
        return name, bounds, {labels: histogram(row).state() for labels, row in counters.all_series()}

    holds: dict[Labels, tuple[list[int], float]] = {
        (("model", model),): histogram.state() for model, histogram in counters.hold_s.items()
    }
    return [
        ("gateway_own_seconds", OWN_S, {(): counters.own_s.state()}),
        by_series("time_to_first_byte_seconds", LATENCY_S, lambda row: row.first_byte_s),
        by_series("chunk_gap_seconds", GAP_S, lambda row: row.gap_s),
        by_series("request_seconds", LATENCY_S, lambda row: row.duration_s),
        ("request_hold_seconds", LATENCY_S, holds),
        by_series("time_to_first_token_seconds", counters.first_token_bounds, lambda row: row.first_token_s),
        by_series("time_per_output_token_seconds", counters.output_token_bounds, lambda row: row.output_token_s),
    ]


def add_families(parts: Iterable[list[Family]]) -> list[Family]:
    families: dict[str, dict[Labels, float]] = {}
    for name, samples in itertools.chain.from_iterable(parts):
        if name not in families:
            families[name] = dict(samples)
        elif (join := _JOINS.get(METRICS[name].joined)) is not None:
            sums = families[name]
            for labels, value in samples.items():
                sums[labels] = join(sums[labels], value) if labels in sums else value
    return list(families.items())


def add_distributions(parts: Iterable[list[Distribution]]) -> list[Distribution]:
    merged: dict[str, tuple[tuple[float, ...], dict[Labels, tuple[list[int], float]]]] = {}
    for name, bounds, samples in itertools.chain.from_iterable(parts):
        sums = merged.setdefault(name, (bounds, {}))[1]
        for labels, (counts, total) in samples.items():
            counts_before, total_before = sums.get(labels, ([0] * len(counts), 0.0))
            sums[labels] = (list(map(operator.add, counts_before, counts)), total_before + total)
    return [(name, bounds, sums) for name, (bounds, sums) in merged.items()]


def write_metrics(counts: Iterable[Family], histograms: Iterable[Distribution]) -> bytes:
    parts = (*(_write(*family) for family in counts), *(_write_histograms(*one) for one in histograms))
    return "".join(line for part in parts for line in part).encode()


def _by(label: str, values: Mapping[str, int]) -> dict[Labels, float]:
    return {((label, name),): value for name, value in values.items()}


def _write_head(name: str) -> str:
    metric = METRICS[name]
    return f"# HELP {PREFIX}{name} {metric.about}\n# TYPE {PREFIX}{name} {metric.kind}\n"


def _write(name: str, samples: Mapping[Labels, float]) -> Iterable[str]:
    yield _write_head(name)
    for labels, value in samples.items():
        yield _write_sample(name, labels, value)


def _write_histograms(
    name: str, bounds: tuple[float, ...], samples: Mapping[Labels, tuple[list[int], float]]
) -> Iterable[str]:
    yield _write_head(name)
    for labels, (counts, total) in samples.items():
        n_so_far = 0
        for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
            n_so_far += count
            yield _write_sample(f"{name}_bucket", (*labels, ("le", bound)), n_so_far)
        yield _write_sample(f"{name}_sum", labels, total)
        yield _write_sample(f"{name}_count", labels, n_so_far)


def _write_sample(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{escape_label(text)}"' for key, text in labels)
    # Compiled, an int that is passed as a float becomes one; a count stays a count to its reader.
    number = int(value) if value == int(value) else value
    return f"{PREFIX}{name}{{{pairs}}} {number}\n" if pairs else f"{PREFIX}{name} {number}\n"


def escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
