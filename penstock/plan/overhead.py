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

from penstock.plan.architecture import Architecture, Layer
from penstock.plan.pages import dtype_bytes, kv_heads_on_rank
from penstock.plan.profiles import EngineProfile, graph_sizes
from penstock.plan.ranges import ZERO, Range, exact, gib, highest
from penstock.plan.stages import split_layers
from penstock.spec import Parallel
from penstock.units import MIB

# Memory that a vision tower's profile run and its cache of encoder outputs take: 0.3-1 GiB (sizing.md 1.2).
_MULTIMODAL = gib(0.3, 0.5, 1.0)
# "non_torch_memory" of one GPU: 0.04-0.39 GiB in logs of 0.6.4 to 0.10; 0.13 in most of llm-d's table.
_NON_TORCH = gib(0.04, 0.13, 0.4)
# Since 0.21 what the allocator keeps counts too: 0.27 GiB (H100, 2026-10 log), 0.69 (our H200, 0.33).
_NON_TORCH_CONSUMED = gib(0.2, 0.45, 0.9)
# More than one rank: buffers of the custom all-reduce and FlashInfer's workspace; B200 TP4 logs 0.95 in all.
_NON_TORCH_RANKS = gib(0.05, 0.2, 0.6)
# NCCL a rank of the tensor-parallel group: 0.74 GiB non-torch at TP2 and 2.10 at TP8 (0.7 logs), 1.8-3.6 in vllm#10511.
_NCCL_PER_RANK = gib(0.15, 0.25, 0.45)
# Estimated graphs (counted since 0.21): 0.40 (H100) and 0.92 GiB (our H200) for Llama-3.1-8B with 51 sizes; 0.36-0.55
# for one to three sizes: a floor and a part for each layer and size.
_GRAPH_FLOOR = gib(0.1, 0.3, 0.5)
_GRAPH_PER_LAYER_AND_SIZE = Range(0.05 * MIB, 0.2 * MIB, 0.5 * MIB)
# Captured graphs (outside the budget before 0.21): 0.23, 0.45 (the two above), 0.67 GiB with 67 sizes.
_CAPTURED_FLOOR = gib(0.05, 0.1, 0.4)
_CAPTURED_PER_LAYER_AND_SIZE = Range(0.02 * MIB, 0.2 * MIB, 0.4 * MIB)
# Cards without peer-to-peer, two or more: 2.4-6.6 GiB on RTX 4090 x4 (vllm#7553, #11452).
_CAPTURED_WITHOUT_PEER = gib(0.4, 2.4, 6.6)
# The forward pass is a closed form: fits 20 logs within 15%; fused kernels can lower it, padding and copies raise it.
_FORWARD_SPREAD, _SAMPLER_SPREAD, _WORKSPACE_SPREAD = (0.85, 1.25), (0.9, 1.25), (0.4, 2.5)
# Tokens of other data-parallel ranks that an MoE layer sees at once: chunks of 32,768 (VLLM_FUSED_MOE_CHUNK_SIZE).
_MOE_CHUNK = 32768


class RunSettings(msgspec.Struct, frozen=True):
    """What the engine is told that moves the profile run, and what the GPU is like."""

    max_num_batched_tokens: int
    max_num_seqs: int
    enforce_eager: bool = False
    has_peer_to_peer: bool = True
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

    Llama-3.1-8B on one H200 with vLLM 0.33 (8192 tokens, 1024 sequences): activation 1.04 GiB (logged 1.04), graphs
    0.62 (logged 0.92), non-torch 0.45 (logged 0.69).
    """
    layers = [arch.layers[index] for index in split_layers(arch.n_layers, layout.pipeline)[stage]]
    is_mixed = any(layer.state is not None or (layer.mlp and layer.mlp.n_experts) for layer in arch.layers)
    workspace = _workspace(arch, layers, layout, run)
    forward = _spread(_forward_bytes(arch, layers, layout, run), _FORWARD_SPREAD)
    uses = [forward if rules.keeps_moe_workspace else forward + workspace]
    if stage == layout.pipeline - 1:
        uses.append(_spread(_sampler_bytes(arch, rules.sampler_bytes_of(is_mixed), run), _SAMPLER_SPREAD))
    activation = highest(uses)
    if arch.is_multimodal and stage == 0:
        activation += _MULTIMODAL
    non_torch = _NON_TORCH_CONSUMED if rules.measures_consumed else _NON_TORCH
    if layout.tensor > 1 and rules.measures_consumed:
        non_torch += _NON_TORCH_RANKS
    return Overhead(
        activation=activation,
        workspace=workspace if rules.keeps_moe_workspace else ZERO,
        non_torch=non_torch,
        graphs=_graphs(len(layers), layout, rules, run),
        nccl=_NCCL_PER_RANK * layout.tensor if layout.tensor > 1 else ZERO,
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


def _forward_bytes(arch: Architecture, layers: Sequence[Layer], layout: Parallel, run: RunSettings) -> float:
    """tokens x bytes x (3 H + the widest of a layer): residual, input and output, and what stands between.

    A gated MLP holds 3 I / tensor (gate, up, product), a plain one 2 I; attention its projections and its output.
    Llama-3.1-8B, 20,000 tokens, bf16: 20,000 x 2 x (3 x 4096 + 3 x 14336) = 2.06 GiB; vLLM 0.6.4 logged 2.07.
    """
    widest = max((_width(layer, layout.tensor) for layer in layers), default=0.0)
    return run.max_num_batched_tokens * dtype_bytes(arch.dtype) * (3 * arch.hidden + widest)


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

    Llama-3.1-8B, 1024 rows, 38.4 bytes (before 0.17): 4.76 GiB, as llm-d measured; 8 bytes (second runner): 1.04 GiB.
    """
    rows = min(run.max_num_seqs, run.max_num_batched_tokens)
    hidden = run.max_num_batched_tokens * arch.hidden * dtype_bytes(arch.dtype)
    return rows * arch.vocab * bytes_per_entry + hidden


def _graphs(n_layers: int, layout: Parallel, rules: EngineProfile, run: RunSettings) -> Range:
    """What is set aside for CUDA graphs (in the budget), or what their capture takes (beside it). Eager: none."""
    if run.enforce_eager:
        return ZERO
    n_graphs = n_layers * len(graph_sizes(rules, run.max_num_seqs, run.is_blackwell))
    if rules.graphs_in_budget:
        return _GRAPH_FLOOR + _GRAPH_PER_LAYER_AND_SIZE * n_graphs
    captured = _CAPTURED_FLOOR + _CAPTURED_PER_LAYER_AND_SIZE * n_graphs
    if layout.tensor > 1 and not run.has_peer_to_peer:
        captured += _CAPTURED_WITHOUT_PEER
    return captured
