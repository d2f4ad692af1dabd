"""What one engine step must read and multiply: parameters by how they are cut, bytes, FLOPs. No times here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from penstock.planner.architecture import (
    Architecture,
    Attention,
    Layer,
    Mlp,
    Quantization,
    QuantKind,
    State,
    dtype_bytes,
)
from penstock.planner.architecture.quantization import format_of
from penstock.planner.memory.kv_pages import state_bytes
from penstock.spec.deployment import Parallel

# Bytes of one weight with its scales: the table of sizing.md section 2, from the formats' own definitions.
# Block fp8: 1 + 4/16384; int4 with a group of 128: 0.5 + 2/128 (+ packed zeros 0.5/128 for AWQ and GPTQ).
_BYTES: Mapping[QuantKind, float] = {
    "fp8": 1.0,
    "fp8-block": 1 + 4 / 16384,
    "int8": 1.0,
    "awq": 0.5195,
    "gptq": 0.5195,
    "int4": 0.5156,
    "mxfp4": 0.53125,
    "nvfp4": 0.5625,
    "bnb-nf4": 0.5625,
    "bnb-int8": 1.0,
}

# Names that checkpoints give to each part of a layer, to ask whether a format leaves it in the model's dtype.
_PART_NAMES = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj"),
    "state": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mixer.in_proj", "mamba.in_proj"),
    "dense": ("mlp.gate_proj", "mlp.down_proj"),
    "shared": ("mlp.shared_experts.gate_proj", "mlp.shared_expert.down_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts"),
}


class LayerCosts(msgspec.Struct, frozen=True):
    """One layer. Parameters are counts, bytes what they take in memory.

    cut: divided by TP (query and output projections, dense MLP, shared experts, states). kv: key and value projections,
    divided by min(tp, n_kv_heads). copied: on every rank (routers, MLA down-projections). expert: one expert.
    cache_numbers: what a token leaves in the KV cache; cut by KV heads unless `is_mla`. state_bytes: a request's state.
    """

    cut_params: int = 0
    cut_bytes: float = 0.0
    kv_params: int = 0
    kv_bytes: float = 0.0
    n_kv_heads: int = 1
    copied_params: int = 0
    copied_bytes: float = 0.0
    expert_params: int = 0
    expert_bytes: float = 0.0
    n_experts: int = 0
    top_k: int = 0
    cache_numbers: int = 0
    window: int | None = None
    is_mla: bool = False
    attention_numbers: int = 0
    decode_numbers: int = 0
    state_bytes: float = 0.0
    n_allreduces: int = 0

    @property
    def is_moe(self) -> bool:
        return self.n_experts > 0

    def sees(self, n_tokens: float) -> float:
        return n_tokens if self.window is None else min(n_tokens, self.window)


class StepCosts(msgspec.Struct, frozen=True):
    """A whole model: `layers` is (distinct layer, how many), `head_params` the output matrix.
    `weight_kind` None: weights in the model's dtype."""

    layers: tuple[tuple[LayerCosts, int], ...]
    hidden: int
    vocab: int
    head_params: int
    head_bytes: float
    dtype_bytes: float
    weight_kind: QuantKind | None = None

    @property
    def n_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def n_moe_layers(self) -> int:
        return sum(count for layer, count in self.layers if layer.is_moe)

    @property
    def n_mla_layers(self) -> int:
        return sum(count for layer, count in self.layers if layer.is_mla)

    @property
    def n_state_layers(self) -> int:
        return sum(count for layer, count in self.layers if layer.state_bytes)

    @property
    def n_allreduces(self) -> int:
        """Two a layer of the usual kind, and one after the embedding."""
        return 1 + sum(layer.n_allreduces * count for layer, count in self.layers)


class Step(msgspec.Struct, frozen=True):
    """One step of one data rank: `n_decodes` requests make a token each, `prefill_tokens` are read in.
    `context` is the mean tokens before a decoded one, `prefill_context` before a prefilled one."""

    n_decodes: float
    prefill_tokens: float
    context: float
    prefill_context: float

    @property
    def n_tokens(self) -> float:
        return self.n_decodes + self.prefill_tokens


def step_costs(arch: Architecture) -> StepCosts:
    """The work of a model. Llama-3.1-70B: 80 equal layers of 855_638_016 parameters, a head of 8192 x 128256."""
    number = float(dtype_bytes(arch.dtype))
    counted: Counter[LayerCosts] = Counter()
    if arch.quantization is None:  # layers of one kind have the same bytes wherever they stand
        for layer, count in Counter(arch.layers).items():
            counted[_layer_costs(arch, layer, 0, number)] += count
    else:
        counted.update(_layer_costs(arch, layer, index, number) for index, layer in enumerate(arch.layers))
    head = arch.hidden * arch.vocab
    kind = arch.quantization.kind if arch.quantization else None
    return StepCosts(tuple(counted.items()), arch.hidden, arch.vocab, head, head * number, number, kind)


def with_weight_bytes(work: StepCosts, read_bytes: float) -> StepCosts:
    """The same work with the layers' bytes scaled so that they and the head take `read_bytes` (by the inventory)."""
    factor = (read_bytes - work.head_bytes) / max(1.0, total_bytes(work) - work.head_bytes)
    fields = ("cut_bytes", "kv_bytes", "copied_bytes", "expert_bytes")
    scaled = (
        msgspec.structs.replace(layer, **{name: getattr(layer, name) * factor for name in fields})
        for layer, _ in work.layers
    )
    counts = (count for _, count in work.layers)
    return msgspec.structs.replace(work, layers=tuple(zip(scaled, counts, strict=True)))


def total_bytes(work: StepCosts) -> float:
    """Bytes of all layers and the head in memory, before any cut."""
    return work.head_bytes + sum(
        count * (layer.cut_bytes + layer.kv_bytes + layer.copied_bytes + layer.n_experts * layer.expert_bytes)
        for layer, count in work.layers
    )


def experts_hit(n_experts: int, top_k: int, n_tokens: float) -> float:
    """Different experts that `n_tokens` choose, evenly: E (1 - (1 - k/E)^T).  128 experts, 8 each, 8 tokens: 51.6."""
    return n_experts * (1 - (1 - top_k / n_experts) ** n_tokens) if n_experts else 0.0


def busiest_share(n_hit: float, n_experts: int, n_ranks: int) -> float:
    """How much more than an even share the rank with the most work has, whole experts being spread over `n_ranks`.
    A rank has E / n experts, each chosen with p = hit / E: mean m = p E / n, variance m (1 - p), the most of n such
    numbers sqrt(2 ln n) deviations above. 57 of 256 on 8 ranks: 7.1 on average, 11.9 the busiest."""
    mean = n_hit / n_ranks
    if n_ranks < 2 or not mean:
        return 1.0
    most = mean + math.sqrt(2 * math.log(n_ranks) * mean * (1 - n_hit / n_experts))
    return min(most, n_hit, n_experts / n_ranks) / mean if n_hit > n_ranks else min(most, n_hit) / mean


def expert_bytes_read(work: StepCosts, layout: Parallel, n_tokens: float) -> float:
    """Of `weight_bytes_read`, the routed experts', cut over tp x dp; tokens of all data ranks choose among them.
    With expert parallelism each expert is whole on one rank, and the busiest rank counts."""
    n_ranks, total = layout.tensor * layout.data, 0.0
    for layer, count in work.layers:
        hit = experts_hit(layer.n_experts, layer.top_k, n_tokens * layout.data)
        uneven = busiest_share(hit, layer.n_experts, n_ranks) if layout.expert else 1.0
        total += count * uneven * hit * layer.expert_bytes / n_ranks
    return total


def weight_bytes_read(work: StepCosts, layout: Parallel, n_tokens: float) -> float:
    """Weight bytes that one rank of each pipeline stage reads in a step, summed over the stages."""
    tp = layout.tensor
    total = work.head_bytes / tp + expert_bytes_read(work, layout, n_tokens)
    for layer, count in work.layers:
        total += count * (layer.cut_bytes / tp + layer.kv_bytes / min(tp, layer.n_kv_heads) + layer.copied_bytes)
    return total


def cache_bytes_read(work: StepCosts, layout: Parallel, step: Step, cache_dtype_bytes: float = 2.0) -> float:
    """Bytes of KV cache that one rank of each stage reads, and of states it reads and writes, in a step."""
    tp, total = layout.tensor, 0.0
    for layer, count in work.layers:
        share = 1.0 if layer.is_mla else 1 / min(tp, layer.n_kv_heads)
        seen, before = layer.sees(step.context), layer.sees(step.prefill_context)
        # A prefilled chunk reads what is before it once, not once a token: charged as one request's worth.
        n_tokens = step.n_decodes * seen + (before if step.prefill_tokens >= 1 else before * step.prefill_tokens)
        total += count * (layer.cache_numbers * share * cache_dtype_bytes * n_tokens)
        total += count * 2 * layer.state_bytes / tp * step.n_decodes
    return total


class Flops(msgspec.Struct, frozen=True):
    """FLOPs of the weight matrices on one rank of each stage: in the model's dtype (`plain`), in the
    checkpoint's format (`quantised`), and the routed `experts` in theirs."""

    plain: float = 0.0
    quantised: float = 0.0
    experts: float = 0.0


def linear_flops(work: StepCosts, layout: Parallel, step: Step) -> Flops:
    """2 a parameter a token; the head only where a token is made. Routed experts count top_k times, divided by TP.
    Which part is quantised is seen by its bytes: Kimi-K2.5 has experts alone in int4."""
    tp, tokens = layout.tensor, step.n_tokens
    by_kind = {True: 0.0, False: 2 * work.head_params / tp * step.n_decodes}
    experts = 0.0
    for layer, count in work.layers:
        parts = (
            (layer.cut_params / tp, layer.cut_bytes / max(1, layer.cut_params)),
            (layer.kv_params / min(tp, layer.n_kv_heads), layer.kv_bytes / max(1, layer.kv_params)),
            (layer.copied_params, layer.copied_bytes / max(1, layer.copied_params)),
        )
        for params, each in parts:
            by_kind[work.weight_kind is not None and each < 0.75 * work.dtype_bytes] += count * 2 * tokens * params
        experts += count * 2 * tokens * layer.top_k * layer.expert_params / tp
    return Flops(by_kind[False], by_kind[True], experts)


def attention_flops(work: StepCosts, layout: Parallel, step: Step) -> float:
    """FLOPs of scores and values on one rank of each stage: 2 x heads x (d_k + d_v) a token a token before it.
    MLA decodes in the compressed space: heads x (2 x kv_lora_rank + rope_dim)."""
    total = 0.0
    for layer, count in work.layers:
        seen, before = layer.sees(step.context), layer.sees(step.prefill_context)
        decode = layer.decode_numbers * seen * step.n_decodes
        total += count * 2 * (decode + layer.attention_numbers * before * step.prefill_tokens)
    return total / layout.tensor


def _layer_costs(arch: Architecture, layer: Layer, index: int, number_bytes: float) -> LayerCosts:
    def each(part: str) -> float:
        return _part_bytes(arch.quantization, part, index, number_bytes)

    hidden, state, mlp = arch.hidden, layer.state, layer.mlp or Mlp(0)
    costs = _attention_costs(layer.attention, hidden, each("attention")) if layer.attention else LayerCosts()
    of_state = _state_params(state, hidden) if state else 0
    one_width = hidden * (3 if mlp.is_gated else 2)
    dense, expert = (0, one_width * mlp.intermediate) if mlp.n_experts else (one_width * mlp.intermediate, 0)
    shared, router = one_width * mlp.shared_intermediate, hidden * mlp.n_experts
    cut_bytes = costs.cut_bytes + of_state * each("state")
    return msgspec.structs.replace(
        costs,
        cut_params=costs.cut_params + of_state + dense + shared,
        cut_bytes=cut_bytes + (dense * each("dense") + shared * each("shared")),
        copied_params=costs.copied_params + router,
        copied_bytes=costs.copied_bytes + router * number_bytes,
        expert_params=expert,
        expert_bytes=expert * each("experts"),
        n_experts=mlp.n_experts,
        top_k=mlp.top_k,
        state_bytes=state_bytes(state, arch.dtype, 1) if state else 0.0,
        n_allreduces=bool(layer.attention or state) + bool(layer.mlp),
    )


def _attention_costs(attention: Attention, hidden: int, each: float) -> LayerCosts:
    """`each`: bytes of one weight. A layer that reads another's cache has no key and value projections of its own."""
    heads, d_k, d_v = attention.n_heads, attention.head_dim_k, attention.head_dim_v
    if attention.kind == "mla":
        lora, rope, q_rank = attention.kv_lora_rank or 0, attention.rope_dim or 0, attention.q_lora_rank or 0
        cut = heads * d_k * (q_rank or hidden) + lora * heads * (d_k - rope + d_v)
        kv, copied, cache, decode = 0, hidden * (lora + rope + q_rank), lora + rope, heads * (2 * lora + rope)
    else:
        cut, copied = heads * d_k * hidden * (2 if attention.has_output_gate else 1), 0
        cache, decode = attention.n_kv_heads * (d_k + d_v), heads * (d_k + d_v)
        kv = cache * hidden
    cut += heads * d_v * hidden
    return LayerCosts(
        cut_params=cut,
        cut_bytes=cut * each,
        kv_params=kv,
        kv_bytes=kv * each,
        n_kv_heads=attention.n_kv_heads,
        copied_params=copied,
        copied_bytes=copied * each,
        cache_numbers=cache,
        window=attention.window,
        is_mla=attention.kind == "mla",
        attention_numbers=heads * (d_k + d_v),
        decode_numbers=decode,
    )


def _state_params(state: State, hidden: int) -> int:
    """In- and output projections: everything that enters the convolution, a gate of the inner width, a step a head."""
    inner = state.n_heads * state.head_dim_v
    projections = hidden * (state.conv_channels + inner) + inner * hidden
    if state.kind == "mamba1":
        return projections + inner * (state.dt_rank + 2 * state.head_dim_k) + state.dt_rank * inner
    return projections + hidden * state.n_heads


def part_format(quant: Quantization | None, part: str, index: int) -> Quantization | None:
    """The format of a part of layer `index` (a key of `_PART_NAMES`); None: the model's dtype."""
    if quant is None:
        return None
    formats = [format_of(f"model.layers.{index}.{name}", quant) for name in _PART_NAMES[part]]
    names_modules = any(each.included for each in (quant, *quant.also))
    named = [chosen for chosen in formats if chosen is not None]
    return named[0] if named and (names_modules or len(named) == len(formats)) else None


def _part_bytes(quant: Quantization | None, part: str, index: int, number_bytes: float) -> float:
    quantization = part_format(quant, part, index)
    if quantization is None:
        return number_bytes
    return _BYTES[quantization.kind] * (quantization.bits / 4 if quantization.kind in ("awq", "gptq", "int4") else 1)
