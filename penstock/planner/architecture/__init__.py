"""What a model is made of for planning: layers with attention, state and MLP. Sizes are counts, not bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.errors import not_modelled

AttentionKind = Literal["full", "sliding", "chunked", "mla"]
StateKind = Literal["mamba1", "mamba2", "gdn"]
QkNorm = Literal["head", "heads", "full"]
Cut = Literal["column", "row", "vocab", "kv", "expert", "replicated"]
QuantKind = Literal["fp8", "fp8-block", "int8", "awq", "gptq", "int4", "mxfp4", "nvfp4", "bnb-nf4", "bnb-int8"]


class Attention(msgspec.Struct, frozen=True):
    """One attention layer. For MLA `n_kv_heads` is 1 and the cache holds kv_lora_rank + rope_dim numbers a token.
    `window`: tokens. `qk_norm`: one weight a channel of a head ("head"), one for each head's channels ("heads"), or one
    norm over all ("full"). `has_output_gate` doubles the query projection. `has_v_weight` False: values are the keys'
    projection (Gemma 4), once on disk, twice in vLLM. `n_index_heads`, `index_dim`: DeepSeek's sparse attention."""

    kind: AttentionKind
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: QkNorm | None = None
    has_output_gate: bool = False
    has_sinks: bool = False
    has_v_weight: bool = True
    n_index_heads: int = 0
    index_dim: int = 0


class State(msgspec.Struct, frozen=True):
    """One recurrent layer: a fixed state a request. conv: channels x (kernel - 1); ssm: heads x d_v x d_k.
    conv_channels: n_heads x head_dim_v values and twice groups x head_dim_k. Mamba-1 has one channel a head, and
    `dt_rank`."""

    kind: StateKind
    conv_channels: int
    conv_kernel: int
    n_heads: int
    head_dim_v: int
    head_dim_k: int
    state_dtype: str = "float32"
    dt_rank: int = 0
    has_conv_bias: bool = True


class Mlp(msgspec.Struct, frozen=True):
    """A dense MLP (`n_experts` 0) or a mixture of experts; `is_gated`: three matrices, else two. In a mixture
    `intermediate` is one expert's width, `shared_intermediate` that of the experts that every token passes."""

    intermediate: int
    is_gated: bool = True
    n_experts: int = 0
    top_k: int = 0
    shared_intermediate: int = 0
    has_bias: bool = False
    has_router_bias: bool = False
    has_correction_bias: bool = False
    has_shared_gate: bool = False
    router_dtype: str | None = None


class Layer(msgspec.Struct, frozen=True):
    """One layer; hybrids leave parts out. `norm_params`: numbers in its norms and lone scales."""

    attention: Attention | None = None
    state: State | None = None
    mlp: Mlp | None = None
    norm_params: int = 0

    @property
    def has_experts(self) -> bool:
        return self.mlp is not None and self.mlp.n_experts > 0


class RopeTable(msgspec.Struct, frozen=True):
    """One cos/sin table that vLLM makes at start: n_positions x rotary_dim numbers on every rank with attention."""

    n_positions: int
    rotary_dim: int
    dtype: str | None = None


class Quantization(msgspec.Struct, frozen=True):
    """How weights are stored. `excluded`: names, globs or "re:" patterns of modules that keep the model's dtype.
    `group_size`: inputs a scale; `block`: (outputs, inputs) a scale; `bits`: of "gptq", "awq", "int4". `included`: only
    these modules, all when empty; `also`: further formats, tried in order. `is_online`: made by vLLM while it loads."""

    kind: QuantKind
    group_size: int | None = None
    block: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    is_symmetric: bool = True
    bits: int = 4
    is_per_channel: bool = False
    included: tuple[str, ...] = ()
    also: tuple[Quantization, ...] = ()
    quantizes_head: bool = False
    is_online: bool = False


class Tensor(msgspec.Struct, frozen=True):
    """`count` equal weight tensors of one shape, and how vLLM cuts them. `cut`: "column" and "row" by TP along output
    or input; "vocab" along the padded vocabulary; "kv" along `n_groups` KV heads (Mamba groups), copied once TP exceeds
    them; "expert" by EP or by TP x DP, along its input with `cuts_inputs`. `layer`: the index, or "embed", "positions",
    "head", "norm", "vision". `is_derived`: made after loading, not on disk."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    layer: int | str
    count: int = 1
    n_groups: int = 0
    cuts_inputs: bool = False
    dtype: str | None = None
    quant: Quantization | None = None
    is_derived: bool = False


class Architecture(msgspec.Struct, frozen=True):
    """A whole model, dtype as torch writes it. `norm_params`: numbers in the norms outside the layers.
    `learned_positions`: rows of a position embedding. `towers`: vision encoders and their projectors."""

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    max_position: int
    dtype: str
    ties_embeddings: bool
    quantization: Quantization | None = None
    is_multimodal: bool = False
    ropes: tuple[RopeTable, ...] = ()
    norm_params: int = 0
    learned_positions: int = 0
    towers: tuple[Tensor, ...] = ()

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def is_moe_or_hybrid(self) -> bool:
        return any(layer.state is not None or layer.has_experts for layer in self.layers)


# Bytes of one number, dtype as torch writes it.
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "float8_e4m3fn": 1, "int8": 1}


def dtype_bytes(name: str) -> int:
    """2 for "bfloat16".  Raises NotModelled for an unknown dtype."""
    size = _DTYPE_BYTES.get(name.removeprefix("torch."))
    if size is None:
        raise not_modelled("dtype", name, "its size is not known", hint="one of " + ", ".join(_DTYPE_BYTES))
    return size
