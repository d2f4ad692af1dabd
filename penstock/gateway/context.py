"""State that all requests of a gateway share, and what is done for all of them once a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections.engine import Pool
from penstock.gateway.metrics.counters import Counters
from penstock.gateway.retries import Retries
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import Replica, ReplicaTable, ResponseOwners
from penstock.gateway.slow_requests import SlowRequests
from penstock.gateway.trace_context import TRACEPARENT, Tracer
from penstock.wire.http1 import HOP_BY_HOP, SECRET
from penstock.world import REAL, World

# The gateway's own replace the peer's: the body is whole, the engine is another host. Secrets are for one hop.
OWN_HEADERS: Final = frozenset((b"host", b"content-length", b"expect", b"x-request-id")) | SECRET
WAKE: Final = b"/admin/wake"
HEARD: Final = b"/admin/heard"  # between workers alone
HEARD_S: Final = 1.0


class UnderWay(Protocol):
    """A request between its arrival and its end: `ForwardedRequest`, whose module imports this one."""

    def check(self, now: float) -> None: ...


class GatewayContext:
    """State shared by all requests.

    `dropped`: request headers that an engine does not get; `dropped_plain`: and those that let it compress its answer.
    """

    def __init__(
        self,
        config: GatewayConfig,
        replicas: ReplicaTable,
        queue: WaitingQueue,
        pool: Pool,
        counters: Counters,
        world: World = REAL,
    ) -> None:
        self.world = world
        self.now: Callable[[], float] = world.now
        self.unix: Callable[[], float] = world.unix
        self.replicas, self.queue, self.pool, self.counters = replicas, queue, pool, counters
        self.hold_s, self.holds_while_loading = config.hold_s, config.holds_while_loading
        self.needs_key = config.auth == "keys"
        self.allowed_origins = frozenset([origin.encode() for origin in config.allowed_origins])
        # Every request belongs to a trace then, and its engine gets our traceparent.
        self.tracer = Tracer(config.traces.sample, os.urandom) if config.traces is not None else None
        self.dropped = HOP_BY_HOP | OWN_HEADERS | {b"forwarded", b"x-real-ip"}
        if self.tracer is not None:
            self.dropped |= {TRACEPARENT}
        self.dropped_plain = self.dropped | {b"accept-encoding"}
        self.retries = Retries(replicas, counters)
        self.response_owners = ResponseOwners()
        self.under_way: set[UnderWay] = set()
        self.slow = SlowRequests()
        self.tell_workers: Callable[[bytes, bytes], None] = lambda *_: None  # the other ones, of an admin call

    def end(self, replica: Replica) -> None:
        """Ends a request on this replica: the next one that waits may have its place."""
        self.replicas.end(replica)
        if self.queue.waiting:
            self.queue.wake(replica.announcement.model, 1)

    def deadline(self, model: str, deadline: float, now: float) -> float:
        """Until when a request waits, or looks again: beyond `hold_s` while the first replica of a successor comes."""
        is_held = self.holds_while_loading and self.replicas.announced(model, now)
        return max(deadline, now + 1.0) if is_held else deadline

    def hear(self, replica: Replica, at: float) -> None:
        """A byte of an answer came: all workers know that a busy replica lives, whoever of them has its streams."""
        if at - replica.heard_at >= HEARD_S:
            replica.heard_at = at
            if replica.announcement.state == "busy":
                self.tell_workers(HEARD, msgspec.json.encode({"replica": replica.name}))

    def wake_sleeper(self, model: str, now: float) -> None:
        """Orders a sleeping replica to wake where requests need it. Any worker may answer its node, so all know it."""
        row = self.replicas.sleeper(model, now, self.queue.waiting_for(model))
        if row is not None:
            self.replicas.order(row.name, "wake")
            self.tell_workers(WAKE, msgspec.json.encode({"replica": row.name}))

    def look_after(self, now: float) -> None:
        """Once a second: looks after exchanges whose engine is silent, and lets waiting requests look again."""
        for request in tuple(self.under_way):
            request.check(now)
        for model in self.replicas.models:
            self.wake_sleeper(model.name, now)
            if self.replicas.ready(model.name, now):
                self.holds_while_loading = False
                self.queue.wake(model.name)
