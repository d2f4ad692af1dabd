"""What the client of a waiting stream hears: comments of the event stream, each `: penstock {JSON of a Waiting}`.

A gateway sends them to a client whose request has the header PROGRESS_HEADER. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

PROGRESS_HEADER: Final = "x-penstock-progress"  # "1" asks for them
PROMPT_STAGE: Final = "prompt"
_MARK: Final = "penstock {"


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why there is no text yet. None where it is not known.

    `stage`: "queue" (replicas are ready, all busy), a state of the nearest replica ("queued", "starting", "loading",
    "warming", "restarting", "sleeping", "waking"), "waiting" (no replica is on its way), or "prompt": a replica,
    `replica`, has the request.
    `ahead`: waiting requests that go before this one. `fraction`: of the start, 0 to 1; `eta_s`: its seconds left.
    """

    stage: str
    ahead: int | None = None
    shards_done: int | None = None
    shards_total: int | None = None
    fraction: float | None = None
    eta_s: float | None = None
    replica: str | None = None


_decode = msgspec.json.Decoder(Waiting).decode


def write_comment(waiting: Waiting) -> bytes:
    """`: penstock {"stage":"loading","shards_done":17,"shards_total":30}` with the blank line that ends it."""
    return b": penstock %s\n\n" % msgspec.json.encode(waiting)


def read_comment(text: str) -> Waiting | None:
    """The waiting that a comment (its text after the colon) tells; None for all other comments."""
    text = text.strip()
    if not text.startswith(_MARK):
        return None
    try:
        return _decode(text[len(_MARK) - 1 :])
    except (msgspec.DecodeError, RecursionError):
        return None
