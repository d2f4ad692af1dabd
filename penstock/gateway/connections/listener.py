"""A listening socket, the connections that came in by it, and its drain."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import errno
import functools
import logging
import mmap
import os
import socket
import ssl
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import UserError
from penstock.gateway.config import UNIX, Address
from penstock.gateway.connections.client import ClientConnection, Handler
from penstock.spec.gateway import Limits
from penstock.wire.http1 import RequestHead, parse_request

BACKLOG = 1024
DOOR_S = 0.05  # in a drain: for handshakes that are under way
GRACE_S = 0.5  # in a drain: for requests on their way on an idle connection
FLUSH_S = 1.0  # in a drain: for what is written when time is over
SWEEP_S = 5.0
ACCEPT_AGAIN_S = 1.0  # after an error
YIELD_S = 0.001  # to processes with fewer connections
SLACK = 1

# A filter program over the TCP header (offset 13 holds the flags) that drops segments with SYN and without ACK.
# https://www.kernel.org/doc/html/latest/networking/filter.html; SO_ATTACH_FILTER is 26 in asm-generic/socket.h.
_SO_ATTACH_FILTER = 26
_DROP_SYN = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # A = flags
        (0x54, 0, 0, 0x12),  # A &= SYN | ACK
        (0x15, 0, 1, 0x02),  # if A is SYN alone
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # else keep
    )
)

log = logging.getLogger(__name__)


class Listener:
    """A listening socket and the connections that came in by it."""

    def __init__(
        self,
        handler: Handler,
        sock: socket.socket,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        share: Share | None = None,
    ) -> None:
        """`share`: other processes accept from this socket too."""
        self.handler = handler
        self.limits = limits or Limits()
        self.parse_head: Callable[[bytes], RequestHead] = functools.partial(
            parse_request, max_headers=self.limits.n_headers
        )
        self.is_draining = False
        self._tls = tls
        # Drawn here and not at import: workers are forked before they make their listeners.
        self._id_prefix = os.urandom(8).hex().encode()
        self._n_request_ids = 0
        self._sock = sock
        self._share = share
        self._server: asyncio.Server | SharedServer | None = None
        self._connections: set[ClientConnection] = set()
        self._emptied = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """0 for a Unix socket."""
        return 0 if self._sock.family == socket.AF_UNIX else int(self._sock.getsockname()[1])

    @property
    def is_full(self) -> bool:
        return len(self._connections) > self.limits.n_connections

    def new_request_id(self) -> bytes:
        """32 hex digits that no other listener gives: a number of our own, and how many came before it.

        0.2 us; 16 bytes of os.urandom are 0.4 us.
        """
        self._n_request_ids += 1
        return b"%s%016x" % (self._id_prefix, self._n_request_ids)

    def add(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        self._emptied.clear()
        self._count()

    def remove(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._count()
        if not self._connections:
            self._emptied.set()

    def _count(self) -> None:
        if self._share is not None:
            self._share.set(len(self._connections))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._emptied.set()
        self._count()
        if self._share is not None:
            handshake_s = self.limits.head_s
            self._server = SharedServer(self._sock, lambda: ClientConnection(self), self._share, self._tls, handshake_s)
            self._sweep()
            return
        create = loop.create_unix_server if self._sock.family == socket.AF_UNIX else loop.create_server
        # A handshake of TLS counts as a head: a client that never ends it is let go.
        timeout_s = self.limits.head_s if self._tls else None
        self._server = await create(
            lambda: ClientConnection(self),
            sock=self._sock,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=timeout_s,
        )
        self._sweep()

    async def drain(self, drain_s: float) -> int:
        """Stops listening, lets requests finish, closes the rest; returns how many requests were cut.

        Closing a listening socket resets the connections that it has not accepted yet, and closing an idle one
        may cross a request on its way: both would be lost requests. So the door is closed first and the socket
        after it, and an idle connection has a moment in which a request is still answered, with "close".
        """
        assert self._server is not None
        self.is_draining = True
        if self._sock.family != socket.AF_UNIX:
            _refuse_new_connections(self._sock)
        await asyncio.sleep(min(DOOR_S, drain_s))
        self._server.close()
        if isinstance(self._server, SharedServer):
            await self._server.wait_connected()
        grace_timer = asyncio.get_running_loop().call_later(min(GRACE_S, drain_s), self._close_idle)
        await self._wait_empty(drain_s)
        grace_timer.cancel()
        n_cut = sum(connection.is_busy for connection in self._connections)
        for connection in tuple(self._connections):
            connection.cut()
        await self._wait_empty(FLUSH_S)
        for connection in tuple(self._connections):
            connection.abort()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        return n_cut

    async def _wait_empty(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        except TimeoutError:
            pass

    def _close_idle(self) -> None:
        for connection in tuple(self._connections):
            connection.close_if_idle()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in tuple(self._connections):
            connection.close_if_stale(time.monotonic())
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)


class Share:
    """How many connections each process has that accepts from one socket. Create it before the fork, then `of`.

    >>> share = Share(n_processes=2)
    >>> mine, other = share.of(0), share.of(1)
    >>> mine.set(5); mine.is_ahead, other.is_ahead
    (True, False)
    """

    def __init__(self, n_processes: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * n_processes)).cast("q")
        self._own = 0

    def of(self, own: int) -> Share:
        """The same counts, for the process with this number."""
        share = copy.copy(self)
        share._own = own
        return share

    def set(self, n_connections: int) -> None:
        self._counts[self._own] = n_connections

    @property
    def is_ahead(self) -> bool:
        return self._counts[self._own] > min(self._counts) + SLACK


class SharedServer:
    """Accepts from a socket that other processes accept from too: one connection in a turn of the loop, and a moment
    later than they when it has more than they have.

    asyncio's own server takes all that wait. With one a turn, four workers got 47, 0, 8 and 9 of 64 connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        share: Share,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._make, self._share, self._tls = sock, make, share, tls
        self._handshake_s = handshake_s if tls is not None else None
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._has_waited = False
        self._resume()

    def close(self) -> None:
        """Takes what is in the queue, and leaves the socket to the others."""
        while self._accept():
            pass
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    async def wait_connected(self) -> None:
        """Until what was accepted is a connection."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._pause_timer = self._loop.call_later(pause_s, self._resume)

    def _on_readable(self) -> None:
        self._has_waited = not self._has_waited and self._share.is_ahead
        if self._has_waited:
            self._pause(YIELD_S)
        else:
            self._accept()

    def _accept(self) -> bool:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has left
        except OSError as error:
            # Out of files: the queue stays readable, and looking at it again at once would take all of a core.
            log.error("could not accept a connection: %s", error)
            self._pause(ACCEPT_AGAIN_S)
            return False
        sock.setblocking(False)
        task = self._loop.create_task(self._connect(sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:  # a handshake that failed; TimeoutError and SSLError are OSErrors
            log.debug("a connection ended before it began: %s", error)


def _refuse_new_connections(sock: socket.socket) -> None:
    """No new handshake begins; those begun end well and are accepted. A client's kernel tries again after 1 s.

    Measured over 8 stops under load from 12 clients that connect anew for each request: 58 resets without it, none
    with it. Linux only; elsewhere the small risk remains.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(program))
        )


def open_tls(cert: str, key: str) -> ssl.SSLContext:
    """A server's context with a certificate chain and its key. Raises UserError when the files do not serve.

    TLS 1.2 and later with Python's own choice of ciphers; only HTTP/1.1 is offered, so that no client tries HTTP/2.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # SSLError is one
        raise UserError(
            f"cannot use certificate {cert!r} with key {key!r}: {error.strerror or error}",
            hint="both are PEM files; the certificate's comes first in its chain, and the key has no passphrase",
        ) from error
    return context


def open_socket(address: Address, *, mode: int | None = None) -> socket.socket:
    """A bound, listening socket. Raises UserError when the port is taken or the address is not ours.

    SO_REUSEADDR lets a restart after a kill come back while old connections linger in TIME_WAIT. Not SO_REUSEPORT: a
    second gateway would take half of the connections instead of an error. `mode`: of a Unix socket's file.
    """
    host, port = address
    if host.startswith(UNIX):
        return _open_unix_socket(Path(host.removeprefix(UNIX)), mode)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: it finds clients that vanished without a word during a long prefill.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _cannot_listen(f"{host}:{port}", "port", f"ss -ltnp 'sport = :{port}'", error) from error
    return sock


def _open_unix_socket(path: Path, mode: int | None) -> socket.socket:
    """As open_socket. A file that a killed gateway left is replaced, one that somebody listens on is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        sock.bind(str(path))
        if mode is not None:
            # Nobody can connect before listen(), so that there is no moment in which the file lets others in.
            path.chmod(mode)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _cannot_listen(f"unix:{path}", "file", f"ss -lxp src {path}", error) from error
    return sock


def _cannot_listen(place: str, what: str, who_holds_it: str, error: OSError) -> UserError:
    taken = error.errno == errno.EADDRINUSE
    return UserError(
        f"cannot listen on {place}: " + (f"the {what} is taken" if taken else str(error.strerror or error)),
        hint=f"see who holds it: {who_holds_it}" if taken else None,
    )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED
