"""A worker's end of the socket pair to its parent, on the worker's event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from penstock.gateway.connections.shared_server import Share
from penstock.gateway.workers.messages import AdminCall, Frames, Report, Reports, frame

GATHER_S = 2.0  # the parent answers within 0.7 s, unless it is stopped itself

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSlot:
    """What the parent gives a worker.

    `socket`: its end of the pair; `calls`: the admin calls that still hold; `before`: its predecessor's last report;
    `began_at`: when the parent started, in monotonic seconds.
    """

    index: int
    socket: socket.socket
    public: Share
    admin: Share
    calls: tuple[tuple[bytes, bytes], ...] = ()
    before: bytes | None = None
    began_at: float = 0.0


class ParentLink(asyncio.Protocol):
    """Reports to the parent, and reaches the other workers through it. No call blocks."""

    def __init__(
        self, write_report: Callable[[], bytes], apply: Callable[[bytes, bytes], object], on_lost: Callable[[], object]
    ) -> None:
        """`apply` does an admin call that another worker got; `on_lost`: the parent died."""
        self._write_report = write_report
        self._apply = apply
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reports]] = {}
        self._last = Reports(0, [], [])

    async def start(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        self.report()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def report(self, number: int = 0) -> None:
        """Publishes this worker's numbers, unless the parent does not read and did not ask."""
        transport = self._transport
        if transport is not None and (number or not transport.get_write_buffer_size()):
            transport.write(frame(Report(self._write_report(), number)))

    def relay(self, path: bytes, body: bytes, number: int = 0) -> None:
        if self._transport is not None:
            self._transport.write(frame(AdminCall(path, body, number)))

    async def gather(self, path: bytes = b"", body: bytes = b"") -> Reports:
        """The other workers' reports after each has done the call; the last report of a worker that does not answer.

        Own numbers go first: a worker that is asked later then knows at least as much.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.report()
        self.relay(path, body, number)
        try:
            async with asyncio.timeout(GATHER_S):
                self._last = await future
        except TimeoutError:
            log.warning("the parent process does not answer")
        finally:
            del self._waiting[number]
        return self._last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Reports):
                future = self._waiting.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, AdminCall):
                if message.path:
                    self._apply(message.path, message.body)
                if message.number:
                    self.report(message.number)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._on_lost()
