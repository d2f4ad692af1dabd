"""What the request log needs of a request besides its row in the ledger, as the loop leaves it. Pure."""

from __future__ import annotations

import msgspec

from penstock.gateway.accounting.usage_store import Row
from penstock.gateway.request import RequestFacts
from penstock.gateway.trace_context import TraceContext
from penstock.wire.http1 import RequestHead


class Exchange(msgspec.Struct, gc=False):
    """Times are monotonic, 0 for what did not happen. `sent_at`: an engine has the request; `first_at` and `last_at`:
    the first and last bytes of its answer's body. `key`: its name."""

    head: RequestHead
    facts: RequestFacts
    outcome: str
    client: str
    streams: bool
    hold_s: float = 0.0
    own_s: float = 0.0
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    trace: TraceContext | None = None
    key: str = ""


Record = tuple[Row, Exchange]


def text(value: bytes) -> str:
    """Bytes of a client's head: UTF-8 where they are, else each byte as a character."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
