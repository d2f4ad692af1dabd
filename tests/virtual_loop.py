"""An event loop whose clock is virtual: when nothing is ready it jumps to the next timer, so no test waits.

A test that can never end fails at once: when there is neither a timer nor anything ready, or when the clock has come to
`limit_s` with nothing but periodic timers. Threads of the loop's `world` run in turns with it (`VirtualThread`), and
sockets are those of `virtual_network`. So a test sees the same order of events every time.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from virtual_network import Network

from penstock.world import Condition, Processes

BEGINS_AT: Final = 1000.0
UNIX_AT_0: Final = 1_790_000_000.0 - BEGINS_AT  # 2026-09-21 in UTC
LIMIT_S: Final = 300.0
TURNS: Final = 100_000  # without a jump

T = TypeVar("T")


class _Selector:
    """BaseEventLoop asks it once a turn how long to wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._n_turns = loop, 0

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise AssertionError(f"deadlock: nothing can happen any more\n{self._loop.write_tasks()}")
        self._n_turns += 1
        if self._n_turns > TURNS:
            self._n_turns = 0
            raise AssertionError(f"an endless loop: no time passes\n{self._loop.write_tasks()}")
        if timeout > 0:
            self._n_turns = 0
            self._loop.jump()
        return []


class VirtualLoop(Network):
    """`limit_s`: virtual seconds that a test may take."""

    _scheduled: list[asyncio.TimerHandle]  # BaseEventLoop's heap

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Selector(self)
        self._at = BEGINS_AT
        self._clock_resolution = 1e-9
        self.limit_s = LIMIT_S
        self.threads: list[VirtualThread] = []
        self.world = VirtualWorld(self)

    def time(self) -> float:
        return self._at

    def jump(self) -> None:
        """Set the clock to the next timer's time."""
        self._at = max(self._at, self._scheduled[0].when())
        if self._at - BEGINS_AT > self.limit_s:
            limit_s, self.limit_s = self.limit_s, self.limit_s + 60.0  # to clean up in
            raise AssertionError(f"not done after {limit_s:g} virtual seconds\n{self.write_tasks()}")

    def write_tasks(self) -> str:
        """Where each task waits."""
        lines = []
        for task in asyncio.all_tasks(self):
            places = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in task.get_stack()]
            lines.append(f"{task.get_name()} waits in {' > '.join(places)}")
        return "\n".join(sorted(lines))

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - the one who waits gets it
                self.call_soon(future.set_exception, error)
            else:
                self.call_soon(future.set_result, result)

        self.world.thread(work, "executor")
        return future

    def close(self) -> None:
        for thread in self.threads:
            thread.abandon()
        super().close()

    def _process_events(self, event_list: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class VirtualThread:
    """A real thread that runs only while the loop waits for it: either of the two runs, never both."""

    def __init__(self, loop: VirtualLoop, work: Callable[[], None], name: str) -> None:
        self._loop, self._work = loop, work
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._handle: asyncio.Handle | None = loop.call_soon(self._step)
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.done = VirtualEvent(loop)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        loop.threads.append(self)
        self._thread.start()

    def is_alive(self) -> bool:
        return not self.done.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.done.wait(timeout)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def park(self, timeout: float | None) -> None:
        """Called on the thread: let the loop continue until `wake`, or for that time."""
        self._handle = None if timeout is None else self._loop.call_later(max(0.0, timeout), self._step)
        self._back.release()
        self._turn.acquire()
        if self._is_abandoned:
            raise SystemExit

    def wake(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_soon(self._step)

    def abandon(self) -> None:
        """End a thread that the test left behind."""
        if self.is_alive():
            self._is_abandoned = True
            self._turn.release()
            self._thread.join()

    def _step(self) -> None:
        self._handle = None
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._is_abandoned:
                self._work()
        except Exception as error:  # noqa: BLE001 - the loop raises it
            self._error = error
        finally:
            if not self._is_abandoned:
                self.done.set()
            self._back.release()


class VirtualEvent:
    """A `threading.Event` for virtual threads."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._is_set = loop, False
        self._waiting: list[VirtualThread] = []

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wake()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            thread = current_thread(self._loop)
            self._waiting.append(thread)
            thread.park(timeout)
            self._waiting.remove(thread)
        return self._is_set


class VirtualWorld:
    """`penstock.world.World` on a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.random = random.Random(0)
        self.now: Callable[[], float] = loop.time

    @property
    def processes(self) -> Processes:
        raise AssertionError("the gateway starts no process")

    def unix(self) -> float:
        return UNIX_AT_0 + self._loop.time()

    def sleep(self, seconds: float) -> None:
        current_thread(self._loop).park(seconds)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def event(self) -> VirtualEvent:
        return VirtualEvent(self._loop)

    def condition(self) -> Condition:
        raise AssertionError("the gateway waits for no condition")

    def thread(self, work: Callable[[], None], name: str) -> VirtualThread:
        return VirtualThread(self._loop, work, name)


def current_thread(loop: VirtualLoop) -> VirtualThread:
    thread = next((thread for thread in loop.threads if thread.is_current()), None)
    assert thread is not None, "this call would block the loop"
    return thread


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(test)


async def advance(seconds: float) -> None:
    """Let so much time pass."""
    await asyncio.sleep(seconds)


def loop() -> VirtualLoop:
    """The running loop."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running
