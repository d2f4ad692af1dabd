"""What worker 0 hears on the admin address, told to the other workers of the gateway.

Each of them has an admin listener of its own on a Unix socket. What matters is the last word about a replica, so that
what could not be told yet is kept by replica and not in a queue that grows; a worker that was restarted is told all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.gateway.config import parse_address
from penstock.gateway.connections.client import ClientConnection, Handler
from penstock.gateway.connections.engine import Pool, UpstreamConnection, UpstreamError, call
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer
from penstock.wire.http1 import Headers, RequestHead, write_request_head

RETRY_S = 0.2
TELL_S = 5.0
CHECK_S = 0.5

# Path -> what it replaces of what was said about the same replica before.
_KINDS = {
    b"/admin/announce": "announcement",
    b"/admin/drain": "drain",
    b"/admin/undrain": "drain",
    b"/admin/forget": "drain",
    b"/admin/leave": "drain",
}

log = logging.getLogger(__name__)

_Key = tuple[str, str]
_Call = tuple[bytes, bytes]


class _Named(msgspec.Struct):
    replica: str


class _Peer:
    """One other worker. `untold` is in the order in which it must be told."""

    def __init__(self, address: str, token: str, said: dict[_Key, _Call]) -> None:
        parsed = parse_address(address)
        assert parsed is not None
        self._address = parsed
        self._token = token.encode()
        self._said = said
        self._pool = Pool()
        self._connection: UpstreamConnection | None = None
        self.untold: dict[_Key, _Call] = {}
        self.has_news = asyncio.Event()

    async def tell(self) -> None:
        """Tells this worker what it does not know, for ever."""
        while True:
            try:
                async with asyncio.timeout(TELL_S):
                    await self._tell_once()
            except (OSError, UpstreamError) as error:
                log.debug("worker at %s: %s", self._address[0], error)
                await asyncio.sleep(RETRY_S)
            if not self.untold:
                self.has_news.clear()
                await self._wait()

    async def _wait(self) -> None:
        """For news, or to see whether the worker is still the one that was told."""
        try:
            async with asyncio.timeout(CHECK_S):
                await self.has_news.wait()
        except TimeoutError:
            pass

    async def _tell_once(self) -> None:
        if self._connection is None or not self._connection.is_open:
            self._connection = await self._pool.connect(self._address)
            # It may be another process than the one that was told before.
            self.untold = dict(self._said)
        while self.untold:
            key, (path, body) = next(iter(self.untold.items()))
            await self._call(path, body)
            if self.untold.get(key) == (path, body):
                del self.untold[key]

    async def _call(self, path: bytes, body: bytes) -> None:
        assert self._connection is not None
        headers = [
            (b"host", b"localhost"),
            (b"authorization", b"Bearer " + self._token),
            (b"content-length", b"%d" % len(body)),
        ]
        try:
            status = await call(self._connection, write_request_head(b"POST", path, headers) + body)
        except BaseException:
            self._connection.close()
            self._connection = None
            raise
        if status != 200:
            log.warning("worker at %s answered %d to %s", self._address[0], status, path.decode())


class Relay:
    """Tells the other workers; `say` never blocks."""

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self._said: dict[_Key, _Call] = {}
        self._peers = [_Peer(address, token, self._said) for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(peer.tell()) for peer in self._peers]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def say(self, path: bytes, body: bytes) -> None:
        """Passes an admin call on to every other worker, now or when it can be reached."""
        replica = msgspec.json.decode(body, type=_Named).replica
        key = (replica, _KINDS[path])
        self._said.pop(key, None)
        if path == b"/admin/forget":
            self._said.pop((replica, "announcement"), None)
        else:
            self._said[key] = (path, body)
        for peer in self._peers:
            peer.untold.pop(key, None)
            if path == b"/admin/forget":
                peer.untold.pop((replica, "announcement"), None)
            peer.untold[key] = (path, body)
            peer.has_news.set()


class RelayingAdmin:
    """The admin listener's handler in worker 0: does what it is told, and passes it on when that went well.

    `keep_drains` is called when they may have changed, and before that is answered.
    """

    def __init__(self, admin: Handler, relay: Relay, keep_drains: Callable[[], None]) -> None:
        self._admin = admin
        self._relay = relay
        self._keep_drains = keep_drains

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        return self._admin.refuse(head, is_whole=is_whole)

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        outcome = self._admin.handle(request, client)
        path = request.head.path
        if path in _KINDS and isinstance(outcome, Answer) and outcome.status == 200:
            self._relay.say(path, request.body)
            if _KINDS[path] == "drain":
                self._keep_drains()
        return outcome

    def origin_headers(self, head: RequestHead) -> Headers:
        return self._admin.origin_headers(head)
