"""The slowest requests of the last hour, in memory."""

from __future__ import annotations

import heapq
from typing import Final

from penstock.gateway.accounting.exchange import Exchange
from penstock.gateway.body_fields import Usage
from penstock.wire.live import SlowRequest

MAX_KEPT: Final = 50
KEPT_S: Final = 3600.0


class SlowRequests:
    """`least_s`: what a request must take longer than to be among them; nearly all do not, and cost a comparison."""

    def __init__(self) -> None:
        self.least_s = -1.0
        self._n_added = 0
        self._heap: list[tuple[float, int, float, SlowRequest]] = []  # (duration, number, when it ended)

    def add(self, request: SlowRequest, now: float) -> None:
        """`now`: monotonic, when it ended."""
        self._n_added += 1
        heapq.heappush(self._heap, (request.duration_s, self._n_added, now, request))
        if len(self._heap) > MAX_KEPT:
            heapq.heappop(self._heap)
        self._set_least()

    def worst(self, now: float, n_requests: int) -> list[SlowRequest]:
        """The slowest first. Those of more than an hour ago are forgotten."""
        kept = [item for item in self._heap if now - item[2] < KEPT_S]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
            self._set_least()
        return [item[3] for item in heapq.nlargest(n_requests, kept)]

    def _set_least(self) -> None:
        self.least_s = self._heap[0][0] if len(self._heap) >= MAX_KEPT else -1.0


def slow_request(
    exchange: Exchange, served: tuple[str, str, int], usage: Usage, ended_at: float, unix_s: float
) -> SlowRequest:
    """`served`: the model, the replica and the status; `ended_at`: monotonic, `unix_s`: the same moment."""
    duration_s = ended_at - exchange.facts.received_at
    has_first, trace = exchange.first_at > 0, exchange.trace
    return SlowRequest(
        at=unix_s - duration_s,
        request_id=exchange.facts.request_id.decode(),
        key=exchange.key,
        model=served[0],
        replica=served[1],
        outcome=exchange.outcome,
        status=served[2],
        duration_s=duration_s,
        hold_s=exchange.hold_s,
        own_s=exchange.own_s,
        first_byte_s=exchange.first_at - exchange.sent_at if has_first else None,
        stream_s=exchange.last_at - exchange.first_at if has_first else None,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        trace_id=trace.trace_id.decode() if trace is not None else None,
    )


def worst_of(requests: list[SlowRequest], n_requests: int) -> list[SlowRequest]:
    """Of several workers."""
    return heapq.nlargest(n_requests, requests, key=lambda request: request.duration_s)
