"""One request from a client to an engine and its response back.

Until the first response byte nothing is lost for the client: a replica that refuses the connection is passed over,
one that dies with the request or answers that it failed gets it sent once more elsewhere, and without any replica the
request is held. Sending again is right: generating text has no side effects. After the first byte the only honest
thing left is to end the stream with an error event.

An engine whose inner process was killed answers 500 at once until its node ends it, so by least in flight it would get
every request: of two replicas, the broken one turned 1728 of 1968 requests into errors.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from dataclasses import dataclass

from penstock.gateway.access import origin_headers
from penstock.gateway.answer import error_answer, error_body
from penstock.gateway.exposition import Counters, Outcome
from penstock.gateway.fleet import Fleet, Replica
from penstock.gateway.hold import Hold
from penstock.gateway.http1 import (
    LAST_CHUNK,
    ResponseHead,
    keep_end_to_end,
    write_chunk,
    write_request_head,
    write_response_head,
)
from penstock.gateway.server import ClientConnection, Request
from penstock.gateway.upstream import Pool, RejectedError, UpstreamConnection, UpstreamError

MAX_SENDS = 2
# Before the second send to the same replica, when there is no other: a killed engine's listening socket outlives its
# connections for a moment. Without it, 1 of 4 requests during a kill -9 was lost twice within 1 ms.
AGAIN_S = 0.1
# The same after an answer of FAILED_STATUSES. An announcement may lift the suspicion before the replica's node has seen
# that an inner process is gone (it looks every 0.25 s), and the last send's answer is the client's.
FAILED_AGAIN_S = 0.5
# With these an engine says that it failed, not that the request is wrong. Not 501: that is for ever.
FAILED_STATUSES = frozenset((500, 502, 503, 504))

_DONE_EVENT = b"data: [DONE]\n\n"
_TAIL_BYTES = len(_DONE_EVENT)
# Ours replace the client's: the body is whole, and the engine is another host.
_REPLACED_REQUEST_HEADERS = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
_REPLACED_RESPONSE_HEADERS = frozenset((b"content-length", b"x-request-id", b"x-penstock-replica"))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Desk:
    """What every passage shares."""

    fleet: Fleet
    hold: Hold
    pool: Pool
    counters: Counters
    hold_s: float
    needs_key: bool


class _Attempt(enum.Enum):
    ANSWERED = enum.auto()
    BROKEN = enum.auto()  # after the first byte
    LOST = enum.auto()  # sent, and no byte came back
    FAILED = enum.auto()  # sent, and answered with one of FAILED_STATUSES, which is kept from the client
    UNREACHED = enum.auto()  # never sent


class Passage:
    """One request under way. It is the upstream connection's sink and the client's writer."""

    def __init__(self, desk: Desk, request: Request, client: ClientConnection, model: str) -> None:
        self._desk = desk
        self._client = client
        self._model = model
        self._request_id = request.request_id
        self._request_head = request.head
        self._body = request.body
        self._received_at = request.received_at
        # Time that is not the gateway's own: waiting for a replica, and with one that lost the request.
        self._elsewhere_s = 0.0
        self._own_s = 0.0
        self._sent_at = 0.0
        self._lost: list[str] = []  # replicas that had this request in vain
        self._replica: Replica | None = None
        self._connection: UpstreamConnection | None = None
        self._response: ResponseHead | None = None
        self._is_chunked = False
        self._has_finished = False
        self._tail = b""

    async def run(self) -> None:
        """Answers the client, whatever happens, and counts how it ended."""
        self._desk.counters.n_requests += 1
        outcome: Outcome = "broken"
        try:
            outcome = await self._pass()
        except asyncio.CancelledError:
            if self._has_finished:
                outcome = "complete"
            elif self._client.is_gone:
                outcome = "client_gone"
            else:
                self._end_early("the gateway is shutting down")
            raise
        finally:
            self._desk.counters.outcomes[self._model, outcome] += 1

    async def _pass(self) -> Outcome:
        deadline = time.monotonic() + self._desk.hold_s
        while True:
            replica = await self._find_replica(deadline)
            if replica is None:
                self._refuse_for_now()
                return "no_replica"
            try:
                attempt = await self._attempt(replica)
            finally:
                self._desk.fleet.end(replica)
            if attempt is _Attempt.ANSWERED:
                return "complete"
            if attempt is _Attempt.BROKEN:
                return "broken"
            if attempt is not _Attempt.UNREACHED:
                self._lost.append(replica.name)
                if len(self._lost) == MAX_SENDS:
                    self._end_early(
                        f"sent {MAX_SENDS} times, and the last engine closed the connection without an answer"
                    )
                    return "broken"
                self._desk.counters.n_retries += 1
                await self._let_it_die(AGAIN_S if attempt is _Attempt.LOST else FAILED_AGAIN_S)
                deadline = time.monotonic() + self._desk.hold_s

    async def _let_it_die(self, pause_s: float) -> None:
        """Waits before another send when only replicas that lost this request could get it."""
        started_at = time.monotonic()
        if all(row.name in self._lost for row in self._desk.fleet.ready(self._model, started_at)):
            await asyncio.sleep(pause_s)
            self._elsewhere_s += time.monotonic() - started_at

    async def _find_replica(self, deadline: float) -> Replica | None:
        """A replica with this request counted on it; waits for one until `deadline`."""
        desk = self._desk
        while True:
            now = time.monotonic()
            replica = desk.fleet.begin(self._model, now, self._lost)
            if replica is not None:
                return replica
            if now >= deadline or not desk.hold.has_room(len(self._body)):
                return None
            await desk.hold.wait(self._model, deadline - now, len(self._body))
            self._elsewhere_s += time.monotonic() - now

    async def _attempt(self, replica: Replica) -> _Attempt:
        """Sends the request to `replica`."""
        self._replica = replica
        connection = self._connection = await self._connect(replica)
        if connection is None:
            return _Attempt.UNREACHED
        self._client.source = connection
        try:
            await connection.exchange(self._write_request(connection), self)
            return _Attempt.ANSWERED
        except UpstreamError as error:
            log.warning("request %s: replica %s: %s", self._request_id.decode(), replica.name, error)
            if self._response is None:
                self._elsewhere_s += time.monotonic() - self._sent_at
                if not isinstance(error, RejectedError):
                    return _Attempt.LOST
                if self._desk.fleet.suspect(replica, connection.address):
                    log.warning("replica %s: no traffic until it announces", replica.name)
                return _Attempt.FAILED
            self._end_early(str(error))
            return _Attempt.BROKEN
        finally:
            if not self._has_finished:
                self._client.source = None
            connection.release()

    async def _connect(self, replica: Replica) -> UpstreamConnection | None:
        """A connection to `replica`; a new one, whose state is beyond doubt, for a request that was lost before."""
        assert replica.address is not None
        address = replica.address
        if not self._lost:
            pooled = self._desk.pool.take(address)
            if pooled is not None:
                return pooled
        try:
            return await self._desk.pool.connect(address)
        except OSError as error:
            self._desk.counters.n_connect_failures += 1
            if self._desk.fleet.suspect(replica, address):
                log.warning("replica %s: could not connect, no traffic until it announces: %s", replica.name, error)
            return None

    def _write_request(self, connection: UpstreamConnection) -> bytes:
        """The request's bytes; here ends the time that it spent in the gateway."""
        head = self._request_head
        host, port = connection.address
        headers = [(b"host", (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode())]
        for header in keep_end_to_end(head.headers):
            # A gateway key is for the gateway: an engine's log must not see it.
            is_our_key = header[0] == b"authorization" and self._desk.needs_key
            if header[0] not in _REPLACED_REQUEST_HEADERS and not is_our_key:
                headers.append(header)
        headers.append((b"x-request-id", self._request_id))
        headers.append((b"content-length", b"%d" % len(self._body)))
        wire = write_request_head(head.method, head.target, headers) + self._body
        self._sent_at = time.monotonic()
        self._own_s = self._sent_at - self._received_at - self._elsewhere_s
        self._desk.counters.own_s += self._own_s
        self._desk.counters.n_sent += 1
        return wire

    # The sink's side: called by the upstream connection for every read.

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        """Passes on what came, in one write."""
        if self._client.is_gone:
            return
        if head is not None and head.status in FAILED_STATUSES and len(self._lost) + 1 < MAX_SENDS:
            assert self._connection is not None
            self._connection.reject(f"the engine answered {head.status}")
            return
        out = self._begin_response(head) if head is not None else b""
        if data:
            out += write_chunk(data) if self._is_chunked else data
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        if is_end and self._is_chunked:
            out += LAST_CHUNK
        if out:
            self._client.write(out)
        if is_end:
            self._finish()

    def _begin_response(self, head: ResponseHead) -> bytes:
        assert self._replica is not None
        self._response = head
        self._body = b""
        self._desk.counters.responses[self._model, head.status] += 1
        headers = [
            header
            for header in keep_end_to_end(head.headers)
            if header[0] not in _REPLACED_RESPONSE_HEADERS and not header[0].startswith(b"access-control-")
        ]
        if head.length is not None:
            if head.status not in (204, 304):
                headers.append((b"content-length", b"%d" % head.length))
        elif not self._request_head.is_http_10:
            self._is_chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        headers += self._own_headers()
        if not self._client.keeps_alive:
            headers.append((b"connection", b"close"))
        return write_response_head(head.status, headers)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        assert self._replica is not None
        return [
            (b"x-request-id", self._request_id),
            (b"x-penstock-replica", self._replica.name.encode()),
            (b"server-timing", b"gateway;dur=%.3f" % (self._own_s * 1000)),
            *origin_headers(self._request_head.get(b"origin"), self._desk.needs_key),
        ]

    def _finish(self) -> None:
        # Before `finish`, which may begin the connection's next request with a source of its own.
        self._has_finished = True
        self._client.source = None
        self._client.finish()

    def _end_early(self, message: str) -> None:
        """Ends a response that cannot be completed, as truthfully as its form allows."""
        status = 502
        if self._response is None:
            self._has_finished = True
            self._desk.counters.responses[self._model, status] += 1
            self._client.respond(error_answer(status, message, "upstream_failed"))
        elif not self._can_append():
            self._client.fail(is_framed=self._is_chunked or self._response.length is not None)
        else:
            event = b"" if self._tail.endswith(_DONE_EVENT) else self._write_error_event(message)
            self._client.write(write_chunk(event) if event and self._is_chunked else event)
            self._client.write(LAST_CHUNK if self._is_chunked else b"")
            self._finish()

    def _can_append(self) -> bool:
        assert self._response is not None
        is_event_stream = (self._response.get(b"content-type") or b"").lower().startswith(b"text/event-stream")
        is_plain = self._response.get(b"content-encoding") in (None, b"identity")
        return is_event_stream and is_plain and self._response.length is None

    def _write_error_event(self, message: str) -> bytes:
        # An event cut in its middle is ended first: its reader gets broken JSON, and then the reason.
        is_between_events = not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))
        gap = b"" if is_between_events else b"\n\n"
        return gap + b"data: " + error_body(502, message, "upstream_failed") + b"\n\n" + _DONE_EVENT

    def _refuse_for_now(self) -> None:
        wait_s = self._desk.fleet.retry_after_s(self._model, time.monotonic())
        self._has_finished = True
        self._desk.counters.responses[self._model, 503] += 1
        self._client.respond(
            error_answer(
                503,
                f"model {self._model!r} has no replica that takes requests now",
                "no_replica",
                param="model",
                headers=((b"retry-after", b"%d" % wait_s),),
            )
        )
