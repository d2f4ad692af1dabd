"""What changed between vLLM's versions, as data: defaults, and what counts against the memory budget.

`CHANGES` lists, oldest first, the fields that a version set; a profile is all changes up to the asked version. Sources
are vLLM pull requests and issues by number, and ../shared/reference/sizing.md section 1.6 for the traps in old logs.
Where a change is known only to lie between two releases, the later one is written here and the comment says so.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import msgspec

from penstock.errors import not_modelled
from penstock.text import GIB

Generation = Literal["V0", "V1"]
# How "GPU KV cache size" is computed from the blocks: blocks x block size; (blocks // groups) x smallest block size;
# or maximum concurrency x max_model_len.
SizePrint = Literal["blocks", "blocks-by-group", "concurrency"]
NEWEST = "0.33.0"
OLDEST = "0.2.0"
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.+-]?(?:post|rc|dev|a|b)?[\w.]*)?\Z")


class BatchDefaults(msgspec.Struct, frozen=True):
    """A row of defaults of the API server: from this much GPU memory, so many tokens a batch and sequences."""

    from_memory_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int


class EngineProfile(msgspec.Struct, frozen=True):
    """The rules of one version of vLLM that sizing depends on.

    `sampler_bytes`: bytes a row and vocabulary entry that the sampler's part of the profile run holds at its peak.
    `hybrid_manager`: sliding layers are charged for their window, not for the whole context; `chunked_windows` the
    same for chunked-local layers (Llama 4). `counts_batches_in_flight`: that charge covers every batch in flight, not
    one. `reserves_null_block`, `checks_groups`: the start-up check leaves one block out, and counts padded groups.
    `caches_states`: prefix caching is on by default for hybrids with states, which then hold two states a request.
    `mamba2_checkpoints`, `gdn_checkpoints`: the prefill kernel writes one more state then.
    `group_slack`: bucket sizes closer than this factor share the larger one as group size.
    `keeps_moe_workspace`: the MoE kernels' workspace stays allocated after the profile run.
    """

    version: str = NEWEST
    generation: Generation = "V0"
    default_utilization: float = 0.90
    graphs_in_budget: bool = False
    nccl_in_budget: bool = False
    non_torch_gib: tuple[float, float, float] = (0.0, 0.05, 0.13)
    has_expert_group: bool = False
    size_print: SizePrint = "blocks"
    sampler_bytes: float = 38.4
    runner_v2: Literal["none", "dense", "all"] = "none"
    hybrid_manager: bool = False
    chunked_windows: bool = False
    counts_batches_in_flight: bool = False
    reserves_null_block: bool = False
    checks_groups: bool = False
    has_states: bool = False
    caches_states: bool = False
    mamba2_checkpoints: bool = False
    gdn_checkpoints: bool = False
    has_mla: bool = False
    group_slack: float = 1.0
    keeps_moe_workspace: bool = False
    measures_consumed: bool = False
    mla_block_hopper: int = 16
    mla_block_blackwell: int = 16
    batch_defaults: tuple[BatchDefaults, ...] = (BatchDefaults(0, 2048, 256),)
    batch_defaults_by_name: tuple[str, ...] = ()
    spares_a100: bool = False
    spares_gb10: bool = False
    chunks_above: int | None = None
    chunk_tokens: int = 512
    graph_sizes: Literal["by-8-to-256", "by-8-to-512", "by-8-then-16"] = "by-8-to-256"

    def uses_runner_v2(self, is_moe_or_hybrid: bool) -> bool:
        """Whether the second model runner is the default for a model of this kind."""
        return self.runner_v2 == "all" or (self.runner_v2 == "dense" and not is_moe_or_hybrid)

    def sampler_bytes_of(self, is_moe_or_hybrid: bool) -> float:
        """6.1 with the second runner: logits in the model's dtype and in fp32. 0.89 GiB for Qwen3-0.6B in 0.33."""
        return 6.1 if self.uses_runner_v2(is_moe_or_hybrid) else self.sampler_bytes


_V1_SMALL = BatchDefaults(0, 2048, 256)
_V1_LARGE = BatchDefaults(70 * GIB, 8192, 1024)
_V1_LARGEST = BatchDefaults(160 * GIB, 16384, 1024)

CHANGES: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    # vllm#2031: the profile reads the whole card's use, with the CUDA context, NCCL and the allocator's cache: 0.8 GiB
    # more on one A100, and far more with Ray's workers.
    ((0, 2, 5), {"nccl_in_budget": True, "non_torch_gib": (0.1, 0.4, 1.0)}),
    # Chunked prefill by itself for contexts over 32k, 512 tokens a batch: `EngineArgs` of 0.5.1.
    ((0, 5, 1), {"chunks_above": 32768}),
    # vllm#9352: non-torch memory is told apart: 0.26 GiB (A100, 0.6.5), 0.28 and 0.35 (RTX 3090, 0.6.4).
    ((0, 6, 4), {"non_torch_gib": (0.2, 0.3, 0.45)}),
    # vllm#10544: 2048 instead of 512.
    ((0, 6, 5), {"chunk_tokens": 2048}),
    # vllm#10511, #12126: against a snapshot taken after CUDA's start. 0.01 to 0.11 GiB in 14 logs of 0.6.6 to 0.10.
    ((0, 6, 6), {"non_torch_gib": (0.01, 0.07, 0.3)}),
    # MLA caches the latent vector since 0.7.1; before it, whole heads.
    ((0, 7, 1), {"has_mla": True}),
    # V1 by default. vllm#12369: larger batches for H100 and H200 by name. FlashMLA on Hopper asks for blocks of 64.
    (
        (0, 8, 0),
        {
            "generation": "V1",
            "batch_defaults": (_V1_SMALL, _V1_LARGE),
            "batch_defaults_by_name": ("h100", "h200"),
            "chunks_above": None,
            "mla_block_hopper": 64,
            "graph_sizes": "by-8-to-512",
        },
    ),
    # vllm#17073: by memory, not by name. Mixtures get an expert-parallel group, with communicators of its own.
    ((0, 8, 5), {"batch_defaults_by_name": (), "has_expert_group": True}),
    # vllm#17885: A100 keeps the small ones. CUTLASS MLA on Blackwell asks for 128 tokens a block.
    ((0, 9, 0), {"spares_a100": True, "mla_block_blackwell": 128}),
    # vllm#13296: hybrid KV cache manager; the printed size is then divided over the groups.
    ((0, 9, 1), {"hybrid_manager": True, "size_print": "blocks-by-group"}),
    # Hybrids with Mamba layers in V1.
    ((0, 10, 0), {"has_states": True}),
    # Buckets of nearly equal size are padded to the larger (gpt-oss with a draft). Graph sizes by 16 above 256.
    ((0, 11, 0), {"group_slack": 1.25, "graph_sizes": "by-8-then-16"}),
    # The snapshot is taken after NCCL's set-up; chunked-local attention with the hybrid manager by default.
    ((0, 12, 0), {"nccl_in_budget": False, "chunked_windows": True}),
    # One workspace manager keeps the MoE buffers. The start-up check counts groups, not layers (0.13 to 0.15).
    ((0, 15, 0), {"keeps_moe_workspace": True, "checks_groups": True}),
    # vllm#33538: top-k/top-p in Triton instead of a sort: 39 -> 14 bytes an entry.
    ((0, 17, 0), {"sampler_bytes": 14.0}),
    # The back end's preferred block size: FlashAttention MLA on Hopper (16), FlashInfer MLA on Blackwell (32).
    ((0, 18, 0), {"mla_block_hopper": 16, "mla_block_blackwell": 32}),
    # vllm#30515 on by default; vllm#40694, #43308: the printed size follows the concurrency. Consumption is measured
    # by free memory, with what the allocator keeps: 0.27 to 0.7 GiB.
    (
        (0, 21, 0),
        {
            "graphs_in_budget": True,
            "size_print": "concurrency",
            "measures_consumed": True,
            "non_torch_gib": (0.2, 0.45, 0.9),
        },
    ),
    ((0, 22, 0), {"default_utilization": 0.92}),
    # vllm#44443, merged 2026-07-02: the second model runner for dense models.
    ((0, 25, 0), {"runner_v2": "dense", "group_slack": 1.5}),
    # vllm#47728, seen in vllm#49878 (0.25.1 -> 0.26): windows are charged for all batches in flight.
    ((0, 26, 0), {"counts_batches_in_flight": True, "reserves_null_block": True}),
    # vllm#50991; 16,384 tokens from 160 GiB (arg_utils.py at v0.28.0; absent at v0.27.0).
    ((0, 28, 0), {"caches_states": True, "batch_defaults": (_V1_SMALL, _V1_LARGE, _V1_LARGEST)}),
    # vllm#53183, merged after 2026-08-26 (0.28.0 was tagged 2026-08-24): the second runner for all.
    ((0, 29, 0), {"runner_v2": "all"}),
    # vllm#57329, opened 2026-09-17, is in 0.32: the first release that can have it is 0.31.
    ((0, 31, 0), {"mamba2_checkpoints": True}),
    # `qwen_gdn_linear_attn.py` of 0.33; not in 0.32.
    ((0, 33, 0), {"gdn_checkpoints": True, "spares_gb10": True}),
)


def parse_version(text: str) -> tuple[int, int, int]:
    """(0, 6, 4) from "0.6.4.post1", "v0.6.4", (0, 33, 0) from "0.33". Raises NotModelled for anything else."""
    found = _VERSION.match(text.strip())
    if found is None:
        raise not_modelled("engine version", text, "not a vLLM version", hint=f"versions run from {OLDEST} to {NEWEST}")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def profile(version: str | None = None) -> EngineProfile:
    """The rules of `version` ("0.33", "0.6.4.post1"), None for the newest. Raises NotModelled outside the range."""
    text = version or NEWEST
    asked = parse_version(text)
    newest = parse_version(NEWEST)
    if asked < parse_version(OLDEST) or asked[:2] > newest[:2]:
        raise not_modelled(
            "engine version",
            text,
            f"its memory rules are known from {OLDEST} to {NEWEST}",
            hint=f"plan with engine version {NEWEST} and compare with its first start",
        )
    fields: dict[str, Any] = {}
    for since, changed in CHANGES:
        if since <= asked:
            fields.update(changed)
    return EngineProfile(version=text.strip().removeprefix("v"), **fields)


def on_card(rules: EngineProfile, capability: tuple[int, int] | None) -> EngineProfile:
    """The rules on a card of this compute capability: before Ampere, 0.8 to 0.10 fall back to V0 (0.11 has no V0).

    `_is_v1_supported_oracle` of `engine/arg_utils.py`: "Compute Capability < 8.0". None (AMD) keeps the rules.
    """
    version = parse_version(rules.version)
    if capability is None or capability >= (8, 0) or not (0, 8, 0) <= version < (0, 11, 0):
        return rules
    last = profile("0.7.3")
    fields = (
        *("generation", "batch_defaults", "batch_defaults_by_name", "chunks_above", "chunk_tokens", "graph_sizes"),
        *("hybrid_manager", "chunked_windows", "size_print", "has_states", "has_expert_group"),
    )
    return msgspec.structs.replace(rules, **{name: getattr(last, name) for name in fields})


def batch_defaults(rules: EngineProfile, gpu_memory_bytes: int, gpu_name: str, max_model_len: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of the API server when nobody sets them (`engine/arg_utils.py`).

    `gpu_memory_bytes` is what the CUDA runtime reports for one GPU, `gpu_name` the driver's name. An H100 (79.2 GiB)
    with vLLM 0.33 and a context of 8,192: (8192, 1024). An A100: (2048, 256).
    """
    if rules.generation == "V0":
        return _batch_defaults_v0(rules, max_model_len)
    name = gpu_name.lower()
    is_small = (
        (rules.spares_a100 and "a100" in name)
        or (rules.spares_gb10 and "gb10" in name)
        or (bool(rules.batch_defaults_by_name) and not any(known in name for known in rules.batch_defaults_by_name))
    )
    memory = 0 if is_small and gpu_memory_bytes < _V1_LARGEST.from_memory_bytes else gpu_memory_bytes
    row = [row for row in rules.batch_defaults if row.from_memory_bytes <= memory][-1]
    tokens = min(row.max_num_batched_tokens, row.max_num_seqs * max_model_len)
    return tokens, min(row.max_num_seqs, tokens)


def _batch_defaults_v0(rules: EngineProfile, max_model_len: int) -> tuple[int, int]:
    if rules.chunks_above is not None and max_model_len > rules.chunks_above:
        return rules.chunk_tokens, 256
    return max(max_model_len, 2048), 256


def graph_sizes(rules: EngineProfile, max_num_seqs: int, is_blackwell: bool = False) -> tuple[int, ...]:
    """The batch sizes that CUDA graphs are captured for (`config/vllm.py`), up to min(2 x max_num_seqs, 512).

    51 sizes for 256 sequences or more; 35 in V0, 67 in V1 before 0.11. 1,024 instead of 512 on sm100 since 0.25.
    """
    if rules.graph_sizes == "by-8-to-256":
        top, by_eight, by_sixteen = min(max_num_seqs, 256), 256, 256
    elif rules.graph_sizes == "by-8-to-512":
        top, by_eight, by_sixteen = min(2 * max_num_seqs, 512), 512, 512
    else:
        limit = 1024 if is_blackwell and rules.runner_v2 != "none" else 512
        top, by_eight, by_sixteen = min(2 * max_num_seqs, limit), 256, limit
    return _sizes_to(max(top, 1), by_eight, by_sixteen)


@functools.cache
def _sizes_to(top: int, by_eight: int, by_sixteen: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, *range(8, by_eight + 1, 8), *range(by_eight + 16, by_sixteen + 1, 16)]
    return tuple(size for size in sizes if size <= top)
