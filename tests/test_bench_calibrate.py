"""Calibration from runs: the file that comes of them makes the planner predict nearer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import calibrate
from penstock.bench.calibrate import Deployed
from penstock.bench.results.folder import Request, Result
from penstock.cli import main
from penstock.errors import UserError
from penstock.hardware import catalog
from penstock.models import facts
from penstock.planner.architecture.dense import read
from penstock.planner.inputs import model_costs
from penstock.planner.speed import calibration, estimate
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Calibration
from penstock.spec.deployment import Parallel, Workload

LLAMA = facts.read("llama-3.1-8b")
H100 = catalog.gpu("h100-sxm")
# A deployment that is slower than the planner thinks without calibration.
TRUTH = Calibration(memory_efficiency=0.6, compute_efficiency=0.4, dense_layer_us=120.0, ttft_fixed_ms=80.0)
ONE = Parallel()
LOADS = [(1, 1000, 200), (8, 1000, 200), (32, 1000, 200), (64, 2000, 100)]


def measured(concurrency: int, n_in: int, n_out: int, layout: Parallel = ONE, **changed: Any) -> Result:
    """The result of a closed loop on that deployment."""
    costs, fabric = model_costs(read(LLAMA.config)), Fabric(H100, layout.n_ranks)
    told = estimate.estimate(costs, layout, fabric, Workload(n_in, n_out, concurrency), estimate.Engine(), TRUTH)
    summary: dict[str, Any] = {"completed": 100, "failed": 0, "valid": True, "flags": {"concurrency": concurrency}}
    summary |= {"total_input_tokens": 100 * n_in, "total_output_tokens": 100 * n_out}
    summary |= {"mean_ttft_ms": told.ttft_ms.likely, "mean_tpot_ms": told.tpot_ms.likely}
    return Result(f"c{concurrency}", summary | changed)


@pytest.mark.parametrize("layout", [Parallel(), Parallel(tensor=2)])
def test_the_planner_predicts_nearer_with_the_file(
    layout: Parallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [measured(*load, layout=layout) for load in LOADS]
    found = calibrate.calibrated(runs, Deployed(LLAMA, H100, layout, "0.33"))
    assert found.n_points == 4 and (found.median_error or 0) < 0.02
    file = tmp_path / "calibration.json"
    file.write_text(calibration.write(found))
    truth = measured(16, 1500, 150, layout).summary["mean_tpot_ms"]
    words = ["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--gpus-per-node", str(layout.tensor), "--json"]
    words += ["--tensor", str(layout.tensor), "--input-tokens", "1500", "--output-tokens", "150", "--concurrency", "16"]
    off, width = [], []
    for more in ([], ["--calibration", str(file)]):
        assert main.run([*words, "--max-model-len", "8192", *more]) == 0
        told = json.loads(capsys.readouterr().out)["speed"]["tpot_ms"]
        off.append(abs(told["likely"] / truth - 1))
        width.append(told["high"] - told["low"])
    assert off[1] < 0.05 < off[0] and width[1] < width[0]


def test_only_valid_closed_loops_count() -> None:
    assert calibrate.point_of(measured(8, 1000, 200)) == calibrate.BenchPoint(
        8, 1000, 200, *(measured(8, 1000, 200).summary[name] for name in ("mean_ttft_ms", "mean_tpot_ms"))
    )
    for changed in (
        {"flags": {"rate": 3.0, "concurrency": None}},
        {"valid": False},
        {"total_input_tokens": None},
        {"mean_ttft_ms": None, "mean_tpot_ms": None},
    ):
        assert calibrate.point_of(measured(8, 1000, 200, **changed)) is None
    with pytest.raises(UserError, match="none of 1 run"):
        calibrate.calibrated([measured(8, 10, 10, valid=False)], Deployed(LLAMA, H100, Parallel(), "0.33"))
    # Tokens are counted from rows where totals are absent.
    rows = tuple(Request(0.0, 1.0, 5.0, 5.0, 9.0, 100 + i, 20, True) for i in (-10, 10))
    summary = {"completed": 2, "mean_ttft_ms": 5.0, "pace": {"concurrency": 4}}
    assert calibrate.point_of(Result("a", summary, rows)) == calibrate.BenchPoint(4, 100, 20, 5.0, None)
    # Equally long requests came in rounds.
    assert calibrate.point_of(
        Result("a", summary | {"pace": {"concurrency": 1}}, rows[:1] * 2)
    ) == calibrate.BenchPoint(1, 90, 20, 5.0, None, 2.0)
