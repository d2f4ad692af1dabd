"""What a run is judged by, and the two numbers it is compared with: the future known, and as many replicas always."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from penstock.testing.scaling.baselines import static
from penstock.testing.scaling.simulator import Capacity, Outcome, Scaler, simulate
from penstock.testing.scaling.traces import Trace

TTFT_S = 2.0
_WORST_S = 300.0
# A constant number, and one that knows the future, keep the promise for so many of the requests.
_STATIC_ATTAINMENT, _ORACLE_ATTAINMENT = 0.99, 0.98
_MOST_REPLICAS = 64
_PEAK_WINDOW_S, _SPARE = 2, 2  # a constant number is at most what the busiest seconds bring, and two
_RESERVES = (0.0, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0)


class Reference(msgspec.Struct, frozen=True):
    """`peak`: replicas that keep the promise always. The oracle: replica-hours of who knows the future."""

    peak: int
    peak_hours: float
    oracle_hours: float
    oracle_attainment: float


class Scores(msgspec.Struct, frozen=True):
    """Shares of all requests (`worst`: of the worst five minutes), replica-hours, changes an hour, seconds."""

    attainment: float
    worst: float
    lost: int
    replica_hours: float
    per_peak: float
    per_oracle: float
    changes_per_hour: float
    hold_s_p99: float


def attainment(outcome: Outcome, ttft_s: float = TTFT_S) -> float:
    """The share of requests whose first token came in time; 1 without requests."""
    total = len(outcome.ttft_s) + outcome.lost
    return sum([wait <= ttft_s for wait in outcome.ttft_s]) / total if total else 1.0


def scores(outcome: Outcome, reference: Reference, ttft_s: float = TTFT_S) -> Scores:
    wanted = outcome.wanted
    changes = sum(first != second for first, second in itertools.pairwise(wanted))
    holds = sorted(outcome.hold_s)
    hours = outcome.replica_hours
    return Scores(
        attainment=attainment(outcome, ttft_s),
        worst=_worst(outcome, ttft_s),
        lost=outcome.lost,
        replica_hours=hours,
        per_peak=hours / reference.peak_hours,
        per_oracle=hours / reference.oracle_hours,
        changes_per_hour=changes / (outcome.duration_s / 3600),
        hold_s_p99=holds[int(len(holds) * 0.99)] if holds else 0.0,
    )


def _worst(outcome: Outcome, ttft_s: float) -> float:
    """The least attainment of a window of five minutes with at least 20 requests."""
    good: dict[int, list[int]] = {}
    for arrived, wait in zip(outcome.arrived_s, outcome.ttft_s, strict=True):
        row = good.setdefault(int(arrived // _WORST_S), [0, 0])
        row[0] += wait <= ttft_s
        row[1] += 1
    return min((kept / total for kept, total in good.values() if total >= 20), default=1.0)


def constant_peak(trace: Trace, capacity: Capacity, ttft_s: float = TTFT_S) -> int:
    """The least constant number of replicas with 99% in time; how long a start takes changes nothing."""
    numbers = range(1, _MOST_REPLICAS + 1)
    busiest = max(_mean_work(trace, capacity, _PEAK_WINDOW_S), default=0.0)
    most = min(len(numbers), math.ceil(busiest) + _SPARE)
    return 1 + bisect_left(
        numbers, _STATIC_ATTAINMENT, hi=most - 1, key=lambda number: _of_constant(trace, capacity, number, ttft_s)
    )


def reference(trace: Trace, capacity: Capacity, ttft_s: float = TTFT_S, peak: int | None = None) -> Reference:
    """The least constant number with 99% in time, where `peak` does not give it, and the cheapest plan of one family
    that has 98%.

    The family: at each second the replicas that the trace's work needs over a window, plus a reserve; a replica is
    ordered `start_s` before it is needed, and kept over pauses that are shorter than that.
    """
    peak = constant_peak(trace, capacity, ttft_s) if peak is None else peak
    peak_hours = peak * trace.duration_s / 3600
    best = Reference(peak, peak_hours, peak_hours, _STATIC_ATTAINMENT)
    for window_s in (10, 4):
        means = _mean_work(trace, capacity, window_s)

        def planned(reserve: float, means: Sequence[float] = means) -> Outcome:
            plan = _plan(means, capacity, reserve, peak)
            return simulate(trace, _follow(plan), capacity, plan[0], ttft_s)

        index = bisect_left(_RESERVES, _ORACLE_ATTAINMENT, key=lambda reserve: attainment(planned(reserve), ttft_s))
        if index < len(_RESERVES):
            outcome = planned(_RESERVES[index])
            if outcome.replica_hours < best.oracle_hours:
                best = Reference(peak, peak_hours, outcome.replica_hours, attainment(outcome, ttft_s))
    return best


def _of_constant(trace: Trace, capacity: Capacity, number: int, ttft_s: float) -> float:
    return attainment(simulate(trace, static(number), capacity, number, ttft_s), ttft_s)


def _mean_work(trace: Trace, capacity: Capacity, window_s: int) -> list[float]:
    """At each second the work of so many seconds after it and half as many before, in replicas."""
    count = math.ceil(trace.duration_s)
    work = [0.0] * (count + 1)
    for arrival in trace.arrivals:
        seconds = arrival.prompt_tokens / capacity.prefill_tokens_s + arrival.output_tokens / capacity.decode_tokens_s
        work[min(count, int(arrival.t))] += seconds
    sums = [0.0, *itertools.accumulate(work)]
    length = window_s + window_s // 2
    return [(sums[min(count, t + window_s)] - sums[max(0, t - window_s // 2)]) / length for t in range(count)]


def _plan(means: Sequence[float], capacity: Capacity, reserve: float, most: int) -> list[int]:
    """Replicas to have ordered at each second, by who knows all arrivals."""
    need = [min(most, max(1, math.ceil(mean + reserve * math.sqrt(mean)))) for mean in means]
    return _lead(need, math.ceil(capacity.start_s) + 1)


def _lead(need: Sequence[int], lead_s: int) -> list[int]:
    """Each need begins `lead_s` earlier, which closes the pauses that are shorter."""
    plan, begin = [0] * len(need), 0
    falling: list[int] = []  # seconds whose need is larger than that of all later ones within the window
    end = 0
    for begin in range(len(need)):
        while end < min(len(need), begin + lead_s + 1):
            while falling and need[falling[-1]] <= need[end]:
                falling.pop()
            falling.append(end)
            end += 1
        while falling[0] < begin:
            falling.pop(0)
        plan[begin] = need[falling[0]]
    return plan


def _follow(plan: Sequence[int]) -> Scaler:
    return lambda sample: plan[min(len(plan) - 1, int(sample.t))]
