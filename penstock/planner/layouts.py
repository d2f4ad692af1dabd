"""How a model may be cut over GPUs, and which cut to take. Every refusal has the number that refused it.

Sizes of one dimension are checked alone first and only legal ones combined: a thousand GPUs take milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from penstock.planner.architecture import Architecture, Attention, Mlp, State
from penstock.planner.engine_versions import EngineProfile
from penstock.planner.memory.weights import VOCAB_PADDING
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Speed
from penstock.planner.speed.work import part_format
from penstock.spec.deployment import Parallel, Workload

# Of two layouts with as many GPUs the pipeline must be this much faster: bubbles at uneven load are not modelled (an
# estimate). vLLM's own advice is the same: tensor inside a node, pipeline where its links are slow (PCIe).
_PIPELINE_HANDICAP = 0.85
_MOST_PIPELINE = 64

_Part = TypeVar("_Part", Attention, State, Mlp)


class DivisibilityRules(msgspec.Struct, frozen=True):
    """The numbers of a model that layouts must divide, without repetition. rows: (what, width, unit) of quantised
    matrices cut along their input, whose share must be a multiple of the format's block or group; `expert_unit`:
    likewise for routed experts."""

    n_layers: int
    sizes: tuple[tuple[str, int, bool], ...]
    rows: tuple[tuple[str, int, int], ...]
    expert_widths: tuple[int, ...]
    n_experts: int
    expert_unit: int | None
    unit_name: str


class Refused(msgspec.Struct, frozen=True):
    layout: Parallel
    reason: str


class Layouts(msgspec.Struct, frozen=True):
    legal: tuple[Parallel, ...]
    refused: tuple[Refused, ...]


class Candidate(msgspec.Struct, frozen=True):
    """A legal layout that fits. `misses`: how far it is over the workload's targets (0: all met)."""

    layout: Parallel
    speed: Speed
    crosses: str | None
    misses: float


class Choice(msgspec.Struct, frozen=True):
    """`chosen` None: nothing fits. `ranked` best first; `price`: what crossing slow links costs."""

    chosen: Candidate | None
    ranked: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    price: str | None = None


def divisibility_of(arch: Architecture, rules: EngineProfile) -> DivisibilityRules:
    attentions = _distinct(layer.attention for layer in arch.layers)
    states = _distinct(layer.state for layer in arch.layers)
    mlps = _distinct(layer.mlp for layer in arch.layers)
    dense = sorted({mlp.intermediate for mlp in mlps if not mlp.n_experts})
    shared = sorted({mlp.shared_intermediate for mlp in mlps if mlp.shared_intermediate})
    outputs = sorted({attention.n_heads * attention.head_dim_v for attention in attentions})
    units = {part: _unit(arch, part, rules) for part in ("attention", "dense", "shared", "experts")}
    matrices = [("MLP width", "dense", dense), ("shared expert width", "shared", shared)]
    rows = [("attention output", "attention", outputs), *matrices]
    padded_vocab = math.ceil(arch.vocab / VOCAB_PADDING) * VOCAB_PADDING
    heads = sorted({attention.n_heads for attention in attentions})
    kv_heads = sorted({attention.n_kv_heads for attention in attentions if attention.kind != "mla"})
    state_heads = sorted({count for state in states for count in _state_heads(state)})
    quant = arch.quantization
    return DivisibilityRules(
        n_layers=arch.n_layers,
        sizes=(
            *((f"{n} attention heads do not divide by tensor {{}}", n, False) for n in heads),
            *((f"{n} KV heads neither divide by tensor {{}} nor divide it", n, True) for n in kv_heads),
            *((f"{n} state heads do not divide by tensor {{}}", n, False) for n in state_heads),
            *((f"{what} {n} does not divide by tensor {{}}", n, False) for what, _, widths in matrices for n in widths),
            (f"vocabulary of {padded_vocab} (padded) does not divide by tensor {{}}", padded_vocab, False),
        ),
        rows=tuple((what, width, unit) for what, part, sizes in rows for width in sizes if (unit := units[part])),
        expert_widths=tuple(sorted({mlp.intermediate for mlp in mlps if mlp.n_experts})),
        n_experts=max((mlp.n_experts for mlp in mlps), default=0),
        expert_unit=units["experts"],
        unit_name="block" if quant is not None and quant.kind == "fp8-block" else "group",
    )


def refusal(divisors: DivisibilityRules, layout: Parallel, n_gpus: int | None = None) -> str | None:
    """Why this layout cannot be, with the number ("64 attention heads do not divide by tensor 3"), or None."""
    return (
        _too_many(layout, n_gpus)
        or tensor_refusal(divisors, layout.tensor)
        or _too_deep(divisors, layout.pipeline)
        or expert_refusal(divisors, layout)
    )


def tensor_refusal(divisors: DivisibilityRules, tensor: int) -> str | None:
    if tensor == 1:
        return None
    for reason, size, is_copied in divisors.sizes:
        if size % tensor and not (is_copied and tensor % size == 0):
            return reason.format(tensor)
    for what, width, unit in divisors.rows:
        if width // tensor % unit:
            return (
                f"{what} {width} / tensor {tensor} = {width // tensor} is not a multiple of the weights' "
                f"{divisors.unit_name} of {unit}"
            )
    return None


def _too_deep(divisors: DivisibilityRules, pipeline: int) -> str | None:
    return f"{divisors.n_layers} layers are fewer than pipeline {pipeline}" if pipeline > divisors.n_layers else None


def expert_refusal(divisors: DivisibilityRules, layout: Parallel) -> str | None:
    """Why the experts cannot be cut over tensor x data: whole ones with `expert`, slices of each without."""
    group = layout.tensor * layout.data
    if layout.expert and not divisors.n_experts:
        return "expert parallelism needs experts, this model has 0"
    if layout.expert and divisors.n_experts < group:
        return f"{divisors.n_experts} experts are fewer than tensor x data = {group}"
    for width in () if layout.expert else divisors.expert_widths:
        if width % group:
            return f"expert width {width} does not divide by tensor x data = {group}"
        if group > 1 and divisors.expert_unit and width // group % divisors.expert_unit:
            return (
                f"expert width {width} / (tensor x data = {group}) = {width // group} is not a multiple of the "
                f"weights' {divisors.unit_name} of {divisors.expert_unit}"
            )
    return None


def crossing(layout: Parallel, fabric: Fabric) -> str | None:
    """Why a layout's tensor group leaves the fast link domain, or None."""
    n_domains = fabric.n_domains(layout.tensor, layout.pipeline * layout.data)
    if n_domains == 1:
        return None
    network = fabric.network.id if fabric.network else "the network"
    return (
        f"tensor {layout.tensor} leaves the fast links of {fabric.domain_gpus} GPU(s): "
        f"every layer waits for {network} between {n_domains} machines"
    )


def enumerate_layouts(divisors: DivisibilityRules, fabric: Fabric, *, pipeline: int | None = None) -> Layouts:
    """All layouts worth considering on these machines, and the refused ones; a given `pipeline` is kept.
    Sizes that one rule refuses are listed once, not once a combination."""
    total, refused = fabric.n_gpus, list[Refused]()

    def is_legal(layout: Parallel, reason: str | None) -> bool:
        if reason:
            refused.append(Refused(layout, reason))
        return not reason

    tensors = [size for size in _tensor_sizes(fabric) if is_legal(Parallel(size), tensor_refusal(divisors, size))]
    cuts = list[Parallel]()
    for size in tensors:
        depths = {*range(1, 9), fabric.n_nodes, *_powers(total // size)}
        most = min(total // size, divisors.n_layers, _MOST_PIPELINE)
        for stages in [pipeline] if pipeline else sorted(depth for depth in depths if depth <= most):
            cut = Parallel(size, stages)
            if is_legal(cut, _too_many(cut, total) or _too_deep(divisors, stages)):
                cuts += _with_data(divisors, size, stages, total)
    legal = tuple(layout for layout in cuts if is_legal(layout, expert_refusal(divisors, layout)))
    return Layouts(legal, tuple(refused))


def choose(
    layouts: Layouts,
    fabric: Fabric,
    workload: Workload,
    fits: Callable[[Parallel], str | None],
    estimate: Callable[[Parallel], Speed],
) -> Choice:
    """The layout to take: targets met first, then the fewest GPUs, then the most tokens a second. `fits` says why a
    layout does not fit in memory. Tensor groups leave the fast link domain only when nothing else fits."""
    refused = list(layouts.refused)
    crosses = {layout: crossing(layout, fabric) for layout in layouts.legal}

    def ranked_of(are_inside: bool) -> list[Candidate]:
        candidates = []
        for layout in (layout for layout, why in crosses.items() if (why is None) is are_inside):
            if reason := fits(layout):
                refused.append(Refused(layout, reason))
                continue
            speed = estimate(layout)
            candidates.append(Candidate(layout, speed, crosses[layout], misses(speed, workload)))
        return sorted(candidates, key=_order)

    ranked, price = ranked_of(are_inside=True), None
    if ranked:
        refused += [Refused(layout, why) for layout, why in crosses.items() if why is not None]
    elif ranked := ranked_of(are_inside=False):
        waiting, token = ranked[0].speed.comm_ms, ranked[0].speed.tpot_ms.likely
        price = f"{ranked[0].crosses}; {waiting:.0f} of {token:.0f} ms a token"
    return Choice(ranked[0] if ranked else None, tuple(ranked), tuple(refused), price)


def misses(speed: Speed, workload: Workload) -> float:
    pairs = ((workload.ttft_ms, speed.ttft_ms.likely), (workload.tpot_ms, speed.tpot_ms.likely))
    return max(0.0, *(value / target - 1 if target else 0.0 for target, value in pairs))


def _order(candidate: Candidate) -> tuple[float, int, float, int]:
    layout, speed = candidate.layout, candidate.speed
    rate = speed.output_tokens_per_s.likely * (_PIPELINE_HANDICAP if layout.pipeline > 1 else 1)
    return (candidate.misses, layout.n_ranks, -rate, layout.pipeline)


def _too_many(layout: Parallel, n_gpus: int | None) -> str | None:
    if n_gpus is None or layout.n_ranks <= n_gpus:
        return None
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    return f"{sizes} needs {layout.n_ranks} GPUs, there are {n_gpus}"


def _tensor_sizes(fabric: Fabric) -> list[int]:
    total, domain = fabric.n_gpus, fabric.domain_gpus
    sizes = {*range(1, min(total, domain) + 1), total}
    sizes |= {domain * machines for machines in _powers(total // domain)}
    if total <= 16:  # few enough to tell of each: 3, 11 and 12 GPUs are what people ask about
        sizes |= set(range(1, total + 1))
    return sorted(sizes)


def _with_data(divisors: DivisibilityRules, tensor: int, pipeline: int, total: int) -> Iterator[Parallel]:
    most = total // (tensor * pipeline)
    for size in sorted({*_powers(most), most}):
        yield Parallel(tensor, pipeline, size)
        if divisors.n_experts and tensor * size > 1:
            yield Parallel(tensor, pipeline, size, expert=True)


def _powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [2**power for power in range(most.bit_length())] if most else []


def _state_heads(state: State) -> tuple[int, ...]:
    """Heads that TP divides: the states' own, and GDN's key heads."""
    if state.kind != "gdn":
        return (state.n_heads,)
    keys = (state.conv_channels - state.n_heads * state.head_dim_v) // 2 // max(1, state.head_dim_k)
    return (state.n_heads, keys) if keys > 0 else (state.n_heads,)


def _unit(arch: Architecture, part: str, rules: EngineProfile) -> int | None:
    """What a TP share of a part's inputs must be a multiple of, by its weights' format."""
    quant = part_format(arch.quantization, part, arch.n_layers // 2)
    if quant is None:
        return None
    if quant.kind == "fp8-block":
        block = (quant.block or (128, 128))[1]
        return math.gcd(block, rules.fp8_expert_block) if rules.fp8_expert_block and part == "experts" else block
    if quant.kind in ("awq", "gptq", "int4"):
        return max(quant.group_size or 1, rules.packed_expert_inputs if part == "experts" else rules.packed_inputs)
    return 16 if quant.kind == "nvfp4" else None


def _distinct(parts: Iterable[_Part | None]) -> set[_Part]:
    return {part for part in parts if part is not None}
