"""The thread between the gateway and its store: writes rows in batches, changes keys, reads what others changed.

The event loop never waits for it. While the store is locked, full or away, requests go on with the keys in memory; up
to MAX_WAITING rows wait in the queue, and the log and the metrics report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.accounting.key_store import ApiKey, KeyStore
from penstock.gateway.accounting.quota_sync import QuotaSync
from penstock.gateway.accounting.running_totals import Totals
from penstock.gateway.accounting.store import Database, connect
from penstock.gateway.accounting.usage_store import DAY_S, Row, UsageStore, month_of

PERIOD_S = 0.5  # at most this much is lost with the process, and a changed key is seen this late
MAX_WAITING = 200_000  # about 100 MB of rows
MAX_BATCH = 4096
CALM_ROWS = 256  # a turn with fewer has time to unfold what busier ones have folded
PRUNE_PERIOD_S = 600.0
PRUNE_S = 0.1  # of a turn: some 30,000 rows
LAST_TURNS = 3  # at the end, when the store does not take the rows at once

T = TypeVar("T")

log = logging.getLogger(__name__)


class News(msgspec.Struct, frozen=True):
    """`keys` is None when they did not change; dollars spent this month, and what this process wrote, by key id."""

    keys: list[ApiKey] | None
    spent_usd: dict[str, float]
    submitted_usd: dict[str, float]


class Ledger:
    """A store with its thread. The constructor opens and reads the store. Raises UserError."""

    def __init__(self, place: str, totals: Totals) -> None:
        self._database = connect(place)
        self._keys, self._usage = KeyStore(self._database), UsageStore(self._database)
        self._writer = secrets.token_hex(6)
        self.next_number = itertools.count(1).__next__  # of the next row; in C, for a request calls it
        self._rows: deque[Row] = deque()
        self._batch: list[Row] = []
        self._batch_rows = MAX_BATCH
        self._is_again = False
        self._jobs: deque[tuple[Callable[[Database], Any], Future[Any]]] = deque()
        self._submitted_usd: defaultdict[str, float] = defaultdict(float)
        self._revision = -1
        self._last_news: News | None = None
        self._wake = threading.Event()
        self._is_closing = False
        self.keep_days: int | None = None  # after which a row becomes part of its day's sums; one worker does that
        self._prune_at = 0.0
        self._totals = totals
        self._quota_sync = QuotaSync(self._writer, totals)
        self._thread: threading.Thread | None = None
        self._tell: Callable[[News], None] = lambda _: None
        self.n_written = 0
        self.n_lost = 0
        self.n_failures = 0
        self.is_failing = False
        self.first_news = self._read()

    # The loop's side.

    @property
    def n_waiting(self) -> int:
        return len(self._rows) + len(self._batch)

    def add(self, row: Row) -> None:
        if len(self._rows) >= MAX_WAITING:
            self.n_lost += 1
            return
        self._rows.append(row)

    def call(self, job: Callable[[Database], T]) -> asyncio.Future[T]:
        """Runs `job` on the thread; its changes of keys are news before the future is done."""
        future: Future[T] = Future()
        self._jobs.append((job, future))
        self._wake.set()
        return asyncio.wrap_future(future)

    def start(self, on_news: Callable[[News], None]) -> None:
        """Starts the thread; `on_news` is called on the running loop."""
        loop = asyncio.get_running_loop()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(on_news, news)

        self._tell = tell
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

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
            self._database.close()

    # The thread's side.

    def _work(self) -> None:
        while not self._is_closing:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            self._turn()
        for _ in range(LAST_TURNS):
            self._turn()
            if not self.n_waiting:
                break
        if self.n_waiting:
            log.error("store: %d rows of usage are lost, it could not be written to the end", self.n_waiting)
        with contextlib.suppress(PenstockError):
            self._quota_sync.leave(self._usage)
        self._database.close()

    def _turn(self) -> None:
        is_calm = self.n_waiting < CALM_ROWS
        asked = [self._jobs.popleft() for _ in range(len(self._jobs))]
        # From here on a future cannot be cancelled, also when its client leaves.
        jobs = [(job, future) for job, future in asked if future.set_running_or_notify_cancel()]
        outcomes = [(future, *self._try_job(job)) for job, future in jobs]
        try:
            self._refresh()
            try:
                self._flush()
                self._quota_sync.turn(self._usage)
            finally:
                self._read_news()  # keys must end also while nothing can be written
            if is_calm and not asked:
                while not self._is_closing and not self._jobs and len(self._rows) < CALM_ROWS:
                    if not self._usage.unfold_rows():
                        break
            self._prune()
            if self.is_failing:
                log.warning("store: it works again, %d rows wait", self.n_waiting)
            self.is_failing = False
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever a database does
            self.n_failures += 1
            self._quota_sync.miss_turn()
            if not self.is_failing:
                reason = error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
                log.error("store: %s; requests continue, their usage waits in memory", reason)
            self.is_failing = True
        for future, result, failure in outcomes:
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(result)

    def _refresh(self) -> None:
        if self._database.refresh():
            log.warning("store: its file was replaced, and is open again")
            self._revision = -1
            self._quota_sync = QuotaSync(self._writer, self._totals)

    def _try_job(self, job: Callable[[Database], Any]) -> tuple[Any, BaseException | None]:
        try:
            self._refresh()
            return job(self._database), None
        except Exception as error:  # noqa: BLE001 - it is raised where the job was asked for
            return None, error

    def _flush(self) -> None:
        """Writes the rows that are there, in batches that stay the same until they are written: none is written twice.

        Later rows wait for the next turn: a busy gateway would never be done, and each batch of a few rows takes
        Python's lock from the loop dozens of times (a third of a request's cost).
        """
        n_left = self.n_waiting
        while n_left > 0:
            if not self._batch:
                self._batch = [self._rows.popleft() for _ in range(min(n_left, self._batch_rows))]
            try:
                self._usage.add_rows(self._writer, self._batch, is_again=self._is_again)
            except (PenstockError, ValueError, OverflowError) as error:
                if isinstance(error, PenstockError) and error.is_retryable:
                    self._is_again = True
                    raise
                n_left -= self._split_batch(error)
                continue
            self._is_again = False
            self._batch_rows = min(2 * self._batch_rows, MAX_BATCH)
            self.n_written += len(self._batch)
            for row in self._batch:
                if row.cost_usd:
                    self._submitted_usd[row.key_id] += row.cost_usd
            n_left -= len(self._batch)
            self._batch = []

    def _split_batch(self, error: Exception) -> int:
        """Looks for the row that can never be stored by halves; returns 1 when it is found, and dropped."""
        rows, self._batch = self._batch, []
        if len(rows) > 1:
            self._batch_rows = len(rows) // 2
            self._rows.extendleft(reversed(rows))
            return 0
        self.n_lost += 1
        log.error("store: the row of request %s is dropped, it can never be stored: %s", rows[0].request_id, error)
        return 1

    def _prune(self) -> None:
        now, until = time.time(), time.monotonic() + PRUNE_S
        if self.keep_days is None or now < self._prune_at:
            return
        while not self._is_closing and not self._jobs and time.monotonic() < until:
            if not self._usage.prune(now - self.keep_days * DAY_S):
                self._prune_at = now + PRUNE_PERIOD_S
                break

    def _read_news(self) -> None:
        news = self._read()
        if news != self._last_news or news.keys is not None:
            self._last_news = news
            self._tell(news)

    def _read(self) -> News:
        revision = self._keys.revision()
        keys = self._keys.all() if revision != self._revision else None
        spent_usd = self._usage.spend(month_of(time.time()))
        self._revision = revision
        return News(keys, spent_usd, dict(self._submitted_usd))
