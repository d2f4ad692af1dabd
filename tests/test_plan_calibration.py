"""Calibration: a fit finds the constants that made its points, its file is checked, and the planner predicts nearer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plan_shapes import LLAMA_8B

from penstock.bench import calibrate
from penstock.bench.calibrate import BenchPoint, Deployed
from penstock.bench.results.folder import Request, Result
from penstock.cli import main
from penstock.deployment import planning
from penstock.errors import UserError
from penstock.hardware import catalog
from penstock.models import facts
from penstock.planner.inputs import model_costs
from penstock.planner.request import SizingRequest
from penstock.planner.speed import calibration, estimate
from penstock.planner.speed.calibration import Calibrated
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Calibration
from penstock.planner.speed.work import step_costs
from penstock.spec.deployment import Parallel, Workload

H100 = Fabric(catalog.gpu("h100-sxm"), 8)
ENGINE, ONE = estimate.Engine(), Parallel()
COSTS, LLAMA = step_costs(LLAMA_8B), facts.read("llama-3.1-8b")
LOADS = [(1, 1000, 200), (8, 1000, 200), (32, 1000, 200), (128, 1000, 200), (1, 8000, 50), (16, 8000, 400)]


def points(truth: Calibration, noise: float = 0.0) -> list[BenchPoint]:
    """What a deployment with these constants would be measured at."""
    rng, measured = random.Random(1), []
    for concurrency, n_in, n_out in LOADS:
        speed = estimate.estimate(COSTS, ONE, H100, Workload(n_in, n_out, concurrency), ENGINE, truth)
        times = (time.likely * (1 + rng.uniform(-noise, noise)) for time in (speed.ttft_ms, speed.tpot_ms))
        measured.append(BenchPoint(concurrency, n_in, n_out, *times))
    return measured


TRUTH = Calibration(
    memory_efficiency=0.7, compute_efficiency=0.45, dense_layer_us=90.0, step_us=500.0, ttft_fixed_ms=60.0
)


def test_a_fit_finds_the_constants_that_made_its_points() -> None:
    fitted, error = calibrate.fit(COSTS, ONE, H100, ENGINE, points(TRUTH))
    assert error < 0.005
    for name, rel in (("memory_efficiency", 0.03), ("compute_efficiency", 0.05), ("dense_layer_us", 0.05)):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUTH, name), rel=rel)
    assert fitted.ttft_fixed_ms == pytest.approx(60, rel=0.1)
    # The range is narrower, and holds the truth.
    load = Workload(2000, 300, 24)
    truth, before, after = (
        estimate.estimate(COSTS, ONE, H100, load, ENGINE, known).tpot_ms for known in (TRUTH, None, fitted)
    )
    assert after.low <= truth.likely <= after.high
    assert after.high - after.low < 0.4 * (before.high - before.low)
    # One wild point hardly moves it.
    measured = points(TRUTH, noise=0.03)
    measured[2] = msgspec.structs.replace(measured[2], tpot_ms=10 * (measured[2].tpot_ms or 1))
    fitted, error = calibrate.fit(COSTS, ONE, H100, ENGINE, measured)
    assert error < 0.1 and fitted.memory_efficiency == pytest.approx(0.7, rel=0.12)
    # What no point determines stays.
    fitted, _ = calibrate.fit(COSTS, ONE, H100, ENGINE, [BenchPoint(1, 100, 100, None, t) for t in (6.6, 6.7)])
    assert fitted.ttft_fixed_ms == pytest.approx(37, rel=0.01) and fitted.wave_share == pytest.approx(0.14, rel=0.01)


def test_absurd_points_are_refused_or_kept_in_bounds_and_too_few_are_refused() -> None:
    for factor in (0.05, 30.0):
        absurd = [
            msgspec.structs.replace(one, ttft_ms=factor * (one.ttft_ms or 0), tpot_ms=factor * (one.tpot_ms or 0))
            for one in points(Calibration())
        ]
        try:
            fitted, _ = calibrate.fit(COSTS, ONE, H100, ENGINE, absurd)
        except UserError as exc:
            assert "off by" in exc.message
        else:
            assert 0.2 <= (fitted.memory_efficiency or 0) <= 1 and (fitted.spread or (0, 0))[0] >= 0.75
    for numbers in ([], [5.0], [5.0, 0.0], [5.0, float("nan")], [5.0, float("inf")]):
        with pytest.raises(UserError):
            calibrate.fit(COSTS, ONE, H100, ENGINE, [BenchPoint(1, 10, 10, None, number) for number in numbers])


# ---- the file --------------------------------------------------------------------------------------------------------

KNOWN = Calibrated("meta-llama/Llama-3.1-8B", "h100-sxm", ONE, "0.33", Calibration(memory_efficiency=0.8), 6, 0.03)


def test_a_file_reads_as_it_was_written_and_a_damaged_one_or_that_of_another_model_or_card_is_refused() -> None:
    text = calibration.write(KNOWN)
    assert json.loads(text)["schema"] == 1 and "dense_layer_us" not in text
    assert calibration.read(text, "one.json") == KNOWN
    damaged = [text.replace(*change) for change in (("0.8", "7"), ("0.8", '"fast"'), ("memory_eff", "memroy_eff"))]
    for wrong in ("", "{", "[]", '{"schema": 2}', '{"schema": 1}', *damaged):
        with pytest.raises(UserError, match=r'calibration "one\.json"') as caught:
            calibration.read(wrong, "one.json")
        assert caught.value.exit_code == 2 and caught.value.hint
    calibration.check(KNOWN, ("llama-3.1-8b",), ("h100-sxm",))
    for model, gpu, words in (("llama-3.1-70b", "h100-sxm", "model"), ("llama-3.1-8b", "b200-sxm", "GPU h100-sxm")):
        with pytest.raises(UserError, match=f"measured on {words}"):
            calibration.check(KNOWN, (model,), (gpu,))


def test_a_plan_is_wide_with_another_layouts_constants_and_says_so() -> None:
    one = SizingRequest(LLAMA, "h100-sxm", tensor=1, engine_version="0.33", calibration=KNOWN)
    two = msgspec.structs.replace(one, tensor=2, gpus_per_node=2)
    for request, is_wide in ((one, False), (two, True)):
        answer = planning.solve(request)
        assert answer.speed is not None
        assert (answer.speed.tpot_ms.high / answer.speed.tpot_ms.low > 1.6) is is_wide
        assert any("measured with layout TP 1" in warning for warning in answer.warnings) is is_wide


# ---- from runs -------------------------------------------------------------------------------------------------------


def measured(concurrency: int, n_in: int, n_out: int, layout: Parallel = ONE, **changed: Any) -> Result:
    """The result of a closed loop on that deployment."""
    costs, fabric = model_costs(LLAMA_8B), Fabric(H100.gpu, layout.n_ranks)
    speed = estimate.estimate(costs, layout, fabric, Workload(n_in, n_out, concurrency), ENGINE, TRUTH)
    summary: dict[str, Any] = {"completed": 100, "failed": 0, "valid": True, "flags": {"concurrency": concurrency}}
    summary |= {"total_input_tokens": 100 * n_in, "total_output_tokens": 100 * n_out}
    summary |= {"mean_ttft_ms": speed.ttft_ms.likely, "mean_tpot_ms": speed.tpot_ms.likely}
    return Result(f"c{concurrency}", summary | changed)


@pytest.mark.parametrize("layout", [Parallel(), Parallel(tensor=2)])
def test_the_planner_predicts_nearer_with_the_file(
    layout: Parallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [measured(*load, layout=layout) for load in LOADS[:4]]
    calibration_file = calibrate.calibrated(runs, Deployed(LLAMA, H100.gpu, layout, "0.33"))
    assert calibration_file.n_points == 4 and (calibration_file.median_error or 0) < 0.02
    file = tmp_path / "calibration.json"
    file.write_text(calibration.write(calibration_file))
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
    run = measured(8, 1000, 200)
    times = (run.summary["mean_ttft_ms"], run.summary["mean_tpot_ms"])
    assert calibrate.point_of(run) == BenchPoint(8, 1000, 200, *times)
    for changed in (
        {"flags": {"rate": 3.0, "concurrency": None}},
        {"valid": False},
        {"total_input_tokens": None},
        {"mean_ttft_ms": None, "mean_tpot_ms": None},
    ):
        assert calibrate.point_of(measured(8, 1000, 200, **changed)) is None
    with pytest.raises(UserError, match="none of 1 run"):
        calibrate.calibrated([measured(8, 10, 10, valid=False)], Deployed(LLAMA, H100.gpu, Parallel(), "0.33"))
    # Tokens are counted from rows where totals are absent; equally long requests came in rounds.
    rows = tuple(Request(0.0, 1.0, 5.0, 5.0, 9.0, 100 + i, 20, True) for i in (-10, 10))
    for some, concurrency, expected in (
        (rows, 4, BenchPoint(4, 100, 20, 5.0, None)),
        (rows[:1] * 2, 1, BenchPoint(1, 90, 20, 5.0, None, 2.0)),
    ):
        summary = {"completed": 2, "mean_ttft_ms": 5.0, "pace": {"concurrency": concurrency}}
        assert calibrate.point_of(Result("a", summary, some)) == expected
