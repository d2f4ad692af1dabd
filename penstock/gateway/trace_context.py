"""Trace ids of requests, by the rules of W3C: https://www.w3.org/TR/trace-context/. Pure but for its random bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from penstock.wire.http1 import RequestHead

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_SAMPLED: Final = 1
_ID_DIGITS: Final = 48  # of a trace and of a span
_AT_ONCE: Final = 256


class TraceContext:
    """Of one request. `parent_id` is empty where the trace begins here; `is_ours`: no valid one came with the request.

    Ids are in hex.
    """

    __slots__ = ("is_ours", "is_sampled", "parent_id", "span_id", "trace_id")

    def __init__(self, trace_id: bytes, span_id: bytes, parent_id: bytes, is_sampled: bool) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.is_sampled = is_sampled
        self.is_ours = not parent_id

    @property
    def line(self) -> bytes:
        """The header line for the engine, whose span hangs below ours."""
        flags = b"01" if self.is_sampled else b"00"
        return b"traceparent: 00-%s-%s-%s\r\n" % (self.trace_id, self.span_id, flags)


class Tracer:
    """Makes the contexts of requests. `sample`: share of the traces that begin here, 0 to 1."""

    def __init__(self, sample: float, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._ids = b""
        self._at = 0
        # The last 7 bytes of a trace id are random: https://www.w3.org/TR/trace-context-2/#random-trace-id-flag
        self._sampled_below = int(sample * 2**56)
        self._samples_all = sample >= 1.0

    def begin(self, head: RequestHead) -> TraceContext:
        ids = self._next_ids()
        span_id = ids[32:]
        parent = head.get(TRACEPARENT)
        if parent is not None:
            fields = read_traceparent(head, parent)
            if fields is not None:
                return TraceContext(fields[0], span_id, fields[1], fields[2])
        trace_id = ids[:32]
        is_sampled = self._samples_all or int(trace_id[18:], 16) < self._sampled_below
        return TraceContext(trace_id, span_id, b"", is_sampled)

    def _next_ids(self) -> bytes:
        """The digits of a trace id and of a span id. Of zeros only is one in 2**64 times."""
        at = self._at
        if at >= len(self._ids):
            self._ids = self._random_bytes(_ID_DIGITS // 2 * _AT_ONCE).hex().encode()
            at = 0
        self._at = at + _ID_DIGITS
        return self._ids[at : at + _ID_DIGITS]


def read_traceparent(head: RequestHead, value: bytes) -> tuple[bytes, bytes, bool] | None:
    """(trace id, parent id, whether it is sampled); None for what is not valid. Newer versions are read as this one."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or sum([name == TRACEPARENT for name, _ in head.headers]) > 1:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return trace_id, parent_id, bool(int(flags, 16) & _SAMPLED)
