"""The tests of `make check` start no process, use no socket and wait for no time; those marked `loopback` start none.

While such a test runs, an attempt fails with the marker that the test needs. The test fails at its end too, since code
under test may have swallowed the error.
"""

from __future__ import annotations

import asyncio
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import pytest

Kind = Literal["process", "socket", "wait"]
# The markers of `make test` and `make nightly` (pyproject.toml): what a test without one must not do is in KINDS.
REAL: Final = (
    "llamacpp",
    "vllm",
    "hosts",
    "postgres",
    "processes",
    "browser",
    "simulation",
    "nightly",
    "slow",
)
KINDS: Final[dict[str, Kind]] = {
    "subprocess.Popen": "process",
    "os.fork": "process",
    "os.forkpty": "process",
    "os.posix_spawn": "process",
    "os.exec": "process",
    "socket.connect": "socket",
    "socket.bind": "socket",
}
INSTEAD: Final[dict[Kind, str]] = {
    "process": "mark it `processes`, or give the code a World (penstock/world.py) with a scripted process",
    "socket": "give the code bytes or a fake transport, or mark it `loopback`",
    "wait": "give the code a World (penstock/world.py) with a virtual clock, or mark it `loopback`",
}


class Attempt(AssertionError):
    """A test of the quick tier did what only real tests may do."""


class Watch:
    """Attempts of the test that runs now; `allowed` is None between the tests of the quick tier."""

    def __init__(self) -> None:
        self.allowed: frozenset[Kind] | None = None
        self.attempts: list[str] = []
        self.others: set[int | None] = set()  # threads that an earlier test left
        self.is_installed = False

    def refuse(self, kind: Kind, act: str) -> None:
        if self.allowed is None or kind in self.allowed or threading.get_ident() in self.others:
            return
        message = f"a test of the quick tier: {act}; {INSTEAD[kind]}"
        self.attempts.append(message)
        raise Attempt(message)

    def install(self) -> None:
        """Audit hooks cannot be removed: once a process."""
        if self.is_installed:
            return
        self.is_installed = True
        platform.platform()  # asks the program `uname`, once a process
        sys.addaudithook(self._audit)
        sleep, pause = time.sleep, asyncio.sleep

        def checked_sleep(seconds: Any) -> None:
            if seconds > 0:
                self.refuse("wait", f"time.sleep({seconds})")
            sleep(seconds)

        async def checked_pause(delay: float, result: Any = None) -> Any:
            if delay > 0 and is_real_clock(asyncio.get_running_loop()):
                self.refuse("wait", f"asyncio.sleep({delay})")
            return await pause(delay, result)

        time.sleep = checked_sleep
        asyncio.sleep = checked_pause

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is not None and (kind := KINDS.get(event)) is not None:
            self.refuse(kind, f"{event} {arguments[0 if kind == 'process' else 1 :]!r:.200}")


WATCH: Final = Watch()


def is_real_clock(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the loop reads the machine's clock: one with a virtual clock has its own `time`."""
    return type(loop).time is asyncio.BaseEventLoop.time or type(loop).__module__.startswith("uvloop")


def allowed(item: pytest.Item) -> frozenset[Kind] | None:
    """What a test may do by its markers; None: all."""
    if any(item.get_closest_marker(name) for name in REAL):
        return None
    return frozenset[Kind](("socket", "wait") if item.get_closest_marker("loopback") else ())


@contextmanager
def watched(kinds: frozenset[Kind] | None, watch: Watch = WATCH) -> Iterator[None]:
    """Refuse what a test must not do.  Raises Attempt at the end where the code swallowed it."""
    watch.attempts = []
    watch.others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    watch.allowed = kinds
    try:
        yield
    finally:
        watch.allowed = None
    if watch.attempts:
        raise Attempt(watch.attempts[0])
