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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from penstock.wire.announcement import GatewayView

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 1024

# Seconds. Gaps begin at a fast model's token and end where people think that it hangs.
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
OWN_S = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)

Outcome = Literal["complete", "client_gone", "broken", "no_replica", "queue_full", "late", "refused"]
Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, str, Mapping[Labels, float]]  # name after "penstock_", kind, one line, values by labels
# Name, one line, upper ends of the buckets, and by labels the counts of the buckets and the sum.
Distribution = tuple[str, str, tuple[float, ...], Mapping[Labels, tuple[list[int], float]]]
_REFUSED = frozenset(("no_replica", "queue_full", "refused"))
# Of several workers these gauges are not a sum. The first is what each of them knows of all.
_KNOWN_TO_EACH = frozenset(("replicas_ready",))
_LEAST_COUNTS = frozenset(("store_up",))


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


class Series:
    __slots__ = ("codes", "duration_s", "first_byte_s", "gap_s")

    def __init__(self) -> None:
        self.codes: Counter[int] = Counter()
        self.first_byte_s = Histogram(LATENCY_S)
        self.gap_s = Histogram(GAP_S)
        self.duration_s = Histogram(LATENCY_S)


class Counters:
    """Counts since the gateway started; every routed request has exactly one outcome.

    `own_s`: a request's time in the gateway, without waiting for a replica and without the engine.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        self.n_requests = 0
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        self.retries: Counter[str] = Counter(dict.fromkeys(models, 0))
        self.n_connect_failures = 0
        self.own_s = Histogram(OWN_S)
        self._series: dict[tuple[str, str], Series] = {}

    def n_served(self) -> int:
        """Requests that ended, without those that the gateway refused."""
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome not in _REFUSED)

    def series(self, model: str, replica: str) -> Series:
        """The counters of a declared model and a replica; "none" is the gateway itself."""
        series = self._series.get((model, replica))
        if series is None:
            name = replica if len(self._series) < MAX_SERIES else "other"
            series = self._series.setdefault((model, name), Series())
        return series

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
    outcomes: dict[Labels, float] = {
        (("model", model), ("outcome", outcome)): n for (model, outcome), n in counters.outcomes.items()
    }
    codes: dict[Labels, float] = {
        (*labels, ("code", str(code))): n for labels, row in counters.all_series() for code, n in row.codes.items()
    }
    failures: dict[Labels, float] = {(): counters.n_connect_failures}
    return [
        ("requests_total", "counter", "Requests ended, by outcome.", outcomes),
        ("responses_total", "counter", "Responses begun, by status code.", codes),
        ("requests_in_flight", "gauge", "Requests on a replica now.", in_flight),
        ("requests_waiting", "gauge", "Requests held for a replica now.", _by("model", waiting)),
        ("replicas_ready", "gauge", "Replicas that get traffic now.", _by("model", ready)),
        ("retries_total", "counter", "Requests sent to an engine again.", _by("model", counters.retries)),
        ("ejections_total", "counter", "Replicas left out after failures.", _by("replica", ejections)),
        ("connect_failures_total", "counter", "Connections an engine refused.", failures),
    ]


def distributions(counters: Counters) -> list[Distribution]:
    rows = list(counters.all_series())
    first_byte = {labels: row.first_byte_s.state() for labels, row in rows}
    gaps = {labels: row.gap_s.state() for labels, row in rows}
    durations = {labels: row.duration_s.state() for labels, row in rows}
    first_byte_about = "From a request to the first byte of its answer's body."
    return [
        ("gateway_own_seconds", "Time in the gateway before an engine had it.", OWN_S, {(): counters.own_s.state()}),
        ("time_to_first_byte_seconds", first_byte_about, LATENCY_S, first_byte),
        ("chunk_gap_seconds", "Between two reads of a stream.", GAP_S, gaps),
        ("request_seconds", "From a request to the end of its answer.", LATENCY_S, durations),
    ]


def add_families(parts: Iterable[list[Family]]) -> list[Family]:
    families: dict[str, tuple[str, str, str, dict[Labels, float]]] = {}
    for name, kind, about, samples in itertools.chain.from_iterable(parts):
        if name not in families:
            families[name] = (name, kind, about, dict(samples))
        elif name not in _KNOWN_TO_EACH:
            sums = families[name][3]
            for labels, value in samples.items():
                before = sums.get(labels)
                if before is not None:
                    value = min(before, value) if name in _LEAST_COUNTS else before + value
                sums[labels] = value
    return list(families.values())


def add_distributions(parts: Iterable[list[Distribution]]) -> list[Distribution]:
    merged: dict[str, tuple[str, str, tuple[float, ...], dict[Labels, tuple[list[int], float]]]] = {}
    for name, about, bounds, samples in itertools.chain.from_iterable(parts):
        sums = merged.setdefault(name, (name, about, bounds, {}))[3]
        for labels, (counts, total) in samples.items():
            counts_before, total_before = sums.get(labels, ([0] * len(counts), 0.0))
            sums[labels] = (list(map(operator.add, counts_before, counts)), total_before + total)
    return list(merged.values())


def write_metrics(counts: Iterable[Family], histograms: Iterable[Distribution]) -> bytes:
    parts = (*(_write(*family) for family in counts), *(_write_histograms(*one) for one in histograms))
    return "".join(line for part in parts for line in part).encode()


def _by(label: str, values: Mapping[str, int]) -> dict[Labels, float]:
    return {((label, name),): value for name, value in values.items()}


def _write(name: str, kind: str, about: str, samples: Mapping[Labels, float]) -> Iterable[str]:
    yield f"# HELP penstock_{name} {about}\n# TYPE penstock_{name} {kind}\n"
    for labels, value in samples.items():
        yield _write_sample(name, labels, value)


def _write_histograms(
    name: str, about: str, bounds: tuple[float, ...], samples: Mapping[Labels, tuple[list[int], float]]
) -> Iterable[str]:
    yield f"# HELP penstock_{name} {about}\n# TYPE penstock_{name} histogram\n"
    for labels, (counts, total) in samples.items():
        n_so_far = 0
        for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
            n_so_far += count
            yield _write_sample(f"{name}_bucket", (*labels, ("le", bound)), n_so_far)
        yield _write_sample(f"{name}_sum", labels, total)
        yield _write_sample(f"{name}_count", labels, n_so_far)


def _write_sample(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
    # Compiled, an int that is passed as a float becomes one; a count stays a count to its reader.
    number = int(value) if value == int(value) else value
    return f"penstock_{name}{{{pairs}}} {number}\n" if pairs else f"penstock_{name} {number}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
