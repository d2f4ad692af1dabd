"""A listening socket, the connections that came in by it, and its drain."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

from penstock.errors import UserError
from penstock.gateway.config import Address
from penstock.gateway.server import ClientConnection, Handler

BACKLOG = 1024
FRESH_S = 1.0  # in a drain: for connections whose first request may be on its way
FLUSH_S = 1.0  # in a drain: for what is written when time is over
SWEEP_S = 5.0


class Listener:
    """A listening socket and the connections that came in by it."""

    def __init__(self, handler: Handler, sock: socket.socket) -> None:
        self.handler = handler
        self.is_draining = False
        self._sock = sock
        self._server: asyncio.Server | None = None
        self._connections: set[ClientConnection] = set()
        self._emptied = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    def add(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        self._emptied.clear()

    def remove(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._emptied.set()
        self._server = await loop.create_server(lambda: ClientConnection(self), sock=self._sock, backlog=BACKLOG)
        self._sweep()

    async def drain(self, drain_s: float) -> int:
        """Stops listening, lets requests finish, closes the rest; returns how many requests were cut."""
        assert self._server is not None
        # Two turns of the loop accept and read what the kernel has already: it must not be reset by the close.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.is_draining = True
        self._server.close()
        self._close_idle(is_fresh_spared=True)
        loop = asyncio.get_running_loop()
        fresh_timer = loop.call_later(FRESH_S, self._close_idle)
        await self._wait_empty(drain_s)
        fresh_timer.cancel()
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

    def _close_idle(self, *, is_fresh_spared: bool = False) -> None:
        for connection in tuple(self._connections):
            connection.close_if_idle(is_fresh_spared=is_fresh_spared)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in tuple(self._connections):
            connection.close_if_stale(time.monotonic())
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)


def open_socket(address: Address) -> socket.socket:
    """A bound, listening socket. Raises UserError when the port is taken or the address is not ours.

    SO_REUSEADDR lets a restart after a kill come back while old connections linger in TIME_WAIT. Not SO_REUSEPORT:
    with it a second gateway would take half of the connections instead of being told.
    """
    host, port = address
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
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"cannot listen on {host}:{port}: " + ("the port is taken" if taken else str(error.strerror or error)),
            hint=f"see who holds it: ss -ltnp 'sport = :{port}'" if taken else None,
        ) from error
    return sock
