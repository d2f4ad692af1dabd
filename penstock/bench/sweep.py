"""Raising the load until a bound breaks, and finding the highest that keeps it. The decider is pure; a runner acts.

A rate is found to a twentieth, a concurrency exactly. The lowest load that broke counts: the answer is never too high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.bench.results.stats import METRICS
from penstock.errors import PenstockError, UserError, nearest

Kind = Literal["rate", "concurrency"]
STATISTICS = ("mean", "median", "p90", "p95", "p99", "max")
LABELS: Mapping[Kind, str] = {"rate": "requests/s", "concurrency": "requests at once"}


class Bound(msgspec.Struct, frozen=True):
    """A number of the result and its limit in ms: ("p99_ttft_ms", 2000.0)."""

    name: str
    most_ms: float


class Slo(msgspec.Struct, frozen=True):
    bounds: tuple[Bound, ...]
    most_failed: float = 0.01

    def __str__(self) -> str:
        words = [f"{bound.name.removesuffix('_ms')} at most {bound.most_ms:g} ms" for bound in self.bounds]
        return ", ".join([*words, f"at most {self.most_failed:.0%} failed"])


class Search(msgspec.Struct, frozen=True):
    """Where to look: from `first`, doubled or halved until the bound lies between. `steps`: these loads only."""

    kind: Kind
    first: float = 1.0
    least: float = 0.01
    most: float = 10_000.0
    closeness: float = 0.05
    n_runs: int = 20
    steps: tuple[float, ...] = ()


class Point(NamedTuple):
    """A load that was tried: what the result says of it. `reason` is why it does not keep the bounds."""

    offered: float
    is_inside: bool
    reason: str = ""


class SweepResult(msgspec.Struct, frozen=True):
    """The highest load that kept the bounds, the lowest that broke them (None: none), all points with their results."""

    kind: Kind
    highest: float | None
    broken: float | None
    points: tuple[Point, ...]
    results: tuple[dict[str, Any], ...]
    note: str = ""
    was_interrupted: bool = False


def slo_of(words: Sequence[str], most_failed: float = 0.01) -> Slo:
    """["ttft:2000", "p95_tpot:60"]: p99 where no statistic is named.  Raises UserError."""
    bounds = []
    for word in words:
        name, _, number = word.partition(":")
        statistic, _, time = name.rpartition("_")
        statistic = statistic or "p99"
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if time not in METRICS or statistic not in STATISTICS or not 0 < most < math.inf:
            close = nearest(time, METRICS)
            raise UserError(
                f'cannot use bound "{word[:40]}"',
                hint=f'Did you mean "{close}"?'
                if close and close != time
                else "ttft:2000, p95_tpot:60, mean_e2el:9000",
            )
        bounds.append(Bound(f"{statistic}_{time}_ms", most))
    return Slo(tuple(bounds), most_failed)


def judged(offered: float, result: Mapping[str, Any], slo: Slo) -> Point:
    """What a result says of the load it had. A number that is absent breaks its bound: nothing was measured."""
    share = _failed_share(result)
    if share > slo.most_failed:
        return Point(offered, False, f"{share:.1%} failed, over {slo.most_failed:.0%}")
    if not result.get("completed"):
        return Point(offered, False, "nothing was answered")
    for bound in slo.bounds:
        value = result.get(bound.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return Point(offered, False, f"{bound.name} was not measured")
        if value > bound.most_ms:
            return Point(offered, False, f"{bound.name} {value:.1f} is over {bound.most_ms:g}")
    return Point(offered, True)


def _failed_share(result: Mapping[str, Any]) -> float:
    completed, failed = (float(result.get(name) or 0) for name in ("completed", "failed"))
    return failed / (completed + failed) if completed + failed else 1.0


def next_load(history: Sequence[Point], search: Search) -> float | None:
    """The load to try next; None when the answer is known as closely as was asked, or the runs are used up."""
    if len(history) >= search.n_runs:
        return None
    if search.steps:
        is_over = len(history) >= len(search.steps) or any(not point.is_inside for point in history)
        return None if is_over else search.steps[len(history)]
    highest, broken = limits(history)
    if highest is None and broken is None:
        return _usable(search.first, search)
    if broken is None:
        assert highest is not None
        return _usable(highest * 2, search) if highest < search.most else None
    if highest is None:
        return _usable(broken / 2, search) if broken > _usable(search.least, search) else None
    if search.kind == "concurrency":
        return float((int(highest) + int(broken)) // 2) if broken - highest > 1 else None
    return math.sqrt(highest * broken) if broken > highest * (1 + search.closeness) else None


def limits(history: Sequence[Point]) -> tuple[float | None, float | None]:
    """(the highest load inside that is below every broken one, the lowest broken one)."""
    broken = min((point.offered for point in history if not point.is_inside), default=None)
    inside = [point.offered for point in history if point.is_inside and (broken is None or point.offered < broken)]
    return max(inside, default=None), broken


def search(
    run: Callable[[float], dict[str, Any]], slo: Slo, where: Search, on_point: Callable[[Point], None] | None = None
) -> SweepResult:
    """Try loads until the answer is known. `run` measures one load and gives its result.json.

    A run that the generator distorted is made again once; two such runs end the search, as do a KeyboardInterrupt and a
    failure after the first result.
    """
    history: list[Point] = []
    results: list[dict[str, Any]] = []
    note = ""
    was_interrupted = was_distorted = False
    while (offered := next_load(history, where)) is not None:
        try:
            result = run(offered)
        except KeyboardInterrupt:
            was_interrupted = True
            note = f"interrupted at {offered:g} {LABELS[where.kind]}"
            break
        except PenstockError as error:
            if not history:
                raise
            note = f"ended at {offered:g} {LABELS[where.kind]}: {error.message}"
            break
        is_distorted = result.get("valid") is False and _failed_share(result) <= slo.most_failed
        if is_distorted and not was_distorted:
            was_distorted = True
            continue
        if is_distorted:
            why = result.get("invalid_because")
            reason = f": {why[0]}" if isinstance(why, list) and why else ""
            note = f"ended at {offered:g} {LABELS[where.kind]}: that run is not valid{reason}"
            break
        was_distorted = False
        point = judged(offered, result, slo)
        history.append(point)
        results.append(result)
        if on_point is not None:
            on_point(point)
    if not note and len(history) >= where.n_runs:
        note = f"ended after {where.n_runs} runs"
    highest, broken = limits(history)
    return SweepResult(where.kind, highest, broken, tuple(history), tuple(results), note, was_interrupted)


def answer_text(layout: str, result: SweepResult) -> str:
    """The answer in a line: "TP 2: up to 11.3 requests/s (11.7 is too many)"."""
    label = LABELS[result.kind]
    more = f"; {result.note}" if result.note else ""
    if result.highest is None:
        tried = f"even {result.broken:.3g} {label} is too many" if result.broken is not None else "nothing was measured"
        return f"{layout}: {tried}{more}"
    kept_all = "" if result.note else " or more: nothing broke the bound"
    over = f" ({result.broken:.3g} is too many)" if result.broken is not None else kept_all
    return f"{layout}: up to {result.highest:.3g} {label}{over}{more}"


def table_text(layout: str, result: SweepResult) -> str:
    columns = {"req/s": "request_throughput", "tok/s": "output_throughput", "TTFT p50": "median_ttft_ms"}
    columns |= {"TTFT p99": "p99_ttft_ms", "TPOT p50": "median_tpot_ms", "E2E p99": "p99_e2el_ms"}
    lines = [f"{layout:8}{LABELS[result.kind]:>18}" + "".join(f"{head:>10}" for head in columns)]
    for point, summary in sorted(zip(result.points, result.results, strict=True), key=lambda pair: pair[0].offered):
        numbers = "".join(_cell(summary.get(name)) for name in columns.values())
        lines.append(f"{'':8}{point.offered:18.4g}{numbers}  {'inside' if point.is_inside else point.reason}")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:10.1f}" if isinstance(value, int | float) else f"{'-':>10}"


def _usable(load: float, where: Search) -> float:
    bounded = min(where.most, max(where.least, load))
    return float(max(1, math.floor(bounded))) if where.kind == "concurrency" else bounded
