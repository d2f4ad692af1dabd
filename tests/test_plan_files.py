"""`penstock plan FILE.yaml`: what it takes of a deployment file, what flags change, and the way there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import cpu_machine, gpu_machine

from penstock.cli import main
from penstock.deployment import measured
from penstock.engines.vllm.engine import Vllm
from penstock.hardware import detect
from penstock.spec import reading
from penstock.spec.deployment import Parallel
from penstock.targets import local

Ask = Callable[..., tuple[int, dict[str, Any]]]
FILE = """
model: llama-3.1-70b
name: big
replicas: 2
hardware: {gpu: h100-sxm, gpus_per_node: 8}
workload: {input_tokens: 3000, tpot_ms: 400}
engine:
  max_model_len: 16384
  args: {max-num-seqs: 64, enforce-eager: true, seed: 7, middleware: [a, b]}
  env: {A: "1"}
gateway: {port: 0, aliases: [x]}
"""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*words: object) -> tuple[int, dict[str, Any]]:
        code = main.run(["plan", *map(str, words), "--json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, answer

    return ask


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "big.yaml"
    path.write_text(FILE, "utf-8")
    return path


def layout_of(answer: dict[str, Any]) -> tuple[int, int, int]:
    tensor, pipeline, data = (answer["layout"][name] for name in ("tensor", "pipeline", "data"))
    return tensor, pipeline, data


def test_a_file_is_planned_as_its_flags_would_be(plan: Ask, file: Path) -> None:
    flags = "--gpu h100-sxm --gpus-per-node 4 --max-model-len 16384 --max-num-seqs 64 --enforce-eager --tpot-ms 400"
    code, answer = plan(file)
    _, same = plan("llama-3.1-70b", *flags.split(), "--input-tokens", "3000", "--gpu-memory-utilization", "0.92")
    assert code == 0
    assert answer["engine_args"][-5:] == ["--seed", "7", "--middleware", "a", "b"]
    assert {**answer, "engine_args": answer["engine_args"][:-5]} == same


def test_flags_go_over_the_file(plan: Ask, file: Path) -> None:
    _, answer = plan(file, "--gpus-per-node", "1", "--gpu", "h200", "--max-model-len", "4096")
    assert not answer["fits"] and "1 GPU" in answer["reason"]
    file.write_text(FILE + "parallel: {tensor: 2, expert: false}\n")
    assert layout_of(plan(file)[1]) == (2, 1, 1)
    assert layout_of(plan(file, "--pipeline", "4")[1]) == (1, 4, 1)


def test_without_hardware_it_is_this_machine(plan: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("model: llama-3.1-70b\nengine: {max_model_len: 8192}\n")
    monkeypatch.setattr(detect, "gpus", lambda: list(gpu_machine(4).gpus))
    assert layout_of(plan(path)[1]) == (2, 1, 1)
    path.write_text(path.read_text() + "hardware: {gpus_per_node: 1}\n")
    assert plan(path)[0] == 3


def test_a_bad_file_or_one_for_another_engine_is_refused(plan: Ask, tmp_path: Path) -> None:
    path = tmp_path / "bad.yml"
    bad = f'cannot use file "{path}"'
    messages = {"model: [": bad, "modle: x": bad, "": bad}
    other_engine = 'cannot plan deployment "penstock-demo": its engine is llamacpp'
    messages["model: penstock-demo\nengine: {kind: llamacpp}\n"] = other_engine
    for text, message in messages.items():
        path.write_text(text)
        code, error = plan(path, "--gpu", "l4")
        assert code == 2 and error["error"]["message"].startswith(message)


def test_what_is_written_from_a_file_keeps_the_rest_of_it(plan: Ask, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    plan(file, "--write", out)
    before, after = reading.load(file), reading.load(out)
    assert isinstance(after.parallel, Parallel) and after.parallel.tensor > 1
    for name in ("name", "replicas", "gateway", "hardware", "workload"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.engine.args, after.engine.env) == (before.engine.args, before.engine.env)
    assert after.engine.max_model_len == 16_384


@pytest.mark.processes
def test_a_written_file_goes_through_plan_and_up(
    plan: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "this_machine", lambda _: cpu_machine())
    monkeypatch.setattr(Vllm, "missing", lambda self: None)
    monkeypatch.setattr(Vllm, "version", lambda self: "0.33.0")
    path = tmp_path / "penstock.yaml"
    flags = "--gpu l4 --gpus-per-node 2 --tensor 2 --max-num-seqs 32 --no-prefix-caching --kv-cache-dtype fp8"
    _, first = plan("penstock-demo", *flags.split(), "--ttft-ms", "500", "--write", path)
    _, second = plan(path)
    assert {**second, "engine_args": None} == {**first, "engine_args": None}
    assert set(second["engine_args"]) >= set(first["engine_args"])
    code = main.run(["up", str(path), "--dry-run", "--json", "--set", "gateway.port=0"])
    made = json.loads(capsys.readouterr().out)["plan"]
    assert (code, made["device"], made["layout"]["tensor"]) == (0, "cuda", 2)
    assert made["forecast"]["kv_cache_gib"] == pytest.approx(first["memory"]["kv_cache_gib"]["likely"])
    assert made["warnings"][-1] == "desk has no GPU: this is for 2 x NVIDIA L4, as the file requires"


@pytest.mark.processes
def test_up_itself_refuses_what_only_a_dry_run_may_assume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "this_machine", lambda _: cpu_machine())
    path = tmp_path / "penstock.yaml"
    path.write_text("model: penstock-demo\nhardware: {gpu: l4}\ngateway: {port: 0}\n")
    for command in ("up", "doctor"):
        assert main.run([command, str(path)]) in (1, 2)
        shown = capsys.readouterr()
        assert 'hardware.gpu: "l4", but desk has no GPU' in shown.out + shown.err


def test_measured_values_can_be_left_out(plan: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    def read(key: Any) -> tuple[dict[Any, Any], tuple[str, ...]]:
        keys.append(key)
        return {}, ()

    monkeypatch.setattr(measured, "read", read)
    for words, n_read in (("--no-measured",), 0), ((), 1):
        plan("penstock-demo", "--gpu", "l4", *words)
        assert len(keys) == n_read


def test_the_catalogue_is_listed(plan: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = plan("--list")
    assert code == 0
    assert {"name": "llama-3.1-8b", "hub_id": "meta-llama/Meta-Llama-3.1-8B", "params": 8030261248} in [
        {key: row[key] for key in ("name", "hub_id", "params")} for row in answer["models"]
    ]
    assert "h100-sxm" in [row["id"] for row in answer["gpus"]] and "ib-ndr-400" in answer["networks"]
    assert main.run(["plan", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "gpt-oss-20b" in shown and "rtx-4090" in shown and "pcie" not in shown.partition("NETWORK")[2]
    assert plan()[1]["error"]["message"] == "cannot plan without a model"
