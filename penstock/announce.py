"""What a node tells the gateway about its replica, on every target alike.

A ready engine announces itself to the gateway's admin address and renews a lease; the controller reads the same
facts back. No shared file system is needed. The gateway keeps announcements; it never starts or ends anything.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ReplicaState = Literal[
    "queued", "starting", "loading", "warming", "ready", "stalled", "restarting", "stopping", "failed"
]


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a start has come. `None` where the engine does not say.

    `stage` is a word for people ("imports", "weights", "kv cache", "graphs", "probe"); `eta_s` is an estimate.
    """

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
    """A process that stays recognisable after its pid is reused: pid and start (seconds since boot) together."""

    pid: int
    started_at: float
    role: str = ""


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine counts itself: requests running and waiting, and the part of its KV cache in use (0 to 1)."""

    running: float
    waiting: float = 0.0
    kv_use: float = 0.0


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one replica, as its node sees it.

    `url` is the engine's base URL, once it listens. `lease_s`: without a newer announcement in that time the
    replica gets no traffic. `restarts` holds the last ten; `n_restarts` counts all. `reason` says why the state
    is not what was asked for, `hint` what to do about it; `log_tail` is given with "failed". `load` is None when the
    engine does not say. A replica of `weight` 2 gets twice the requests of one of 1. `adapters` are further names that
    it serves (LoRA).
    """

    replica: str
    model: str
    state: ReplicaState
    lease_s: float
    url: str | None = None
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


class ReplicaView(msgspec.Struct, frozen=True):
    """One row of GET /admin/replicas: the last announcement and what the gateway adds to it."""

    announcement: Announcement
    age_s: float
    is_alive: bool
    is_draining: bool
    in_flight: int
    is_ejected: bool = False


class GatewayView(msgspec.Struct, frozen=True):
    """The answer of GET /admin/replicas."""

    replicas: tuple[ReplicaView, ...]
    in_flight_total: int
    waiting: int
    requests_total: int
