"""Whether two measurements differ by more than noise: bootstrap intervals without drawing every sample again. Pure.

The k-th smallest of n values drawn with replacement from a sorted sample is the value at place floor(n * u), where u is
Beta(k, n - k + 1) distributed (David and Nagaraja, "Order Statistics", 2.1 and 7.3): one draw stands for a resample.

Requests that wait in one queue are slow together, so n is not their number but their effective sample size. For a
quantile it comes from batch means of "slower than it" (Law and Kelton, "Simulation Modeling and Analysis", 9.5.3), and
is itself drawn, since few batches know it badly. `benchmarks/bench_compare.py` checks the false verdicts on queues.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import msgspec

from penstock.bench.results.stats import percentile

RESAMPLES = 2000
LEVEL = 0.95
_MOST_LAGS = 50
_N_BATCHES = 14
# Below so many independent requests, or so many beyond a quantile, an interval is wrong too often.
_LEAST_INDEPENDENT = 10.0
_LEAST_BEYOND = 3.0
_MOST_PERSISTENCE = 0.1


class Interval(msgspec.Struct, frozen=True):
    """A number of A and of B, and the 95% interval of B - A."""

    a: float
    b: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        return self.low <= 0 <= self.high


def effective_sample_size(values: Sequence[float]) -> float:
    """How many independent values a series in order of time says as much as, from 2 to its length.

    n / (1 + 2 * sum of autocorrelations up to the first that is not above its own noise, 2 / sqrt(n)).
    """
    n = len(values)
    mean = statistics.fmean(values) if n else 0.0
    off = [value - mean for value in values]
    square = sum(value * value for value in off)
    if n < 3 or square <= 0:
        return float(n)
    total, threshold = 0.0, 2 / math.sqrt(n)
    for lag in range(1, min(_MOST_LAGS, n // 3) + 1):
        correlation = sum(map(float.__mul__, off[:-lag], off[lag:])) / square
        if correlation < threshold:
            break
        total += correlation
    return max(min(2.0, n), n / (1 + 2 * total))


def is_steady(values: Sequence[float]) -> bool:
    """Whether a series in order of time forgets within a tenth of its length: no queue or drift lasts for longer.

    By the mean autocorrelation of "above the median" at lags of 5 to 10% of the length.
    """
    n = len(values)
    median = percentile(sorted(values), 0.5)
    signs = [1.0 if value > median else -1.0 for value in values]
    mean = statistics.fmean(signs)
    signs = [sign - mean for sign in signs]
    square = sum(sign * sign for sign in signs)
    lags = {lag for k in range(5, 11) if (lag := n * k // 100) > 0}
    if not lags or square <= 0:
        return True
    return sum(sum(map(float.__mul__, signs[:-lag], signs[lag:])) for lag in lags) <= _MOST_PERSISTENCE * square * len(
        lags
    )


def batched_sample_size(flags: Sequence[bool]) -> float:
    """How many independent values a series of yes and no says as much as, by the variance of its batch means."""
    n = len(flags)
    size = n // _batches(n)
    means = [statistics.fmean(flags[at * size : (at + 1) * size]) for at in range(_batches(n))]
    share, variance = statistics.fmean(flags), statistics.variance(means) / len(means)
    return min(n, share * (1 - share) / variance) if variance > 0 else float(n)


def _batches(n: int) -> int:
    return max(2, min(_N_BATCHES, n // 2))


def _quantile_draws(values: Sequence[float], share: float, rng: random.Random) -> list[float] | None:
    """Bootstrap draws of a quantile of values that stand in order of time; None where too few are independent."""
    ordered = sorted(values)
    n = len(ordered)
    limit = percentile(ordered, share)
    n_independent = batched_sample_size([value > limit for value in values])
    if n_independent < _LEAST_INDEPENDENT or n_independent * (1 - share) < _LEAST_BEYOND:
        return None
    half = (_batches(n) - 1) / 2
    draws = []
    for _ in range(RESAMPLES):
        n_drawn = max(2.0, n_independent * rng.gammavariate(half, 1 / half))
        place = (n_drawn - 1) * share
        draws.append(ordered[min(n - 1, int(n * rng.betavariate(place + 1, n_drawn - place)))])
    return draws


def mean_draws(values: Sequence[float], rng: random.Random) -> list[float]:
    """Bootstrap draws of the mean of a few values that stand in order of time (a rate by slices of the run)."""
    n = len(values)
    mean = statistics.fmean(values)
    wider = math.sqrt(n / effective_sample_size(values))
    off = [(value - mean) * wider for value in values]
    return [mean + statistics.fmean(rng.choices(off, k=n)) for _ in range(RESAMPLES)]


def difference(a: float, b: float, draws_a: Sequence[float], draws_b: Sequence[float]) -> Interval:
    """The percentile interval of B - A from draws of both."""
    ordered = sorted(there - here for here, there in zip(draws_a, draws_b, strict=True))
    tail = (1 - LEVEL) / 2
    return Interval(a, b, percentile(ordered, tail), percentile(ordered, 1 - tail))


def quantile_difference(a: Sequence[float], b: Sequence[float], share: float, seed: int = 0) -> Interval | None:
    """How a quantile differs between two series in order of time; None where too few values are independent."""
    rng = random.Random(seed)
    draws_a, draws_b = _quantile_draws(a, share, rng), _quantile_draws(b, share, rng)
    if draws_a is None or draws_b is None:
        return None
    return difference(percentile(sorted(a), share), percentile(sorted(b), share), draws_a, draws_b)


def mean_difference(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval:
    """How a mean differs between two series in order of time; none is empty."""
    rng = random.Random(seed)
    return difference(statistics.fmean(a), statistics.fmean(b), mean_draws(a, rng), mean_draws(b, rng))


def by_slices(ends_s: Sequence[float], amounts: Sequence[float], duration_s: float) -> list[float]:
    """Amount a second in equal slices of a run: 5 to 60 of them, with about five events in each.

    Ends at 0.5, 1.5 and 1.6 s of 2 s with 1, 2, 3 tokens in two slices: [1.0, 5.0].
    """
    n_slices = max(5, min(60, len(ends_s) // 5))
    width = duration_s / n_slices
    sums = [0.0] * n_slices
    for end, amount in zip(ends_s, amounts, strict=True):
        sums[min(n_slices - 1, max(0, int(end / width)))] += amount
    return [total / width for total in sums]
