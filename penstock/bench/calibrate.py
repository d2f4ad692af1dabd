"""From runs of a load test to the planner's calibration file: which runs say something, and the fit over them. Pure.

Only closed loops do: the planner predicts a steady number of requests at once. Each layout has constants of its own, so
a file is of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.bench.results.folder import Result
from penstock.errors import UserError
from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.models import Facts
from penstock.planner.architecture.dense import read
from penstock.planner.solve import work_of_model
from penstock.planner.speed import calibration
from penstock.planner.speed.calibration import Calibrated, Measured
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Engine
from penstock.spec.deployment import Parallel

_HINT = "Runs at concurrency 1, 8 and 32 make a good fit: penstock bench sweep --by concurrency."


class Deployed(msgspec.Struct, frozen=True):
    """What was measured: the planner must know it as well as the runs do. Each node has equally many of its ranks."""

    facts: Facts
    gpu: GpuFacts
    layout: Parallel
    engine_version: str
    n_nodes: int = 1
    network: LinkFacts | None = None
    is_eager: bool = False


def calibrated(runs: Sequence[Result], deployed: Deployed) -> Calibrated:
    """The constants that predict these runs best.  Raises UserError when they say too little, or do not fit at all."""
    points = [point for run in runs if (point := point_of(run)) is not None]
    if not points:
        raise UserError(
            f"cannot calibrate: none of {len(runs)} run(s) is a valid closed loop with token counts", hint=_HINT
        )
    ranks_each = deployed.layout.n_ranks // deployed.n_nodes
    fabric = Fabric(deployed.gpu, ranks_each, deployed.n_nodes, deployed.network)
    engine = Engine(version=deployed.engine_version, is_eager=deployed.is_eager)
    work = work_of_model(read(deployed.facts.config))
    constants, error = calibration.fit(work, deployed.layout, fabric, engine, points)
    return Calibrated(
        model=deployed.facts.hub_id or deployed.facts.reference,
        gpu=deployed.gpu.id,
        layout=deployed.layout,
        engine_version=deployed.engine_version,
        constants=constants,
        n_points=len(points),
        median_error=round(error, 4),
    )


def point_of(run: Result) -> Measured | None:
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
    return Measured(concurrency, round(n_in), max(1, round(n_out)), ttft, tpot)


def _whole(summary: dict[str, Any], block: str) -> int | None:
    found = summary.get(block)
    value = found.get("concurrency") if isinstance(found, dict) else None
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
        """How far the likely value is from the measured one: 0.1 is a tenth too high."""
        return self.likely / self.measured - 1 if self.measured else 0.0


def pairs(run: Result, plan: Mapping[str, Any] | None = None) -> list[Pair]:
    """What `plan`, or else the run's own prediction, said of it; empty when it told no speed."""
    speed = plan.get("speed") if plan else run.summary.get("predicted")
    found = []
    for name, measured_name, words in _PAIRS:
        told = speed.get(name) if isinstance(speed, Mapping) else None
        measured = run.number(measured_name)
        if isinstance(told, Mapping) and measured is not None:
            low, likely, high = (told.get(key) for key in ("low", "likely", "high"))
            if low is not None and likely is not None and high is not None:
                found.append(Pair(words, float(low), float(likely), float(high), measured))
    return found
