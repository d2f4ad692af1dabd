"""The retry rule: what happens when a request was sent to an engine and nothing came back for its client.

Until the first byte of an answer the client has lost nothing, and generating text has no side effects: the request is
sent once more, elsewhere if possible. A budget bounds the retries of all requests. Pure, but for the log: takes `now`.
"""

from __future__ import annotations

import enum
import logging
from typing import Final

from penstock.gateway.config import Address
from penstock.gateway.metrics import Counters
from penstock.gateway.routing.replicas import Replica, ReplicaTable

MAX_SENDS: Final = 2
# Before a second send to the same replica: a killed engine's listening socket outlives its connections for a moment.
# Without it, 1 of 4 requests during a kill -9 was lost twice within 1 ms.
AGAIN_S = 0.1
# The same after an answer of FAILED_STATUSES. An announcement may lift the suspicion before the replica's node has seen
# that an inner process is gone (it looks every 0.25 s), and the last send's answer is the client's.
FAILED_AGAIN_S = 0.5
# With these an engine says that it failed, not that the request is wrong. Not 501: that is for ever.
FAILED_STATUSES: Final = frozenset((500, 502, 503, 504))

RETRY_SHARE: Final = 0.2  # retries per request, in the long run
RETRIES_PER_S = 1.0  # and these always, for a gateway with few requests
RETRIES_START = 100.0
RETRIES_MAX: Final = 1000.0

log = logging.getLogger(__name__)


class Loss(enum.Enum):
    """How a send failed."""

    LOST = enum.auto()  # no byte came back
    FAILED = enum.auto()  # answered with one of FAILED_STATUSES, which the client does not get


class RetryBudget:
    """A bucket of retries, so that replicas in trouble do not get twice their load.

    Each request adds RETRY_SHARE, each second RETRIES_PER_S. A killed replica's requests all come back at once: hence
    RETRIES_START and RETRIES_MAX.
    """

    def __init__(self) -> None:
        self._n_left = RETRIES_START
        self._at: float | None = None

    def add_request(self) -> None:
        if self._n_left < RETRIES_MAX:
            self._n_left += RETRY_SHARE

    def has_one(self, now: float) -> bool:
        if self._at is not None:
            self._n_left = min(self._n_left + (now - self._at) * RETRIES_PER_S, RETRIES_MAX)
        self._at = now
        return self._n_left >= 1

    def take(self) -> None:
        self._n_left -= 1


class Retries:
    """Decides whether a failed send is repeated. `lost`: the names of the replicas that lost the request so far."""

    def __init__(self, replicas: ReplicaTable, counters: Counters) -> None:
        self.budget = RetryBudget()
        self._replicas, self._counters = replicas, counters

    def may_retry(self, lost: tuple[str, ...], now: float) -> bool:
        return len(lost) + 1 < MAX_SENDS and self.budget.has_one(now)

    def note_failure(self, replica: Replica, now: float) -> None:
        if self._replicas.note_failure(replica, now):
            log.warning("replica %s: ejected after failures in a row", replica.name)

    def suspect(self, replica: Replica, address: Address, reason: str) -> None:
        """No new requests for it until its next announcement."""
        if self._replicas.suspect(replica, address):
            log.warning("replica %s: %s; no traffic until it announces", replica.name, reason)

    def lose(
        self, replica: Replica, address: Address, lost: tuple[str, ...], loss: Loss, reason: str, now: float
    ) -> bool:
        """Records that a send to `replica` failed; returns whether the request is to be sent again."""
        is_repeated = self.may_retry(lost, now)
        self.note_failure(replica, now)
        if loss is Loss.FAILED:
            self.suspect(replica, address, reason)
        if is_repeated:
            self.budget.take()
            self._counters.retries[replica.announcement.model] += 1
        return is_repeated

    def pause_s(self, model: str, lost: tuple[str, ...], loss: Loss, now: float) -> float:
        """How long to wait before the next send: 0 when a replica that did not lose the request is ready."""
        if any(replica.name not in lost for replica in self._replicas.ready(model, now)):
            return 0.0
        return AGAIN_S if loss is Loss.LOST else FAILED_AGAIN_S


def why_not_again(lost: tuple[str, ...]) -> str:
    why = "no retry is left in the gateway's budget" if len(lost) < MAX_SENDS else "sent twice"
    return f"{why}, and the last engine closed the connection without an answer"
