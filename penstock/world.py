"""The clock, waiting, random numbers, threads and processes, as one argument.

Controller, node and gateway take a `World` and call nothing of `time`, `random`, `asyncio.sleep` or `subprocess`
themselves (held by tests/test_tidy.py). `REAL` is the machine; a simulation passes its own, with a virtual clock.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from penstock.wire.announcement import Process

if TYPE_CHECKING:
    from penstock.processes import Marked


class Event(Protocol):
    """A `threading.Event` of a world: `wait` blocks by the world's clock."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """A `threading.Condition` of a world: `wait_for` blocks by the world's clock."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Thread(Protocol):
    """A started thread of a world."""

    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...


class Processes(Protocol):
    """Functions of the module `processes` that act: they start, find, signal and end processes."""

    def identify(self, pid: int, role: str = "") -> Process: ...
    def start_detached(
        self,
        argv: Sequence[str],
        marks: Mapping[str, str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> Process: ...
    def is_alive(self, process: Process) -> bool: ...
    def find_marked(
        self, run: str | None = None, replica: str | None = None, rank: str | None = None
    ) -> list[Marked]: ...
    def signal_process(self, process: Process, number: Signals) -> None: ...
    def end(self, processes: Sequence[Process], grace_s: float) -> list[Process]: ...
    def sweep(
        self, run: str, replica: str | None = None, rank: str | None = None, keep: Iterable[int] = ()
    ) -> list[Marked]: ...
    def unlink_shared_memory(self, segments: Iterable[str]) -> None: ...


class World(Protocol):
    """What code needs of the machine to pass time and to start things.

    `now`: monotonic seconds; `unix`: seconds since 1970. `sleep` blocks a thread, `pause` a task. `thread` starts a
    daemon thread that runs `work` once.
    """

    @property
    def random(self) -> random.Random: ...
    @property
    def processes(self) -> Processes: ...
    def now(self) -> float: ...
    def unix(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    async def pause(self, seconds: float) -> None: ...
    def event(self) -> Event: ...
    def condition(self) -> Condition: ...
    def thread(self, work: Callable[[], None], name: str) -> Thread: ...


class RealWorld:
    """This machine."""

    def __init__(self) -> None:
        self.random = random.Random()
        self.now: Callable[[], float] = time.monotonic
        self.unix: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.event: Callable[[], Event] = threading.Event
        self.condition: Callable[[], Condition] = threading.Condition

    @property
    def processes(self) -> Processes:
        from penstock import processes  # psutil: the gateway starts without it

        return processes

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def thread(self, work: Callable[[], None], name: str) -> Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


REAL: Final[World] = RealWorld()
