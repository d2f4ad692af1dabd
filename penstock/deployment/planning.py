"""The planner with what it reads: the catalogue, this machine's cards, measurements of earlier starts."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.deployment import measured
from penstock.engines.vllm import images, names
from penstock.engines.vllm.engine import pass_through
from penstock.errors import NotModelled, Problem, SpecError, UserError
from penstock.hardware import Gpu, Links, Machine, catalog, detect
from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.models import Facts, facts
from penstock.planner import Key
from penstock.planner.architecture.quantization import CHECKPOINTS
from penstock.planner.inputs import key_of
from penstock.planner.launch import Sized, gpus_for_each
from penstock.planner.request import Sizing, SizingRequest
from penstock.planner.solve import sizing_of, speed_of
from penstock.planner.speed.estimate import Speed
from penstock.planner.throughput import throughput
from penstock.spec import reading
from penstock.spec.deployment import Deployment, Hardware, Parallel, Scalar, Workload
from penstock.spec.secret_values import secret_names
from penstock.text import bare_flag

_Value = Scalar | list[Scalar]


def solve(
    request: SizingRequest,
    card: GpuFacts | None = None,
    with_measured: bool = True,
    network: LinkFacts | None = None,
) -> Sizing:
    """The planner's answer, notes on facts and measurements among its warnings.  Raises NotModelled and UserError.
    `card`: a GPU that the catalogue may not have; `network`: a measured one in place of the named one."""
    gpu = card or catalog.gpu(request.gpu)
    if network is None and request.network:
        network = catalog.link(request.network)
    key = _kept_under(request, gpu) if with_measured else None
    kept, damage = measured.read(key) if key is not None else ({}, ())
    given = [word for word in request.more_args if word.startswith("--")]
    flags = [word for word in given if bare_flag(word).partition(".")[0] in names.UNCOUNTED]
    share = None if names.NO_DECODE_GRAPHS.match(" ".join(request.more_args)) else 0.5 if flags else 0.95
    sizing = sizing_of(msgspec.structs.replace(request, sure_share=share), gpu, network, kept)
    if sizing.fits and sizing.layout is not None and key is not None:
        sizing = msgspec.structs.replace(sizing, start=measured.expected(measured.planned_key(key, sizing.layout)))
    uncounted = [f"the memory of {', '.join(flags)} is not modelled, and not counted"] if flags else []
    if flags and sizing.most_seqs is not None:
        uncounted.append(f"vLLM does not start if they leave fewer cache blocks than {sizing.settings.max_num_seqs:,}")
    notes = (*request.facts.notes, *damage, *uncounted)
    more = tuple(note for note in notes if note not in sizing.warnings)
    return msgspec.structs.replace(sizing, warnings=(*more, *sizing.warnings)) if more else sizing


def speed(request: SizingRequest, rounds: float | None = None) -> Speed | None:
    """Of a request's fixed layout; None where `solve` has no speed.  Raises as `solve` does.
    `rounds`: requests are equally long, so many for each of `concurrency`."""
    network = catalog.link(request.network) if request.network else None
    return speed_of(request, catalog.gpu(request.gpu), network, rounds)


def size(
    deployment: Deployment,
    of_model: Facts,
    machine: Machine,
    engine_version: str,
    n_replicas: int,
    network: LinkFacts | None = None,
) -> Sized:
    """The planner's answer for `n_replicas` of a deployment on a machine's GPUs.  Raises UserError, never NotModelled.
    `network` is a measured one between its machines, in place of the file's."""
    card = card_of(machine.gpus)
    of_model = msgspec.structs.replace(of_model, notes=(*of_model.notes, *notes_of(card)))
    request = request_of(deployment, of_model, card.id)
    if request.quantization in CHECKPOINTS:
        raise UserError(
            f'cannot start vLLM with quantization "{request.quantization}": it finds that format in the checkpoint',
            hint="Remove engine.args.quantization, and set model to a checkpoint in that format.",
        )
    request = msgspec.structs.replace(
        request,
        gpus_per_node=gpus_for_each(deployment, machine, n_replicas),
        engine_version=engine_version,
        links=machine.links,
    )
    try:
        sizing = solve(request, card) if network is None else solve(request, card, network=network)
    except NotModelled as error:
        return Sized(not_modelled=error.message)
    can = throughput(request, sizing, card, network) if deployment.replicas.follows_load else None
    return Sized(sizing, _kept_under(request, card), throughput=can)


def card_of(gpus: Sequence[Gpu]) -> GpuFacts:
    """The card of a machine's GPUs: the smallest decides where they differ."""
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    return catalog.gpu_of_machine(smallest.name, smallest.memory_bytes)


def can_launch(gpu: str | None) -> bool:
    """Return whether engines can be started on the card of that name: all images and commands are for CUDA."""
    return all(card.vendor == "nvidia" for card in catalog.gpus_named(gpu or ""))


def notes_of(card: GpuFacts) -> tuple[str, ...]:
    """Where a card's driver and the catalogue differ."""
    known = card.memory if card.stands_in is not None else catalog.gpu(card.id).memory
    if known == card.memory:
        return ()
    theirs, ours = card.memory.nvidia_smi_mib or 0, known.nvidia_smi_mib or 0
    return (f"the driver reports {theirs:,} MiB a GPU, the catalogue {ours:,}: the driver's number is used",)


def request_for(source: str | Deployment, asked: Mapping[str, Any]) -> tuple[SizingRequest, GpuFacts | None]:
    """The request for a model or a deployment, `asked` over it; and the card when it is this machine's.
    Without a GPU in either, this machine's are meant, shared by replicas. Reads files and the hub. Raises UserError."""
    if isinstance(source, str):
        model, hardware = source, Hardware(gpus_per_node=asked.get("gpus_per_node"))
    elif source.engine.kind not in ("auto", "vllm"):
        raise UserError(
            f'cannot plan deployment "{source.name}": its engine is {source.engine.kind}',
            hint="Planning is for vLLM on GPUs: set engine.kind: vllm.",
        )
    else:
        model, hardware = source.model, source.hardware
    of_model, card, gpu, n_gpus = facts.read(model), None, asked.get("gpu") or hardware.gpu, hardware.n_gpus
    if gpu is None:
        card, n_gpus, links, notes = _local_gpus(hardware)
        gpu, of_model = card.id, msgspec.structs.replace(of_model, notes=(*of_model.notes, *notes))
        asked = {"links": links, **asked}
    n_gpus = n_gpus or 1
    if isinstance(source, str):
        return SizingRequest(of_model, **{"gpu": gpu, "gpus_per_node": n_gpus, **asked}), card
    if source.parallel == "auto":
        n_gpus = max(1, n_gpus // max(1, source.replicas.min))
    return msgspec.structs.replace(request_of(source, of_model, gpu), **{"gpus_per_node": n_gpus, **asked}), card


def absent_gpus(hardware: Hardware, host: str, gpus: Sequence[Gpu]) -> list[Problem]:
    """The problem of a machine that lacks GPUs of `hardware.gpu_ids`."""
    absent = {*(hardware.gpu_ids or ())} - {gpu.index for gpu in gpus} if hardware.gpus_per_node != 0 else ()
    message = f"{host} has no usable GPU {', '.join(map(str, sorted(absent)))}"
    hint = "see nvidia-smi there; its CUDA_VISIBLE_DEVICES may hide some"
    return [Problem("hardware.gpu_ids", message, hint)] if absent else []


def _local_gpus(hardware: Hardware) -> tuple[GpuFacts, int, Links | None, tuple[str, ...]]:
    """(the card, GPUs, links, notes) of this machine's GPUs that the file allows, which must be of one kind."""
    if problems := absent_gpus(hardware, "this machine", present := detect.gpus()):
        raise SpecError("the file", problems)
    gpus = [gpu for gpu in present if not hardware.gpu_ids or gpu.index in hardware.gpu_ids][: hardware.n_gpus]
    names = sorted({gpu.name for gpu in gpus})
    if len(names) != 1:
        raise UserError(
            f"cannot plan for this machine: it has {'no GPU' if not gpus else 'GPUs of several kinds'}",
            detail=", ".join(names or detect.look()[1]) or "nvidia-smi lists none, or is not installed.",
            hint=f"Name the GPU: --gpu h100-sxm --gpus-per-node 8. Known: {', '.join(catalog.gpu_ids())}.",
        )
    card, links = card_of(gpus), detect.links([gpu.index for gpu in gpus])
    unknown = "nvidia-smi does not report how the GPUs of this machine are connected: the catalogue's links are used"
    return card, len(gpus), links, notes_of(card) + ((unknown,) if links is None else ())


def request_of(deployment: Deployment, of_model: Facts, gpu: str) -> SizingRequest:
    """The request of a deployment on these cards, as many as its file says, or 1."""
    hardware = deployment.hardware
    known, more = _planned(deployment.engine.args)
    cut = deployment.parallel if isinstance(deployment.parallel, Parallel) else None
    return SizingRequest(
        facts=of_model,
        gpu=gpu,
        gpus_per_node=hardware.n_gpus or 1,
        nodes=hardware.nodes,
        network=hardware.link,
        engine_version=images.named_version(deployment),
        max_model_len=deployment.engine.max_model_len,
        gpu_memory_utilization=deployment.engine.gpu_memory_utilization,
        more_args=tuple(pass_through(more)),
        environment=_environment(deployment.engine.variables),
        **(msgspec.structs.asdict(cut) if cut else {}),
        **msgspec.structs.asdict(deployment.workload),
        **known,
    )


def _environment(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Names, and a hash of all values, without secrets: keys of measurements are kept, and shown in plans."""
    rows = sorted(variables.items() - {(name, variables[name]) for name in secret_names(variables)})
    return (*(name for name, _ in rows), hashlib.sha256(repr(rows).encode()).hexdigest()[:12]) if rows else ()


def _planned(args: Mapping[str, _Value]) -> tuple[dict[str, Any], dict[str, _Value]]:
    known: dict[str, Any] = {}
    more: dict[str, _Value] = {}
    kinds = {field.name: field.type for field in msgspec.structs.fields(SizingRequest)}
    for key, value in args.items():
        flag = bare_flag(key)
        given: object = True if value is None else value
        if flag.startswith("no-") and flag.removeprefix("no-") in names.PLANNED:
            flag, given = flag.removeprefix("no-"), not given
        field = names.PLANNED.get(flag)
        if field is None:
            more[key] = value
            continue
        try:
            known[field] = msgspec.convert(given, kinds[field], strict=False)
        except msgspec.ValidationError:  # vLLM may understand a number that we do not
            more[key] = value
    return known, more


def _kept_under(request: SizingRequest, gpu: GpuFacts) -> Key:
    """The key of this engine's measurements: flags that change no memory do not make another engine."""
    words: list[str] = []
    is_left_out = False
    for word in request.more_args:
        if word.startswith("--"):
            is_left_out = bare_flag(word).removeprefix("no-") in names.WEIGHTLESS
        if not is_left_out:
            words.append(word)
    return key_of(msgspec.structs.replace(request, more_args=tuple(words)), gpu)


# ---- the file for `penstock up` --------------------------------------------------------------------------------------


def deployment_text(request: SizingRequest, sizing: Sizing, base: Mapping[str, Any] | None = None) -> str:
    """A file for `penstock up` with the chosen layout, checked as `up` checks it.
    `base` is the file that was planned: what planning does not know stays as it is there."""
    import yaml

    layout, settings = sizing.layout, sizing.settings
    assert layout is not None, "what fits has a layout"
    own = dict(base or {})
    folder = Path(request.facts.reference).expanduser()
    model = request.facts.hub_id or (str(folder.resolve()) if folder.exists() else request.facts.reference)
    args = {name: value for name, value in _args(sizing.engine_args).items() if name not in names.OURS}
    blocks = {
        "hardware": {name: getattr(request, name) for name in ("gpu", "gpus_per_node", "nodes", "network")},
        "parallel": msgspec.structs.asdict(layout),
        "engine": {
            "kind": "vllm",
            "max_model_len": settings.max_model_len,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "args": args or None,
        },
        "workload": {name: getattr(request, name) for name in Workload.__struct_fields__},
    }
    blocks["hardware"]["nodes"] = _nodes_of(request, layout)
    # In a file it is for all replicas, in a request for one.
    own_gpus = (own.get("hardware") or {}).get("gpus_per_node") or 0
    blocks["hardware"]["gpus_per_node"] = max(request.gpus_per_node, own_gpus)
    plain = {**own, "model": own.get("model", model)}
    for name, block in blocks.items():
        before = own.get(name) if name in ("hardware", "engine") else None
        merged = {**(before or {}), **block}
        plain[name] = {key: value for key, value in merged.items() if value is not None}
    text = f"# Made by `penstock plan`: {' '.join(sizing.reason.split())}\n"
    text += f"# The engine's own command: {shlex.join(serve_words(request, sizing))}\n"
    text += str(yaml.safe_dump(plain, sort_keys=False, width=120))
    reading.parse(text, "the file to write")
    return text


def serve_words(request: SizingRequest, sizing: Sizing) -> list[str]:
    """The engine's own command, with the chosen layout."""
    return ["vllm", "serve", request.facts.hub_id or request.facts.reference, *sizing.engine_args]


def up_words(request: SizingRequest, sizing: Sizing, source: str | None = None) -> list[str]:
    """`penstock up` with the chosen layout; empty where `up` cannot start it: data ranks over several nodes, a card of
    another maker. `source` is the file that was planned, None: the model."""
    assert sizing.layout is not None, "what fits has a layout"
    cut, nodes = sizing.layout, _nodes_of(request, sizing.layout)
    if (cut.data > 1 and nodes > 1) or not can_launch(request.gpu):
        return []
    sizes = {name: size for name in ("pipeline", "data") if (size := getattr(cut, name)) > 1}
    parallel = {"tensor": cut.tensor, **sizes, "expert": cut.expert or None}
    fields = {f"parallel.{name}": value for name, value in parallel.items()}
    fields["hardware.nodes"] = nodes if nodes > 1 or source else None
    fields |= {f"engine.{name}": getattr(request, name) for name in ("max_model_len", "gpu_memory_utilization")}
    args = {name: value for name, value in _args(sizing.engine_args).items() if name not in names.OURS}
    fields |= {f"engine.args.{name}": value for name, value in args.items()}
    given = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in fields.items())
    words = [word for name, value in given if value != "null" for word in ("--set", f"{name}={value}")]
    return ["penstock", "up", source or serve_words(request, sizing)[2], *words]


def _nodes_of(request: SizingRequest, layout: Parallel) -> int:
    """The nodes that a layout uses: `up` takes no idle ones."""
    return min(request.nodes, math.ceil(layout.n_ranks / request.gpus_per_node))


def _args(engine_args: Sequence[str]) -> dict[str, Any]:
    """Flags as `engine.args` has them: --block-size 32 --eager -> {"block-size": 32, "eager": True}."""
    args: dict[str, list[str]] = {}
    for word in engine_args:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            args.pop(name, None)
            args[name] = [value] if equals else []
        elif args:
            next(reversed(args.values())).append(word)
    return {name: _value(words) for name, words in args.items()}


def _value(words: Sequence[str]) -> Any:
    values = [_scalar(word) for word in words]
    return values if len(values) > 1 else values[0] if values else True


def _scalar(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
