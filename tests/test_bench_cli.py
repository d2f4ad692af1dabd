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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from bench_samples import write_run
from golden_files import lines
from launching import call
from waiting import until

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


def test_compare_and_report_print_and_write(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 4, slower=1.3)
    shown = call("bench", "compare", a, b)
    assert shown.code == 0 and "worse" in shown.out
    verdicts = {change["verdict"] for change in call("bench", "compare", a, b, "--json").json["changes"]}
    assert verdicts == {"worse", "no difference beyond noise", "unknown"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"speed": {"ttft_ms": {"low": 1, "likely": 2, "high": 3}}}))
    assert call("bench", "report", a, "--plan", plan, "--json").json["written"] == [str(a / "report.html")]
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
def offered(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The options of each run of a sweep."""
    asked: list[argparse.Namespace] = []

    def noted(options: argparse.Namespace, *rest: Any) -> dict[str, Any]:
        asked.append(options)
        return measured(options, *rest)

    monkeypatch.setattr(sweep, "measure", noted)
    monkeypatch.setattr(sweep, "_place", placed)
    return asked


@pytest.mark.loopback
@pytest.mark.usefixtures("offered")
def test_a_sweep_tells_the_highest_load_of_every_layout(tmp_path: Path) -> None:
    words = ["bench", "sweep", "--tensor", "1,2,4", "--slo", "ttft:500", "--out", tmp_path / "s"]
    told = call(*words, "--json").json
    highest = {layout: found["highest"] for layout, found in told["layouts"].items()}
    assert 7.6 <= highest["TP 1"] <= 8 and 30.4 <= highest["TP 4"] <= 32
    assert told["refused"] == {"TP 2": "cannot place model: needs 2 GPUs"}
    assert json.loads((tmp_path / "s" / "sweep.json").read_text()) == told
    shown = call(*words)
    assert shown.code == 0 and "TP 4: up to" in shown.out
    assert shown.out.count("note: p99 of 50 requests is about the slowest of them") == 1


def test_a_sweep_over_given_loads_has_other_prompts_for_each(tmp_path: Path, offered: list[argparse.Namespace]) -> None:
    words = ["--url", "http://x", "--by", "concurrency", "--steps", "1,4,16", "--slo", "ttft:500", "--seed", "7"]
    told = call("bench", "sweep", *words, "--out", tmp_path)
    assert told.code == 0 and "as it runs: up to 4 requests at once (16 is too many)" in told.out
    assert "p99_ttft_ms 1000000.0 is over 500" in told.out
    assert [options.seed for options in offered] == [7, 8, 9]


@pytest.mark.loopback
@pytest.mark.usefixtures("offered")
def test_ctrl_c_ends_all_layouts_of_a_sweep_and_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(options: argparse.Namespace, place: Place, *rest: Any) -> dict[str, Any]:
        if rest[0] >= 4:
            raise KeyboardInterrupt
        return measured(options, place, *rest)

    monkeypatch.setattr(sweep, "measure", ended)
    told = call("bench", "sweep", "--tensor", "1,4", "--slo", "ttft:500", "--out", tmp_path, "--json")
    facts = told.json
    assert told.code == 130 and facts["interrupted"] and list(facts["layouts"]) == ["TP 1"]
    assert facts["layouts"]["TP 1"]["highest"] == 2
    assert json.loads((tmp_path / "sweep.json").read_text()) == facts
    assert "interrupted" in told.err
    assert "TP 1: up to 2 requests/s; interrupted" in (tmp_path / "report.html").read_text()


@pytest.mark.loopback
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


@pytest.mark.loopback
@pytest.mark.usefixtures("tasks")
def test_each_tensor_size_has_a_row_and_a_refused_or_broken_one_its_reason() -> None:
    words = ["bench", "throughput", "--engine", "vllm", "--num-prompts", "10", "--tensor"]
    told = call(*words, "1,3,2,1")
    rows = [line.split() for line in told.out.splitlines()[1:]]
    assert told.code == 1 and rows[0] == rows[3] == ["TP", "1", "10.00", "300.00", "200.00", "1.0", "s"]
    assert "cannot" in rows[1] and "could not run vllm bench: no memory" in told.out
    assert "its last words" in told.err
    broken, measured = call(*words, "2,1", "--json").json
    assert broken["refusal"] == "could not run vllm bench: no memory" and measured["requests_per_second"] == 10
    assert measured["engine"].startswith("vllm") and measured["output_tokens"] == 200
    assert "hint: less" in call(*words, "2").err


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


def test_latency_takes_vllms_shape_by_default(tasks: list[offline.Task], large_vocabulary: list[str]) -> None:
    told = call("bench", "latency", *large_vocabulary, "--num-iters", "4")
    assert " ".join(told.out.splitlines()[1].split()) == "TP 1 2.500 s 2.500 s 3.700 s 3.970 s 4"
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
import sys, time
if "throughput" in sys.argv:
    sys.exit("RuntimeError: no such luck")
print("started", flush=True)
time.sleep(600)
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
def test_the_last_words_of_vllm_are_kept() -> None:
    error = call("bench", "throughput", "--engine", "vllm", "--json").json["error"]
    assert "could not run vllm bench throughput" in error["message"] and "no such luck" in error["detail"]


@pytest.mark.processes
@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_ends_with_the_command(number: signal.Signals, large_vocabulary: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "penstock", "bench", "latency", *large_vocabulary]
    child = subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    logs = until(lambda: [*tmp_path.glob("penstock-bench-*/engine.log")], "its log")
    until(lambda: child.poll() is not None or logs[0].read_text(), "its engine runs")
    child.send_signal(number)
    assert child.wait(60) == 128 + number
    folder = logs[0].parent
    assert not folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.loopback
@pytest.mark.parametrize("words", lines("bench_mistakes.txt"))
def test_bad_input_is_refused_and_changes_nothing(words: str, tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run", n=20), tmp_path / "out"
    out.mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    refused = call("bench", *words.format(run=run, out=out).split())
    assert refused.code == 2 and "error:" in refused.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# ---- the real engine -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.vllm
def test_vllm_runs_its_own_benchmarks(large_vocabulary: list[str]) -> None:
    """vLLM draws token ids and reads their text again: lengths of prompts are about right."""
    shape = ["--num-prompts", "6", "--input-tokens", "20", "--output-tokens", "8", "--warmup", "1"]
    (row,) = call("bench", "throughput", *shape, "--engine", "vllm", "--json").json
    assert row["output_tokens"] == 48 and row["total_num_tokens"] == pytest.approx(6 * 28, abs=12)
    assert row["requests_per_second"] > 0
    shape = ["--num-iters", "2", "--num-iters-warmup", "1", "--output-len", "8"]
    (row,) = call("bench", "latency", *shape, *large_vocabulary, "--json").json
    assert len(row["latencies"]) == 2 and row["avg_latency"] > 0
