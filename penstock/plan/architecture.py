"""What a model is made of, as planning sees it: a stack of layers with their attention, state and MLP. Types only.

`families` fills these from a config.json; `tensors` turns them into an inventory of weights, `cache` into bytes of KV
cache, `speed` into bytes and FLOPs a step. Sizes are counts (heads, channels), never bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AttentionKind = Literal["full", "sliding", "chunked", "mla"]
StateKind = Literal["mamba1", "mamba2", "gdn", "kda"]
QuantKind = Literal["fp8", "fp8-block", "int8", "awq", "gptq", "int4", "mxfp4", "nvfp4", "bnb-nf4", "bnb-int8"]


class Attention(msgspec.Struct, frozen=True):
    """One attention layer. For MLA `n_kv_heads` is 1 and the cache holds kv_lora_rank + rope_dim numbers a token.

    `window` is the sliding window or the chunk, in tokens. `shares_kv_with` is the index of the earlier layer whose
    cache this one reads (it has none of its own).
    """

    kind: AttentionKind
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    shares_kv_with: int | None = None


class State(msgspec.Struct, frozen=True):
    """One recurrent layer: a fixed state a request. conv: channels x (kernel - 1); ssm: heads x d_v x d_k."""

    kind: StateKind
    conv_channels: int
    conv_kernel: int
    n_heads: int
    head_dim_v: int
    head_dim_k: int
    state_dtype: str = "float32"


class Mlp(msgspec.Struct, frozen=True):
    """A dense MLP (`n_experts` 0) or a mixture of experts. `is_gated`: three matrices, else two."""

    intermediate: int
    is_gated: bool = True
    n_experts: int = 0
    top_k: int = 0
    shared_intermediate: int = 0


class Layer(msgspec.Struct, frozen=True):
    """What stands in one layer; hybrids leave parts out."""

    attention: Attention | None = None
    state: State | None = None
    mlp: Mlp | None = None


class Quantization(msgspec.Struct, frozen=True):
    """How the weights are stored. `excluded`: name patterns (fnmatch on tensor names) that keep the model's dtype."""

    kind: QuantKind
    group_size: int | None = None
    block: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    is_symmetric: bool = True


class Architecture(msgspec.Struct, frozen=True):
    """A whole model, dtype as torch writes it ("bfloat16")."""

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    max_position: int
    dtype: str
    ties_embeddings: bool
    quantization: Quantization | None = None
    supports_pipeline: bool = True
    is_multimodal: bool = False

    @property
    def n_layers(self) -> int:
        return len(self.layers)


class Tensor(msgspec.Struct, frozen=True):
    """`count` equal weight tensors of one shape, and how vLLM cuts them.

    `cut`: "column" and "row" are divided by TP along their output or input; "vocab" along the (padded) vocabulary; "kv"
    along the KV heads (replicated once TP exceeds them); "expert" by EP or by TP x DP; "replicated" stands on every
    TP rank. `layer` is the layer's index, or "embed", "head", "norm" (after the last layer), "vision", "mtp".
    """

    name: str
    shape: tuple[int, ...]
    cut: Literal["column", "row", "vocab", "kv", "expert", "replicated"]
    layer: int | str
    count: int = 1
    is_quantized: bool = False
