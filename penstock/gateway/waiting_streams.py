"""What the client of a stream hears while it waits for a replica or its engine: how its response begins, comments."""

from __future__ import annotations

import math
from typing import Final

from penstock.gateway.context import GatewayContext
from penstock.gateway.request import RequestFacts
from penstock.gateway.responses import http_date
from penstock.gateway.routing.queue import QueueEntry
from penstock.gateway.streams import NO_BUFFERING
from penstock.wire.http1 import STATUS_LINE
from penstock.wire.waiting import PROMPT_STAGE, Waiting, write_comment

# The first comment, and then every so often. Proxies give up on silence.
QUIET_S = 3.0
COMMENT_EVERY_S = 5.0
# The same for a client that asked for its progress; in a long queue less often, since a position costs a step for each
# key that waits and each request of its own.
PROGRESS_FIRST_S = 0.5
PROGRESS_EVERY_S = 1.0
POSITIONS_PER_S: Final = 500.0
# While the engine is silent that has the request: rented places' proxies end a stream after 30 or 60 s without a byte.
KEEP_ALIVE_S = 10.0
KEEP_ALIVE: Final = b": penstock keep-alive\n\n"


def write_head(now_s: float, is_chunked: bool) -> bytes:
    """How the head begins. `now_s`: Unix seconds."""
    coding = b"transfer-encoding: chunked\r\n" if is_chunked else b""
    return b"%sdate: %s\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n%s%s" % (
        *(STATUS_LINE[200], http_date(int(now_s)), NO_BUFFERING, coding),
    )


def first_after_s(facts: RequestFacts) -> float:
    """Seconds to the first comment: never in an answer that is no stream."""
    return math.inf if not facts.streams else PROGRESS_FIRST_S if facts.wants_progress else QUIET_S


def next_after_s(context: GatewayContext, entry: QueueEntry, wants_progress: bool) -> float:
    if not wants_progress:
        return COMMENT_EVERY_S
    return max(PROGRESS_EVERY_S, context.queue.waiting_for(entry.model) / POSITIONS_PER_S)


def write_waiting(context: GatewayContext, entry: QueueEntry, wants_progress: bool, now: float) -> bytes:
    """A comment that says why the request waits."""
    if not wants_progress:
        return f": penstock {context.replicas.coming_words(entry.model, now)}\n\n".encode()
    return write_comment(context.replicas.waiting(entry.model, now, context.queue.n_ahead(entry)))


def write_taken(replica: str) -> bytes:
    """A comment that says who has the request now."""
    return write_comment(Waiting(PROMPT_STAGE, replica=replica))
