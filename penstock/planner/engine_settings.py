"""The engine's settings for a request, every default filled in as that version of vLLM fills it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import UserError
from penstock.hardware.catalog import GpuFacts
from penstock.planner.architecture import Architecture
from penstock.planner.architecture.quantization import CHECKPOINTS, block_of
from penstock.planner.engine_limits import Context
from penstock.planner.engine_versions import EngineProfile, batch_defaults
from penstock.planner.request import Settings, SizingRequest
from penstock.text import GIB, bare_flag

# Cache dtypes by what modelopt and compressed-tensors write (vllm/utils/torch_utils.py of 0.32,
# `get_kv_cache_quant_algo_string`). Every fp8 spelling is one byte.
_CACHE_FORMATS = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "nvfp4": "nvfp4"}
# Fields of a request that are flags of the engine, by the same name.
_OPTIONS = (
    *("max_model_len", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    *("kv_cache_dtype", "block_size", "quantization", "dtype"),
)


def total_bytes(request: SizingRequest, gpu: GpuFacts) -> int:
    """What the CUDA runtime reports for one GPU: as asked, or the catalogue's."""
    return int((request.gpu_memory_gib or gpu.memory.torch_total_gib) * GIB)


def _checkpoint_cache_dtype(config: Mapping[str, Any]) -> str:
    """The KV cache's format that a checkpoint brings with `kv_cache_dtype` auto: "fp8", "nvfp4", or "auto"."""
    block = block_of(config)
    inner = block["quantization"] if isinstance(block.get("quantization"), Mapping) else block
    scheme = inner.get("kv_cache_scheme") or block.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        return "fp8" if bits == 8 else "nvfp4" if bits == 4 else "auto"
    return _CACHE_FORMATS.get(str(scheme or "").lower(), "auto")


def settings_of(
    request: SizingRequest, gpu: GpuFacts, arch: Architecture, rules: EngineProfile, context: Context
) -> Settings:
    """What the engine would run with (`engine/arg_utils.py`).  Raises UserError."""
    max_model_len = request.max_model_len or context.default
    if not max_model_len:
        raise UserError(
            "cannot find the context length: the config has none", hint="Add --max-model-len (engine.max_model_len)."
        )
    name = gpu.names[0] if gpu.names else gpu.id
    tokens, seqs = batch_defaults(rules, total_bytes(request, gpu), name, max_model_len)
    if request.max_num_batched_tokens:
        tokens = request.max_num_batched_tokens
    elif request.max_num_seqs:
        tokens = min(max(tokens, request.max_num_seqs), request.max_num_seqs * max_model_len)
    seqs = request.max_num_seqs or min(seqs, tokens)
    if (cache_dtype := request.kv_cache_dtype or "auto") == "auto":
        cache_dtype = _checkpoint_cache_dtype(request.facts.config)
    return Settings(
        engine_version=rules.version,
        gpu_name=name,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        gpu_memory_utilization=request.gpu_memory_utilization or rules.default_utilization,
        dtype=arch.dtype,
        kv_cache_dtype=cache_dtype,
        quantization=request.quantization or (arch.quantization.kind if arch.quantization else None),
        longest_model_len=context.limit,
    )


def engine_args(request: SizingRequest, sizes: Mapping[str, int], is_expert: bool) -> tuple[str, ...]:
    """The flags of `vllm serve` for what was asked and chosen, without the engine's defaults."""
    options: dict[str, object] = {f"{name}_parallel_size": size for name, size in sizes.items() if size > 1}
    options |= {name: value for name in _OPTIONS if (value := getattr(request, name)) is not None}
    if request.quantization in CHECKPOINTS:
        del options["quantization"]  # no flag of vLLM: it finds the format in the checkpoint
    switches = {
        "enable_expert_parallel": is_expert,
        "no_enable_prefix_caching": not request.prefix_caching,
        "enforce_eager": request.enforce_eager,
    }
    words = [word for name, value in options.items() for word in (f"--{bare_flag(name)}", f"{value}")]
    return (*words, *(f"--{bare_flag(name)}" for name, is_on in switches.items() if is_on), *request.more_args)
