"""Memory of a GPU beside weights and KV cache, as low / likely / high: what the profile run finds and what it does not.

`activation` is transient: the forward pass of the largest batch and, after it, the sampler over max_num_seqs rows; the
larger of the two counts. `workspace` are the MoE kernels' buffers, `non_torch` what the CUDA libraries and the
allocator keep, `nccl` the communicators, `graphs` the captured CUDA graphs. Which of them are paid from the budget
(total x utilization) and which from the rest of the card changed between versions: see `profiles`.

Checked against public start-up logs (tests/test_plan_overhead.py has each as a test). The constants are fits to those
logs, not measurements of ours, unless the comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from penstock.planner.architecture import Architecture, Layer
from penstock.planner.engine_versions import EngineProfile, graph_sizes
from penstock.planner.memory.kv_pages import dtype_bytes, kv_heads_on_rank
from penstock.planner.memory.tensors import split_layers
from penstock.planner.ranges import ZERO, Range, exact, gib, highest
from penstock.spec.deployment import Parallel
from penstock.text import MIB

# A vision tower with pictures of one size, and its cache of encoder outputs: 0.3-1 GiB (sizing.md 1.2).
_MULTIMODAL = gib(0.3, 0.5, 1.0)
# Towers that take any size (Qwen's) are profiled with one picture of 16,384 tokens, each of 2 x 2 patches.
_ENCODER_TOKENS, _PATCHES_A_TOKEN = 16_384, 4
# The second runner, without its penalty counts: 0.13 (A100, 0.31), 0.16 (L4, 0.29), 0.18 to 0.27 GiB (our H200, 0.33).
_NON_TORCH_RUNNER_V2 = gib(0.1, 0.18, 0.3)
# More than one rank: buffers of the custom all-reduce and symmetric memory. 0.72 to 0.76 GiB at TP2 and TP4 (our H200s,
# 0.33), 0.95 in all at TP4 (B200, 0.26); without NVLink they are not made.
_NON_TORCH_RANKS = gib(0.4, 0.75, 1.0)
_NON_TORCH_RANKS_OVER_PCIE = gib(0.0, 0.1, 0.6)
# NCCL of a group, and more for each rank, where NVLink joins the GPUs: non-torch memory of 0.74 GiB at TP2, 1.39 at TP4
# and 2.10 at TP8 (0.7 and 0.8 logs), 1.8-3.6 in vllm#10511. Over PCIe it hardly grows: 0.25 at TP2 (RTX 4090), 0.20 at
# TP16 (RTX 3090), 0.21 at TP8 (L40S), all in.
_NCCL_A_GROUP, _NCCL_A_RANK = gib(0.1, 0.25, 0.5), gib(0.1, 0.23, 0.45)
_NCCL_OVER_PCIE = gib(0.05, 0.12, 0.3)
# Estimated graphs (counted since 0.21): a part for each layer and size, and a pool that the largest graph and its
# extrapolation take, by what a layer holds of a token. Our H200s (0.33) log 0.92 GiB for Llama-3.1-8B and 0.81 for half
# of its layers, 0.57 for Qwen3-0.6B, 1.23 for Qwen3-30B-A3B, 2.20 and in fp8 1.70 for Qwen3-32B, 1.56 and 1.17 for
# Llama-3.1-70B at TP2 and TP4, 2.58 for the 405B at TP4. The first runner's pool is smaller: 0.37, 0.64 and 0.78 for
# Qwen2.5-7B, Qwen3.5-4B and -9B (0.19 and 0.22).
_GRAPH_FLOOR = gib(0.05, 0.1, 0.3)
_GRAPH_PER_LAYER_AND_SIZE = Range(0.13 * MIB, 0.26 * MIB, 0.4 * MIB)
_POOL_OF_RUNNER = {"V1": 14.0, "V2": 36.0}
# Captured graphs (outside the budget before 0.21): 0.23, 0.45 (the two above), 0.67 GiB with 67 sizes.
_CAPTURED_FLOOR = gib(0.05, 0.1, 0.4)
_CAPTURED_PER_LAYER_AND_SIZE = Range(0.02 * MIB, 0.2 * MIB, 0.4 * MIB)
# Cards without peer-to-peer, two or more: 2.4-6.6 GiB on RTX 4090 x4 (vllm#7553, #11452).
_CAPTURED_WITHOUT_PEER = gib(0.4, 2.4, 6.6)
# The forward pass is a closed form: fits 20 logs within 15%; fused kernels can lower it, padding and copies raise it.
_FORWARD_SPREAD, _SAMPLER_SPREAD, _WORKSPACE_SPREAD = (0.85, 1.25), (0.9, 1.25), (0.4, 2.5)
_ENCODER_SPREAD, _POOL_SPREAD = (0.7, 1.4), (0.5, 1.5)
_PENALTY_BYTES = 4 + 1 / 8
# Tokens of other data-parallel ranks that an MoE layer sees at once: chunks of 32,768 (VLLM_FUSED_MOE_CHUNK_SIZE).
_MOE_CHUNK = 32768


class RunSettings(msgspec.Struct, frozen=True):
    """What the engine is told that moves the profile run, and what the GPU is like."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enforce_eager: bool = False
    has_peer_to_peer: bool = True
    has_nvlink: bool = True
    is_blackwell: bool = False


class Overhead(msgspec.Struct, frozen=True):
    """Bytes on one GPU of a pipeline stage. `graphs` and `nccl` are in the budget or beside it, as the flags say."""

    activation: Range
    workspace: Range
    non_torch: Range
    graphs: Range
    nccl: Range
    graphs_in_budget: bool
    nccl_in_budget: bool

    @property
    def in_budget(self) -> Range:
        """What total x utilization pays for beside weights and KV cache."""
        inside = self.activation + self.workspace + self.non_torch
        inside = inside + self.graphs if self.graphs_in_budget else inside
        return inside + self.nccl if self.nccl_in_budget else inside

    @property
    def beside_budget(self) -> Range:
        """What must fit in total x (1 - utilization)."""
        beside = ZERO if self.graphs_in_budget else self.graphs
        return beside if self.nccl_in_budget else beside + self.nccl


class Measured(msgspec.Struct, frozen=True):
    """What an earlier start of the same model, GPU and flags reported, in bytes; None: not reported."""

    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graphs_bytes: int | None = None


def overhead(arch: Architecture, layout: Parallel, rules: EngineProfile, run: RunSettings, stage: int = 0) -> Overhead:
    """The estimate for one GPU of pipeline stage `stage` (0 is the first; the last one has the sampler).

    Llama-3.1-8B on one H200 with vLLM 0.33 (8192 tokens, 1024 sequences): activation 0.90 GiB (logged 1.04), graphs
    1.00 (logged 0.92), non-torch 0.68 (logged 0.68).
    """
    layers = [arch.layers[index] for index in split_layers(arch.n_layers, layout.pipeline)[stage]]
    is_last = stage == layout.pipeline - 1
    workspace = _workspace(arch, layers, layout, run)
    mixed = any(layer.state is not None or _has_experts(layer) for layer in arch.layers)
    is_v2 = rules.uses_runner_v2(mixed)
    forward = _spread(_forward_bytes(arch, layers, layout, run, keeps_inputs=is_v2 and stage == 0), _FORWARD_SPREAD)
    uses = [forward if rules.keeps_moe_workspace else forward + workspace]
    if is_last:
        uses.append(_spread(_sampler_bytes(arch, rules.sampler_bytes_of(mixed), run), _SAMPLER_SPREAD))
    activation = highest(uses)
    if arch.is_multimodal and stage == 0:
        activation = _with_encoder(activation, arch, layout)
    return Overhead(
        activation=activation,
        workspace=workspace if rules.keeps_moe_workspace else ZERO,
        non_torch=_non_torch(rules, run, layout, rows_of=arch.vocab if is_v2 and is_last else 0, is_v2=is_v2),
        graphs=_graphs(arch, layers, layout, rules, run, is_v2),
        nccl=_nccl(layers, layout, rules, run),
        graphs_in_budget=rules.graphs_in_budget,
        nccl_in_budget=rules.nccl_in_budget,
    )


def with_measured(estimate: Overhead, measured: Measured) -> Overhead:
    """The same with what was measured in place of the estimates. Measured non-torch memory includes NCCL's part."""
    changes: dict[str, Range] = {}
    if measured.activation_bytes is not None:
        changes |= {"activation": exact(measured.activation_bytes), "workspace": ZERO}
    if measured.non_torch_bytes is not None:
        changes["non_torch"] = exact(measured.non_torch_bytes)
        if estimate.nccl_in_budget:
            changes["nccl"] = ZERO
    if measured.graphs_bytes is not None:
        changes["graphs"] = exact(measured.graphs_bytes)
    return msgspec.structs.replace(estimate, **changes)


def budget_bytes(total_bytes: int, utilization: float) -> int:
    """ceil(total x utilization), total as the CUDA runtime reports it (`v1/worker/utils.py`, request_memory)."""
    return math.ceil(total_bytes * utilization)


def available_kv(total_bytes: int, utilization: float, weights_bytes: int, estimate: Overhead) -> Range:
    """Bytes left for KV cache on one GPU: the budget less weights (rope tables in) less what is inside the budget.

    Not below zero. H200 (139.8 GiB), 0.92, Llama-3.1-8B (14.99 GiB): 111.5 GiB likely; the log says 110.98.
    """
    left = estimate.in_budget.left_of(budget_bytes(total_bytes, utilization) - weights_bytes)
    return Range(max(0.0, left.low), max(0.0, left.likely), max(0.0, left.high))


def _spread(value: float, factors: tuple[float, float]) -> Range:
    return Range(value * factors[0], value, value * factors[1])


def _forward_bytes(
    arch: Architecture, layers: Sequence[Layer], layout: Parallel, run: RunSettings, keeps_inputs: bool
) -> float:
    """tokens x bytes x (3 H + the widest of a layer): residual, input and output, and what stands between.

    A gated MLP holds 3 I / tensor (gate, up, product), a plain one 2 I; attention its projections and its output.
    Llama-3.1-8B, 20,000 tokens, bf16: 20,000 x 2 x (3 x 4096 + 3 x 14336) = 2.06 GiB; vLLM 0.6.4 logged 2.07. The
    second runner keeps the embedded inputs of the first stage too: 0.90 GiB for 8192 tokens, 1.04 on our H200.
    """
    widest = max((_width(layer, layout.tensor) for layer in layers), default=0.0)
    hidden = (4 if keeps_inputs else 3) * arch.hidden
    return run.max_num_batched_tokens * dtype_bytes(arch.dtype) * (hidden + widest)


def _width(layer: Layer, tensor: int) -> float:
    """Numbers a token between the input and the output of a layer's widest part, on one rank."""
    parts = [0.0]
    if layer.mlp is not None:
        width = layer.mlp.shared_intermediate if layer.mlp.n_experts else layer.mlp.intermediate
        parts.append((3 if layer.mlp.is_gated else 2) * width / tensor)
    if layer.attention is not None:
        attention = layer.attention
        heads = attention.n_heads / tensor
        kv_heads = heads if attention.kind == "mla" else kv_heads_on_rank(attention.n_kv_heads, tensor)
        keys_and_values = kv_heads * (attention.head_dim_k + attention.head_dim_v)
        parts.append(heads * (attention.head_dim_k + attention.head_dim_v) + keys_and_values)
    if layer.state is not None:
        parts.append(2 * (layer.state.conv_channels + layer.state.n_heads * layer.state.head_dim_v) / tensor)
    return max(parts)


def _workspace(arch: Architecture, layers: Sequence[Layer], layout: Parallel, run: RunSettings) -> Range:
    """Two buffers of tokens x top_k x max(2 I, H) numbers, I the rank's part of an expert (sizing.md 1.2).

    Experts are cut over tensor x data unless whole experts are spread (expert). Qwen3-30B-A3B, 8192 tokens: 0.5 GiB.
    """
    mixtures = [layer.mlp for layer in layers if layer.mlp is not None and layer.mlp.n_experts]
    if not mixtures:
        return ZERO
    tokens = run.max_num_batched_tokens
    likely_tokens = min(tokens * layout.data, max(tokens, _MOE_CHUNK))
    cut = 1 if layout.expert else layout.tensor * layout.data
    widest = max(mlp.top_k * max(2 * mlp.intermediate / cut, arch.hidden) for mlp in mixtures)
    return _spread(2 * likely_tokens * widest * dtype_bytes(arch.dtype), _WORKSPACE_SPREAD)


def _sampler_bytes(arch: Architecture, bytes_per_entry: float, run: RunSettings) -> float:
    """rows x vocabulary x bytes an entry, and the hidden states of the batch, which live until the sampler is done.

    Llama-3.1-8B, 1024 rows, 38.4 bytes (before 0.17): 4.76 GiB, as llm-d measured; 6.1 bytes (second runner): 0.81.
    """
    rows = min(run.max_num_seqs, run.max_num_batched_tokens)
    hidden = run.max_num_batched_tokens * arch.hidden * dtype_bytes(arch.dtype)
    return rows * arch.vocab * bytes_per_entry + hidden


def _has_experts(layer: Layer) -> bool:
    return layer.mlp is not None and layer.mlp.n_experts > 0


def _with_encoder(activation: Range, arch: Architecture, layout: Parallel) -> Range:
    """The forward pass or the vision encoder before it, whichever is larger; the encoder's outputs stay for the former.

    An encoder of Qwen's kind holds, of each patch, its pixels, three hidden states, the projections of its attention
    and the MLP's width. Hidden 1152, width 4304: 65,536 x 2 x (1536 + 3456 + 3456 + 4304) = 1.56 GiB; vLLM 0.19 left
    1.9 GiB for all of Qwen3.5-9B's profile run, 0.22 1.4 for Qwen3.5-4B's smaller one.
    """
    shapes = {tensor.name: tensor.shape for tensor in arch.towers}
    if not {"vision.patch_embed", "vision.qkv.weight", "vision.up.weight"} <= shapes.keys():
        return activation + _MULTIMODAL
    hidden, pixels = shapes["vision.patch_embed"]
    cut = shapes["vision.qkv.weight"][0] + shapes["vision.up.weight"][0]
    number = dtype_bytes(arch.dtype)
    patches = _ENCODER_TOKENS * _PATCHES_A_TOKEN
    encoder = _spread(patches * number * (pixels + 3 * hidden + cut / layout.tensor), _ENCODER_SPREAD)
    return highest([activation + exact(_ENCODER_TOKENS * arch.hidden * number), encoder])


def _non_torch(rules: EngineProfile, run: RunSettings, layout: Parallel, *, is_v2: bool, rows_of: int) -> Range:
    """What the CUDA libraries and the allocator keep; with the second runner also the penalties' counts.

    Those stay on the GPU that samples (`v1/worker/gpu/sample/penalties.py`): for each of max_num_seqs rows an int32 and
    a bit for every entry of the vocabulary (`rows_of`; 0: none). Llama-3.1-8B, 1024 rows: 1024 x 128,256 x 4.125 = 0.50
    GiB.
    """
    kept = gib(*rules.non_torch_gib)
    if not rules.measures_consumed:
        return kept
    if is_v2:
        rows = min(run.max_num_seqs, run.max_num_batched_tokens)
        kept = _NON_TORCH_RUNNER_V2 + exact(rows * rows_of * _PENALTY_BYTES)
    ranks = _NON_TORCH_RANKS if run.has_nvlink else _NON_TORCH_RANKS_OVER_PCIE
    return kept + ranks if layout.tensor > 1 else kept


def _nccl(layers: Sequence[Layer], layout: Parallel, rules: EngineProfile, run: RunSettings) -> Range:
    """Communicators of the tensor-parallel group and, for a mixture, of the expert group."""
    if layout.tensor == 1:
        return ZERO
    if not run.has_nvlink:
        return _NCCL_OVER_PCIE
    one = _NCCL_A_GROUP + _NCCL_A_RANK * layout.tensor
    return one * 2 if rules.has_expert_group and any(map(_has_experts, layers)) else one


def _graphs(
    arch: Architecture, layers: Sequence[Layer], layout: Parallel, rules: EngineProfile, run: RunSettings, is_v2: bool
) -> Range:
    """What is set aside for CUDA graphs (in the budget), or what their capture takes (beside it). Eager: none.

    Set aside: `v1/worker/gpu/cudagraph_utils.py`, profile_cudagraph_memory, which tends to twice of what is then taken.
    """
    if run.enforce_eager:
        return ZERO
    sizes = graph_sizes(rules, run.max_num_seqs, run.is_blackwell)
    if rules.graphs_in_budget:
        copies = _POOL_OF_RUNNER["V2" if is_v2 else "V1"]
        held = max((_pooled(layer, layout) for layer in layers), default=0.0)
        pool = copies * max(sizes) * dtype_bytes(arch.dtype) * held
        return _GRAPH_FLOOR + _spread(pool, _POOL_SPREAD) + _GRAPH_PER_LAYER_AND_SIZE * (len(layers) * len(sizes))
    captured = _CAPTURED_FLOOR + _CAPTURED_PER_LAYER_AND_SIZE * (len(layers) * len(sizes))
    if layout.tensor > 1 and not run.has_peer_to_peer:
        captured += _CAPTURED_WITHOUT_PEER
    return captured


def _pooled(layer: Layer, layout: Parallel) -> float:
    """Numbers a token of a layer's MLP on one rank: its width, or those of the experts that a token sees."""
    if layer.mlp is None:
        return 0.0
    width = layer.mlp.top_k * layer.mlp.intermediate if layer.mlp.n_experts else layer.mlp.intermediate
    return width / layout.tensor
