"""Server-sent events: bytes in, events out. Pure; no socket, no clock.

A parser sees the stream in arbitrary pieces: a line, a CRLF or a UTF-8 character may be cut anywhere. So lines are
cut as bytes and decoded whole. Rules: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
with one difference, in `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.errors import PenstockError

LINE_BYTES_MAX = 16 * 2**20
DONE = "[DONE]"  # what OpenAI's API sends as its last event's data
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: the `data:` lines joined by newlines, and its name ("message" unless the server says otherwise)."""

    data: str
    name: str = "message"


class Parser:
    """Feed it what arrives; it returns the events that are complete.

    Comments (": keep-alive") and events without data yield nothing; `on_comment` gets the text of the former, before
    the events of the same piece are returned. Bytes that are not UTF-8 become U+FFFD.
    Raises PenstockError when a line or the data of one event passes `line_bytes_max`: no memory without bound.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX, on_comment: Callable[[str], object] | None = None) -> None:
        self._line_bytes_max = line_bytes_max
        self._on_comment = on_comment
        self._rest = bytearray()  # the line that has not ended yet
        self._skips_newline = False  # the last piece ended in CR; a LF that follows belongs to it
        self._is_at_start = True
        self._data: list[str] = []
        self._data_bytes = 0
        self._name = ""

    def feed(self, piece: bytes) -> list[Event]:
        if not piece:
            return []
        if self._skips_newline:
            piece = piece.removeprefix(b"\n")
        self._skips_newline = piece.endswith(b"\r")
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for line in lines[:-1]:
            self._rest += line
            event = self._end_line(bytes(self._rest))
            self._rest.clear()
            if event is not None:
                events.append(event)
        self._rest += lines[-1]
        self._check_size(len(self._rest))
        return events

    @property
    def is_between_events(self) -> bool:
        return not (self._rest or self._data or self._name or self._skips_newline)

    def close(self) -> list[Event]:
        """The event whose blank line never came: the standard drops it; some servers send [DONE] and hang up."""
        event = self._end_event()
        return [] if event is None else [event]

    def _end_line(self, line: bytes) -> Event | None:
        if self._is_at_start:
            self._is_at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._end_event()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value)
            self._check_size(self._data_bytes)
            self._data.append(value.decode("utf-8", "replace"))
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif not field and self._on_comment is not None:
            self._on_comment(value.decode("utf-8", "replace"))
        return None

    def _end_event(self) -> Event | None:
        event = Event("\n".join(self._data), self._name or "message") if self._data else None
        self._data = []
        self._data_bytes = 0
        self._name = ""
        return event

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > self._line_bytes_max:
            raise PenstockError(
                "cannot read the event stream: one event is too large",
                detail=f"{n_bytes} bytes so far, the limit is {self._line_bytes_max}",
            )
