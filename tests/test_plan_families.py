"""Every config of the catalogue against its published or counted parameters and bytes (penstock/models/data)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import NotModelled
from penstock.planner.architecture import dense
from penstock.planner.architecture.dense import read
from penstock.planner.memory.tensors import n_params
from penstock.planner.memory.weights import bytes_on_disk

DATA = Path(__file__).parent.parent / "penstock" / "models" / "data"
ROWS: dict[str, dict[str, Any]] = yaml.load(
    (DATA / "models.yaml").read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)

# Not countable with transformers. InternLM's is what its own tools print; the other two are our own count, kept to
# notice a change (their published sizes are 49.9 B and 7.6 B without the prediction layer).
PUBLISHED = {
    "internlm2.5-7b": 7_737_708_544,
    "llama-3.3-nemotron-super-49b": 49_867_145_216,
    "mimo-7b-base": 7_622_619_136,
}
# The catalogue counted the language model alone; we load the vision tower as vLLM does.
TEXT_ONLY = {
    "llama-4-maverick-17b-128e",
    "llama-4-scout-17b-16e",
    "qwen3.5-122b-a10b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
}
# The published byte count holds the multi-token-prediction layer, which vLLM does not load (2.2%).
WITH_MTP = {"deepseek-v3"}
NOT_MODELLED = {"deepseek-v4-flash"}
MODELLED = sorted(set(ROWS) - NOT_MODELLED)


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "models" / name / "config.json").read_text("utf-8"))
    return found


def test_every_config_of_the_catalogue_is_read_or_refused() -> None:
    assert len(ROWS) == 77
    assert {path.parent.name for path in (DATA / "models").glob("*/config.json")} == set(ROWS)
    for name in NOT_MODELLED:
        with pytest.raises(NotModelled) as refused:
            read(config_of(name))
        assert refused.value.exit_code == 4


@pytest.mark.parametrize("name", MODELLED)
def test_parameters_are_the_catalogues(name: str) -> None:
    arch, row = read(config_of(name)), ROWS[name]
    wanted = PUBLISHED.get(name) or row["params"]
    # Counted without buffers: the router's correction bias (under 1e-7), Gemma 3's unused pooling head (0.03%).
    tolerance = 3e-4 if name == "gemma-3-27b" else 1e-7
    assert n_params(arch, has_towers=name not in TEXT_ONLY) == pytest.approx(wanted, rel=tolerance)


COUNTED_ELSE = {*WITH_MTP, *TEXT_ONLY}


@pytest.mark.parametrize("name", [n for n in MODELLED if ROWS[n].get("weight_bytes") and n not in COUNTED_ELSE])
def test_bytes_on_disk_are_the_catalogues(name: str) -> None:
    # The catalogue takes routers for fp8 (under 0.1%).
    assert bytes_on_disk(read(config_of(name))) == pytest.approx(ROWS[name]["weight_bytes"], rel=1e-3)


@pytest.mark.parametrize("name", sorted(WITH_MTP | TEXT_ONLY))
def test_bytes_that_differ_differ_by_what_is_left_out(name: str) -> None:
    ratio = bytes_on_disk(read(config_of(name))) / ROWS[name]["weight_bytes"]
    assert ratio == pytest.approx(0.978, abs=0.002) if name in WITH_MTP else 1 < ratio < 1.02


def kinds(name: str) -> list[str]:
    """One word a layer: its attention's kind, its state's kind, or "none"."""
    layers = read(config_of(name)).layers
    return [one.attention.kind if one.attention else one.state.kind if one.state else "none" for one in layers]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama-3.1-8b", {"full": 32}),
        ("mistral-7b-v0.1", {"sliding": 32}),
        ("qwen2-7b", {"full": 28}),
        ("gemma-2-27b", {"full": 23, "sliding": 23}),
        ("gemma-3-27b", {"full": 10, "sliding": 52}),
        ("gemma-4-26b-a4b", {"full": 5, "sliding": 25}),
        ("gpt-oss-120b", {"full": 18, "sliding": 18}),
        ("llama-4-scout-17b-16e", {"full": 12, "chunked": 36}),
        ("deepseek-v3", {"mla": 61}),
        ("qwen3-next-80b-a3b", {"full": 12, "gdn": 36}),
        ("qwen3.5-27b", {"full": 16, "gdn": 48}),
        ("nemotron-h-56b", {"full": 10, "mamba2": 54, "none": 54}),
        ("nemotron-3-nano-30b-a3b", {"full": 6, "mamba2": 23, "none": 23}),
        ("jamba-v0.1", {"full": 4, "mamba1": 28}),
        ("granite-4.0-h-small", {"full": 4, "mamba2": 36}),
        ("llama-3.3-nemotron-super-49b", {"full": 49, "none": 31}),
    ],
)
def test_layers_are_of_the_right_kinds(name: str, counts: dict[str, int]) -> None:
    found = kinds(name)
    assert {kind: found.count(kind) for kind in set(found)} == counts


def test_kv_heads_and_sizes_reach_the_cache() -> None:
    full = next(
        one.attention
        for one in read(config_of("gemma-4-26b-a4b")).layers
        if one.attention and one.attention.kind == "full"
    )
    assert (full.n_kv_heads, full.head_dim_k, full.has_v_weight) == (2, 512, False)
    mla = read(config_of("deepseek-v3")).layers[0].attention
    assert mla is not None and mla.kv_lora_rank is not None and mla.rope_dim is not None
    assert mla.kv_lora_rank + mla.rope_dim == 576
    state = read(config_of("qwen3.5-27b")).layers[0].state
    assert state is not None
    assert (state.conv_channels, state.n_heads, state.state_dtype) == (2 * 16 * 128 + 48 * 128, 48, "float32")


def test_an_unknown_architecture_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(NotModelled) as refused:
        read({"architectures": ["LlamaForCausalLn"]})
    assert refused.value.hint == "did you mean LlamaForCausalLM?"
    assert "LlamaForCausalLM" in dense.names()


def test_a_field_with_unknown_memory_is_refused() -> None:
    config = config_of("gemma-4-26b-a4b")
    config["text_config"]["hidden_size_per_layer_input"] = 256
    with pytest.raises(NotModelled, match="per-layer input embeddings"):
        read(config)


# Families without a row in the catalogue: transformers' own defaults of the class, counted on the meta device
# (transformers 5.20.2), which are OPT-125M, Gemma 7B, GLM-4 9B, SmolLM3 3B, Seed-OSS and so on.
OTHERS: dict[str, tuple[int, dict[str, int | bool]]] = {
    "OPTForCausalLM": (
        125_239_296,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272},
    ),
    "GemmaForCausalLM": (
        8_537_680_896,
        {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"head_dim": 256, "intermediate_size": 24576, "vocab_size": 256000},
    ),
    "Glm4ForCausalLM": (
        9_400_279_040,
        {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2}
        | {"head_dim": 128, "intermediate_size": 13696, "vocab_size": 151552, "attention_bias": True},
    ),
    "SmolLM3ForCausalLM": (
        3_075_098_624,
        {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"intermediate_size": 11008, "vocab_size": 128256},
    ),
    "SeedOssForCausalLM": (
        28_921_040_896,
        {"hidden_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 27648, "vocab_size": 155136, "attention_bias": True},
    ),
    "Qwen2MoeForCausalLM": (
        14_315_784_192,
        {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 5632}
        | {"vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        75_789_228_800,
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"intermediate_size": 29568, "vocab_size": 152064},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_of_families_outside_the_catalogue(name: str) -> None:
    params, sizes = OTHERS[name]
    assert n_params(read({"architectures": [name], "max_position_embeddings": 2048, **sizes})) == params


def test_qwen3_vl_moe_is_counted_as_published() -> None:
    """Qwen3-VL-30B-A3B: 31,070,754,032 parameters, also by transformers' count on the meta device. No catalogue row."""
    text = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    }
    vision = {"depth": 27, "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]}
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "tie_word_embeddings": False}
    assert n_params(read({**config, "text_config": text, "vision_config": vision})) == 31_070_754_032
