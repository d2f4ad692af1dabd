"""What else could be done: a shorter context, an fp8 cache, fp8 weights, more GPUs, each with what it gives. Pure.

A lever that the card refuses is not told. Where none makes it fit alone, all that cost no GPU are tried together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from penstock.errors import UserError
from penstock.planner import engine_limits, layouts
from penstock.planner.architecture.quantization import with_choice
from penstock.planner.memory.fit import Case, Fit, Memory
from penstock.planner.request import Lever
from penstock.spec.deployment import Parallel

_SHORT_CONTEXT = 8192
_GPUS_OF_A_NODE = 8  # what a larger machine has
_COSTS_ACCURACY = "costs some accuracy"


class Room(msgspec.Struct, frozen=True):
    """The machines, and the shortest context that still takes a request of the workload."""

    shape: layouts.Shape
    gpus_per_node: int
    nodes: int
    least_tokens: int


class _Change(msgspec.Struct, frozen=True):
    """A case with something changed, and the flags that ask for it."""

    name: str
    flags: tuple[str, ...]
    case: Case
    note: str = ""


def levers(case: Case, fit: Fit, room: Room) -> tuple[Lever, ...]:
    """Each change alone with the same layout, all together when none of them fits, and more GPUs."""
    changes = list(_changes(case, room))
    found = [_lever(change, fit.layout) for change in changes]
    if len(changes) > 1 and not fit.fits and not any(lever and lever.fits for lever in found):
        together = _lever(_all_of(case, changes), fit.layout)
        found += [together] if together is not None and together.fits else []
    found.append(_more_gpus(case, fit.layout, room))
    return tuple(lever for lever in found if lever is not None)


def _changes(case: Case, room: Room) -> Iterator[_Change]:
    length = min(_SHORT_CONTEXT, case.cache.max_model_len // 2)
    if length >= room.least_tokens:
        cache = msgspec.structs.replace(case.cache, max_model_len=length)
        changed = msgspec.structs.replace(case, cache=cache)
        yield _Change("shorter context", ("--max-model-len", f"{length}"), changed)
    if case.cache.kv_cache_dtype == "auto" and not engine_limits.cache_refusal(case.arch, case.gpu, "fp8", case.rules):
        cache = msgspec.structs.replace(case.cache, kv_cache_dtype="fp8")
        changed = msgspec.structs.replace(case, cache=cache)
        yield _Change("fp8 KV cache", ("--kv-cache-dtype", "fp8"), changed, _COSTS_ACCURACY)
    if case.arch.quantization is None:
        arch = with_choice(case.arch, "fp8")
        if not engine_limits.format_refusal(arch.quantization, case.gpu, case.rules):
            changed = msgspec.structs.replace(case, arch=arch)
            yield _Change("fp8 weights", ("--quantization", "fp8"), changed, _COSTS_ACCURACY)


def _all_of(case: Case, changes: list[_Change]) -> _Change:
    made = case
    for change in changes:
        if change.case.arch is not case.arch:
            made = msgspec.structs.replace(made, arch=change.case.arch)
        fields = {
            name: getattr(change.case.cache, name)
            for name in ("max_model_len", "kv_cache_dtype")
            if getattr(change.case.cache, name) != getattr(case.cache, name)
        }
        made = msgspec.structs.replace(made, cache=msgspec.structs.replace(made.cache, **fields))
    flags = tuple(word for change in changes for word in change.flags)
    return _Change("all of these", flags, made, _COSTS_ACCURACY)


def _more_gpus(case: Case, layout: Parallel, room: Room) -> Lever | None:
    """The next wider layout that is legal and fits, or else the next that is legal."""
    first = None
    for wider in _wider(layout, room):
        if layouts.refusal(room.shape, wider):
            continue
        change = _Change("more GPUs", _flags(wider, room), case, f"{wider.n_ranks} GPUs")
        lever = _lever(change, wider)
        if lever is not None and lever.fits:
            return lever
        first = first or lever
    return first


def _wider(layout: Parallel, room: Room) -> Iterator[Parallel]:
    """Tensor groups doubled to a node's GPUs, then a pipeline over more nodes."""
    tensor, pipeline = layout.tensor, layout.pipeline
    most = room.gpus_per_node if room.nodes > 1 else max(_GPUS_OF_A_NODE, room.gpus_per_node)
    while tensor * 2 * pipeline * layout.data <= most * room.nodes and tensor * 2 <= most:
        tensor *= 2
        yield Parallel(tensor, pipeline, layout.data, layout.expert)
    for more in (2, 4):
        yield Parallel(tensor, pipeline * more, layout.data, layout.expert)


def _flags(wider: Parallel, room: Room) -> tuple[str, ...]:
    """What asks for it, more machines included where they are needed."""
    words = ["--tensor", f"{wider.tensor}"]
    words += ["--pipeline", f"{wider.pipeline}"] if wider.pipeline > 1 else []
    words += ["--data", f"{wider.data}"] if wider.data > 1 else []
    words += ["--expert"] if wider.expert else []
    if wider.n_ranks <= room.gpus_per_node * room.nodes:
        return tuple(words)
    per_node = max(room.gpus_per_node, _GPUS_OF_A_NODE if room.nodes == 1 else 0)
    if room.nodes == 1 and wider.n_ranks <= per_node:
        return (*words, "--gpus-per-node", f"{wider.n_ranks}")
    n_nodes = math.ceil(wider.n_ranks / per_node)
    grown = ("--gpus-per-node", f"{per_node}") if per_node > room.gpus_per_node else ()
    return (*words, *grown, "--nodes", f"{n_nodes}")


def _lever(change: _Change, layout: Parallel) -> Lever | None:
    """None where what it would give is not modelled."""
    try:
        kv = (fit := Memory(change.case).fit(layout)).kv
    except UserError:
        return None
    if kv is None:
        return None
    return Lever(change.name, change.flags, fit.fits, kv.tokens, kv.max_concurrency, change.note)
