"""GET /metrics/engines: the series of all engines, asked for when somebody asks, as one page of Prometheus text."""

from __future__ import annotations

import asyncio
import contextlib

from penstock.gateway.config import Address, GatewayConfig
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.connections.engine import Pool, UpstreamError, call
from penstock.gateway.metrics import counters
from penstock.gateway.metrics.counters import Labels
from penstock.gateway.metrics.engine_pages import EnginePages
from penstock.gateway.request import Request
from penstock.gateway.responses import http_date
from penstock.gateway.routing.replicas import Replica, ReplicaTable
from penstock.text import MIB
from penstock.wire.http1 import write_response_head
from penstock.world import REAL, World

DEADLINE_S = 2.0
# A page of vLLM has some 60 kB.
PAGE_BYTES_MAX = 8 * MIB
PAGES_BYTES_MAX = 256 * MIB  # of all replicas
# Who asks within that time gets the same page. Prometheus asks each 15 s, rarely each second.
KEEP_S = 1.0


class EngineMetrics:
    """Several who ask at once share one round of questions to the engines."""

    def __init__(self, config: GatewayConfig, replicas: ReplicaTable, pool: Pool, world: World = REAL) -> None:
        self._world = world
        self._config, self._replicas, self._pool = config, replicas, pool
        self._scrape: asyncio.Task[list[bytes]] | None = None
        self._n_bytes_left = 0  # that all pages of a scrape may still have

    def respond(self, request: Request, client: ClientConnection) -> None:
        client.work = asyncio.get_running_loop().create_task(self._respond(request, client))

    def stop(self) -> None:
        if self._scrape is not None:
            self._scrape.cancel()

    async def _respond(self, request: Request, client: ClientConnection) -> None:
        flow = _Flow()
        try:
            pieces = await asyncio.shield(self._start())
            headers = [
                (b"date", http_date(int(self._world.unix()))),
                (b"content-type", counters.CONTENT_TYPE),
                (b"content-length", b"%d" % sum(map(len, pieces))),
                (b"x-request-id", request.request_id),
            ]
            if not client.keeps_alive:
                headers.append((b"connection", b"close"))
            client.read_from(flow)
            client.write(write_response_head(200, headers))
            for piece in () if request.head.method == b"HEAD" else pieces:
                await flow.may_write.wait()
                client.write(piece)
                await self._world.pause(0)  # requests come between two families
        except asyncio.CancelledError:
            client.fail(is_framed=True)
            raise
        client.read_from(None)
        client.finish()

    def _start(self) -> asyncio.Task[list[bytes]]:
        if self._scrape is None:
            loop = asyncio.get_running_loop()
            self._scrape = loop.create_task(self._ask_all())
            self._scrape.add_done_callback(lambda _: loop.call_later(KEEP_S, self._forget))
        return self._scrape

    def _forget(self) -> None:
        self._scrape = None

    async def _ask_all(self) -> list[bytes]:
        """The page, a family each. A replica that does not answer in time and bounds is left out of it."""
        rows = sorted(self._replicas.all(), key=lambda row: row.name)
        self._n_bytes_left = PAGES_BYTES_MAX
        answers = await asyncio.gather(*(self._ask(row) for row in rows))
        pages = EnginePages(self._config.engine_families, self._config.renamed)
        up: dict[Labels, float] = {}
        seconds: dict[Labels, float] = {}
        for row, (page, took_s) in zip(rows, answers, strict=True):
            labels = (("replica", row.name),)
            up[labels], seconds[labels] = float(page is not None), round(took_s, 4)
            if page is not None:
                place = (("node", row.announcement.host), ("deployment", self._config.deployment))
                pages.add(page, (*labels, *(label for label in place if label[1])))
                await self._world.pause(0)
        pieces = [counters.write_metrics([("engine_scrape_up", up), ("engine_scrape_seconds", seconds)], ())]
        for piece in pages.write():
            pieces.append(piece)
            await self._world.pause(0)
        return pieces

    async def _ask(self, row: Replica) -> tuple[bytes | None, float]:
        """The replica's page, None where it gave none, and the seconds that it took."""
        began_at = self._world.now()
        if row.address is None or not row.is_alive(began_at):
            return None, 0.0
        page = None
        with contextlib.suppress(OSError, UpstreamError):  # a TimeoutError is an OSError
            async with asyncio.timeout(DEADLINE_S):
                page = await self._read_page(row.address)
        return page, self._world.now() - began_at

    async def _read_page(self, address: Address) -> bytes | None:
        connection = self._pool.take(address) or await self._pool.connect(address)
        try:
            request = b"GET /metrics HTTP/1.1\r\n%s\r\n" % connection.origin_lines
            status, page = await call(connection, request, self._fits)
        except BaseException:
            connection.discard()
            raise
        connection.release()
        return page if status == 200 else None

    def _fits(self, n_new: int, n_bytes: int) -> bool:
        self._n_bytes_left -= n_new
        return n_bytes <= PAGE_BYTES_MAX and self._n_bytes_left >= 0


class _Flow:
    """A source of bytes that stops while its client does not read."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()

    def pause(self) -> None:
        self.may_write.clear()

    def resume(self) -> None:
        self.may_write.set()
