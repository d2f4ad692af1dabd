"""`--explain`: each formula with its numbers, and the published figures that people compare with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli import main, plan_text
from penstock.hardware import catalog
from penstock.models import Facts
from penstock.models import catalog as models_catalog
from penstock.planner.explain import explanation
from penstock.planner.request import SizingRequest
from penstock.planner.solve import sizing_of


def explained(model: str, gpu: str = "h100-sxm", config: dict[str, Any] | None = None, **asked: Any) -> dict[str, str]:
    facts = Facts(model, config or models_catalog.model_config(model), "the catalogue")
    request = SizingRequest(facts=facts, gpu=gpu, **asked)
    sizing = sizing_of(request, catalog.gpu(gpu))
    return {formula.name: "\n".join(formula.lines) for formula in explanation(request, sizing)}


def test_70b_as_published() -> None:
    """140 GB of weights; 39.06 GiB for 128,000 tokens; 20.00 GiB a GPU at TP2 for 131,072."""
    told = explained("llama-3.1-70b", gpus_per_node=2, tensor=2, gpu_memory_gib=120)
    assert "70,553,706,496 parameters x 2 B (bfloat16) = 141,107,412,992 B = 141.11 GB" in told["weights"]
    assert "2 x 80 layers x 8 KV heads x 128 x 2 B = 327,680 B a token" in told["one token"]
    assert "128,000 tokens x 327,680 B = 39.06 GiB" in told["one token"]
    assert "one GPU, one request of 131,072: 20.00 GiB" in told["one token"]
    assert "120.00 GiB x 0.92 = 110.40 GiB" in told["budget"]


def test_405b_is_810_gb() -> None:
    told = explained("llama-3.1-405b", gpus_per_node=16, max_model_len=8192)
    assert "405,853,388,800 parameters x 2 B (bfloat16) = 811,706,777,600 B = 811.71 GB" in told["weights"]


def test_the_blocks_of_a_logged_start() -> None:
    """H200, Llama-3.1-8B: 56,821 blocks, 909,136 tokens in vLLM's log."""
    told = explained("llama-3.1-8b", "h200-sxm", max_model_len=8192, available_kv_gib=(110.98,))
    assert "budget" not in told
    assert "56,821 blocks of 2,097,152 B a GPU (110.98 GiB), 16 tokens each" in told["blocks"]
    assert "takes 512 blocks: 56,821 / 512 = 110.98 at once" in told["blocks"]
    assert "= 909,136 tokens" in told["blocks"]


def test_mla_and_states_and_windows_have_their_own_terms() -> None:
    mla = explained("deepseek-v3", "h200-sxm", gpus_per_node=8)
    assert "61 layers x (512 + 64 numbers) x 2 B = 70,272 B a token" in mla["one token"]
    assert "routers, MLA's down-projections" in mla["weights"]
    hybrid = explained("qwen3-next-80b-a3b", "h200-sxm", gpus_per_node=8)
    assert "36 layers have a state instead" in hybrid["one token"]
    windows = explained("gemma-3-27b", kv_cache_dtype="fp8")
    assert "2 x 52 sliding layers x 16 KV heads x 128 x 1 B" in windows["one token"]
    assert "layers that see 1,024 tokens alone" in windows["one token"]


@pytest.mark.parametrize(("version", "beside"), [("0.33", "NCCL, "), ("0.20", "graphs, ")])
def test_what_stands_beside_the_budget_is_said(version: str, beside: str) -> None:
    told = explained("llama-3.1-70b", gpus_per_node=4, tensor=4, max_model_len=8192, engine_version=version)
    assert beside in told["budget"].splitlines()[-1] and "outside the budget" in told["budget"]


@pytest.mark.parametrize("model", [name for name in models_catalog.model_names() if name != "deepseek-v4-flash"])
def test_every_model_is_explained(model: str) -> None:
    told = explained(model, "h200-sxm", gpus_per_node=8, max_model_len=4096)
    assert {"weights", "one token"} <= told.keys()


def test_a_layout_that_cannot_be_has_nothing_to_explain() -> None:
    assert explained("llama-3.1-70b", tensor=3, gpus_per_node=8) == {}
    assert plan_text.explained(()) == "nothing was counted: no layout can be"


def test_the_command_line_explains_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-8b", "--gpu", "h200-sxm", "--max-model-len", "8192", "--explain"]
    assert main.run(words) == 0
    assert "how it was counted" in capsys.readouterr().out
    assert main.run([*words, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["explanation"]) == {"weights", "one token", "budget", "blocks"}
