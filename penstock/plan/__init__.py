"""What a launch is planned from and what it comes to, as frozen types. `launch` fills them, `solve` sizes GPUs.

Every module of this package is pure: model facts come from `models` and `facts`, machine facts from a target.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.plan.links import Links
from penstock.plan.measurement import Key
from penstock.spec import Parallel, Scalar

Device = Literal["cpu", "cuda"]


class ModelFacts(msgspec.Struct, frozen=True):
    """What planning needs to know of a model; read from its own files. Sizes in bytes, dtype included."""

    reference: str
    path: str
    form: Literal["safetensors", "gguf", "none"]
    architecture: str
    weights_bytes: int
    n_shards: int
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_position: int


class Gpu(msgspec.Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """One node as its target sees it. `memory_free_bytes` is what a new process could get without swapping.

    `versions`: of "python", "penstock", and of what is installed of "vllm", "ray", "torch"; empty when not asked.
    """

    host: str
    n_cpus: int
    memory_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    links: Links | None = None
    versions: dict[str, str] = {}


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
