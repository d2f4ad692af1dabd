"""A request with all that follows from it alone: the model, the engine's rules and settings. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import msgspec

from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.hardware.topology import rewired
from penstock.planner import Key, engine_limits, layouts
from penstock.planner.architecture import Architecture, dense
from penstock.planner.architecture.quantization import with_choice
from penstock.planner.engine_limits import Context
from penstock.planner.engine_settings import settings_of, total_bytes
from penstock.planner.engine_versions import EngineProfile, parse_version, profile
from penstock.planner.layouts import DivisibilityRules
from penstock.planner.memory.fit import MemoryInputs, capability
from penstock.planner.memory.kv_pages import CacheSettings
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.planner.memory.overhead import RunSettings
from penstock.planner.memory.weights import rank_weights
from penstock.planner.request import Settings, SizingRequest
from penstock.planner.speed import calibration
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.work import StepCosts, step_costs, with_weight_bytes
from penstock.spec.deployment import Parallel, Workload
from penstock.text import GIB

# Fields of a config.json that differ between copies of one model and mean nothing to its size.
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version"}


class SolveInputs(msgspec.Struct, frozen=True):
    """What solving starts from. `stops`: why the engine would not start at all."""

    request: SizingRequest
    arch: Architecture
    fabric: Fabric
    settings: Settings
    memory: MemoryInputs
    divisors: DivisibilityRules
    costs: StepCosts
    context: Context
    stops: tuple[str, ...]

    @property
    def workload(self) -> Workload:
        """What was asked, cut to the engine's context where it would refuse it, so that layouts can be ranked."""
        request, longest = self.request, self.settings.max_model_len
        output = min(request.output_tokens, max(1, longest // 2))
        prompt = min(request.input_tokens, max(1, longest - output))
        return Workload(prompt, output, request.concurrency, request.ttft_ms, request.tpot_ms)

    @property
    def longest_request(self) -> int:
        request = self.request
        return max(request.input_tokens + request.output_tokens, request.context_per_user or 0)

    @property
    def is_too_long(self) -> bool:
        return self.longest_request > self.settings.max_model_len


def inputs_of(
    request: SizingRequest, gpu: GpuFacts, network: LinkFacts | None, measured: Mapping[Parallel, MemoryMeasurement]
) -> SolveInputs:
    """Raises NotModelled for what is not known, UserError for what cannot be."""
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
    # As the machine reports; else GeForce drivers switch it off (vllm#7553), and NVLink gives it back.
    has_peer_to_peer = gpu.nvlink is not None or not any("geforce" in name.lower() for name in gpu.names)
    if request.links is not None and request.links.has_peer_to_peer is not None:
        has_peer_to_peer = request.links.has_peer_to_peer
    run = RunSettings(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=request.enforce_eager,
        has_peer_to_peer=has_peer_to_peer,
        has_nvlink=gpu.nvlink is not None or gpu.xgmi is not None,
        is_blackwell=cut is not None and cut[0] == 10,
    )
    memory = MemoryInputs(
        *(arch, gpu, rules, cache, run, total_bytes(request, gpu), settings.gpu_memory_utilization),
        available_kv_bytes=tuple(int(gib * GIB) for gib in request.available_kv_gib),
        measured=measured,
        asked_seqs=request.max_num_seqs,
        sure_share=request.sure_share if rules.graphs_need_blocks and not request.enforce_eager else None,
    )
    return SolveInputs(
        request,
        arch,
        Fabric(gpu, request.gpus_per_node, request.nodes, network),
        settings,
        memory,
        layouts.divisibility_of(arch, rules),
        model_costs(arch),
        context,
        engine_limits.refusals(request, arch, gpu, settings, rules),
    )


def key_of(request: SizingRequest, gpu: GpuFacts) -> Key:
    """What measured values of this engine are kept under.  Raises as `inputs_of` does."""
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


def model_costs(arch: Architecture) -> StepCosts:
    """Bytes a step reads, by the exact inventory where the model has no towers (those are read once a picture)."""
    costs = step_costs(arch)
    if arch.towers:
        return costs
    (whole,) = rank_weights(arch, Parallel())
    tables = 1 if arch.ties_embeddings else 2
    return with_weight_bytes(costs, whole.weight_bytes - whole.embedding_bytes * (tables - 1) / tables)


def _engine(request: SizingRequest, gpu: GpuFacts) -> tuple[Architecture, EngineProfile, Settings, Context]:
    arch = with_choice(dense.read(request.facts.config), request.quantization, request.dtype)
    arch = msgspec.structs.replace(arch, dtype=engine_limits.loaded_dtype(request, arch, gpu))
    rules, context = profile(request.engine_version), engine_limits.context_of(request.facts.config, arch)
    return arch, rules, settings_of(request, gpu, arch, rules, context), context
