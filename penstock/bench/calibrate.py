"""From closed-loop runs of a load test to the planner's calibration file, which belongs to one layout."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.bench.results.folder import Result
from penstock.errors import UserError
from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.models import Facts
from penstock.planner.architecture.dense import read
from penstock.planner.inputs import model_costs
from penstock.planner.speed.calibration import BOUNDS, Calibrated
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Calibration, Constants, Engine, constants, estimate
from penstock.planner.speed.work import StepCosts
from penstock.spec.deployment import Parallel, Workload

_HINT = "Runs at concurrency 1, 8 and 32 make a good fit: penstock bench sweep --by concurrency."
# What one factor moves together: a layer's and a step's overhead cannot be separated from outside.
_FACTORS: tuple[tuple[str, ...], ...] = (
    ("memory_efficiency",),
    ("compute_efficiency",),
    ("dense_layer_us", "moe_layer_us", "step_us"),
    ("ttft_fixed_ms",),
    ("wave_share",),
)
# Residuals beyond this (logarithm, so a tenth) count by their size and no longer by its square (Huber).
_ORDINARY = 0.1
# How firmly a factor that no point determines is held at 1, against one point's weight.
_HELD = 1e-4
# A typical point that is off by more than this was measured on another deployment.
_WORST_MEDIAN = 0.35
_NARROWEST = 0.06


class BenchPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One benchmark run: a closed loop of `concurrency` requests. Means, times in ms; None was not measured.
    `rounds`: requests are equally long, so many for each of `concurrency`; None: lengths vary."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    rounds: float | None = None


class Deployed(msgspec.Struct, frozen=True):
    """What was measured. Each node has equally many of its ranks."""

    facts: Facts
    gpu: GpuFacts
    layout: Parallel
    engine_version: str
    n_nodes: int = 1
    network: LinkFacts | None = None
    is_eager: bool = False


def calibrated(runs: Sequence[Result], deployed: Deployed) -> Calibrated:
    """The constants that predict these runs best.  Raises UserError for too few runs, or another deployment's."""
    points = [point for run in runs if (point := point_of(run)) is not None]
    if not points:
        raise UserError(
            f"cannot calibrate: none of {len(runs)} run(s) is a valid closed loop with token counts", hint=_HINT
        )
    ranks_each = deployed.layout.n_ranks // deployed.n_nodes
    fabric = Fabric(deployed.gpu, ranks_each, deployed.n_nodes, deployed.network)
    engine = Engine(version=deployed.engine_version, is_eager=deployed.is_eager)
    costs = model_costs(read(deployed.facts.config))
    fitted, error = fit(costs, deployed.layout, fabric, engine, points)
    return Calibrated(
        model=deployed.facts.hub_id or deployed.facts.reference,
        gpu=deployed.gpu.id,
        layout=deployed.layout,
        engine_version=deployed.engine_version,
        constants=fitted,
        n_points=len(points),
        median_error=round(error, 4),
    )


def fit(
    costs: StepCosts, layout: Parallel, fabric: Fabric, engine: Engine, points: Sequence[BenchPoint]
) -> tuple[Calibration, float]:
    """(the constants that predict `points` best, the median error that is left).  Raises UserError.
    Robust least squares on logarithms of factors, each within its bounds: one wild point hardly moves them."""
    numbers = [number for point in points for number in (point.ttft_ms, point.tpot_ms) if number is not None]
    if len(numbers) < 2 or not all(0 < number < math.inf for number in numbers):
        raise UserError(
            f"cannot calibrate from {len(numbers)} measured number(s)",
            detail="At least two times above 0 are needed; runs at concurrency 1, 8 and 32 make a good fit.",
        )
    try:
        from scipy.optimize import least_squares
    except ImportError as exc:
        raise UserError(
            "cannot calibrate: the package scipy is not installed", hint="pip install 'penstock[calibrate]'"
        ) from exc
    start = constants(fabric.gpu, engine)

    def errors(logs: Sequence[float]) -> list[float]:
        logarithms, tried = [], _moved(start, logs)
        for point in points:
            load = Workload(point.input_tokens, point.output_tokens, point.concurrency)
            speed = estimate(costs, layout, fabric, load, engine, tried, point.rounds)
            both = ((speed.ttft_ms.likely, point.ttft_ms), (speed.tpot_ms.likely, point.tpot_ms))
            logarithms += [math.log(likely / number) for likely, number in both if number is not None]
        return logarithms

    def held(logs: Sequence[float]) -> list[float]:
        return [*errors(logs), *(math.sqrt(_HELD) * log for log in logs)]

    bounds = [_log_bounds(start, names[0]) for names in _FACTORS]
    solution = least_squares(
        held, [0.0] * len(_FACTORS), bounds=tuple(zip(*bounds, strict=True)), loss="huber", f_scale=_ORDINARY
    )
    logs = [float(log) for log in solution.x]
    median = statistics.median(abs(error) for error in errors(logs))
    if median > _WORST_MEDIAN:
        raise UserError(
            f"cannot calibrate: after the best fit the points are still off by {math.expm1(median):.0%}",
            detail="The measured deployment is not the one that was named: model, GPU, layout or engine.",
        )
    # Twice the typical error, never tighter than a benchmark repeats itself, never wider than without.
    wide = max(_NARROWEST, 2 * median)
    low, high = start.spread
    spread = (max(low, math.exp(-wide)), min(high, math.exp(wide)))
    return msgspec.structs.replace(_moved(start, logs), spread=spread), math.expm1(median)


def _log_bounds(start: Constants, name: str) -> tuple[float, float]:
    low, high = (bound / getattr(start, name) for bound in BOUNDS[name])
    return max(-3.0, math.log(low) if low else -3.0), min(3.0, math.log(high))


def _moved(start: Constants, logs: Sequence[float]) -> Calibration:
    values = {}
    for names, log in zip(_FACTORS, logs, strict=True):
        for name in names:
            low, high = BOUNDS[name]
            values[name] = min(high, max(low, getattr(start, name) * math.exp(log)))
    return Calibration(**values)


def point_of(run: Result) -> BenchPoint | None:
    """A run as the fit takes it: mean times, mean tokens a request. None for an open loop, or one that is not valid."""
    concurrency = _whole(run.summary, "pace") or _whole(run.summary, "flags")
    done = run.done
    n_in, n_out = _mean_tokens(run, "input"), _mean_tokens(run, "output")
    if concurrency is None or run.summary.get("valid") is False or (not done and run.number("completed") is None):
        return None
    if not n_in or not n_out:
        return None
    ttft, tpot = run.number("mean_ttft_ms"), run.number("mean_tpot_ms")
    if ttft is None and tpot is None:
        return None
    lengths = {(request.input_tokens, request.output_tokens) for request in done}
    rounds = len(done) / concurrency if len(lengths) == 1 else None
    return BenchPoint(concurrency, round(n_in), max(1, round(n_out)), ttft, tpot, rounds)


def _whole(summary: dict[str, Any], block: str) -> int | None:
    fields = summary.get(block)
    value = fields.get("concurrency") if isinstance(fields, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _mean_tokens(run: Result, which: str) -> float | None:
    total, completed = run.number(f"total_{which}_tokens"), run.number("completed")
    if total and completed:
        return total / completed
    counts = [getattr(request, f"{which}_tokens") for request in run.done]
    return sum(counts) / len(counts) if counts and None not in counts else None


# The planner's name -> the benchmark's (means, as the planner predicts), and the unit.
_PAIRS = (
    ("ttft_ms", "mean_ttft_ms", "mean TTFT, ms"),
    ("tpot_ms", "mean_tpot_ms", "mean TPOT, ms"),
    ("output_tokens_per_s", "output_throughput", "output tokens/s"),
    ("requests_per_s", "request_throughput", "requests/s"),
)


class Pair(msgspec.Struct, frozen=True):
    """One number: the planner's range, and the measured value."""

    words: str
    low: float
    likely: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def off(self) -> float:
        return self.likely / self.measured - 1 if self.measured else 0.0


def pairs(run: Result, plan: Mapping[str, Any] | None = None) -> list[Pair]:
    """What `plan`, or else the run's own prediction, says of it; empty without a speed."""
    speed = plan.get("speed") if plan else run.summary.get("predicted")
    both = []
    for name, measured_name, words in _PAIRS:
        predicted = speed.get(name) if isinstance(speed, Mapping) else None
        measured = run.number(measured_name)
        if isinstance(predicted, Mapping) and measured is not None:
            low, likely, high = (predicted.get(key) for key in ("low", "likely", "high"))
            if low is not None and likely is not None and high is not None:
                both.append(Pair(words, float(low), float(likely), float(high), measured))
    return both
