"""The retry rule: what happens when a request was sent to an engine and nothing came back for its client.

Until the first byte of an answer the client has lost nothing, and generating text has no side effects: the request is
sent once more, elsewhere if possible. A budget bounds the retries of all requests. Pure, but for the log: takes `now`.
"""

from __future__ import annotations

import enum
import logging
import re
from typing import Final

from penstock.gateway.config import Address
from penstock.gateway.metrics.counters import Counters
from penstock.gateway.routing.replicas import Replica, ReplicaTable

MAX_SENDS: Final = 2
# Before a second send to the same replica: a killed engine's listening socket outlives its connections for a moment.
# Without it, 1 of 4 requests during a kill -9 was lost twice within 1 ms.
AGAIN_S = 0.1
# The same after an answer of FAILED_STATUSES: a node looks every 0.25 s whether an inner process of its engine is gone.
FAILED_AGAIN_S = 0.5
# With these an engine says that it failed, not that the request is wrong. Not 501: that is for ever.
FAILED_STATUSES: Final = frozenset((500, 502, 503, 504))

RETRY_SHARE: Final = 0.2  # retries per request, in the long run
RETRIES_PER_S = 1.0  # and these always, for a gateway with few requests
RETRIES_START = 100.0
RETRIES_MAX: Final = 1000.0

# llama.cpp answers 500 to these; xllamacpp 2026.10.
_INPUT_ERROR: Final = re.compile(
    rb'"message":"(?:\w+ input is not supported|Failed to parse (?:messages|tools):|\[json\.exception'
    rb"|vector::_M_range_check|Unknown \w+ format: |'\w+' is required\")"
)
MAX_FAILURE_BYTES: Final = 16 * 1024  # a failed answer of more is no such error

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
        self._n_requests = 0
        self._at: float | None = None

    def has_one(self, now: float, n_requests: int) -> bool:
        """`n_requests`: all that came so far."""
        added = (n_requests - self._n_requests) * RETRY_SHARE
        if self._at is not None:
            added += (now - self._at) * RETRIES_PER_S
        self._n_requests, self._at = n_requests, now
        self._n_left = min(self._n_left + added, RETRIES_MAX)
        return self._n_left >= 1

    def take(self) -> None:
        self._n_left -= 1


class Retries:
    """Decides whether a failed send is repeated. `lost`: the names of the replicas that lost the request so far.

    The request itself may be what makes an engine fail. So a failed answer counts against its replica only when
    another replica answers the same request, or when requests of several clients fail there and none succeeds.
    """

    def __init__(self, replicas: ReplicaTable, counters: Counters) -> None:
        # One each: requests that make engines fail must not use up the retries of those that a replica lost.
        self._budgets = {loss: RetryBudget() for loss in Loss}
        self._replicas, self._counters = replicas, counters

    def may_retry(self, lost: tuple[str, ...], loss: Loss, now: float) -> bool:
        return len(lost) + 1 < MAX_SENDS and self._budgets[loss].has_one(now, self._counters.n_requests)

    def note_failure(self, replica: Replica, now: float) -> None:
        if self._replicas.note_failure(replica, now):
            log.warning("replica %s: ejected after failures in a row", replica.name)

    def suspect(self, replica: Replica, address: Address, reason: str) -> None:
        """No new requests for it until its next announcement."""
        if self._replicas.suspect(replica, address):
            log.warning("replica %s: %s; no traffic until it announces", replica.name, reason)

    def lose(self, replica: Replica, lost: tuple[str, ...], loss: Loss, now: float) -> bool:
        """Records that a send to `replica` failed; returns whether the request is to be sent again."""
        is_repeated = self.may_retry(lost, loss, now)
        if loss is Loss.LOST:
            self.note_failure(replica, now)
        if is_repeated:
            self._budgets[loss].take()
            self._counters.retries[replica.announcement.model] += 1
        return is_repeated

    def note_answered_elsewhere(self, failed: Replica, address: Address, now: float) -> None:
        """Another replica answered the request that `failed` could not."""
        self.note_failure(failed, now)
        self.suspect(failed, address, "it failed a request that another replica answered")

    def note_last_failure(self, replica: Replica, address: Address, client: bytes, now: float) -> None:
        """A failed answer went to its client without a second send."""
        if replica.health.fail_for(client):
            self.note_failure(replica, now)
            self.suspect(replica, address, "it fails the requests of several clients")

    def pause_s(self, model: str, lost: tuple[str, ...], loss: Loss, now: float) -> float:
        """How long to wait before the next send: 0 when a replica that did not lose the request is ready."""
        if any(replica.name not in lost for replica in self._replicas.ready(model, now)):
            return 0.0
        return AGAIN_S if loss is Loss.LOST else FAILED_AGAIN_S


def read_input_error(body: bytes) -> bytes | None:
    """The body of a 500 that is an error of its request, with 400 in it; None for any other."""
    if not _INPUT_ERROR.search(body):
        return None
    return body.replace(b'"code":500', b'"code":400').replace(b'"server_error"', b'"invalid_request_error"')


def why_not_again(lost: tuple[str, ...]) -> str:
    why = "no retry is left in the gateway's budget" if len(lost) < MAX_SENDS else "sent twice"
    return f"{why}, and the last engine closed the connection without an answer"
