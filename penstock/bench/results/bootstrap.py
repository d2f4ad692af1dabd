"""Whether two measurements differ by more than noise: bootstrap intervals, without drawing every sample again. Pure.

The k-th smallest of n values drawn with replacement from a sorted sample is the value at place floor(n * u), where u is
the k-th smallest of n uniform numbers, and that is Beta(k, n - k + 1) distributed (David and Nagaraja, "Order
Statistics", 2.1 and 7.3). So one draw from a Beta stands for a whole resample: 2,000 of them take milliseconds for a
million requests, and give what resampling would.

Requests of one run are not independent: those that wait in one queue are slow together. So n is not their number but
their effective sample size, n / (1 + 2 * sum of autocorrelations); for a quantile, that of "slower than it, or not".
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


def quantile_draws(values: Sequence[float], share: float, rng: random.Random) -> list[float]:
    """Bootstrap draws of a quantile of values that stand in order of time."""
    ordered = sorted(values)
    n = len(ordered)
    limit = percentile(ordered, share)
    n_effective = effective_sample_size([float(value > limit) for value in values])
    place = (n_effective - 1) * share
    draws = (rng.betavariate(place + 1, n_effective - place) for _ in range(RESAMPLES))
    return [ordered[min(n - 1, int(n * draw))] for draw in draws]


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


def quantile_difference(a: Sequence[float], b: Sequence[float], share: float, seed: int = 0) -> Interval:
    """How a quantile differs between two series in order of time; none is empty."""
    rng = random.Random(seed)
    quantiles = [percentile(sorted(values), share) for values in (a, b)]
    return difference(quantiles[0], quantiles[1], quantile_draws(a, share, rng), quantile_draws(b, share, rng))


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
