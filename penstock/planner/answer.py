"""From a layout's memory and speed to the fields of a `Sizing`, and the warnings about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from penstock.planner import engine_limits, levers, users
from penstock.planner.architecture import dense
from penstock.planner.engine_settings import engine_args
from penstock.planner.inputs import SolveInputs
from penstock.planner.layouts import Refused
from penstock.planner.memory.fit import Memory, MemoryFit, MemoryInputs
from penstock.planner.memory.kv_pages import model_bytes_per_token
from penstock.planner.memory.tensors import n_params
from penstock.planner.memory.weights import bytes_on_disk
from penstock.planner.ranges import Range, exact
from penstock.planner.request import (
    KvAnswer,
    MemoryAnswer,
    RankMemory,
    RejectedLayout,
    Sizing,
    SpeedAnswer,
    WeightsAnswer,
    missed_targets,
    stage_letter,
)
from penstock.planner.speed import calibration
from penstock.planner.speed.estimate import Engine, Speed, estimate
from penstock.spec.deployment import Parallel, Workload
from penstock.text import GIB

# A checkpoint's bytes and its config's may differ by this share without a warning.
_MOST_DIFFERENCE = 0.01
_CACHE_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "nvfp4": 0.5625, "float32": 4.0}
_THINK_TIME_S = 30.0


def answer(inputs: SolveInputs, fit: MemoryFit, reason: str, refused: Iterable[Refused], warning: str | None) -> Sizing:
    layout, most = fit.layout, fit.most_seqs
    if most is not None and inputs.request.max_num_seqs is None and most < inputs.settings.max_num_seqs:
        request, settings = (msgspec.structs.replace(it, max_num_seqs=most) for it in (inputs.request, inputs.settings))
        inputs = msgspec.structs.replace(inputs, request=request, settings=settings)
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    speed = speed_of_fit(inputs, fit)
    times = None
    if speed is not None:
        times = SpeedAnswer(speed.ttft_ms, speed.tpot_ms, speed.output_tokens_per_s, speed.requests_per_s)
    return Sizing(
        fits=fit.fits,
        reason=reason,
        settings=inputs.settings,
        layout=layout,
        weights=WeightsAnswer(
            bytes_on_disk(inputs.arch), n_params(inputs.arch), tuple(rank.total_bytes / GIB for rank in fit.ranks)
        ),
        kv=_kv(inputs, fit),
        memory=_memory(inputs.memory, fit) if fit.available else None,
        speed=times,
        rejected=rejected(refused),
        warnings=(warning,) if warning else (),
        engine_args=engine_args(inputs.request, sizes, layout.expert),
        measured_on=fit.measured_on,
        most_seqs=most,
        missed=missed_targets(speed, inputs.request.ttft_ms, inputs.request.tpot_ms),
        ranks=_ranks(inputs.memory, fit) if fit.available else (),
        levers=levers.levers(inputs, fit) if fit.available else (),
        users=_users(inputs, fit) if fit.fits and not inputs.is_too_long else None,
    )


def rejected(refused: Iterable[Refused]) -> tuple[RejectedLayout, ...]:
    return tuple(RejectedLayout(**msgspec.structs.asdict(each.layout), reason=each.reason) for each in refused)


def _kv(inputs: SolveInputs, fit: MemoryFit) -> KvAnswer | None:
    kv = fit.kv
    if kv is None:
        return None
    return KvAnswer(
        bytes_per_token=model_bytes_per_token(inputs.arch, inputs.settings.kv_cache_dtype),
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        tokens=kv.tokens,
        max_concurrency=kv.max_concurrency,
        largest_max_model_len=kv.largest_max_model_len,
        per_gpu_gib_one_request=kv.request_bytes / GIB,
    )


def _memory(inputs: MemoryInputs, fit: MemoryFit) -> MemoryAnswer:
    overhead, left = fit.overheads[fit.tightest], fit.available[fit.tightest]
    return MemoryAnswer(
        total_gib=exact(inputs.total_bytes / GIB),
        budget_gib=exact(inputs.budget_bytes / GIB),
        activation_gib=(overhead.activation + overhead.workspace) * (1 / GIB),
        cuda_graph_gib=overhead.graphs * (1 / GIB),
        non_torch_gib=(overhead.non_torch + overhead.nccl) * (1 / GIB),
        kv_cache_gib=Range(left.low / GIB, left.likely / GIB, left.high / GIB),
    )


def _ranks(inputs: MemoryInputs, fit: MemoryFit) -> tuple[RankMemory, ...]:
    if fit.kv is None:
        return ()
    bars = []
    stages = [rank.stage for rank in fit.ranks]
    for rank in fit.ranks:
        overhead = fit.overheads[rank.stage]
        left = inputs.budget_bytes - rank.total_bytes - overhead.in_budget.likely
        has_room = fit.available[rank.stage].likely > 0
        used = fit.kv.num_blocks * fit.kv.bytes_per_block[rank.stage] if has_room else left
        name = f"stage {stage_letter(rank.stage)}" if len(set(stages)) > 1 else "every GPU"
        bars.append(
            RankMemory(
                name=f"{name}, {rank.n_experts} experts" if stages.count(rank.stage) > 1 else name,
                n_gpus=rank.n_ranks,
                weights_gib=rank.total_bytes / GIB,
                kv_cache_gib=used / GIB,
                activation_gib=(overhead.activation.likely + overhead.workspace.likely) / GIB,
                cuda_graph_gib=overhead.graphs.likely / GIB,
                non_torch_gib=(overhead.non_torch.likely + overhead.nccl.likely) / GIB,
                unused_gib=max(0.0, (left - used) / GIB),
            )
        )
    return tuple(bars)


# ---- speed and users -------------------------------------------------------------------------------------------------


def speed_of_fit(inputs: SolveInputs, fit: MemoryFit, rounds: float | None = None) -> Speed | None:
    """None for what does not run: too little memory, or requests longer than the engine takes."""
    return speed_at(inputs, fit, rounds=rounds) if fit.fits and not inputs.is_too_long else None


def speed_at(
    inputs: SolveInputs, fit: MemoryFit, workload: Workload | None = None, rounds: float | None = None
) -> Speed:
    """At `workload`, or at the request's."""
    asked, settings = workload or inputs.workload, inputs.settings
    room = fit.kv.tokens // (asked.input_tokens + asked.output_tokens) if fit.kv else 1
    model_bytes = 4.0 if inputs.arch.dtype == "float32" else 2.0
    engine = Engine(
        version=settings.engine_version,
        is_eager=inputs.request.enforce_eager,
        cache_dtype_bytes=_CACHE_BYTES.get(settings.kv_cache_dtype, model_bytes),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_running=max(1, min(settings.max_num_seqs, room)),
    )
    known = inputs.request.calibration
    measured = calibration.constants_for(known, fit.layout, settings.engine_version) if known else None
    return estimate(inputs.costs, fit.layout, inputs.fabric, asked, engine, measured, rounds)


def _users(inputs: SolveInputs, fit: MemoryFit) -> users.Users | None:
    if fit.kv is None:
        return None
    request, data = inputs.request, fit.layout.data
    person = users.Person(
        context_tokens=request.context_per_user or request.input_tokens + request.output_tokens,
        reply_tokens=request.output_tokens,
        think_time_s=request.think_time_s or _THINK_TIME_S,
    )
    capacity = users.Capacity(fit.kv.tokens * data, inputs.settings.max_num_seqs * data)
    return users.users(person, capacity, inputs.workload, lambda workload: speed_at(inputs, fit, workload))


# ---- warnings --------------------------------------------------------------------------------------------------------


def warnings(inputs: SolveInputs, sizing: Sizing, memory: Memory) -> Iterator[str]:
    yield from _difference(inputs)
    request, gpu, settings, rules = inputs.request, inputs.fabric.gpu, inputs.settings, inputs.memory.rules
    known, layout = request.calibration, sizing.layout
    if known and layout and (what := calibration.differs(known, layout, settings.engine_version)):
        yield f"the calibration was measured with {what}: its constants are used, the ranges stay wide"
    yield from engine_limits.warnings(request, inputs.arch, gpu, settings, inputs.context, rules.wheels_cuda)
    if inputs.is_too_long:
        yield (
            f"requests of {inputs.longest_request:,} tokens are over max_model_len {settings.max_model_len:,}: the "
            "engine would refuse each, so there are no figures for speed and users"
        )
    if request.nodes > 1 and request.network is None:
        yield "no network was named: ten-gigabit Ethernet is assumed for speed; give --network"
    if gpu.stands_in is not None:
        yield (
            f"{gpu.id} is not in the catalogue: {inputs.memory.total_bytes / GIB:.2f} GiB of memory by its driver, "
            f"speed and formats as of {gpu.stands_in}"
        )
    can_peer = request.links.has_peer_to_peer if request.links is not None else None
    if can_peer is False and (sizing.layout or Parallel()).tensor > 1:
        yield "the GPUs cannot reach each other's memory (no peer-to-peer): tensor parallelism may be slower still"
    if gpu.vendor.lower() != "nvidia":
        yield f"penstock starts no engine on {gpu.vendor} cards; all numbers are estimated with NVIDIA's constants"
    if sizing.measured_on is not None:
        yield f"memory other than the weights was measured at an earlier start on {sizing.measured_on}"
    if sizing.layout is not None:
        yield from _tightness(inputs, memory.fit(sizing.layout))


def _tightness(inputs: SolveInputs, fit: MemoryFit) -> Iterator[str]:
    if not fit.available or not fit.fits:
        return
    outside = max(overhead.outside_budget.likely for overhead in fit.overheads)
    room = inputs.memory.total_bytes - inputs.memory.budget_bytes
    if outside > room:
        yield (
            f"graphs and NCCL need {outside / GIB:.2f} GiB outside the engine's budget, {room / GIB:.2f} GiB are left "
            "for them: lower --gpu-memory-utilization"
        )
    if fit.kv is not None and (low := fit.available[fit.tightest].low) < fit.kv.request_bytes:
        yield f"it fits by the likely estimate alone: at worst {max(0.0, low) / GIB:.2f} GiB of KV cache are left"


def _difference(inputs: SolveInputs) -> Iterator[str]:
    facts = inputs.request.facts
    if not facts.index_bytes:
        return
    counted = bytes_on_disk(dense.read(facts.config))
    share = facts.index_bytes / counted - 1
    if abs(share) > _MOST_DIFFERENCE:
        yield (
            f"the checkpoint has {facts.index_bytes / 1e9:.2f} GB, its config says {counted / 1e9:.2f} GB "
            f"({share:+.1%}): the weights shown are the config's (prediction layers are not loaded, and not counted)"
        )
