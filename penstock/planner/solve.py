"""The planner: a request with its facts in, a `Sizing` out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.planner import layouts
from penstock.planner.answer import answer, rejected, speed_at, speed_of_fit, warnings
from penstock.planner.inputs import SolveInputs, inputs_of
from penstock.planner.layouts import Candidate, Layouts, Refused
from penstock.planner.memory.fit import Memory, MemoryFit
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.planner.request import Sizing, SizingRequest, missed_targets
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Speed
from penstock.spec.deployment import Parallel
from penstock.text import GIB

# An engine that does not start has its memory counted, but no speed, users or levers.
_NOT_STARTED: dict[str, Any] = {"fits": False, "is_refused": True, "missed": ()}
_NOT_STARTED |= {"speed": None, "users": None, "levers": ()}


def sizing_of(
    request: SizingRequest,
    gpu: GpuFacts,
    network: LinkFacts | None = None,
    measured: Mapping[Parallel, MemoryMeasurement] | None = None,
) -> Sizing:
    """The answer to `request` on these machines.  Raises NotModelled (exit 4) and UserError (exit 2), never guesses.
    `measured` are the starts that are kept under `key_of` the request, by layout: they replace the estimates."""
    inputs = inputs_of(request, gpu, network, measured or {})
    memory = Memory(inputs.memory)
    sizing = _fixed(inputs, memory) if request.fixed_layout else _chosen(inputs, memory)
    warned = (*sizing.warnings, *warnings(inputs, sizing, memory))
    if not inputs.stops:
        return msgspec.structs.replace(sizing, warnings=warned)
    first, *others = inputs.stops
    reason = f"vLLM would not start: {first}"
    warned = (*others, *warned) if sizing.fits else (*others, f"memory: {sizing.reason}", *warned)
    return msgspec.structs.replace(sizing, reason=reason, warnings=warned, **_NOT_STARTED)


def speed_of(
    request: SizingRequest, gpu: GpuFacts, network: LinkFacts | None = None, rounds: float | None = None
) -> Speed | None:
    """All that is predicted of the request's fixed layout; None where `sizing_of` has no speed.  Raises as it does.
    `rounds`: of equally long requests, as `estimate` has it."""
    layout = request.fixed_layout
    assert layout is not None, "asked only when there is one"
    inputs = inputs_of(request, gpu, network, {})
    if inputs.stops or layouts.refusal(inputs.divisors, layout, inputs.fabric.n_gpus):
        return None
    return speed_of_fit(inputs, Memory(inputs.memory).fit(layout), rounds)


def _fixed(inputs: SolveInputs, memory: Memory) -> Sizing:
    layout = inputs.request.fixed_layout
    assert layout is not None, "asked only when there is one"
    refusal = layouts.refusal(inputs.divisors, layout, inputs.fabric.n_gpus)
    if refusal:
        return Sizing(False, refusal, inputs.settings, rejected=rejected([Refused(layout, refusal)]))
    n_given = len(inputs.request.available_kv_gib)
    if n_given not in (0, 1, layout.pipeline):
        raise UserError(
            f"cannot use {n_given} values of --available-kv-gib for {layout.pipeline} pipeline stage(s)",
            hint="Give one value, or one for each stage, with --pipeline.",
        )
    fit = memory.fit(layout)
    crosses = layouts.crossing(layout, inputs.fabric)
    return answer(inputs, fit, fit.refusal or _why_it_fits(fit), (), crosses)


def _chosen(inputs: SolveInputs, memory: Memory) -> Sizing:
    request, fabric = inputs.request, inputs.fabric
    n_given = len(request.available_kv_gib)
    possible = layouts.enumerate_layouts(inputs.divisors, fabric, pipeline=n_given if n_given > 1 else None)
    if request.expert:
        with_experts = tuple(layout for layout in possible.legal if layout.expert)
        possible = Layouts(with_experts, possible.refused)
    choice = layouts.choose(
        possible,
        fabric,
        inputs.workload,
        lambda layout: memory.fit(layout).refusal,
        lambda layout: speed_at(inputs, memory.fit(layout)),
    )
    if choice.chosen is not None:
        widest = max((cut.tensor for cut in possible.legal if layouts.crossing(cut, fabric) is None), default=1)
        # Last a pipeline of tensor groups smaller than NVLink allows: a token waits for all stages (vLLM's guide).
        narrow = {cut for cut in possible.legal if cut.pipeline > 1 and cut.tensor < widest and fabric.gpu.nvlink}
        best, *rest = sorted(choice.ranked, key=lambda each: (each.misses, each.layout in narrow))
        fit = memory.fit(best.layout)
        others = (Refused(other.layout, _why_not(other, best, request)) for other in rest)
        return answer(inputs, fit, _why_it_fits(fit), (*choice.refused, *others), choice.price)
    if not possible.legal:
        reason = _all_refused(inputs, choice.refused)
        return Sizing(False, reason, inputs.settings, rejected=rejected(choice.refused))
    nearest = max((memory.fit(layout) for layout in possible.legal), key=lambda fit: fit.margin_bytes)
    refused = tuple(other for other in choice.refused if other.layout != nearest.layout)
    return answer(inputs, nearest, f"no layout fits {_gpus(fabric)}; the nearest: {nearest.refusal}", refused, None)


def _gpus(fabric: Fabric) -> str:
    return "1 GPU" if fabric.n_gpus == 1 else f"{fabric.n_gpus} GPUs"


def _all_refused(inputs: SolveInputs, refused: Iterable[Refused]) -> str:
    if inputs.request.expert and not inputs.divisors.n_experts:
        return "expert parallelism needs experts, this model has 0"
    reasons = list(dict.fromkeys(layout.reason for layout in refused))
    shown = "; ".join(reasons[:3]) or "whole experts on each rank need 2 GPUs or more"
    return f"no layout of {_gpus(inputs.fabric)} is legal: {shown}"


def _why_it_fits(fit: MemoryFit) -> str:
    assert fit.kv is not None, "what fits has a KV cache"
    n = fit.layout.n_ranks
    return (
        f"{n} GPU{'s hold' if n > 1 else ' holds'} {max(fit.weights) / GIB:.2f} GiB of weights{' each' * (n > 1)} "
        f"and KV cache for {fit.kv.max_concurrency:.2f} requests of the longest length"
    )


def _why_not(other: Candidate, best: Candidate, request: SizingRequest) -> str:
    if other.misses > best.misses:
        return f"fits, but {' and '.join(missed_targets(other.speed, request.ttft_ms, request.tpot_ms))}"
    if other.layout.n_ranks > best.layout.n_ranks:
        return f"fits, but takes {other.layout.n_ranks} GPUs where {best.layout.n_ranks} are enough"
    if other.layout.n_ranks < best.layout.n_ranks:
        waits, ours = other.speed.tpot_ms.likely, best.speed.tpot_ms.likely
        return f"fits, but a pipeline of narrow stages waits {waits:.1f} ms a token, the chosen layout {ours:.1f}"
    ours, theirs = (each.speed.output_tokens_per_s.likely for each in (best, other))
    return f"fits, but not faster: {theirs:.0f} tokens a second, the chosen one {ours:.0f}"
