"""Every config of the catalogue against its published or counted parameters and bytes (golden/plan/families.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plan_shapes as shapes
import pytest
import yaml

from penstock.errors import NotModelled
from penstock.models import catalog
from penstock.planner.architecture.dense import read
from penstock.planner.memory.tensors import n_params
from penstock.planner.memory.weights import bytes_on_disk

KNOWN: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "golden" / "plan" / "families.yaml").read_text("utf-8"))
NAMES = sorted(set(catalog.model_names()) - set(KNOWN["not modelled"]))


def test_what_is_not_modelled_is_refused() -> None:
    assert len(NAMES) == 76
    for name in KNOWN["not modelled"]:
        with pytest.raises(NotModelled) as refused:
            shapes.arch(name)
        assert refused.value.exit_code == 4


def test_parameters_and_bytes_on_disk_are_the_published_ones() -> None:
    for name in NAMES:
        arch, row = shapes.arch(name), catalog.model(name)
        is_text_only = name in KNOWN["text only"]
        # Counted without buffers: the router's correction bias (under 1e-7), Gemma 3's unused pooling head (0.03%).
        tolerance = 3e-4 if name == "gemma-3-27b" else 1e-7
        wanted = KNOWN["published"].get(name) or row.params
        assert n_params(arch, has_towers=not is_text_only) == pytest.approx(wanted, rel=tolerance), name
        if not row.weight_bytes:
            continue
        ratio = bytes_on_disk(arch) / row.weight_bytes
        if name in KNOWN["with prediction layers"]:
            assert ratio == pytest.approx(0.978, abs=0.002), name
        elif is_text_only:
            assert 1 < ratio < 1.02, name
        else:  # the catalogue takes routers for fp8 (under 0.1%)
            assert ratio == pytest.approx(1, rel=1e-3), name


def test_layers_are_of_the_right_kinds() -> None:
    for name, counts in KNOWN["layers"].items():
        kinds = [
            layer.attention.kind if layer.attention else layer.state.kind if layer.state else "none"
            for layer in shapes.arch(name).layers
        ]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == counts, name


def test_parameters_of_families_outside_the_catalogue() -> None:
    for row in KNOWN["families outside the catalogue"]:
        config = {"max_position_embeddings": 2048, **row["config"]}
        assert n_params(read(config)) == row["params"], row


def test_kv_heads_and_sizes_reach_the_cache() -> None:
    gemma = [layer.attention for layer in shapes.arch("gemma-4-26b-a4b").layers]
    full = next(attention for attention in gemma if attention and attention.kind == "full")
    assert (full.n_kv_heads, full.head_dim_k, full.has_v_weight) == (2, 512, False)
    mla = shapes.DEEPSEEK_V3.layers[0].attention
    assert mla is not None and (mla.kv_lora_rank, mla.rope_dim) == (512, 64)
    state = shapes.arch("qwen3.5-27b").layers[0].state
    assert state is not None
    assert (state.conv_channels, state.n_heads, state.state_dtype) == (2 * 16 * 128 + 48 * 128, 48, "float32")


def test_an_unknown_architecture_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(NotModelled) as refused:
        read({"architectures": ["LlamaForCausalLn"]})
    assert refused.value.hint == "did you mean LlamaForCausalLM?"


def test_a_field_with_unknown_memory_is_refused() -> None:
    config = catalog.model_config("gemma-4-26b-a4b")
    config["text_config"]["hidden_size_per_layer_input"] = 256
    with pytest.raises(NotModelled, match="per-layer input embeddings"):
        read(config)
