"""`penstock plan --json` end to end: catalogue, facts, solver and exit codes together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_shapes import asked, solved

from penstock.cli import main
from penstock.hardware import catalog
from penstock.models import catalog as models_catalog
from penstock.planner.memory.tensors import inventory, split_layers
from penstock.planner.solve import sizing_of

Plan = Callable[..., tuple[int, dict[str, Any]]]
H100 = ("--gpu", "h100-sxm")
H100X8 = (*H100, "--gpus-per-node", "8")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def ask(*words: str) -> tuple[int, dict[str, Any]]:
        code = main.run(["plan", *words, "--json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, answer

    return ask


def test_8b_on_one_h200_as_vllm_0_33_logged_it(plan: Plan) -> None:
    """Start-up log: weights 14.99 GiB, 110.98 GiB of KV cache, 909,136 tokens."""
    engine = ("--engine-version", "0.33", "--gpu-memory-utilization", "0.92", "--max-model-len", "8192")
    code, answer = plan("llama-3.1-8b", "--gpu", "h200", *engine)
    assert code == 0 and answer["fits"]
    assert answer["weights"]["per_gpu_gib"] == [pytest.approx(14.99, abs=0.005)]
    assert answer["weights"]["params"] == 8_030_261_248
    assert answer["memory"]["kv_cache_gib"]["likely"] == pytest.approx(110.98, rel=0.05)
    assert answer["kv"]["tokens"] == pytest.approx(909_136, rel=0.05)
    assert answer["kv"]["bytes_per_token"] == 131_072
    assert answer["engine_args"] == ["--max-model-len", "8192", "--gpu-memory-utilization", "0.92"]


def test_given_memory_for_each_stage(plan: Plan) -> None:
    words = ("--pipeline", "2", "--max-model-len", "8192", "--gpus-per-node", "2")
    _, even = plan("llama-3.1-8b", "--gpu", "h200", *words, "--available-kv-gib", "20")
    _, uneven = plan("llama-3.1-8b", "--gpu", "h200", *words, "--available-kv-gib", "20", "10")
    assert uneven["kv"]["num_blocks"] * 2 == even["kv"]["num_blocks"]
    code, error = plan("llama-3.1-8b", "--gpu", "h200", *words, "--available-kv-gib", "1", "2", "3")
    assert code == 2 and "3 values" in str(error)


def test_70b_does_not_fit_one_h100(plan: Plan) -> None:
    code, answer = plan("llama-3.1-70b", *H100, "--tensor", "1")
    assert code == 3 and not answer["fits"]
    assert "131.4" in answer["reason"]
    assert answer["weights"]["total_bytes"] == 141_107_412_992


def test_70b_on_eight_h100_takes_four_of_them(plan: Plan) -> None:
    code, answer = plan("llama-3.1-70b", *H100X8)
    assert code == 0
    assert answer["layout"] == {"tensor": 4, "pipeline": 1, "data": 1, "expert": False}
    refused = {(row["tensor"], row["pipeline"], row["data"]): row["reason"] for row in answer["rejected"]}
    assert "64 attention heads do not divide by tensor 3" in refused[3, 1, 1]
    assert "20.00 GiB of KV cache" in refused[2, 1, 1]
    assert "takes 8 GPUs where 4 are enough" in refused[8, 1, 1]
    assert all(any(letter.isdigit() for letter in reason) for reason in refused.values())


def test_an_illegal_layout_is_refused_with_the_heads(plan: Plan) -> None:
    code, answer = plan("llama-3.1-405b", *H100X8, "--nodes", "2", "--tensor", "12")
    assert code == 3 and answer["layout"] is None
    assert answer["reason"] == "128 attention heads do not divide by tensor 12"


def test_405b_on_sixteen_is_tensor_8_and_pipeline_2(plan: Plan) -> None:
    words = ("--nodes", "2", "--network", "ib-ndr", "--max-model-len", "8192")
    code, answer = plan("llama-3.1-405b", *H100X8, *words)
    assert code == 0
    assert (answer["layout"]["tensor"], answer["layout"]["pipeline"]) == (8, 2)


def test_405b_in_fp8_fits_eight_h100(plan: Plan) -> None:
    code, answer = plan("llama-3.1-405b", *H100X8, "--quantization", "fp8", "--max-model-len", "8192")
    assert code == 0 and answer["layout"]["tensor"] == 8
    assert 47 < answer["weights"]["per_gpu_gib"][0] < 50


def test_modelopts_own_file_is_read_and_its_cache_is_fp8(plan: Plan) -> None:
    code, answer = plan("llama-3.1-70b-instruct-fp8-modelopt", *H100X8)
    assert code == 0
    assert answer["weights"]["total_bytes"] == pytest.approx(72.7e9, rel=0.01)
    assert answer["kv"]["bytes_per_token"] == 163_840


def test_what_is_not_modelled_is_exit_4(plan: Plan) -> None:
    code, answer = plan("deepseek-v4-flash", *H100X8)
    assert code == 4 and "DeepseekV4ForCausalLM" in json.dumps(answer)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("llama-3.1-8b", "--gpu", "h101-sxm"), "h100-sxm"),
        (("llama-3.1-8b", *H100X8, "--nodes", "2", "--network", "ib-ndx"), "ib-nd"),
    ],
)
def test_an_unknown_gpu_or_network_is_refused_with_the_nearest(plan: Plan, words: tuple[str, ...], named: str) -> None:
    code, answer = plan(*words)
    assert code == 2 and named in json.dumps(answer)


def test_a_folder_with_only_a_config(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models_catalog.model_config("qwen3-32b")))
    code, answer = plan(str(tmp_path), *H100)
    assert code == 3  # 40,960 tokens of context beside 61 GiB of weights
    code, answer = plan(str(tmp_path), *H100, "--max-model-len", "8192")
    assert code == 0 and answer["layout"]["tensor"] == 1


def test_a_checkpoint_of_another_size_is_said(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models_catalog.model_config("llama-3.1-8b")))
    index = {"metadata": {"total_size": 20_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, answer = plan(str(tmp_path), *H100)
    assert any("20.00 GB" in warning and "16.06 GB" in warning for warning in answer["warnings"])


def test_the_bars_add_up_to_the_card() -> None:
    sizing = solved("llama-3.1-70b", "h100-sxm", gpus_per_node=8, pipeline=4, max_model_len=8192)
    total = sizing.memory.budget_gib.likely if sizing.memory else 0.0
    for rank in sizing.ranks:
        parts = (rank.weights_gib, rank.kv_cache_gib, rank.activation_gib, rank.cuda_graph_gib, rank.non_torch_gib)
        assert sum(parts) + rank.unused_gib == pytest.approx(total, abs=0.01)
    assert [rank.n_gpus for rank in sizing.ranks] == [1, 1, 1, 1]


@pytest.mark.parametrize("model", ["llama-3.1-405b", "qwen3-235b-a22b"])
def test_a_thousand_gpus_take_few_calls(model: str) -> None:
    """Asked: under a CPU-second (`benchmarks/cli_cost.py`). Calls are counted: a busy machine changes seconds."""
    request = asked(model, "h100-sxm", gpus_per_node=8, nodes=128)
    n_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    split_layers.cache_clear()
    inventory.cache_clear()
    sys.setprofile(count)
    try:
        sizing = sizing_of(request, catalog.gpu("h100-sxm"), catalog.link("ib-ndr"))
    finally:
        sys.setprofile(None)
    assert sizing.fits
    # 0.6 to 1.3 million measured, 0.15 to 0.4 s of CPU; 3.2 million took 0.8 s.
    assert 100_000 < n_calls < 2_000_000


def test_planning_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; from penstock.cli import main; main.run(['plan', 'llama-3.1-8b', '--gpu', 'h200', '--json']); "
        "sys.exit(bool({'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
