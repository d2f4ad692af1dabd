"""The end of an event stream that its engine did not end. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.gateway.responses import error_body
from penstock.wire.http1 import ResponseHead

EVENT_STREAM: Final = b"text/event-stream"
NO_BUFFERING: Final = b"x-accel-buffering: no\r\n"  # nginx passes each event on at once
DONE_EVENT: Final = b"data: [DONE]\n\n"

_TAIL_BYTES: Final = len(DONE_EVENT)
_KEPT_READ_BYTES: Final = 4096


def is_event_stream(head: ResponseHead) -> bool:
    """Whether events can be read from this response, and added to it."""
    kind = head.get(b"content-type")
    if kind is None or kind[: len(EVENT_STREAM)].lower() != EVENT_STREAM:
        return False
    return head.get(b"content-encoding") in (None, b"identity")


class Ending:
    """What the end of a stream depends on: its last bytes. Noting whole chunks costs an assignment."""

    __slots__ = ("_newest", "_older", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        # The last two reads as they came, in chunked coding, and all after `_tail`: decoded only if it is needed.
        self._older = self._newest = b""

    def note(self, data: bytes) -> None:
        self._tail = (self._read_tail() + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self._older = self._newest = b""

    def note_chunks(self, data: bytes) -> None:
        self._older, self._newest = self._newest, data
        if len(data) > _KEPT_READ_BYTES:
            self.note(b"")

    def _read_tail(self) -> bytes:
        if not self._newest:
            return self._tail
        return (self._tail + read_chunks(self._older + self._newest))[-_TAIL_BYTES:]

    def has_done(self) -> bool:
        """Whether the last event was sent: many clients hang up at it."""
        return self._read_tail().endswith(DONE_EVENT)

    def is_between_events(self) -> bool:
        tail = self._read_tail()
        return not tail or tail.endswith((b"\n\n", b"\r\n\r\n"))

    def write_end(self, status: int, message: str, code: str) -> bytes:
        """An error event and the last event; nothing when the last event was sent."""
        if self.has_done():
            return b""
        # An event cut in its middle is ended first: its reader gets broken JSON, and then the reason.
        gap = b"" if self.is_between_events() else b"\n\n"
        return gap + b"data: " + error_body(status, message, code) + b"\n\n" + DONE_EVENT


def to_event(body: bytes, status: int) -> bytes:
    """A whole JSON answer as the only event of a stream, for a client that was promised one."""
    try:
        line = msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        line = error_body(502, f"the engine answered {status} without JSON", "upstream_failed")
    return b"data: " + line + b"\n\n" + DONE_EVENT


def read_chunks(data: bytes) -> bytes:
    """The body bytes of whole chunks, which a `Reader` has checked."""
    pieces, at = [], 0
    while at < len(data):
        line_end = data.find(b"\r\n", at)
        size = int(data[at:line_end], 16)
        pieces.append(data[line_end + 2 : line_end + 2 + size])
        at = line_end + size + 4
    return b"".join(pieces)
