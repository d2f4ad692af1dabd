"""The state of a request whose engine answers, and what it has in common with the one before."""

from __future__ import annotations

import logging
from operator import sub
from typing import Final

from penstock.gateway import waiting_streams
from penstock.gateway.accounting.keys import credential
from penstock.gateway.accounting.token_usage import is_token_chunk
from penstock.gateway.config import host_header
from penstock.gateway.connections.engine import UpstreamConnection, UpstreamError
from penstock.gateway.context import OWN_HEADERS
from penstock.gateway.metrics.counters import Series
from penstock.gateway.requests.forwarded import ForwardedRequest, State
from penstock.gateway.responses import http_date
from penstock.gateway.retries import FAILED_STATUSES
from penstock.gateway.routing.replicas import Replica, find_response_id
from penstock.gateway.streams import NO_BUFFERING, Ending, is_event_stream, read_chunks, to_event
from penstock.wire.http1 import HOP_BY_HOP, LAST_CHUNK, STATUS_LINE, ResponseHead, write_chunk

# An answer to a client whose stream has begun becomes one event of at most this.
MAX_COLLECTED_BYTES: Final = 64 * 1024

_DROPPED_OF_RESPONSE: Final = HOP_BY_HOP | OWN_HEADERS | {b"server-timing", b"x-accel-buffering"}

log = logging.getLogger(__name__)


class OnReplica(State):
    """A request that counts on a replica, and its connection's sink once it has one."""

    takes_chunks = False

    def __init__(
        self, request: ForwardedRequest, replica: Replica, connection: UpstreamConnection | None = None
    ) -> None:
        self._request = request
        self._replica = replica
        self._connection = connection
        self.replica_name = replica.name

    def check(self, now: float) -> None:
        """End an exchange that its engine lost; while one goes on, send the client of a stream a comment."""
        request, connection = self._request, self._connection
        if connection is None:
            return
        reason = self._replica.why_lost(now - request.record.last_at, now)
        if reason is not None:
            connection.discard()
            self.lost(UpstreamError(reason))
        elif now - max(request.record.last_at, request.told_at) >= waiting_streams.KEEP_ALIVE_S and self._may_comment():
            request.told_at = now
            request.send_comment(waiting_streams.KEEP_ALIVE)

    def _may_comment(self) -> bool:
        """Whether the client reads events, and none is half sent."""
        return self._request.facts.streams

    def leave(self) -> None:
        super().leave()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._request.client.read_from(None)
            connection.release()
        self._request.context.end(self._replica)

    # Called by the connection.

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        raise NotImplementedError

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        raise NotImplementedError

    def lost(self, error: UpstreamError) -> None:
        log.warning("request %s: replica %s: %s", self._request.facts.request_id.decode(), self._replica.name, error)
        self.fail(error)

    def fail(self, error: UpstreamError) -> None:
        raise NotImplementedError


class Streaming(OnReplica):
    """The engine's answer goes to the client as it comes; `begin` comes first."""

    _series: Series
    _collected: bytearray | None = None
    # When token chunks went from connection to connection, until `_note_tokens` counts them.
    _token_times: list[float] | None = None
    _n_reads = 0  # of a stream
    _is_bodyless = False  # the answer to a HEAD: engines are asked with GET
    _seeks_id = False

    def begin(self, head: ResponseHead, data: bytes, is_end: bool) -> None:
        request, replica = self._request, self._replica
        record = request.record
        is_open = request.ending is not None  # by a comment
        request.has_head, record.status = True, head.status
        request.body = b""  # up to 32 MiB, and it will not be sent again
        self._series = request.context.counters.series(request.model, replica.name)
        self._series.codes[head.status] += 1
        self._note_health(head.status)
        record.streams = is_event_stream(head)
        if request.entry is not None:
            request.entry.begin(head)
        self._seeks_id = head.status == 200 and request.head.target.startswith(b"/v1/responses")
        out = b"" if is_open else self._write_head(head)
        if is_open and not record.streams:
            self._collected = bytearray()
        self.takes_chunks = request.is_chunked and head.is_chunked and not self._seeks_id and self._collected is None
        if data or not record.streams:
            self._note_time()
        self._pass(out, data, is_end)

    def _note_health(self, status: int) -> None:
        request, replica, connection = self._request, self._replica, self._connection
        context, now = request.context, request.context.now()
        if status < 500:
            replica.health.succeed()
            context.hear(replica, now)
            if request.failed is not None and request.failed[0] is not replica:
                context.retries.note_answered_elsewhere(*request.failed, now)
        elif status in FAILED_STATUSES and not request.lost and connection is not None:
            client = credential(request.head) or b""
            context.retries.note_last_failure(replica, connection.address, client, now)

    def _write_head(self, head: ResponseHead) -> bytes:
        """The head of the client's response, whose framing and ending are settled with it."""
        request = self._request
        framing = NO_BUFFERING if request.record.streams else b""
        self._is_bodyless = request.head.method == b"HEAD"
        if head.length is not None:
            request.is_framed = True
            if head.status not in (204, 304):
                framing += b"content-length: %d\r\n" % head.length
        else:
            if request.record.streams:
                request.ending = Ending()
            if not request.head.is_http_10:
                request.is_chunked = request.is_framed = not self._is_bodyless
                framing += b"transfer-encoding: chunked\r\n"
        kept = head.keep(_DROPPED_OF_RESPONSE)
        if not kept.startswith(b"date: ") and kept.find(b"\r\ndate: ") < 0:
            kept = b"date: %s\r\n%s" % (http_date(int(request.context.unix())), kept)
        if 300 <= head.status < 400 and self._connection is not None:
            # An engine names itself by the address at which it was asked.
            kept = kept.replace(b"location: http://%s/" % host_header(self._connection.address), b"location: /")
        return STATUS_LINE[head.status] + kept + framing + request.write_own_headers(self._replica.name)

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        if data if self._request.record.streams else is_end:
            self._note_time()
        self._pass(b"", data, is_end)

    def _pass(self, out: bytes, data: bytes, is_end: bool) -> None:
        """Sends the client what it gets of a piece of the body, after `out`."""
        request = self._request
        if self._is_bodyless:
            data = b""
        if self._seeks_id and data:
            self._keep_id(data)
        if request.entry is not None:
            data = request.entry.feed(data, is_end)
        if self._collected is not None:
            self._collect(self._collected, data, is_end)
            return
        if data:
            out += write_chunk(data) if request.is_chunked else data
            if request.ending is not None:
                request.ending.note(data)
        if is_end and request.is_chunked:
            out += LAST_CHUNK
        if out:
            request.client.write(out)
        if is_end:
            self._complete()

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        request = self._request
        if request.record.streams:
            self._note_time()
        passes = True
        if request.entry is not None:
            body = read_chunks(data)
            passed = request.entry.feed(body, is_end)
            passes = passed == body
            if not passes:
                data = (write_chunk(passed) if passed else b"") + (LAST_CHUNK if is_end else b"")
        if data:
            request.client.write(data)
        if is_end:
            self._complete()
        elif request.ending is not None:
            request.ending.note_chunks(data)
            if passes and self._connection is not None and is_token_chunk(data):
                # What follows such chunks ends the stream as after this one, so `ending` need not see them.
                if self._token_times is None:
                    self._token_times = []
                self._connection.pass_tokens(request.client.write_begun, self._token_times)

    def fail(self, error: UpstreamError) -> None:
        self._request.context.retries.note_failure(self._replica, self._request.context.now())
        self._request.end_early(str(error))

    def check(self, now: float) -> None:
        self._note_tokens()
        record = self._request.record
        if record.first_at:
            self._request.context.hear(self._replica, record.last_at)
        super().check(now)

    def _may_comment(self) -> bool:
        return self._request.ending is not None and self._request.ending.is_between_events()

    def _note_tokens(self) -> None:
        """Counts what passed by `pass_tokens`."""
        times = self._token_times
        if times:
            record, entry = self._request.record, self._request.entry
            self._series.gap_s.observe_all(map(sub, times, (record.last_at, *times)))
            if entry is not None:
                entry.add_token_chunks(len(times))
            record.last_at = times[-1]
            self._n_reads += len(times)
            times.clear()

    def _note_time(self) -> None:
        """Measures the first byte, a stream's gaps, and another answer's beginning or end."""
        self._note_tokens()
        record, series, now = self._request.record, self._series, self._request.context.now()
        if not record.first_at:
            record.first_at = now
            series.first_byte_s.observe(now - record.facts.received_at)
            if record.streams:
                series.first_token_s.observe(now - record.facts.received_at)
        elif record.streams:
            self._n_reads += 1
            series.gap_s.observe(now - record.last_at)
        record.last_at = now

    def note_usage(self) -> None:
        """Measures the time per output token; without their number each read after the first counts as one."""
        record, n_tokens = self._request.record, self._request.record.output_tokens
        if record.streams and record.first_at:
            n_further = n_tokens / record.facts.n_choices - 1 if n_tokens else self._n_reads
            if n_further >= 1:
                self._series.output_token_s.observe((record.last_at - record.first_at) / n_further)

    def _keep_id(self, data: bytes) -> None:
        """Remembers who has the response: only its replica can be asked for it later."""
        request = self._request
        self._seeks_id = False
        self.takes_chunks = request.is_chunked and self._collected is None
        response_id = find_response_id(data)
        if response_id is not None:
            request.context.response_owners.keep(response_id, request.model, self._replica.name)

    def _collect(self, collected: bytearray, data: bytes, is_end: bool) -> None:
        """Keeps an answer that is no stream, for a client that was promised one: it becomes an event."""
        request = self._request
        if len(collected) + len(data) > MAX_COLLECTED_BYTES:
            request.end_early("the engine's answer is too long for an event")
            return
        collected += data
        if is_end:
            request.write(to_event(bytes(collected), request.record.status), is_end=True)
            self._complete()

    def _complete(self) -> None:
        request = self._request
        self._series.duration_s.observe(request.record.last_at - request.facts.received_at)
        request.settle("complete")
        # May begin the connection's next request, so it is the last thing to do.
        request.client.finish()

    def leave(self) -> None:
        self._note_tokens()
        super().leave()
