"""The verbs of `penstock bench` around the load generator: what they print, write and refuse. No engine starts here."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
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
from penstock.cli import main
from penstock.cli.bench import sweep
from penstock.cli.bench.sweep import Place
from penstock.deployment import prepare
from penstock.engines import Place as EnginePlace
from penstock.engines.vllm.offline import Latency, Throughput
from penstock.engines.vllm.offline import command as bench_command
from penstock.errors import EngineError, PlanError
from penstock.hardware import detect
from penstock.models.files import BUNDLED
from penstock.planner import Plan
from penstock.spec import reading
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import in_thread

Words = tuple[str, ...]


def test_compare_and_report_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 4, slower=1.3)
    assert main.run(["bench", "compare", str(a), str(b)]) == 0
    assert "worse" in capsys.readouterr().out
    assert main.run(["bench", "compare", str(a), str(b), "--json"]) == 0
    verdicts = {change["verdict"] for change in json.loads(capsys.readouterr().out)["changes"]}
    assert verdicts == {"worse", "no difference beyond noise", "unknown"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"speed": {"ttft_ms": {"low": 1, "likely": 2, "high": 3}}}))
    assert main.run(["bench", "report", str(a), "--plan", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [str(a / "report.html")]
    assert "predicted is off by" in (a / "report.html").read_text()


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
    shown = capsys.readouterr().out
    assert "TP 4: up to" in shown and shown.count("note: p99 of 50 requests is about the slowest of them") == 1


def test_a_sweep_over_given_loads_has_other_prompts_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    def noted(options: argparse.Namespace, *rest: Any) -> dict[str, Any]:
        seeds.append(options.seed)
        return measured(options, *rest)

    monkeypatch.setattr(sweep, "measure", noted)
    monkeypatch.setattr(sweep, "_place", placed)
    words = ["--url", "http://x", "--by", "concurrency", "--steps", "1,4,16", "--slo", "ttft:500", "--seed", "7"]
    assert main.run(["bench", "sweep", *words, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "as it runs: up to 4 requests at once (16 is too many)" in out and "p99_ttft_ms 1000000.0 is over 500" in out
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
    assert json.loads((tmp_path / "as-it-runs-concurrency-1" / "result.json").read_text())["completed"]


# ---- the bare engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[offline.Task]:
    """What vLLM's program was asked for; TP 2 dies."""
    asked: list[offline.Task] = []

    def carry_out(plan: Plan, task: offline.Task) -> Throughput | Latency:
        asked.append(task)
        assert plan.max_num_seqs >= task.n_at_once
        if plan.layout.tensor == 2:
            raise EngineError("could not run vllm bench: no memory", detail="its last words", hint="less")
        if task.verb == "latency":
            return Latency(2.5, (1.0, 2.0, 3.0, 4.0), {"50": 2.5, "90": 3.7, "99": 3.97})
        return Throughput(10, 1.0, 300, 10.0, 300.0, 200)

    monkeypatch.setattr(offline, "carry_out", carry_out)
    return asked


def test_each_tensor_size_has_a_row_and_a_refused_or_broken_one_its_reason(
    tasks: list[offline.Task], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "throughput", "--engine", "vllm", "--num-prompts", "10"]
    assert main.run([*words, "--tensor", "1,3,2,1"]) == 1
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()[1:]]
    assert rows[0] == rows[3] == ["TP", "1", "10.00", "300.00", "200.00", "1.0", "s"]
    assert "cannot" in rows[1] and "could not run vllm bench: no memory" in printed.out
    assert "its last words" in printed.err
    assert main.run([*words, "--tensor", "2,1", "--json"]) == 1
    broken, measured = json.loads(capsys.readouterr().out)
    assert broken["refusal"] == "could not run vllm bench: no memory" and measured["requests_per_second"] == 10
    assert measured["engine"].startswith("vllm") and measured["output_tokens"] == 200
    assert main.run([*words, "--tensor", "2"]) == 1
    assert "hint: less" in capsys.readouterr().err


@pytest.fixture
def large_vocabulary(tmp_path: Path) -> list[str]:
    """The words of a model without weights: vLLM's latency benchmark draws token ids that the demo does not have."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    config = json.loads((BUNDLED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 12_000}))
    return [str(folder), "--engine", "vllm", "--set", "engine.args.load-format=dummy"]


def test_latency_takes_vllms_shape_by_default(
    tasks: list[offline.Task], large_vocabulary: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "latency", *large_vocabulary, "--num-iters", "4"]) == 0
    assert " ".join(capsys.readouterr().out.splitlines()[1].split()) == "TP 1 2.500 s 2.500 s 3.700 s 3.970 s 4"
    assert " ".join(tasks[0].words) == (
        "--batch-size 8 --input-len 32 --output-len 128 --num-iters-warmup 3 --num-iters 4 --seed 0"
    )


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("random", "--dataset-name random --random-input-len 9 --random-output-len 5"),
        ("sharegpt:{file}", "--dataset-name sharegpt --dataset-path {file} --output-len 5"),
        (
            "prefix:n=2,suffix=3",
            "--dataset-name prefix_repetition --prefix-repetition-num-prefixes 2 --prefix-repetition-prefix-len 1000 "
            "--prefix-repetition-suffix-len 3 --prefix-repetition-output-len 5",
        ),
    ],
)
def test_data_sets_go_by_vllms_names(dataset: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text("[]")
    task = offline.throughput_task(dataset.format(file=file), 6, 2, 7, 9, 5)
    assert " ".join(task.words) == f"{words.format(file=file)} --num-prompts 6 --num-warmups 2 --seed 7"


def test_vllm_bench_gets_the_plans_flags_without_the_servers() -> None:
    args = {"enable_auto_tool_choice": True, "tool-call-parser": "hermes", "block-size": 16}
    text = {"model": "penstock-demo", "engine": {"kind": "vllm", "args": args}}
    plan = prepare.make_plan(reading.from_mapping(text, "a test", []), detect.this_machine(), 1)
    argv = bench_command(plan, EnginePlace("127.0.0.1", 0, "/f", "python"), "latency", ("--seed", "1")).argv
    assert argv[:5] == ("python", "-m", "vllm.entrypoints.cli.main", "bench", "latency")
    assert "--max-model-len" in argv and "--block-size" in argv and argv[-2:] == ("--output-json", "/f/answer.json")
    assert not {"--host", "--port", "--served-model-name", "--tool-call-parser", "--enable-auto-tool-choice"} & {*argv}


FAKE_VLLM = """
import json, sys, time
answer = {"num_requests": 6, "elapsed_time": 2.0, "total_num_tokens": 168, "requests_per_second": 3.0,
          "tokens_per_second": 84.0}
print("Total num output tokens:  48")
if "--num-prompts" not in sys.argv:
    time.sleep(600)
if "7" in sys.argv:
    sys.exit("RuntimeError: no such luck")
with open(sys.argv[sys.argv.index("--output-json") + 1], "w") as file:
    json.dump(answer, file)
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "python" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "python"))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("fake_vllm")
def test_vllms_json_is_read_and_its_last_words_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "throughput", "--engine", "vllm", "--json", "--num-prompts"]
    assert main.run([*words, "6"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["total_num_tokens"], row["output_tokens"], row["elapsed_time"]) == (168, 48, 2.0)
    assert main.run([*words, "7"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "could not run vllm bench throughput" in error["message"] and "no such luck" in error["detail"]


@pytest.mark.processes
@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_ends_with_the_command(number: signal.Signals, large_vocabulary: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "penstock", "bench", "latency", *large_vocabulary]
    child = subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (logs := [*tmp_path.glob("penstock-bench-*/engine.log")]) or not logs[0].read_text():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(60) == 128 + number
    folder = logs[0].parent
    assert not folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        *(("compare", "/nowhere", "/nowhere"), ("compare", "/nowhere"), ("report", "/nowhere"), (), ("measure",)),
        *(("report", "{run}", "--plan", "/nowhere"), ("report", "{run}", "--out", "/nowhere/r.html")),
        ("report", "{run}", "--calibrate", "{out}/c.json"),
        ("report", "{run}", "--calibrate", "{out}/c.json", "--calibrate-model", "llama-3.1-8b", "--gpu", "h100-sxm"),
        ("report", "{run}", "--calibrate", "{out}/c.json", "--calibrate-model", "llama-3.1-8b", "--gpu", "gtx"),
        *(("sweep", "--out", "{out}/s"), ("sweep", "--slo", "tftt:5", "--out", "{out}/s")),
        ("sweep", "--slo", "ttft:5", "--url", "http://x", "--tensor", "2", "--out", "{out}/s"),
        ("sweep", "--steps", "0.5,1.5", "--by", "concurrency", "--url", "http://x", "--out", "{out}/s"),
        ("sweep", "--slo", "ttft:5", "--url", "http://u:p@x", "--out", "{out}/s"),
        *(("sweep", "--steps", "1,x", "--out", "{out}/s"), ("sweep", "--failed", "2", "--out", "{out}/s")),
        *(("throughput", "--dataset", "sharegpt:/nowhere.json"), ("throughput", "--dataset", "turns:turns=2")),
        *(("throughput", "--dataset", "prefix:n=0"), ("throughput", "--engine", "llamacpp")),
        *(("throughput", "--tensor", "0"), ("throughput", "--num-prompts", "-1")),
        ("latency", "--input-len", "100000", "--engine", "vllm"),
        *(("latency", "--engine", "vllm"), ("latency", "/nowhere/model")),
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


# ---- the real engine -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.vllm
def test_vllm_runs_its_own_benchmarks(large_vocabulary: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM draws token ids and reads their text again: lengths of prompts are about right."""
    shape = ["--num-prompts", "6", "--input-tokens", "20", "--output-tokens", "8", "--warmup", "1"]
    assert main.run(["bench", "throughput", *shape, "--engine", "vllm", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["output_tokens"] == 48 and row["total_num_tokens"] == pytest.approx(6 * 28, abs=12)
    assert row["requests_per_second"] > 0
    shape = ["--num-iters", "2", "--num-iters-warmup", "1", "--output-len", "8"]
    assert main.run(["bench", "latency", *shape, *large_vocabulary, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["latencies"]) == 2 and row["avg_latency"] > 0
