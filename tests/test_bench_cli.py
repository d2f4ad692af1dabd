"""The verbs of `penstock bench` around the load generator: what they print, write and refuse. No engine starts here."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from bench_samples import write_run

from penstock.bench import offline, serve
from penstock.bench.report import figures
from penstock.cli import main
from penstock.cli.bench import sweep
from penstock.cli.bench.sweep import Place
from penstock.engines.offline import PROGRAMS, Done
from penstock.errors import EngineError, PlanError
from penstock.planner import Plan
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import in_thread

Words = tuple[str, ...]


def test_compare_tells_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 4, slower=1.3)
    assert main.run(["bench", "compare", str(a), str(b)]) == 0
    assert "worse" in capsys.readouterr().out
    assert main.run(["bench", "compare", str(a), str(b), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {change["verdict"] for change in told["changes"]} == {"worse", "no difference beyond noise"}


def test_report_writes_its_page_and_its_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = figures.of_runs
    monkeypatch.setattr(figures, "of_runs", lambda runs: whole(runs)[:1])
    run = write_run(tmp_path / "a", n=60)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"speed": {"ttft_ms": {"low": 1, "likely": 2, "high": 3}}}))
    assert main.run(["bench", "report", str(run), "--plan", str(plan), "--png", "--json"]) == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["written"]]
    assert written[0] == run / "report.html" and all(path.is_file() for path in written)
    assert "predicted is off by" in written[0].read_text() and sum(path.suffix == ".png" for path in written) == 1


def test_report_writes_the_planners_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for concurrency, ttft, tpot in ((1, 60.0, 9.0), (8, 130.0, 10.5), (32, 400.0, 15.0)):
        flags: Any = {"concurrency": concurrency}
        times: Any = {
            "mean_ttft_ms": ttft,
            "mean_tpot_ms": tpot,
            "total_input_tokens": 58_000,
            "total_output_tokens": 11_600,
        }
        runs.append(str(write_run(tmp_path / str(concurrency), n=60, flags=flags, **times)))
    file = tmp_path / "calibration.json"
    words = ["--calibrate", str(file), "--calibrate-model", "llama-3.1-8b", "--gpu", "h100-sxm"]
    assert main.run(["bench", "report", *runs, *words, "--out", str(tmp_path / "r.html")]) == 0
    assert str(file) in capsys.readouterr().out
    assert main.run(["plan", "llama-3.1-8b", "--gpu", "h100-sxm", "--calibration", str(file), "--json"]) == 0


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace, place: Place, rate: Any, concurrency: Any, folder: Path) -> dict[str, Any]:
    """A server that keeps 500 ms up to 8 requests/s (or at once) for each tensor rank; its URL says how many."""
    load, limit = rate or concurrency, 10 * int(place.url)
    ttft = 100 / (1 - load / limit) if load < limit else 1e6
    return {"completed": 50, "failed": 0, "p99_ttft_ms": ttft, "output_throughput": 60.0 * load, "valid": True}


@contextlib.contextmanager
def placed(options: argparse.Namespace, deployment: Any, tensor: int | None) -> Iterator[Place]:
    if tensor == 2:
        raise PlanError("cannot place model: needs 2 GPUs")
    yield Place(str(tensor or 1), "m", None, None)


@pytest.fixture
def fake_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "_place", placed)


@pytest.mark.usefixtures("fake_load")
def test_a_sweep_tells_the_highest_load_of_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "sweep", "--tensor", "1,2,4", "--slo", "ttft:500", "--out", str(tmp_path / "s")]
    assert main.run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    highest = {layout: found["highest"] for layout, found in told["layouts"].items()}
    assert 7.6 <= highest["TP 1"] <= 8 and 30.4 <= highest["TP 4"] <= 32
    assert told["refused"] == {"TP 2": "cannot place model: needs 2 GPUs"}
    assert json.loads((tmp_path / "s" / "sweep.json").read_text()) == told
    assert "throughput against p99 TTFT" not in (tmp_path / "s" / "report.html").read_text()[:200]
    assert main.run(words) == 0
    assert "TP 4: up to" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_load")
def test_a_sweep_over_given_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", "http://x", "--by", "concurrency", "--steps", "1,4,16", "--slo", "ttft:500"]
    assert main.run(["bench", "sweep", *words, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "as it runs: up to 4 requests at once (16 is too many)" in out and "p99_ttft_ms 1000000.0 is over 500" in out


def test_every_load_of_a_sweep_has_prompts_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def noted(options: argparse.Namespace, *rest: Any) -> dict[str, Any]:
        seeds.append(options.seed)
        return measured(options, *rest)

    monkeypatch.setattr(sweep, "measure", noted)
    monkeypatch.setattr(sweep, "_place", placed)
    words = ["--url", "http://x", "--by", "concurrency", "--steps", "1,2,4", "--seed", "7", "--out", str(tmp_path)]
    assert main.run(["bench", "sweep", *words]) == 0
    assert seeds == [7, 8, 9]


def test_ctrl_c_ends_all_layouts_of_a_sweep_and_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(options: argparse.Namespace, place: Place, *rest: Any) -> dict[str, Any]:
        if rest[0] >= 4:
            raise KeyboardInterrupt
        return measured(options, place, *rest)

    monkeypatch.setattr(sweep, "measure", ended)
    monkeypatch.setattr(sweep, "_place", placed)
    words = ["--tensor", "1,4", "--slo", "ttft:500", "--out", str(tmp_path), "--json"]
    assert main.run(["bench", "sweep", *words]) == 130
    told = capsys.readouterr()
    facts = json.loads(told.out)
    assert facts["interrupted"] and list(facts["layouts"]) == ["TP 1"] and facts["layouts"]["TP 1"]["highest"] == 2
    assert json.loads((tmp_path / "sweep.json").read_text()) == facts
    assert (
        "interrupted" in told.err and "TP 1: up to 2 requests/s; interrupted" in (tmp_path / "report.html").read_text()
    )


def test_a_run_of_a_sweep_that_was_ended_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = serve.report
    monkeypatch.setattr(serve, "report", lambda *rest: msgspec.structs.replace(whole(*rest), was_interrupted=True))
    with in_thread(Options(model="m", ttft_s=0, tokens_per_s=float("inf"))) as engine:
        words = ["--url", engine.url, "--prompt", "a", "--by", "concurrency", "--steps", "1,2", "--requests", "2"]
        assert main.run(["bench", "sweep", *words, "--out", str(tmp_path)]) == 130
    assert json.loads((tmp_path / "as it runs concurrency 1".replace(" ", "-") / "result.json").read_text())[
        "completed"
    ]


# ---- the bare engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[offline.Task]:
    """What the engine was given; each round takes as many seconds as its number."""
    given: list[offline.Task] = []

    def carry_out(plan: Plan, task: offline.Task) -> Done:
        given.append(task)
        assert plan.max_num_seqs >= task.n_at_once
        n_out = sum(task.output_tokens)
        return Done(tuple(float(at + 1) for at in range(task.n_times)), 100, n_out)

    monkeypatch.setattr(offline, "carry_out", carry_out)
    return given


def test_throughput_prints_a_row_for_each_tensor_size(
    fake_engine: list[offline.Task], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "throughput", "--engine", "llamacpp", "--num-prompts", "10", "--input-tokens", "10"]
    assert main.run([*words, "--output-tokens", "20", "--tensor", "1,2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["TP", "1", "10.00", "300.00", "200.00", "1.0", "s"]
    assert out[2].startswith("TP 2") and "cannot cut a model over 2 ranks on engine llamacpp" in out[2]
    (task,) = fake_engine
    assert len(set(task.prompts)) == 10 and set(task.output_tokens) == {20}
    assert main.run([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["requests_per_second"] == 10 and row["engine"].startswith("llamacpp")


def test_latency_takes_vllms_shape_by_default(
    fake_engine: list[offline.Task], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "latency", "--engine", "llamacpp", "--num-iters", "4"]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[1].split()) == "TP 1 2.500 s 2.500 s 3.700 s 3.970 s 4"
    (task,) = fake_engine
    assert [len(prompt) for prompt in task.prompts] == [32] * 8 and task.output_tokens == (128,) * 8
    assert task.n_warmup == 3 and all(isinstance(token, int) and token < 2048 for token in task.prompts[0])


def test_an_engine_that_dies_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(PROGRAMS, "llamacpp", "penstock.no_such_program")
    asked = offline.Task(("a",), (1,))
    from penstock.deployment import prepare
    from penstock.hardware import detect
    from penstock.spec import reading

    deployment = reading.from_mapping({"model": "penstock-demo", "engine": {"kind": "llamacpp"}}, "a test", [])
    with pytest.raises(EngineError, match=r"could not run llamacpp offline: .* exited with code 1") as caught:
        offline.carry_out(prepare.make_plan(deployment, detect.this_machine(), 1), asked)
    assert "no_such_program" in (caught.value.detail or "")


def test_a_layout_whose_engine_dies_does_not_take_the_others_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def carry_out(plan: Plan, task: offline.Task) -> Done:
        if plan.layout.tensor == 2:
            raise EngineError("could not run vllm offline: no memory", detail="its last words", hint="less")
        return Done((1.0,), 100, 100)

    monkeypatch.setattr(offline, "carry_out", carry_out)
    words = ["bench", "throughput", "--engine", "vllm", "--num-prompts", "10", "--output-tokens", "10"]
    assert main.run([*words, "--tensor", "1,2,1"]) == 1
    told = capsys.readouterr()
    assert [line[:18].split() for line in told.out.splitlines()[1:]] == [
        ["TP", "1", "10.00"],
        ["TP", "2", "could", "not", "r"],
        ["TP", "1", "10.00"],
    ]
    assert "its last words" in told.err
    assert main.run([*words, "--tensor", "2,1", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["refusal"] == "could not run vllm offline: no memory" and rows[1]["requests_per_second"] == 10
    assert main.run([*words, "--tensor", "2"]) == 1
    assert "hint: less" in capsys.readouterr().err


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "/nowhere", "/nowhere"),
        ("compare", "/nowhere"),
        ("report", "/nowhere"),
        ("report", "{run}", "--plan", "/nowhere"),
        ("report", "{run}", "--out", "/nowhere/r.html"),
        ("report", "{run}", "--calibrate", "{out}/c.json"),
        ("report", "{run}", "--calibrate", "{out}/c.json", "--calibrate-model", "llama-3.1-8b", "--gpu", "h100-sxm"),
        ("report", "{run}", "--calibrate", "{out}/c.json", "--calibrate-model", "llama-3.1-8b", "--gpu", "gtx"),
        ("sweep", "--out", "{out}/s"),
        ("sweep", "--slo", "tftt:5", "--out", "{out}/s"),
        ("sweep", "--slo", "ttft:5", "--url", "http://x", "--tensor", "2", "--out", "{out}/s"),
        ("sweep", "--steps", "0.5,1.5", "--by", "concurrency", "--url", "http://x", "--out", "{out}/s"),
        ("sweep", "--slo", "ttft:5", "--url", "http://u:p@x", "--out", "{out}/s"),
        ("sweep", "--steps", "1,x", "--out", "{out}/s"),
        ("sweep", "--failed", "2", "--out", "{out}/s"),
        ("throughput", "--dataset", "sharegpt:/nowhere.json"),
        ("throughput", "--dataset", "turns:turns=2"),
        ("throughput", "--dataset", "prefix", "--prompt", "x"),
        ("throughput", "--tensor", "0"),
        ("throughput", "--num-prompts", "-1"),
        ("latency", "--input-len", "100000", "--engine", "llamacpp"),
        ("latency", "/nowhere/model"),
        (),
        ("measure",),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run(tmp_path / "run", n=20), tmp_path / "out"
    out.mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert main.run(["bench", *(word.format(run=run, out=out) for word in words)]) == 2
    assert "error:" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# ---- real engines ----------------------------------------------------------------------------------------------------


def check_offline(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both shapes on the bundled model; every token that was asked for is counted."""
    words = ["--engine", engine, "--json"]
    shape = ["--num-prompts", "6", "--input-tokens", "20", "--output-tokens", "8"]
    assert main.run(["bench", "throughput", *shape, *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["total_num_tokens"] == 6 * 28 and row["output_tokens"] == 48 and row["requests_per_second"] > 0


@pytest.mark.llamacpp
def test_llamacpp_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    check_offline("llamacpp", capsys)
    assert (
        main.run(["bench", "latency", "--num-iters", "2", "--output-len", "8", "--engine", "llamacpp", "--json"]) == 0
    )
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["latencies"]) == 2 and row["total_num_tokens"] == 8 * 40


@pytest.mark.llamacpp
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_does_not_outlive_who_asked(number: signal.Signals, tmp_path: Path) -> None:
    words = ["bench", "latency", "--engine", "llamacpp", "--num-iters", "100000"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-m", "penstock", *words], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("penstock-bench-*/job.json")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    (folder,) = tmp_path.glob("penstock-bench-*")
    time.sleep(0.5)
    child.send_signal(number)
    assert child.wait(30) == 128 + number
    assert not folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.vllm
def test_vllm_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    check_offline("vllm", capsys)
