"""The numbers of a run; FORMULAS defines each. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

FORMULAS: Mapping[str, str] = {
    "ttft": "time of the first token event - start (streams only)",
    "tpot": "(time of the last token event - time of the first) / (output tokens - 1), from 2 tokens on",
    "itl": "every gap between token events that follow each other in one stream, of all requests together",
    "e2el": "streams: time of the last token event - start; whole answers: last byte - start",
    "start": "open loop: the intended send time, so that what waits in the generator counts; closed loop: the sending",
    "duration": "from the start of the run to the last byte of the last answer",
    "request_throughput": "completed requests / duration",
    "output_throughput": "output tokens of completed requests, by the server's usage / duration",
    "total_token_throughput": "(input + output tokens of completed requests, by usage) / duration",
    "request_goodput": "completed requests within every bound given / duration; failed ones are within none; "
    "unknown where an answer lacks a number that is bounded",
    "user_tokens_per_s": "(output tokens - 1) / (time of the last token event - time of the first), per request",
    "joules_per_token": "mean power of the deployment's GPUs while requests ran * duration / output tokens",
    "percentile": "linear interpolation between closest ranks (numpy's default)",
}
_SHARES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
METRICS = ("ttft", "tpot", "itl", "e2el")


class Timed(msgspec.Struct, frozen=True):
    """One request, measured. Times are seconds from the start of the run; token counts are the server's usage.

    `intended_s`: by the schedule; `asked_s`: when the generator came to it; `sent_s`: when a connection took it.
    Token events (none in whole answers): the first, the last, how many, the longest gap. `answered_s`: the first byte.
    """

    index: int
    intended_s: float
    asked_s: float
    sent_s: float
    end_s: float
    dial_s: float = 0.0
    answered_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    n_events: int = 0
    max_gap_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # among the input tokens
    n_bytes: int = 0
    status: int | None = None
    error: str | None = None
    detail: str = ""
    replica: str | None = None

    @property
    def last_s(self) -> float:
        """When the answer was there for its user: the last token, or the last byte of a whole answer."""
        return self.end_s if self.last_token_s is None else self.last_token_s

    def ttft_s(self, is_open: bool) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.start_s(is_open)

    def e2el_s(self, is_open: bool) -> float:
        return self.last_s - self.start_s(is_open)

    def start_s(self, is_open: bool) -> float:
        return self.intended_s if is_open else self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None below 2 output tokens, or 2 events.  11 tokens, first at 0.5 s, last at 1.0 s: 0.5 / 10 = 0.05."""
        if self.first_token_s is None or self.n_events < 2 or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_token_s) / (self.output_tokens - 1)


class TokenTimes:
    """The token events of all answers, as counts: of gaps by microseconds, and of events by seconds of the run."""

    def __init__(self) -> None:
        self.gaps_us: Counter[int] = Counter()
        self.n_by_second: Counter[int] = Counter()

    def add(self, times: Sequence[float]) -> None:
        self.gaps_us.update([round(gap * 1e6) for gap in gaps_s(times)])
        self.n_by_second.update(map(int, times))


class Spread(msgspec.Struct, frozen=True):
    """A distribution in milliseconds (or tokens/s for `user_tokens_per_s`). `std` is the population's, as numpy's."""

    n: int
    mean: float
    std: float
    min: float
    p10: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float
    chosen: dict[str, float] = {}


class Summary(msgspec.Struct, frozen=True):
    """The numbers of a run. A sum or rate of tokens is None where the server sent no usage."""

    completed: int
    failed: int
    unfinished: int
    duration: float
    total_input_tokens: int | None
    total_output_tokens: int | None
    request_throughput: float
    output_throughput: float | None
    total_token_throughput: float | None
    request_goodput: float | None
    goodput_share: float | None
    max_concurrent_requests: int
    max_output_tokens_per_s: float | None
    tokens_per_event: float | None
    events_per_read_share: float
    n_without_usage: int
    n_not_judged: int  # answers that may be within the bounds or not: a number that is bounded was not measured
    errors: dict[str, int]
    statuses: dict[str, int]
    replicas: dict[str, int]
    spreads: dict[str, Spread]
    user_tokens_per_s: Spread | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, interpolated: percentile([1, 2, 3, 4], 0.5) == 2.5.  NaN of none."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def gaps_s(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def spread(values: Iterable[float], scale: float = 1.0, chosen: Sequence[float] = ()) -> Spread | None:
    """The distribution of `values`, each times `scale`; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    n = len(ordered)
    mean = math.fsum(ordered) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / n)
    quantiles = {name: percentile(ordered, share) * scale for name, share in _SHARES.items()}
    more = {f"p{number:g}": percentile(ordered, number / 100) * scale for number in chosen}
    return Spread(n=n, mean=mean * scale, std=std * scale, **quantiles, chosen=more)


def spread_of_counts(counts: Mapping[int, int], scale: float, chosen: Sequence[float] = ()) -> Spread | None:
    """The same of values that are counted: {value: how often}."""
    values = sorted(counts)
    if not values:
        return None
    ends = list(itertools.accumulate(counts[value] for value in values))
    n = ends[-1]
    mean = sum(value * counts[value] for value in values) / n
    std = math.sqrt(math.fsum(counts[value] * (value - mean) ** 2 for value in values) / n)

    def quantile(share: float) -> float:
        place = (n - 1) * share
        below, above = (values[bisect.bisect_right(ends, rank)] for rank in (math.floor(place), math.ceil(place)))
        return below + (above - below) * (place - math.floor(place))

    quantiles = {name: quantile(share) * scale for name, share in _SHARES.items()}
    more = {f"p{number:g}": quantile(number / 100) * scale for number in chosen}
    return Spread(n=n, mean=mean * scale, std=std * scale, **quantiles, chosen=more)


def is_good(request: Timed, bounds_ms: Mapping[str, float], is_open: bool) -> bool | None:
    """Whether a completed request is within every bound; None where that was not measured.

    An answer whose tokens all came at once has no TPOT and no ITL, and one without a text no TTFT: nobody waited for
    them, and it keeps those bounds.
    """
    ttft_s = request.ttft_s(is_open)
    has_ms = {
        "ttft": None if ttft_s is None else ttft_s * 1000,
        "tpot": None if request.tpot_s is None else request.tpot_s * 1000,
        "itl": None if request.max_gap_s is None else request.max_gap_s * 1000,
        "e2el": request.e2el_s(is_open) * 1000,
    }
    bounded = {name: value for name, value in has_ms.items() if name in bounds_ms}
    if any(value is not None and value > bounds_ms[name] for name, value in bounded.items()):
        return False
    is_empty = not request.n_events and request.output_tokens is not None and request.output_tokens < 2
    may_lack = {"ttft", "tpot", "itl"} if is_empty else {"tpot", "itl"} if request.n_events == 1 else set()
    return None if any(value is None and name not in may_lack for name, value in bounded.items()) else True


def summarise(
    requests: Sequence[Timed],
    tokens: TokenTimes,
    is_open: bool,
    bounds_ms: Mapping[str, float],
    unfinished_kind: str = "unfinished",
    percentiles: Sequence[float] = (),
) -> Summary:
    """The numbers of a run. `tokens`: of completed requests; `bounds_ms`: goodput's, such as {"ttft": 2000.0}.

    `percentiles`: further ones of every latency, from 0 to 100.
    """
    whole = [request for request in requests if request.error is None]
    unfinished = sum(request.error == unfinished_kind for request in requests)
    failed = len(requests) - len(whole) - unfinished
    duration = max((request.end_s for request in requests), default=0.0)
    lists: dict[str, list[float]] = {
        "ttft": [value for request in whole if (value := request.ttft_s(is_open)) is not None],
        "tpot": [value for request in whole if (value := request.tpot_s) is not None],
        "e2el": [request.e2el_s(is_open) for request in whole],
    }
    spreads = {
        name: distribution
        for name, values in lists.items()
        if (distribution := spread(values, 1000.0, percentiles)) is not None
    }
    if gaps := spread_of_counts(tokens.gaps_us, 0.001, percentiles):
        spreads["itl"] = gaps
    n_input = _total([request.input_tokens for request in whole])
    n_output = _total([request.output_tokens for request in whole])
    kept = [is_good(request, bounds_ms, is_open) for request in whole] if bounds_ms else []
    n_not_judged = kept.count(None)
    good = kept.count(True) if bounds_ms and not n_not_judged else None
    n_counted = len(whole) + failed
    both = None if n_input is None or n_output is None else n_input + n_output
    per_event = _tokens_per_event(whole)
    return Summary(
        completed=len(whole),
        failed=failed,
        unfinished=unfinished,
        duration=duration,
        total_input_tokens=n_input,
        total_output_tokens=n_output,
        request_throughput=_rate(len(whole), duration) or 0.0,
        output_throughput=_rate(n_output, duration),
        total_token_throughput=_rate(both, duration),
        request_goodput=_rate(good, duration),
        goodput_share=None if good is None or not n_counted else good / n_counted,
        max_concurrent_requests=peak_concurrency(requests),
        max_output_tokens_per_s=None
        if per_event is None or not tokens.n_by_second
        else max(tokens.n_by_second.values()) * per_event,
        tokens_per_event=per_event,
        events_per_read_share=tokens.gaps_us[0] / gaps.n if gaps else 0.0,
        n_without_usage=sum(request.output_tokens is None for request in whole),
        n_not_judged=n_not_judged,
        errors=dict(Counter(request.error for request in requests if request.error is not None).most_common()),
        statuses={str(key): n for key, n in sorted(Counter(r.status for r in requests if r.status).items())},
        replicas=dict(sorted(Counter(r.replica for r in requests if r.replica).items())),
        spreads=spreads,
        user_tokens_per_s=spread(1 / value for request in whole if (value := request.tpot_s)),
    )


def peak_concurrency(requests: Sequence[Timed]) -> int:
    moments = sorted([(r.sent_s, 1) for r in requests] + [(r.end_s, -1) for r in requests])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def _total(counts: Sequence[int | None]) -> int | None:
    """None when one is missing: a sum without it would be a wrong number."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _rate(n: float | None, duration: float) -> float | None:
    return None if n is None else n / duration if duration > 0 else 0.0


def _tokens_per_event(whole: Sequence[Timed]) -> float | None:
    """Over the streams whose usage is known: above 1, several tokens come in one event, and an ITL is between those."""
    known = [(r.output_tokens, r.n_events) for r in whole if r.output_tokens is not None and r.n_events]
    n_events = sum(n for _, n in known)
    return sum(n for n, _ in known) / n_events if n_events else None
