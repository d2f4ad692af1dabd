"""The connections of the load generator: requests out, and the time and bytes of every read.

Nothing is parsed here: at 500 streams of 100 chunks a second a read has 20 us, of which the kernel takes a quarter.
Only the end of a response is looked for; `results/parse.py` finds events after the run. A request that meets a
connection which the server has just closed is sent again on another, once; its times count from the first try.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, cast

from penstock.bench.load.kernel_timestamps import IS_POSSIBLE, KernelTimestamps, ask_for_times
from penstock.wire.http1 import END, ProtocolError, Reader, parse_response

_HEAD: Final = 0  # how the present response goes on
_CHUNKED: Final = 1
_LENGTH: Final = 2
_UNTIL_CLOSED: Final = 3
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_MAX_HEAD_BYTES: Final = 65536

# Kinds of failure, as they are counted.
REFUSED: Final = "connection refused"
UNREACHABLE: Final = "could not connect"
CLOSED: Final = "connection closed"
MALFORMED: Final = "malformed HTTP"
TIMEOUT: Final = "timeout"
UNFINISHED: Final = "unfinished"  # the run was ended first


@dataclass(frozen=True)
class Address:
    """Where to send. `host` is resolved once; `name` is what TLS checks; `prefix` comes before "/v1"."""

    scheme: str
    host: str
    port: int
    name: str
    prefix: str = ""

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port == (443 if self.is_tls else 80) else f"{name}:{self.port}"


class Exchange:
    """One request and the raw response. Times are `perf_counter` seconds; 0 is "not yet".

    `asked_s`: when the generator came to it; `sent_s`: when a connection took it; `dial_s`: what opening one took.
    """

    def __init__(self, index: int, request: bytes, intended_s: float) -> None:
        self.index = index
        self.request = request
        self.intended_s = intended_s
        self.asked_s = 0.0
        self.sent_s = 0.0
        self.end_s = 0.0
        self.dial_s = 0.0
        self.times: list[float] = []
        self.reads: list[bytes] = []
        self.error: str | None = None
        self.detail = ""
        self.status = 0
        self.was_retried = False
        self.connection: Connection | None = None


class Connection(asyncio.Protocol):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._fd = -1
        self._has_timestamps = False
        self._is_batched = False
        self._framing = _HEAD
        self._n_left = 0
        self._keeps_alive = False
        self._n_served = 0
        self._walker: Reader | None = None  # type: ignore[type-arg]
        self._n_walked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of asyncio's
        if not self._pool.is_tls:
            sock = transport.get_extra_info("socket")
            self._fd = sock.fileno()
            self._has_timestamps = self._pool.timestamps is not None and ask_for_times(sock)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._framing = _HEAD
        self._walker = None
        exchange.connection = self
        request = exchange.request
        if exchange.sent_s == 0.0:
            exchange.sent_s = perf_counter()
        if self._fd >= 0 and self._transport.get_write_buffer_size() == 0:
            # uvloop keeps writes until it has gone through all the reads that are ready: at 500 streams that was up to
            # 3 ms after the time stamp. So the first write goes to the kernel here.
            with contextlib.suppress(OSError):  # full, or gone: the transport finds out which
                request = request[os.write(self._fd, request) :]
        if request:
            self._transport.write(request)

    def abort(self) -> None:
        self._exchange = None
        self._stop_batched_reads()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self._transport.abort()  # unexpected bytes must not become the next response
            return
        exchange.times.append(perf_counter())
        exchange.reads.append(data)
        if self._framing == _CHUNKED:
            # A token's chunk ends with "\n\n\r\n": this is all that it passes through.
            if (data.endswith(b"\r\n\r\n") or len(data) < 8) and self._has_ended(exchange, data):
                self._finish(exchange)
        elif self._framing == _LENGTH:
            self._n_left -= len(data)
            if self._n_left <= 0:
                self._finish(exchange)
        elif self._framing == _HEAD:
            self._take_head(exchange, data)

    def take(self, data: bytes, at_s: float) -> bool:
        exchange = self._exchange
        assert exchange is not None, "what is read in batches has an exchange"
        exchange.times.append(at_s)
        exchange.reads.append(data)
        if (data.endswith(b"\r\n\r\n") or len(data) < 8) and self._has_ended(exchange, data):
            self._is_batched = False
            self._transport.resume_reading()
            self._finish(exchange)
            return True
        return False

    def released(self) -> None:
        self._is_batched = False
        self._transport.resume_reading()

    def _start_batched_reads(self) -> None:
        timestamps = self._pool.timestamps
        if self._has_timestamps and timestamps is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._is_batched = True
            timestamps.add(self._fd, self)

    def _stop_batched_reads(self) -> None:
        if self._is_batched and self._pool.timestamps is not None:
            self._is_batched = False
            self._pool.timestamps.remove(self._fd)

    def _take_head(self, exchange: Exchange, data: bytes) -> None:
        whole = data if len(exchange.reads) == 1 else b"".join(exchange.reads)
        at = 0
        while True:
            end = whole.find(b"\r\n\r\n", at)
            if end < 0:
                if len(whole) - at > _MAX_HEAD_BYTES:
                    self._fail(exchange, MALFORMED, "its head has no end")
                return
            try:
                head = parse_response(whole[at:end])
            except ProtocolError as error:
                self._fail(exchange, MALFORMED, str(error))
                return
            at = end + 4
            if head.status >= 200:
                break
        self._keeps_alive = head.keeps_alive
        exchange.status = head.status
        if head.is_chunked:
            self._framing = _CHUNKED
            if self._has_ended(exchange, whole[max(at - 2, len(whole) - 16) :]):
                self._finish(exchange)
            else:
                self._start_batched_reads()
        elif head.length is None:
            self._framing = _UNTIL_CLOSED
        else:
            self._framing = _LENGTH
            self._n_left = head.length - (len(whole) - at)
            if self._n_left <= 0:
                self._finish(exchange)

    def _has_ended(self, exchange: Exchange, data: bytes) -> bool:
        """Whether a chunked body is over. `results/parse.py` checks again, by walking all chunks."""
        if data.endswith(_LAST_CHUNK):
            return True
        if len(data) < 8 and b"".join(exchange.reads[-8:]).endswith(_LAST_CHUNK):
            return True
        if not data.endswith(b"\r\n\r\n"):
            return False
        # Trailers, or events whose lines end with CR LF: only the sizes of the chunks can tell.
        if self._walker is None:
            self._walker, self._n_walked = Reader(parse_response), 0
        try:
            self._walker.feed(b"".join(exchange.reads[self._n_walked :]))
            self._n_walked = len(exchange.reads)
            was_final = False
            while (event := self._walker.next_event()) is not None:
                if event is END:
                    if was_final:
                        return True
                elif not isinstance(event, bytes):
                    was_final = event.status >= 200
        except ProtocolError:
            return True  # results/parse.py will find the same
        return False

    def _finish(self, exchange: Exchange) -> None:
        self._exchange = None
        self._n_served += 1
        exchange.connection = None
        exchange.end_s = exchange.times[-1]
        if self._keeps_alive and not self._transport.is_closing():
            self._pool.put(self)
        else:
            self._transport.abort()
        self._pool.on_end(exchange)

    def _fail(self, exchange: Exchange, kind: str, detail: str) -> None:
        self._exchange = None
        exchange.connection = None
        self._transport.abort()
        self._pool.fail(exchange, kind, detail)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is None:
            self._pool.forget(self)
            return
        self._exchange = None
        exchange.connection = None
        if self._framing == _UNTIL_CLOSED and exc is None:
            exchange.end_s = exchange.times[-1]
            self._pool.on_end(exchange)
        elif not exchange.reads and self._n_served and not exchange.was_retried:
            exchange.was_retried = True
            self._pool.send(exchange)
        else:
            self._pool.fail(exchange, CLOSED, str(exc) if exc else "")


class Pool:
    """Connections to one address. `on_end` gets every exchange once: whole, or with its error.

    `n_spare` are kept open ahead of need, so that a burst does not measure dialling.
    `timeout_s` bounds each dialling.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: Address,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._address, self._tls = address, tls
        self.is_tls = tls is not None
        self.timestamps = KernelTimestamps(loop) if IS_POSSIBLE and tls is None else None
        self.on_end: Callable[[Exchange], None]
        self._idle: list[Connection] = []
        self._waiting: deque[Exchange] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.n_spare = 0
        self.n_opened = 0

    async def warm(self, n_connections: int) -> None:
        """Opens connections ahead; stops after a batch of which all fail."""
        missing = n_connections - len(self._idle)
        while missing > 0:  # a listener's backlog may be short
            batch = min(missing, 64)
            n_before = self.n_opened
            await asyncio.gather(*[self._open(None) for _ in range(batch)])
            missing = missing - batch if self.n_opened > n_before else 0

    def send(self, exchange: Exchange) -> None:
        if exchange.asked_s == 0.0:
            exchange.asked_s = perf_counter()
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_open:
                connection.begin(exchange)
                if len(idle) + len(self._tasks) < self.n_spare:
                    self._spawn(None)
                return
        self._waiting.append(exchange)
        self._spawn(exchange)

    def put(self, connection: Connection) -> None:
        if self._waiting:
            # After the last read: `on_end` of the exchange that ended comes first.
            self._loop.call_soon(self._serve_waiting)
        self._idle.append(connection)

    def _serve_waiting(self) -> None:
        while self._waiting and self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.begin(self._waiting.popleft())

    def forget(self, connection: Connection) -> None:
        """An idle connection was closed by the server."""
        if connection in self._idle:
            self._idle.remove(connection)

    def fail(self, exchange: Exchange, kind: str, detail: str) -> None:
        exchange.error = kind
        exchange.detail = detail
        exchange.end_s = perf_counter()
        if exchange.sent_s == 0.0:
            exchange.sent_s = exchange.end_s
        self.on_end(exchange)

    def drop(self, exchange: Exchange, kind: str) -> None:
        connection = exchange.connection
        if connection is not None:
            exchange.connection = None
            connection.abort()
        elif exchange in self._waiting:
            self._waiting.remove(exchange)
        self.fail(exchange, kind, "")

    def close(self) -> None:
        """Closes what is idle, and opens no more."""
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        for task in self._tasks:
            task.cancel()
        if self.timestamps is not None:
            self.timestamps.close()

    def _spawn(self, exchange: Exchange | None) -> None:
        task = self._loop.create_task(self._open(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, exchange: Exchange | None) -> None:
        began = perf_counter()
        try:
            place = self._address
            name = place.name if self._tls else None
            dialling = self._loop.create_connection(
                lambda: Connection(self), place.host, place.port, ssl=self._tls, server_hostname=name
            )
            transport, connection = await asyncio.wait_for(dialling, self._timeout_s)
        except (OSError, ssl.SSLError) as error:
            if exchange is not None and exchange in self._waiting:
                self._waiting.remove(exchange)
                is_late = isinstance(error, TimeoutError)
                kind = REFUSED if isinstance(error, ConnectionRefusedError) else TIMEOUT if is_late else UNREACHABLE
                self.fail(exchange, kind, "while connecting" if is_late else str(error))
            return
        if self._is_closed:
            transport.abort()
            return
        self.n_opened += 1
        if exchange is not None:
            exchange.dial_s = perf_counter() - began
        self._idle.append(connection)
        self._serve_waiting()
