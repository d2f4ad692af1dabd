"""Connections to engines: kept alive, pooled by address, one exchange at a time on each."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from penstock.gateway.accounting.token_usage import is_token_chunk
from penstock.gateway.config import UNIX, Address, host_header
from penstock.wire.http1 import END, Heads, ProtocolError, Reader, ResponseHead, parse_response
from penstock.world import REAL, World

CONNECT_S = 5.0
# Below uvicorn's keep-alive timeout of 5 s, which vLLM keeps: a connection that the engine is about to close
# would swallow a request. https://docs.vllm.ai/en/latest/configuration/env_vars.html (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
IDLE_S = 4.0
MAX_IDLE: Final = 512
# A machine that lost its power sends no reset. TCP gives up on it after USER_TIMEOUT_MS without an acknowledgement, of
# data or of a keep-alive. Longer than a network's short failure, after which everything goes on. Names that a system
# lacks are left out. https://man7.org/linux/man-pages/man7/tcp.7.html
USER_TIMEOUT_MS = 45_000
_TCP_OPTIONS: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
MAX_HEADS: Final = 256
MAX_ANSWER_BYTES: Final = 64 * 1024  # to a question of the gateway's own
Fits = Callable[[int, int], bool]  # whether a body may go on, by the bytes of a read and those so far

# A connect fails with these because of this process or machine, not of the engine.
OWN_ERRORS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))


class UpstreamError(Exception):
    """The engine's connection ended, or broke HTTP, before its response was whole."""


class Sink(Protocol):
    """Gets `receive`, and whole chunks by `receive_chunks` if `takes_chunks`, until the body is whole; or `lost`."""

    takes_chunks: bool

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        """One read: the head if it was in there, body bytes, and whether the body is whole."""

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        """One read in chunked coding; with `is_end` its last chunk ends it."""

    def lost(self, error: UpstreamError) -> None:
        """The exchange is over without a whole body."""


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, pool: Pool, address: Address) -> None:
        self._pool = pool
        self._now: Callable[[], float] = pool.now
        self._transport: asyncio.Transport
        self._reader = Reader(parse_response, heads=pool.heads)
        self.sink: Sink | None = None
        self._head: ResponseHead | None = None
        self._is_reusable = False
        self._is_paused = False
        # Where token chunks go, and their times, while there is nothing else to do with them.
        self._write_token: Callable[[bytes], object] | None = None
        self._note_token: Callable[[float], object]
        self.address = address
        self.origin_lines = pool.origin_lines(address)
        self.idle_since = 0.0

    def send(self, request: bytes, sink: Sink) -> None:
        """Sends a request; `sink` gets the response as it comes, or `lost`, never before this returns."""
        self._is_reusable = False
        self.sink, self._head = sink, None
        if self._transport.is_closing():
            # connection_lost may be over.
            asyncio.get_running_loop().call_soon(self._fail, UpstreamError("the engine closed the connection"))
        else:
            self._transport.write(request)

    def pass_tokens(self, write: Callable[[bytes], object], times: list[float]) -> None:
        """Until the next read that is no token chunk: those go to `write`, their times (monotonic) into `times`."""
        self._write_token, self._note_token = write, times.append

    def discard(self) -> None:
        """Ends the exchange and the connection; the sink gets no more."""
        self.sink = self._write_token = None
        self._transport.abort()

    def release(self) -> None:
        """Gives the connection back: to the pool after a whole exchange, else it is closed at once."""
        self.sink = self._write_token = None
        if self._is_reusable and not self._transport.is_closing():
            if self._is_paused:
                self.resume()
            self._pool.put(self)
        else:
            self._transport.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (*_TCP_OPTIONS.items(), ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        if self._write_token is not None:
            # Nearly every read of a stream: 1 us here where the way through the sink takes 5.
            if is_token_chunk(data):
                try:
                    self._write_token(data)
                except RuntimeError:
                    pass  # uvloop's word for a transport that was just closed: the sink's way asks first
                else:
                    self._note_token(self._now())
                    return
            self._write_token = None
        if self.sink is None:
            # Bytes without a request must not become the next request's response.
            self._transport.abort()
            return
        if self.sink.takes_chunks:
            is_last = self._reader.take_chunks(data)
            if is_last is not None:
                self._is_reusable = is_last and self._may_be_reused()
                self.sink.receive_chunks(data, is_last)
                return
        head: ResponseHead | None
        try:
            whole = self._reader.take_whole(data)
            if whole is not None and whole[0].status >= 200:
                head, body, is_end = *whole, True
                self._head = head
            else:
                self._reader.feed(data)
                head, body, is_end = self._read()
        except ProtocolError as error:
            self._transport.abort()
            self._fail(UpstreamError(f"the engine broke HTTP: {error}"))
            return
        if is_end:
            self._is_reusable = self._may_be_reused()
        if head is not None or body or is_end:
            self.sink.receive(head, body, is_end)

    def _may_be_reused(self) -> bool:
        assert self._head is not None
        return (
            self._head.keeps_alive and self._reader.is_between_messages and not self._transport.get_write_buffer_size()
        )

    def _read(self) -> tuple[ResponseHead | None, bytes, bool]:
        head = None
        pieces = []
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, ResponseHead):
                if event.status == 101:
                    raise ProtocolError(502, "it switched protocols unasked")
                if event.status >= 200:
                    head = self._head = event
            elif event is not END:
                pieces.append(event)
            elif self._head is not None:
                return head, b"".join(pieces), True
        return head, b"".join(pieces), False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        if self.sink is not None and exc is None and self._reader.may_end_here:
            self.sink.receive(None, b"", True)
        elif isinstance(exc, TimeoutError):
            self._fail(UpstreamError("the engine's machine does not answer"))
        else:
            self._fail(UpstreamError(f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def _fail(self, error: UpstreamError) -> None:
        sink, self.sink, self._write_token = self.sink, None, None
        if sink is not None:
            sink.lost(error)


class Pool:
    """Idle connections to engines, the last used first.

    `engine_key`: the key that the deployment's engines ask for; `keys`: those of others by address, "" for none. `via`:
    the gateway's name in requests to engines, by which it knows its own again.
    """

    def __init__(
        self,
        engine_key: str | None = None,
        keys: Mapping[Address, str] | None = None,
        via: bytes = b"penstock",
        world: World = REAL,
    ) -> None:
        self.now: Callable[[], float] = world.now
        self._engine_key = engine_key
        self.via = via
        self._keys = keys or {}
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        # Shared: an engine's heads change with the second (date), and it has many connections.
        self.heads = Heads(parse_response, MAX_HEADS, keeps_secrets=False)

    def origin_lines(self, address: Address) -> bytes:
        """The head's lines that say for whom a request is, with the key that the engine asks for."""
        host = b"host: %s\r\nvia: 1.1 %s\r\n" % (host_header(address), self.via)
        key = self._keys.get(address, self._engine_key)
        return host if not key else b"%sauthorization: Bearer %s\r\n" % (host, key.encode())

    def take(self, address: Address) -> UpstreamConnection | None:
        now = self.now()
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if now - connection.idle_since <= IDLE_S:
                return connection
            connection.discard()
        return None

    async def connect(self, address: Address) -> UpstreamConnection:
        """Raises OSError, which TimeoutError is."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            if address[0].startswith(UNIX):
                path = address[0].removeprefix(UNIX)
                _, connection = await loop.create_unix_connection(lambda: UpstreamConnection(self, address), path)
            else:
                _, connection = await loop.create_connection(lambda: UpstreamConnection(self, address), *address)
        return connection

    def put(self, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= MAX_IDLE:
            connection.discard()
            return
        connection.idle_since = self.now()
        idle.append(connection)

    def remove(self, connection: UpstreamConnection) -> None:
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def close(self) -> None:
        for connection in [each for idle in self._idle.values() for each in idle]:
            connection.discard()


class _Whole:
    takes_chunks = False

    def __init__(self, fits: Fits) -> None:
        self.answer: asyncio.Future[tuple[int, bytes | None]] = asyncio.get_running_loop().create_future()
        self._fits, self._status, self._body = fits, 0, bytearray()

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        if head is not None:
            self._status = head.status
        self._body += data
        is_short = self._fits(len(data), len(self._body))
        if not self.answer.done() and (is_end or not is_short):
            self.answer.set_result((self._status, bytes(self._body) if is_short else None))

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        raise AssertionError("not asked for")

    def lost(self, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def call(
    connection: UpstreamConnection, request: bytes, fits: Fits = lambda _, n_bytes: n_bytes <= MAX_ANSWER_BYTES
) -> asyncio.Future[tuple[int, bytes | None]]:
    """Status and body of the answer to `request`, once it is whole, without a body where it does not fit; or
    UpstreamError. The caller bounds its time."""
    whole = _Whole(fits)
    connection.send(request, whole)
    return whole.answer
