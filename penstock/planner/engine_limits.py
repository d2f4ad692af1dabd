"""What vLLM refuses at start whatever the memory: a dtype, format or cache that the card has no kernels for.

Rules of vLLM 0.32 (`config/model.py`, `config/vllm.py`, `platforms/cuda.py`). AMD cards are not judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.hardware.catalog import GpuFacts
from penstock.planner.architecture import Architecture, Quantization, quantization
from penstock.planner.architecture.config import fields
from penstock.planner.architecture.quantization import CHECKPOINTS
from penstock.planner.engine_versions import Capability, EngineProfile
from penstock.planner.memory.fit import capability
from penstock.planner.request import Settings, SizingRequest

_BF16: Capability = (8, 0)
# `_FLOAT16_NOT_SUPPORTED_MODELS` (config/model.py): numerical instability in float16.
_NO_FLOAT16 = {"gemma2", "gemma3", "gemma3_text", "glm4"}
# rope types whose factor is in max_position_embeddings already (config/model.py, `_get_and_verify_max_len`).
_SCALED_ALREADY = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}
_MODELOPT_FP8: Capability = (8, 0)  # quantization/modelopt.py, ModelOptFp8Config
_FP4_CACHE: Capability = (8, 0)
# What Triton's kernels read natively (triton_attn.py): MLA below this has no other back end.
_NATIVE_FP8: Capability = (8, 9)
_VOLTA: Capability = (7, 0)
_FIRST_CUDA_WITHOUT_VOLTA = 13


class Context(msgspec.Struct, frozen=True):
    """`limit`: the longest max_model_len that vLLM takes; `default`: what it takes when none is given."""

    limit: int
    default: int


def context_of(config: Mapping[str, Any], arch: Architecture) -> Context:
    """Both lengths from the config.json, 0 when it has none. internlm2.5-7b: 32,768 x dynamic 2 = 65,536.
    LongRoPE models start with their original length: phi-3.5-mini 4,096 of 131,072."""
    f = fields(config)
    limit = f.maybe_n("model_max_length") or arch.max_position
    rope = f.table("rope_parameters") or f.table("rope_scaling")
    kind, factor = str(rope.get("rope_type", rope.get("type", "default"))), rope.get("factor")
    if kind not in _SCALED_ALREADY and isinstance(factor, int | float) and arch.family != "gemma3":
        limit = int(limit * factor)
    original = f.maybe_n("original_max_position_embeddings")
    return Context(limit, min(original, limit) if kind == "longrope" and original else limit)


def loaded_dtype(request: SizingRequest, arch: Architecture, gpu: GpuFacts) -> str:
    """The dtype as vLLM loads the weights: `--dtype auto` falls back where the card has no bfloat16."""
    if request.dtype not in (None, "auto") or arch.dtype != "bfloat16" or not _lacks(gpu, _BF16):
        return arch.dtype
    return "float32" if _model_type(request) in _NO_FLOAT16 else "float16"


def refusals(
    request: SizingRequest, arch: Architecture, gpu: GpuFacts, settings: Settings, rules: EngineProfile
) -> tuple[str, ...]:
    """Why this engine would not start on this card, each with its number."""
    reasons: list[str | None] = []
    if arch.dtype == "float16" and request.dtype in ("half", "float16") and _model_type(request) in _NO_FLOAT16:
        reasons.append(f"vLLM refuses float16 for {_model_type(request)} (unstable): use bfloat16 or float32")
    if arch.dtype == "bfloat16" and request.dtype == "bfloat16" and _lacks(gpu, _BF16):
        reasons.append(f"bfloat16 needs {_shown(_BF16, gpu)}: use --dtype half")
    # FlashAttention, FlashInfer and Triton take multiples of 16 (`get_supported_kernel_block_sizes`).
    if request.block_size is not None and request.block_size % 16 and capability(gpu) is not None:
        size = request.block_size
        reasons.append(f"block size {size} is not a multiple of 16, which every attention kernel needs")
    method = str(quantization.block_of(request.facts.config).get("quant_method", "")).lower()
    reasons.append(cache_refusal(arch, gpu, settings.kv_cache_dtype, rules))
    reasons.append(format_refusal(arch.quantization, gpu, rules, method))
    return tuple(reason for reason in reasons if reason)


def checkpoint_to_make(request: SizingRequest) -> str | None:
    """The format that the plan is for, where the model's own files are in another: nothing starts what was planned."""
    is_made = request.quantization in CHECKPOINTS and not quantization.block_of(request.facts.config)
    return request.quantization if is_made else None


def warnings(
    request: SizingRequest, arch: Architecture, gpu: GpuFacts, settings: Settings, context: Context, wheels_cuda: int
) -> list[str]:
    """What starts, and is not what one would expect. `wheels_cuda`: the CUDA version of this vLLM's wheels."""
    notes = []
    if 0 < context.limit < settings.max_model_len:
        # Not a refusal: it is the user's to lift, and presets of one model differ in this number (Llama 2: 2048, 4096).
        notes.append(
            f"max_model_len {settings.max_model_len:,} is over the model's {context.limit:,}: vLLM refuses it unless "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, with answers that may be wrong"
        )
    kind = arch.quantization.kind if arch.quantization is not None else ""
    has_unit = gpu.native.fp8 if kind.startswith("fp8") else gpu.native.fp4 if kind in ("nvfp4", "mxfp4") else True
    if not has_unit:
        notes.append(
            f"{gpu.id} cannot multiply {kind}: weights are unpacked to 16 bits; it saves memory, not arithmetic"
        )
    if checkpoint_to_make(request):
        notes.append(
            f"this is the plan of a checkpoint in {request.quantization}: vLLM does not make one of the 16-bit weights "
            "of this model, so there is nothing to start here: plan and serve a repository that has it"
        )
    if request.max_model_len is None and context.default < context.limit:
        notes.append(
            f"vLLM takes {context.default:,} tokens of context for this model (LongRoPE) unless --max-model-len asks "
            f"for more; it allows {context.limit:,}"
        )
    if request.dtype in (None, "auto") and _lacks(gpu, _BF16) and settings.dtype in ("float16", "float32"):
        notes.append(f"{gpu.id} has no bfloat16: vLLM loads a bfloat16 model as {settings.dtype}")
    if capability(gpu) == _VOLTA and wheels_cuda >= _FIRST_CUDA_WITHOUT_VOLTA:
        notes.append(
            f"vLLM's wheels are built with CUDA {wheels_cuda}, which has no code for {gpu.id} (compute capability "
            "7.0): build vLLM with CUDA 12"
        )
    return notes


def cache_refusal(arch: Architecture, gpu: GpuFacts, kind: str, rules: EngineProfile) -> str | None:
    """Why no attention kernel reads a KV cache of this kind on this card."""
    is_fp8, is_fp4 = kind.startswith("fp8"), kind.startswith("nvfp4")
    if not is_fp8 and not is_fp4:
        return None
    attentions = [layer.attention for layer in arch.layers if layer.attention is not None]
    is_mla = any(attention.kind == "mla" for attention in attentions)
    least = _NATIVE_FP8 if is_mla else rules.fp8_cache_capability if is_fp8 else _FP4_CACHE
    if _lacks(gpu, least):
        return f"a KV cache in {kind} needs {_shown(least, gpu)}"
    is_blackwell = (capability(gpu) or (0, 0))[0] == 10
    if is_fp4 and not is_blackwell and any(attention.head_dim_k == 64 for attention in attentions):
        return f"a KV cache in {kind} is misread at head size 64 below Blackwell, {gpu.id} has {gpu.compute_capability}"
    return None


def format_refusal(quant: Quantization | None, gpu: GpuFacts, rules: EngineProfile, method: str = "") -> str | None:
    """Why no kernel multiplies weights of this format on this card; `method` is the checkpoint's quant_method."""
    for kind in () if quant is None else [own.kind for own in (quant, *quant.also)]:
        least = rules.least_capability.get(kind)
        if least is None:
            return f"vLLM {rules.version} does not read {kind} weights (bitsandbytes was removed in 0.32, vllm#39583)"
        if kind == "fp8" and method == "modelopt":
            least = max(least, _MODELOPT_FP8)
        if _lacks(gpu, least):
            return f"weights in {kind} need {_shown(least, gpu)}"
    return None


def _model_type(request: SizingRequest) -> str:
    return str(request.facts.config.get("model_type", ""))


def _lacks(gpu: GpuFacts, least: Capability) -> bool:
    own = capability(gpu)
    return own is not None and own < least


def _shown(least: Capability, gpu: GpuFacts) -> str:
    return f"compute capability {least[0]}.{least[1]}, {gpu.id} has {gpu.compute_capability}"
