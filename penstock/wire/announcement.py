"""What a node announces to the gateway about its replica, and what the controller reads back."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Literal

import msgspec

from penstock.errors import PenstockError

ReplicaState = Literal[
    "queued",
    "starting",
    "loading",
    "warming",
    "ready",
    "busy",
    "sleeping",
    "waking",
    "stalled",
    "restarting",
    "stopping",
    "failed",
]
# What gets requests: a busy one, whose /health is silent while it works, only where no other is ready.
ACTIVE = ("ready", "busy")
# What serves: a sleeping replica takes requests too, it only lets the first one wait.
SERVING = (*ACTIVE, "sleeping", "waking")
UPSTREAM = "upstream-"  # how the names of engines begin that penstock did not start
ASLEEP = "asleep"  # how the stage of a replica begins that has fallen asleep
SLEEPLESS = "does not sleep"  # how the reason of a ready replica begins that should sleep and cannot


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a start has come, None where the engine does not report it. `stage` is a word for people."""

    stage: str
    shards_done: int | None = None
    shards_total: int | None = None
    bytes_per_s: float | None = None
    eta_s: float | None = None
    fraction: float | None = None


class Restart(msgspec.Struct, frozen=True):
    """One time the engine was brought back: when (Unix seconds) and why."""

    at: float
    reason: str


class Process(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process that stays recognisable after its pid is reused: `started_at` is in seconds since boot."""

    pid: int
    started_at: float
    role: str = ""


class GatewayAddress(msgspec.Struct, frozen=True):
    """gateway/address.json: where the newest gateway serves, "host:port" each; `admin` the best first.

    `admin` is empty where no other machine reaches that. `public_url`: where clients outside its network reach it,
    `public_page_url`: the chat page. `login_url`, `login_page_url`: the same behind a `login`, which that field
    describes for people; programs of ours take a tunnel.
    """

    unit: str
    listen: str
    admin: tuple[str, ...]
    public_url: str | None = None
    public_page_url: str | None = None
    login_url: str | None = None
    login_page_url: str | None = None
    login: str | None = None

    @property
    def best(self) -> str:
        """The best admin address.  Raises PenstockError where there is none."""
        if not self.admin:
            raise PenstockError(f"the gateway at {self.listen} has its admin address on loopback")
        return self.admin[0]


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine counts itself: requests running and waiting, the part of its KV cache in use (0 to 1), and since
    it started the tokens of prompts and answers, and how many of the former its cache had. `at_s`: when it was asked,
    in seconds of the node's monotonic clock."""

    running: float
    waiting: float = 0.0
    kv_use: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    at_s: float = 0.0


class GpuReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU of a replica, read by its node. None: the driver does not report it (inside MIG, on some cards).

    `utilization`: share of the last second in which a kernel ran, near 1 with one request already. `energy_joules`:
    since the driver was loaded. `throttle`: why its clocks are lowered now, in NVML's words. `xids`: error codes since
    the node started, newest last; `n_xids` counts all.
    """

    index: int
    uuid: str
    name: str = ""
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    n_xids: int = 0


class MachineReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """One machine of a replica and the replica's GPUs there, read once a second. Network bytes: since it booted.

    `disk_*`: of the file system with the node's folder. `dcgm_port`: where a DCGM exporter answers on it.
    """

    host: str
    cpu_use: float | None = None
    n_cpus: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None
    gpus: tuple[GpuReading, ...] = ()
    dcgm_port: int | None = None


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of a replica that is cut over several. `state`: "waiting", "here", "gone"; `address` and `interface`
    are those that its ranks talk over."""

    rank: int
    host: str
    state: str
    address: str = ""
    interface: str = ""
    gpus: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str | None = None


class Post(msgspec.Struct, frozen=True):
    """What one node of a replica posts for the others. `instance` is new in every process, `epoch` in every start."""

    replica: str
    rank: int
    instance: str
    epoch: str
    content: dict[str, Any] = {}


class PostView(msgspec.Struct, frozen=True):
    post: Post
    age_s: float


class BoardView(msgspec.Struct, frozen=True):
    """The answer of POST /admin/board: the last post of every rank of that replica, by rank.

    `age_s` is the board's own: a rank that is missing from a young board may just not have spoken yet. `leave`: as in
    `AnnounceAnswer`, for the nodes that do not announce.
    """

    age_s: float
    posts: tuple[PostView, ...]
    leave: bool = False


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one replica, as its node sees it.

    `url` is the engine's base URL, once it listens, `host` its machine's name. Without a newer announcement within
    `lease_s` the replica gets no traffic. `restarts` holds the last ten, `n_restarts` counts all. `reason` says why the
    state is not what was asked for, `hint` what to do about it; `log_tail` is given with "failed". `load` is None when
    the engine does not report it. A replica of `weight` 2 gets twice the requests of weight 1. `adapters` are further
    names that it serves (LoRA). `nodes` is empty for a replica on one machine. `machines`: readings by rank.
    `start_s`: the seconds that each stage of the last start took. `max_model_len`: tokens of a prompt and its answer
    together. `input_modalities`: ("text", "image"); empty where it is not known. `loading`: what was measured of the
    weights' disk and how the engine loads from it, `carried`: of the compiled code of another node, for people.
    """

    replica: str
    model: str
    state: ReplicaState
    lease_s: float
    url: str | None = None
    host: str = ""
    progress: Progress | None = None
    reason: str | None = None
    hint: str | None = None
    n_restarts: int = 0
    restarts: tuple[Restart, ...] = ()
    processes: tuple[Process, ...] = ()
    shared_memory: tuple[str, ...] = ()
    log_tail: tuple[str, ...] = ()
    started_at: float | None = None
    ready_after_s: float | None = None
    engine: str = ""
    measured: dict[str, float] = {}
    load: EngineLoad | None = None
    weight: float = 1.0
    adapters: tuple[str, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    machines: tuple[MachineReading, ...] = ()
    start_s: dict[str, float] = {}
    max_model_len: int | None = None
    input_modalities: tuple[str, ...] = ()
    loading: str = ""
    carried: str = ""


class AnnounceAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of POST /admin/announce. `leave` orders the node to drain and exit, as SIGTERM does; `sleep` to put
    its engine to sleep when no request runs, `wake` to wake it at once. `heard`: bytes of its answers came since the
    last one, so it works, however silent its /health is."""

    draining: bool
    leave: bool = False
    sleep: bool = False
    wake: bool = False
    heard: bool = False


class ReplicaView(msgspec.Struct, frozen=True):
    """One row of GET /admin/replicas: the last announcement and what the gateway adds to it."""

    announcement: Announcement
    age_s: float
    is_alive: bool
    is_draining: bool
    in_flight: int
    is_ejected: bool = False


class LoadCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one gateway has counted since it started, `age_s` seconds ago. `gateway`: another name after each start.

    `arrivals`: requests, with `body_bytes` in their bodies; of those with known usage `known_bytes` held `known_tokens`
    that no cache had. `output_tokens`: of answers that have ended. `ttft_good` of `ttft_total` streams kept what was
    promised.
    """

    gateway: str
    age_s: float = 0.0
    arrivals: int = 0
    body_bytes: int = 0
    known_bytes: int = 0
    known_tokens: int = 0
    output_tokens: int = 0
    ttft_good: int = 0
    ttft_total: int = 0


class GatewayView(msgspec.Struct, frozen=True):
    """`counts` has a row for each gateway."""

    replicas: tuple[ReplicaView, ...]
    in_flight_total: int
    waiting: int
    requests_total: int
    counts: tuple[LoadCounts, ...] = ()


def engine_key(token: str) -> str:
    """The key of engines that listen beyond loopback: nodes and gateway make it from the token that both have."""
    return hmac.new(token.encode(), b"penstock engine key", hashlib.sha256).hexdigest()


def scrape_key(key: str) -> str:
    """The key that opens what watchers read of gateway and engines (/metrics, /dashboard), and changes nothing; made
    from `engine_key`."""
    return hmac.new(key.encode(), b"penstock scrape key", hashlib.sha256).hexdigest()
