"""GET /dashboard/live: one snapshot as JSON, or a stream of them as server-sent events, a second apart.

The whole is gathered of all workers once a second while a stream of this worker is open, and each PERIOD_S for the
history while none is. A client that reads too slowly misses snapshots; nothing waits for it in memory but one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from urllib.parse import parse_qs

import msgspec

from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.live.history import LiveHistory
from penstock.gateway.live.snapshot import Moment, look, make_snapshot, rates
from penstock.gateway.metrics.cost import SpendingMeter
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer, json_answer
from penstock.gateway.workers.reports import Reporter, WorkerReport
from penstock.wire.http1 import LAST_CHUNK, write_chunk, write_response_head
from penstock.wire.live import Snapshot
from penstock.world import REAL, World

EVERY_S = 1.0
MAX_STREAMS = 64  # of a worker
_HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on at once
)
_BEGINNING: Final = b"retry: 2000\n\n"  # milliseconds until a browser connects again

log = logging.getLogger(__name__)


class Stream:
    """The response to one client, which is its source and its work."""

    def __init__(self, client: ClientConnection, feed: LiveFeed, *, is_chunked: bool) -> None:
        self._client, self._feed, self._is_chunked = client, feed, is_chunked
        self._is_paused = False

    def begin(self, history: bytes) -> None:
        framing = (b"transfer-encoding", b"chunked") if self._is_chunked else (b"connection", b"close")
        self._client.write(write_response_head(200, (*_HEADERS, framing)))
        self._client.read_from(self)
        self.send(_BEGINNING + history)

    def send(self, data: bytes) -> None:
        if not self._is_paused:
            self._client.write(write_chunk(data) if self._is_chunked else data)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def cancel(self) -> None:
        self._feed.streams.discard(self)
        self._client.read_from(None)
        if self._client.is_gone:
            return
        if self._is_chunked:
            self._client.write(LAST_CHUNK)
            self._client.finish()
        else:
            self._client.fail(is_framed=True)


class LiveFeed:
    """The history and the open streams of one worker."""

    def __init__(self, config: GatewayConfig, reporter: Reporter, world: World = REAL) -> None:
        self._world = world
        self.streams: set[Stream] = set()
        self._config, self._reporter = config, reporter
        self._history = LiveHistory()
        self._meter = SpendingMeter()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Ends every stream, so that no drain waits for a page."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
        for stream in tuple(self.streams):
            stream.cancel()

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        query = request.head.target.partition(b"?")[2].decode("latin-1")
        if "once" in parse_qs(query, keep_blank_values=True) or request.head.method == b"HEAD":
            return self._reporter.respond(client, lambda report: json_answer(self._snapshot(self._look(report))))
        if self._is_stopped or len(self.streams) >= MAX_STREAMS:
            why = "the gateway is stopping" if self._is_stopped else f"{MAX_STREAMS} streams are open already"
            return error_answer(503, why, "overloaded", headers=((b"retry-after", b"2"),))
        stream = Stream(client, self, is_chunked=not request.head.is_http_10)
        self.streams.add(stream)
        client.work = stream
        stream.begin(_event(b"history", self._history.write(self._world.now(), self._world.unix())))
        return None

    async def _run(self) -> None:
        while True:
            if self.streams or self._history.is_row_due(self._world.now()):
                try:
                    self._take(self._look(await self._reporter.gather(with_known=False)))
                except Exception:
                    # A page without news is better than a gateway without requests.
                    log.exception("a bug in the live page's snapshot")
            await self._world.pause(EVERY_S)

    def _look(self, report: WorkerReport) -> Moment:
        now = self._world.now()
        return look(report, self._reporter.view(report), self._reporter.news.read(now), now, self._world.unix())

    def _snapshot(self, moment: Moment) -> Snapshot:
        return make_snapshot(moment, self._history, self._config)

    def _take(self, moment: Moment) -> None:
        is_row = self._history.is_row_due(moment.sample.at)
        self._history.add(moment.sample)
        if is_row:
            spending = self._meter.read(moment.report.families, moment.view, moment.sample.at)
            self._history.add_row(moment.sample, rates(moment, self._history), self._config.slo, spending)
        if self.streams:
            event = _event(b"snapshot", self._snapshot(moment))
            for stream in tuple(self.streams):
                stream.send(event)


def _event(name: bytes, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name, msgspec.json.encode(value))
