"""The states of a request before an engine answers: it is admitted, waits for a replica, and is sent to it."""

from __future__ import annotations

import logging

from penstock.gateway import waiting_streams
from penstock.gateway.accounting.entry import Entry
from penstock.gateway.accounting.keys import credential
from penstock.gateway.connections.engine import OWN_ERRORS, UpstreamConnection, UpstreamError
from penstock.gateway.requests.forwarded import ForwardedRequest, State
from penstock.gateway.requests.streaming import OnReplica, Streaming
from penstock.gateway.retries import FAILED_STATUSES, MAX_FAILURE_BYTES, Loss, read_input_error, why_not_again
from penstock.gateway.routing.queue import QueueEntry
from penstock.gateway.routing.replicas import NO_HINTS, RETRY_AFTER_S, Replica, RoutingHints
from penstock.gateway.trace_context import TRACESTATE
from penstock.wire.http1 import ResponseHead

log = logging.getLogger(__name__)


def forward(request: ForwardedRequest, hints: RoutingHints = NO_HINTS, entry: Entry | None = None) -> None:
    """Send a request now if that is possible; else it waits, for its quota, a replica or a connection, in a task."""
    try:
        refusal = request.start(hints, entry)
        if refusal is not None:
            request.refuse(refusal)
        elif entry is not None and entry.is_held:
            request.enter(Admitting(request))
        else:
            _find_replica(request)
    except BaseException:
        if request in request.context.under_way:
            request.settle("broken")
        raise


def _find_replica(request: ForwardedRequest, pause_s: float = 0.0) -> None:
    now = request.context.now()
    request.hold_until = now + request.context.hold_s
    replica = None if pause_s else _take_replica(request, now)
    if replica is not None:
        _send(request, replica)
    else:
        request.enter(Waiting(request, pause_s))


def _take_replica(request: ForwardedRequest, now: float) -> Replica | None:
    """A replica, with this request counted on it, unless others wait for one."""
    context = request.context
    if context.queue.waiting_for(request.model):
        return None
    return context.replicas.begin(request.model, now, request.hints, request.lost)


def _send(request: ForwardedRequest, replica: Replica) -> None:
    """On a connection of the pool; on a new one, whose state is beyond doubt, when the request was lost before."""
    assert replica.address is not None
    sending = Sending(request, replica)
    connection = None if request.lost else request.context.pool.take(replica.address)
    if connection is None:
        request.enter(sending)
    else:
        request.state = sending
        sending.send(connection)


class Admitting(State):
    """It is unclear whether its key has quota left."""

    def __init__(self, request: ForwardedRequest) -> None:
        self._request = request

    async def run(self) -> None:
        request, entry = self._request, self._request.entry
        assert entry is not None
        began_at = request.context.now()
        refusal = await entry.take_held()
        request.waited_s += request.context.now() - began_at
        if refusal is not None:
            request.refuse(refusal)
        else:
            _find_replica(request)


class Waiting(State):
    """No replica takes it now, or it pauses before it is sent again."""

    _entry: QueueEntry | None = None

    def __init__(self, request: ForwardedRequest, pause_s: float) -> None:
        self._request = request
        self._pause_s = pause_s

    async def run(self) -> None:
        request = self._request
        if self._pause_s:
            await request.context.world.pause(self._pause_s)
            request.waited_s += self._pause_s
        now = request.context.now()
        replica = _take_replica(request, now) or await self._wait(now)
        if replica is not None:
            request.leave()
            _send(request, replica)

    async def _wait(self, now: float) -> Replica | None:
        """A replica for the request; None when it has ended instead."""
        request = self._request
        context, facts, model = request.context, request.facts, request.model
        if now >= request.hold_until:
            request.refuse_for_now()
            return None
        key = credential(request.head) or b""
        entry = self._entry = context.queue.enter(model, key, facts.priority, len(request.body))
        if entry is None:
            message = f"too many requests wait for model {model!r} already"
            request.end_early(
                message, 429, "queue_full", outcome="queue_full", param="model", retry_after_s=RETRY_AFTER_S
            )
            return None
        if context.queue.waiting_for(model) == 1:  # the first; once a second for all
            context.wake_sleeper(model, now)
        self.held_at = now
        comment_at = now + waiting_streams.first_after_s(facts)
        while True:
            now = context.now()
            request.hold_until = context.deadline(model, request.hold_until, now)
            if now >= request.hold_until:
                request.refuse_for_now()
                return None
            if now >= comment_at:
                request.send_comment(waiting_streams.write_waiting(context, entry, facts.wants_progress, now))
                comment_at = now + waiting_streams.next_after_s(context, entry, facts.wants_progress)
            if await context.queue.wait(entry, min(request.hold_until, comment_at) - now):
                replica = context.replicas.begin(model, context.now(), request.hints, request.lost)
                if replica is not None:
                    entry.future = None  # its turn is used
                    return replica
                context.queue.return_to_queue(entry)

    def leave(self) -> None:
        super().leave()
        request, context = self._request, self._request.context
        held_at, self.held_at = self.held_at, None
        if held_at is not None:
            hold_s = context.now() - held_at
            request.waited_s += hold_s
            request.record.hold_s += hold_s
            context.counters.note_hold(request.model, hold_s)
        entry, self._entry = self._entry, None
        if entry is not None:
            context.queue.leave(entry)
            if entry.future is not None and entry.future.done():
                context.queue.wake(request.model, 1)  # the turn that this request does not need


class Sending(OnReplica):
    """It has a replica, which has not answered."""

    _failure: tuple[ResponseHead, bytes] | None = None  # a failed answer that is not whole yet

    async def run(self) -> None:
        request, replica, context = self._request, self._replica, self._request.context
        address = replica.address
        assert address is not None
        try:
            connection = await context.pool.connect(address)
        except OSError as error:
            if error.errno in OWN_ERRORS:
                log.error("could not connect to replica %s: %s", replica.name, error.strerror)
                context.pool.close()  # idle connections make room for the next request
                message = "the gateway has no connection to an engine left"
                request.end_early(message, 503, "overloaded", retry_after_s=1)
                return
            context.counters.n_connect_failures += 1
            context.retries.note_failure(replica, context.now())
            context.retries.suspect(replica, address, f"could not connect: {error}")
            request.leave()
            request.enter(Waiting(request, 0.0))
            return
        self.task = None
        if request.ending is not None and request.facts.wants_progress:
            request.send_comment(waiting_streams.write_taken(replica.name))
        self.send(connection)

    def send(self, connection: UpstreamConnection) -> None:
        request = self._request
        self._connection = connection
        wire = self._write_request(connection)
        record, now = request.record, request.context.now()
        record.sent_at = record.last_at = now
        record.own_s = now - request.facts.received_at - request.waited_s
        request.context.counters.own_s.observe(record.own_s)
        request.client.read_from(connection)
        connection.send(wire, self)

    def _write_request(self, connection: UpstreamConnection) -> bytes:
        request, context = self._request, self._request.context
        head, entry, body, trace = request.head, request.entry, request.body, request.record.trace
        # What the gateway may have to add to a stream of its own must not be compressed.
        is_plain = request.facts.streams or (entry is not None and entry.strips_usage)
        dropped = context.dropped_plain if is_plain else context.dropped
        length = b"content-length: %d\r\n" % len(body) if body or head.method == b"POST" else b""
        if trace is not None:
            length += trace.line
            if trace.is_ours and head.get(TRACESTATE) is not None:
                dropped |= {TRACESTATE}  # it belongs to a traceparent that did not come, or was not valid
        return b"%s %s HTTP/1.1\r\n%s%sx-request-id: %s\r\n%s\r\n%s" % (
            *(b"GET" if head.method == b"HEAD" else head.method, head.target, connection.origin_lines),
            *(head.keep(dropped), request.facts.request_id, length, body),
        )

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        if self._failure is not None:
            head, data = self._failure[0], self._failure[1] + data
            self._failure = None
        request, connection = self._request, self._connection
        assert head is not None
        assert connection is not None
        if head.status in FAILED_STATUSES:
            if not is_end and head.length is not None and head.length <= MAX_FAILURE_BYTES:
                self._failure = head, data
                return
            body = read_input_error(data) if is_end else None
            if body is not None:
                head, data = ResponseHead(400, head.headers, head.keeps_alive, len(body), False), body
            elif request.context.retries.may_retry(request.lost, Loss.FAILED, request.context.now()):
                self._lose(Loss.FAILED)
                return
        streaming = request.state = Streaming(request, self._replica, connection)
        connection.sink = streaming
        streaming.begin(head, data, is_end)

    def fail(self, error: UpstreamError) -> None:
        self._lose(Loss.LOST)

    def _lose(self, loss: Loss) -> None:
        request, replica, connection = self._request, self._replica, self._connection
        assert connection is not None
        retries, now = request.context.retries, request.context.now()
        request.waited_s += now - request.record.sent_at
        is_repeated = retries.lose(replica, request.lost, loss, now)
        request.lost += (replica.name,)
        if loss is Loss.FAILED:
            request.failed = replica, connection.address
            request.record.sent_at = 0.0  # nobody pays for that
        connection.discard()
        request.leave()
        if is_repeated:
            _find_replica(request, retries.pause_s(request.model, request.lost, loss, now))
        else:
            request.end_early(why_not_again(request.lost))
