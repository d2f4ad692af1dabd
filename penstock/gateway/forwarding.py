"""One request from a client to an engine and its response back, without a task where nothing must be waited for."""

from __future__ import annotations

import asyncio
import logging
from operator import sub
from typing import Final

from penstock.gateway import waiting_streams
from penstock.gateway.accounting.entry import OUTCOMES, Entry
from penstock.gateway.accounting.exchange import Exchange
from penstock.gateway.accounting.keys import credential
from penstock.gateway.accounting.token_usage import is_token_chunk
from penstock.gateway.body_fields import Usage
from penstock.gateway.config import Address, host_header
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.connections.engine import OWN_ERRORS, UpstreamConnection, UpstreamError
from penstock.gateway.context import OWN_HEADERS, GatewayContext
from penstock.gateway.metrics.counters import Outcome, Series
from penstock.gateway.origins import origin_headers
from penstock.gateway.request import Request, RequestFacts
from penstock.gateway.responses import Answer, error_answer, http_date, own_headers
from penstock.gateway.retries import FAILED_STATUSES, MAX_FAILURE_BYTES, Loss, read_input_error, why_not_again
from penstock.gateway.routing.queue import QueueEntry
from penstock.gateway.routing.replicas import NO_HINTS, RETRY_AFTER_S, Replica, RoutingHints, find_response_id
from penstock.gateway.slow_requests import slow_request
from penstock.gateway.streams import NO_BUFFERING, Ending, is_event_stream, read_chunks, to_event
from penstock.gateway.trace_context import TRACESTATE, TraceContext
from penstock.wire.http1 import HOP_BY_HOP, LAST_CHUNK, STATUS_LINE, Headers, ResponseHead, write_chunk

# An answer to a client whose stream has begun becomes one event of at most this.
MAX_COLLECTED_BYTES: Final = 64 * 1024

_NO_USAGE: Final = Usage(0, 0, 0)
_DROPPED_OF_RESPONSE: Final = HOP_BY_HOP | OWN_HEADERS | {b"server-timing", b"x-accel-buffering"}

log = logging.getLogger(__name__)


class Forwarding:
    """One request under way. It is the upstream connection's sink, and its client's work."""

    # Defaults stay with the class: most requests set few of them.
    takes_chunks = False
    _hints = NO_HINTS
    _entry: Entry | None = None
    # Time that is not the gateway's own: waiting for a replica, and with one that lost the request.
    _waited_s = 0.0
    _hold_s = 0.0  # the former alone
    _held_at: float | None = None  # since when it waits for a replica now
    _own_s = 0.0
    _sent_at = 0.0
    _last_at = 0.0  # of the last bytes, or of sending
    _told_at = 0.0  # of the last comment about an engine's silence
    _first_at = 0.0  # of the engine's first body bytes
    _n_reads = 0  # of a stream
    _n_body_bytes = 0
    _lost: tuple[str, ...] = ()  # replicas that had this request in vain
    _failed: tuple[Replica, Address] | None = None  # answered that it failed, and its address then
    _failure: tuple[ResponseHead, bytes] | None = None  # a failed answer that is not whole yet
    _replica: Replica | None = None
    _connection: UpstreamConnection | None = None
    _response: ResponseHead | None = None
    _series: Series | None = None
    _trace: TraceContext | None = None
    _ending: Ending | None = None
    _collected: bytearray | None = None
    _task: asyncio.Task[None] | None = None
    _queue_entry: QueueEntry | None = None
    _timer: asyncio.TimerHandle | None = None
    # When token chunks went from connection to connection, until `_note_tokens` counts them.
    _token_times: list[float] | None = None
    _is_chunked = False
    _is_bodyless = False  # the answer to a HEAD: engines are asked with GET
    _is_held_open = False
    _has_first = False
    _seeks_id = False
    _streams = False
    _has_ended = False

    def __init__(
        self, context: GatewayContext, request: Request, client: ClientConnection, model: str, facts: RequestFacts
    ) -> None:
        self._context = context
        self._request_head = request.head
        self._request_id = request.request_id
        self._body = request.body
        self._received_at = request.received_at
        self._client = client
        self._model = model
        self._facts = facts

    def start(self, hints: RoutingHints = NO_HINTS, entry: Entry | None = None) -> None:
        """Sends the request now if that is possible, else waits for a replica or a connection in a task."""
        context = self._context
        self._hints, self._entry = hints, entry
        self._client.work = self
        context.counters.n_requests += 1
        self._n_body_bytes = len(self._body)
        context.counters.n_body_bytes += self._n_body_bytes
        context.under_way.add(self)
        if context.tracer is not None:
            self._trace = context.tracer.begin(self._request_head)
        try:
            if entry is not None:
                if (refusal := entry.start()) is not None:
                    self._refuse(refusal)
                    return
                self._body = entry.body
            if self._facts.timeout_s is not None:
                delay_s = self._received_at + self._facts.timeout_s - self._context.now()
                self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._be_late)
            if not context.queue.waiting_for(self._model) and not (entry is not None and entry.is_held):
                self._take_replica()
            address = None if self._replica is None else self._replica.address
            if address is not None and (connection := context.pool.take(address)) is not None:
                self._send(connection)
                return
            self._task = asyncio.get_running_loop().create_task(self._find())
        except BaseException:
            self._settle("broken")
            raise

    def cancel(self) -> None:
        """The client left, or the gateway must end."""
        if self._has_ended:
            return
        if self._client.is_gone:
            is_whole = self._ending is not None and self._ending.has_done()
            self._settle("complete" if is_whole else "client_gone")
        elif self._held_at is not None:
            self._refuse_for_now()
        else:
            self._end_early("the gateway is shutting down")

    def _be_late(self) -> None:
        if not self._has_ended:
            message = f"the request was not done within its x-request-timeout of {self._facts.timeout_s:g} s"
            self._end_early(message, 504, "deadline_exceeded", outcome="late")

    def _refuse(self, answer: Answer) -> None:
        self._context.counters.series(self._model, "none").codes[answer.status] += 1
        self._settle("refused")
        self._client.respond(answer)

    async def _find(self, pause_s: float = 0.0) -> None:
        try:
            if self._entry is not None and self._entry.is_held:
                began_at = self._context.now()
                refusal = await self._entry.take_held()
                self._waited_s += self._context.now() - began_at
                if refusal is not None:
                    self._refuse(refusal)
                    return
            deadline = self._context.now() + self._context.hold_s
            if pause_s:
                await self._context.world.pause(pause_s)
                self._waited_s += pause_s
            while not self._has_ended:
                if self._replica is None and not await self._wait_for_replica(deadline):
                    return
                connection = await self._connect()
                if connection is not None:
                    self._task = None
                    if self._is_held_open and self._facts.wants_progress and self._replica is not None:
                        self._send_comment(waiting_streams.write_taken(self._replica.name))
                    self._send(connection)
                    return
        except Exception:
            log.exception("request %s: a bug in the gateway", self._request_id.decode())
            self._task = None
            self._end_early("the gateway failed", 500, "internal_error")

    async def _wait_for_replica(self, deadline: float) -> bool:
        """Whether there is a replica now, with this request counted on it. If not, the client has its answer."""
        context, facts = self._context, self._facts
        began_at = self._context.now()
        if not context.queue.waiting_for(self._model) and self._take_replica():
            return True
        if began_at >= deadline:
            self._refuse_for_now()
            return False
        key = credential(self._request_head) or b""
        entry = self._queue_entry = context.queue.enter(self._model, key, facts.priority, len(self._body))
        if entry is None:
            message = f"too many requests wait for model {self._model!r} already"
            self._end_early(
                message, 429, "queue_full", outcome="queue_full", param="model", retry_after_s=RETRY_AFTER_S
            )
            return False
        if context.queue.waiting_for(self._model) == 1:  # the first; once a second for all
            context.wake_sleeper(self._model, began_at)
        comment_at = began_at + waiting_streams.first_after_s(facts)
        self._held_at = began_at
        try:
            while True:
                now = self._context.now()
                if now >= (deadline := context.deadline(self._model, deadline, now)):
                    self._task = None
                    self._refuse_for_now()
                    return False
                if now >= comment_at:
                    self._send_comment(waiting_streams.write_waiting(context, entry, facts.wants_progress, now))
                    comment_at = now + waiting_streams.next_after_s(context, entry, facts.wants_progress)
                if await context.queue.wait(entry, min(deadline, comment_at) - now):
                    if self._take_replica():
                        return True
                    context.queue.return_to_queue(entry)
        finally:
            hold_s = self._context.now() - began_at
            self._waited_s += hold_s
            self._hold_s += hold_s
            self._held_at = None
            context.counters.note_hold(self._model, hold_s)
            self._leave_queue()

    def _take_replica(self) -> bool:
        self._replica = self._context.replicas.begin(self._model, self._context.now(), self._hints, self._lost)
        return self._replica is not None

    def _leave_queue(self) -> None:
        entry, self._queue_entry = self._queue_entry, None
        if entry is None:
            return
        self._context.queue.leave(entry)
        if entry.future is not None and entry.future.done() and self._replica is None:
            self._context.queue.wake(self._model, 1)  # the turn that this request does not need

    async def _connect(self) -> UpstreamConnection | None:
        """A connection to the replica; a new one, whose state is beyond doubt, for a request that was lost before."""
        context, replica = self._context, self._replica
        assert replica is not None and replica.address is not None
        address = replica.address
        if not self._lost and (pooled := context.pool.take(address)) is not None:
            return pooled
        try:
            return await context.pool.connect(address)
        except OSError as error:
            if error.errno in OWN_ERRORS:
                log.error("could not connect to replica %s: %s", replica.name, error.strerror)
                context.pool.close()  # idle connections make room for the next request
                message = "the gateway has no connection to an engine left"
                self._end_early(message, 503, "overloaded", retry_after_s=1)
                return None
            self._replica = None
            context.counters.n_connect_failures += 1
            context.retries.note_failure(replica, self._context.now())
            context.retries.suspect(replica, address, f"could not connect: {error}")
            context.end(replica)
            return None

    def _send(self, connection: UpstreamConnection) -> None:
        context = self._context
        self._connection = connection
        wire = self._write_request(connection)
        self._sent_at = self._last_at = self._context.now()
        self._own_s = self._sent_at - self._received_at - self._waited_s
        context.counters.own_s.observe(self._own_s)
        self._client.read_from(connection)
        connection.send(wire, self)

    def _write_request(self, connection: UpstreamConnection) -> bytes:
        head, entry, body, trace = self._request_head, self._entry, self._body, self._trace
        # What the gateway may have to add to a stream of its own must not be compressed.
        is_plain = self._facts.streams or (entry is not None and entry.strips_usage)
        dropped = self._context.dropped_plain if is_plain else self._context.dropped
        length = b"content-length: %d\r\n" % len(body) if body or head.method == b"POST" else b""
        if trace is not None:
            length += trace.line
            if trace.is_ours and head.get(TRACESTATE) is not None:
                dropped |= {TRACESTATE}  # it belongs to a traceparent that did not come, or was not valid
        return b"%s %s HTTP/1.1\r\n%s%sx-request-id: %s\r\n%s\r\n%s" % (
            *(b"GET" if head.method == b"HEAD" else head.method, head.target, connection.origin_lines),
            *(head.keep(dropped), self._request_id, length, body),
        )

    # Called by the upstream connection for every read.

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        if self._series is not None and self._streams:
            self._note_time(self._series)
        passes = True
        if self._entry is not None:
            body = read_chunks(data)
            passed = self._entry.feed(body, is_end)
            passes = passed == body
            if not passes:
                data = (write_chunk(passed) if passed else b"") + (LAST_CHUNK if is_end else b"")
        if data:
            self._client.write(data)
        if is_end:
            self._complete()
        elif self._ending is not None:
            self._ending.note_chunks(data)
            if passes and self._connection is not None and is_token_chunk(data):
                # What follows such chunks ends the stream as after this one, so `_ending` need not see them.
                if self._token_times is None:
                    self._token_times = []
                self._connection.pass_tokens(self._client.write_begun, self._token_times)

    def _note_tokens(self) -> None:
        """Counts what passed by `pass_tokens`."""
        times = self._token_times
        if times:
            assert self._series is not None
            self._series.gap_s.observe_all(map(sub, times, (self._last_at, *times)))
            if self._entry is not None:
                self._entry.add_token_chunks(len(times))
            self._last_at = times[-1]
            self._n_reads += len(times)
            times.clear()

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        out = b""
        if self._failure is not None:
            head, data = self._failure[0], self._failure[1] + data
            self._failure = None
        if head is not None:
            if head.status in FAILED_STATUSES:
                if not is_end and head.length is not None and head.length <= MAX_FAILURE_BYTES:
                    self._failure = head, data
                    return
                body = read_input_error(data) if is_end else None
                if body is not None:
                    head, data = ResponseHead(400, head.headers, head.keeps_alive, len(body), False), body
                elif self._context.retries.may_retry(self._lost, Loss.FAILED, self._context.now()):
                    self._lose(Loss.FAILED)
                    return
            out = self._begin_response(head)
        if self._is_bodyless:
            data = b""
        if self._series is not None and (data if self._streams else head is not None or is_end):
            self._note_time(self._series)
        if self._seeks_id and data:
            self._keep_id(data)
        if self._entry is not None:
            data = self._entry.feed(data, is_end)
        if self._collected is not None:
            self._collect(data, is_end)
            return
        if data:
            out += write_chunk(data) if self._is_chunked else data
            if self._ending is not None:
                self._ending.note(data)
        if is_end and self._is_chunked:
            out += LAST_CHUNK
        if out:
            self._client.write(out)
        if is_end:
            self._complete()

    def _note_time(self, series: Series) -> None:
        """Measures the first byte, a stream's gaps, and another answer's beginning or end."""
        self._note_tokens()
        now = self._context.now()
        if not self._has_first:
            self._has_first = True
            self._first_at = now
            series.first_byte_s.observe(now - self._received_at)
            if self._streams:
                series.first_token_s.observe(now - self._received_at)
        elif self._streams:
            self._n_reads += 1
            series.gap_s.observe(now - self._last_at)
        self._last_at = now

    def _note_output(self, n_tokens: int) -> None:
        """Measures the time per output token; without their number each read after the first counts as one."""
        assert self._series is not None
        n_further = n_tokens / self._facts.n_choices - 1 if n_tokens else self._n_reads
        if n_further >= 1:
            self._series.output_token_s.observe((self._last_at - self._first_at) / n_further)

    def _keep_id(self, data: bytes) -> None:
        """Remembers who has the response: only its replica can be asked for it later."""
        self._seeks_id = False
        self.takes_chunks = self._is_chunked
        response_id = find_response_id(data)
        if response_id is not None and self._replica is not None:
            self._context.response_owners.keep(response_id, self._model, self._replica.name)

    def lost(self, error: UpstreamError) -> None:
        assert self._replica is not None
        log.warning("request %s: replica %s: %s", self._request_id.decode(), self._replica.name, error)
        if self._response is None:
            self._lose(Loss.LOST)
        else:
            self._context.retries.note_failure(self._replica, self._context.now())
            self._end_early(str(error))

    def bear_silence(self, now: float) -> None:
        """Ends an exchange that its engine lost; while one may go on, the client of a stream hears that it does."""
        self._note_tokens()
        replica, connection, silent_s = self._replica, self._connection, now - self._last_at
        if connection is None or replica is None:
            return
        if self._has_first:
            self._context.hear(replica, self._last_at)
        reason = replica.why_lost(silent_s, now)
        if reason is not None:
            connection.discard()
            self.lost(UpstreamError(reason))
        elif self._may_comment() and now - max(self._last_at, self._told_at) >= waiting_streams.KEEP_ALIVE_S:
            self._told_at = now
            self._send_comment(waiting_streams.KEEP_ALIVE)

    def _may_comment(self) -> bool:
        """Whether the client reads events, and none is half sent."""
        if self._response is None:
            return self._facts.streams
        return self._ending is not None and self._ending.is_between_events()

    def _lose(self, loss: Loss) -> None:
        replica, connection, retries = self._replica, self._connection, self._context.retries
        assert replica is not None and connection is not None
        now = self._context.now()
        self._waited_s += now - self._sent_at
        is_repeated = retries.lose(replica, self._lost, loss, now)
        self._lost += (replica.name,)
        self._failure = None
        if loss is Loss.FAILED:
            self._failed = replica, connection.address
            self._sent_at = 0.0  # nobody pays for that
        connection.discard()
        self._detach()
        if is_repeated:
            pause_s = retries.pause_s(self._model, self._lost, loss, now)
            self._task = asyncio.get_running_loop().create_task(self._find(pause_s))
        else:
            self._end_early(why_not_again(self._lost))

    def _begin_response(self, head: ResponseHead) -> bytes:
        replica = self._replica
        assert replica is not None
        self._response = head
        self._body = b""  # up to 32 MiB, and it will not be sent again
        series = self._series = self._context.counters.series(self._model, replica.name)
        series.codes[head.status] += 1
        if head.status < 500:
            replica.health.succeed()
            self._context.hear(replica, self._context.now())
            if self._failed is not None and self._failed[0] is not replica:
                self._context.retries.note_answered_elsewhere(*self._failed, self._context.now())
        elif head.status in FAILED_STATUSES and not self._lost:
            assert self._connection is not None
            client, address = credential(self._request_head) or b"", self._connection.address
            self._context.retries.note_last_failure(replica, address, client, self._context.now())
        self._streams = is_event_stream(head)
        if self._entry is not None:
            self._entry.begin(head, self._streams)
        self._seeks_id = head.status == 200 and self._request_head.target.startswith(b"/v1/responses")
        if self._is_held_open:
            if not self._streams:
                self._collected = bytearray()
            self.takes_chunks = self._is_chunked and head.is_chunked and self._streams and not self._seeks_id
            return b""
        if self._streams and head.length is None:
            self._ending = Ending()
        framing = NO_BUFFERING if self._streams else b""
        self._is_bodyless = self._request_head.method == b"HEAD"
        if head.length is not None:
            if head.status not in (204, 304):
                framing += b"content-length: %d\r\n" % head.length
        elif not self._request_head.is_http_10:
            self._is_chunked = not self._is_bodyless
            self.takes_chunks = head.is_chunked and not self._seeks_id and not self._is_bodyless
            framing += b"transfer-encoding: chunked\r\n"
        kept = head.keep(_DROPPED_OF_RESPONSE)
        if not kept.startswith(b"date: ") and kept.find(b"\r\ndate: ") < 0:
            kept = b"date: %s\r\n%s" % (http_date(int(self._context.unix())), kept)
        if 300 <= head.status < 400 and self._connection is not None:
            # An engine names itself by the address at which it was asked.
            kept = kept.replace(b"location: http://%s/" % host_header(self._connection.address), b"location: /")
        return STATUS_LINE[head.status] + kept + framing + self._write_own_headers(replica)

    def _write_own_headers(self, replica: Replica | None) -> bytes:
        more: Headers = self._entry.headers() if self._entry is not None else ()
        origin = self._request_head.get(b"origin")
        if origin is not None:
            more += origin_headers(origin, self._context.needs_key, self._context.allowed_origins)
        return b"x-request-id: %s\r\nx-penstock-replica: %s\r\nserver-timing: gateway;dur=%.3f\r\n%s%s\r\n" % (
            *(self._request_id, replica.name.encode() if replica else b"none", self._own_s * 1000),
            *(
                b"".join([b"%s: %s\r\n" % header for header in more]),
                b"" if self._client.keeps_alive else b"connection: close\r\n",
            ),
        )

    def _send_comment(self, comment: bytes) -> None:
        """Tells the client of a waiting stream how things stand; the first comment begins a stream that has not."""
        out = b""
        if self._response is None and not self._is_held_open:
            self._is_held_open = True
            self._ending = Ending()
            self._is_chunked = not self._request_head.is_http_10
            out = waiting_streams.write_head(self._context.unix(), self._is_chunked) + self._write_own_headers(None)
        self._client.write(out + (write_chunk(comment) if self._is_chunked else comment))

    def _collect(self, data: bytes, is_end: bool) -> None:
        """Keeps an answer that is no stream, for a client that was promised one: it becomes an event."""
        assert self._collected is not None
        if len(self._collected) + len(data) > MAX_COLLECTED_BYTES:
            self._end_early("the engine's answer is too long for an event")
            return
        self._collected += data
        if is_end:
            assert self._response is not None
            event = to_event(bytes(self._collected), self._response.status)
            self._client.write(write_chunk(event) + LAST_CHUNK if self._is_chunked else event)
            self._complete()

    def _complete(self) -> None:
        assert self._series is not None
        self._series.duration_s.observe(self._last_at - self._received_at)
        self._settle("complete")
        # May begin the connection's next request, so it is the last thing to do.
        self._client.finish()

    def _detach(self) -> None:
        replica, self._replica = self._replica, None
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.read_from(None)
            connection.release()
        if replica is not None:
            self._context.end(replica)

    def _settle(self, outcome: Outcome) -> None:
        """Counts the outcome and gives everything back. The client is not touched."""
        self._has_ended = True
        self._note_tokens()
        context, entry = self._context, self._entry
        name, usage = self._replica.name if self._replica is not None else "", _NO_USAGE
        exchange, trace = None, self._trace
        ended_at = self._last_at if outcome == "complete" else self._context.now()
        is_slow = ended_at - self._received_at > context.slow.least_s
        if is_slow or (entry is not None and (entry.logs_all or (trace is not None and trace.is_sampled))):
            hold_s = self._hold_s if self._held_at is None else self._hold_s + ended_at - self._held_at
            exchange = Exchange(
                *(self._request_head, self._facts, outcome, self._client.address, self._streams, hold_s),
                *(self._own_s, self._sent_at, self._first_at, self._last_at, trace),
            )
        if entry is not None:
            self._entry = None
            usage = entry.end(outcome, name, exchange, was_read=self._sent_at > 0)
            if usage.prompt_tokens:
                context.counters.n_known_bytes += self._n_body_bytes
                context.counters.n_known_tokens += usage.prompt_tokens - usage.cached_tokens
        if self._streams and self._has_first:
            self._note_output(usage.output_tokens)
        if is_slow and exchange is not None:
            status = self._response.status if self._response is not None else OUTCOMES[outcome][1]
            slow = slow_request(exchange, (self._model, name, status), usage, ended_at, context.unix())
            context.slow.add(slow, ended_at)
        context.under_way.discard(self)
        context.counters.outcomes[self._model, outcome] += 1
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._detach()

    def _refuse_for_now(self) -> None:
        wait_s = self._context.replicas.retry_after_s(self._model, self._context.now())
        why = "" if (failure := self._context.replicas.failure) is None else f": {failure}"
        message = f"model {self._model!r} has no replica that takes requests now{why}"
        self._end_early(message, 503, "no_replica", outcome="no_replica", param="model", retry_after_s=wait_s)

    def _end_early(
        self,
        message: str,
        status: int = 502,
        code: str = "upstream_failed",
        *,
        outcome: Outcome = "broken",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Ends a response that cannot be completed, as truthfully as its form allows."""
        client, response, ending, replica = self._client, self._response, self._ending, self._replica
        self._settle(outcome)
        if response is None and not self._is_held_open:
            name = replica.name if replica is not None else "none"
            self._context.counters.series(self._model, name).codes[status] += 1
            own_s = self._own_s or max(0.0, self._context.now() - self._received_at - self._waited_s)
            headers = own_headers(own_s, name.encode())
            if retry_after_s is not None:
                headers += ((b"retry-after", b"%d" % retry_after_s),)
            client.respond(error_answer(status, message, code, param, headers))
        elif ending is not None:
            event = ending.write_end(status, message, code)
            if event:
                client.write(write_chunk(event) if self._is_chunked else event)
            if self._is_chunked:
                client.write(LAST_CHUNK)
            client.finish()
        else:
            client.fail(is_framed=self._is_chunked or (response is not None and response.length is not None))
