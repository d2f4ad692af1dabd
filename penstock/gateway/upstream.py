"""Connections to engines: kept alive, pooled by address, one exchange at a time on each."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

from penstock.gateway.config import Address
from penstock.gateway.http1 import END, ProtocolError, Reader, ResponseHead, parse_response

CONNECT_S = 5.0
# Below uvicorn's keep-alive timeout of 5 s, which vLLM keeps: a connection that the engine is about to close
# would swallow a request. https://docs.vllm.ai/en/latest/configuration/env_vars.html (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
IDLE_S = 4.0
MAX_IDLE = 512


class UpstreamError(Exception):
    """The engine's connection ended, or broke HTTP, before its response was whole."""


class RejectedError(UpstreamError):
    """The sink did not want the response."""


class Sink(Protocol):
    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        """What one read brought: the head if it was in there, body bytes, and whether the body is whole."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: Pool, address: Address) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._reader = Reader(parse_response)
        self._sink: Sink | None = None
        self._whole: asyncio.Future[None] | None = None
        self._head: ResponseHead | None = None
        self._is_reusable = False
        self.address = address
        self.idle_since = 0.0

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Sends a request; `sink` gets the response as it comes. Returns when it is whole, or raises UpstreamError.

        Waits as long as the engine does: the time to a first token has no bound that a gateway could know.
        """
        self._is_reusable = False
        if self._transport.is_closing():
            raise UpstreamError("the engine closed the connection")
        self._sink, self._head = sink, None
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        # Up to 32 MiB, and this coroutine lives as long as the response.
        del request
        await self._whole

    def reject(self, message: str) -> None:
        """From within the sink: ends the exchange with RejectedError, and the connection; the sink gets no more."""
        self._sink, self._is_reusable = None, False
        self._fail(RejectedError(message))
        self._transport.abort()

    def release(self) -> None:
        """Gives the connection back: to the pool after a whole exchange, else it is closed at once."""
        self._sink = self._whole = None
        if self._is_reusable and not self._transport.is_closing():
            self.resume()
            self._pool.put(self)
        else:
            self._transport.abort()

    def close(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            # Bytes that nobody asked for: whatever they are, they must not become the next request's response.
            self._transport.abort()
            return
        self._reader.feed(data)
        try:
            head, body, is_end = self._read()
        except ProtocolError as error:
            self._fail(UpstreamError(f"the engine broke HTTP: {error}"))
            self._transport.abort()
            return
        if is_end:
            assert self._head is not None
            is_clean = self._reader.is_between_messages and not self._transport.get_write_buffer_size()
            self._is_reusable = self._head.keeps_alive and is_clean
        if head is not None or body or is_end:
            self._sink.receive(head, body, is_end)
        if is_end:
            self._succeed()

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

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        if self._sink is not None and exc is None and self._reader.may_end_here:
            self._sink.receive(None, b"", True)
            self._succeed()
        else:
            self._fail(UpstreamError(f"the engine closed the connection{f': {exc}' if exc else ''}"))

    def _succeed(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(error)


class Pool:
    """Idle connections to engines, the last used first."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[UpstreamConnection]] = {}

    def take(self, address: Address) -> UpstreamConnection | None:
        """An idle connection that is young enough to trust, if there is one."""
        now = time.monotonic()
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if now - connection.idle_since <= IDLE_S:
                return connection
            connection.close()
        return None

    async def connect(self, address: Address) -> UpstreamConnection:
        """A new connection. Raises OSError, which TimeoutError is one of."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(lambda: UpstreamConnection(self, address), *address)
        return connection

    def put(self, connection: UpstreamConnection) -> None:
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)

    def remove(self, connection: UpstreamConnection) -> None:
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def close(self) -> None:
        for idle in tuple(self._idle.values()):
            for connection in tuple(idle):
                connection.close()
