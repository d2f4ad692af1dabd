"""The access log: one JSON line a request, in a file that several workers append to, or on stderr."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from time import gmtime, strftime
from typing import Final

import msgspec

from penstock.errors import UserError
from penstock.gateway.accounting.record import Record, text
from penstock.log_lines import append
from penstock.spec.gateway import STDERR
from penstock.text import MIB

ROTATE_BYTES: Final = 64 * MIB
MAX_KEPT: Final = 5  # older files, NAME.1 the newest
_STDERR_FD: Final = 2

log = logging.getLogger(__name__)


class Line(msgspec.Struct, gc=False):
    """A request. Milliseconds; `itl_mean_ms`: mean time between tokens of a stream. Prompts, answers and keys are never
    in it: `key` is the key's name."""

    time: str
    request_id: str
    trace_id: str | None
    key: str
    model: str
    replica: str
    method: str
    path: str
    status: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hold_ms: float
    ttft_ms: float | None
    itl_mean_ms: float | None
    duration_ms: float
    own_ms: float
    user_agent: str
    client: str


_encode = msgspec.json.Encoder().encode


def write_line(record: Record, second: str, milliseconds: int) -> bytes:
    """The line of a request that came at `second`. Control characters of a client are escaped."""
    stream_s, first_s = record.last_at - record.first_at, record.first_token_s
    gap_ms = stream_s / (record.output_tokens - 1) * 1000 if record.streams and record.output_tokens > 1 else None
    line = Line(
        f"{second}.{milliseconds:03d}Z",
        text(record.facts.request_id),
        record.trace.trace_id.decode() if record.trace is not None else None,
        record.key,
        record.model,
        record.replica,
        text(record.head.method),
        text(record.head.path),
        record.status,
        record.outcome,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        round(record.hold_s * 1000, 3),
        first_s and round(first_s * 1000, 3),
        gap_ms and round(gap_ms, 3),
        round(record.duration_s * 1000, 3),
        round(record.own_s * 1000, 3),
        text(record.head.get(b"user-agent") or b""),
        record.client,
    )
    return _encode(line) + b"\n"


def write_lines(records: Sequence[Record]) -> list[bytes]:
    lines, last, second = [], -1, ""
    for record in records:
        at = record.at
        if int(at) != last:
            last = int(at)
            second = strftime("%Y-%m-%dT%H:%M:%S", gmtime(last))
        lines.append(write_line(record, second, int(at * 1000) % 1000))
    return lines


class AccessLog:
    """Where the lines go. The constructor makes the file. Raises UserError.

    It is opened for each batch of lines, so another program may rename it: one that rotates logs for the machine.
    """

    def __init__(self, place: str) -> None:
        self._file = Path(place) if place != STDERR else None
        self._is_failing = False
        self.n_lost = 0
        try:
            self._append(b"")
        except OSError as error:
            raise UserError(f"cannot write access log {place!r}: {error.strerror}") from error

    def write(self, records: Sequence[Record]) -> None:
        self.append(write_lines(records))

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends lines, or counts them as lost. One call of the system: lines of several workers do not mix."""
        data, n_written = b"".join(lines), 0
        try:
            n_written = self._append(data)
            if n_written < len(data):
                raise OSError("the disk is full")
            if self._is_failing:
                log.warning("access log: it works again, %d lines are lost", self.n_lost)
            self._is_failing = False
        except OSError as error:
            self.n_lost += max(1, len(lines) - data[:n_written].count(b"\n"))
            if not self._is_failing:
                log.error("access log: %s; requests continue without their lines", error.strerror or error)
            self._is_failing = True

    def _append(self, data: bytes) -> int:
        if self._file is None:
            return os.write(_STDERR_FD, data)
        return append(self._file, data, ROTATE_BYTES, MAX_KEPT, mode=0o600)
