"""What is sent, and when: requests as planned, and schedules as offsets in seconds from the start.

An open loop sends by the clock; a closed loop (`concurrency`) sends the next request when one ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.errors import UserError

_MAX_RATE = 1e6


class PlannedRequest(msgspec.Struct, frozen=True):
    """What to ask, and when.

    `input_tokens`: by the model's tokenizer, None: not counted. `output_tokens`: the most. `wait_for`: the index of
    the request that must be answered first. `offset_s`: seconds from the start, where times are replayed.
    `model` and `headers`: instead of, and besides, those of the run. `n_off`: tokens more than the length asked for.
    """

    prompt: str | list[dict[str, Any]]
    input_tokens: int | None
    output_tokens: int
    wait_for: int | None = None
    offset_s: float | None = None
    model: str | None = None
    headers: dict[str, str] = {}
    n_off: int = 0


class Pace(msgspec.Struct, frozen=True):
    """How to send: at a `rate` (requests/s, open loop), at a `concurrency` (closed loop), or at a rate with at most so
    many in flight. Arrival "replay" takes its times from the requests.

    `burstiness` is gamma's shape k: 1 is Poisson, below 1 comes in bursts, above 1 is more even. `rate_from`: where a
    ramp starts; it reaches `rate` at its end. The run ends after `n_requests`, or sends none after `duration_s`.
    """

    rate: float | None = None
    concurrency: int | None = None
    arrival: str = "poisson"
    burstiness: float = 1.0
    rate_from: float = 0.0
    n_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.arrival == "replay"


def check(pace: Pace, replayed: Sequence[float | None] = ()) -> None:
    """Raises UserError for a pace that cannot be kept. `replayed`: the requests' own times."""
    if pace.arrival == "replay":
        if None in replayed:
            raise UserError(
                "cannot replay times: there are requests without one",
                hint="--dataset replay:FILE, or jsonl:FILE with an offset_s in every line.",
            )
        if pace.rate is not None:
            raise UserError("cannot replay times at a rate", hint="--arrival replay takes its times from the dataset.")
    elif pace.rate is None and pace.concurrency is None:
        raise UserError(
            "cannot choose a rate",
            hint="Give --rate R (requests/s, whatever the answers do) or --concurrency C (C at a time).",
        )
    _check_shape(pace)
    if pace.n_requests is None and pace.duration_s is None and pace.arrival != "replay":
        raise UserError("cannot decide when to end", hint="Give --requests N or --duration SECONDS.")
    if pace.rate is not None and not 0 < pace.rate <= _MAX_RATE:
        raise UserError(f"cannot send at {pace.rate:g} requests/s", hint="A rate above 0, at most 1000000.")
    if pace.arrival == "gamma" and not 0 < pace.burstiness <= 1e6:
        raise UserError(f"cannot use burstiness {pace.burstiness:g}", hint="Above 0; 1 is Poisson, below 1 bursts.")
    if pace.arrival == "ramp" and not 0 <= pace.rate_from <= _MAX_RATE:
        raise UserError(f"cannot ramp from {pace.rate_from:g} requests/s", hint="A rate from 0 on.")


def _check_shape(pace: Pace) -> None:
    if not pace.is_open and pace.arrival not in ("poisson", "constant"):
        raise UserError(
            f"cannot send at {pace.arrival} times with --concurrency",
            hint="--arrival, --burstiness and --rate-from shape an open loop: --rate R.",
        )
    if pace.burstiness != 1 and pace.arrival != "gamma":
        raise UserError(f"cannot use a burstiness with arrival {pace.arrival}", hint="--arrival gamma")
    if pace.rate_from != 0 and pace.arrival != "ramp":
        raise UserError(f"cannot start from another rate with arrival {pace.arrival}", hint="--arrival ramp")


def offsets(pace: Pace, replayed: Sequence[float] = ()) -> Iterator[float]:
    """The send times of an open loop, ascending; with the first gap before the first, but for "constant" and "replay".

    poisson: gaps exponential with mean 1/rate.  gamma: Gamma(k, 1/(rate k)).  constant: i/rate.  ramp: the i-th request
    when the integral of the rate has reached i.
    """
    times = _unbounded(pace, replayed)
    if pace.n_requests is not None:
        times = itertools.islice(times, pace.n_requests)
    if pace.duration_s is not None:
        end_s = pace.duration_s
        times = itertools.takewhile(lambda at_s: at_s < end_s, times)
    return times


def _unbounded(pace: Pace, replayed: Sequence[float]) -> Iterator[float]:
    if pace.arrival == "replay":
        return iter(replayed)
    rate = pace.rate
    assert rate is not None, "checked: an open loop has a rate"
    if pace.arrival == "constant":
        return (index / rate for index in itertools.count())
    if pace.arrival == "ramp":
        return _ramp(pace, rate)
    source = random.Random(pace.seed)
    shape = pace.burstiness if pace.arrival == "gamma" else 1.0
    gaps = (source.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
    return itertools.accumulate(gaps)


def _ramp(pace: Pace, rate: float) -> Iterator[float]:
    """Request i at the t where from*t + (to - from) t^2 / (2 T) = i; T is the duration, or what n_requests take.

    From 0 to 10 requests/s in 10 s: 50 requests, the 20th at sqrt(40) = 6.3246 s.
    """
    start = pace.rate_from
    if pace.duration_s is not None:
        length_s = pace.duration_s
    else:
        assert pace.n_requests is not None, "checked"
        length_s = 2 * pace.n_requests / (start + rate)
    slope = (rate - start) / length_s
    for index in itertools.count():
        if abs(slope) < 1e-12:
            yield index / rate
            continue
        inside = start * start + 2 * slope * index
        if inside < 0:
            return  # a falling ramp has reached 0
        at_s = ((inside**0.5) - start) / slope
        if at_s > length_s:
            return
        yield at_s
