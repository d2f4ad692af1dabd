"""What is known of one request. Its row in the ledger, its line of the access log and its span are written from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from penstock.gateway.accounting.usage_store import State
from penstock.gateway.metrics.counters import Outcome
from penstock.gateway.request import RequestFacts
from penstock.gateway.trace_context import TraceContext
from penstock.wire.http1 import RequestHead

# State, and status where none was sent; 499 is nginx's for a client that left before its answer.
OUTCOMES: Final[dict[Outcome, tuple[State, int]]] = {
    "complete": ("complete", 0),
    "client_gone": ("client-cancelled", 499),
    "broken": ("engine-failed", 502),
    "late": ("engine-failed", 504),
    "no_replica": ("refused", 503),
    "queue_full": ("refused", 429),
    "refused": ("refused", 429),
}


class Record:
    """A request from its arrival to its end. The gateway fills it on the way, and gives it to its writers at the end.

    `at` is Unix time; other times are monotonic, 0 for what did not happen. `sent_at`: an engine has the request;
    `first_at` and `last_at`: the first and last bytes of its answer's body, or `last_at` is that of sending. `hold_s`:
    the wait for a replica; `own_s`: the gateway's own time. `key`: its name; `client`: its address.
    """

    # Defaults stay with the class: a request that is refused sets few of them.
    key_id = ""
    key = ""
    replica = ""
    outcome: Outcome = "refused"
    state: State = "refused"
    status = 0
    streams = False
    hold_s = 0.0
    own_s = 0.0
    sent_at = 0.0
    first_at = 0.0
    last_at = 0.0
    ended_at = 0.0
    prompt_tokens = 0
    cached_tokens = 0
    output_tokens = 0
    is_estimate = False
    cost_usd: float | None = None
    trace: TraceContext | None = None

    def __init__(self, head: RequestHead, facts: RequestFacts, model: str, client: str, at: float) -> None:
        self.head = head
        self.facts = facts
        self.model = model
        self.client = client
        self.at = at

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.facts.received_at

    @property
    def first_token_s(self) -> float | None:
        """Seconds until a stream's first bytes."""
        return self.first_at - self.facts.received_at if self.streams and self.first_at else None


class Writer(Protocol):
    """Who writes records that have ended, on the ledger's thread; `n_lost`: how many could not be written."""

    n_lost: int

    def write(self, records: Sequence[Record]) -> None: ...


def text(value: bytes) -> str:
    """Bytes of a client's head: UTF-8 where they are, else each byte as a character."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
