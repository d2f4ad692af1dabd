"""Families whose layers differ in kind: state-space and linear attention, layers left out, per-layer widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, State
from penstock.planner.architecture.config import (
    Fields,
    Reader,
    attention_of,
    biased_attention,
    layer_types,
    mixture,
    sparse_steps,
    stack,
)
from penstock.planner.architecture.rope import ropes


def _state_dtype(f: Fields, *names: str) -> str:
    """The config's dtype of the recurrent state, else the model's (`--mamba-ssm-cache-dtype auto`)."""
    return next((str(f.get(name)) for name in names if f.get(name)), f.dtype)


def _qwen3_next(f: Fields) -> Architecture:
    """models/qwen3_next.py, qwen3_5.py: gated delta nets, every full_attention_interval-th layer is gated attention."""
    n_k, d_k = f.n("linear_num_key_heads"), f.n("linear_key_head_dim")
    n_v, d_v = f.n("linear_num_value_heads"), f.n("linear_value_head_dim")
    state = State(
        "gdn",
        conv_channels=2 * n_k * d_k + n_v * d_v,
        conv_kernel=f.n("linear_conv_kernel_dim", default=4),
        n_heads=n_v,
        head_dim_v=d_v,
        head_dim_k=d_k,
        state_dtype=_state_dtype(f, "mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
        has_conv_bias=False,
    )
    attention = biased_attention(f, qk_norm="head", has_output_gate=f.flag("attn_output_gate", True))
    n_experts, shared = f.n("num_experts", default=0), f.n("shared_expert_intermediate_size", default=0)
    layers = []
    types = layer_types(f, f.n("full_attention_interval", default=4), "linear_attention")
    for kind, is_sparse in zip(types, sparse_steps(f, n_experts), strict=False):
        if is_sparse:
            width, experts = f.n("moe_intermediate_size"), {"shared_intermediate": shared}
            mlp = mixture(f, width, n_experts, **experts, has_shared_gate=shared > 0)
        else:
            mlp = Mlp(f.n("intermediate_size"))
        parts = {"full_attention": (attention, None), "linear_attention": (None, state)}.get(kind, (None, None))
        layers.append(Layer(*parts, mlp, norm_params=2 * f.n("hidden_size")))
    return stack(f, "qwen3_next", layers, ropes(f, f.head_dim))


def _mamba2(f: Fields, n_heads: int, head_dim: int, state_size: int, kernel: int) -> State:
    """Convolution channels: heads x head_dim + 2 x groups x state size."""
    groups = f.n("n_groups", "mamba_n_groups")
    return State(
        "mamba2",
        conv_channels=n_heads * head_dim + 2 * groups * state_size,
        conv_kernel=kernel,
        n_heads=n_heads,
        head_dim_v=head_dim,
        head_dim_k=state_size,
        state_dtype=_state_dtype(f, "mamba_ssm_cache_dtype"),
        has_conv_bias=f.flag("use_conv_bias", f.flag("mamba_conv_bias", True)),
    )


# The letters of Nemotron-H's hybrid_override_pattern, and the words of `layers_block_type` that mean the same.
_NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(f: Fields) -> Architecture:
    """models/nemotron_h.py: one norm and one block a layer: Mamba-2, attention, MLP of two matrices, or experts."""
    hidden = f.n("hidden_size")
    pattern = f.get("hybrid_override_pattern")
    blocks: Sequence[str] = [_NEMOTRON_BLOCKS.get(str(letter), str(letter)) for letter in pattern or ()]
    blocks = blocks or f.words("layers_block_type") or ()
    unknown = sorted(set(blocks) - set(_NEMOTRON_BLOCKS.values()))
    f.refuse_unless(bool(blocks) and not unknown, f"layer kinds {unknown} are not modelled")
    f.refuse_unless(not f.maybe_n("moe_latent_size"), "experts in a latent space are not modelled")
    state = _mamba2(f, f.n("mamba_num_heads"), f.n("mamba_head_dim"), f.n("ssm_state_size"), f.n("conv_kernel"))
    attention = biased_attention(f)
    mlp = Mlp(f.n("intermediate_size"), is_gated=False, has_bias=f.flag("mlp_bias"))
    n_shared = f.n("n_shared_experts", default=0)
    moe = Mlp(
        f.n("moe_intermediate_size", default=0),
        is_gated=False,
        n_experts=f.n("n_routed_experts", default=0),
        top_k=f.n("num_experts_per_tok", default=0),
        shared_intermediate=n_shared * f.n("moe_shared_expert_intermediate_size", default=0),
        has_correction_bias=True,
    )
    kinds = {"mamba": Layer(state=state), "attention": Layer(attention), "mlp": Layer(mlp=mlp), "moe": Layer(mlp=moe)}
    # No rope: attention in these models has no positions.
    layers = [msgspec.structs.replace(kinds[block], norm_params=hidden) for block in blocks]
    return stack(f, "nemotron_h", layers, ())


def _jamba(f: Fields) -> Architecture:
    """models/jamba.py: Mamba-1, attention each attn_layer_period layers, experts each expert_layer_period; no rope."""
    hidden, inner = f.n("hidden_size"), f.n("mamba_expand", default=2) * f.n("hidden_size")
    state = State(
        "mamba1",
        conv_channels=inner,
        conv_kernel=f.n("mamba_d_conv", default=4),
        n_heads=inner,
        head_dim_v=1,
        head_dim_k=f.n("mamba_d_state", default=16),
        state_dtype=f.dtype,
        dt_rank=f.n("mamba_dt_rank", default=-(-hidden // 16)),
        has_conv_bias=f.flag("mamba_conv_bias", True),
    )
    attention = attention_of(f)
    width, n_experts = f.n("intermediate_size"), f.n("num_experts")
    dense, sparse = Mlp(width), mixture(f, width, n_experts)
    period, offset = f.n("attn_layer_period", default=8), f.n("attn_layer_offset", default=4)
    sparse_period, sparse_offset = f.n("expert_layer_period", default=2), f.n("expert_layer_offset", default=1)
    layers = []
    for index in range(f.n("num_hidden_layers")):
        mlp = sparse if n_experts > 1 and index % sparse_period == sparse_offset else dense
        is_attention = index % period == offset
        layer = Layer(attention, mlp=mlp) if is_attention else Layer(state=state, mlp=mlp)
        layers.append(msgspec.structs.replace(layer, norm_params=2 * hidden))
    return stack(f, "jamba", layers, ())


def _granite_hybrid(f: Fields) -> Architecture:
    """models/granitemoehybrid.py: Mamba-2 or attention, then experts (when there are any) and a shared MLP."""
    hidden, types = f.n("hidden_size"), f.words("layer_types") or f.words("layers_block_type") or ()
    inner = f.n("mamba_expand", default=2) * hidden
    n_heads, head_dim = f.n("mamba_n_heads"), f.get("mamba_d_head")
    width = head_dim if isinstance(head_dim, int) else inner // n_heads
    state = _mamba2(f, n_heads, width, f.n("mamba_d_state"), f.n("mamba_d_conv"))
    n_experts, shared = f.n("num_local_experts", default=0), f.n("shared_intermediate_size")
    experts = mixture(f, f.n("intermediate_size"), n_experts, shared_intermediate=shared) if n_experts else None
    mlp = experts or Mlp(shared)
    kinds = {"attention": Layer(biased_attention(f), mlp=mlp), "mamba": Layer(state=state, mlp=mlp)}
    layers = [msgspec.structs.replace(kinds.get(kind, Layer(mlp=mlp)), norm_params=2 * hidden) for kind in types]
    tables = ropes(f, f.head_dim) if f.get("position_embedding_type") == "rope" else ()
    return stack(f, "granite_hybrid", layers, tables)


def _decilm(f: Fields) -> Architecture:
    """models/nemotron_nas.py: each layer has its own KV head count and MLP width, or no attention or MLP at all."""
    hidden, n_heads, head_dim = f.n("hidden_size"), f.n("num_attention_heads"), f.head_dim
    bias = f.flag("attention_bias") or f.flag("bias")
    layers = []
    for block in f.get("block_configs") or ():
        attention, ffn = block["attention"], block["ffn"]
        is_linear = attention.get("replace_with_linear") or ffn.get("replace_with_linear")
        f.refuse_unless(not is_linear, "blocks replaced by a linear layer are not loaded by vLLM")
        width = ffn.get("intermediate_size") or -(-int(2 * (ffn.get("ffn_mult") or 0) * hidden / 3) // 256) * 256
        n_kv = n_heads // int(attention.get("n_heads_in_group") or 1)
        own = Attention("full", n_heads, n_kv, head_dim, head_dim, has_qkv_bias=bias, has_output_bias=bias)
        mlp = Mlp(int(width), has_bias=f.flag("mlp_bias"))
        has_attention, has_mlp = not attention.get("no_op"), not ffn.get("no_op")
        norm_params = hidden * (has_attention + has_mlp)
        layer = Layer(own if has_attention else None, mlp=mlp if has_mlp else None, norm_params=norm_params)
        layers.append(layer)
    f.refuse_unless(len(layers) == f.n("num_hidden_layers"), "it has no block_configs")
    return stack(f, "decilm", layers, ropes(f, head_dim))


READERS: Mapping[str, Reader] = {
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForConditionalGeneration": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_next,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_next,
    "Qwen3_5MoeForCausalLM": _qwen3_next,
    "NemotronHForCausalLM": _nemotron_h,
    "JambaForCausalLM": _jamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "DeciLMForCausalLM": _decilm,
}
