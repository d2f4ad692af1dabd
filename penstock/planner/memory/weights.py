"""Bytes of weights on each GPU, cut as vLLM 0.33 cuts them.

Ranks of one pipeline stage hold the same, but for experts that do not divide evenly (early ranks take one more) and the
end of the padded vocabulary; the fullest rank of each class is counted. t tensor ranks and d data ranks cut a tensor:
- "column", "row": 1/t of the outputs or the inputs (model_executor/layers/linear.py).
- "kv": kv/t of the KV heads, at least one (QKVParallelLinear: copied once t > kv).
- "vocab": the vocabulary padded to a multiple of 64, then 1/t (vocab_parallel_embedding.py).
- "expert": 1/(t x d) of every expert, or with expert parallelism E/(t x d) whole ones (fused_moe/config.py).
- stages: embedding on the first, head and last norm on the last, a tied embedding on both (`get_pp_indices`).
A shard that does not divide is rounded up. Llama-3.1-8B on one GPU: 16,060,522,496 B + 33,554,432 B of rope = 14.9889
GiB, as vLLM logs it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

import msgspec

from penstock.planner.architecture import Architecture, Tensor, dtype_bytes
from penstock.planner.memory.tensors import inventory, split_layers, tensor_bytes
from penstock.spec.deployment import Parallel

VOCAB_PADDING = 64  # layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE

Capability = tuple[int, int]


class RankWeights(msgspec.Struct, frozen=True):
    """What one rank of a class of `n_ranks` GPUs holds, in bytes. `weight_bytes` includes `expert_bytes` (routed
    experts) and `embedding_bytes` (embedding and head). `n_experts`: routed experts of a layer on this rank."""

    stage: int
    n_ranks: int
    n_layers: int
    weight_bytes: int
    rope_bytes: int
    expert_bytes: int = 0
    embedding_bytes: int = 0
    n_experts: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.rope_bytes


class _Mxfp4Padding(msgspec.Struct, frozen=True):
    """Multiples that an MXFP4 kernel rounds up to: an expert's width and hidden size, packed inputs, rows of scales."""

    width: int
    hidden: int
    value_inputs: int = 1
    scale_outputs: int = 1


# fused_moe/oracle/mxfp4.py: Triton kernels on Hopper (width to 64, then triton_kernels' Hopper layouts: 128 bytes of
# packed inputs, scale rows by 32 x 4 warps); TensorRT-LLM's kernels on Blackwell and Marlin elsewhere.
# gpt-oss-120b on one H100: 64.38 GiB logged, 64.38 from this; on Blackwell 2880 x 2880 becomes 2944 x 3072, +9.0%.
_MXFP4_HOPPER = _Mxfp4Padding(64, 1, 256, 128)
_MXFP4_ELSEWHERE = _Mxfp4Padding(128, 256)


class _Cut(msgspec.Struct, frozen=True):
    """How one rank class sees the tensors: its divisors, and the padding of MXFP4 experts."""

    tensor: int
    expert_parts: int
    n_experts: int | None
    mxfp4: _Mxfp4Padding
    copies_shared_experts: bool


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _share(n: int, parts: int) -> int:
    return -(-n // parts)


def _shard(tensor: Tensor, cut: _Cut) -> tuple[int, tuple[int, ...]]:
    """How many, and what shape, of a tensor are on this rank."""
    shape, first = tensor.shape, tensor.shape[0]
    if tensor.cut == "replicated" or (cut.copies_shared_experts and ".shared_expert" in tensor.name):
        return tensor.count, shape
    if tensor.cut == "column":
        return tensor.count, (_share(first, cut.tensor), *shape[1:])
    if tensor.cut == "row":
        return tensor.count, (*shape[:-1], _share(shape[-1], cut.tensor))
    if tensor.cut == "vocab":
        return tensor.count, (_share(_up(first, VOCAB_PADDING), cut.tensor), *shape[1:])
    if tensor.cut == "kv":
        groups = max(tensor.n_groups, 1)
        return tensor.count, (first // groups * max(1, _share(groups, cut.tensor)), *shape[1:])
    return _expert_shard(tensor, cut)


def _expert_shard(tensor: Tensor, cut: _Cut) -> tuple[int, tuple[int, ...]]:
    """Whole experts with EP, a slice of each without; MXFP4 experts are padded for the kernel."""
    count = tensor.count if cut.n_experts is None else min(cut.n_experts, tensor.count)
    outputs, inputs = tensor.shape if len(tensor.shape) == 2 else (*tensor.shape, 1)
    width, hidden = (inputs, outputs) if tensor.cuts_inputs else (outputs, inputs)
    width = _share(width, cut.expert_parts)
    if tensor.quant is not None and tensor.quant.kind == "mxfp4":
        width, hidden = _up(width, cut.mxfp4.width), _up(hidden, cut.mxfp4.hidden)
    shape = (hidden, width) if tensor.cuts_inputs else (width, hidden)
    return count, shape[: len(tensor.shape)]


def _shard_bytes(tensor: Tensor, shape: tuple[int, ...], cut: _Cut, dtype: str) -> int:
    if tensor.cut != "expert" or tensor.quant is None or tensor.quant.kind != "mxfp4":
        return tensor_bytes(tensor, shape, dtype)
    outputs, inputs = shape
    # Gate and up lie in one matrix, whose rows are rounded together.
    joined = 1 if tensor.cuts_inputs else 2
    scale_rows = _up(joined * outputs, cut.mxfp4.scale_outputs) // joined
    return outputs * _up(inputs, cut.mxfp4.value_inputs) // 2 + scale_rows * _share(inputs, 32)


def _bytes(tensors: Iterable[Tensor], cut: _Cut, dtype: str) -> tuple[int, int, int]:
    """(all, routed experts, embedding and head) bytes of these tensors on one rank."""
    total = experts = embedding = 0
    for tensor in tensors:
        count, shape = _shard(tensor, cut)
        size = count * _shard_bytes(tensor, shape, cut, dtype)
        total += size
        experts += size if tensor.cut == "expert" else 0
        embedding += size if tensor.cut == "vocab" else 0
    return total, experts, embedding


def _stage_places(arch: Architecture, places: Iterable[int | str], stage: int, n_stages: int) -> tuple[int | str, ...]:
    """What stands on a stage: its layers, towers on every one, embedding first, head and norm last."""
    is_first, is_last = stage == 0, stage == n_stages - 1
    here: set[int | str] = {*split_layers(arch.n_layers, n_stages)[stage], "vision"}
    here |= {"embed", "positions"} if is_first else set()
    here |= {"head", "norm", *(["embed"] if arch.ties_embeddings else [])} if is_last else set()
    return tuple(place for place in places if place in here)


def rope_bytes(arch: Architecture) -> int:
    """Bytes of the cos/sin tables of one rank with attention. Llama-3.1: 131,072 x 128 x 2 = 33,554,432."""
    return sum(t.n_positions * t.rotary_dim * dtype_bytes(t.dtype or arch.dtype) for t in arch.ropes)


class Ledger:
    """A model's tensors by place, and their bytes for each cut, counted once for many layouts."""

    def __init__(self, arch: Architecture) -> None:
        self.places: dict[int | str, list[Tensor]] = {}
        for tensor in inventory(arch):
            self.places.setdefault(tensor.layer, []).append(tensor)
        self._arch = arch
        # Layers with the same tensors have the same bytes: one of each kind is counted.
        kinds: dict[tuple[Tensor, ...], int | str] = {}
        self._like = {
            place: kinds.setdefault(tuple(msgspec.structs.replace(t, name="", layer="") for t in tensors), place)
            for place, tensors in self.places.items()
        }
        self.stage = cache(partial(_stage_places, arch, tuple(self.places)))
        self.sizes = cache(self._sizes)

    def _sizes(self, cut: _Cut) -> dict[int | str, tuple[int, int, int]]:
        """Bytes by place: (all, routed experts, embedding and head)."""
        known = {kind: _bytes(self.places[kind], cut, self._arch.dtype) for kind in set(self._like.values())}
        return {place: known[kind] for place, kind in self._like.items()}


def rank_weights(
    arch: Architecture, layout: Parallel, *, capability: Capability = (9, 0), ledger: Ledger | None = None
) -> tuple[RankWeights, ...]:
    """One entry a class of equal ranks, by stage, fullest first; `n_ranks` adds up to the layout's.
    `capability` decides how MXFP4 experts are padded. `ledger` of the same architecture saves a second count."""
    ledger, n_stages = ledger or Ledger(arch), layout.pipeline
    parts = layout.tensor * layout.data
    n_experts = max((layer.mlp.n_experts for layer in arch.layers if layer.mlp is not None), default=0)
    classes: list[tuple[int | None, int]] = [(None, parts)]
    if layout.expert and n_experts:  # (experts on a rank, ranks with so many): 128 over 48 is (3, 32), (2, 16)
        base, rest = divmod(n_experts, parts)
        classes = [(base + 1, rest), (base, parts - rest)] if rest else [(base, parts)]
    mxfp4 = _MXFP4_HOPPER if capability[0] == 9 else _MXFP4_ELSEWHERE
    # `use_sequence_parallel_moe` (config/parallel.py): shared experts whole on every rank.
    copies_shared = layout.expert and layout.tensor > 1 and layout.data > 1
    expert_parts = 1 if layout.expert else parts
    sizes = {
        local_experts: ledger.sizes(_Cut(layout.tensor, expert_parts, local_experts, mxfp4, copies_shared))
        for local_experts, _ in classes
    }
    ranks = []
    for stage, layers in enumerate(split_layers(arch.n_layers, n_stages)):
        here = ledger.stage(stage, n_stages)
        has_attention = any(arch.layers[index].attention for index in layers)
        for local_experts, n_ranks in classes:
            own = [sizes[local_experts][place] for place in here]
            total, experts, embedding = map(sum, zip(*own, strict=True))
            ranks.append(
                RankWeights(
                    *(stage, n_ranks, len(layers), total, rope_bytes(arch) if has_attention else 0),
                    expert_bytes=experts,
                    embedding_bytes=embedding,
                    n_experts=n_experts if local_experts is None else local_experts,
                )
            )
    return tuple(ranks)


def bytes_on_disk(arch: Architecture) -> int:
    """Bytes of the checkpoint's tensors, tied ones once, without prediction layers. Llama-3.1-70B: 141,107,412,992."""
    if arch.quantization is not None and arch.quantization.is_online:
        arch = msgspec.structs.replace(arch, quantization=None)
    stored = [tensor for tensor in inventory(arch) if not tensor.is_derived]
    return sum(t.count * tensor_bytes(t, t.shape, arch.dtype, on_disk=True) for t in stored)
