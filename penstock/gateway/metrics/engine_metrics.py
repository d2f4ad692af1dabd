"""GET /metrics/engines: the series of all engines, asked for when somebody asks, as one page of Prometheus text."""

from __future__ import annotations

import asyncio

from penstock.gateway.config import Address, GatewayConfig
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.connections.engine import Pool, UpstreamError
from penstock.gateway.metrics import counters
from penstock.gateway.metrics.counters import Labels
from penstock.gateway.metrics.engine_pages import EnginePages
from penstock.gateway.request import Request
from penstock.gateway.responses import http_date
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.text import MIB
from penstock.wire.http1 import ResponseHead, write_response_head
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
            self._scrape = asyncio.get_running_loop().create_task(self._ask_all())
            self._scrape.add_done_callback(self._forget_later)
        return self._scrape

    def _forget_later(self, scrape: asyncio.Task[list[bytes]]) -> None:
        def forget() -> None:
            self._scrape = None

        asyncio.get_running_loop().call_later(KEEP_S, forget)

    async def _ask_all(self) -> list[bytes]:
        """The page, a family each. A replica that does not answer in time and bounds is left out of it."""
        began_at = self._world.now()
        rows = sorted(self._replicas.all(), key=lambda row: row.name)
        budget = _Budget()
        tasks = {
            row.name: asyncio.create_task(self._ask(row.address, budget))
            for row in rows
            if row.address is not None and row.is_alive(began_at)
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=DEADLINE_S)
        pages = EnginePages(self._config.engine_families, self._config.renamed)
        up: dict[Labels, float] = {}
        seconds: dict[Labels, float] = {}
        for row in rows:
            task = tasks.get(row.name)
            page, took_s = _result(task, self._world.now() - began_at)
            labels = (("replica", row.name),)
            up[labels], seconds[labels] = float(page is not None), round(took_s, 4)
            if page is not None:
                place = (("node", row.announcement.host), ("deployment", self._config.deployment))
                pages.add(page, [label for label in (("replica", row.name), *place) if label[1]])
                await self._world.pause(0)
        pieces = [counters.write_metrics([("engine_scrape_up", up), ("engine_scrape_seconds", seconds)], ())]
        for piece in pages.write():
            pieces.append(piece)
            await self._world.pause(0)
        return pieces

    async def _ask(self, address: Address, budget: _Budget) -> tuple[bytes, float]:
        """The page and the seconds it took. Raises OSError and UpstreamError."""
        began_at = self._world.now()
        connection = self._pool.take(address) or await self._pool.connect(address)
        body = _Body(budget)
        try:
            connection.send(b"GET /metrics HTTP/1.1\r\n%s\r\n" % connection.origin_lines, body)
            page = await body.whole
        except BaseException:
            connection.discard()
            raise
        connection.release()
        return page, self._world.now() - began_at


class _Flow:
    """A source of bytes that stops while its client does not read."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()

    def pause(self) -> None:
        self.may_write.clear()

    def resume(self) -> None:
        self.may_write.set()


class _Budget:
    """The bytes that all pages of a scrape may still have."""

    def __init__(self) -> None:
        self.n_bytes = PAGES_BYTES_MAX


class _Body:
    """Collects the body of an answer 200 within its bounds."""

    takes_chunks = False

    def __init__(self, budget: _Budget) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._budget = budget
        self._pieces: list[bytes] = []
        self._n_bytes = 0

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        if self.whole.done():
            return
        self._n_bytes += len(data)
        self._budget.n_bytes -= len(data)
        self._pieces.append(data)
        if head is not None and head.status != 200:
            self.whole.set_exception(UpstreamError(f"GET /metrics answered {head.status}"))
        elif self._n_bytes > PAGE_BYTES_MAX or self._budget.n_bytes < 0:
            self.whole.set_exception(UpstreamError(f"GET /metrics has more than {PAGE_BYTES_MAX} bytes"))
        elif is_end:
            self.whole.set_result(b"".join(self._pieces))

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        raise AssertionError("not asked for")

    def lost(self, error: UpstreamError) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


def _result(task: asyncio.Task[tuple[bytes, float]] | None, waited_s: float) -> tuple[bytes | None, float]:
    """A replica's page, None where it gave none, and the seconds that it took."""
    if task is None:
        return None, 0.0
    if not task.done():
        task.cancel()
    elif not task.cancelled() and task.exception() is None:
        return task.result()
    return None, waited_s
