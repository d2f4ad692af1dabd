"""The formulas behind a `Sizing` with its numbers filled in: what `penstock plan --explain` prints. Pure."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.planner.architecture import Architecture, Attention, dense, dtype_bytes
from penstock.planner.architecture.quantization import with_choice
from penstock.planner.engine_versions import profile
from penstock.planner.memory.kv_pages import model_bytes_per_token
from penstock.planner.memory.weights import rope_bytes
from penstock.planner.request import KvAnswer, MemoryAnswer, Settings, Sizing, SizingRequest, WeightsAnswer
from penstock.spec.deployment import Parallel
from penstock.text import GIB, show_bytes

_SEEN_GIB = 0.005  # what two decimals show
_PUBLISHED_TOKENS = 128_000  # the length of the tables that people quote


def explanation(request: SizingRequest, sizing: Sizing) -> dict[str, tuple[str, ...]]:
    """How the answer was counted: lines of arithmetic by name, none for a layout that is not legal."""
    settings, weights, layout = sizing.settings, sizing.weights, sizing.layout
    if weights is None or layout is None:
        return {}
    arch = with_choice(dense.read(request.facts.config), request.quantization, request.dtype)
    arch = msgspec.structs.replace(arch, dtype=settings.dtype)
    formulas = {"weights": _weights(arch, weights, layout), "one token": _token(arch, settings, sizing.kv)}
    if sizing.memory is not None:
        formulas["budget"] = _budget(sizing.memory, settings, max(weights.per_gpu_gib))
    if sizing.kv is not None and sizing.kv.num_blocks and sizing.kv.max_concurrency:
        formulas["blocks"] = _blocks(sizing.kv, settings)
    return formulas


def _weights(arch: Architecture, weights: WeightsAnswer, layout: Parallel) -> tuple[str, ...]:
    whole = f"{weights.total_bytes:,} B = {weights.total_bytes / 1e9:.2f} GB = {weights.total_bytes / GIB:.2f} GiB"
    each = dtype_bytes(arch.dtype)
    if arch.quantization is None and weights.params * each == weights.total_bytes:
        first = f"{weights.params:,} parameters x {each} B ({arch.dtype}) = {whole}"
    else:
        kind = "" if arch.quantization is None else f", {arch.quantization.kind}"
        mean = weights.total_bytes / weights.params
        first = f"{weights.params:,} parameters, {mean:.3f} B each on average ({arch.dtype}{kind}) = {whole}"
    own = max(weights.per_gpu_gib)
    if layout.data > 1:
        return first, f"the fullest of {layout.n_ranks} GPUs holds {own:.2f} GiB"
    n_parts, cut = layout.tensor * layout.pipeline, f"tensor {layout.tensor} x pipeline {layout.pipeline}"
    share = weights.total_bytes / GIB / n_parts
    second = f"one GPU: {weights.total_bytes / GIB:.2f} GiB / ({cut}) = {share:.2f} GiB; the fullest holds {own:.2f}"
    more = [f"{show_bytes(rope_bytes(arch))} of rope table"] if rope_bytes(arch) else []
    attentions = [layer.attention for layer in arch.layers if layer.attention]
    if layout.tensor > 1:
        more += ["norms"]
        more += ["routers"] if any(layer.has_experts for layer in arch.layers) else []
        more += ["MLA's down-projections"] if any(a.kind == "mla" for a in attentions) else []
    more += ["the embedding or the head"] if layout.pipeline > 1 else []
    return first, second + (f" (whole on each: {', '.join(more)})" if more else "")


def _token(arch: Architecture, settings: Settings, kv: KvAnswer | None) -> tuple[str, ...]:
    total = model_bytes_per_token(arch, settings.kv_cache_dtype)
    held = [layer.attention for layer in arch.layers if layer.attention]
    is_plain = settings.kv_cache_dtype in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
    each = 1 if settings.kv_cache_dtype.startswith("fp8") else dtype_bytes(arch.dtype)
    terms = [_term(attention, n_layers, each) for attention, n_layers in Counter(held).items()]
    has_plain_terms = is_plain and not any(attention.n_index_heads for attention in held)
    words = " + ".join(terms) if has_plain_terms else f"{len(held)} layers in {settings.kv_cache_dtype}"
    lines = [f"{words or 'no attention'} = {total:,} B a token, the whole model"]
    n_states = sum(layer.state is not None for layer in arch.layers)
    if n_states:
        lines.append(f"{n_states} layers have a state instead: the same bytes a request, however long it is")
    windows = sorted({attention.window for attention in held if attention.window})
    if windows:
        sizes = " and ".join(f"{window:,}" for window in windows)
        lines.append(
            f"layers that see {sizes} tokens alone are counted in full here, not for requests and blocks below"
        )
    lines += [
        f"{n_tokens:,} tokens x {total:,} B = {n_tokens * total / GIB:.2f} GiB, the whole model"
        for n_tokens in dict.fromkeys((_PUBLISHED_TOKENS, settings.max_model_len))
    ]
    if kv is not None:
        lines.append(f"one GPU, one request of {settings.max_model_len:,}: {kv.per_gpu_gib_one_request:.2f} GiB")
    return tuple(lines)


def _term(attention: Attention, n_layers: int, each: int) -> str:
    if attention.kind == "mla":
        return f"{n_layers} layers x ({attention.kv_lora_rank} + {attention.rope_dim} numbers) x {each} B"
    kind = "" if attention.kind == "full" else f"{attention.kind} "
    heads = f"{n_layers} {kind}layers x {attention.n_kv_heads} KV heads"
    if attention.head_dim_k == attention.head_dim_v:
        return f"2 x {heads} x {attention.head_dim_k} x {each} B"
    return f"{heads} x ({attention.head_dim_k} + {attention.head_dim_v}) x {each} B"


def _budget(memory: MemoryAnswer, settings: Settings, weights_gib: float) -> tuple[str, ...]:
    total, budget, kv = memory.total_gib.likely, memory.budget_gib.likely, memory.kv_cache_gib.likely
    uses = [f"{weights_gib:.2f} weights", f"{memory.activation_gib.likely:.2f} activations"]
    rest = budget - weights_gib - kv - memory.activation_gib.likely
    rules, other, beside = profile(settings.engine_version), memory.non_torch_gib.likely, []
    if rules.graphs_in_budget:
        uses.append(f"{memory.cuda_graph_gib.likely:.2f} graphs")
        rest -= memory.cuda_graph_gib.likely
    else:
        beside.append(f"graphs, {memory.cuda_graph_gib.likely:.2f} GiB,")
    if other - rest > _SEEN_GIB:
        beside.append(f"NCCL, {other - rest:.2f} GiB,")
    uses.append(f"{rest:.2f} other")
    lines = [
        f"{total:.2f} GiB x {settings.gpu_memory_utilization:g} = {budget:.2f} GiB for the engine",
        f"{budget:.2f} - {' - '.join(uses)} = {kv:.2f} GiB for KV cache (the likely estimate)",
    ]
    if beside:
        lines.append(f"{' and '.join(beside)} must fit in the {total - budget:.2f} GiB outside the budget")
    return tuple(lines)


def _blocks(kv: KvAnswer, settings: Settings) -> tuple[str, ...]:
    of_request = max(1, round(kv.num_blocks / kv.max_concurrency))
    n_bytes = kv.per_gpu_gib_one_request * GIB / of_request
    length = settings.max_model_len
    return (
        f"{kv.num_blocks:,} blocks of {n_bytes:,.0f} B a GPU ({kv.num_blocks * n_bytes / GIB:.2f} GiB), "
        f"{kv.block_size} tokens each",
        f"a request of {length:,} tokens takes {of_request:,} blocks: {kv.num_blocks:,} / {of_request:,} = "
        f"{kv.max_concurrency:.2f} at once",
        f"{kv.max_concurrency:.2f} x {length:,} = {kv.tokens:,} tokens (what vLLM prints as GPU KV cache size)",
    )
