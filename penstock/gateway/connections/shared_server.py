"""Accepting from a socket that processes may share: none loses a connection with another that hangs or dies."""

from __future__ import annotations

import asyncio
import copy
import logging
import mmap
import socket
import ssl
from collections.abc import Callable

ACCEPT_AGAIN_S = 0.1  # after an error
YIELD_S = 0.001  # to processes with fewer connections
SLACK = 1

log = logging.getLogger(__name__)


class Share:
    """How many connections each process has that accepts from one socket. Create it before the fork, then `of`."""

    def __init__(self, n_processes: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * n_processes)).cast("q")
        self._own = 0

    def of(self, own: int) -> Share:
        share = copy.copy(self)
        share._own = own
        return share

    def set(self, n_connections: int) -> None:
        self._counts[self._own] = n_connections

    @property
    def is_ahead(self) -> bool:
        return self._counts[self._own] > min(self._counts) + SLACK


class SharedServer:
    """Accepts one connection in a turn of the loop, and a moment later than other processes when it has more than they.

    asyncio's own server takes all that wait: four workers got 47, 0, 8 and 9 of 64 connections. uvloop's closes those
    for which it has no file descriptor, without an answer; here they wait.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        share: Share,
        tls: ssl.SSLContext | None,
        handshake_s: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._make, self._share, self._tls = sock, make, share, tls
        self._handshake_s = handshake_s
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._has_waited = False
        self._resume()

    async def close(self) -> None:
        """Accepts what is in the queue, and leaves the socket to the others. Idempotent."""
        if self._sock.fileno() >= 0:
            while self._accept():
                pass
            if self._pause_timer is not None:
                self._pause_timer.cancel()
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
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
