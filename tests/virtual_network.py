"""Connections in memory for `virtual_loop`: what a write does to its peer, as TCP on Linux does it.

A connection is two `Transport`s. `write` puts bytes into the receive buffer of its peer, up to RECEIVE_BYTES; the rest
waits with the writer (flow control). An end of file comes after the bytes. A reset comes when a peer closes with bytes
unread or with SO_LINGER 0, and after a write to a closed one. `Network.bytes_at_once` bounds a read.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

RECEIVE_BYTES: Final = 64 * 1024
READ_BYTES: Final = 256 * 1024
SO_ATTACH_FILTER: Final = 26
HOST: Final = "127.0.0.1"


class VirtualSocket:
    """Stands in for the socket of a connection."""

    family = socket.AF_INET

    def __init__(self, transport: Transport, own: int, peer: int) -> None:
        self.transport, self._own, self._peer = transport, own, peer
        self.options: dict[tuple[int, int], Any] = {}

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        self.options[level, name] = value

    def setblocking(self, flag: bool) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return HOST, self._own

    def getpeername(self) -> tuple[str, int]:
        return HOST, self._peer


class ListeningSocket:
    """Stands in for a listening socket. `is_off`: its machine answers nothing, so connecting takes for ever."""

    family = socket.AF_INET

    def __init__(self, network: Network, port: int) -> None:
        self._network, self.port = network, port
        self._queue: deque[VirtualSocket] = deque()
        self._on_readable: Callable[[], object] | None = None
        self._is_scheduled = False
        self.is_off = False
        self._number = next(network.numbers)
        self._closed = asyncio.Event()
        network.listening[port] = self

    def fileno(self) -> int:
        return -1 if self._closed.is_set() else self._number

    def getsockname(self) -> tuple[str, int]:
        return HOST, self.port

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if name == SO_ATTACH_FILTER:
            self.is_off = True

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        if not self._queue:
            raise BlockingIOError
        sock = self._queue.popleft()
        return sock, sock.getpeername()

    def close(self) -> None:
        self._closed.set()
        self._network.listening.pop(self.port, None)
        for sock in self._queue:
            sock.transport.reset_peer()

    async def connect(self, sock: VirtualSocket) -> None:
        if self.is_off:
            await self._closed.wait()
            raise refused(self.port)
        self._queue.append(sock)
        self.notify()

    def watch(self, on_readable: Callable[[], object] | None) -> None:
        self._on_readable = on_readable
        self.notify()

    def notify(self) -> None:
        if self._queue and self._on_readable is not None and not self._is_scheduled:
            self._is_scheduled = True
            self._network.call_soon(self._read)

    def _read(self) -> None:
        self._is_scheduled = False
        if self._on_readable is not None:
            self._on_readable()
        self.notify()


class Server:
    """An asyncio server on a listening socket."""

    def __init__(self, network: Network, sock: ListeningSocket, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._sock, self._factory = sock, factory
        self.sockets = (sock,)
        sock.watch(self._accept)

    def _accept(self) -> None:
        self._sock.accept()[0].transport.attach(self._factory())

    def close(self) -> None:
        self._sock.close()


class Network(asyncio.BaseEventLoop):
    """The loop's methods for sockets. `bytes_at_once`: of a read; None means all that came."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(40_000)
        self.listening: dict[int, ListeningSocket] = {}
        self.bytes_at_once: int | None = None

    def listen(self, port: int = 0) -> Any:
        """A listening socket."""
        if port in self.listening:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return ListeningSocket(self, port or next(self.numbers))

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._listener(fd).watch(lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        self._listener(fd).watch(None)
        return True

    def _listener(self, fd: int) -> ListeningSocket:
        return next(sock for sock in self.listening.values() if sock.fileno() == fd)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return Server(self, self.listen(port or 0), protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0)
        if port not in self.listening:
            raise refused(port)
        own = next(self.numbers)
        transport, other = Transport(self), Transport(self)
        for here, there, ports in ((transport, other, (own, port)), (other, transport, (port, own))):
            here.connect(there, VirtualSocket(here, *ports))
        await self.listening[port].connect(other.sock)
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        protocol = protocol_factory()
        sock.transport.attach(protocol)
        return sock.transport, protocol


def refused(port: int) -> ConnectionRefusedError:
    return ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed ('{HOST}', {port})")


class Transport(asyncio.Transport):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network
        self._protocol: Any = None
        self._out, self._in = bytearray(), bytearray()
        self._high, self._low = 64 * 1024, 16 * 1024
        self._is_writing_paused = self._is_reading_paused = self._is_scheduled = False
        self._is_closing = self._has_written_eof = False
        # Of the peer: its end of file came, and was delivered; its reset came. Of this end: its socket is closed.
        self._has_eof = self._has_read_eof = self._is_reset = self._is_closed = False

    def connect(self, peer: Transport, sock: VirtualSocket) -> None:
        self._peer, self.sock = peer, sock
        self._extra = {"socket": sock, "sockname": sock.getsockname(), "peername": sock.getpeername()}

    def attach(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._wake()

    # Reading.

    def is_reading(self) -> bool:
        return not (self._is_reading_paused or self._is_closing)

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._wake()

    def _wake(self) -> None:
        has_news = self._in or self._is_reset or (self._has_eof and not self._has_read_eof)
        if has_news and self._protocol is not None and self.is_reading() and not self._is_scheduled:
            self._is_scheduled = True
            self._network.call_soon(self._read)

    def _read(self) -> None:
        self._is_scheduled = False
        if not self.is_reading():
            return
        if self._in:
            n_bytes = self._network.bytes_at_once or READ_BYTES
            data = bytes(self._in[:n_bytes])
            del self._in[:n_bytes]
            self._protocol.data_received(data)
            self._peer._send()
        elif self._has_eof and not self._has_read_eof:
            self._has_read_eof = True
            if not self._protocol.eof_received():
                self.close()
        elif self._is_reset:
            self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        self._wake()

    # Writing.

    def write(self, data: Any) -> None:
        if self._has_written_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_closing:
            return
        self._out += data
        self._send()
        if len(self._out) > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_written_eof = True
        self._send()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def _send(self) -> None:
        peer = self._peer
        if self._is_closed:
            return
        if self._out and self._is_reset:
            self._lose(BrokenPipeError(errno.EPIPE, "Broken pipe"))
        elif self._out and peer._is_closed:
            self._out.clear()
            self._is_reset = True
            self._wake()
        n_bytes = RECEIVE_BYTES - len(peer._in)
        if self._out and n_bytes > 0:
            peer._in += self._out[:n_bytes]
            del self._out[:n_bytes]
            peer._wake()
        if not self._out and self._has_written_eof:
            peer.end_input()
        if not self._out and self._is_closing:
            self._lose(None)
        elif self._is_writing_paused and len(self._out) <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def end_input(self) -> None:
        if not self._has_eof:
            self._has_eof = True
            self._wake()

    def reset_peer(self) -> None:
        self._peer._is_reset = True
        self._peer._wake()

    # Closing.

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send()

    def abort(self) -> None:
        self._out.clear()
        self._is_closing = True
        self._lose(None)

    _is_losing = False

    def _lose(self, error: Exception | None) -> None:
        self._out.clear()
        self._is_closing = True
        if not self._is_losing:
            self._is_losing = True
            self._network.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)
        self._is_closed = True
        has_linger_0 = (socket.SOL_SOCKET, socket.SO_LINGER) in self.sock.options
        if self._in or has_linger_0 or self._peer._out:
            self.reset_peer()
        else:
            self._peer.end_input()
