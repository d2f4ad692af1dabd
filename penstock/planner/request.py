"""The question and the answer of `penstock plan`, as frozen types. No arithmetic: `solve` fills them.

`Sizing` up to `measured_on` is the JSON contract, field for field: what scripts read. The fields after it are for the
reader's eye (bars, levers, users) and never leave as JSON; `contract` cuts them off.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.hardware import Links
from penstock.models import Facts
from penstock.planner.ranges import Range
from penstock.planner.speed.calibration import Calibrated
from penstock.planner.users import Users
from penstock.spec.deployment import Parallel


class SizingRequest(msgspec.Struct, frozen=True):
    """Everything `penstock plan` was asked. None means: not asked, the engine's or the planner's default holds.

    `gpu` is a catalogue id or a driver's name for it, `network` a catalogue id. `layout` fixes the cut (evaluated
    alone); `tensor`, `pipeline`, `data` are the single sizes that were fixed, `expert` is True when asked for.
    `available_kv_gib` (one value, or one per pipeline stage) replaces the memory estimate. `more_args` (words of the
    engine's command line) and `environment` ("NAME=value") are handed on: planning does not know what they do. `links`
    is how this machine joins its GPUs, when it was asked; None: as the catalogue's card.
    """

    facts: Facts
    gpu: str
    gpus_per_node: int = 1
    nodes: int = 1
    network: str | None = None
    gpu_memory_gib: float | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    dtype: str | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    enforce_eager: bool = False
    engine_version: str | None = None
    available_kv_gib: tuple[float, ...] = ()
    input_tokens: int = 1000
    output_tokens: int = 200
    concurrency: int = 8
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    context_per_user: int | None = None
    think_time_s: float | None = None
    more_args: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    calibration: Calibrated | None = None
    links: Links | None = None

    @property
    def has_fixed_layout(self) -> bool:
        """Whether any of T, P, D was given: then that layout alone is evaluated, the absent ones being 1."""
        return any(size is not None for size in (self.tensor, self.pipeline, self.data))

    @property
    def fixed_layout(self) -> Parallel | None:
        """The one layout to evaluate, or None when the planner chooses."""
        if not self.has_fixed_layout:
            return None
        return Parallel(self.tensor or 1, self.pipeline or 1, self.data or 1, self.expert)


class WeightsAnswer(msgspec.Struct, frozen=True):
    """`total_bytes` and `params` of one copy of the model; `per_gpu_gib` one value per rank class."""

    total_bytes: int
    params: int
    per_gpu_gib: tuple[float, ...]


class KvAnswer(msgspec.Struct, frozen=True):
    """As vLLM computes and prints it, for one data-parallel rank.

    `bytes_per_token` of the whole model, every layer and KV head once (Llama-3.1-70B in bf16: 327,680); the pages of
    one GPU are in `per_gpu_gib_one_request`, for one request of max_model_len. `tokens` is what vLLM prints as "GPU KV
    cache size", `max_concurrency` as "Maximum concurrency"; `largest_max_model_len` is what one request could have.
    """

    bytes_per_token: float
    block_size: int
    num_blocks: int
    tokens: int
    max_concurrency: float
    largest_max_model_len: int
    per_gpu_gib_one_request: float


class MemoryAnswer(msgspec.Struct, frozen=True):
    """Of one GPU, the tightest; in GiB, where `overhead` has bytes.

    `total` is what the CUDA runtime reports, `budget` the engine's share of it.
    """

    total_gib: Range
    budget_gib: Range
    activation_gib: Range
    cuda_graph_gib: Range
    non_torch_gib: Range
    kv_cache_gib: Range


class SpeedAnswer(msgspec.Struct, frozen=True):
    """At the asked prompt, output and concurrency, over the whole deployment (all data ranks)."""

    ttft_ms: Range
    tpot_ms: Range
    output_tokens_per_s: Range
    requests_per_s: Range


class RejectedLayout(msgspec.Struct, frozen=True):
    """A layout that was not chosen; `reason` carries the number that refused it."""

    tensor: int
    pipeline: int
    data: int
    expert: bool
    reason: str


class RankMemory(msgspec.Struct, frozen=True):
    """The likely memory of one GPU of a rank class, in GiB: a bar. What is left to the card's total is the reserve.

    `unused_gib` is room inside the budget that this class cannot use because another class has less KV cache.
    """

    name: str
    n_gpus: int
    weights_gib: float
    kv_cache_gib: float
    activation_gib: float
    cuda_graph_gib: float
    non_torch_gib: float
    unused_gib: float = 0.0


class Lever(msgspec.Struct, frozen=True):
    """A change and what it would give. `flags` are what to add to `penstock plan`; the rest is the answer with them.

    `note` is the price ("needs a checkpoint in fp8"), if there is one.
    """

    name: str
    flags: tuple[str, ...]
    fits: bool
    tokens: int
    max_concurrency: float
    note: str = ""


class Settings(msgspec.Struct, frozen=True):
    """What the engine would run with: the request with every default filled in.

    `longest_model_len` is what the model's own config allows (0: it does not say).
    """

    engine_version: str
    gpu_name: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    dtype: str
    kv_cache_dtype: str
    quantization: str | None = None
    longest_model_len: int = 0


class Sizing(msgspec.Struct, frozen=True):
    """The answer. `layout` and what follows from it are None only when no layout is legal at all.

    When layouts are legal but none fits, the nearest one is the answer, with its numbers and `fits` False. `memory` is
    None when --available-kv-gib replaced the estimate, `speed` when there is none. `measured_on` is the day of the
    earlier start whose values replace the estimates of `memory`; None: they are estimates.
    """

    fits: bool
    reason: str
    layout: Parallel | None = None
    weights: WeightsAnswer | None = None
    kv: KvAnswer | None = None
    memory: MemoryAnswer | None = None
    speed: SpeedAnswer | None = None
    rejected: tuple[RejectedLayout, ...] = ()
    warnings: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    measured_on: str | None = None
    # Below: for the terminal view and the picture.
    settings: Settings | None = None
    ranks: tuple[RankMemory, ...] = ()
    levers: tuple[Lever, ...] = ()
    users: Users | None = None
    is_refused: bool = False  # the engine would not start, whatever the memory


_FOR_THE_EYE = ("settings", "ranks", "levers", "users", "is_refused")


def contract(sizing: Sizing) -> dict[str, Any]:
    """The JSON of `penstock plan --json`: exactly the fields of the contract, in its order."""
    plain: dict[str, Any] = msgspec.to_builtins(sizing)
    return {key: value for key, value in plain.items() if key not in _FOR_THE_EYE}


def stage_letter(stage: int) -> str:
    """Pipeline stages as letters: 0 -> "A", 25 -> "Z", 26 -> "AA"."""
    high, low = divmod(stage, 26)
    return (stage_letter(high - 1) if high else "") + chr(ord("A") + low)
