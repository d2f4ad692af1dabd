"""The question and the answer of `penstock plan`, as frozen types: `solve` fills them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.hardware import Links
from penstock.models import Facts
from penstock.planner.ranges import Range
from penstock.planner.speed.calibration import Calibrated
from penstock.planner.speed.estimate import Speed
from penstock.planner.users import Users
from penstock.spec.deployment import Parallel


class SizingRequest(msgspec.Struct, frozen=True):
    """What `penstock plan` was asked. None: the engine's or the planner's default.

    `gpu` is a catalogue id or a driver's name, `network` a catalogue id. `available_kv_gib` (one value, or one per
    pipeline stage) replaces the memory estimate. `more_args` (words of the engine's command line) and `environment`
    ("NAME=value") are passed on. `links` is how this machine joins its GPUs; None: as the catalogue says. `sure_share`:
    of the cache blocks of a model with states, those that will be there; None: it starts with any max_num_seqs.
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
    sure_share: float | None = 0.95

    @property
    def fixed_layout(self) -> Parallel | None:
        """The only layout to evaluate; absent sizes are 1. None: the planner chooses."""
        if (self.tensor, self.pipeline, self.data) == (None, None, None):
            return None
        return Parallel(self.tensor or 1, self.pipeline or 1, self.data or 1, self.expert)


class WeightsAnswer(msgspec.Struct, frozen=True):
    """`total_bytes` and `params` of one copy of the model; `per_gpu_gib` one value per rank class."""

    total_bytes: int
    params: int
    per_gpu_gib: tuple[float, ...]


class KvAnswer(msgspec.Struct, frozen=True):
    """As vLLM prints it for one data-parallel rank: `tokens` is its "GPU KV cache size", `max_concurrency` its "Maximum
    concurrency". `bytes_per_token` is of the whole model, `per_gpu_gib_one_request` of max_model_len."""

    bytes_per_token: float
    block_size: int
    num_blocks: int
    tokens: int
    max_concurrency: float
    largest_max_model_len: int
    per_gpu_gib_one_request: float


class MemoryAnswer(msgspec.Struct, frozen=True):
    """Of one GPU, the tightest. `total_gib` is what the CUDA runtime reports, `budget_gib` the engine's share of it."""

    total_gib: Range
    budget_gib: Range
    activation_gib: Range
    cuda_graph_gib: Range
    non_torch_gib: Range
    kv_cache_gib: Range


class SpeedAnswer(msgspec.Struct, frozen=True):
    ttft_ms: Range
    tpot_ms: Range
    output_tokens_per_s: Range
    requests_per_s: Range


def missed_targets(speed: Speed | None, ttft_ms: float | None, tpot_ms: float | None) -> tuple[str, ...]:
    """The targets that the likely speed misses: "tpot_ms 3 is missed: likely 7.6 ms (an estimate)"."""
    if speed is None:
        return ()
    rows = (("ttft_ms", ttft_ms, speed.ttft_ms), ("tpot_ms", tpot_ms, speed.tpot_ms))
    return tuple(
        f"{name} {target:g} is missed: likely {time.likely:.1f} ms (an estimate)"
        for name, target, time in rows
        if target and time.likely > target
    )


class RejectedLayout(msgspec.Struct, frozen=True):
    tensor: int
    pipeline: int
    data: int
    expert: bool
    reason: str


class RankMemory(msgspec.Struct, frozen=True):
    """The likely memory of one GPU of a rank class, in GiB: a bar. What is left to the card's total is the reserve.
    `unused_gib`: room inside the budget that this class cannot use because another class has less KV cache."""

    name: str
    n_gpus: int
    weights_gib: float
    kv_cache_gib: float
    activation_gib: float
    cuda_graph_gib: float
    non_torch_gib: float
    unused_gib: float = 0.0


class Lever(msgspec.Struct, frozen=True):
    """A change and what it would give. `flags` are what to add to `penstock plan`, `note` is the price, if any."""

    name: str
    flags: tuple[str, ...]
    fits: bool
    tokens: int
    max_concurrency: float
    note: str = ""


class Settings(msgspec.Struct, frozen=True):
    """What the engine would run with. `longest_model_len` is what the model's config allows (0: it does not say)."""

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


class StartTime(msgspec.Struct, frozen=True):
    """How long the next start may take, by `n_starts` earlier ones."""

    seconds: Range
    n_starts: int


class Sizing(msgspec.Struct, frozen=True):
    """The answer: the nearest legal layout where none fits, no layout where none is legal.

    `memory` is None when --available-kv-gib replaced the estimate. `measured_on`: the day of the earlier start whose
    values replace the estimates, if any. `missed`: the speed targets of the request that the answer does not meet.
    `start`: None before the first.
    """

    fits: bool
    reason: str
    settings: Settings
    layout: Parallel | None = None
    weights: WeightsAnswer | None = None
    kv: KvAnswer | None = None
    memory: MemoryAnswer | None = None
    speed: SpeedAnswer | None = None
    rejected: tuple[RejectedLayout, ...] = ()
    warnings: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    measured_on: str | None = None
    missed: tuple[str, ...] = ()
    start: StartTime | None = None
    # Not in the JSON: for the terminal view and the picture.
    ranks: tuple[RankMemory, ...] = ()
    levers: tuple[Lever, ...] = ()
    users: Users | None = None
    most_seqs: int | None = None  # what the cache blocks of a model with states allow, where all else fits
    is_refused: bool = False  # the engine would not start, whatever the memory


_VIEW_FIELDS = ("settings", "ranks", "levers", "users", "most_seqs", "is_refused")


def contract(sizing: Sizing) -> dict[str, Any]:
    """The JSON of `penstock plan --json`: the fields up to `start`, in this order."""
    plain: dict[str, Any] = msgspec.to_builtins(sizing)
    return {key: value for key, value in plain.items() if key not in _VIEW_FIELDS}


def stage_letter(stage: int) -> str:
    """Pipeline stages as letters: 0 -> "A", 25 -> "Z", 26 -> "AA"."""
    high, low = divmod(stage, 26)
    return (stage_letter(high - 1) if high else "") + chr(ord("A") + low)
