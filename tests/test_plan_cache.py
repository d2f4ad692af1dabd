"""KV cache to the block: published numbers, and what vLLM's own code gave; test_plan_accuracy has vLLM's logs.

The rows of FROM_VLLM were computed with `get_kv_cache_configs` of vLLM 0.33.0, from specs made of its own classes.
Compared in the same way with 0.32.0 and 0.33.0 on 4,313 random cases over all models of `plan_shapes` (3,031 of them
starts, the others refusals by both), no block, token or verdict differed but for caches shared over pipeline stages.
"""

from __future__ import annotations

from typing import Any

import msgspec
import plan_shapes as shapes
import pytest
from golden_files import table
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import NotModelled, UserError
from penstock.planner.architecture import Architecture, Attention, Layer
from penstock.planner.engine_versions import profile
from penstock.planner.memory.kv_blocks import KvPlan, kv_plan
from penstock.planner.memory.kv_pages import CacheSettings, state_bytes
from penstock.spec.deployment import Parallel
from penstock.text import GIB


def planned(
    arch: Architecture, gib: float, max_model_len: int, tensor: int = 1, pipeline: int = 1, **fields: Any
) -> KvPlan:
    """`fields`: `version`, `stage_gib` and settings of the cache."""
    version, amounts = fields.pop("version", "0.33"), fields.pop("stage_gib", (gib,))
    cache = CacheSettings(max_model_len, fields.pop("max_num_batched_tokens", 8192), **fields)
    layout = Parallel(tensor, pipeline)
    return kv_plan(arch, layout, profile(version), cache, [int(amount * GIB) for amount in amounts])


PAGES: list[tuple[Architecture, dict[str, Any], int, int]] = [
    (shapes.DEEPSEEK_V3, {}, 16, 61 * 1152),
    (shapes.DEEPSEEK_V3, {"kv_cache_dtype": "fp8"}, 64, 61 * 576),
    (shapes.DEEPSEEK_V3, {"compute_capability": (10, 0)}, 32, 61 * 1152),
    (shapes.DEEPSEEK_V3, {"compute_capability": (8, 0)}, 16, 61 * 1152),
    (shapes.DEEPSEEK_V3, {"version": "0.11"}, 64, 61 * 1152),
    (shapes.DEEPSEEK_V3, {"version": "0.11", "compute_capability": (10, 0)}, 128, 61 * 1152),
    # Sparse attention has an indexer next to its latent.
    (shapes.DEEPSEEK_V32, {}, 64, 61 * (1152 + 132)),
    (shapes.DEEPSEEK_V32, {"kv_cache_dtype": "fp8"}, 64, 61 * (656 + 132)),
    (shapes.DEEPSEEK_V32, {"kv_cache_dtype": "fp8", "compute_capability": (10, 0)}, 64, 61 * (576 + 132)),
    (shapes.LLAMA_8B, {"kv_cache_dtype": "nvfp4"}, 16, 32 * 2 * 8 * (64 + 8)),
    (shapes.LLAMA_8B, {"kv_cache_dtype": "fp8_e5m2"}, 16, 65_536),
    (shapes.LLAMA_2_7B, {}, 16, 524_288),
]


def test_pages_follow_the_format_and_the_back_end() -> None:
    for arch, fields, block_size, bytes_per_token in PAGES:
        kv = planned(arch, 20.0, 8192, **fields)
        assert (kv.block_size, kv.bytes_per_token) == (block_size, bytes_per_token), (arch.name, fields)
    assert planned(shapes.DEEPSEEK_V3, 20.0, 8192, 8).bytes_per_token == 61 * 1152  # not divided by tensor parallelism
    assert planned(shapes.LLAMA_405B_FIRST, 1.0, 8192).bytes_per_token == 1_032_192  # 123.05 GiB of 128,000, published
    kv = planned(shapes.LLAMA_70B, 40.0, 131_072, 2)
    assert (kv.bytes_per_token, kv.request_bytes, kv.max_concurrency) == (163_840, 20 * GIB, 2.0)


def test_hybrid_of_vllm_0_19_prints_blocks_by_group() -> None:
    """vllm#40691: Qwen3.5-27B, 32,768 tokens: "290,864 tokens" and "33.04x", from 1,487 blocks of 784 tokens."""
    arch, gib = shapes.arch("qwen3.5-27b"), 1487 * 16 * 784 * 4096 / GIB
    kv = planned(arch, gib, 32_768, version="0.19.0", max_num_batched_tokens=16_384)
    assert (kv.block_size, kv.num_blocks, kv.n_groups) == (784, 1487, 4)
    assert (kv.tokens, f"{kv.max_concurrency:.2f}") == (290_864, "33.04")


def test_a_refusal_has_the_numbers_and_the_null_block() -> None:
    """20 GiB hold exactly one request of 131,072 tokens at tensor 2; since 0.26 the engine keeps a block more.
    vllm#49878: Gemma 4 has pages of 256 KiB, ten layers a group, and is charged for batches in flight since 0.26."""
    for gib, version, refusal in (
        (20.0, "0.33", "20.00 GiB of KV cache on a GPU and one block more (2.5 MiB), 20.00 GiB are available"),
        (20.0 - 1e-4, "0.25", "20.0000 GiB of KV cache on a GPU, 19.9999 GiB are available"),
        (20.0, "0.25", "None"),
        (20.01, "0.33", "None"),
    ):
        assert refusal in str(planned(shapes.LLAMA_70B, gib, 131_072, 2, version=version).refusal)
    assert planned(shapes.LLAMA_70B, 20.0, 131_072, 2).largest_max_model_len == 131_072 - 16
    none = planned(shapes.LLAMA_8B, -1.0, 8192)
    assert (none.num_blocks, none.tokens, none.largest_max_model_len) == (0, 0, 0)
    assert none.refusal == "one request of 8,192 tokens needs 1.00 GiB of KV cache on a GPU, 0.00 GiB are available"
    for version, refusal in (("0.25.1", "needs 45.79 GiB"), ("0.26.0", "needs 70.79 GiB")):
        kv = planned(shapes.GEMMA_4_31B, 10.0, 262_144, version=version, max_num_batched_tokens=32_768)
        assert kv.bytes_per_block == (10 * 256 * 1024,) and refusal in str(kv.refusal)


def test_same_as_vllm() -> None:
    for name, layout, gib, max_model_len, fields, expected in table("plan/vllm_kv.yaml"):
        kv = planned(getattr(shapes, name), gib, max_model_len, *layout, **fields)
        assert (kv.num_blocks, kv.tokens, f"{kv.max_concurrency:.3f}") == tuple(expected), (name, layout, fields)


def test_states_are_aligned_with_attention() -> None:
    """Qwen3-Next: 1,097,728 bytes of state, blocks of 544 tokens x 2,048 bytes; 576 where FlashInfer exports states."""
    assert state_bytes(shapes.GDN, "bfloat16", 1) == 49_152 + 1_048_576
    # Fewer Mamba groups than ranks are copied.
    assert state_bytes(shapes.GRANITE_STATE, "bfloat16", 4) == (8192 + 8 * 128) // 4 * 3 * 2 + 32 * 64 * 128 * 2
    plain = planned(shapes.QWEN3_NEXT, 10.0, 32_768, prefix_caching=False)
    assert (plain.block_size, plain.n_groups, plain.request_blocks) == (544, 4, 61 + 3)
    cached = planned(shapes.QWEN3_NEXT, 10.0, 32_768)
    assert (cached.block_size, cached.request_blocks) == (576, 57 + 3 * 3)
    on_ampere = planned(shapes.QWEN3_NEXT, 10.0, 32_768, compute_capability=(8, 0))
    assert (on_ampere.block_size, on_ampere.request_blocks) == (544, 61 + 3 * 2)
    mamba, alone = (planned(shapes.GRANITE_4, 10.0, 8192, prefix_caching=caching) for caching in (True, False))
    assert mamba.request_blocks == alone.request_blocks + 2 * 9


def test_a_window_everywhere_is_charged_as_a_window_and_chunks_as_full_before_0_12() -> None:
    assert planned(shapes.MISTRAL_7B, 10.0, 32_768, version="0.25").request_blocks == (4095 + 8192 + 15) // 16 + 1
    groups = [planned(shapes.LLAMA_4_SCOUT, 40.0, 131_072, version=version).n_groups for version in ("0.11", "0.12")]
    assert groups == [1, 4]


def test_the_smallest_stage_decides_and_one_without_cache_is_refused() -> None:
    both = planned(shapes.LLAMA_8B, 0, 8192, 1, 2, stage_gib=(10.0, 4.0))
    assert both.num_blocks == planned(shapes.LLAMA_8B, 4.0, 8192, 1, 2).num_blocks
    assert both.bytes_per_block == (16 * 16 * 4096, 16 * 16 * 4096)
    arch = shapes.model("sparse", 64, 64, [Layer(shapes.attention("full", 4, 4, 64)), Layer()])
    assert planned(arch, 1.0, 4096, 1, 2).refusal == "pipeline stage 1 would have no layer with a KV cache"


ODD = shapes.model("odd", 64, 64, [Layer(Attention("full", 8, 8, 128, 64))])
INT3 = msgspec.structs.replace(shapes.LLAMA_8B, dtype="int3")
WRONG: list[tuple[Architecture, tuple[int, ...], dict[str, Any], type[Exception], str]] = [
    (shapes.LLAMA_8B, (), {"kv_cache_dtype": "turboquant_k8v4"}, NotModelled, "KV cache dtype"),
    (shapes.DEEPSEEK_V32, (), {"version": "0.12"}, NotModelled, "sparse attention is modelled since"),
    (ODD, (), {"kv_cache_dtype": "nvfp4"}, NotModelled, "different head sizes"),
    (shapes.LLAMA_8B, (3,), {}, UserError, "cannot cut 8 KV heads over 3"),
    (INT3, (), {}, NotModelled, 'dtype "int3"'),
    (shapes.LLAMA_8B, (1, 3), {"stage_gib": (1.0, 2.0)}, ValueError, "2 amounts of memory for 3"),
]


def test_what_is_not_modelled_or_cannot_be_says_so() -> None:
    for arch, layout, fields, error, match in WRONG:
        with pytest.raises(error, match=match):
            planned(arch, 10.0, 8192, *layout, **dict(fields))


MODELS = st.sampled_from(shapes.EVERY)
LAYOUTS = st.builds(Parallel, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))


@settings(max_examples=20)
@given(MODELS, LAYOUTS, st.integers(1, 200_000), st.integers(0, 80 * GIB), st.integers(0, 40 * GIB), st.booleans())
def test_more_memory_never_means_fewer_tokens_and_what_fits_is_what_the_largest_length_says(
    arch: Architecture, layout: Parallel, length: int, memory: int, more: int, is_caching: bool
) -> None:
    cache = CacheSettings(length, 8192, prefix_caching=is_caching)
    less, plenty = (kv_plan(arch, layout, profile(), cache, [amount]) for amount in (memory, memory + more))
    for name in ("num_blocks", "tokens", "max_concurrency", "largest_max_model_len"):
        assert getattr(less, name) <= getattr(plenty, name)
    assert (less.refusal is None) == (less.largest_max_model_len >= length)
    assert all(less.num_blocks * block <= memory for block in less.bytes_per_block)
    assert less.refusal or less.max_concurrency >= 1
