"""What a launch is planned from and what it comes to, as frozen types. Every module of this package is pure."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from penstock.models import ModelFacts
from penstock.spec.deployment import Parallel, Scalar, Sleep

Device = Literal["cpu", "cuda"]


class Need(msgspec.Struct, frozen=True):
    """Memory of one replica by use, in bytes over all its ranks. `overhead_bytes` is an estimate."""

    weights_bytes: int
    kv_cache_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.overhead_bytes


class Forecast(msgspec.Struct, frozen=True):
    """KV cache that the planner expects on one GPU; `key` names what the engine's own numbers are kept under."""

    key: Key
    kv_cache_gib: float


class Throughput(msgspec.Struct, frozen=True):
    """What one replica can: tokens/s of prompts and of answers when it does only that, and requests that run at once.
    Estimates."""

    prefill_tokens_s: float
    decode_tokens_s: float
    max_running: int


class Plan(msgspec.Struct, frozen=True):
    """All that an engine's command line is made of, the same for every replica of a deployment. A replica takes
    `n_nodes` machines with equally many ranks on each; `forecast` is None for what is not modelled."""

    deployment: str
    served_names: tuple[str, ...]
    model: ModelFacts
    engine: str
    engine_version: str
    device: Device
    layout: Parallel
    executor: Literal["ray", "mp"]
    max_model_len: int
    max_num_seqs: int
    need: Need
    n_threads: int
    gpu_memory_utilization: float
    args: dict[str, Scalar | list[Scalar]]
    env: dict[str, str]
    start_timeout_s: float
    stall_s: float
    drain_s: float
    forecast: Forecast | None = None
    warnings: tuple[str, ...] = ()
    n_nodes: int = 1
    join_timeout_s: float = 300.0
    ray_dashboard_host: str = "127.0.0.1"
    network: str | None = None  # CIDR of the network that the nodes use among themselves
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    traces_endpoint: str | None = None  # of OTLP over HTTP
    gpu_hour_usd: float | None = None
    sleep: Sleep | None = None
    throughput: Throughput | None = None

    @property
    def ranks_each(self) -> int:
        return self.layout.n_ranks // self.n_nodes


def kv_bytes_per_token(model: ModelFacts, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache for one token over all layers of a full-attention model.
    2 (K and V) * layers * kv_heads * head_dim * dtype_bytes. Llama-3.1-70B in bf16: 2 * 80 * 8 * 128 * 2 = 327_680."""
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * dtype_bytes


class Key(msgspec.Struct, frozen=True):
    """All that changes the memory of an engine besides weights and layout. Equal keys: equal measurements.

    `model` is a fingerprint of its config.json. The share of the GPU and the longest request change only the KV cache,
    which follows from the rest. `more` are flags and variables whose effect planning does not know.
    """

    model: str
    gpu: str
    engine_version: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int | None = None
    prefix_caching: bool = True
    enforce_eager: bool = False
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:20]
