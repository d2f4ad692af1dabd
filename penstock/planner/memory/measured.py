"""What an earlier start of an engine reported of its memory, and what it may replace. Types and arithmetic only.

vLLM's log gives, of one GPU: the budget (total x utilization), what was consumed after the profile run (weights and
all that is not PyTorch's), the peak of activations with the estimate for CUDA graphs, and what is left for KV cache.
Llama-3.1-8B on one H200, 0.33.0: 128.62 - 15.68 - 1.96 = 110.98 GiB."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.planner import Key
from penstock.spec.deployment import Parallel

# Under this share a difference between plan and engine is not worth a line.
_WORTH_SAYING = 0.05


class MemoryMeasurement(msgspec.Struct, frozen=True):
    """One start on a `day` ("2026-11-20", UTC): the engine's own numbers of its tightest GPU, in GiB.
    `planned_kv_gib` is what was expected of `kv_cache_gib`."""

    key: Key
    layout: Parallel
    day: str
    kv_cache_gib: float
    planned_kv_gib: float
    tokens: int | None = None
    max_concurrency: float | None = None
    weights_gib: float | None = None
    consumed_gib: float | None = None
    peak_gib: float | None = None
    graphs_gib: float = 0.0

    @property
    def has_parts(self) -> bool:
        """Whether it can replace the estimates. A pipeline's stages differ, and their log lines do not name theirs."""
        return self.layout.pipeline == 1 and self.consumed_gib is not None and self.peak_gib is not None


class Difference(msgspec.Struct, frozen=True):
    """KV cache of one GPU, planned and measured. `share` of the plan: -0.05 is 5% less."""

    planned_kv_gib: float
    measured_kv_gib: float
    share: float

    @property
    def is_worth_saying(self) -> bool:
        return abs(self.share) > _WORTH_SAYING


def difference(planned_kv_gib: float, reported: Mapping[str, float]) -> Difference | None:
    """The plan against what an engine reported of itself; None when it reported no KV cache."""
    measured_gib = reported.get("kv_cache_gib")
    if measured_gib is None or planned_kv_gib <= 0:
        return None
    return Difference(planned_kv_gib, measured_gib, measured_gib / planned_kv_gib - 1)
