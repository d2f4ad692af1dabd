"""From a config.json to an `Architecture`: one table row an architecture, dense families here.

Every reader says what the checkpoint holds as vLLM 0.33 loads it (its `model_executor/models/<family>.py`); the shapes
are checked against transformers' own count of parameters in tests/test_plan_families.py. A row is data where the
family is a stack of attention and MLP; what differs more is a reader of its own, in `families_moe` and
`families_hybrid`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import UserError, nearest, not_modelled
from penstock.planner.architecture import Architecture, Attention, Layer, Mlp, QkNorm, hybrid, moe, quantization, vision
from penstock.planner.architecture import config as soundness
from penstock.planner.architecture.config import Fields, fields, layer_windows
from penstock.planner.architecture.rope import ropes, ropes_by_layer_kind

Reader = Callable[[Fields], Architecture]


class Dense(msgspec.Struct, frozen=True):
    """What tells one dense family from another. A bias is True, False, or the config's key that says so.

    `n_norms` a layer; `norm_bias`: LayerNorm with a bias; `ties`: the default of tie_word_embeddings in
    transformers' config class; `has_rope_table`: False for models that vLLM runs through transformers' own code.
    """

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


_LLAMA = Dense("llama", "attention_bias", "attention_bias", "mlp_bias")
_QWEN2 = Dense("qwen2", True)
_QWEN3 = Dense("qwen3", "attention_bias", "attention_bias", qk_norm="head")
DENSE: Mapping[str, Dense] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Mistral3ForConditionalGeneration": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "InternLM2ForCausalLM": Dense("internlm2", "bias", "bias"),
    "Phi3ForCausalLM": Dense("phi3"),
    "GraniteForCausalLM": Dense("granite", "attention_bias", "attention_bias", "mlp_bias"),
    "SeedOssForCausalLM": Dense("seed_oss", "attention_bias", "attention_out_bias", "mlp_bias", has_rope_table=False),
    "Glm4ForCausalLM": Dense("glm4", "attention_bias", n_norms=4),
    "GemmaForCausalLM": Dense("gemma", "attention_bias", "attention_bias", ties=True, windows=None),
    "CohereForCausalLM": Dense("cohere", "attention_bias", "attention_bias", n_norms=1, ties=True),
    "Cohere2ForCausalLM": Dense("cohere", "attention_bias", "attention_bias", n_norms=1, ties=True),
    "Olmo2ForCausalLM": Dense("olmo2", "attention_bias", "attention_bias", qk_norm="full", has_rope_table=False),
    "Olmo3ForCausalLM": Dense("olmo2", "attention_bias", "attention_bias", qk_norm="full", has_rope_table=False),
    "SmolLM3ForCausalLM": Dense(
        "smollm3", "attention_bias", "attention_bias", "mlp_bias", ties=True, has_rope_table=False
    ),
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Starcoder2ForCausalLM": Dense(
        *("starcoder2", "use_bias", "use_bias", "use_bias"),
        is_gated=False,
        norm_bias=True,
        ties=True,
        has_rope_table=False,
    ),
    "Gemma2ForCausalLM": Dense("gemma2", "attention_bias", "attention_bias", n_norms=4, ties=True, windows="alternate"),
    "Gemma3ForCausalLM": Dense(
        *("gemma3", "attention_bias", "attention_bias"), qk_norm="head", n_norms=4, ties=True, windows="pattern"
    ),
    "Gemma3ForConditionalGeneration": Dense(
        *("gemma3", "attention_bias", "attention_bias"), qk_norm="head", n_norms=4, ties=True, windows="pattern"
    ),
}


def _bias(f: Fields, bias: bool | str) -> bool:
    return f.flag(bias, default=bias == "use_bias") if isinstance(bias, str) else bias


def _dense(f: Fields, row: Dense) -> Architecture:
    """A stack of equal layers that differ at most in their window."""
    hidden, n_heads, head_dim = f.n("hidden_size"), f.n("num_attention_heads"), f.head_dim
    mlp = Mlp(f.n("intermediate_size"), row.is_gated, has_bias=_bias(f, row.mlp_bias))
    norm = hidden * (2 if row.norm_bias else 1)
    windows = layer_windows(f, row.windows)
    uses_qk_norm: QkNorm | None = "heads" if row.family == "cohere" and f.flag("use_qk_norm") else row.qk_norm
    layers = tuple(
        Layer(
            Attention(
                "full" if window is None else "sliding",
                n_heads=n_heads,
                n_kv_heads=f.n("num_key_value_heads", default=n_heads),
                head_dim_k=head_dim,
                head_dim_v=head_dim,
                window=window,
                has_qkv_bias=_bias(f, row.qkv_bias),
                has_output_bias=_bias(f, row.output_bias),
                qk_norm=uses_qk_norm,
            ),
            mlp=mlp,
            norm_params=row.n_norms * norm,
        )
        for window in windows
    )
    return Architecture(
        name=f.architecture,
        family=row.family,
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=layers,
        max_position=f.n("max_position_embeddings"),
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings", row.ties),
        ropes=_ropes(f, row, layers),
        norm_params=norm,
    )


def _ropes(f: Fields, row: Dense, layers: tuple[Layer, ...]) -> Any:
    if not row.has_rope_table:
        return ()
    if row.family == "gemma3":
        return ropes_by_layer_kind(f, {layer.attention.kind for layer in layers if layer.attention})
    return ropes(f, f.head_dim)


def _falcon(f: Fields) -> Architecture:
    """Falcon 7B (one KV head, one norm), 40B and 180B (`new_decoder_architecture`: grouped KV heads, two norms)."""
    hidden, n_heads = f.n("hidden_size"), f.n("num_attention_heads", "n_head")
    is_new, has_bias = f.flag("new_decoder_architecture"), f.flag("bias")
    n_kv = (
        f.n("num_kv_heads", "n_head_kv", default=n_heads) if is_new else 1 if f.flag("multi_query", True) else n_heads
    )
    n_norms = f.n("num_ln_in_parallel_attn", default=2) if is_new else 1 if f.flag("parallel_attn", True) else 2
    head_dim = hidden // max(1, n_heads)
    layer = Layer(
        Attention("full", n_heads, n_kv, head_dim, head_dim, has_qkv_bias=has_bias, has_output_bias=has_bias),
        mlp=Mlp(f.n("ffn_hidden_size", default=4 * hidden), is_gated=False, has_bias=has_bias),
        norm_params=n_norms * 2 * hidden,
    )
    return Architecture(
        name=f.architecture,
        family="falcon",
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=(layer,) * f.n("num_hidden_layers", "n_layer"),
        max_position=f.n("max_position_embeddings", default=2048),
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings", True),
        ropes=() if f.flag("alibi") else ropes(f, head_dim, default_positions=8192),
        norm_params=2 * hidden,
    )


def _gpt_neox(f: Fields) -> Architecture:
    """GPT-NeoX and Pythia: everything has a bias, two LayerNorms, no gate; vLLM runs transformers' own code."""
    hidden, n_heads, has_bias = f.n("hidden_size"), f.n("num_attention_heads"), f.flag("attention_bias", True)
    head_dim = hidden // max(1, n_heads)
    layer = Layer(
        Attention("full", n_heads, n_heads, head_dim, head_dim, has_qkv_bias=has_bias, has_output_bias=has_bias),
        mlp=Mlp(f.n("intermediate_size"), is_gated=False, has_bias=True),
        norm_params=4 * hidden,
    )
    return Architecture(
        name=f.architecture,
        family="gpt_neox",
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=(layer,) * f.n("num_hidden_layers"),
        max_position=f.n("max_position_embeddings", default=2048),
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings"),
        norm_params=2 * hidden,
    )


def _opt(f: Fields) -> Architecture:
    """OPT (models/opt.py): biases everywhere, learned positions (two rows more than the length), a tied head."""
    hidden, n_heads, has_bias = f.n("hidden_size"), f.n("num_attention_heads"), f.flag("enable_bias", True)
    f.refuse_unless(f.n("word_embed_proj_dim", default=hidden) == hidden, "embeddings narrower than the model")
    f.refuse_unless(f.flag("layer_norm_elementwise_affine", True), "norms without weights are not modelled")
    head_dim, positions = hidden // max(1, n_heads), f.n("max_position_embeddings")
    layer = Layer(
        Attention("full", n_heads, n_heads, head_dim, head_dim, has_qkv_bias=has_bias, has_output_bias=has_bias),
        mlp=Mlp(f.n("ffn_dim"), is_gated=False, has_bias=has_bias),
        norm_params=4 * hidden,
    )
    ends_in_norm = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm")
    return Architecture(
        name=f.architecture,
        family="opt",
        hidden=hidden,
        vocab=f.n("vocab_size"),
        layers=(layer,) * f.n("num_hidden_layers"),
        max_position=positions,
        dtype=f.dtype,
        ties_embeddings=f.flag("tie_word_embeddings", True),
        norm_params=2 * hidden if ends_in_norm else 0,
        learned_positions=positions + 2,
    )


READERS: Mapping[str, Reader] = {
    "OPTForCausalLM": _opt,
    "FalconForCausalLM": _falcon,
    "GPTNeoXForCausalLM": _gpt_neox,
    **moe.READERS,
    **hybrid.READERS,
}


def names() -> tuple[str, ...]:
    """Every architecture that is modelled."""
    return tuple(sorted({*DENSE, *READERS}))


def read(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json, quantisation and vision tower included.

    NotModelled for an `architectures[0]` without a row, or a field whose meaning is not known; UserError for a config
    without the numbers its family needs, or with ones that no model has.
    """
    f = fields(config)
    name = f.architecture
    if not name:
        raise UserError(
            "cannot use config.json: it names no architecture",
            detail=f"model_type: {config.get('model_type')}",
            hint='A model that vLLM serves has "architectures": ["..."] in its config.json.',
        )
    if name not in DENSE and name not in READERS:
        close = nearest(name, names())
        raise not_modelled("architecture", name, "it is not modelled", hint=f"did you mean {close}?" if close else None)
    try:
        arch = _dense(f, DENSE[name]) if name in DENSE else READERS[name](f)
        arch = msgspec.structs.replace(
            arch,
            quantization=quantization.read(config),
            towers=vision.towers(f),
            is_multimodal=vision.is_multimodal(name),
        )
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
        # The file is foreign: a value of a kind that no reader foresaw is its mistake, not ours.
        raise UserError(
            "cannot use config.json: a field has a value of the wrong kind",
            detail=f"architecture: {name}; {type(exc).__name__}: {exc}",
            hint="Compare the file with the one on the model's page: it may be incomplete.",
        ) from exc
    soundness.check(arch)
    return arch
