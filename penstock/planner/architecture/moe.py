"""Mixture-of-experts and multi-head-latent-attention families: config.json to `Architecture`, as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, RopeTable
from penstock.planner.architecture.config import (
    Fields,
    Reader,
    attention_of,
    biased_attention,
    layer_types,
    layer_windows,
    mixture,
    sparse_steps,
    stack,
)
from penstock.planner.architecture.rope import ropes


def _mixtral(f: Fields) -> Architecture:
    """models/mixtral.py, granitemoe.py: every layer has num_local_experts gated experts."""
    mlp = mixture(f, f.n("intermediate_size"), f.n("num_local_experts"))
    attentions, norms = (attention_of(f, window) for window in layer_windows(f, "layer_types")), 2 * f.n("hidden_size")
    layers = [Layer(attention, mlp=mlp, norm_params=norms) for attention in attentions]
    return stack(f, "mixtral", layers, ropes(f, f.head_dim), ties=f.architecture.startswith("Granite"))


def _qwen3_moe(f: Fields) -> Architecture:
    """models/qwen3_moe.py, and qwen2_moe.py with a gated shared expert and QKV biases."""
    n_experts, is_second = f.n("num_experts", "num_local_experts"), f.architecture == "Qwen2MoeForCausalLM"
    shared = f.n("shared_expert_intermediate_size") if is_second else 0
    width, dense = f.n("moe_intermediate_size"), Mlp(f.n("intermediate_size"))
    sparse = mixture(f, width, n_experts, shared_intermediate=shared, has_shared_gate=is_second)
    bias = f.flag("qkv_bias", True) if is_second else f.flag("attention_bias")
    attention = attention_of(f, has_qkv_bias=bias, qk_norm=None if is_second else "head")
    layers = [
        Layer(attention, mlp=sparse if is_sparse else dense, norm_params=2 * f.n("hidden_size"))
        for is_sparse in sparse_steps(f, n_experts)
    ]
    return stack(f, "qwen3_moe", layers, ropes(f, f.head_dim))


def _glm4_moe(f: Fields) -> Architecture:
    """models/glm4_moe.py: dense for the first layers, then routed and shared experts; the router is fp32."""
    sparse = _routed(f, has_correction_bias=True, router_dtype="float32")
    qk_norm = "head" if f.flag("use_qk_norm") else None
    attention = attention_of(f, has_qkv_bias=f.flag("attention_bias"), qk_norm=qk_norm)
    n_dense = f.n("first_k_dense_replace", default=1)
    return stack(f, "glm4_moe", _dense_first(f, attention, sparse, n_dense), ropes(f, f.head_dim))


def _routed(f: Fields, **extra: object) -> Mlp:
    """Routed experts and n_shared_experts that every token passes, of one width."""
    width = f.n("moe_intermediate_size")
    shared = width * f.n("n_shared_experts", default=0)
    return mixture(f, width, f.n("n_routed_experts"), shared_intermediate=shared, **extra)


def _dense_first(f: Fields, attention: Attention, sparse: Mlp, n_dense: int, freq: int = 1) -> list[Layer]:
    """Dense MLPs for the first layers, then experts in every `freq`-th."""
    dense, norms = Mlp(f.n("intermediate_size")), 2 * f.n("hidden_size")
    return [
        Layer(attention, mlp=sparse if index >= n_dense and index % freq == 0 else dense, norm_params=norms)
        for index in range(f.n("num_hidden_layers"))
    ]


def _minimax_m2(f: Fields) -> Architecture:
    """models/minimax_m2.py: experts in every layer, q and k norms over all heads, fp32 router with its bias."""
    shared, has_bias = f.n("shared_intermediate_size", default=0), f.flag("use_routing_bias")
    router = {"has_correction_bias": has_bias, "router_dtype": "float32"}
    mlp = mixture(f, f.n("intermediate_size"), f.n("num_local_experts"), shared_intermediate=shared, **router)
    attention = attention_of(f, has_qkv_bias=f.flag("attention_bias"), qk_norm="full")
    layer = Layer(attention, mlp=mlp, norm_params=2 * f.n("hidden_size"))
    return stack(f, "minimax_m2", [layer] * f.n("num_hidden_layers"), ropes(f, f.head_dim))


def _gpt_oss(f: Fields) -> Architecture:
    """models/gpt_oss.py: even layers slide, everything has a bias, one sink a head; the rope table is fp32."""
    n_experts, top_k = f.n("num_local_experts", "num_experts"), f.n("num_experts_per_tok", "experts_per_token")
    mlp = Mlp(f.n("intermediate_size"), n_experts=n_experts, top_k=top_k, has_bias=True, has_router_bias=True)
    biased = {"has_qkv_bias": True, "has_output_bias": True, "has_sinks": True}
    both = [attention_of(f, window, **biased) for window in (f.n("sliding_window"), None)]
    indices, norm_params = range(f.n("num_hidden_layers")), 2 * f.n("hidden_size")
    layers = [Layer(both[index % 2], mlp=mlp, norm_params=norm_params) for index in indices]
    tables = tuple(RopeTable(table.n_positions, table.rotary_dim, "float32") for table in ropes(f, f.head_dim))
    return stack(f, "gpt_oss", layers, tables)


def _llama4(f: Fields) -> Architecture:
    """models/llama4.py: three of four layers see chunks of attention_chunk_size and turn, the fourth sees all."""
    step, chunk = f.n("interleave_moe_layer_step", default=1), f.maybe_n("attention_chunk_size")
    width, dense = f.n("intermediate_size"), Mlp(f.n("intermediate_size_mlp"))
    top_k = f.n("num_experts_per_tok", default=1)
    sparse = Mlp(width, n_experts=f.n("num_local_experts"), top_k=top_k, shared_intermediate=width)
    plain = biased_attention(f)
    chunked = msgspec.structs.replace(plain, kind="chunked", window=chunk) if chunk else plain
    no_rope, moe_layers = f.get("no_rope_layers"), f.get("moe_layers")
    layers = []
    for index in range(f.n("num_hidden_layers")):
        turns = bool(no_rope[index]) if no_rope else (index + 1) % 4 != 0
        mlp = sparse if (index in moe_layers if moe_layers else (index + 1) % step == 0) else dense
        layers.append(Layer(chunked if turns else plain, mlp=mlp, norm_params=2 * f.n("hidden_size")))
    return stack(f, "llama4", layers, ropes(f, f.head_dim))


def _gemma4(f: Fields) -> Architecture:
    """models/gemma4.py: sliding and full layers of different head size; a dense MLP, with enable_moe_block experts."""
    hidden, n_heads, window = f.n("hidden_size"), f.n("num_attention_heads"), f.maybe_n("sliding_window")
    f.refuse_unless(not f.maybe_n("hidden_size_per_layer_input"), "per-layer input embeddings are not modelled")
    f.refuse_unless(not f.flag("use_double_wide_mlp"), "double-wide MLPs of layers that share KV are not modelled")
    f.refuse_unless(not f.maybe_n("num_kv_shared_layers"), "layers that share KV are not modelled")
    types = layer_types(f, 6, "sliding_attention")
    n_experts, dense = f.n("num_experts", default=0) if f.flag("enable_moe_block") else 0, f.n("intermediate_size")
    mlp, norm_params = Mlp(dense), 4 * hidden
    if n_experts:
        top_k = f.n("top_k_experts")
        mlp = Mlp(f.n("moe_intermediate_size"), n_experts=n_experts, top_k=top_k, shared_intermediate=dense)
        norm_params += 4 * hidden + n_experts
    # Full layers have wider heads, and fewer KV heads where their values are their keys.
    full_dim, n_kv = f.n("global_head_dim", default=f.head_dim), f.n("num_key_value_heads")
    k_is_v = f.flag("attention_k_eq_v")
    n_kv_full = f.n("num_global_key_value_heads", default=n_kv) if k_is_v else n_kv
    sliding = Attention("sliding", n_heads, n_kv, f.head_dim, f.head_dim, window, qk_norm="head")
    full = Attention("full", n_heads, n_kv_full, full_dim, full_dim, qk_norm="head", has_v_weight=not k_is_v)
    attentions = (full if kind == "full_attention" else sliding for kind in types)
    layers = [Layer(attention, mlp=mlp, norm_params=norm_params) for attention in attentions]
    positions = f.n("max_position_embeddings")
    tables = (RopeTable(positions, full_dim), RopeTable(positions, f.head_dim))
    return stack(f, "gemma4", layers, tables, ties=True)


def _mla_attention(f: Fields) -> Attention:
    """models/deepseek_v2.py. q_lora_rank null is a plain q_proj; absent is transformers' default, 1536."""
    has_rank = "q_lora_rank" in f.text
    rope, nope = f.n("qk_rope_head_dim", default=64), f.n("qk_nope_head_dim", default=128)
    return Attention(
        "mla",
        n_heads=f.n("num_attention_heads"),
        n_kv_heads=1,
        head_dim_k=nope + rope,
        head_dim_v=f.n("v_head_dim", default=128),
        q_lora_rank=f.maybe_n("q_lora_rank") if has_rank else 1536,
        kv_lora_rank=f.n("kv_lora_rank"),
        rope_dim=rope,
        n_index_heads=f.n("index_n_heads", default=0) if f.maybe_n("index_topk") else 0,
        index_dim=f.n("index_head_dim", default=0),
    )


def _deepseek(f: Fields) -> Architecture:
    """models/deepseek_v2.py and vllm/models/deepseek_v32 (V2, V3, R1, V3.2, Kimi K2, GLM-5)."""
    has_own = f.n("index_topk_freq", default=1) == 1 and not f.get("index_topk_pattern")
    f.refuse_unless(has_own, "a shared indexer is not modelled")
    attention, sparse = _mla_attention(f), _routed(f, has_correction_bias=f.get("topk_method") == "noaux_tc")
    n_dense, freq = f.n("first_k_dense_replace", default=0), f.n("moe_layer_freq", default=1)
    layers = _dense_first(f, attention, sparse, n_dense, freq)
    tables = ropes(f, f.n("qk_rope_head_dim", default=64), is_partial=False)
    if attention.n_index_heads and not f.flag("indexer_rope_interleave"):
        tables *= 2
    return stack(f, "deepseek", layers, tables)


READERS: Mapping[str, Reader] = {
    "MixtralForCausalLM": _mixtral,
    "GraniteMoeForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_moe,
    "Qwen2MoeForCausalLM": _qwen3_moe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForConditionalGeneration": _llama4,
    "Llama4ForCausalLM": _llama4,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4ForCausalLM": _gemma4,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "DeepseekV32ForCausalLM": _deepseek,
    "GlmMoeDsaForCausalLM": _deepseek,
}
