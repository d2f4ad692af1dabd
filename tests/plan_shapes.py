"""Models and machines as the planner sees them, for its tests, and its answer for a model of the catalogue."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from penstock.hardware import catalog as hardware
from penstock.models import Facts, catalog, facts
from penstock.planner.architecture import Architecture, Attention, AttentionKind, Layer, Mlp, State, dense
from penstock.planner.request import Sizing, SizingRequest
from penstock.planner.solve import sizing_of
from penstock.planner.speed.collectives import Fabric


def benchmark(name: str) -> Any:
    """A program of benchmarks/ as a module."""
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # msgspec looks the annotations up there
    spec.loader.exec_module(module)
    return module


def arch(name: str, **changes: Any) -> Architecture:
    """A model of the catalogue; `changes` go over its config.json."""
    return dense.read({**catalog.model_config(name), **changes})


def asked(model: str, gpu: str, config: dict[str, Any] | None = None, **fields: Any) -> SizingRequest:
    return SizingRequest(Facts(model, config or catalog.model_config(model), "the catalogue"), gpu, **fields)


def solved(model: str, gpu: str, config: dict[str, Any] | None = None, **fields: Any) -> Sizing:
    return sizing_of(asked(model, gpu, config, **fields), hardware.gpu(gpu))


def planned(model: str, gpu: str, **fields: Any) -> tuple[SizingRequest, Sizing]:
    """A request for a model of the catalogue, with its hub id, and the answer."""
    request = SizingRequest(facts.read(model), gpu, **fields)
    network = hardware.link(request.network) if request.network else None
    return request, sizing_of(request, hardware.gpu(gpu), network)


def fabric(
    gpu: str = "h100-sxm", gpus_per_node: int = 8, n_nodes: int = 1, network: str | None = "ib-ndr-400"
) -> Fabric:
    return Fabric(hardware.gpu(gpu), gpus_per_node, n_nodes, hardware.link(network) if network else None)


def attention(kind: AttentionKind, heads: int, kv_heads: int, size: int, window: int | None = None) -> Attention:
    return Attention(kind, heads, kv_heads, size, size, window)


def model(name: str, hidden: int, vocab: int, layers: list[Layer], **more: Any) -> Architecture:
    known: dict[str, Any] = {"dtype": "bfloat16", "ties_embeddings": False, **more}
    return Architecture(name, "llama", hidden, vocab, tuple(layers), 131_072, **known)


LLAMA_8B, LLAMA_70B, LLAMA_405B = map(arch, ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"))
LLAMA_405B_FIRST = arch("llama-3.1-405b", num_key_value_heads=16)
LLAMA_2_7B, VICUNA_13B, LLAMA_4_SCOUT = map(arch, ("llama-2-7b", "vicuna-13b-v1.3", "llama-4-scout-17b-16e"))
QWEN2_5_32B, QWEN3_0_6B, QWEN3_32B = map(arch, ("qwen2.5-32b", "qwen3-0.6b", "qwen3-32b"))
DEEPSEEK_V3, DEEPSEEK_V32 = map(arch, ("deepseek-v3", "deepseek-v3.2"))
GPT_OSS_20B, GPT_OSS_120B = map(arch, ("gpt-oss-20b", "gpt-oss-120b"))
GEMMA_3_27B, MISTRAL_7B = map(arch, ("gemma-3-27b", "mistral-7b-v0.1"))
QWEN3_NEXT, GRANITE_4, JAMBA = map(arch, ("qwen3-next-80b-a3b", "granite-4.0-h-small", "jamba-v0.1"))
GDN = next(layer.state for layer in QWEN3_NEXT.layers if layer.state is not None)
GRANITE_STATE = next(layer.state for layer in GRANITE_4.layers if layer.state is not None)
# Gemma 4 31B, not in the catalogue: sliding layers of 16 x 256, full ones of 4 x 512: pages of two sizes.
_SLIDING, _FULL = attention("sliding", 32, 16, 256, 1024), attention("full", 32, 4, 512)
GEMMA_4_31B = model(
    "gemma-4-31b", 5376, 262_144, [Layer(_FULL if i % 6 == 5 else _SLIDING, mlp=Mlp(21504)) for i in range(60)]
)
# Near Nemotron-H-56B: 59 Mamba-2 layers (256 heads of 64, 8 groups of 256, states in fp32) and 10 of attention.
_NEMOTRON = State("mamba2", 16384 + 2 * 8 * 256, 4, 256, 64, 256)
NEMOTRON_H = model(
    *("nemotron-h-56b", 8192, 131_072),
    [
        Layer(attention("full", 64, 8, 128))
        if i in range(7, 118, 12)
        else Layer(None, _NEMOTRON if i % 2 == 0 else None)
        for i in range(118)
    ],
)
# Full attention with more or fewer KV heads by layer (Nemotron Super).
MIXED_HEADS = model(
    *("mixed heads", 4096, 32_000),
    [Layer(attention("full", 32, 8 if i % 2 else 4, 128), mlp=Mlp(8192)) for i in range(10)],
)
EVERY = (
    *(LLAMA_8B, LLAMA_2_7B, DEEPSEEK_V3, DEEPSEEK_V32, GPT_OSS_20B, GEMMA_3_27B, GEMMA_4_31B, LLAMA_4_SCOUT),
    *(MISTRAL_7B, MIXED_HEADS, QWEN3_NEXT, GRANITE_4, JAMBA, NEMOTRON_H),
)
