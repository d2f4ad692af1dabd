"""The thread that requests are left to when they have ended: rows for the store, lines and spans for the request log.

The event loop never waits for it, and it has one queue. While the store is locked, full or away, requests go on with
the keys in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.gateway.accounting.exchange import Exchange
from penstock.gateway.accounting.request_log import RequestLog
from penstock.gateway.accounting.running_totals import Totals
from penstock.gateway.accounting.store import Database
from penstock.gateway.accounting.store_writer import MAX_WAITING, Job, News, StoreWriter
from penstock.gateway.accounting.usage_store import Row
from penstock.world import REAL, Thread, World

PERIOD_S = 0.5  # at most this much is lost with the process, and a changed key is seen this late
CATCH_UP_S = 0.02  # between two turns for quotas alone; one takes 1 ms

T = TypeVar("T")

log = logging.getLogger(__name__)


class Ledger:
    """`place` of the store, if there is one; the constructor opens it. Raises UserError."""

    def __init__(
        self, place: str | None, totals: Totals, request_log: RequestLog | None = None, world: World = REAL
    ) -> None:
        self._world = world
        self.store = StoreWriter(place, totals, world) if place is not None else None
        self.request_log = request_log
        self.next_number = itertools.count(1).__next__  # of the next row; in C, for a request calls it
        self._exchanges: deque[tuple[Row, Exchange]] = deque()
        self._jobs: deque[tuple[Job, Future[Any]]] = deque()
        self._wake = world.event()
        self._catches_up = False
        self._is_closing = False
        self._thread: Thread | None = None

    # The loop's side.

    def add(self, row: Row, exchange: Exchange | None = None) -> None:
        """`exchange`: what the request log needs too; its rows reach the store through that."""
        if exchange is None or self.request_log is None:
            if self.store is not None:
                self.store.add(row)
        elif len(self._exchanges) < MAX_WAITING:
            self._exchanges.append((row, exchange))
        else:
            self.request_log.lose(1)
            if self.store is not None:
                self.store.n_lost += 1

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
        if self.request_log is not None:
            self.request_log.close()
        if self.store is not None:
            self.store.close()

    def _turn(self) -> None:
        if self.request_log is not None:
            self._write_log(self.request_log)
        asked = [self._jobs.popleft() for _ in range(len(self._jobs))]
        if self.store is not None:
            self.store.turn(asked, lambda: self._is_closing or bool(self._jobs))

    def _write_log(self, request_log: RequestLog) -> None:
        records = [self._exchanges.popleft() for _ in range(len(self._exchanges))]
        if self.store is not None:
            for row, _ in records:
                self.store.add(row)
        try:
            request_log.write(records)
        except Exception:  # usage and keys must go on
            log.exception("request log: %d requests are lost to a bug", len(records))
            request_log.lose(len(records))
