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


def reference(trace: Trace, capacity: Capacity, ttft_s: float = TTFT_S) -> Reference:
    """The least constant number with 99% in time, and the cheapest plan of one family that has 98%.

    The family: at each second the replicas that the trace's work needs over a window, plus a reserve; a replica is
    ordered `start_s` before it is needed, and kept over pauses that are shorter than that.
    """
    numbers = range(1, _MOST_REPLICAS + 1)
    peak = 1 + bisect_left(
        numbers,
        _STATIC_ATTAINMENT,
        hi=len(numbers) - 1,
        key=lambda number: _of_constant(trace, capacity, number, ttft_s),
    )
    peak_hours = peak * trace.duration_s / 3600
    best = Reference(peak, peak_hours, peak_hours, _of_constant(trace, capacity, peak, ttft_s))
    for window_s in (10, 4):
        for reserve in (0.0, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0):
            plan = _plan(trace, capacity, window_s, reserve, peak)
            outcome = simulate(trace, _follow(plan), capacity, plan[0], ttft_s)
            share = attainment(outcome, ttft_s)
            if share >= _ORACLE_ATTAINMENT:
                if outcome.replica_hours < best.oracle_hours:
                    best = Reference(peak, peak_hours, outcome.replica_hours, share)
                break
    return best


def _of_constant(trace: Trace, capacity: Capacity, number: int, ttft_s: float) -> float:
    return attainment(simulate(trace, static(number), capacity, number, ttft_s), ttft_s)


def _plan(trace: Trace, capacity: Capacity, window_s: int, reserve: float, most: int) -> list[int]:
    """Replicas to have ordered at each second, by who knows all arrivals."""
    count = math.ceil(trace.duration_s)
    work = [0.0] * (count + 1)
    for arrival in trace.arrivals:
        seconds = arrival.prompt_tokens / capacity.prefill_tokens_s + arrival.output_tokens / capacity.decode_tokens_s
        work[min(count, int(arrival.t))] += seconds
    sums = [0.0]
    for seconds in work:
        sums.append(sums[-1] + seconds)
    means = [
        (sums[min(count, t + window_s)] - sums[max(0, t - window_s // 2)]) / (window_s + window_s // 2)
        for t in range(count)
    ]
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
