"""The run: sends by the plan on one event loop, keeps reads raw, and records its own lateness."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import itertools
import math
import signal
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from penstock.bench.load.connections import REFUSED, TIMEOUT, UNFINISHED, UNREACHABLE, Address, Exchange, Pool
from penstock.bench.load.exchanges import REQUESTS, ExchangeFile, Raw
from penstock.bench.load.kernel_timestamps import PreciseTimer
from penstock.processes import raise_file_limit

LAG_EVERY_S = 0.02
_TICK_S = 0.5
_LEAST_TICK_S = 0.02
_MAX_RECENT = 2000
_MAX_PAUSE_S = 1.0
_LAST_PAGE_S = 2.0
# What a server that is gone answers, or a gateway in its place.
_GONE = frozenset((REFUSED, UNREACHABLE))
_GONE_STATUSES = frozenset((502, 503, 504))


@dataclass(frozen=True)
class Load:
    """What to send and how. `requests` are whole HTTP messages; `wait_for[i]` is the index before request i, or None.

    `times`: an open loop's, in seconds from the start; `concurrency` bounds what is in flight.
    A closed loop sends `n_requests`, going round `requests`, and ends when the server was gone for `give_up_s`.
    """

    requests: Sequence[bytes]
    wait_for: Sequence[int | None] = ()
    times: Iterator[float] | None = None
    concurrency: int | None = None
    n_requests: int | None = None
    duration_s: float | None = None
    timeout_s: float = 600.0
    n_spare: int = 0
    give_up_s: float = 60.0


@dataclass(frozen=True)
class Progress:
    """Where a run is. Latencies are medians of the last requests, in seconds; `left_s` None: unknown.

    `ttft_s` and `chunk_rate` (a chunk is about a token) come from reads as they arrived; None without streams.
    """

    n_sent: int
    n_ended: int
    n_in_flight: int
    n_errors: int
    elapsed_s: float
    rate: float
    p50_s: float | None
    p99_s: float | None
    left_s: float | None
    ttft_s: float | None = None
    chunk_rate: float = 0.0


@dataclass
class Outcome:
    """What was recorded. Times are `perf_counter` seconds; `lag_s`: how late the loop's own alarm went off."""

    exchanges: ExchangeFile
    began_s: float = 0.0
    ended_s: float = 0.0
    began_at: float = 0.0  # wall clock, seconds since 1970
    cpu_s: float = 0.0
    lag_s: list[float] = field(default_factory=list)
    n_connections: int = 0
    was_interrupted: bool = False
    cut_short: str = ""  # why the run ended early by itself

    def keep(self, exchange: Exchange, kind: int = REQUESTS) -> None:
        """Writes an exchange that ended.  Raises OSError."""
        times = exchange.intended_s, exchange.asked_s, exchange.sent_s, exchange.end_s, exchange.dial_s
        raw = Raw(exchange.index, *times, exchange.times, exchange.reads, exchange.error, exchange.detail)
        self.exchanges.write(raw, kind)


class _LoadRun:
    def __init__(self, loop: asyncio.AbstractEventLoop, load: Load, pool: Pool, outcome: Outcome) -> None:
        self._loop, self._load, self._pool = loop, load, pool
        self.outcome = outcome
        self.done: asyncio.Future[None] = loop.create_future()
        self._timer = PreciseTimer(loop, self._on_timer)
        self._lag_timer = PreciseTimer(loop, self._on_lag)
        self._lag_due_s = 0.0
        self._next_at_s: float | None = None
        self._n_sent = 0
        self._n_ended = 0
        self._n_errors = 0
        self._is_sending = True
        self._gone_since_s: float | None = None  # nothing else was answered since
        # Index waited for -> those that wait; and whose answers are complete.
        self._followers: dict[int, list[Exchange]] = {}
        self._complete: set[int] = set()
        self._on_way: dict[int, Exchange] = {}  # in the order in which the generator came to them
        self._backlog: deque[Exchange] = deque()  # of an open loop with a bound on what is in flight
        self._recent: deque[float] = deque(maxlen=_MAX_RECENT)
        self._recent_ttft: deque[float] = deque(maxlen=_MAX_RECENT)
        self._n_chunks = 0
        self._tick_at, self._tick_ended, self._tick_chunks = 0.0, 0, 0
        self._has_waits = any(index is not None for index in load.wait_for)

    # -- sending

    def begin(self) -> None:
        self.outcome.began_s, self.outcome.began_at = self.outcome.exchanges.begin()
        now = self._tick_at = self.outcome.began_s
        self._lag_due_s = now + LAG_EVERY_S
        self._lag_timer.set(self._lag_due_s)
        if self._load.times is not None:
            self._next_at_s = self._take_time()
            self._arm()
        else:
            # One an iteration of the loop: a request's time must not hold the writing of the 499 before it.
            self._loop.call_soon(self._start_one, self._load.concurrency or 1)

    def _start_one(self, n_left: int) -> None:
        if n_left and self._send_next():
            self._loop.call_soon(self._start_one, n_left - 1)

    def _take_time(self) -> float | None:
        assert self._load.times is not None
        at_s = next(self._load.times, None)
        return None if at_s is None else self.outcome.began_s + at_s

    def _arm(self) -> None:
        if self._next_at_s is not None:
            self._timer.set(self._next_at_s)
        else:
            self._is_sending = False
            self._check_end()

    def _on_timer(self) -> None:
        if not self._is_sending:
            return
        now = time.perf_counter()
        while self._next_at_s is not None and self._next_at_s <= now:
            self._send(self._next_at_s)
            self._next_at_s = self._take_time()
        self._arm()

    def _send_next(self) -> bool:
        load = self._load
        if not self._is_sending:
            return False
        now = time.perf_counter()
        is_last = load.n_requests is not None and self._n_sent >= load.n_requests
        if is_last or (load.duration_s is not None and now - self.outcome.began_s >= load.duration_s):
            self._is_sending = False
            return False
        self._send(now)
        return True

    def _send(self, intended_s: float) -> None:
        index = self._n_sent
        self._n_sent += 1
        which = index % len(self._load.requests)
        exchange = Exchange(index, self._load.requests[which], intended_s)
        before = self._load.wait_for[which] if self._has_waits else None
        if before is not None:
            before += index - which  # of the same round
            if before not in self._complete:
                self._followers.setdefault(before, []).append(exchange)
                return
        self._hand_over(exchange)

    def _hand_over(self, exchange: Exchange) -> None:
        if self._load.times is not None and len(self._on_way) >= (self._load.concurrency or math.inf):
            exchange.asked_s = time.perf_counter()
            self._backlog.append(exchange)
            return
        self._on_way[exchange.index] = exchange
        self._pool.send(exchange)

    # -- ending

    def on_end(self, exchange: Exchange) -> None:
        self._on_way.pop(exchange.index, None)  # what an interrupt drops may never have been on its way
        if exchange.error is None and exchange.end_s - exchange.sent_s > self._load.timeout_s:
            exchange.error = TIMEOUT  # its end came before the next look at what is late
        self._n_ended += 1
        self._recent.append(exchange.end_s - exchange.intended_s)
        if len(exchange.reads) > 1:
            is_head = exchange.reads[0].endswith(b"\r\n\r\n")
            self._recent_ttft.append(exchange.times[is_head] - exchange.sent_s)
            self._n_chunks += len(exchange.reads) - 1
        if exchange.error is not None:
            self._n_errors += 1
        exchange.request = b""
        if self._has_waits:
            self._complete.add(exchange.index)
            for follower in self._followers.pop(exchange.index, ()):
                follower.intended_s = max(follower.intended_s, exchange.end_s)
                self._hand_over(follower)
        if self._backlog:
            self._hand_over(self._backlog.popleft())
        try:
            self.outcome.keep(exchange)
        except OSError as error:
            self._stop(f"could not write what was read: {error.strerror}")
        pause_s = self._pause_s(exchange)
        if self._load.times is None and self._is_sending and pause_s:
            self._loop.call_later(pause_s, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """After an exchange: the next one of a closed loop, or the end."""
        if self._load.times is None:
            self._send_next()
        if not self._is_sending:
            self._check_end()

    def _pause_s(self, exchange: Exchange) -> float:
        """How long a closed loop waits before the next request: refusals cost no time and would use up all requests."""
        if exchange.error not in _GONE and exchange.status not in _GONE_STATUSES:
            self._gone_since_s = None if exchange.error is None else self._gone_since_s
            return 0.0
        if self._gone_since_s is None:
            self._gone_since_s = exchange.end_s
        gone_s = exchange.end_s - self._gone_since_s
        has_no_end = self._load.times is None and self._load.duration_s is None
        if has_no_end and gone_s > self._load.give_up_s:
            self._is_sending = False
            self.outcome.cut_short = f"the server was gone for {gone_s:.0f} s, so the run ended early"
        return min(_MAX_PAUSE_S, max(LAG_EVERY_S, gone_s / 2))

    def _check_end(self) -> None:
        if self._n_ended == self._n_sent and not self.done.done():
            self.done.set_result(None)

    def interrupt(self) -> None:
        if self._is_sending or not self.done.done():
            self.outcome.was_interrupted = True
            self._drop_all()

    def _stop(self, reason: str) -> None:
        if not self.outcome.cut_short:
            self.outcome.cut_short = reason
            self._drop_all()

    def _drop_all(self) -> None:
        self._is_sending = False
        waiting = [exchange for followers in self._followers.values() for exchange in followers]
        waiting += self._backlog
        self._followers.clear()
        self._backlog.clear()
        for exchange in [*self._on_way.values(), *waiting]:
            self._pool.drop(exchange, UNFINISHED)
        self._check_end()

    def close(self) -> None:
        self._timer.close()
        self._lag_timer.close()

    # -- watching

    def flush(self) -> None:
        """A kill loses no more than what ended since."""
        try:
            self.outcome.exchanges.flush()
        except OSError as error:
            self._stop(f"could not write what was read: {error.strerror}")

    def _on_lag(self) -> None:
        now = time.perf_counter()
        self.outcome.lag_s.append(now - self._lag_due_s)
        self._lag_due_s = max(self._lag_due_s + LAG_EVERY_S, now)
        self._lag_timer.set(self._lag_due_s)

    def drop_late(self) -> None:
        bound_s = time.perf_counter() - self._load.timeout_s
        late = [exchange for exchange in self._on_way.values() if (exchange.sent_s or exchange.asked_s) < bound_s]
        for exchange in late:
            self._pool.drop(exchange, TIMEOUT)

    def progress(self) -> Progress:
        now = time.perf_counter()
        elapsed_s = now - self.outcome.began_s
        n_sent = self._n_sent
        tick_s = max(now - self._tick_at, 1e-9)
        rate, chunk_rate = (self._n_ended - self._tick_ended) / tick_s, (self._n_chunks - self._tick_chunks) / tick_s
        self._tick_at, self._tick_ended, self._tick_chunks = now, self._n_ended, self._n_chunks
        recent, ttfts = sorted(self._recent), sorted(self._recent_ttft)
        left_s = None
        if self._load.duration_s is not None:
            left_s = max(0.0, self._load.duration_s - elapsed_s)
        elif self._load.n_requests is not None and self._n_ended:
            left_s = (self._load.n_requests - self._n_ended) * elapsed_s / self._n_ended
        return Progress(
            n_sent=n_sent,
            n_ended=self._n_ended,
            n_in_flight=n_sent - self._n_ended,
            n_errors=self._n_errors,
            elapsed_s=elapsed_s,
            rate=rate,
            p50_s=recent[len(recent) // 2] if recent else None,
            p99_s=recent[min(len(recent) - 1, len(recent) * 99 // 100)] if recent else None,
            left_s=left_s,
            ttft_s=ttfts[len(ttfts) // 2] if ttfts else None,
            chunk_rate=chunk_rate,
        )


@dataclass(frozen=True)
class Source:
    address: Address
    request: bytes
    every_s: float = 1.0


def run(
    address: Address,
    load: Load,
    tls: ssl.SSLContext | None = None,
    sources: Sequence[Source] = (),
    on_progress: Callable[[Progress], None] | None = None,
    file: BinaryIO | None = None,
) -> Outcome:
    """Runs the load to its end, or to a SIGINT. Blocks; owns the main thread's event loop.

    `file`: where exchanges are written as they end, else in memory; source i is kind i + 1 there.
    """
    import uvloop

    raise_file_limit()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection among a million kept reads stops the loop for tens of milliseconds
    try:
        outcome = Outcome(ExchangeFile(file or io.BytesIO()))
        uvloop.run(_run(address, load, tls, sources, on_progress, outcome))
        return outcome
    finally:
        gc.enable()
        gc.unfreeze()


async def _run(
    address: Address,
    load: Load,
    tls: ssl.SSLContext | None,
    sources: Sequence[Source],
    on_progress: Callable[[Progress], None] | None,
    outcome: Outcome,
) -> None:
    loop = asyncio.get_running_loop()
    bound_s = load.timeout_s
    pool = Pool(loop, address, tls, bound_s)
    load_run = _LoadRun(loop, load, pool, outcome)
    pool.on_end = load_run.on_end
    pools = [Pool(loop, source.address, tls if source.address.is_tls else None, bound_s) for source in sources]
    has_ended = asyncio.Event()
    await pool.warm(load.concurrency or load.n_spare)
    pool.n_spare = load.n_spare
    tasks = [
        loop.create_task(_follow(*follower, outcome, has_ended))
        for follower in zip(pools, itertools.count(1), sources, strict=False)
    ]
    watching = [
        loop.create_task(_repeat(load_run.drop_late, min(_TICK_S, max(_LEAST_TICK_S, bound_s / 4)))),
        loop.create_task(_repeat(load_run.flush, _TICK_S)),
    ]
    if on_progress is not None:
        watching.append(loop.create_task(_repeat(lambda: on_progress(load_run.progress()), _TICK_S)))
    try:
        with _signals_stop(loop, load_run.interrupt):
            cpu_s = time.process_time()
            load_run.begin()
            await load_run.done
            outcome.ended_s = time.perf_counter()
            outcome.cpu_s = time.process_time() - cpu_s
        outcome.n_connections = pool.n_opened
        has_ended.set()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_PAGE_S)
    finally:
        for task in (*tasks, *watching):
            task.cancel()
        load_run.close()
        for each in (pool, *pools):
            each.close()


@contextlib.contextmanager
def _signals_stop(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run with what there is, instead of the process."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in earlier:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _repeat(action: Callable[[], None], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        action()


async def _follow(pool: Pool, kind: int, source: Source, outcome: Outcome, has_ended: asyncio.Event) -> None:
    """Asks one page again and again, one request at a time, and a last time when the run has ended."""
    for index in itertools.count():
        is_last = has_ended.is_set()
        answered = asyncio.get_running_loop().create_future()
        pool.on_end = answered.set_result
        pool.send(Exchange(index, source.request, time.perf_counter()))
        with contextlib.suppress(OSError):  # the run's own writes notice a full disk
            outcome.keep(await asyncio.shield(answered), kind)
        if is_last:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(has_ended.wait(), source.every_s)
