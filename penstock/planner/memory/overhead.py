"""Memory of a GPU other than weights and KV cache, as low / likely / high.

`activation` is transient: the larger of the largest batch's forward pass and the sampler over max_num_seqs rows.
`workspace` are the MoE kernels' buffers, `non_torch` what the CUDA libraries and the allocator keep, `nccl` the
communicators. Constants are fits to start-up logs unless a comment says otherwise
(docs/measurements/plan-accuracy.md)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.planner.architecture import Architecture, Layer, dtype_bytes
from penstock.planner.engine_versions import EngineProfile, graph_sizes
from penstock.planner.memory.kv_pages import kv_heads_on_rank
from penstock.planner.memory.tensors import split_layers
from penstock.planner.ranges import ZERO, Range, exact, gib, highest
from penstock.spec.deployment import Parallel
from penstock.text import MIB

_MULTIMODAL = gib(0.3, 0.5, 1.0)  # a tower with pictures of one size, and its cache of encoder outputs
# Towers that take any size (Qwen's) are profiled with one picture of 16,384 tokens, each of 2 x 2 patches.
_ENCODER_TOKENS, _PATCHES_A_TOKEN = 16_384, 4
_NON_TORCH_RUNNER_V2 = gib(0.1, 0.18, 0.3)  # without its penalty counts
_NON_TORCH_RANKS, _NON_TORCH_RANKS_OVER_PCIE = gib(0.4, 0.75, 1.0), gib(0.0, 0.1, 0.6)
_NCCL_A_GROUP, _NCCL_A_RANK = gib(0.1, 0.25, 0.5), gib(0.1, 0.23, 0.45)
_NCCL_OVER_PCIE = gib(0.05, 0.12, 0.3)
# Estimated graphs: a part for each layer and size, and a pool by what a layer holds of a token.
_GRAPH_FLOOR = gib(0.05, 0.1, 0.3)
_GRAPH_PER_LAYER_AND_SIZE = Range(0.13 * MIB, 0.26 * MIB, 0.4 * MIB)
_POOL_RUNNER_V1, _POOL_RUNNER_V2 = 14.0, 36.0
_CAPTURED_FLOOR = gib(0.05, 0.1, 0.4)  # graphs outside the budget
_CAPTURED_PER_LAYER_AND_SIZE = Range(0.02 * MIB, 0.2 * MIB, 0.4 * MIB)
_CAPTURED_WITHOUT_PEER = gib(0.4, 2.4, 6.6)
_FORWARD_SPREAD, _SAMPLER_SPREAD, _WORKSPACE_SPREAD = (0.85, 1.25), (0.9, 1.25), (0.4, 2.5)
_ENCODER_SPREAD, _POOL_SPREAD = (0.7, 1.4), (0.5, 1.5)
_SAMPLER_BYTES_RUNNER_V2 = 6.1  # an entry: logits in the model's dtype and in fp32
_PENALTY_BYTES = 4 + 1 / 8  # an entry: an int32 and a bit (`v1/worker/gpu/sample/penalties.py`)
_MOE_CHUNK = 32768  # tokens that an MoE layer sees at once (VLLM_FUSED_MOE_CHUNK_SIZE)


class RunSettings(msgspec.Struct, frozen=True):
    max_num_batched_tokens: int
    max_num_seqs: int
    enforce_eager: bool = False
    has_peer_to_peer: bool = True
    has_nvlink: bool = True
    is_blackwell: bool = False

    @property
    def n_rows(self) -> int:
        """Rows that the sampler sees at once."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Overhead(msgspec.Struct, frozen=True):
    """Bytes on one GPU of a pipeline stage. `graphs` and `nccl` are in the budget or outside it."""

    activation: Range
    workspace: Range
    non_torch: Range
    graphs: Range
    nccl: Range
    graphs_in_budget: bool
    nccl_in_budget: bool

    @property
    def in_budget(self) -> Range:
        """What total x utilization pays for in addition to weights and KV cache."""
        inside = self.activation + self.workspace + self.non_torch
        inside = inside + self.graphs if self.graphs_in_budget else inside
        return inside + self.nccl if self.nccl_in_budget else inside

    @property
    def outside_budget(self) -> Range:
        """What must fit in total x (1 - utilization)."""
        outside = ZERO if self.graphs_in_budget else self.graphs
        return outside if self.nccl_in_budget else outside + self.nccl


def overhead(arch: Architecture, layout: Parallel, rules: EngineProfile, run: RunSettings, stage: int = 0) -> Overhead:
    """The estimate for one GPU of pipeline stage `stage` (0 is the first; the last one has the sampler).
    Llama-3.1-8B on one H200, vLLM 0.33 (8192 tokens, 1024 sequences): activation 0.90 GiB (logged 1.04), graphs 1.00
    (logged 0.92), non-torch 0.68 (logged 0.68)."""
    layers = [arch.layers[index] for index in split_layers(arch.n_layers, layout.pipeline)[stage]]
    is_last = stage == layout.pipeline - 1
    workspace = _workspace(arch, layers, layout, run)
    is_v2 = rules.uses_runner_v2(arch.is_moe_or_hybrid)
    # The embedded inputs are kept by the second runner.
    widest = max((_width(layer, layout.tensor) for layer in layers), default=0.0)
    numbers = (4 if is_v2 and stage == 0 else 3) * arch.hidden + widest
    forward = _spread(run.max_num_batched_tokens * dtype_bytes(arch.dtype) * numbers, _FORWARD_SPREAD)
    uses = [forward if rules.keeps_moe_workspace else forward + workspace]
    if is_last:
        # Rows x vocabulary x bytes an entry, and the hidden states of the batch, which live until the sampler is done.
        entries = run.n_rows * arch.vocab * (_SAMPLER_BYTES_RUNNER_V2 if is_v2 else rules.sampler_bytes)
        batch = run.max_num_batched_tokens * arch.hidden * dtype_bytes(arch.dtype)
        uses.append(_spread(entries + batch, _SAMPLER_SPREAD))
    activation = highest(uses)
    if arch.is_multimodal and stage == 0:
        activation = _with_encoder(activation, arch, layout)
    return Overhead(
        activation=activation,
        workspace=workspace if rules.keeps_moe_workspace else ZERO,
        non_torch=_non_torch(rules, run, layout, is_v2=is_v2, vocab=arch.vocab if is_last else 0),
        graphs=_graphs(arch, layers, layout, rules, run, is_v2),
        nccl=_nccl(layers, layout, run),
        graphs_in_budget=rules.graphs_in_budget,
        nccl_in_budget=rules.nccl_in_budget,
    )


def _spread(value: float, factors: tuple[float, float]) -> Range:
    return Range(value * factors[0], value, value * factors[1])


def _width(layer: Layer, tensor: int) -> float:
    """Numbers a token between input and output of a layer's widest part, on one rank."""
    parts = [0.0]
    if layer.mlp is not None:
        width = layer.mlp.shared_intermediate if layer.mlp.n_experts else layer.mlp.intermediate
        parts.append((3 if layer.mlp.is_gated else 2) * width / tensor)
    if layer.attention is not None:
        attention = layer.attention
        heads = attention.n_heads / tensor
        kv_heads = heads if attention.kind == "mla" else kv_heads_on_rank(attention.n_kv_heads, tensor)
        parts.append((heads + kv_heads) * (attention.head_dim_k + attention.head_dim_v))
    if layer.state is not None:
        parts.append(2 * (layer.state.conv_channels + layer.state.n_heads * layer.state.head_dim_v) / tensor)
    return max(parts)


def _workspace(arch: Architecture, layers: Sequence[Layer], layout: Parallel, run: RunSettings) -> Range:
    """Two buffers of tokens x top_k x max(2 I, H) numbers, I the rank's part of an expert's width."""
    mixtures = [layer.mlp for layer in layers if layer.mlp is not None and layer.mlp.n_experts]
    if not mixtures:
        return ZERO
    tokens = run.max_num_batched_tokens
    likely_tokens = min(tokens * layout.data, max(tokens, _MOE_CHUNK))
    cut = 1 if layout.expert else layout.tensor * layout.data
    widest = max(mlp.top_k * max(2 * mlp.intermediate / cut, arch.hidden) for mlp in mixtures)
    return _spread(2 * likely_tokens * widest * dtype_bytes(arch.dtype), _WORKSPACE_SPREAD)


def _with_encoder(activation: Range, arch: Architecture, layout: Parallel) -> Range:
    """The larger of the forward pass (beside the encoder's outputs) and the vision encoder before it.
    Qwen's holds, of each patch, pixels, three hidden states, the projections of its attention and the MLP's width."""
    shapes = {tensor.name: tensor.shape for tensor in arch.towers}
    if not {"vision.patch_embed", "vision.qkv.weight", "vision.up.weight"} <= shapes.keys():
        return activation + _MULTIMODAL
    hidden, pixels = shapes["vision.patch_embed"]
    cut = shapes["vision.qkv.weight"][0] + shapes["vision.up.weight"][0]
    number = dtype_bytes(arch.dtype)
    patches = _ENCODER_TOKENS * _PATCHES_A_TOKEN
    encoder = _spread(patches * number * (pixels + 3 * hidden + cut / layout.tensor), _ENCODER_SPREAD)
    return highest([activation + exact(_ENCODER_TOKENS * arch.hidden * number), encoder])


def _non_torch(rules: EngineProfile, run: RunSettings, layout: Parallel, *, is_v2: bool, vocab: int) -> Range:
    """`vocab`: of the GPU that samples with the second runner, which keeps the penalties' counts; else 0."""
    kept = gib(*rules.non_torch_gib)
    if not rules.measures_consumed:
        return kept
    if is_v2:
        kept = _NON_TORCH_RUNNER_V2 + exact(run.n_rows * vocab * _PENALTY_BYTES)
    ranks = _NON_TORCH_RANKS if run.has_nvlink else _NON_TORCH_RANKS_OVER_PCIE
    return kept + ranks if layout.tensor > 1 else kept


def _nccl(layers: Sequence[Layer], layout: Parallel, run: RunSettings) -> Range:
    """Communicators of the tensor-parallel group and, for a mixture, of the expert group."""
    if layout.tensor == 1:
        return ZERO
    if not run.has_nvlink:
        return _NCCL_OVER_PCIE
    group = _NCCL_A_GROUP + _NCCL_A_RANK * layout.tensor
    return group * 2 if any(layer.has_experts for layer in layers) else group


def _graphs(
    arch: Architecture, layers: Sequence[Layer], layout: Parallel, rules: EngineProfile, run: RunSettings, is_v2: bool
) -> Range:
    """What is set aside for CUDA graphs (`profile_cudagraph_memory`), or what capture takes outside the budget."""
    if run.enforce_eager:
        return ZERO
    sizes = graph_sizes(run.max_num_seqs, rules.largest_graph_blackwell if run.is_blackwell else 512)
    if rules.graphs_in_budget:
        # Numbers a token of a layer's MLP on one rank: its width, or those of the experts that a token sees.
        widths = (mlp.intermediate * (mlp.top_k if mlp.n_experts else 1) for layer in layers if (mlp := layer.mlp))
        held = max(widths, default=0) / layout.tensor
        pool = (_POOL_RUNNER_V2 if is_v2 else _POOL_RUNNER_V1) * max(sizes) * dtype_bytes(arch.dtype) * held
        return _GRAPH_FLOOR + _spread(pool, _POOL_SPREAD) + _GRAPH_PER_LAYER_AND_SIZE * (len(layers) * len(sizes))
    captured = _CAPTURED_FLOOR + _CAPTURED_PER_LAYER_AND_SIZE * (len(layers) * len(sizes))
    if layout.tensor > 1 and not run.has_peer_to_peer:
        captured += _CAPTURED_WITHOUT_PEER
    return captured
