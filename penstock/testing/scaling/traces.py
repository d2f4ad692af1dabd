"""Arrivals of requests: traces from files, and synthetic ones by name. Only times and lengths, no text.

All are deterministic: the same name and seed give the same requests.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import lzma
import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.errors import UserError

HOUR_S = 3600.0
_CODE = Path(__file__).parent / "data" / "azure-2023-code.csv.xz"
# Azure's conversations of 2023 have 1,155 tokens in and 211 out on average; a log-normal spread of 1 fits both.
_MEAN_PROMPT, _MEAN_OUTPUT, _SPREAD = 1155.0, 211.0, 1.0
_MOST_TOKENS = 8192
_N_LENGTHS = 4093
_PREFILL_TOKENS_S, _DECODE_TOKENS_S = 12_000.0, 1_500.0  # of the replica whose loads are meant
_N_RANDOM_LEVELS = 12


class Arrival(NamedTuple):
    """One request: seconds since the trace began, tokens."""

    t: float
    prompt_tokens: int
    output_tokens: int


class Trace(NamedTuple):
    """Arrivals in order of time, within `duration_s`."""

    name: str
    arrivals: tuple[Arrival, ...]
    duration_s: float


# ---- changes of a trace ----------------------------------------------------------------------------------------------


def scaled(trace: Trace, factor: float, seed: int = 0) -> Trace:
    """`factor` times as many requests in the same time. Each brings copies of its moment, within a second of it, with
    the lengths of others; below 1 some are left out."""
    if factor == 1 or not trace.arrivals:
        return trace
    draw = random.Random(seed)
    whole, rest = divmod(factor, 1.0)
    arrivals = []
    for arrival in trace.arrivals:
        copies = int(whole) + (draw.random() < rest)
        if copies:
            arrivals.append(arrival)
        for _ in range(copies - 1):
            other = trace.arrivals[int(draw.random() * len(trace.arrivals))]
            moment = min(max(arrival.t + draw.uniform(-1.0, 1.0), 0.0), trace.duration_s)
            arrivals.append(other._replace(t=moment))
    return trace._replace(arrivals=tuple(sorted(arrivals)))


def repeated(trace: Trace, duration_s: float) -> Trace:
    """The trace again and again until `duration_s`; a longer one is cut."""
    if not trace.arrivals:
        return trace._replace(duration_s=duration_s)
    arrivals = []
    for begin in range(math.ceil(duration_s / trace.duration_s)):
        offset = begin * trace.duration_s
        arrivals += [arrival._replace(t=arrival.t + offset) for arrival in trace.arrivals]
    kept = tuple(arrival for arrival in arrivals if arrival.t < duration_s)
    return trace._replace(arrivals=kept, duration_s=duration_s)


def stretched(trace: Trace, factor: float, seed: int = 0) -> Trace:
    """`factor` times as long, with the same requests a second: ramps and pauses take longer."""
    slow = tuple(arrival._replace(t=arrival.t * factor) for arrival in trace.arrivals)
    return scaled(trace._replace(arrivals=slow, duration_s=trace.duration_s * factor), factor, seed)


def shuffled(trace: Trace, block_s: float, seed: int) -> Trace:
    """Its blocks of `block_s` seconds in random order."""
    count = math.ceil(trace.duration_s / block_s)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    arrivals = [
        arrival._replace(t=arrival.t + (order[int(arrival.t // block_s)] - arrival.t // block_s) * block_s)
        for arrival in trace.arrivals
    ]
    return trace._replace(arrivals=tuple(sorted(arrivals)), duration_s=count * block_s)


# ---- files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Trace:
    """A trace in one of three formats, plain or in xz; Azure's: CSV with TIMESTAMP, ContextTokens, GeneratedTokens;
    BurstGPT's: CSV with Timestamp, Request tokens, Response tokens; Mooncake's: JSON lines with timestamp in ms,
    input_length, output_length.

    Raises UserError with the number of the line.
    """
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        raise UserError(f'could not read trace "{path}": {why}', hint="Check the path.") from exc
    rows = _json_rows(text, path) if text.lstrip().startswith("{") else _csv_rows(text, path)
    arrivals = sorted(rows)
    if not arrivals:
        raise UserError(f'trace "{path}" has no requests')
    begin, end = arrivals[0].t, arrivals[-1].t
    moved = tuple(arrival._replace(t=arrival.t - begin) for arrival in arrivals)
    return Trace(path.name.partition(".")[0], moved, math.floor(end - begin) + 1.0)


def _json_rows(text: str, path: Path) -> Iterable[Arrival]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                yield Arrival(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]))
            except (ValueError, TypeError, KeyError, OverflowError) as exc:
                raise _bad_line(path, number, exc) from exc


def _csv_rows(text: str, path: Path) -> Iterable[Arrival]:
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            if "TIMESTAMP" in row:
                moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC).timestamp()
                yield Arrival(moment, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            else:
                yield Arrival(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            raise _bad_line(path, number, exc) from exc


def _bad_line(path: Path, number: int, exc: Exception) -> UserError:
    hint = "The formats of Azure, BurstGPT and Mooncake are read: docs/how-to/autoscaling.md."
    return UserError(f'trace "{path}", line {number}: not a request', detail=f"{type(exc).__name__}: {exc}", hint=hint)


# ---- synthetic -------------------------------------------------------------------------------------------------------


def poisson(
    name: str,
    duration_s: float,
    load: Callable[[float], float],
    seed: int,
    prompt: float = _MEAN_PROMPT,
    output: float = _MEAN_OUTPUT,
) -> Trace:
    """Poisson arrivals of requests with so many tokens on average, whose work is `load(t)` replicas at second `t`."""
    draw = random.Random(f"{name} {seed}")
    lengths = [(_length(draw, prompt), _length(draw, output)) for _ in range(_N_LENGTHS)]
    # A request of the default lengths is 0.096 s of prefill and 0.141 s of decode.
    work_s = prompt / _PREFILL_TOKENS_S + output / _DECODE_TOKENS_S
    arrivals = []
    for second in range(int(duration_s)):
        rate = load(float(second)) / work_s
        at = draw.expovariate(rate) if rate > 0 else 1.0
        while at < 1.0:
            arrivals.append(Arrival(second + at, *lengths[int(draw.random() * _N_LENGTHS)]))
            at += draw.expovariate(rate)
    return Trace(name, tuple(arrivals), float(int(duration_s)))


def _length(draw: random.Random, mean: float) -> int:
    return max(1, min(_MOST_TOKENS, round(mean * draw.lognormvariate(-(_SPREAD**2) / 2, _SPREAD))))


def _day(t: float, period_s: float, bursts: Sequence[tuple[float, float]]) -> float:
    """A sine from 1 to 9 replicas, least at its beginning, and bursts of five minutes on top: (begin, replicas)."""
    wave = 5.0 - 4.0 * math.cos(2 * math.pi * t / period_s)
    return wave + max((height for begin, height in bursts if begin <= t < begin + 300), default=0.0)


def _day_trace(duration_s: float, seed: int) -> Trace:
    draw = random.Random(f"bursts {seed}")
    bursts = tuple((draw.uniform(0, duration_s), draw.uniform(0.5, 2.5)) for _ in range(int(duration_s // 2400)))
    return poisson("day", duration_s, partial(_day, period_s=duration_s, bursts=bursts), seed)


def _conversations(duration_s: float, seed: int) -> Trace:
    """A rate that wanders: its logarithm returns to the mean within half an hour, with a standard deviation of 0.35."""
    draw = random.Random(f"wander {seed}")
    levels: list[float] = []
    value = 0.0
    for _ in range(int(duration_s) + 1):
        levels.append(min(10.5, 5.5 * math.exp(value)))
        value += -value / 1800 + 0.35 * math.sqrt(2 / 1800) * draw.gauss(0, 1)
    return poisson("conversations", duration_s, lambda t: levels[int(t)], seed)


def _steps(duration_s: float, seed: int) -> Trace:
    """Levels of 1 to 10 replicas, each half an hour to an hour long."""
    draw = random.Random(f"steps {seed}")
    levels: list[float] = []
    level = 2.0
    while len(levels) < duration_s:
        levels += [level] * int(draw.uniform(1800, 3600))
        level = draw.choice([new for new in (1.0, 2.5, 4.0, 6.0, 8.0, 10.0) if abs(new - level) >= 1.5])
    return poisson("step", duration_s, lambda t: levels[int(t)], seed)


def _ramp(t: float, duration_s: float) -> float:
    """From 1 replica to 10 in the first 45%, there for 10%, and back."""
    share = t / duration_s
    return 1.0 + 9.0 * max(0.0, min(1.0, share / 0.45, (1.0 - share) / 0.45))


def _spike(t: float) -> float:
    return 10.0 if 1800 <= t % 3600 < 1860 else 1.0


def _square(t: float) -> float:
    return 8.0 if t % 1200 >= 600 else 0.8


def _silence(duration_s: float, _: int) -> Trace:
    first = min(1800.0, duration_s / 2)
    return Trace("silence", (Arrival(first, int(_MEAN_PROMPT), int(_MEAN_OUTPUT)),), duration_s)


def _even(duration_s: float, _: int) -> Trace:
    """A request of the mean lengths every 0.08 s: 3 replicas, without any noise."""
    count = int(duration_s / 0.08)
    return Trace(
        "constant",
        tuple(Arrival(n * 0.08, int(_MEAN_PROMPT), int(_MEAN_OUTPUT)) for n in range(count)),
        duration_s,
    )


def _code(duration_s: float, seed: int) -> Trace:
    """Azure's, one and a half times as busy, again and again; another seed than 0 begins elsewhere in it."""
    trace = read(_CODE)
    offset = (seed * 1013.0) % trace.duration_s
    moved = tuple(sorted(arrival._replace(t=(arrival.t + offset) % trace.duration_s) for arrival in trace.arrivals))
    return repeated(scaled(trace._replace(name="code", arrivals=moved), 1.5, seed), duration_s)


NAMED: dict[str, Callable[[float, int], Trace]] = {
    "code": _code,
    "conversations": _conversations,
    "day": _day_trace,
    "ramp": lambda duration_s, seed: poisson("ramp", duration_s, partial(_ramp, duration_s=duration_s), seed),
    "step": _steps,
    "spike": lambda duration_s, seed: poisson("spike", duration_s, _spike, seed),
    "square": lambda duration_s, seed: poisson("square", duration_s, _square, seed),
    "constant": _even,
    "noise": lambda duration_s, seed: poisson("noise", duration_s, lambda _: 4.0, seed),
    "silence": _silence,
}


def named(name: str, duration_s: float = 3 * HOUR_S, seed: int = 0) -> Trace:
    return NAMED[name](duration_s, seed)
