"""Whether one layout fits one machine: weights, overhead and KV cache put together, for `solve`. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import msgspec

from penstock.errors import NotModelled, UserError
from penstock.hardware.catalog import GpuFacts
from penstock.planner.architecture import Architecture, Layer
from penstock.planner.engine_versions import EngineProfile
from penstock.planner.memory import overhead as overhead_
from penstock.planner.memory.kv_blocks import KvPlan, groups_of, kv_plan
from penstock.planner.memory.kv_pages import CacheSettings, caches_of
from penstock.planner.memory.measured import MemoryMeasurement
from penstock.planner.memory.overhead import Overhead, RunSettings
from penstock.planner.memory.tensors import split_layers
from penstock.planner.memory.weights import Capability, Ledger, RankWeights, rank_weights
from penstock.planner.ranges import ZERO, Range, exact
from penstock.spec.deployment import Parallel
from penstock.text import GIB


class MemoryInputs(msgspec.Struct, frozen=True):
    """A model on a card with an engine's settings. `available_kv_bytes` replaces the estimate unless empty.
    `measured`: by layout, what earlier starts of the same model, card and settings reported."""

    arch: Architecture
    gpu: GpuFacts
    rules: EngineProfile
    cache: CacheSettings
    run: RunSettings
    total_bytes: int
    utilization: float
    available_kv_bytes: tuple[int, ...] = ()
    measured: Mapping[Parallel, MemoryMeasurement] = {}
    asked_seqs: int | None = None  # max_num_seqs, unless it is the engine's default
    sure_share: float | None = 0.95  # as in the request

    @property
    def budget_bytes(self) -> int:
        """Rounded up; the total is as the CUDA runtime reports it (`v1/worker/utils.py`, request_memory)."""
        return math.ceil(self.total_bytes * self.utilization)


class MemoryFit(msgspec.Struct, frozen=True):
    """One layout's memory. By stage: the fullest rank's weights, its overhead, the bytes left for KV cache.
    `refusal` None: the engine would start. `available` is empty when the bytes were given. `margin_bytes`: left for KV
    cache beyond one request of the longest length. `measured_on`: the day of the start that the overheads come from.
    `most_seqs`: the max_num_seqs that the blocks of a model with states surely allow; None: any."""

    layout: Parallel
    ranks: tuple[RankWeights, ...]
    weights: tuple[int, ...]
    overheads: tuple[Overhead, ...]
    available: tuple[Range, ...]
    kv: KvPlan | None
    refusal: str | None
    margin_bytes: float
    measured_on: str | None = None
    most_seqs: int | None = None

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def tightest(self) -> int:
        """The stage with the least likely KV cache."""
        return min(range(len(self.available)), key=lambda stage: self.available[stage].likely)


def capability(gpu: GpuFacts) -> Capability | None:
    """ "9.0" -> (9, 0); None for AMD cards."""
    if gpu.compute_capability is None:
        return None
    major, minor = gpu.compute_capability.split(".")
    return int(major), int(minor)


def measured_overhead(estimate: Overhead, measurement: MemoryMeasurement, weights_bytes: int) -> Overhead:
    """The overhead as an engine reported it, so that the KV cache comes out as the engine had it.
    What it consumed beyond the weights counted here is non-torch memory, NCCL's part included."""
    assert measurement.consumed_gib is not None and measurement.peak_gib is not None, "asked only when it has parts"
    # The estimate for graphs is printed also when it was switched off, and is then not in the peak.
    graphs_gib = min(measurement.graphs_gib, measurement.peak_gib)
    return msgspec.structs.replace(
        estimate,
        activation=exact(round((measurement.peak_gib - graphs_gib) * GIB)),
        workspace=ZERO,
        non_torch=exact(max(0, round(measurement.consumed_gib * GIB) - weights_bytes)),
        graphs=exact(round(graphs_gib * GIB)),
        nccl=ZERO if estimate.nccl_in_budget else estimate.nccl,
    )


class Memory:
    """`fit` of every layout for the same inputs; each part is kept by the sizes that move it."""

    def __init__(self, inputs: MemoryInputs) -> None:
        self.inputs = inputs
        # Which layers are alike, by number: a model repeats a few kinds, and numbers are cheaper to compare.
        kinds: dict[Layer, int] = {}
        self._kinds = [kinds.setdefault(layer, len(kinds)) for layer in inputs.arch.layers]
        self._has_experts = any(layer.has_experts for layer in inputs.arch.layers)
        self.fit = functools.cache(self._fit)
        card, ledger = capability(inputs.gpu) or (0, 0), Ledger(inputs.arch)
        weights = functools.partial(rank_weights, inputs.arch, capability=card, ledger=ledger)
        self._rank_weights = functools.cache(weights)
        self._overheads = functools.cache(self._overheads_of)
        self._cache_groups = functools.cache(
            lambda tensor: groups_of(caches_of(inputs.arch, inputs.rules, inputs.cache, tensor), inputs.rules)
        )

    def weights(self, layout: Parallel) -> tuple[RankWeights, ...]:
        """One entry a rank class; data ranks of a dense model are copies."""
        if self._has_experts or layout.data == 1:
            return self._rank_weights(layout)
        ranks = self._rank_weights(msgspec.structs.replace(layout, data=1))
        return tuple(msgspec.structs.replace(rank, n_ranks=rank.n_ranks * layout.data) for rank in ranks)

    def _overheads_of(self, layout: Parallel) -> tuple[Overhead, ...]:
        """By stage; stages in the middle with as many layers of the same kinds are alike."""
        arch, rules, run = self.inputs.arch, self.inputs.rules, self.inputs.run
        known: dict[tuple[bool, bool, int, frozenset[int]], Overhead] = {}
        overheads = []
        for stage, layers in enumerate(split_layers(arch.n_layers, layout.pipeline)):
            kinds = frozenset(self._kinds[layers.start : layers.stop])
            alike = (stage == 0, stage == layout.pipeline - 1, len(layers), kinds)
            if alike not in known:
                known[alike] = overhead_.overhead(arch, layout, rules, run, stage)
            overheads.append(known[alike])
        return tuple(overheads)

    def _fit(self, layout: Parallel) -> MemoryFit:
        inputs, ranks = self.inputs, self.weights(layout)
        stages = range(layout.pipeline)
        weights = tuple(max(rank.total_bytes for rank in ranks if rank.stage == stage) for stage in stages)
        if inputs.available_kv_bytes:
            fit = MemoryFit(layout, ranks, weights, (), (), None, None, 0.0)
            return self._with_cache(fit, inputs.available_kv_bytes)
        overheads = self._overheads(layout if self._has_experts else Parallel(layout.tensor, layout.pipeline))
        measurement, day = inputs.measured.get(layout), None
        if measurement is not None and measurement.has_parts:
            day = measurement.day
            pairs = zip(overheads, weights, strict=True)
            overheads = tuple(measured_overhead(estimate, measurement, own) for estimate, own in pairs)
        pairs = zip(overheads, weights, strict=True)
        left = tuple(estimate.in_budget.left_of(inputs.budget_bytes - own) for estimate, own in pairs)
        fit, refusal = MemoryFit(layout, ranks, weights, overheads, left, None, None, 0.0, day), None
        if left[fit.tightest].likely <= 0:
            refusal = self._weights_refusal(weights[fit.tightest], overheads[fit.tightest])
        return self._with_cache(fit, tuple(max(0, int(stage.likely)) for stage in left), refusal)

    def _with_cache(self, known: MemoryFit, available: tuple[int, ...], refusal: str | None = None) -> MemoryFit:
        inputs = self.inputs
        try:
            groups = self._cache_groups(known.layout.tensor)
            kv = kv_plan(inputs.arch, known.layout, inputs.rules, inputs.cache, available, groups)
        except NotModelled:
            raise
        except UserError as error:
            return msgspec.structs.replace(known, refusal=error.message, margin_bytes=float("-inf"))
        margin = min([stage.likely for stage in known.available] or available) - kv.request_bytes
        refusal, asked = refusal or kv.refusal, inputs.asked_seqs or 0
        most = None if refusal else self._most_seqs(kv, known.available)
        if most is not None and asked > kv.num_blocks:
            refusal = f"max_num_seqs {asked:,} is over the {kv.num_blocks:,} cache blocks of its states, take {most:,}"
        return msgspec.structs.replace(known, kv=kv, refusal=refusal, margin_bytes=margin, most_seqs=most)

    def _most_seqs(self, kv: KvPlan, available: tuple[Range, ...]) -> int | None:
        """vLLM captures no graph for more requests than blocks (`config/compilation.py`, vllm#38270)."""
        if self.inputs.sure_share is None or not any(layer.state for layer in self.inputs.arch.layers):
            return None
        # Another start may measure a little less; below a half the engine is too tight to promise anything.
        sure = min([self.inputs.sure_share, *(stage.low / stage.likely for stage in available)])
        return max(1, int(kv.num_blocks * max(0.5, sure)))

    def _weights_refusal(self, weights: int, estimate: Overhead) -> str:
        inputs = self.inputs
        room = f"{inputs.budget_bytes / GIB:.2f} GiB ({inputs.utilization:g} of {inputs.total_bytes / GIB:.2f})"
        if weights >= inputs.budget_bytes:
            return f"weights take {weights / GIB:.2f} GiB of a GPU, the engine may use {room}"
        return (
            f"weights take {weights / GIB:.2f} GiB of a GPU and the engine's own needs about "
            f"{estimate.in_budget.likely / GIB:.2f}; it may use {room}, nothing is left for KV cache"
        )
