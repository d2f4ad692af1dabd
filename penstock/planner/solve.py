"""The planner: a request with its facts in, a `Sizing` out. Puts the parts of this package together. Pure.

Layouts that cannot be are refused by arithmetic alone (`layouts`), the rest by memory (`fit`); of those that fit the
workload's targets choose (`layouts.choose`). A layout that was asked for is judged alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import msgspec

from penstock.errors import UserError
from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.hardware.topology import rewired
from penstock.planner import Key, engine_limits, layouts, levers, users
from penstock.planner.architecture import Architecture, dense
from penstock.planner.architecture.quantization import with_choice
from penstock.planner.engine_limits import Context
from penstock.planner.engine_settings import engine_args, settings_of, total_bytes
from penstock.planner.engine_versions import EngineProfile, parse_version, profile
from penstock.planner.layouts import Layouts, Refused, Shape
from penstock.planner.memory.fit import Case, Fit, Memory, capability
from penstock.planner.memory.kv_blocks import CacheSettings
from penstock.planner.memory.kv_pages import model_bytes_per_token
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.planner.memory.overhead import RunSettings
from penstock.planner.memory.tensors import n_params
from penstock.planner.memory.weights import bytes_on_disk, rank_weights
from penstock.planner.ranges import Range, exact
from penstock.planner.request import (
    KvAnswer,
    MemoryAnswer,
    RankMemory,
    RejectedLayout,
    Settings,
    Sizing,
    SizingRequest,
    SpeedAnswer,
    WeightsAnswer,
)
from penstock.planner.speed import calibration
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Engine, Speed, estimate
from penstock.planner.speed.work import Work, with_weight_bytes, work_of
from penstock.spec.deployment import Parallel, Workload
from penstock.text import GIB

# A checkpoint's own bytes and what the config says may differ by this share before it is said (the 1%).
_MOST_DIFFERENCE = 0.01
_CACHE_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 0.5625, "float32": 4.0}
# Fields of a config.json that differ between copies of one model and mean nothing to its size.
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version"}
_THINK_TIME_S = 30.0


class _Question(msgspec.Struct, frozen=True):
    """A request with everything that follows from it alone. `stops`: why the engine would not start at all."""

    request: SizingRequest
    arch: Architecture
    fabric: Fabric
    settings: Settings
    case: Case
    shape: Shape
    work: Work
    context: Context
    stops: tuple[str, ...]


def sizing_of(
    request: SizingRequest,
    gpu: GpuFacts,
    network: LinkFacts | None = None,
    measured: Mapping[Parallel, MemoryMeasurement] | None = None,
) -> Sizing:
    """The answer to `request` on these machines.  Raises NotModelled (exit 4) and UserError (exit 2), never guesses.

    `measured` are the starts that are kept under `key_of` the request, by layout: they replace the estimates.
    """
    question = _question(request, gpu, network, measured or {})
    memory = Memory(question.case)
    sizing = _fixed(question, memory) if request.has_fixed_layout else _chosen(question, memory)
    warned = (*sizing.warnings, *_warnings(question, sizing, memory))
    if not question.stops:
        return msgspec.structs.replace(sizing, warnings=warned)
    # What the memory says is told all the same; speed, users and levers of an engine that does not start are not.
    first, *others = question.stops
    reason = f"vLLM would not start: {first}"
    warned = (*others, *warned) if sizing.fits else (*others, f"memory: {sizing.reason}", *warned)
    return msgspec.structs.replace(
        sizing, fits=False, is_refused=True, reason=reason, speed=None, users=None, levers=(), warnings=warned
    )


def speed_of(request: SizingRequest, gpu: GpuFacts, network: LinkFacts | None = None) -> Speed | None:
    """All that is predicted of the request's fixed layout, of waves too; None where `sizing_of` tells no speed.

    Raises as that does.
    """
    layout = request.fixed_layout
    assert layout is not None, "asked only when there is one"
    question = _question(request, gpu, network, {})
    if question.stops or layouts.refusal(question.shape, layout, question.fabric.n_gpus):
        return None
    return _speed_of_fit(question, Memory(question.case).fit(layout))


def key_of(request: SizingRequest, gpu: GpuFacts) -> Key:
    """What measured values of this engine are kept under.  Raises as `sizing_of` does."""
    _, rules, settings, _ = _engine(request, gpu)
    config = {name: value for name, value in request.facts.config.items() if name not in _NOT_OF_THE_MODEL}
    return Key(
        model=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        gpu=gpu.id,
        engine_version=".".join(map(str, parse_version(rules.version))),
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        block_size=request.block_size,
        prefix_caching=request.prefix_caching,
        enforce_eager=request.enforce_eager,
        more=(*request.more_args, *request.environment),
    )


def _engine(request: SizingRequest, gpu: GpuFacts) -> tuple[Architecture, EngineProfile, Settings, Context]:
    """The model as it is loaded, the rules of the engine's version, and its settings."""
    arch = with_choice(dense.read(request.facts.config), request.quantization, request.dtype)
    arch = msgspec.structs.replace(arch, dtype=engine_limits.loaded_dtype(request, arch, gpu))
    rules, context = profile(request.engine_version), engine_limits.context_of(request.facts.config, arch)
    return arch, rules, settings_of(request, gpu, arch, rules, context), context


def _question(
    request: SizingRequest, gpu: GpuFacts, network: LinkFacts | None, measured: Mapping[Parallel, MemoryMeasurement]
) -> _Question:
    if request.links is not None:
        gpu = rewired(gpu, request.links)
    if request.calibration is not None:
        names = (request.facts.reference, *filter(None, (request.facts.hub_id,)))
        calibration.check(request.calibration, names, (gpu.id, *gpu.names))
    arch, rules, settings, context = _engine(request, gpu)
    cut = capability(gpu)
    cache = CacheSettings(
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_dtype=settings.kv_cache_dtype,
        block_size=request.block_size,
        prefix_caching=request.prefix_caching,
        compute_capability=cut,
    )
    run = RunSettings(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=request.enforce_eager,
        has_peer_to_peer=_has_peer_to_peer(request, gpu),
        has_nvlink=gpu.nvlink is not None or gpu.xgmi is not None,
        is_blackwell=cut is not None and cut[0] == 10,
    )
    given = tuple(int(gib * GIB) for gib in request.available_kv_gib)
    utilization = settings.gpu_memory_utilization
    case = Case(arch, gpu, rules, cache, run, total_bytes(request, gpu), utilization, given, measured)
    fabric = Fabric(gpu, request.gpus_per_node, request.nodes, network)
    return _Question(
        *(request, arch, fabric, settings, case, layouts.shape_of(arch, rules), work_of_model(arch), context),
        stops=engine_limits.refusals(request, arch, gpu, settings, rules),
    )


def _has_peer_to_peer(request: SizingRequest, gpu: GpuFacts) -> bool:
    """As the machine told; else GeForce drivers switch it off (vllm#7553), and NVLink gives it back."""
    if request.links is not None and request.links.has_peer_to_peer is not None:
        return request.links.has_peer_to_peer
    return gpu.nvlink is not None or not any("geforce" in name.lower() for name in gpu.names)


def work_of_model(arch: Architecture) -> Work:
    """Bytes a step reads, by the exact inventory where the model has no towers (those are read once a picture)."""
    work = work_of(arch)
    if arch.towers:
        return work
    (whole,) = rank_weights(arch, Parallel())
    tables = 1 if arch.ties_embeddings else 2
    return with_weight_bytes(work, whole.weight_bytes - whole.embedding_bytes * (tables - 1) / tables)


# ---- choosing --------------------------------------------------------------------------------------------------------


def _fixed(question: _Question, memory: Memory) -> Sizing:
    layout = question.request.fixed_layout
    assert layout is not None, "asked only when there is one"
    refusal = layouts.refusal(question.shape, layout, question.fabric.n_gpus)
    if refusal:
        return Sizing(False, refusal, rejected=(_rejected(layout, refusal),), settings=question.settings)
    _check_given(question.request, layout.pipeline)
    fit = memory.fit(layout)
    reason = fit.refusal or _why_it_fits(fit)
    crosses = layouts.crossing(layout, question.fabric)
    return _answer(question, fit, reason, (), (crosses,) if crosses else ())


def _check_given(request: SizingRequest, pipeline: int) -> None:
    n_given = len(request.available_kv_gib)
    if n_given not in (0, 1, pipeline):
        raise UserError(
            f"cannot use {n_given} values of --available-kv-gib for {pipeline} pipeline stage(s)",
            hint="Give one value, or one for each stage, with --pipeline.",
        )


def _chosen(question: _Question, memory: Memory) -> Sizing:
    request, fabric = question.request, question.fabric
    n_given = len(request.available_kv_gib)
    found = layouts.enumerate_layouts(question.shape, fabric, pipeline=n_given if n_given > 1 else None)
    if request.expert:
        found = Layouts(tuple(one for one in found.legal if one.expert), found.refused, found.n_checks)
    choice = layouts.choose(
        found,
        fabric,
        _workload(question),
        lambda layout: memory.fit(layout).refusal,
        lambda layout: _speed(question, memory.fit(layout)),
    )
    if choice.chosen is not None:
        inside = [one.tensor for one in found.legal if layouts.crossing(one, fabric) is None]
        widest = max(inside, default=1)
        best, *rest = sorted(
            choice.ranked, key=lambda one: (one.misses, _is_pipeline_early(one.layout, widest, fabric))
        )
        fit = memory.fit(best.layout)
        others = [Refused(one.layout, _why_not(one, best, request)) for one in rest]
        refused = (*choice.refused, *others)
        return _answer(question, fit, _why_it_fits(fit), refused, (choice.price,) if choice.price else ())
    if not found.legal:
        reason = _all_refused(question, choice.refused)
        return Sizing(False, reason, rejected=tuple(map(_of_refused, choice.refused)), settings=question.settings)
    nearest = max((memory.fit(layout) for layout in found.legal), key=lambda fit: fit.margin_bytes)
    refused = tuple(one for one in choice.refused if one.layout != nearest.layout)
    gpus = f"{fabric.n_gpus} GPU{'' if fabric.n_gpus == 1 else 's'}"
    reason = f"no layout fits {gpus}; the nearest: {nearest.refusal}"
    return _answer(question, nearest, reason, refused, ())


def _is_pipeline_early(layout: Parallel, widest: int, fabric: Fabric) -> bool:
    """A pipeline of tensor groups smaller than fast links allow: taken only when no other layout fits.

    vLLM's guide: tensor parallel up to the machine, pipeline over machines. Stages work one after another, so a token
    waits for all of them: Llama-3.1-70B on H100, TP1 x PP3 57 ms, TP4 21. Without NVLink a pipeline may well be better.
    """
    return fabric.gpu.nvlink is not None and layout.pipeline > 1 and layout.tensor < widest


def _all_refused(question: _Question, refused: Iterable[Refused]) -> str:
    if question.request.expert and not question.shape.n_experts:
        return "expert parallelism needs experts, this model has 0"
    reasons = list(dict.fromkeys(one.reason for one in refused))
    n_gpus = question.fabric.n_gpus
    of = "1 GPU" if n_gpus == 1 else f"{n_gpus} GPUs"
    told = "; ".join(reasons[:3]) or "whole experts on each rank need 2 GPUs or more"
    return f"no layout of {of} is legal: {told}"


def _why_it_fits(fit: Fit) -> str:
    assert fit.kv is not None, "what fits has a KV cache"
    layout = fit.layout
    n = layout.n_ranks
    each = max(fit.weights) / GIB
    return (
        f"{n} GPU{'s hold' if n > 1 else ' holds'} {each:.2f} GiB of weights{' each' * (n > 1)} and KV cache for "
        f"{fit.kv.max_concurrency:.2f} requests of the longest length"
    )


def _why_not(one: layouts.Candidate, best: layouts.Candidate, request: SizingRequest) -> str:
    """Why a layout that fits was not taken, with the numbers."""
    if one.misses > best.misses:
        ttft, tpot = one.speed.ttft_ms.likely, one.speed.tpot_ms.likely
        targets = (("TTFT", request.ttft_ms), ("TPOT", request.tpot_ms))
        asked = [f"{what} {value:g} ms" for what, value in targets if value]
        return f"fits, but misses {' and '.join(asked)}: TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms"
    if one.layout.n_ranks > best.layout.n_ranks:
        return f"fits, but takes {one.layout.n_ranks} GPUs where {best.layout.n_ranks} are enough"
    if one.layout.n_ranks < best.layout.n_ranks:
        waits, ours = one.speed.tpot_ms.likely, best.speed.tpot_ms.likely
        return f"fits, but a pipeline of narrow stages waits {waits:.1f} ms a token, the chosen layout {ours:.1f}"
    ours, theirs = (each.speed.output_tokens_per_s.likely for each in (best, one))
    return f"fits, but not faster: {theirs:.0f} tokens a second, the chosen one {ours:.0f}"


def _rejected(layout: Parallel, reason: str) -> RejectedLayout:
    return RejectedLayout(layout.tensor, layout.pipeline, layout.data, layout.expert, reason)


def _of_refused(one: Refused) -> RejectedLayout:
    return _rejected(one.layout, one.reason)


# ---- the answer ------------------------------------------------------------------------------------------------------


def _answer(
    question: _Question,
    fit: Fit,
    reason: str,
    refused: tuple[Refused, ...],
    warnings: tuple[str, ...],
) -> Sizing:
    layout, request = fit.layout, question.request
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    kv, speed = _kv(question, fit), _speed_of_fit(question, fit)
    return Sizing(
        fits=fit.fits,
        reason=reason,
        layout=layout,
        weights=_weights(question, fit),
        kv=kv,
        memory=_memory(question.case, fit) if fit.available else None,
        speed=None if speed is None else _speed_answer(speed),
        rejected=tuple(map(_of_refused, refused)),
        warnings=warnings,
        engine_args=engine_args(request, sizes, layout.expert),
        measured_on=fit.measured_on,
        settings=question.settings,
        ranks=_ranks(question.case, fit) if fit.available else (),
        levers=levers.levers(question.case, fit, _room(question)) if fit.available else (),
        users=_users(question, fit) if fit.fits and not _is_too_long(question) else None,
    )


def _room(question: _Question) -> levers.Room:
    request = question.request
    return levers.Room(
        *(question.shape, request.gpus_per_node, request.nodes),
        least_tokens=request.input_tokens + request.output_tokens,
    )


def _weights(question: _Question, fit: Fit) -> WeightsAnswer:
    per_gpu = tuple(rank.total_bytes / GIB for rank in fit.ranks)
    return WeightsAnswer(bytes_on_disk(question.arch), n_params(question.arch), per_gpu)


def _kv(question: _Question, fit: Fit) -> KvAnswer | None:
    if fit.kv is None:
        return None
    kv = fit.kv
    return KvAnswer(
        bytes_per_token=model_bytes_per_token(question.arch, question.settings.kv_cache_dtype),
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        tokens=kv.tokens,
        max_concurrency=kv.max_concurrency,
        largest_max_model_len=kv.largest_max_model_len,
        per_gpu_gib_one_request=kv.request_bytes / GIB,
    )


def _memory(case: Case, fit: Fit) -> MemoryAnswer:
    """Of the tightest stage. What a version pays beside its budget (graphs, NCCL) is shown all the same."""
    known, left = fit.overheads[fit.tightest], fit.available[fit.tightest]
    return MemoryAnswer(
        total_gib=exact(case.total_bytes / GIB),
        budget_gib=exact(case.budget_bytes / GIB),
        activation_gib=(known.activation + known.workspace) * (1 / GIB),
        cuda_graph_gib=known.graphs * (1 / GIB),
        non_torch_gib=(known.non_torch + known.nccl) * (1 / GIB),
        kv_cache_gib=Range(left.low / GIB, left.likely / GIB, left.high / GIB),
    )


def _ranks(case: Case, fit: Fit) -> tuple[RankMemory, ...]:
    """A bar for each rank class: every stage's cache has as many blocks as the fullest stage can hold."""
    if fit.kv is None:
        return ()
    found = []
    several = len({rank.stage for rank in fit.ranks}) > 1
    for rank in fit.ranks:
        known, left = fit.overheads[rank.stage], fit.available[rank.stage]
        own = case.budget_bytes - rank.total_bytes - known.in_budget.likely
        used = fit.kv.num_blocks * fit.kv.bytes_per_block[rank.stage] if left.likely > 0 else own
        name = f"stage {_letter(rank.stage)}" if several else "every GPU"
        alike = sum(other.stage == rank.stage for other in fit.ranks)
        found.append(
            RankMemory(
                name=f"{name}, {rank.n_experts} experts" if alike > 1 else name,
                n_gpus=rank.n_ranks,
                weights_gib=rank.total_bytes / GIB,
                kv_cache_gib=used / GIB,
                activation_gib=(known.activation.likely + known.workspace.likely) / GIB,
                cuda_graph_gib=known.graphs.likely / GIB,
                non_torch_gib=(known.non_torch.likely + known.nccl.likely) / GIB,
                unused_gib=max(0.0, (own - used) / GIB),
            )
        )
    return tuple(found)


def _letter(stage: int) -> str:
    high, low = divmod(stage, 26)
    return (_letter(high - 1) if high else "") + chr(ord("A") + low)


# ---- speed and users -------------------------------------------------------------------------------------------------


def _workload(question: _Question) -> Workload:
    """What was asked; requests that the engine would refuse are cut to its context, so that layouts can be ranked."""
    request, longest = question.request, question.settings.max_model_len
    output = min(request.output_tokens, max(1, longest // 2))
    prompt = min(request.input_tokens, max(1, longest - output))
    return Workload(prompt, output, request.concurrency, request.ttft_ms, request.tpot_ms)


def _is_too_long(question: _Question) -> bool:
    request = question.request
    longest = max(request.input_tokens + request.output_tokens, request.context_per_user or 0)
    return longest > question.settings.max_model_len


def _speed_of_fit(question: _Question, fit: Fit) -> Speed | None:
    """None for what does not run: there is no room, or the requests are longer than the engine takes."""
    return _speed(question, fit) if fit.fits and not _is_too_long(question) else None


def _speed(question: _Question, fit: Fit, workload: Workload | None = None) -> Speed:
    asked, settings = workload or _workload(question), question.settings
    room = fit.kv.tokens // (asked.input_tokens + asked.output_tokens) if fit.kv else 1
    model_bytes = 4.0 if question.arch.dtype == "float32" else 2.0
    engine = Engine(
        version=settings.engine_version,
        is_eager=question.request.enforce_eager,
        cache_dtype_bytes=_CACHE_BYTES.get(settings.kv_cache_dtype, model_bytes),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_running=max(1, min(settings.max_num_seqs, room)),
    )
    known = question.request.calibration
    measured = calibration.constants_for(known, fit.layout, settings.engine_version) if known else None
    return estimate(question.work, fit.layout, question.fabric, asked, engine, measured)


def _speed_answer(speed: Speed) -> SpeedAnswer:
    return SpeedAnswer(speed.ttft_ms, speed.tpot_ms, speed.output_tokens_per_s, speed.requests_per_s)


def _users(question: _Question, fit: Fit) -> users.Users | None:
    request = question.request
    if fit.kv is None:
        return None
    person = users.Person(
        context_tokens=request.context_per_user or request.input_tokens + request.output_tokens,
        reply_tokens=request.output_tokens,
        think_time_s=request.think_time_s or _THINK_TIME_S,
    )
    data = fit.layout.data
    capacity = users.Capacity(fit.kv.tokens * data, question.settings.max_num_seqs * data)
    return users.users(person, capacity, _workload(question), lambda workload: _speed(question, fit, workload))


# ---- warnings --------------------------------------------------------------------------------------------------------


def _warnings(question: _Question, sizing: Sizing, memory: Memory) -> tuple[str, ...]:
    request, gpu = question.request, question.fabric.gpu
    found = [*_differs(question)]
    if request.calibration is not None and sizing.layout is not None:
        what = calibration.differs(request.calibration, sizing.layout, question.settings.engine_version)
        if what:
            found.append(f"the calibration was measured with {what}: its constants are used, the ranges stay wide")
    cuda = question.case.rules.wheels_cuda
    found += engine_limits.warnings(request, question.arch, gpu, question.settings, question.context, cuda)
    if _is_too_long(question):
        longest = max(request.input_tokens + request.output_tokens, request.context_per_user or 0)
        found.append(
            f"requests of {longest:,} tokens are over max_model_len {question.settings.max_model_len:,}: the engine "
            "would refuse each, so speed and users are not estimated"
        )
    if request.nodes > 1 and request.network is None:
        found.append("no network is named: ten-gigabit Ethernet is assumed for speed; give --network")
    if gpu.stands_in is not None:
        found.append(
            f"{gpu.id} is not in the catalogue: {question.case.total_bytes / GIB:.2f} GiB of memory by its driver, "
            f"speed and formats as of {gpu.stands_in}"
        )
    if (
        request.links is not None
        and request.links.has_peer_to_peer is False
        and (sizing.layout or Parallel()).tensor > 1
    ):
        found.append(
            "the GPUs cannot reach each other's memory (no peer-to-peer): tensor parallelism may be slower still"
        )
    if gpu.vendor.lower() != "nvidia":
        found.append(f"memory and speed on {gpu.vendor} cards are estimated with NVIDIA's constants, not measured")
    fit = memory.fit(sizing.layout) if sizing.layout is not None else None
    if sizing.measured_on is not None:
        found.append(f"memory other than the weights was measured at an earlier start on {sizing.measured_on}")
    if fit is not None and fit.available and fit.fits:
        outside = max(known.beside_budget.likely for known in fit.overheads)
        room = question.case.total_bytes - question.case.budget_bytes
        if outside > room:
            found.append(
                f"{outside / GIB:.2f} GiB are needed outside the engine's budget (graphs, NCCL), {room / GIB:.2f} GiB "
                "are left for them: lower --gpu-memory-utilization"
            )
        if fit.kv is not None and (low := fit.available[fit.tightest].low) < fit.kv.request_bytes:
            found.append(
                f"it fits by the likely estimate alone: at worst {max(0.0, low) / GIB:.2f} GiB of KV cache are left"
            )
    return tuple(found)


def _differs(question: _Question) -> tuple[str, ...]:
    """The checkpoint's bytes against the config's. Prediction layers are on disk and not loaded."""
    stated = question.request.facts.index_bytes
    if not stated:
        return ()
    arch = dense.read(question.request.facts.config)
    counted = bytes_on_disk(arch)
    share = stated / counted - 1
    if abs(share) <= _MOST_DIFFERENCE:
        return ()
    return (
        f"the checkpoint has {stated / 1e9:.2f} GB, its config says {counted / 1e9:.2f} GB ({share:+.1%}): the weights "
        "shown are the config's (prediction layers are not loaded, and not counted)",
    )
