"""Mixture-of-experts and multi-head-latent-attention families: config.json to `Architecture`, as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, RopeTable
from penstock.planner.architecture.config import Fields, Reader, attention_of, layer_windows, stack
from penstock.planner.architecture.rope import ropes, ropes_gemma4


def _mixtral(f: Fields) -> Architecture:
    """models/mixtral.py, granitemoe.py: every layer has num_local_experts gated experts."""
    mlp = Mlp(f.n("intermediate_size"), n_experts=f.n("num_local_experts"), top_k=f.n("num_experts_per_tok"))
    layers = [
        Layer(attention_of(f, window=w), mlp=mlp, norm_params=2 * f.n("hidden_size"))
        for w in layer_windows(f, "layer_types")
    ]
    return stack(f, "mixtral", layers, ropes(f, f.head_dim), ties=f.architecture.startswith("Granite"))


def _qwen3_moe(f: Fields) -> Architecture:
    """models/qwen3_moe.py, and qwen2_moe.py with a gated shared expert and QKV biases."""
    hidden, n_experts = f.n("hidden_size"), f.n("num_experts", "num_local_experts")
    is_second = f.architecture == "Qwen2MoeForCausalLM"
    sparse = Mlp(
        f.n("moe_intermediate_size"),
        n_experts=n_experts,
        top_k=f.n("num_experts_per_tok"),
        shared_intermediate=f.n("shared_expert_intermediate_size") if is_second else 0,
        has_shared_gate=is_second,
    )
    dense = Mlp(f.n("intermediate_size"))
    only, step = f.get("mlp_only_layers") or (), f.n("decoder_sparse_step", default=1)
    bias = f.flag("qkv_bias", True) if is_second else f.flag("attention_bias")
    attention = attention_of(f, has_qkv_bias=bias, qk_norm=None if is_second else "head")
    layers = [
        Layer(
            attention,
            mlp=sparse if index not in only and n_experts > 0 and (index + 1) % step == 0 else dense,
            norm_params=2 * hidden,
        )
        for index in range(f.n("num_hidden_layers"))
    ]
    return stack(f, "qwen3_moe", layers, ropes(f, f.head_dim))


def _glm4_moe(f: Fields) -> Architecture:
    """models/glm4_moe.py: dense for the first layers, then routed and shared experts; the router is fp32."""
    hidden, moe = f.n("hidden_size"), f.n("moe_intermediate_size")
    sparse = Mlp(
        moe,
        n_experts=f.n("n_routed_experts"),
        top_k=f.n("num_experts_per_tok"),
        shared_intermediate=moe * f.n("n_shared_experts", default=0),
        has_correction_bias=True,
        router_dtype="float32",
    )
    dense, n_dense = Mlp(f.n("intermediate_size")), f.n("first_k_dense_replace", default=1)
    attention = attention_of(
        f, has_qkv_bias=f.flag("attention_bias"), qk_norm="head" if f.flag("use_qk_norm") else None
    )
    layers = [
        Layer(attention, mlp=dense if index < n_dense else sparse, norm_params=2 * hidden)
        for index in range(f.n("num_hidden_layers"))
    ]
    return stack(f, "glm4_moe", layers, ropes(f, f.head_dim))


def _minimax_m2(f: Fields) -> Architecture:
    """models/minimax_m2.py: experts in every layer, q and k norms over all heads, fp32 router with its bias."""
    mlp = Mlp(
        f.n("intermediate_size"),
        n_experts=f.n("num_local_experts"),
        top_k=f.n("num_experts_per_tok"),
        shared_intermediate=f.n("shared_intermediate_size", default=0),
        has_correction_bias=f.flag("use_routing_bias"),
        router_dtype="float32",
    )
    attention = attention_of(f, has_qkv_bias=f.flag("attention_bias"), qk_norm="full")
    layer = Layer(attention, mlp=mlp, norm_params=2 * f.n("hidden_size"))
    return stack(f, "minimax_m2", [layer] * f.n("num_hidden_layers"), ropes(f, f.head_dim))


def _gpt_oss(f: Fields) -> Architecture:
    """models/gpt_oss.py: even layers slide, everything has a bias, one sink a head; the rope table is fp32."""
    window, n_heads = f.n("sliding_window"), f.n("num_attention_heads")
    mlp = Mlp(
        f.n("intermediate_size"),
        n_experts=f.n("num_local_experts", "num_experts"),
        top_k=f.n("num_experts_per_tok", "experts_per_token"),
        has_bias=True,
        has_router_bias=True,
    )
    layers = [
        Layer(
            Attention(
                "full" if index % 2 else "sliding",
                n_heads=n_heads,
                n_kv_heads=f.n("num_key_value_heads"),
                head_dim_k=f.head_dim,
                head_dim_v=f.head_dim,
                window=None if index % 2 else window,
                has_qkv_bias=True,
                has_output_bias=True,
                has_sinks=True,
            ),
            mlp=mlp,
            norm_params=2 * f.n("hidden_size"),
        )
        for index in range(f.n("num_hidden_layers"))
    ]
    tables = tuple(RopeTable(table.n_positions, table.rotary_dim, "float32") for table in ropes(f, f.head_dim))
    return stack(f, "gpt_oss", layers, tables)


def _llama4(f: Fields) -> Architecture:
    """models/llama4.py: three of four layers see chunks of attention_chunk_size and turn, the fourth sees all."""
    hidden, step, chunk = (
        f.n("hidden_size"),
        f.n("interleave_moe_layer_step", default=1),
        f.maybe_n("attention_chunk_size"),
    )
    width = f.n("intermediate_size")
    sparse = Mlp(
        width,
        n_experts=f.n("num_local_experts"),
        top_k=f.n("num_experts_per_tok", default=1),
        shared_intermediate=width,
    )
    dense = Mlp(f.n("intermediate_size_mlp"))
    no_rope, moe_layers = f.get("no_rope_layers"), f.get("moe_layers")
    layers = []
    for index in range(f.n("num_hidden_layers")):
        turns = bool(no_rope[index]) if no_rope else (index + 1) % 4 != 0
        plain = attention_of(f, has_qkv_bias=f.flag("attention_bias"))
        attention = Attention(
            *("chunked" if turns and chunk else "full", plain.n_heads, plain.n_kv_heads, plain.head_dim_k),
            plain.head_dim_v,
            window=chunk if turns else None,
            has_qkv_bias=plain.has_qkv_bias,
            has_output_bias=plain.has_qkv_bias,
        )
        is_sparse = index in moe_layers if moe_layers else (index + 1) % step == 0
        layers.append(Layer(attention, mlp=sparse if is_sparse else dense, norm_params=2 * hidden))
    return stack(f, "llama4", layers, ropes(f, f.head_dim))


def _gemma4(f: Fields) -> Architecture:
    """models/gemma4.py: sliding and full layers of different head size; a dense MLP, with enable_moe_block experts."""
    hidden, n_heads, window = f.n("hidden_size"), f.n("num_attention_heads"), f.maybe_n("sliding_window")
    f.refuse_unless(not f.maybe_n("hidden_size_per_layer_input"), "per-layer input embeddings are not modelled")
    f.refuse_unless(not f.flag("use_double_wide_mlp"), "double-wide MLPs of layers that share KV are not modelled")
    n_layers, n_shared = f.n("num_hidden_layers"), f.n("num_kv_shared_layers", default=0)
    f.refuse_unless(n_shared == 0, "layers that share KV are not modelled")
    types = f.words("layer_types") or tuple(
        "full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(n_layers)
    )
    n_experts = f.n("num_experts", default=0) if f.flag("enable_moe_block") else 0
    dense = f.n("intermediate_size")
    mlp = (
        Mlp(f.n("moe_intermediate_size"), n_experts=n_experts, top_k=f.n("top_k_experts"), shared_intermediate=dense)
        if n_experts
        else Mlp(dense)
    )
    norm_params = 4 * hidden + (4 * hidden + n_experts if n_experts else 0)
    layers = []
    for kind in types:
        is_full = kind == "full_attention"
        head_dim = f.n("global_head_dim", default=f.head_dim) if is_full else f.head_dim
        n_kv = f.n("num_key_value_heads")
        k_is_v = is_full and f.flag("attention_k_eq_v")
        attention = Attention(
            "full" if is_full else "sliding",
            n_heads=n_heads,
            n_kv_heads=f.n("num_global_key_value_heads", default=n_kv) if k_is_v else n_kv,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            window=None if is_full else window,
            qk_norm="head",
            has_v_weight=not k_is_v,
        )
        layers.append(Layer(attention, mlp=mlp, norm_params=norm_params))
    return stack(f, "gemma4", layers, ropes_gemma4(f), ties=True)


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
    hidden, moe = f.n("hidden_size"), f.n("moe_intermediate_size")
    f.refuse_unless(
        f.n("index_topk_freq", default=1) == 1 and not f.get("index_topk_pattern"), "a shared indexer is not modelled"
    )
    sparse = Mlp(
        moe,
        n_experts=f.n("n_routed_experts"),
        top_k=f.n("num_experts_per_tok"),
        shared_intermediate=moe * f.n("n_shared_experts", default=0),
        has_correction_bias=f.get("topk_method") == "noaux_tc",
    )
    dense, n_dense = Mlp(f.n("intermediate_size")), f.n("first_k_dense_replace", default=0)
    freq = f.n("moe_layer_freq", default=1)
    attention = _mla_attention(f)
    layers = [
        Layer(attention, mlp=sparse if index >= n_dense and index % freq == 0 else dense, norm_params=2 * hidden)
        for index in range(f.n("num_hidden_layers"))
    ]
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
