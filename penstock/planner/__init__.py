"""What a launch is planned from and what it comes to, as frozen types. `launch` fills them, `solve` sizes GPUs.

Every module of this package is pure: model facts come from `models` and `facts`, machine facts from a target.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from penstock.models import ModelFacts
from penstock.spec.deployment import Parallel, Scalar

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
    """What the planner expects of the engine on one GPU, to be compared with what the engine reports; in GiB.

    `key` names what the engine's own numbers are kept under, for the next start.
    """

    key: Key
    kv_cache_gib: float


class Plan(msgspec.Struct, frozen=True):
    """All that an engine's command line is made of. One plan serves every replica of a deployment.

    A replica takes `n_nodes` machines with equally many of its ranks on each. `forecast` is None on the CPU and for
    what the planner does not model; `warnings` are for people.
    """

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

    @property
    def ranks_each(self) -> int:
        """Ranks on each node."""
        return self.layout.n_ranks // self.n_nodes


def kv_bytes_per_token(model: ModelFacts, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache for one token over all layers of a full-attention model.

    2 (K and V) * layers * kv_heads * head_dim * dtype_bytes.
    Llama-3.1-70B in bf16: 2 * 80 * 8 * 128 * 2 = 327_680.
    """
    return 2 * model.n_layers * model.n_kv_heads * model.head_dim * dtype_bytes


class Key(msgspec.Struct, frozen=True):
    """All that moves the memory of an engine beside weights, but for the layout. Equal keys: equal measurements.

    `model` is a fingerprint of its config.json. The engine's share of the GPU and the longest request are not in it:
    they move the KV cache, which follows from the rest. `more` are the flags and variables that planning does not
    know: whether they move memory is not known either.
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
        """The key as the name of a file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:20]
