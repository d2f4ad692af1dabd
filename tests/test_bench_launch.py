"""What was launched stands beside what was measured: the planner's word for that very load, and calibration without
flags.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from bench_samples import write_run
from samples import demo_plan

from penstock.bench import calibrate
from penstock.bench.report import text as show
from penstock.bench.results import folder as folders
from penstock.bench.results.folder import Result
from penstock.bench.results.stats import Timed
from penstock.bench.serve import Report
from penstock.cli import main
from penstock.cli.bench.deployment import Launch, deployed_of
from penstock.cli.bench.deployment import predicted as predicted_of
from penstock.deployment import planning
from penstock.errors import UserError
from penstock.hardware import Gpu, detect
from penstock.models import ModelFacts
from penstock.planner import Forecast, Key
from penstock.spec import reading
from penstock.spec.deployment import Parallel
from penstock.text import GIB

KEY = Key("a", "h200-sxm", "0.33.0", "bfloat16", None, "auto", 8192, 1024, None, True, False, ())
FILE = "model: llama-3.1-8b\nengine: {kind: vllm, max_model_len: 16384}\n"


def launch(engine: str = "vllm", **changed: Any) -> Launch:
    """Llama 8B on one H200."""
    name = "llama-3.1-8b"
    model = ModelFacts(name, name, "none", "LlamaForCausalLM", 0, 0, 32, 4096, 32, 8, 128, 128256, 131072)
    facts: dict[str, Any] = {
        "model": model, "engine_version": "0.33.0", "device": "cuda", "layout": Parallel(), "max_model_len": 16384,
        "max_num_seqs": 8, "gpu_memory_utilization": 0.92, "args": {}, "forecast": Forecast(KEY, 100.0),
    }  # fmt: skip
    return Launch(reading.parse(FILE, "one.yaml"), demo_plan(engine, **{**facts, **changed}))


def test_results_show_no_secret_of_a_deployment_and_belong_to_its_user(tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_secret", "HTTPS_PROXY": "http://me:pw_secret@proxy"}
    of_run = reading.parse(FILE, "one.yaml")
    given = {"hf-token": "arg_secret", "seed": 7, "attention-backend": "FLASHINFER"}
    engine = msgspec.structs.replace(of_run.engine, env=env, args=given)
    store = "postgresql://me:pw_secret@db/usage"
    gateway = msgspec.structs.replace(of_run.gateway, store=store)
    whole = msgspec.structs.replace(of_run, engine=engine, gateway=gateway)
    plan = launch(env=env, args=given).plan
    folders.prepare(tmp_path / "new")
    Launch(whole, plan).keep(tmp_path / "new")
    kept = list((tmp_path / "new").iterdir())
    assert sorted(path.name for path in kept) == ["plan.json", "spec.yaml"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    for path in kept:
        text = path.read_text()
        assert "secret" not in text and "HF_TOKEN" in text and "***" in text and "FLASHINFER" in text
    shown = reading.load(tmp_path / "new" / "spec.yaml")
    assert shown.engine.args == given | {"hf-token": "***"} and shown.gateway.store == "postgresql://***@db/usage"


def measured(concurrency: int | None, replicas: int = 1) -> dict[str, Any]:
    """A closed loop of 512 tokens in and 128 out, or an open one."""
    return {
        "versions": {}, "pace": {"concurrency": concurrency}, "max_concurrent_requests": concurrency or 3,
        "completed": 10, "total_input_tokens": 5120, "total_output_tokens": 1280,
        "replicas": {str(number): 10 // replicas for number in range(replicas)},
        "mean_tpot_ms": 5.125, "output_throughput": 1400.7,  # an H200's own
    }  # fmt: skip


def told(launched: Launch, result: dict[str, Any], lengths: tuple[int, ...] = (512,)) -> dict[str, Any]:
    """The result with what is known of the launch; its requests had prompts of these lengths."""
    requests = [Timed(0, 0.0, 0.0, 0.0, 1.0, input_tokens=length, output_tokens=128) for length in lengths]
    launched.tell(cast(Report, SimpleNamespace(result=result, requests=requests)))
    return result


def test_the_load_that_was_measured_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--gpu", "h200", "--max-model-len", "16384", "--no-measured", "--json"]
    assert main.run([*words, "--concurrency", "8", "--input-tokens", "512", "--output-tokens", "128"]) == 0
    planned = json.loads(capsys.readouterr().out)["speed"]
    result = told(launch(), measured(8), (512, 500))
    assert result["predicted"] == planned and result["versions"] == {"vllm": "0.33.0"}
    assert result["launch"]["layout"] == [1, 1, 1] and result["launch"]["gpu"] == "h200-sxm"
    text = show.prediction(calibrate.pairs(Result("", result)))
    assert "mean TPOT, ms:" in text and "output tokens/s:" in text and "outside" not in text


def test_equal_requests_come_in_waves_and_are_predicted_so() -> None:
    """Measured on an H200: c32 of 4096 tokens in, 128 out: a first token after 1072 ms and 24.7 ms for each after."""
    wave, alone = (told(launch(), measured(8), lengths)["predicted"] for lengths in ((512, 512), (512, 500)))
    assert wave["ttft_ms"]["likely"] > alone["ttft_ms"]["likely"]
    assert wave["tpot_ms"]["likely"] < alone["tpot_ms"]["likely"]


@pytest.mark.parametrize(
    ("launched", "result"),
    [
        ({}, {"pace": {"concurrency": None}}),
        ({"forecast": None}, {}),
        ({"engine_version": "0.0.1"}, {}),
        ({"layout": Parallel(tensor=3)}, {}),  # 8 KV heads
        ({}, {"completed": 0}),
        ({}, {"total_input_tokens": None}),
    ],
)
def test_nothing_is_predicted_of_what_nobody_can_tell(launched: dict[str, Any], result: dict[str, Any]) -> None:
    assert told(launch(**launched), measured(8) | result)["predicted"] is None


def test_a_run_without_a_launch_or_a_failing_planner_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = told(Launch(), measured(8))
    assert result["predicted"] is None and result["launch"] is None and calibrate.pairs(Result("", result)) == []
    monkeypatch.setattr(planning, "speed", lambda request: 1 / 0)
    assert told(launch(), measured(8))["predicted"] is None


def flags(**given: Any) -> argparse.Namespace:
    names = ("calibrate_model", "gpu", "layout", "engine_version")
    return argparse.Namespace(**{**dict.fromkeys(names), **given})


def test_a_calibration_is_of_what_was_launched() -> None:
    cut = launch(layout=Parallel(tensor=2), forecast=Forecast(msgspec.structs.replace(KEY, enforce_eager=True), 1.0))
    found = deployed_of(flags(), cut.facts)
    assert (found.facts.reference, found.gpu.id, found.layout) == ("llama-3.1-8b", "h200-sxm", Parallel(tensor=2))
    assert found.engine_version == "0.33.0" and found.is_eager and found.n_nodes == 1
    told = deployed_of(flags(calibrate_model="qwen3-8b", gpu="h100-sxm", layout=(4,), engine_version="0.30"), cut.facts)
    assert (told.facts.reference, told.gpu.id, told.layout) == ("qwen3-8b", "h100-sxm", Parallel(tensor=4))
    with pytest.raises(UserError, match="without the model's name"):
        deployed_of(flags(), {})
    with pytest.raises(UserError, match="runs of llamacpp"):
        deployed_of(flags(gpu="h100-sxm"), launch(engine="llamacpp").facts)


def test_a_card_that_the_catalogue_does_not_have_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = Gpu(0, "NVIDIA Strange X9", 80 * GIB, 80 * GIB)
    monkeypatch.setattr(detect, "gpus", lambda: (strange,))
    key = msgspec.structs.replace(KEY, gpu=planning.card_of([strange]).id)
    found = deployed_of(flags(), launch(forecast=Forecast(key, 1.0)).facts)
    assert found.gpu.id == key.gpu and found.gpu.stands_in is not None


def test_replicas_share_the_load_and_more_than_there_was_room_for_is_no_wave() -> None:
    one = predicted_of(launch(), measured(8), has_equal_lengths=False)
    two = predicted_of(launch(), measured(16, replicas=2), has_equal_lengths=False)
    single = predicted_of(launch(), measured(1, replicas=2), has_equal_lengths=False)  # now to one, now to the other
    assert single == predicted_of(launch(), measured(1), has_equal_lengths=False)
    assert one is not None and two is not None and two["tpot_ms"] == one["tpot_ms"]
    assert two["requests_per_s"]["likely"] == pytest.approx(2 * one["requests_per_s"]["likely"])
    # 64 at once where 8 run: who waits for a place waits for whole answers of others.
    crowded = launch(forecast=Forecast(KEY, 100.0))._replace(
        deployment=reading.parse(FILE.replace("16384}", "16384, args: {max-num-seqs: 8}}"), "one.yaml")
    )
    found = predicted_of(crowded, measured(64), has_equal_lengths=True)
    assert found is not None
    answer_s = (found["ttft_ms"]["likely"] + 127 * found["tpot_ms"]["likely"]) / 1e3
    in_flight = found["requests_per_s"]["likely"] * answer_s
    assert in_flight == pytest.approx(64, rel=0.25)
    few = predicted_of(launch(), measured(64) | {"max_concurrent_requests": 8}, has_equal_lengths=True)
    assert few == predicted_of(launch(), measured(8), has_equal_lengths=True)


def test_runs_of_our_own_need_no_names_and_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for tensor, concurrency, ttft, tpot in ((1, 1, 60.0, 9.0), (1, 8, 130.0, 10.5), (2, 32, 400.0, 15.0)):
        times: Any = {
            "mean_ttft_ms": ttft, "mean_tpot_ms": tpot, "total_input_tokens": 58_000, "total_output_tokens": 11_600,
            "flags": {"concurrency": concurrency}, "launch": launch(layout=Parallel(tensor=tensor)).facts,
        }  # fmt: skip
        runs.append(str(write_run(tmp_path / f"{tensor}-{concurrency}", n=60, **times)))
    file, page = tmp_path / "calibration.json", ["--out", str(tmp_path / "r.html")]
    assert main.run(["bench", "report", *runs, "--calibrate", str(file), *page]) == 2
    assert "2 different launches" in capsys.readouterr().err and not file.exists()
    assert main.run(["bench", "report", *runs[:2], "--calibrate", str(file), *page]) == 0
    told = json.loads(file.read_text())
    assert told["gpu"] == "h200-sxm" and told["engine_version"] == "0.33.0" and told["layout"]["tensor"] == 1
    capsys.readouterr()
    words = ["plan", "llama-3.1-8b", "--gpu", "h200", "--max-model-len", "8192", "--calibration", str(file), "--json"]
    assert main.run(words) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not any("calibration" in warning for warning in planned["warnings"])  # it is of this very layout
