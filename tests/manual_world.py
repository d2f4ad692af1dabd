"""A world for quick tests: the test sets the clock, and a thread has ended when it has started."""

from __future__ import annotations

from collections.abc import Callable

from penstock.world import RealWorld, Thread


class _Ended:
    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        pass


class ManualWorld(RealWorld):
    """`time_s`: what both clocks show; `sleep` moves it on."""

    def __init__(self, time_s: float = 0.0) -> None:
        super().__init__()
        self.time_s = time_s
        self.now = self.unix = lambda: self.time_s
        self.sleep = self._sleep

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def thread(self, work: Callable[[], None], name: str) -> Thread:
        work()
        return _Ended()
