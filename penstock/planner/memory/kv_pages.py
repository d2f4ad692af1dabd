"""Bytes of one page of KV cache or state: one layer's, for one block of tokens, on one tensor-parallel rank.

From vLLM's `v1/kv_cache_interface.py`, `mamba/mamba_utils.py` and `platforms/interface.py` (0.32 and 0.33)."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from penstock.errors import UserError, not_modelled
from penstock.planner.architecture import Architecture, Attention, State, dtype_bytes
from penstock.planner.engine_versions import EngineProfile

PageKind = Literal["full", "sliding", "chunked", "state"]
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, **dict.fromkeys(_FP8, 1)}
# Bytes a token of the packed MLA layouts (`mla_attention.py`): 512 latent numbers and 64 of rope with their scales.
_PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_DEFAULT_BLOCK = 16
_MLA_HYBRID_BLOCK = 128  # `_align_hybrid_block_size`: kernels of MLA want whole groups of 128 tokens
_GDN_CHECKPOINT_BLOCK = 64  # FlashInfer's GDN prefill gives states every 64 tokens (`attention/backends/gdn_attn.py`)
_INDEX_SCALE_GROUP = 128  # the indexer of DeepSeek's sparse attention: one fp32 scale for 128 fp8 numbers


class CacheSettings(msgspec.Struct, frozen=True):
    """`kv_cache_dtype` "auto": the model's, unless its quantisation has another; `block_size` None: the back end's;
    `compute_capability` None reads as Hopper or older."""

    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    prefix_caching: bool = True
    compute_capability: tuple[int, int] | None = None

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability is not None and self.compute_capability[0] == 10


class Page(msgspec.Struct, frozen=True):
    """One layer's page, padding included. `shape` tells apart layers that vLLM would not put together.
    `n_states`: pages that a request holds of a state."""

    kind: PageKind
    block_size: int
    page_bytes: int
    window: int | None = None
    shape: tuple[int, ...] = ()
    is_mla: bool = False
    n_states: int = 1


class Cache(msgspec.Struct, frozen=True):
    layer: int
    page: Page


def kv_heads_on_rank(n_kv_heads: int, tensor: int) -> int:
    """8 heads are 4 on two ranks, 1 on sixteen.  Raises UserError for what does not divide."""
    if n_kv_heads % tensor and tensor % n_kv_heads:
        raise UserError(f"cannot cut {n_kv_heads} KV heads over {tensor} tensor-parallel ranks")
    return max(1, n_kv_heads // tensor)


def attention_bytes(attention: Attention, dtype: str, settings: CacheSettings, tensor: int) -> int:
    """Bytes of one token in one layer on one rank; the indexer of sparse attention apart.
    heads on the rank x (head_dim_k + head_dim_v) x bytes. Llama-3.1-70B at tensor 2, bf16: 4 x 256 x 2 = 2,048. MLA:
    (kv_lora_rank + rope_dim) x bytes on every rank, 576 x 2 = 1,152. nvfp4: hd/2 + hd/16 a head and side."""
    cache_dtype = settings.kv_cache_dtype
    if attention.kind == "mla":
        if attention.kv_lora_rank is None or attention.rope_dim is None or attention.window is not None:
            raise not_modelled("attention", "mla", "needs kv_lora_rank and rope_dim, and no window")
        # FlashMLA's sparse kernels read fp8 in the packed layout only.
        is_packed = attention.index_dim and cache_dtype in _FP8 and not settings.is_blackwell
        packed = _PACKED_MLA.get("fp8_ds_mla" if is_packed else cache_dtype)
        return packed or (attention.kv_lora_rank + attention.rope_dim) * _element_bytes(cache_dtype, dtype)
    heads = kv_heads_on_rank(attention.n_kv_heads, tensor)
    if cache_dtype in ("nvfp4", "nvfp4_4over6"):
        if attention.head_dim_k != attention.head_dim_v:
            raise not_modelled("KV cache dtype", cache_dtype, "keys and values have different head sizes")
        return 2 * heads * (attention.head_dim_k // 2 + attention.head_dim_k // 16)
    return heads * (attention.head_dim_k + attention.head_dim_v) * _element_bytes(cache_dtype, dtype)


def _element_bytes(cache_dtype: str, dtype: str) -> int:
    if cache_dtype == "auto":
        return dtype_bytes(dtype)
    if cache_dtype in _ELEMENT_BYTES:
        return _ELEMENT_BYTES[cache_dtype]
    known = ("auto", *_ELEMENT_BYTES, "nvfp4")
    raise not_modelled("KV cache dtype", cache_dtype, "its page layout is unknown", hint="one of " + ", ".join(known))


def state_bytes(state: State, dtype: str, tensor: int) -> int:
    """Bytes of one request's state in one layer on one rank: convolution window and recurrent matrix.
    channels / tensor x (kernel - 1) x the model's bytes + heads / tensor x d_v x d_k x the state's bytes; Mamba-2 gets
    a group for each rank at least. Qwen3-Next-80B (8192 x 3; 32 x 128 x 128, bf16): 49,152 + 1,048,576 = 1,097,728."""
    channels = state.conv_channels
    if state.kind == "mamba2":
        inner = state.n_heads * state.head_dim_v
        n_groups = (channels - inner) // (2 * state.head_dim_k)
        if n_groups % tensor:
            if n_groups > tensor:
                raise UserError(f"cannot cut {n_groups} Mamba groups over {tensor} tensor-parallel ranks")
            channels = inner + 2 * tensor * state.head_dim_k
    if channels % tensor or state.n_heads % tensor:
        raise UserError(f"cannot cut {state.n_heads} state heads over {tensor} tensor-parallel ranks")
    conv = channels // tensor * (state.conv_kernel - 1) * dtype_bytes(dtype)
    ssm = state.n_heads // tensor * state.head_dim_v * state.head_dim_k
    return conv + ssm * dtype_bytes(state.state_dtype)


def block_size(arch: Architecture, rules: EngineProfile, settings: CacheSettings) -> int:
    """Tokens a block before hybrids are aligned: what was asked, else what the attention back end wants.
    16; MLA by GPU and version (FlashMLA 64, CUTLASS 128, FlashInfer 32); DeepSeek's sparse attention 64."""
    attentions = [layer.attention for layer in arch.layers if layer.attention is not None]
    if any(attention.index_dim for attention in attentions):
        return max(settings.block_size or 64, 64)
    if settings.block_size is not None:
        return settings.block_size
    capability = settings.compute_capability or (9, 0)
    if any(attention.kind == "mla" for attention in attentions):
        if capability[0] == 10:
            return rules.mla_block_blackwell
        if capability[0] == 9:
            # FlashAttention MLA has no fp8 cache: FlashMLA, with 64 tokens a block, takes those.
            return 64 if settings.kv_cache_dtype in _FP8 else rules.mla_block_hopper
    return _DEFAULT_BLOCK


def caches_of(arch: Architecture, rules: EngineProfile, settings: CacheSettings, tensor: int) -> tuple[Cache, ...]:
    """Every layer that holds KV cache or state, in order, with pages already aligned between attention and states.
    The indexer of sparse attention is a separate cache."""
    tokens, states = block_size(arch, rules, settings), {layer.state for layer in arch.layers if layer.state}
    state_page = max((state_bytes(state, arch.dtype, tensor) for state in states), default=0)
    first = next((layer.attention for layer in arch.layers if layer.attention is not None), None)
    # Prefixes of states are cached ("align"); models without attention have no prefix caching.
    is_aligned = settings.prefix_caching and rules.caches_states and first is not None
    if state_page and first is not None:
        per_token = attention_bytes(first, arch.dtype, settings, tensor)
        step = max(tokens, _MLA_HYBRID_BLOCK) if first.kind == "mla" else tokens
        if is_aligned and any(_exports_gdn(state, rules, settings) for state in states):
            step = math.lcm(step, _GDN_CHECKPOINT_BLOCK)
        tokens = max(tokens, step * -(-state_page // (step * per_token)))
        state_page = tokens * per_token
    caches: list[Cache] = []
    for index, layer in enumerate(arch.layers):
        if layer.attention is not None:
            pages = _pages(layer.attention, arch, rules, settings, tokens, tensor)
            caches.extend(Cache(index, page) for page in pages)
        if (state := layer.state) is not None:
            shape = (state.conv_channels, state.conv_kernel, state.n_heads, state.head_dim_v, state.head_dim_k)
            length, n_states = settings.max_model_len, 1
            if is_aligned:  # three where the prefill kernel writes a checkpoint (`MambaSpec`)
                exports = (state.kind == "mamba2" and rules.mamba2_checkpoints) or _exports_gdn(state, rules, settings)
                length, n_states = tokens, 3 if exports else 2
            caches.append(Cache(index, Page("state", length, state_page, shape=shape, n_states=n_states)))
    return tuple(caches)


def _exports_gdn(state: State, rules: EngineProfile, settings: CacheSettings) -> bool:
    """FlashInfer's GDN prefill, which can give a state in mid-prefill: Hopper, Blackwell with d_k 128 (CUDA 13)."""
    major = (settings.compute_capability or (9, 0))[0]
    has_kernel = major == 9 or (major in (10, 12) and state.head_dim_k == 128)
    return state.kind == "gdn" and rules.gdn_checkpoints and has_kernel


def _pages(
    attention: Attention, arch: Architecture, rules: EngineProfile, settings: CacheSettings, tokens: int, tensor: int
) -> list[Page]:
    per_token = attention_bytes(attention, arch.dtype, settings, tensor)
    if attention.kind == "mla":
        pages = [Page("full", tokens, per_token * tokens, shape=(1, per_token), is_mla=True)]
        if attention.index_dim:
            if not rules.has_sparse_attention:
                raise not_modelled("engine version", rules.version, "sparse attention is modelled since vLLM 0.21")
            entry = attention.index_dim + attention.index_dim // _INDEX_SCALE_GROUP * 4
            pages.append(Page("full", tokens, entry * tokens, shape=(1, entry), is_mla=True))
        return pages
    shape = (kv_heads_on_rank(attention.n_kv_heads, tensor), attention.head_dim_k, attention.head_dim_v)
    return [Page(attention.kind, tokens, per_token * tokens, attention.window, shape)]


def model_bytes_per_token(arch: Architecture, kv_cache_dtype: str = "auto") -> int:
    """Bytes of KV cache for one token of the whole model: what published tables show. Layers with a window count in
    full, states do not. Llama-3.1-70B: 2 x 80 layers x 8 KV heads x 128 x 2 B = 327,680."""
    settings = CacheSettings(1, 1, kv_cache_dtype)
    attentions = [layer.attention for layer in arch.layers if layer.attention]
    return sum(attention_bytes(attention, arch.dtype, settings, 1) for attention in attentions)
