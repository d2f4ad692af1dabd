"""Levers: what each gives, none that the card refuses, and flags that do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from plan_shapes import solved

from penstock.planner.request import Lever


def levers(model: str, gpu: str, **asked: Any) -> dict[str, Lever]:
    return {lever.name: lever for lever in solved(model, gpu, **asked).levers}


def test_70b_on_one_h100_is_told_how_many_would_do() -> None:
    found = levers("llama-3.1-70b", "h100-sxm")
    assert found["more GPUs"].flags == ("--tensor", "4", "--gpus-per-node", "4") and found["more GPUs"].fits
    assert not found["fp8 weights"].fits and not found["fp8 KV cache"].fits
    idle = levers("llama-3.1-70b", "h100-sxm", gpus_per_node=8)
    assert idle["more GPUs"].flags == ("--tensor", "8")


def test_beyond_a_node_comes_a_pipeline_over_more_nodes() -> None:
    found = levers("llama-3.1-405b", "h100-sxm", gpus_per_node=8, nodes=2, tensor=8, pipeline=2)
    assert found["more GPUs"].flags == ("--tensor", "8", "--pipeline", "4", "--nodes", "4")
    assert found["more GPUs"].note == "32 GPUs"


def test_a_lever_that_the_card_refuses_is_not_told() -> None:
    assert "fp8 KV cache" not in levers("qwen3-0.6b", "t4", max_model_len=8192)
    volta = levers("qwen3-0.6b", "v100-sxm2-32", max_model_len=8192)
    assert "fp8 KV cache" not in volta and "fp8 weights" not in volta


def test_together_they_may_fit_where_none_does_alone() -> None:
    found = levers("qwen3-32b", "l40s", gpu_memory_gib=42, max_model_len=40960)
    assert not any(found[name].fits for name in ("shorter context", "fp8 KV cache", "fp8 weights"))
    assert found["all of these"].fits and found["more GPUs"].fits
    assert found["all of these"].flags == (
        *("--max-model-len", "8192", "--kv-cache-dtype", "fp8"),
        *("--quantization", "fp8"),
    )


@pytest.mark.parametrize(
    ("model", "gpu", "asked"),
    [
        ("llama-3.1-70b", "h100-sxm", {}),
        ("llama-3.1-8b", "a10g", {"max_model_len": 32_768}),
        ("llama-3.1-405b", "h100-sxm", {"gpus_per_node": 8, "nodes": 2}),
        ("deepseek-v3", "h100-sxm", {"gpus_per_node": 8}),
    ],
)
def test_the_flags_of_a_lever_give_what_it_says(model: str, gpu: str, asked: dict[str, Any]) -> None:
    sizing = solved(model, gpu, **asked)
    layout = sizing.layout
    assert layout is not None and sizing.levers
    same = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "expert": layout.expert}
    for lever in sizing.levers:
        words = iter(lever.flags)
        changed = {word.removeprefix("--").replace("-", "_"): next(words) for word in words if word != "--expert"}
        wanted = {name: int(value) if value.isdigit() else value for name, value in changed.items()}
        got = solved(model, gpu, **{**asked, **same, **wanted})
        assert (got.fits, got.kv.tokens if got.kv else None) == (lever.fits, lever.tokens), lever
