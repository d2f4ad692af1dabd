"""What the ledger's thread does with the store in each of its turns: writes rows in batches, changes keys, reads what
others changed. While the store is locked, full or away, rows wait in memory and the log and the metrics report it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.gateway.accounting.key_store import ApiKey, KeyStore
from penstock.gateway.accounting.quota_sync import QuotaSync
from penstock.gateway.accounting.record import Record
from penstock.gateway.accounting.running_totals import Totals
from penstock.gateway.accounting.store import BUSY_S, Database, connect
from penstock.gateway.accounting.usage_store import DAY_S, Row, UsageStore, month_of
from penstock.world import REAL, World

MAX_WAITING = 200_000  # about 100 MB of rows
MAX_BATCH = 4096
CALM_ROWS = 256  # a turn with fewer has time to unfold what busier ones have folded
PRUNE_PERIOD_S = 600.0
PRUNE_S = 0.1  # of a turn: some 30,000 rows
LAST_TURNS = 3  # at the end, when the store does not take the rows at once

Job = Callable[[Database], Any]

log = logging.getLogger(__name__)


class News(msgspec.Struct, frozen=True):
    """`keys` is None when they did not change; dollars spent this month, and what this process wrote, by key id.
    `revision`: which store was open, and the revision of its keys."""

    keys: list[ApiKey] | None
    spent_usd: dict[str, float]
    submitted_usd: dict[str, float]
    revision: tuple[int, int]


class StoreWriter:
    """An open store; the constructor reads it. Raises UserError. All of it is the ledger's thread's."""

    def __init__(self, place: str, totals: Totals, world: World = REAL) -> None:
        self._world = world
        self._database = connect(place, BUSY_S)
        self._keys, self._usage = KeyStore(self._database), UsageStore(self._database)
        self._writer = secrets.token_hex(6)
        self._rows: deque[Row] = deque()
        self._n_rows = 0  # so far
        self._batch: list[Row] = []
        self._batch_rows = MAX_BATCH
        self._is_again = False
        self._submitted_usd: defaultdict[str, float] = defaultdict(float)
        self._n_opened = 0
        self.known: tuple[int, int] | None = None  # the keys that the loop has, set by itself: a message may be lost
        self.confirmed_at = world.now()  # when these were the newest
        self._last_news: News | None = None
        self.keep_days: int | None = None  # after which a row becomes part of its day's sums; one worker does that
        self._prune_at = 0.0
        self._totals = totals
        self._quota_sync = QuotaSync(self._writer, totals, world)
        self.tell: Callable[[News], None] = lambda _: None
        self.n_written = 0
        self.n_lost = 0
        self.n_failures = 0
        self.is_failing = False
        self.first_news = self._read()

    @property
    def n_waiting(self) -> int:
        return len(self._rows) + len(self._batch)

    def write(self, records: Sequence[Record]) -> None:
        """Add their rows, to be stored in the next turn; those for which there is no room are lost."""
        n_free = max(0, MAX_WAITING - len(self._rows))
        self.n_lost += max(0, len(records) - n_free)
        self._rows.extend(itertools.starmap(row_of, enumerate(records[:n_free], self._n_rows + 1)))
        self._n_rows += min(n_free, len(records))

    def take_last_turns(self, turn: Callable[[], None]) -> None:
        for _ in range(LAST_TURNS):
            turn()
            if not self.n_waiting:
                break
        if self.n_waiting:
            log.error("store: %d rows of usage are lost, it could not be written to the end", self.n_waiting)
        with contextlib.suppress(PenstockError):
            self._quota_sync.leave(self._usage)

    def close(self) -> None:
        self._database.close()

    def turn(self, asked: list[tuple[Job, Future[Any]]], is_awaited: Callable[[], bool]) -> None:
        """Does the jobs and everything that is due. `is_awaited`: the thread has more urgent things to do."""
        is_calm = self.n_waiting < CALM_ROWS
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
            until = self._world.now() + PRUNE_S  # then keys are read again
            while is_calm and not asked and not is_awaited() and self._world.now() < until:
                if len(self._rows) >= CALM_ROWS or not self._usage.unfold_rows():
                    break
            self._prune(is_awaited)
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

    @property
    def has_others(self) -> bool:
        return self._quota_sync.has_others

    def catch_up(self) -> None:
        """Exchanges the totals of quotas alone; a failure is the next turn's to report."""
        with contextlib.suppress(Exception):
            self._quota_sync.catch_up(self._usage)

    def _refresh(self) -> None:
        if self._database.refresh():
            log.warning("store: its file was replaced, and is open again")
            self._n_opened += 1
            self._quota_sync = QuotaSync(self._writer, self._totals, self._world)

    def _try_job(self, job: Job) -> tuple[Any, BaseException | None]:
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

    def _prune(self, is_awaited: Callable[[], bool]) -> None:
        now, until = self._world.unix(), self._world.now() + PRUNE_S
        if self.keep_days is None or now < self._prune_at:
            return
        while not is_awaited() and self._world.now() < until:
            if not self._usage.prune(now - self.keep_days * DAY_S):
                self._prune_at = now + PRUNE_PERIOD_S
                break

    def _read_news(self) -> None:
        read_at, news = self._world.now(), self._read()
        if news.keys is None:
            self.confirmed_at = read_at
        if news != self._last_news or news.keys is not None:
            self._last_news = news
            self.tell(news)

    def _read(self) -> News:
        revision = self._n_opened, self._keys.revision()
        keys = self._keys.all() if revision != self.known else None
        return News(keys, self._usage.spend(month_of(self._world.unix())), dict(self._submitted_usd), revision)


def row_of(number: int, record: Record) -> Row:
    first_s = record.first_token_s
    return Row(
        number,
        record.at,
        record.key_id,
        record.model,
        record.replica,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        int(record.is_estimate),
        first_s and first_s * 1000,
        record.duration_s * 1000,
        record.state,
        record.status,
        record.cost_usd,
        str(record.facts.request_id, "latin-1"),
    )
