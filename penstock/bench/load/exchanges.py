"""Exchanges on disk, as they were recorded: each is written when it ends, so that memory does not grow with the run.

A file begins with two doubles (`perf_counter` and the Unix time of the start); then each record has a header (bytes of
the record, kind, index) and a `Raw` as MessagePack. A record that a kill cut off is left out when the file is read.
"""

from __future__ import annotations

import os
import struct
import time
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

_START = struct.Struct("<dd")
_HEADER = struct.Struct("<IBI")
REQUESTS = 0  # the kind of a request; 1 and up: answers of pages of metrics


class Raw(msgspec.Struct, frozen=True, array_like=True):
    """An exchange as it was recorded, times in seconds from the start of the run; `end_s` 0: it never ended."""

    index: int
    intended_s: float
    asked_s: float
    sent_s: float
    end_s: float
    dial_s: float
    times: list[float]
    reads: list[bytes]
    error: str | None = None
    detail: str = ""


class ExchangeFile:
    """Writes and reads such a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.msgpack.Encoder().encode

    def begin(self) -> tuple[float, float]:
        """The start of the run is now: (`perf_counter`, Unix time)."""
        began = time.perf_counter(), time.time()
        self._file.write(_START.pack(*began))
        return began

    def write(self, raw: Raw, kind: int = REQUESTS) -> None:
        """Times are `perf_counter` seconds here.  Raises OSError when the disk refuses."""
        record = self._encode(raw)
        self._file.write(_HEADER.pack(len(record), kind, raw.index) + record)

    def flush(self) -> None:
        self._file.flush()

    def began(self) -> tuple[float, float] | None:
        """(`perf_counter`, Unix time) of the start; None for a file that was never begun."""
        self._file.seek(0)
        start = self._file.read(_START.size)
        return _START.unpack(start) if len(start) == _START.size else None

    def read(self, kind: int = REQUESTS) -> Iterator[Raw]:
        """The records of one kind in the order of their indexes, with times from the start of the run."""
        began = self.began()
        if began is None:
            return
        decode = msgspec.msgpack.Decoder(Raw).decode
        for at, n_bytes in self._places(kind):
            self._file.seek(at)
            raw = decode(self._file.read(n_bytes))
            yield _from_start(raw, began[0])

    def _places(self, kind: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the whole records of a kind, by index."""
        indexes, offsets, sizes = array("q"), array("q"), array("q")
        end = self._file.seek(0, os.SEEK_END)
        at = _START.size
        while at + _HEADER.size <= end:
            self._file.seek(at)
            n_bytes, of_kind, index = _HEADER.unpack(self._file.read(_HEADER.size))
            at += _HEADER.size + n_bytes
            if of_kind == kind and at <= end:
                indexes.append(index)
                offsets.append(at - n_bytes)
                sizes.append(n_bytes)
        order = sorted(range(len(indexes)), key=indexes.__getitem__)
        return [(offsets[place], sizes[place]) for place in order]


def _from_start(raw: Raw, began_s: float) -> Raw:
    end_s = raw.end_s or began_s
    return Raw(
        raw.index,
        raw.intended_s - began_s,
        (raw.asked_s or end_s) - began_s,
        (raw.sent_s or end_s) - began_s,
        end_s - began_s,
        raw.dial_s,
        [at_s - began_s for at_s in raw.times],
        raw.reads,
        raw.error,
        raw.detail,
    )
