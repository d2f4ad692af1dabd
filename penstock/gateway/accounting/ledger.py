"""The thread that gets the records of requests that have ended: the store's rows, access log and spans are its work.

The event loop never waits for it, and it has one queue. While the store is locked, full or away, requests go on with
the keys in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.gateway.accounting.access_log import AccessLog
from penstock.gateway.accounting.record import Record, Writer
from penstock.gateway.accounting.running_totals import Totals
from penstock.gateway.accounting.span_export import SpanExporter
from penstock.gateway.accounting.spans import SpanWriter
from penstock.gateway.accounting.store import Database
from penstock.gateway.accounting.store_writer import MAX_WAITING, Job, News, StoreWriter
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics.counters import Family
from penstock.world import REAL, Thread, World

PERIOD_S = 0.5  # at most this much is lost with the process, and a changed key is seen this late
CATCH_UP_S = 0.02  # between two turns for quotas alone; one takes 1 ms
# Between two pieces the event loop gets Python's lock, which it would otherwise wait 5 ms for. A busy loop gives it
# back after 5 ms, so there may not be too many of them in a turn.
PIECE = 32
MAX_PIECES = 50

T = TypeVar("T")

log = logging.getLogger(__name__)


class Ledger:
    """The store, the access log and the spans, as far as the config asks for them. Raises UserError."""

    def __init__(self, config: GatewayConfig, totals: Totals, world: World = REAL) -> None:
        self._world = world
        traces = config.traces
        self.store = StoreWriter(config.store, totals, world) if config.store is not None else None
        self._access_log = AccessLog(config.access_log) if config.access_log is not None else None
        spans = None if traces is None else SpanExporter(traces.endpoint, SpanWriter(config.deployment), world=world)
        self._spans = spans
        self._writers: list[Writer] = [each for each in (self.store, self._access_log, spans) if each is not None]
        self._records: deque[Record] = deque()
        self._jobs: deque[tuple[Job, Future[Any]]] = deque()
        self._wake = world.event()
        self._catches_up = False
        self._is_closing = False
        self._thread: Thread | None = None

    # The loop's side.

    def add(self, record: Record) -> None:
        """A request has ended."""
        if len(self._records) < MAX_WAITING:
            self._records.append(record)
        else:
            self._lose(self._writers, 1)

    @property
    def n_waiting(self) -> int:
        """Records that wait for the store."""
        return 0 if self.store is None else len(self._records) + self.store.n_waiting

    def families(self) -> list[Family]:
        families: list[Family] = []
        if self.store is not None:
            families += [
                ("ledger_rows_waiting", {(): self.n_waiting}),
                ("ledger_rows_lost_total", {(): self.store.n_lost}),
                ("store_failures_total", {(): self.store.n_failures}),
                ("store_up", {(): int(not self.store.is_failing)}),
            ]
        named = (("access_log_lost_total", self._access_log), ("spans_lost_total", self._spans))
        return families + [(name, {(): writer.n_lost}) for name, writer in named if writer is not None]

    def call(self, job: Callable[[Database], T]) -> asyncio.Future[T]:
        """Runs `job` on the thread, with a store; its changes of keys are news before the future is done."""
        future: Future[T] = Future()
        self._jobs.append((job, future))
        self._wake.set()
        return asyncio.wrap_future(future)

    def catch_up(self) -> None:
        """Lets others know soon what quotas are here, and this process theirs; nothing without others on the store."""
        if not self._catches_up and self.store is not None and self.store.has_others:
            self._catches_up = True
            self._wake.set()

    def start(self, on_news: Callable[[News], None]) -> None:
        """Starts the thread; `on_news` is called on the running loop."""
        loop = asyncio.get_running_loop()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(on_news, news)

        if self.store is not None:
            self.store.tell = tell
        self._thread = self._world.thread(self._work, "ledger")

    async def stop(self) -> None:
        """Writes what waits and closes the store."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """The same, blocking."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._close_all()

    # The thread's side.

    def _work(self) -> None:
        due_at = self._world.now() + PERIOD_S
        while not self._is_closing:
            self._wake.wait(max(0.0, due_at - self._world.now()))
            self._wake.clear()
            if self._catches_up and self.store is not None:
                self._catches_up = False
                self.store.catch_up()
                self._world.sleep(CATCH_UP_S)
            if self._jobs or self._is_closing or self._world.now() >= due_at:
                self._turn()
                due_at = self._world.now() + PERIOD_S
        if self.store is not None:
            self.store.take_last_turns(self._turn)
        else:
            self._turn()
        self._close_all()

    def _close_all(self) -> None:
        for writer in (self._spans, self.store):
            if writer is not None:
                writer.close()

    def _turn(self) -> None:
        records = [self._records.popleft() for _ in range(len(self._records))]
        piece = max(PIECE, len(records) // MAX_PIECES)
        for at in range(0, len(records), piece):
            self._write(records[at : at + piece])
            self._world.sleep(0)
        if self._spans is not None:
            self._spans.send()
        asked = [self._jobs.popleft() for _ in range(len(self._jobs))]
        if self.store is not None:
            self.store.turn(asked, lambda: self._is_closing or bool(self._jobs))

    def _write(self, records: list[Record]) -> None:
        for writer in self._writers:
            try:
                writer.write(records)
            except Exception:  # the others, and keys, must continue
                log.exception("%s: %d requests are lost to a bug", type(writer).__name__, len(records))
                self._lose([writer], len(records))

    def _lose(self, writers: Iterable[Writer], n_records: int) -> None:
        for writer in writers:
            writer.n_lost += n_records
