"""The slowest requests of the last hour, in memory."""

from __future__ import annotations

import heapq
from typing import Final

from penstock.gateway.accounting.record import Record
from penstock.wire.live import SlowRequest

MAX_KEPT: Final = 50
KEPT_S: Final = 3600.0


class SlowRequests:
    """Nearly all requests are not among them, and cost a comparison."""

    def __init__(self) -> None:
        self._least_s = -1.0  # what a request must take longer than to be among them
        self._n_added = 0
        self._heap: list[tuple[float, int, Record]] = []  # (duration, number)

    def add(self, record: Record) -> None:
        """A request that has ended."""
        if record.duration_s <= self._least_s:
            return
        self._n_added += 1
        heapq.heappush(self._heap, (record.duration_s, self._n_added, record))
        if len(self._heap) > MAX_KEPT:
            heapq.heappop(self._heap)
        self._set_least()

    def worst(self, now: float, n_requests: int) -> list[SlowRequest]:
        """The slowest first. Those of more than an hour ago (`now`: monotonic) are forgotten."""
        kept = [item for item in self._heap if now - item[2].ended_at < KEPT_S]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
            self._set_least()
        return [_slow_request(item[2]) for item in heapq.nlargest(n_requests, kept)]

    def _set_least(self) -> None:
        self._least_s = self._heap[0][0] if len(self._heap) >= MAX_KEPT else -1.0


def _slow_request(record: Record) -> SlowRequest:
    has_first, trace = record.first_at > 0, record.trace
    return SlowRequest(
        at=record.at,
        request_id=record.facts.request_id.decode(),
        key=record.key,
        model=record.model,
        replica=record.replica,
        outcome=record.outcome,
        status=record.status,
        duration_s=record.duration_s,
        hold_s=record.hold_s,
        own_s=record.own_s,
        first_byte_s=record.first_at - record.sent_at if has_first else None,
        stream_s=record.last_at - record.first_at if has_first else None,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        trace_id=trace.trace_id.decode() if trace is not None else None,
    )


def worst_of(requests: list[SlowRequest], n_requests: int) -> list[SlowRequest]:
    """Of several workers."""
    return heapq.nlargest(n_requests, requests, key=lambda request: request.duration_s)
