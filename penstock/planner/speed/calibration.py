"""Calibration: constants of the speed model fitted to a benchmark of one deployment, and the file they are kept in.

`fit` changes at most five numbers, all as factors of what is assumed without: the shares of bandwidth and of the matrix
rate that are reached, the overhead of a layer and a step, the fixed part of a first token and the share of first tokens
that come in a wave. Robust least squares on logarithms: one wild point hardly moves it, a number that the points say
nothing about stays as it was, and none leaves its bounds. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import WIDE_SPREAD, Calibration, Constants, Engine, constants, estimate
from penstock.planner.speed.work import Work
from penstock.spec.deployment import Parallel, Workload

SCHEMA = 1

# What each number may be, in a file and in a fit. Over 1 a share would beat the hardware; the rest is wide on purpose.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_efficiency": (0.2, 1.0),
    "compute_efficiency": (0.05, 1.0),
    "dense_layer_us": (1.0, 5000.0),
    "moe_layer_us": (1.0, 5000.0),
    "step_us": (1.0, 20000.0),
    "ttft_fixed_ms": (0.1, 5000.0),
    "ttft_prefill": (0.2, 10.0),
    "wave_share": (0.0, 1.0),
}
# What is moved together by one factor: a layer's and a step's overhead cannot be told apart from outside.
_FACTORS: tuple[tuple[str, ...], ...] = (
    ("memory_efficiency",),
    ("compute_efficiency",),
    ("dense_layer_us", "moe_layer_us", "step_us"),
    ("ttft_fixed_ms",),
    ("wave_share",),
)
# Residuals beyond this (logarithm, so a tenth) count by their size and no longer by its square (Huber).
_ORDINARY = 0.1
# How much a factor that no point speaks about is held at 1, against one point's weight.
_HELD = 1e-4
_STEPS = 25
# A fit whose typical point is off by more than this did not see the deployment it was told of.
_WORST_MEDIAN = 0.35
_NARROWEST = 0.06


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One benchmark run: a closed loop of `concurrency` requests. Means, times in ms; None was not measured."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Calibrated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: what `constants` were measured on, and how well they fit (`median_error`, 0.04 is 4%)."""

    model: str
    gpu: str
    layout: Parallel
    engine_version: str
    constants: Calibration
    n_points: int = 0
    median_error: float | None = None
    schema: int = SCHEMA


def read(text: str, name: str) -> Calibrated:
    """The calibration in a file's text; `name` is the file's, for messages.  Raises UserError."""
    hint = "Make it again with `penstock bench --calibrate`, or plan without --calibration."
    try:
        plain = msgspec.json.decode(text)
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise UserError(
                f'cannot use calibration "{name}": schema {schema!r}, this version reads {SCHEMA}', hint=hint
            )
        found = msgspec.convert(plain, Calibrated)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise UserError(f'cannot read calibration "{name}"', detail=str(exc), hint=hint) from exc
    for field, (low, high) in _BOUNDS.items():
        value = getattr(found.constants, field)
        if value is not None and not low <= value <= high:
            raise UserError(
                f'cannot use calibration "{name}": {field} is {value:g}', detail=f"From {low:g} to {high:g}.", hint=hint
            )
    spread = found.constants.spread
    if spread is not None and not 0.1 <= spread[0] <= 1 <= spread[1] <= 10:
        raise UserError(f'cannot use calibration "{name}": spread is {spread}', hint=hint)
    return found


def write(calibrated: Calibrated) -> str:
    """The file's text; numbers that were not measured are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(calibrated)
    plain["constants"] = {key: value for key, value in plain["constants"].items() if value is not None}
    plain = {"schema": plain.pop("schema"), **plain}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"


def check(calibrated: Calibrated, models: Sequence[str], gpus: Sequence[str]) -> None:
    """Refuse another model's or card's calibration. `models`, `gpus`: all names of what is planned.  Raises UserError.

    "meta-llama/Llama-3.1-8B", "llama-3.1-8b" and "/models/Llama-3.1-8B" are one model.
    """
    pairs = (("model", calibrated.model, models), ("GPU", calibrated.gpu, gpus))
    for what, theirs, ours in pairs:
        if _short(theirs) not in {_short(name) for name in ours}:
            raise UserError(
                f"cannot use this calibration: it was measured on {what} {theirs}, the plan is for {ours[0]}",
                hint="Plan without --calibration, or measure this deployment: `penstock bench --calibrate`.",
            )


def constants_for(calibrated: Calibrated, layout: Parallel, version: str) -> Calibration:
    """The constants for a layout and an engine; for others than were measured they hold with the ranges left wide."""
    if not differs(calibrated, layout, version):
        return calibrated.constants
    return msgspec.structs.replace(calibrated.constants, spread=WIDE_SPREAD)


def differs(calibrated: Calibrated, layout: Parallel, version: str) -> str:
    """What was measured otherwise than is planned, in words; empty when nothing was."""
    found = []
    if layout != calibrated.layout:
        found.append(f"layout {_named(calibrated.layout)} (planned: {_named(layout)})")
    if version.split(".")[:2] != calibrated.engine_version.split(".")[:2]:
        found.append(f"vLLM {calibrated.engine_version} (planned: {version})")
    return " and ".join(found)


def fit(
    work: Work, layout: Parallel, fabric: Fabric, engine: Engine, points: Sequence[Measured]
) -> tuple[Calibration, float]:
    """(the constants that predict `points` best, the median error that is left).  Raises UserError.

    Levenberg-Marquardt in at most five logarithms of factors, derivatives by differences; a few hundred estimates.
    """
    numbers = [number for point in points for number in (point.ttft_ms, point.tpot_ms) if number is not None]
    if len(numbers) < 2 or not all(0 < number < math.inf for number in numbers):
        raise UserError(
            f"cannot calibrate from {len(numbers)} measured number(s)",
            detail="At least two times above 0 are needed; runs at concurrency 1, 8 and 32 make a good fit.",
        )
    start = constants(fabric.gpu, engine)

    def residuals(logs: Sequence[float]) -> list[float]:
        return _residuals(work, layout, fabric, engine, points, _moved(start, logs))

    logs = _minimise(residuals, start)
    left = [abs(value) for value in residuals(logs)]
    median = statistics.median(left)
    if median > _WORST_MEDIAN:
        raise UserError(
            f"cannot calibrate: after the best fit the points are still off by {math.expm1(median):.0%}",
            detail="The measured deployment differs from the named one in model, GPU, layout or engine.",
        )
    # Twice the typical residual, never tighter than a benchmark repeats itself, never wider than without.
    wide = max(_NARROWEST, 2 * median)
    low, high = start.spread
    spread = (max(low, math.exp(-wide)), min(high, math.exp(wide)))
    return msgspec.structs.replace(_moved(start, logs), spread=spread), math.expm1(median)


def _residuals(
    work: Work, layout: Parallel, fabric: Fabric, engine: Engine, points: Sequence[Measured], tried: Calibration
) -> list[float]:
    """Logarithms of predicted over measured."""
    found = []
    for point in points:
        load = Workload(point.input_tokens, point.output_tokens, point.concurrency)
        speed = estimate(work, layout, fabric, load, engine, tried)
        both = ((speed.ttft_ms.likely, point.ttft_ms), (speed.tpot_ms.likely, point.tpot_ms))
        found += [math.log(likely / number) for likely, number in both if number is not None]
    return found


def _moved(start: Constants, logs: Sequence[float]) -> Calibration:
    """The constants times their factors, inside their bounds."""
    values = {}
    for names, log in zip(_FACTORS, logs, strict=True):
        for name in names:
            low, high = _BOUNDS[name]
            values[name] = min(high, max(low, getattr(start, name) * math.exp(log)))
    return Calibration(**values)


def _minimise(residuals: Callable[[Sequence[float]], list[float]], start: Constants) -> list[float]:
    n = len(_FACTORS)
    limits = [
        (max(-3.0, math.log(_BOUNDS[names[0]][0] / was) if _BOUNDS[names[0]][0] else -3.0), min(3.0, top))
        for names in _FACTORS
        for was in (getattr(start, names[0]),)
        for top in (math.log(_BOUNDS[names[0]][1] / was),)
    ]
    logs, damping = [0.0] * n, 1e-2
    here = residuals(logs)
    for _ in range(_STEPS):
        slopes = []
        for index in range(n):
            near = list(logs)
            near[index] += -0.01 if logs[index] + 0.01 > limits[index][1] else 0.01
            step = near[index] - logs[index]
            slopes.append([(there - now) / step for there, now in zip(residuals(near), here, strict=True)])
        weights = [1.0 if abs(value) <= _ORDINARY else _ORDINARY / abs(value) for value in here]
        matrix = [
            [sum(w * a * b for w, a, b in zip(weights, slopes[i], slopes[j], strict=True)) for j in range(n)]
            for i in range(n)
        ]
        right = [-sum(w * a * r for w, a, r in zip(weights, slopes[i], here, strict=True)) for i in range(n)]
        for index in range(n):
            right[index] -= _HELD * logs[index]
            matrix[index][index] += _HELD
        better = None
        while damping < 1e6 and better is None:
            damped = [[value * (1 + damping * (i == j)) for j, value in enumerate(row)] for i, row in enumerate(matrix)]
            moves = _solve(damped, right)
            tried = [
                min(high, max(low, log + move)) for log, move, (low, high) in zip(logs, moves, limits, strict=True)
            ]
            there = residuals(tried)
            if _cost(there, tried) < _cost(here, logs):
                better, damping = (tried, there), damping / 5
            else:
                damping *= 5
        if better is None:
            break
        moved = max(abs(new - old) for new, old in zip(better[0], logs, strict=True))
        logs, here = better
        if moved < 1e-5:
            break
    return logs


def _cost(left: Sequence[float], logs: Sequence[float]) -> float:
    huber = (r * r / 2 if abs(r) <= _ORDINARY else _ORDINARY * (abs(r) - _ORDINARY / 2) for r in left)
    return sum(huber) + _HELD * sum(log * log for log in logs) / 2


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss with pivots; the matrix is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    n = len(rows)
    for column in range(n):
        pivot = max(range(column, n), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(n):
            if row != column:
                share = rows[row][column] / rows[column][column]
                rows[row] = [a - share * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [row[n] / row[i] for i, row in enumerate(rows)]


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _named(layout: Parallel) -> str:
    expert = " with expert parallelism" if layout.expert else ""
    return f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data}{expert}"
