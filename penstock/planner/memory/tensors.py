"""Every parameter that vLLM loads, from an `Architecture`: shape, how it is cut, and how it is stored.

Names follow the checkpoints, as exclusion lists do. Fused matrices (QKV, gate-up) stand apart: the bytes are the
same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from math import prod

import msgspec

from penstock.planner.architecture import Architecture, Attention, Cut, Layer, Mlp, State, Tensor, dtype_bytes
from penstock.planner.architecture.quantization import format_of, matrix_bytes

# What a family calls (attention, state, MLP) where it is not (self_attn, mamba, mlp).
_MODULES: Mapping[str, tuple[str, str, str]] = {
    "mixtral": ("self_attn", "mamba", "block_sparse_moe"),
    "minimax_m2": ("self_attn", "mamba", "block_sparse_moe"),
    "granite_hybrid": ("self_attn", "mamba", "block_sparse_moe"),
    "nemotron_h": ("mixer", "mixer", "mixer"),
    "jamba": ("self_attn", "mamba", "feed_forward"),
    "llama4": ("self_attn", "mamba", "feed_forward"),
    "qwen3_next": ("self_attn", "linear_attn", "mlp"),
    "falcon": ("self_attention", "mamba", "mlp"),
    "gpt_neox": ("attention", "mamba", "mlp"),
}


class _Maker(msgspec.Struct, frozen=True):
    """Makes the tensors of one module, whose name is `prefix`."""

    arch: Architecture
    layer: int | str
    prefix: str

    def linear(self, name: str, shape: tuple[int, int], cut: Cut = "column", **extra: int) -> Tensor:
        """A matrix (outputs, inputs) that a quantised checkpoint may keep in its own format."""
        quant = format_of(f"{self.prefix}.{name}", self.arch.quantization)
        tensor = Tensor(f"{self.prefix}.{name}.weight", shape, cut, self.layer, quant=quant)
        return msgspec.structs.replace(tensor, **extra) if extra else tensor

    def plain(self, name: str, shape: tuple[int, ...], cut: Cut = "replicated", **extra: object) -> Tensor:
        """A parameter that is never quantised: norms, biases, routers, convolutions."""
        tensor = Tensor(f"{self.prefix}.{name}", shape, cut, self.layer)
        return msgspec.structs.replace(tensor, **extra) if extra else tensor


def _attention(make: _Maker, a: Attention, hidden: int) -> Iterator[Tensor]:
    q_out, kv = a.n_heads * a.head_dim_k * (2 if a.has_output_gate else 1), a.n_kv_heads
    yield make.linear("q_proj", (q_out, hidden))
    yield make.linear("k_proj", (kv * a.head_dim_k, hidden), "kv", n_groups=kv)
    values = make.linear("v_proj", (kv * a.head_dim_v, hidden), "kv", n_groups=kv)
    yield values if a.has_v_weight else msgspec.structs.replace(values, is_derived=True)
    yield make.linear("o_proj", (hidden, a.n_heads * a.head_dim_v), "row")
    if a.has_qkv_bias:
        yield make.plain("q_proj.bias", (q_out,), "column")
        yield make.plain("kv_proj.bias", (kv * (a.head_dim_k + a.head_dim_v),), "kv", n_groups=kv)
    if a.has_output_bias:
        yield make.plain("o_proj.bias", (hidden,))
    if a.has_sinks:
        yield make.plain("sinks", (a.n_heads,), "column")
    if a.qk_norm == "head":
        yield make.plain("qk_norm.weight", (2 * a.head_dim_k,))
    elif a.qk_norm is not None:
        yield make.plain("q_norm.weight", (a.n_heads * a.head_dim_k,), "column")
        yield make.plain("k_norm.weight", (kv * a.head_dim_k,), "kv", n_groups=kv)


def _mla(make: _Maker, a: Attention, hidden: int) -> Iterator[Tensor]:
    """Multi-head latent attention: the down-projections stand on every rank, the rest is cut by heads.
    A quantised kv_b is kept again in the model's dtype for W_UK and W_UV (mla_attention.py)."""
    assert a.kv_lora_rank is not None and a.rope_dim is not None
    nope, rank = a.head_dim_k - a.rope_dim, a.q_lora_rank
    if rank is None:
        yield make.linear("q_proj", (a.n_heads * a.head_dim_k, hidden))
    else:
        yield make.linear("q_a_proj", (rank, hidden), "replicated")
        yield make.plain("q_a_layernorm.weight", (rank,))
        yield make.linear("q_b_proj", (a.n_heads * a.head_dim_k, rank))
    yield make.linear("kv_a_proj_with_mqa", (a.kv_lora_rank + a.rope_dim, hidden), "replicated")
    yield make.plain("kv_a_layernorm.weight", (a.kv_lora_rank,))
    kv_b = make.linear("kv_b_proj", (a.n_heads * (nope + a.head_dim_v), a.kv_lora_rank))
    yield kv_b
    if kv_b.quant is not None:
        yield make.plain("kv_b_absorbed", kv_b.shape, "column", is_derived=True)
    yield make.linear("o_proj", (hidden, a.n_heads * a.head_dim_v), "row")
    if a.n_index_heads and rank is not None:
        yield make.linear("indexer.wq_b", (a.n_index_heads * a.index_dim, rank), "replicated")
        yield make.plain("indexer.wk_weights_proj.weight", (a.index_dim + a.n_index_heads, hidden))
        yield make.plain("indexer.k_norm", (2 * a.index_dim,), dtype="float32")


def _gdn(make: _Maker, s: State, hidden: int) -> Iterator[Tensor]:
    """Gated delta net: projections for q, k, v, z and for b, a; a convolution over q, k, v; one norm of a head."""
    inner = s.n_heads * s.head_dim_v
    yield make.linear("in_proj_qkvz", (s.conv_channels + inner, hidden))
    yield make.linear("in_proj_ba", (2 * s.n_heads, hidden))
    yield make.plain("conv1d.weight", (s.conv_channels, s.conv_kernel), "column")
    yield make.plain("A_log", (s.n_heads,), "column", dtype="float32")
    yield make.plain("dt_bias", (s.n_heads,), "column")
    yield make.plain("norm.weight", (s.head_dim_v,))
    yield make.linear("out_proj", (hidden, inner), "row")


def _mamba2(make: _Maker, s: State, hidden: int) -> Iterator[Tensor]:
    """Mamba-2: heads are cut by TP, the groups' B and C too, or copied once TP exceeds the groups."""
    inner = s.n_heads * s.head_dim_v
    shared = s.conv_channels - inner
    groups = shared // (2 * s.head_dim_k)
    yield make.linear("in_proj", (2 * inner + s.n_heads, hidden))
    yield make.linear("in_proj.groups", (shared, hidden), "kv", n_groups=groups)
    width = s.conv_kernel + (1 if s.has_conv_bias else 0)
    yield make.plain("conv1d.weight", (inner, width), "column")
    yield make.plain("conv1d.groups", (shared, width), "kv", n_groups=groups)
    yield make.plain("A_log", (s.n_heads,), "column", dtype="float32")
    yield make.plain("D_dt_bias", (2 * s.n_heads,), "column")
    yield make.plain("norm.weight", (inner,), "column")
    yield make.linear("out_proj", (hidden, inner), "row")


def _mamba1(make: _Maker, s: State, hidden: int) -> Iterator[Tensor]:
    """Mamba-1 with Jamba's norms on dt, B and C."""
    inner, width = s.conv_channels, s.dt_rank + 2 * s.head_dim_k
    yield make.linear("in_proj", (2 * inner, hidden))
    yield make.plain("conv1d.weight", (inner, s.conv_kernel + (1 if s.has_conv_bias else 0)), "column")
    yield make.linear("x_proj", (width, inner), "row")
    yield make.linear("dt_proj", (inner, s.dt_rank))
    yield make.plain("dt_proj.bias", (inner,), "column")
    yield make.plain("A_log", (inner, s.head_dim_k), "column", dtype="float32")
    yield make.plain("D", (inner,), "column")
    yield make.plain("dt_b_c_layernorm", (width,))
    yield make.linear("out_proj", (hidden, inner), "row")


def _mlp(make: _Maker, m: Mlp, hidden: int) -> Iterator[Tensor]:
    n = m.n_experts
    if n:
        yield make.plain("gate.weight", (n, hidden), dtype=m.router_dtype)
    if m.has_router_bias:
        yield make.plain("gate.bias", (n,))
    if m.has_correction_bias:
        yield make.plain("gate.e_score_correction_bias", (n,), dtype="float32")
    yield from _matrices(make, m, m.intermediate, hidden, "experts.0." if n else "", n)
    if m.shared_intermediate:
        unbiased = msgspec.structs.replace(m, has_bias=False)
        yield from _matrices(make, unbiased, m.shared_intermediate, hidden, "shared_experts.")
    if m.has_shared_gate:
        yield make.plain("shared_expert_gate.weight", (1, hidden))


def _matrices(make: _Maker, m: Mlp, width: int, hidden: int, inside: str, n_experts: int = 0) -> Iterator[Tensor]:
    """Gate, up and down of one MLP, or of all routed experts."""
    cuts: tuple[Cut, Cut, Cut] = ("expert", "expert", "expert") if n_experts else ("column", "row", "replicated")
    count, is_routed = n_experts or 1, n_experts > 0
    for name in ("gate_proj", "up_proj") if m.is_gated else ("up_proj",):
        yield make.linear(inside + name, (width, hidden), cuts[0], count=count)
        if m.has_bias:
            yield make.plain(f"{inside}{name}.bias", (width,), cuts[0], count=count)
    yield make.linear(inside + "down_proj", (hidden, width), cuts[1], count=count, cuts_inputs=is_routed)
    if m.has_bias:
        yield make.plain(inside + "down_proj.bias", (hidden,), cuts[2], count=count, cuts_inputs=is_routed)


_STATES = {"gdn": _gdn, "mamba2": _mamba2, "mamba1": _mamba1}


def _layer(arch: Architecture, index: int, layer: Layer) -> Iterator[Tensor]:
    attention, state, mlp = _MODULES.get(arch.family, ("self_attn", "mamba", "mlp"))
    prefix = f"model.layers.{index}"
    if layer.attention is not None:
        make = _Maker(arch, index, f"{prefix}.{attention}")
        yield from (_mla if layer.attention.kind == "mla" else _attention)(make, layer.attention, arch.hidden)
    if layer.state is not None:
        yield from _STATES[layer.state.kind](_Maker(arch, index, f"{prefix}.{state}"), layer.state, arch.hidden)
    if layer.mlp is not None:
        yield from _mlp(_Maker(arch, index, f"{prefix}.{mlp}"), layer.mlp, arch.hidden)
    if layer.norm_params:
        yield Tensor(f"{prefix}.norms", (layer.norm_params,), "replicated", index)


@lru_cache(maxsize=64)
def inventory(arch: Architecture) -> tuple[Tensor, ...]:
    """Every parameter that vLLM loads or makes from loaded ones, once; a tied head is not listed.
    Layers for multi-token prediction are not there: vLLM loads them for speculation only."""
    tensors = [Tensor("model.embed_tokens.weight", (arch.vocab, arch.hidden), "vocab", "embed")]
    if arch.learned_positions:
        shape = (arch.learned_positions, arch.hidden)
        tensors.append(Tensor("model.embed_positions.weight", shape, "replicated", "positions"))
    for index, layer in enumerate(arch.layers):
        tensors.extend(_layer(arch, index, layer))
    tensors.append(Tensor("model.norm.weight", (arch.norm_params,), "replicated", "norm"))
    if not arch.ties_embeddings:
        head = Tensor("lm_head.weight", (arch.vocab, arch.hidden), "vocab", "head")
        if arch.quantization is not None and arch.quantization.quantizes_head:
            head = msgspec.structs.replace(head, quant=arch.quantization)
        tensors.append(head)
    tensors.extend(arch.towers)
    return tuple(tensors)


def n_params(arch: Architecture, *, has_towers: bool = True) -> int:
    """Parameters as loaded: tied weights once, no prediction layers. Llama-3.1-8B: 8,030,261,248."""
    loaded = [t for t in inventory(arch) if not t.is_derived and (has_towers or t.layer != "vision")]
    return sum(prod(tensor.shape) * tensor.count for tensor in loaded)


def tensor_bytes(tensor: Tensor, shape: tuple[int, ...], dtype: str, *, on_disk: bool = False) -> int:
    """Bytes of one tensor of this `shape` (a shard, or the whole), `count` not applied."""
    if tensor.quant is not None:
        return matrix_bytes(shape[0], shape[1], tensor.quant, on_disk=on_disk)
    return prod(shape) * dtype_bytes(tensor.dtype or dtype)


@cache
def split_layers(n_layers: int, pipeline: int) -> tuple[range, ...]:
    """The layers of each stage, by index (`distributed/utils.py`, `get_pp_indices`): 61 over 4 is 15, 15, 16, 15.
    The remainder goes one by one to the stages from the second-last backwards: the last one has the head."""
    sizes = [n_layers // pipeline] * pipeline
    for index in range(2, n_layers % pipeline + 2):
        sizes[-index] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pipeline)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
