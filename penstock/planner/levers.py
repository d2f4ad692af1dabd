"""Changes to a request, a shorter context, fp8, more GPUs, each with what it gives. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.planner import engine_limits, layouts
from penstock.planner.architecture.quantization import with_choice
from penstock.planner.inputs import SolveInputs
from penstock.planner.memory.fit import Memory, MemoryFit, MemoryInputs
from penstock.planner.request import Lever, SizingRequest
from penstock.spec.deployment import Parallel

_SHORT_CONTEXT = 8192
_GPUS_OF_A_NODE = 8  # what a larger machine has
_COSTS_ACCURACY = "costs some accuracy"


class _Change(msgspec.Struct, frozen=True):
    """New values for fields of the memory inputs or of their cache settings."""

    name: str
    flags: tuple[str, ...]
    note: str = ""
    fields: dict[str, Any] = {}
    cache: dict[str, Any] = {}


def levers(inputs: SolveInputs, fit: MemoryFit) -> tuple[Lever, ...]:
    """Each change with the same layout, all together when none fits alone, and more GPUs."""
    memory = inputs.memory
    changes = list(_changes(inputs))
    answers = [_lever(memory, change, fit.layout) for change in changes]
    if len(changes) > 1 and not fit.fits and not any(lever and lever.fits for lever in answers):
        flags = tuple(word for change in changes for word in change.flags)
        fields = {name: value for change in changes for name, value in change.fields.items()}
        cache = {name: value for change in changes for name, value in change.cache.items()}
        together = _lever(memory, _Change("all of these", flags, _COSTS_ACCURACY, fields, cache), fit.layout)
        answers += [together] if together is not None and together.fits else []
    answers.append(_more_gpus(inputs, fit.layout))
    return tuple(lever for lever in answers if lever is not None)


def _changes(inputs: SolveInputs) -> Iterator[_Change]:
    memory, request = inputs.memory, inputs.request
    length = min(_SHORT_CONTEXT, memory.cache.max_model_len // 2)
    if length >= request.input_tokens + request.output_tokens:
        yield _Change("shorter context", ("--max-model-len", f"{length}"), cache={"max_model_len": length})
    is_auto = memory.cache.kv_cache_dtype == "auto"
    if is_auto and not engine_limits.cache_refusal(memory.arch, memory.gpu, "fp8", memory.rules):
        flags = ("--kv-cache-dtype", "fp8")
        yield _Change("fp8 KV cache", flags, _COSTS_ACCURACY, cache={"kv_cache_dtype": "fp8"})
    if memory.arch.quantization is None:
        arch = with_choice(memory.arch, "fp8")
        if not engine_limits.format_refusal(arch.quantization, memory.gpu, memory.rules):
            yield _Change("fp8 weights", ("--quantization", "fp8"), _COSTS_ACCURACY, fields={"arch": arch})


def _more_gpus(inputs: SolveInputs, layout: Parallel) -> Lever | None:
    first = None
    for wider in _wider(layout, inputs.request):
        if layouts.refusal(inputs.divisors, wider):
            continue
        change = _Change("more GPUs", _flags(wider, inputs.request), f"{wider.n_ranks} GPUs")
        lever = _lever(inputs.memory, change, wider)
        if lever is not None and lever.fits:
            return lever
        first = first or lever
    return first


def _wider(layout: Parallel, request: SizingRequest) -> Iterator[Parallel]:
    """Tensor groups doubled to a node's GPUs, then a pipeline over more nodes."""
    tensor, pipeline = layout.tensor, layout.pipeline
    most = request.gpus_per_node if request.nodes > 1 else max(_GPUS_OF_A_NODE, request.gpus_per_node)
    while tensor * 2 * pipeline * layout.data <= most * request.nodes and tensor * 2 <= most:
        tensor *= 2
        yield Parallel(tensor, pipeline, layout.data, layout.expert)
    for more in (2, 4):
        yield Parallel(tensor, pipeline * more, layout.data, layout.expert)


def _flags(wider: Parallel, request: SizingRequest) -> tuple[str, ...]:
    words = ["--tensor", f"{wider.tensor}"]
    words += ["--pipeline", f"{wider.pipeline}"] if wider.pipeline > 1 else []
    words += ["--data", f"{wider.data}"] if wider.data > 1 else []
    words += ["--expert"] if wider.expert else []
    if wider.n_ranks <= request.gpus_per_node * request.nodes:
        return tuple(words)
    per_node = max(request.gpus_per_node, _GPUS_OF_A_NODE if request.nodes == 1 else 0)
    if request.nodes == 1 and wider.n_ranks <= per_node:
        return (*words, "--gpus-per-node", f"{wider.n_ranks}")
    n_nodes = math.ceil(wider.n_ranks / per_node)
    grown = ("--gpus-per-node", f"{per_node}") if per_node > request.gpus_per_node else ()
    return (*words, *grown, "--nodes", f"{n_nodes}")


def _lever(memory: MemoryInputs, change: _Change, layout: Parallel) -> Lever | None:
    cache = msgspec.structs.replace(memory.cache, **change.cache)
    changed = msgspec.structs.replace(memory, cache=cache, **change.fields)
    try:
        fit = Memory(changed).fit(layout)
    except UserError:
        return None
    if fit.kv is None:
        return None
    return Lever(change.name, change.flags, fit.fits, fit.kv.tokens, fit.kv.max_concurrency, change.note)
