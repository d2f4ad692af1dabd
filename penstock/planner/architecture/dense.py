"""From a config.json to an `Architecture`: the table of readers, and dense families (data/dense_families.yaml).

Readers follow what vLLM 0.33 loads (`model_executor/models/<family>.py`), checked against transformers' own count."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import UserError, nearest, not_modelled
from penstock.hardware.catalog import read_yaml
from penstock.planner.architecture import (
    Architecture,
    Attention,
    Layer,
    Mlp,
    QkNorm,
    RopeTable,
    hybrid,
    moe,
    quantization,
    vision,
)
from penstock.planner.architecture.config import Fields, Reader, attention_of, check, fields, layer_windows, stack
from penstock.planner.architecture.rope import ropes


class Dense(msgspec.Struct, frozen=True):
    """One dense family. A bias is True, False, or the config's key for it. `n_norms` a layer; `norm_bias`: LayerNorm
    with a bias; `ties`: transformers' default of tie_word_embeddings; no `has_rope_table` where vLLM runs transformers'
    code."""

    family: str
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm | None = None
    is_gated: bool = True
    n_norms: int = 2
    norm_bias: bool = False
    ties: bool = False
    windows: Literal["layer_types", "alternate", "pattern"] | None = "layer_types"
    has_rope_table: bool = True


@functools.cache
def _rows() -> dict[str, Dense]:
    return msgspec.convert(read_yaml("penstock.planner", "dense_families.yaml"), dict[str, Dense])


def _bias(f: Fields, bias: bool | str) -> bool:
    return f.flag(bias, default=bias == "use_bias") if isinstance(bias, str) else bias


def _dense(f: Fields, row: Dense) -> Architecture:
    mlp = Mlp(f.n("intermediate_size"), row.is_gated, has_bias=_bias(f, row.mlp_bias))
    norm = f.n("hidden_size") * (2 if row.norm_bias else 1)
    qk_norm: QkNorm | None = "heads" if row.family == "cohere" and f.flag("use_qk_norm") else row.qk_norm
    biases = {"has_qkv_bias": _bias(f, row.qkv_bias), "has_output_bias": _bias(f, row.output_bias)}
    layers = [
        Layer(attention_of(f, window, qk_norm=qk_norm, **biases), mlp=mlp, norm_params=row.n_norms * norm)
        for window in layer_windows(f, row.windows)
    ]
    tables = ropes(f, f.head_dim) if row.has_rope_table else ()
    if row.family == "gemma3":  # one table for full layers and one for sliding ones (another base, never scaled)
        kinds = {layer.attention.kind for layer in layers if layer.attention}
        tables = (RopeTable(f.n("max_position_embeddings"), f.head_dim),) * len(kinds)
    return stack(f, row.family, layers, tables, ties=row.ties, norm_params=norm)


def _biased(f: Fields, n_heads: int, n_kv_heads: int, has_bias: bool) -> Attention:
    head_dim = f.n("hidden_size") // max(1, n_heads)
    return Attention("full", n_heads, n_kv_heads, head_dim, head_dim, has_qkv_bias=has_bias, has_output_bias=has_bias)


def _falcon(f: Fields) -> Architecture:
    """Falcon 7B (one KV head, one norm), 40B and 180B (`new_decoder_architecture`: grouped KV heads, two norms)."""
    hidden, n_heads = f.n("hidden_size"), f.n("num_attention_heads", "n_head")
    is_new, has_bias = f.flag("new_decoder_architecture"), f.flag("bias")
    n_kv = (
        f.n("num_kv_heads", "n_head_kv", default=n_heads) if is_new else 1 if f.flag("multi_query", True) else n_heads
    )
    n_norms = f.n("num_ln_in_parallel_attn", default=2) if is_new else 1 if f.flag("parallel_attn", True) else 2
    attention = _biased(f, n_heads, n_kv, has_bias)
    mlp = Mlp(f.n("ffn_hidden_size", default=4 * hidden), is_gated=False, has_bias=has_bias)
    layers = [Layer(attention, mlp=mlp, norm_params=n_norms * 2 * hidden)] * f.n("num_hidden_layers", "n_layer")
    tables = () if f.flag("alibi") else ropes(f, attention.head_dim_k, default_positions=8192)
    return stack(f, "falcon", layers, tables, ties=True, positions=2048, norm_params=2 * hidden)


def _gpt_neox(f: Fields) -> Architecture:
    """GPT-NeoX and Pythia: everything has a bias, two LayerNorms, no gate; vLLM runs transformers' own code."""
    hidden, n_heads = f.n("hidden_size"), f.n("num_attention_heads")
    attention = _biased(f, n_heads, n_heads, f.flag("attention_bias", True))
    mlp = Mlp(f.n("intermediate_size"), is_gated=False, has_bias=True)
    layers = [Layer(attention, mlp=mlp, norm_params=4 * hidden)] * f.n("num_hidden_layers")
    return stack(f, "gpt_neox", layers, (), positions=2048, norm_params=2 * hidden)


def _opt(f: Fields) -> Architecture:
    """OPT (models/opt.py): biases everywhere, learned positions (two rows more than the length), a tied head."""
    hidden, n_heads, has_bias = f.n("hidden_size"), f.n("num_attention_heads"), f.flag("enable_bias", True)
    f.refuse_unless(f.n("word_embed_proj_dim", default=hidden) == hidden, "embeddings narrower than the model")
    f.refuse_unless(f.flag("layer_norm_elementwise_affine", True), "norms without weights are not modelled")
    attention = _biased(f, n_heads, n_heads, has_bias)
    mlp = Mlp(f.n("ffn_dim"), is_gated=False, has_bias=has_bias)
    layers = [Layer(attention, mlp=mlp, norm_params=4 * hidden)] * f.n("num_hidden_layers")
    ends_in_norm = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm")
    arch = stack(f, "opt", layers, (), ties=True, norm_params=2 * hidden if ends_in_norm else 0)
    return msgspec.structs.replace(arch, learned_positions=arch.max_position + 2)


READERS: Mapping[str, Reader] = {
    "OPTForCausalLM": _opt,
    "FalconForCausalLM": _falcon,
    "GPTNeoXForCausalLM": _gpt_neox,
    **moe.READERS,
    **hybrid.READERS,
}


def input_modalities(architecture: str) -> tuple[str, ...]:
    """What a model takes: ("text",) or ("text", "image"); empty for one that is not modelled."""
    if architecture in vision.TOWERS:
        return ("text", "image")
    return ("text",) if architecture in _rows() or architecture in READERS else ()


def read(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json, quantisation and vision tower included.
    NotModelled for an unknown architecture or field meaning; UserError for numbers that are missing or impossible."""
    f = fields(config)
    name = f.architecture
    if not name:
        raise UserError(
            "cannot use config.json: it names no architecture",
            detail=f"model_type: {config.get('model_type')}",
            hint='A model that vLLM serves has "architectures": ["..."] in its config.json.',
        )
    rows = _rows()
    if name not in rows and name not in READERS:
        close = nearest(name, {*rows, *READERS})
        raise not_modelled("architecture", name, "it is not modelled", hint=f"did you mean {close}?" if close else None)
    try:
        arch = _dense(f, rows[name]) if name in rows else READERS[name](f)
        arch = msgspec.structs.replace(
            arch, quantization=quantization.read(config), towers=vision.towers(f), is_multimodal=name in vision.TOWERS
        )
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
        raise UserError(
            "cannot use config.json: a field has a value of the wrong kind",
            detail=f"architecture: {name}; {type(exc).__name__}: {exc}",
            hint="Compare the file with the one on the model's page: it may be incomplete.",
        ) from exc
    check(arch)
    return arch
