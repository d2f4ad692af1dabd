"""How weights are stored: from `quantization_config` (or `--quantization`) to formats, exclusions and bytes.

Bytes of one matrix of `outputs` x `inputs` (each method's `create_weights` in vLLM 0.33): fp8 one byte and an fp32
scale a matrix, channel or block; int8 one byte and an fp32 scale a channel; AWQ and GPTQ bits/8, an fp16 scale a group
and, where they stay, a packed zero a group; compressed-tensors int4 the same without zeros; MXFP4 half a byte and one
scale byte for 32; NVFP4 half a byte, one fp8 scale for 16 and two fp32 for the matrix; NF4 half a byte and an fp32
scale for 64. AWQ g128, 4096 x 4096: 8,388,608 + 262,144 + 65,536 = 8,716,288 B (0.5195 a parameter)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.errors import UserError, nearest, not_modelled
from penstock.planner.architecture import Architecture, Quantization, QuantKind

_FP32, _FP16 = 4, 2
_MXFP4_GROUP, _NVFP4_GROUP, _BNB_BLOCK = 32, 16, 64
_FP8_BLOCK = (128, 128)


def matrix_bytes(outputs: int, inputs: int, quant: Quantization, *, on_disk: bool = False) -> int:
    """Bytes of one quantised matrix with its scales; `on_disk` adds what GPTQ's kernels drop after loading."""
    n = outputs * inputs
    if quant.kind in ("fp8", "int8"):
        return n + _FP32 * (outputs if quant.is_per_channel or quant.kind == "int8" else 1)
    if quant.kind == "fp8-block":
        rows, columns = quant.block or _FP8_BLOCK
        return n + _FP32 * _ceil(outputs, rows) * _ceil(inputs, columns)
    if quant.kind == "mxfp4":
        return n // 2 + outputs * _ceil(inputs, _MXFP4_GROUP)
    if quant.kind == "nvfp4":
        return n // 2 + outputs * _ceil(inputs, _NVFP4_GROUP) + 2 * _FP32
    if quant.kind == "bnb-nf4":
        return n // 2 + _FP32 * _ceil(n, _BNB_BLOCK)
    if quant.kind == "bnb-int8":
        return n + _FP32 * outputs
    groups = _ceil(inputs, quant.group_size or inputs) * outputs
    keeps_zeros = quant.kind == "awq" or not quant.is_symmetric or (on_disk and quant.kind == "gptq")
    act_order = _FP32 * inputs if on_disk and quant.kind == "gptq" else 0
    return n * quant.bits // 8 + groups * _FP16 + (groups * quant.bits // 8 if keeps_zeros else 0) + act_order


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit)


# ---- which module has which format -----------------------------------------------------------------------------------


class _Patterns(msgspec.Struct, frozen=True):
    """`plain` names and name parts, and one expression for globs and "re:" patterns."""

    plain: frozenset[str]
    wild: re.Pattern[str] | None


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> _Patterns:
    plain, wild = set(), []
    for pattern in patterns:
        if pattern.startswith("re:"):
            wild.append(f"(?:{pattern[3:]})")
        elif any(mark in pattern for mark in "*?["):
            wild.append(fnmatch.translate(_canonical(pattern)))
            # A glob names a module and whatever is inside it: "model.layers.*.self_attn" covers q_proj.
            wild.append(fnmatch.translate(_canonical(pattern) + ".*"))
        else:
            plain.add(_canonical(pattern))
    try:
        return _Patterns(frozenset(plain), re.compile("|".join(wild)) if wild else None)
    except re.error as exc:
        raise UserError(
            "cannot read config.json: a pattern of quantization_config is no regular expression", detail=str(exc)
        ) from exc


def _canonical(name: str) -> str:
    """Without the prefixes of wrappers ("model.", "language_model.") and of Nemotron-H ("backbone.")."""
    for prefix in ("model.", "language_model.", "model.", "backbone."):
        name = name.removeprefix(prefix)
    return name


# What vLLM and some checkpoints join or cut: lists of modules have either name.
_OTHER_NAMES = {"in_proj_qkvz": "in_proj_qkv", "in_proj_ba": "in_proj_b"}
_OTHER_NAMES |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_OTHER_NAMES |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def _names_of(module: str) -> Iterator[str]:
    """A module's own name and those of what it is joined into; a lone shared expert has no plural."""
    parent, _, last = module.rpartition(".")
    for holder in dict.fromkeys((parent, parent.removesuffix(".0"), parent.replace("shared_experts", "shared_expert"))):
        yield f"{holder}.{last}" if holder else last
        if last in _OTHER_NAMES:
            yield f"{holder}.{_OTHER_NAMES[last]}"


@lru_cache(maxsize=65536)
def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a module ("model.layers.0.mlp.gate_proj") is named by a pattern, wholly, by a parent or by a part."""
    compiled = _compiled(patterns)
    return any(_is_named(_canonical(name), compiled) for name in _names_of(module))


def _is_named(name: str, patterns: _Patterns) -> bool:
    parts = name.split(".")
    if patterns.plain and any(
        ".".join(parts[first:last]) in patterns.plain
        for first in range(len(parts))
        for last in range(first + 1, len(parts) + 1)
    ):
        return True
    prefixes = ("", "model.", "language_model.model.", "model.language_model.", "backbone.")
    return patterns.wild is not None and any(patterns.wild.match(prefix + name) for prefix in prefixes)


def format_of(module: str, quant: Quantization | None) -> Quantization | None:
    """The format of one linear module's weight; None keeps the model's dtype."""
    if quant is None or matches(module, quant.excluded):
        return None
    formats = (quant, *quant.also)
    return next((own for own in formats if not own.included or matches(module, own.included)), None)


# ---- reading quantization_config ------------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> Quantization | None:
    """The format of a checkpoint from its config.json; None for 16-bit weights. NotModelled for an unknown method."""
    block = block_of(config)
    return from_config(block) if block else None


def block_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json or of its text part; empty when there is none.  Raises UserError."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if block := holder.get(key):
                if not isinstance(block, Mapping):
                    raise UserError(f"cannot read config.json: {key} is not an object")
                return block
    return {}


def from_config(q: Mapping[str, Any]) -> Quantization:
    """One `quantization_config`, or modelopt's hf_quant_config.json."""
    if isinstance(q.get("quantization"), Mapping):
        q = {"quant_method": "modelopt", **q["quantization"]}
    method = str(q.get("quant_method", "modelopt" if "quant_algo" in q else "")).lower()
    if method not in _METHODS:
        raise not_modelled("quantization", method or "unknown", "its bytes are not modelled")
    return _METHODS[method][0](q)


def _names(q: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(name) for key in keys for name in (q.get(key) or ()))


def _fp8(q: Mapping[str, Any]) -> Quantization:
    excluded, block = _names(q, "modules_to_not_convert", "ignored_layers"), q.get("weight_block_size")
    if block:
        return Quantization("fp8-block", block=(int(block[0]), int(block[1])), excluded=excluded)
    return Quantization("fp8", is_per_channel="fbgemm" in str(q.get("quant_method")).lower(), excluded=excluded)


def _group_size(size: object) -> int | None:
    """-1 in the file means one group a column."""
    return size if isinstance(size, int) and size > 0 else None


def _awq(q: Mapping[str, Any]) -> Quantization:
    bits, excluded = int(q.get("bits", q.get("w_bit", 4))), _names(q, "modules_to_not_convert")
    group_size = _group_size(q.get("group_size", q.get("q_group_size", 128)))
    return Quantization("awq", group_size=group_size, bits=bits, is_symmetric=False, excluded=excluded)


def _gptq(q: Mapping[str, Any]) -> Quantization:
    """`dynamic` holds "-:" patterns of skipped modules; other overrides change bits and are refused."""
    dynamic = q.get("dynamic") or {}
    if any(not str(name).startswith("-:") for name in dynamic):
        raise not_modelled("quantization", "gptq", "it gives modules formats of their own")
    return Quantization(
        "gptq",
        group_size=_group_size(q.get("group_size", 128)),
        bits=int(q.get("bits", 4)),
        is_symmetric=bool(q.get("sym", True)),
        excluded=(*_names(q, "modules_to_not_convert"), *("re:.*" + str(name)[2:] for name in dynamic)),
        quantizes_head=bool(q.get("lm_head")),
    )


def _auto_round(q: Mapping[str, Any]) -> Quantization:
    """Packed as GPTQ or AWQ; `extra_config` gives single modules (names or expressions) other bits."""
    bits, data_type = int(q.get("bits", 4)), str(q.get("data_type", "int"))
    others = {str(name): int(own.get("bits", bits)) for name, own in (q.get("extra_config") or {}).items()}
    if data_type != "int" or any(own not in (bits, 16, 32) for own in others.values()):
        raise not_modelled("quantization", f"auto-round {data_type}{bits}", "its bytes are not modelled")
    kept = [name if re.fullmatch(r"[\w.]+", name) else f"re:{name}" for name, own in others.items() if own >= 16]
    size, is_symmetric = _group_size(q.get("group_size", 128)), bool(q.get("sym", True))
    kind: QuantKind = "awq" if "awq" in str(q.get("packing_format")) else "gptq"
    return Quantization(kind, group_size=size, bits=bits, is_symmetric=is_symmetric, excluded=tuple(kept))


def _mxfp4(q: Mapping[str, Any]) -> Quantization:
    """gpt-oss: expert matrices only, whatever else is listed."""
    excluded = _names(q, "modules_to_not_convert")
    return Quantization("mxfp4", group_size=_MXFP4_GROUP, included=("re:.*experts",), excluded=excluded)


def _bitsandbytes(q: Mapping[str, Any]) -> Quantization:
    is_int8 = q.get("load_in_8bit") or q.get("_load_in_8bit")
    return Quantization("bnb-int8" if is_int8 else "bnb-nf4", excluded=_names(q, "llm_int8_skip_modules"))


# modelopt's quant_algo (layers/quantization/modelopt.py).
_MODELOPT: Mapping[str, Quantization] = {
    "FP8": Quantization("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantization("fp8", is_per_channel=True),
    "FP8_PB_WO": Quantization("fp8-block", block=_FP8_BLOCK),
    "NVFP4": Quantization("nvfp4", group_size=_NVFP4_GROUP),
    "NVFP4_AWQ": Quantization("nvfp4", group_size=_NVFP4_GROUP),
    "W4A16_NVFP4": Quantization("nvfp4", group_size=_NVFP4_GROUP),
}


def _modelopt(q: Mapping[str, Any]) -> Quantization:
    """`exclude_modules` in hf_quant_config.json, `ignore` in config.json; MIXED_PRECISION names a format a module."""
    algo = str(q.get("quant_algo", "")).upper()
    modules: dict[str, list[str]] = {} if algo == "MIXED_PRECISION" else {algo: []}
    if algo == "MIXED_PRECISION":
        for name, value in (q.get("quantized_layers") or {}).items():
            modules.setdefault(str(value.get("quant_algo", "")).upper(), []).append(str(name))
    unknown = [name for name in modules if name not in _MODELOPT]
    if unknown or not modules:
        why = "its bytes are not modelled" if unknown else "it lists no layers"
        raise not_modelled("quantization", f"modelopt {', '.join(unknown) or algo}", why)
    rows = [msgspec.structs.replace(_MODELOPT[name], included=tuple(own)) for name, own in modules.items()]
    return msgspec.structs.replace(rows[0], excluded=_names(q, "exclude_modules", "ignore"), also=tuple(rows[1:]))


def _compressed_tensors(q: Mapping[str, Any]) -> Quantization:
    """Groups of modules with one scheme each; `targets` are class names ("Linear") or patterns."""
    groups = q.get("config_groups") or {}
    formats = [_scheme(group, str(group.get("format") or q.get("format") or "")) for group in groups.values()]
    if not formats:
        raise not_modelled("quantization", "compressed-tensors", "it has no config_groups")
    # The narrower groups (by pattern) are tried before those for every linear layer.
    formats.sort(key=lambda one: not one.included)
    return msgspec.structs.replace(formats[0], excluded=_names(q, "ignore"), also=tuple(formats[1:]))


def _scheme(group: Mapping[str, Any], storage: str) -> Quantization:
    weights = group.get("weights") or {}
    targets = tuple(str(target) for target in group.get("targets") or ())
    included = () if "Linear" in targets or not targets else targets
    bits, kind = int(weights.get("num_bits", 0)), str(weights.get("type", "int"))
    strategy, group_size = str(weights.get("strategy", "")), weights.get("group_size")
    block = weights.get("block_structure")
    if kind == "float" and bits == 8:
        if strategy == "block" and block:
            return Quantization("fp8-block", block=(int(block[0]), int(block[1])), included=included)
        return Quantization("fp8", is_per_channel=strategy == "channel", included=included)
    if kind == "float" and bits == 4:
        is_mx = "mxfp4" in storage or group_size == _MXFP4_GROUP
        return Quantization("mxfp4" if is_mx else "nvfp4", group_size=group_size, included=included)
    if kind == "int" and bits == 8 and storage != "pack-quantized":
        return Quantization("int8", included=included)
    if kind == "int" and bits in (4, 8):
        is_symmetric, size = bool(weights.get("symmetric", True)), _group_size(group_size)
        return Quantization("int4", group_size=size, bits=bits, is_symmetric=is_symmetric, included=included)
    raise not_modelled("quantization", f"compressed-tensors {kind}{bits}", "its bytes are not modelled")


# How a quant_method is read, and the kinds of checkpoint for which vLLM takes `--quantization` of that name.
_METHODS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Quantization], frozenset[str]]] = {
    "fp8": (_fp8, frozenset({"fp8", "fp8-block"})),
    "fbgemm_fp8": (_fp8, frozenset({"fp8"})),
    "awq": (_awq, frozenset({"awq"})),
    "awq_marlin": (_awq, frozenset({"awq"})),
    "gptq": (_gptq, frozenset({"gptq"})),
    "gptq_marlin": (_gptq, frozenset({"gptq"})),
    "moe_wna16": (_gptq, frozenset({"awq", "gptq"})),
    "auto-round": (_auto_round, frozenset()),
    "inc": (_auto_round, frozenset({"awq", "gptq"})),
    "mxfp4": (_mxfp4, frozenset({"mxfp4"})),
    "gpt_oss_mxfp4": (_mxfp4, frozenset({"mxfp4"})),
    "bitsandbytes": (_bitsandbytes, frozenset({"bnb-nf4", "bnb-int8"})),
    "modelopt": (_modelopt, frozenset({"fp8", "nvfp4", "fp8-block"})),
    "modelopt_fp4": (_modelopt, frozenset({"nvfp4"})),
    "modelopt_mixed": (_modelopt, frozenset({"fp8", "nvfp4", "fp8-block"})),
    "compressed-tensors": (_compressed_tensors, frozenset({"fp8", "fp8-block", "int8", "int4", "nvfp4", "mxfp4"})),
}

# `--quantization` on a 16-bit checkpoint (layers/quantization/online, bitsandbytes.py): what vLLM makes while loading.
ONLINE: Mapping[str, Quantization] = {
    "fp8": Quantization("fp8", is_online=True),
    "fp8_per_tensor": Quantization("fp8", is_online=True),
    "fp8_per_channel": Quantization("fp8", is_per_channel=True, is_online=True),
    "fp8_per_block": Quantization("fp8-block", block=_FP8_BLOCK, is_online=True),
    "bitsandbytes": Quantization("bnb-nf4", is_online=True),
    "mxfp4": Quantization("mxfp4", group_size=_MXFP4_GROUP, is_online=True),
}


# Formats that vLLM does not make and finds in a checkpoint by itself: no flags of it, but what people plan for.
CHECKPOINTS: Mapping[str, Quantization] = {
    "nvfp4": Quantization("nvfp4", group_size=_NVFP4_GROUP),
    "int4": Quantization("int4", group_size=128),
}


def with_choice(arch: Architecture, choice: str | None, dtype: str | None = None) -> Architecture:
    """The architecture as `--quantization` and `--dtype` load it.
    The checkpoint's own format changes nothing; a 16-bit one takes what vLLM makes while loading, or becomes the
    checkpoint that is asked for. Else NotModelled."""
    if dtype not in (None, "auto"):
        arch = msgspec.structs.replace(arch, dtype={"half": "float16", "float": "float32"}.get(str(dtype), str(dtype)))
    if choice is None:
        return arch
    if choice not in ONLINE and choice not in _METHODS and choice not in CHECKPOINTS:
        close = nearest(choice, {*ONLINE, *_METHODS, *CHECKPOINTS})
        raise not_modelled(
            "quantization", choice, "it is not modelled", hint=f"did you mean {close}?" if close else None
        )
    if arch.quantization is not None:
        if arch.quantization.kind == choice or arch.quantization.kind in _METHODS.get(choice, (None, ()))[1]:
            return arch
        raise not_modelled("quantization", choice, f"the checkpoint is stored as {arch.quantization.kind}")
    quant = ONLINE.get(choice) or CHECKPOINTS.get(choice)
    if quant is None:
        raise not_modelled(
            "quantization",
            choice,
            "the checkpoint has 16-bit weights",
            hint=f"Made while loading: {', '.join(ONLINE)}. A checkpoint to be made: {', '.join(CHECKPOINTS)}.",
        )
    return msgspec.structs.replace(arch, quantization=quant)
