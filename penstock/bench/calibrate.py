"""From runs of a load test to the planner's calibration file: which runs say something, and the fit over them. Pure.

Only closed loops do: the planner predicts a steady number of requests at once. Each layout has constants of its own, so
a file is of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.bench.record import Result
from penstock.catalog import GpuFacts, LinkFacts
from penstock.errors import UserError
from penstock.plan import calibration
from penstock.plan.calibration import Calibrated, Measured
from penstock.plan.comm import Fabric
from penstock.plan.families import read
from penstock.plan.sizing import Facts
from penstock.plan.solve import work_of_model
from penstock.plan.speed import Engine
from penstock.spec import Parallel

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
