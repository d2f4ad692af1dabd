"""A listening socket, the connections that came in by it, and its drain."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import heapq
import logging
import operator
import os
import socket
import ssl
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.gateway.config import UNIX, Address
from penstock.gateway.connections.client import ClientConnection, Handler
from penstock.gateway.connections.shared_server import Share, SharedServer
from penstock.spec.gateway import Limits, is_loopback
from penstock.text import MIB
from penstock.wire.addresses import network_of
from penstock.wire.http1 import RequestHead, parse_request
from penstock.world import REAL, World

BACKLOG = 1024
HANDSHAKES_S = 0.05  # in a drain: for handshakes that are under way
GRACE_S = 0.5  # in a drain: for requests on their way on an idle connection
FLUSH_S = 1.0  # in a drain: for what is written when time is over
SWEEP_S = 5.0
ARRIVING_BYTES = 256 * MIB  # of bodies that are not whole yet, all connections together
SLOW_BODY_S = 10.0
RESERVED_FILES = 64  # for everything but clients and engines

log = logging.getLogger(__name__)

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


class Listener:
    def __init__(
        self,
        handler: Handler,
        sock: socket.socket,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        *,
        share: Share | None = None,
        path_prefix: str = "",
        world: World = REAL,
    ) -> None:
        """`share`: other processes accept from this socket too."""
        self._world = world
        self.now: Callable[[], float] = world.now
        self.unix: Callable[[], float] = world.unix
        self.handler = handler
        self.limits = limits or Limits()
        self.parse_head: Callable[[bytes], RequestHead] = functools.partial(
            parse_request, max_headers=self.limits.n_headers
        )
        if path_prefix:
            self.parse_head = functools.partial(_parse_below, path_prefix.encode(), self.limits.n_headers)
        self.is_draining = False
        self._tls = tls
        # Drawn here and not at import: workers are forked before they make their listeners.
        self._id_prefix = os.urandom(8).hex().encode()
        self._n_request_ids = 0
        self._sock = sock
        self._share = share or Share(1)
        self._server: SharedServer | None = None
        self._connections: dict[ClientConnection, str] = {}  # with their sources
        self._by_source: defaultdict[str, set[ClientConnection]] = defaultdict(set)
        self._n_body_bytes = 0
        self._emptied = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None

    def reserve(self, n_bytes: int) -> bool:
        """Takes from the budget for arriving bodies; False when it is used up and no slow body can give way."""
        if self._n_body_bytes + n_bytes > max(ARRIVING_BYTES, 2 * self.limits.body_bytes):
            now = self.now()
            slow = next((each for each in self._connections if each.has_slow_body(now - SLOW_BODY_S)), None)
            if slow is None:
                return False
            slow.refuse_late()
        self._n_body_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self._n_body_bytes -= n_bytes

    @property
    def port(self) -> int:
        """0 for a Unix socket."""
        return 0 if self._sock.family == socket.AF_UNIX else int(self._sock.getsockname()[1])

    def new_request_id(self) -> bytes:
        """32 hex digits that no other listener gives. 0.2 us; 16 bytes of os.urandom are 0.4 us."""
        self._n_request_ids += 1
        return b"%s%016x" % (self._id_prefix, self._n_request_ids)

    def add(self, connection: ClientConnection) -> bool:
        """Whether there is room for it, perhaps that of the connection which has been idle for longest."""
        n_most, limits = self.limits.n_connections_per_address, self.limits
        source = _source_of(connection.address)
        others = self._by_source[source]
        if source and len(others) >= ((limits.n_connections + 1) // 2 if n_most is None else n_most):
            has_room = _close_longest_idle(others)
        else:
            has_room = len(self._connections) < limits.n_connections or _close_longest_idle(self._connections)
        self._by_source[source].add(connection)
        self._connections[connection] = source
        self._emptied.clear()
        self._share.set(len(self._connections))
        return has_room

    def remove(self, connection: ClientConnection) -> None:
        if (source := self._connections.pop(connection, None)) is not None:
            self._by_source[source].remove(connection)
            if not self._by_source[source]:
                del self._by_source[source]
        self._share.set(len(self._connections))
        if not self._connections:
            self._emptied.set()

    async def start(self) -> None:
        self._emptied.set()
        self._share.set(0)
        # A TLS handshake counts as a head: a client that never ends it is disconnected.
        handshake_s = self.limits.head_s if self._tls else None
        self._server = SharedServer(self._sock, lambda: ClientConnection(self), self._share, self._tls, handshake_s)
        self._sweep()

    async def drain(self, drain_s: float) -> int:
        """Stops listening, lets requests finish, closes the rest; returns how many requests were cut.

        Closing a listening socket resets what it has not accepted yet, and closing an idle connection may cross a
        request: both would lose requests. So handshakes are refused first, and idle connections have GRACE_S.
        """
        assert self._server is not None
        self.is_draining = True
        if self._sock.family != socket.AF_UNIX:
            _refuse_new_connections(self._sock)
        await self._world.pause(min(HANDSHAKES_S, drain_s))
        await self._server.close()
        grace_s = min(GRACE_S, drain_s)
        await self._wait_empty(grace_s)
        for connection in tuple(self._connections):
            connection.close_if_idle()
        await self._wait_empty(drain_s - grace_s)
        n_cut = sum([connection.cut() for connection in tuple(self._connections)])
        await self._wait_empty(FLUSH_S)
        for connection in tuple(self._connections):
            connection.abort()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        return n_cut

    async def _wait_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()

    def _sweep(self) -> None:
        for connection in tuple(self._connections):
            connection.close_if_stale(self.now())
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


def _close_longest_idle(connections: Collection[ClientConnection]) -> bool:
    """Returns whether one was idle. Of many a thousandth is closed at once: to look for it takes 1 ms of 16,000."""
    idle = [(since, each) for each in connections if (since := each.idle_since) is not None]
    for _, connection in heapq.nsmallest(max(1, len(connections) // 1000), idle, key=operator.itemgetter(0)):
        connection.abort()
    return bool(idle)


@functools.lru_cache(maxsize=4096)
def _source_of(address: str) -> str:
    """Who counts as one. Empty for this machine: that is a proxy."""
    network = network_of(address)
    return "" if is_loopback(address) or is_loopback(network) else network


def fit_connections(limits: Limits, n_files: int) -> Limits:
    """The limits with no more connections than files allow: each needs one, and one more to its engine."""
    n_most = max(1, (n_files - RESERVED_FILES) * 2 // 5)
    if limits.n_connections > n_most:
        log.info("%d open files are allowed: at most %d connections", n_files, n_most)
        return msgspec.structs.replace(limits, n_connections=n_most)
    return limits


def _parse_below(prefix: bytes, n_headers: int, text: bytes) -> RequestHead:
    head = parse_request(text, n_headers)
    rest = head.target[len(prefix) :]
    if head.target.startswith(prefix) and rest[:1] in (b"", b"/", b"?"):
        head.target = rest if rest[:1] == b"/" else b"/" + rest
        head.path = head.target.partition(b"?")[0]
    return head


def _refuse_new_connections(sock: socket.socket) -> None:
    """Drops new handshakes. 58 resets in 8 stops under load without it, none with it. Linux only."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP_SYN, len(_DROP_SYN))
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(program))
        )


def open_tls(cert: str, key: str) -> ssl.SSLContext:
    """A server's context: TLS 1.2 and later, only HTTP/1.1 offered. Raises UserError for files that cannot be used."""
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
    path = Path(host.removeprefix(UNIX)) if host.startswith(UNIX) else None
    place, what, who_holds_it = f"{host}:{port}", "port", f"ss -ltnp 'sport = :{port}'"
    if path is not None:
        place, what, who_holds_it = f"unix:{path}", "file", f"ss -lxp src {path}"
    family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if path is not None:
            _bind_to_file(sock, path, mode)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it: it finds clients that vanished without a word during a long prefill.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"cannot listen on {place}: " + (f"the {what} is taken" if taken else str(error.strerror or error)),
            hint=f"see which process has it: {who_holds_it}" if taken else None,
        ) from error
    return sock


def _bind_to_file(sock: socket.socket, path: Path, mode: int | None) -> None:
    """Replaces a file that a killed gateway left, but not one that a process listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        is_left = path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED
    if is_left:
        path.unlink()
    sock.bind(str(path))
    if mode is not None:
        # Nobody can connect before listen(), so that there is no moment in which the file lets others in.
        path.chmod(mode)
