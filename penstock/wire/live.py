"""What watchers of a deployment read: `GET /dashboard/live` of its gateway, for the page, `top` and load tests.

The gateway makes it from announcements, its own counts and what the controller posts (`DeploymentNews`). Rates are per
second over the last 5 s, quantiles over the last minute, both from differences of counters and of buckets; None means
that nothing was measured. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.wire.announcement import MachineReading, Progress

HISTORY_S = 3600.0
PERIOD_S = 5.0  # between two rows of the history
N_SLOW = 20  # slow requests in one snapshot


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of events.jsonl. `who`: user@host that asked for it. `seconds`: of a start, by stage."""

    at: float
    event: str
    text: str
    replica: str | None = None
    who: str | None = None
    seconds: dict[str, float] = {}


class DeploymentNews(msgspec.Struct, frozen=True):
    """What only the controller knows; the body of POST /admin/news. `states`: number of replicas by state.

    `ready_in_s`: seconds until the next replica is expected to be ready, where none is and one starts; `failure`: why
    the last start failed.
    """

    deployment: str
    phase: str
    desired_replicas: int
    states: dict[str, int]
    n_restarts: int = 0
    reason: str | None = None
    events: tuple[Event, ...] = ()  # the newest last
    ready_in_s: float | None = None
    failure: str | None = None


class Rates(msgspec.Struct, frozen=True):
    """The deployment at one moment. `waiting`: held in the gateway, `engine_waiting`: in engines. Shares are 0 to 1."""

    at: float
    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_s_p50: float | None = None
    ttft_s_p99: float | None = None
    itl_s_p50: float | None = None
    itl_s_p99: float | None = None
    in_flight: int = 0
    waiting: int = 0
    engine_waiting: float = 0.0
    kv_use: float | None = None  # of the fullest replica
    n_ready: int = 0
    n_desired: int | None = None
    gpu_use: float | None = None  # mean
    power_watts: float | None = None


class ReplicaLive(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica. `up_s`: since it was ready; `cache_hits`: share of prompt tokens that were cached."""

    replica: str
    model: str
    state: str
    host: str = ""
    engine: str = ""
    reason: str | None = None
    progress: Progress | None = None
    in_flight: int = 0
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_s_p50: float | None = None
    ttft_s_p99: float | None = None
    itl_s_p50: float | None = None
    itl_s_p99: float | None = None
    cache_hits: float | None = None
    n_restarts: int = 0
    up_s: float | None = None
    is_draining: bool = False
    is_ejected: bool = False
    machines: tuple[MachineReading, ...] = ()


class Attainment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The promises of `workload` and the share of requests of the last hour that kept them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttft_share: float | None = None
    tpot_share: float | None = None


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the last hour. `idle_share`: of the GPU time of ready replicas, the part in which no request ran.
    `joules_per_token`: GPU energy for each token of an answer."""

    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    idle_share: float | None = None
    joules_per_token: float | None = None


class KeyUse(msgspec.Struct, frozen=True):
    """Use of one key since the gateway started."""

    key: str
    model: str
    n_requests: int
    prompt_tokens: int
    output_tokens: int
    cost_usd: float | None = None


class SlowRequest(msgspec.Struct, frozen=True):
    """One of the slowest requests of the last hour and where its time went: held for a replica, in the gateway, until
    the engine's first byte, and from there to the end."""

    at: float
    request_id: str
    key: str
    model: str
    replica: str
    outcome: str
    status: int
    duration_s: float
    hold_s: float
    own_s: float
    first_byte_s: float | None
    stream_s: float | None
    prompt_tokens: int = 0
    output_tokens: int = 0
    trace_id: str | None = None


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event "snapshot" of the stream, once a second, and the answer to `?once`."""

    deployment: str
    at: float
    version: str
    now: Rates
    phase: str | None = None
    reason: str | None = None
    replicas: tuple[ReplicaLive, ...] = ()
    slo: Attainment = Attainment()
    cost: Cost = Cost()
    keys: tuple[KeyUse, ...] = ()
    slow: tuple[SlowRequest, ...] = ()
    events: tuple[Event, ...] = ()


class History(msgspec.Struct, frozen=True):
    """The event "history", which a stream begins with: a list of values for each field of `Rates`, oldest first."""

    period_s: float
    columns: dict[str, list[Any]]
