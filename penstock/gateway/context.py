"""What every request under way shares, and what is done for all of them once a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.connections.engine import Pool
from penstock.gateway.metrics import Counters
from penstock.gateway.responses import Answer
from penstock.gateway.routing.health import RetryBudget
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import Replica, ReplicaTable, ResponseOwners
from penstock.wire.http1 import Headers, ResponseHead


class UnderWay(Protocol):
    """A request between its arrival and its end."""

    def end_if_forgotten(self, now: float) -> None:
        """Ends an exchange whose engine says that it works on nothing."""


class Entry(Protocol):
    """One request in the books: its key's limits, and the tokens that its response tells of."""

    body: bytes  # what the engine is sent
    strips_usage: bool  # the response must not be compressed

    def start(self) -> Answer | None:
        """Takes the request's share of its key's limits; an answer when there is none. `end` gives it back."""

    def headers(self) -> Headers:
        """For the response's head."""

    def begin(self, head: ResponseHead) -> None:
        """The response that the client gets begins."""

    def feed(self, data: bytes, is_end: bool) -> bytes:
        """A piece of the response's body; what of it the client gets now."""

    def feed_chunks(self, data: bytes, is_end: bool) -> bool:
        """The same for a read of whole chunks: True when it was noted and may pass as it is, else `feed` gets it."""

    def add_token_chunks(self, n_chunks: int) -> None:
        """So many more that passed as the last one did, and that `is_token_chunk` is true of."""

    def end(self, outcome: str, replica: str) -> None:
        """The request is over, however it ended."""


@dataclass(frozen=True)
class GatewayContext:
    """What every forwarding shares. `hides_key`: what a client gives as its key is not for the engine."""

    replicas: ReplicaTable
    queue: WaitingQueue
    pool: Pool
    counters: Counters
    hold_s: float
    needs_key: bool
    hides_key: bool
    budget: RetryBudget = field(default_factory=RetryBudget)
    response_owners: ResponseOwners = field(default_factory=ResponseOwners)
    under_way: set[UnderWay] = field(default_factory=set)

    def end(self, replica: Replica) -> None:
        """A request is off this replica: the next one that waits may have its place."""
        self.replicas.end(replica)
        if self.queue.waiting:
            self.queue.wake(replica.announcement.model, 1)

    def look_after(self, now: float) -> None:
        """Once a second: ends exchanges that their engine has forgotten, and lets waiting requests look again."""
        for forwarding in tuple(self.under_way):
            forwarding.end_if_forgotten(now)
        for model in self.replicas.models:
            if self.queue.waiting_for(model.name) and self.replicas.ready(model.name, now):
                self.queue.wake(model.name)
