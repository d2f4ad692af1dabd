"""The rules of each vLLM version that planning depends on, from `data/engine_versions.yaml` with their sources."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import msgspec

from penstock.errors import not_modelled
from penstock.hardware.catalog import read_yaml
from penstock.planner.architecture import QuantKind
from penstock.text import GIB

NEWEST = "0.33.0"
Capability = tuple[int, int]
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.+-]?(?:post|rc|dev|a|b)?[\w.]*)?\Z")


class BatchDefaults(msgspec.Struct, frozen=True):
    """Defaults of the API server on GPUs with this much memory or more."""

    from_memory_gib: int
    max_num_batched_tokens: int
    max_num_seqs: int


class EngineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of one version of vLLM; data/engine_versions.yaml explains each."""

    version: str
    default_utilization: float
    graphs_in_budget: bool
    nccl_in_budget: bool
    measures_consumed: bool
    non_torch_gib: tuple[float, float, float]
    sampler_bytes: float
    keeps_moe_workspace: bool
    runner_v2: Literal["none", "dense", "all"]
    batch_defaults: tuple[BatchDefaults, ...]
    small_batches_on: tuple[str, ...]
    largest_graph_blackwell: int
    prints_concurrency: bool
    checks_groups: bool
    chunked_windows: bool
    counts_batches_in_flight: bool
    reserves_null_block: bool
    group_slack: float
    caches_states: bool
    graphs_need_blocks: bool
    mamba2_checkpoints: bool
    gdn_checkpoints: bool
    has_sparse_attention: bool
    mla_block_hopper: int
    mla_block_blackwell: int
    least_capability: dict[QuantKind, Capability]
    fp8_cache_capability: Capability
    wheels_cuda: int
    packed_inputs: int
    packed_expert_inputs: int
    fp8_expert_block: int | None
    step_us: float
    wait_steps: float
    least_moe_layer_us: float
    mla_layer_us: float

    def uses_runner_v2(self, is_moe_or_hybrid: bool) -> bool:
        return self.runner_v2 == "all" or (self.runner_v2 == "dense" and not is_moe_or_hybrid)


def parse_version(text: str) -> tuple[int, int, int]:
    """(0, 11, 4) from "0.11.4.post1", (0, 33, 0) from "v0.33". Raises NotModelled for anything else."""
    match = _VERSION.match(text.strip())
    if match is None:
        raise not_modelled("engine version", text, "not a vLLM version", hint=f"versions run from {_known()}")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def is_since(version: str, least: tuple[int, ...], otherwise: bool = False) -> bool:
    """Return whether a version has what `least` brought; `otherwise` for a build of one's own, which does not say."""
    return parse_version(version) >= least if _VERSION.match(version) else otherwise


@functools.lru_cache(maxsize=256)
def profile(version: str | None = None) -> EngineProfile:
    """The rules of `version` ("0.33", "0.11.2.post1"), None for the newest.  Raises NotModelled outside the table."""
    text = version or NEWEST
    asked, newest = parse_version(text), parse_version(NEWEST)
    fields: dict[str, Any] = {}
    for since, changes in _table().items():
        if parse_version(since) <= asked:
            fields |= changes
    if not fields or asked[:2] > newest[:2]:
        raise not_modelled(
            "engine version",
            text,
            f"its memory rules are known from {_known()}",
            hint=f"plan with engine version {NEWEST} and compare with the engine's first start",
        )
    return msgspec.convert({**fields, "version": text.strip().removeprefix("v")}, EngineProfile)


def _known() -> str:
    return f"{next(iter(_table()))} to {NEWEST.removesuffix('.0')}"


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = read_yaml("penstock.planner", "engine_versions.yaml")
    return table


def batch_defaults(rules: EngineProfile, gpu_memory_bytes: int, gpu_name: str, max_model_len: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of the API server when neither is set (`engine/arg_utils.py`).
    H100 (79.2 GiB by the CUDA runtime), vLLM 0.33: (8192, 1024). A100: (2048, 256)."""
    is_small = any(name in gpu_name.lower() for name in rules.small_batches_on)
    memory_gib = 0 if is_small else gpu_memory_bytes / GIB
    row = [row for row in rules.batch_defaults if row.from_memory_gib <= memory_gib][-1]
    tokens = min(row.max_num_batched_tokens, row.max_num_seqs * max_model_len)
    return tokens, min(row.max_num_seqs, tokens)


@functools.cache
def graph_sizes(max_num_seqs: int, largest: int) -> tuple[int, ...]:
    """The batch sizes that CUDA graphs are captured for (`config/vllm.py`): 51 for 256 sequences and 512 at most."""
    top = max(min(2 * max_num_seqs, largest), 1)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return tuple(size for size in sizes if size <= top)
