"""Client connections: requests off the wire to a handler, one at a time, and responses back.

It reads on (up to a bound) while a request is worked on: an end of file is how it learns that the client has left. A
client that closes only its sending half counts as gone: the two look the same.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Callable
from typing import Final, Literal, Protocol, cast

from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer, http_date, own_headers
from penstock.spec.gateway import Limits
from penstock.text import KIB, MIB
from penstock.wire.http1 import (
    CONTINUE,
    END,
    Headers,
    ProtocolError,
    Reader,
    RequestHead,
    find_header,
    write_response_head,
)

MAX_PIPELINED_BYTES: Final = 64 * KIB
WRITE_BUFFER_BYTES: Final = 256 * KIB

LINGER_S = 2.0  # reading on after a refusal, so that the client can read it before a reset

FREE_BODY_BYTES: Final = 32 * KIB  # of each body; more of it takes from the listener's budget

_RETRY_SOON: Final = ((b"retry-after", b"1"),)
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")

Phase = Literal["idle", "head", "body", "busy", "lingering", "closed"]


class Work(Protocol):
    """What writes a response."""

    def cancel(self) -> object:
        """The client left, or (when not `client.is_gone`) time is over: no more work, and an honest end."""


log = logging.getLogger(__name__)


class Source(Protocol):
    """The origin of a response, for flow control. Both may be called at any time and more than once."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class BodyOwner(Protocol):
    """Who sends a request: `n_bodies` counts bodies that are arriving, `take_refused` a request that was refused."""

    n_bodies: int

    def take_refused(self, now: float) -> None: ...


class Handler(Protocol):
    """What a listener serves. None of the three blocks."""

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        """An answer before the body is read; None when `handle` gets the request. `is_whole`: the body is here."""

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        """The answer; None when `client.work` writes the response, or has."""

    def body_owner(self, head: RequestHead) -> BodyOwner | None: ...

    def origin_headers(self, head: RequestHead) -> Headers:
        """Headers for every answer to this request."""


class Acceptor(Protocol):
    """What a connection needs of its listener."""

    limits: Limits
    handler: Handler
    is_draining: bool
    parse_head: Callable[[bytes], RequestHead]
    now: Callable[[], float]
    unix: Callable[[], float]

    def reserve(self, n_bytes: int, /) -> bool: ...
    def give_back(self, n_bytes: int, /) -> None: ...
    def new_request_id(self) -> bytes: ...
    def add(self, connection: ClientConnection, /) -> bool: ...
    def remove(self, connection: ClientConnection, /) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client. A handler's work calls `respond`; or `write` any number of times, then `finish` or `fail`."""

    def __init__(self, listener: Acceptor) -> None:
        self._listener = listener
        self._now: Callable[[], float] = listener.now
        self._transport: asyncio.Transport
        limits = self._limits = listener.limits
        self._reader = Reader(listener.parse_head, limits.head_bytes)
        self._phase: Phase = "idle"
        # `_begun_at`: the present request's first byte.
        self._phase_at = self._data_at = self._begun_at = self._now()
        self._head: RequestHead | None = None
        self._body: list[bytes] = []
        self._n_body_bytes = 0
        self._n_reserved_bytes = 0  # of the listener's budget for bodies that are arriving
        self._body_owner: BodyOwner | None = None
        self._early: Answer | None = None
        self.work: Work | None = None
        self._source: Source | None = None
        self._stalled_at: float | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_advancing = False
        self._is_paused = False
        self.request_id = b""
        self.is_gone = False
        self.address = ""  # where the client connects from; empty for a Unix socket

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        if not self._listener.add(self):
            self._refuse(error_answer(503, "too many connections", "overloaded", headers=_RETRY_SOON))

    def data_received(self, data: bytes) -> None:
        if self._phase in ("lingering", "closed"):
            return
        self._data_at = self._now()
        if self._phase == "idle" and self._take_whole(data):
            return
        self._reader.feed(data)
        if self._phase == "idle":
            self._enter("head", self._now())
        if self._phase != "busy":
            self._advance()
        elif self._reader.n_buffered > MAX_PIPELINED_BYTES:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()  # it holds this connection: much memory when malformed requests come fast
        self._leave()
        self._release_body()
        self._listener.remove(self)

    def pause_writing(self) -> None:
        self._stalled_at = self._now()
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._stalled_at = None
        if self._source is not None:
            self._source.resume()

    # The handler's side.

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may serve another request after this one."""
        return self._head is not None and self._head.keeps_alive and not self._listener.is_draining

    def read_from(self, source: Source | None) -> None:
        """Pauses `source` while this client reads slower than the response comes."""
        self._source = source
        if source is not None and self._stalled_at is not None:
            source.pause()

    def write(self, data: bytes) -> None:
        """Response bytes, framed already. Never blocks; `source` is paused when the client falls behind."""
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def write_begun(self) -> Callable[[bytes], object]:
        """`write` at its cheapest, for a response that has begun. Raises RuntimeError once the connection closes."""
        return self._transport.write

    def respond(self, answer: Answer) -> None:
        self._write_answer(answer, self.keeps_alive)
        self.finish()

    def finish(self) -> None:
        was_kept_alive = self.keeps_alive
        self.work, self._head, self._early = None, None, None
        if not was_kept_alive:
            self._close()
            return
        self._enter("idle", self._now())
        if self._reader.is_between_messages or self._transport.is_closing():
            return  # as nearly always: the next request comes with another read
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._advance()

    def fail(self, *, is_framed: bool) -> None:
        """Closes so that the client sees a broken response: by its length or chunks (`is_framed`), or a reset."""
        self.work = None
        if is_framed:
            self._close()
        else:
            self._phase = "closed"
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()

    # The listener's side.

    @property
    def idle_since(self) -> float | None:
        """None unless it waits for a request."""
        return self._phase_at if self._phase == "idle" else None

    def close_if_idle(self) -> None:
        if self._phase == "idle":
            self._close()

    def cut(self) -> bool:
        """Time is over: the handler's work ends its response as honestly as it can. Whether there was a request."""
        was_busy = self._phase == "busy"
        if self.work is not None:
            self.work.cancel()
        elif self._phase != "lingering":
            self._close()
        return was_busy

    def abort(self) -> None:
        self._transport.abort()

    def has_slow_body(self, begun_before: float) -> bool:
        return self._phase == "body" and self._n_reserved_bytes > 0 and self._phase_at < begun_before

    def refuse_late(self) -> None:
        self._refuse(error_answer(408, "the request did not come in time", "request_timeout"))

    def close_if_stale(self, now: float) -> None:
        spent_s, limits = now - self._phase_at, self._limits
        is_stalled = self._stalled_at is not None and now - self._stalled_at > limits.stall_s
        is_slow = spent_s > limits.head_s if self._phase == "head" else now - self._data_at > limits.body_s
        is_over = limits.total_s is not None and now - self._begun_at > limits.total_s
        if is_stalled or (self._phase == "closed" and spent_s > limits.stall_s):
            self._transport.abort()
        elif self._phase == "idle" and spent_s > limits.idle_s:
            self._close()
        elif self._phase == "busy" and is_over:
            self.cut()
        elif self._phase in ("head", "body") and (is_over or is_slow):
            self.refuse_late()

    def _enter(self, phase: Phase, now: float) -> None:
        self._phase, self._phase_at = phase, now
        if phase == "head":
            self._begun_at = now

    def _take_whole(self, data: bytes) -> bool:
        """Takes a read that is one whole request; False for any other."""
        if self._is_advancing:
            return False
        self._begun_at = self._data_at
        self._is_advancing = True
        try:
            whole = self._reader.take_whole(data)
            if whole is None:
                return False
            head, body = whole
            self._on_head(head, has_all=True)
            if self._phase == "body":
                if body:
                    self._body.append(body)
                self._on_request()
        except ProtocolError as error:
            self._refuse(error_answer(error.status, str(error), "bad_request"))
        finally:
            self._is_advancing = False
        return True

    def _advance(self) -> None:
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._phase in ("idle", "head", "body"):
                event = self._reader.next_event()
                if event is None:
                    break
                if isinstance(event, RequestHead):
                    self._on_head(event)
                elif event is END:
                    self._on_request()
                else:
                    self._on_body(event)
            if self._phase == "idle" and not self._reader.is_between_messages:
                self._enter("head", self._now())
        except ProtocolError as error:
            self._refuse(error_answer(error.status, str(error), "bad_request"))
        finally:
            self._is_advancing = False

    def _on_head(self, head: RequestHead, *, has_all: bool = False) -> None:
        self._head = head
        self._enter("body", self._data_at)
        name = head.get(b"x-request-id")
        self.request_id = name if name and _REQUEST_ID.fullmatch(name) else self._listener.new_request_id()
        handler = self._listener.handler
        self._early = handler.refuse(head, is_whole=has_all)
        has_body = head.is_chunked or bool(head.length)
        if self._early is None and head.length is not None and head.length > self._limits.body_bytes:
            self._early = _too_large(self._limits.body_bytes)
        if self._early is not None and has_body:
            self._refuse(self._early)
            return
        if has_all or not has_body:
            return
        self._body_owner = handler.body_owner(head)
        if self._body_owner is not None:
            self._body_owner.n_bodies += 1
        if head.expects_continue and not self._reader.n_buffered:
            self._transport.write(CONTINUE)

    def _on_body(self, data: bytes) -> None:
        self._n_body_bytes += len(data)
        if self._n_body_bytes > self._limits.body_bytes:
            self._refuse(_too_large(self._limits.body_bytes))
            return
        self._body.append(data)
        n_new = self._n_body_bytes - FREE_BODY_BYTES - self._n_reserved_bytes
        if n_new > 0:
            if not self._listener.reserve(n_new):
                self._refuse(error_answer(503, "too many large bodies arrive", "overloaded", headers=_RETRY_SOON))
            elif self._phase == "body":
                self._n_reserved_bytes += n_new
            else:
                self._listener.give_back(n_new)  # it was the slow one itself

    def _release_body(self) -> None:
        self._body, self._n_body_bytes = [], 0
        if self._n_reserved_bytes:
            self._listener.give_back(self._n_reserved_bytes)
            self._n_reserved_bytes = 0
        owner, self._body_owner = self._body_owner, None
        if owner is not None:
            owner.n_bodies -= 1

    def _on_request(self) -> None:
        assert self._head is not None
        self._enter("busy", self._data_at)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._release_body()
        if self._early is not None:
            self.respond(self._early)
            return
        request = Request(self._head, body, self.request_id, self._data_at)
        try:
            answer = self._listener.handler.handle(request, self)
        except Exception:
            log.exception("request %s: a bug in the gateway", self.request_id.decode())
            answer = error_answer(500, "the gateway failed", "internal_error")
        if answer is not None:
            self.respond(answer)

    def _write_answer(self, answer: Answer, keeps_alive: bool) -> None:
        headers = [(b"date", http_date(int(self._listener.unix()))), *answer.headers]
        if answer.status not in (204, 304):  # a length would be that of the whole page
            headers += (b"content-type", answer.content_type), (b"content-length", b"%d" % len(answer.body))
        if self._head is not None:
            headers.append((b"x-request-id", self.request_id))
            if find_header(answer.headers, b"x-penstock-replica") is None:
                headers += own_headers(self._now() - self._data_at)
            headers += self._listener.handler.origin_headers(self._head)
            if self.work is None and 400 <= answer.status < 500 and answer.status not in (401, 429):
                owner = self._listener.handler.body_owner(self._head)
                if owner is not None:
                    owner.take_refused(self._now())
        if not keeps_alive:
            headers.append((b"connection", b"close"))
        is_head = self._head is not None and self._head.method == b"HEAD"
        self.write(write_response_head(answer.status, headers) + (b"" if is_head else answer.body))

    def _refuse(self, answer: Answer) -> None:
        """Answers before the whole request was read. Closing at once would reset a client that still sends."""
        self._write_answer(answer, keeps_alive=False)
        self._phase = "lingering"
        self._release_body()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger_timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def _close(self) -> None:
        self._enter("closed", self._now())
        self._transport.close()

    def _leave(self) -> None:
        """The client is gone: so is every reason to go on."""
        self.is_gone = True
        work, self.work = self.work, None
        if work is not None:
            work.cancel()
        if self._phase == "busy":
            # What is still buffered has no reader; close() would wait for it to be read.
            self._transport.abort()
        self._phase = "closed"


def _too_large(most: int) -> Answer:
    size = f"{most // MIB} MiB" if most >= MIB and most % MIB == 0 else f"{most} bytes"
    return error_answer(413, f"request body of more than {size}", "body_too_large")
