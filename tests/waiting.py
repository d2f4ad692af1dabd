"""Waiting in real tests: for a line of a log, an event, an end; never for a time.

    waiting.event(run, "replica ready", replica="0")
    waiting.line(run.log("gateway"), "listens on")
    waiting.until(lambda: not run.exists(), "the folder is gone")

Nothing here has a time limit of its own. One deadline for the whole run of tests ends what hangs, since a limit that
is long enough for a busy machine proves nothing on a quiet one.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from penstock.run_folder import Run
from penstock.wire.live import Event

# `make nightly` sets another.
_RUN_S: Final = float(os.environ.get("PENSTOCK_TESTS_RUN_S", "2400"))
_LOOK_EVERY_S: Final = 0.02
# Worker processes inherit it. CLOCK_MONOTONIC is the same in all processes of a machine.
_ENDS_AT: Final = float(os.environ.setdefault("PENSTOCK_TESTS_END_AT", str(time.monotonic() + _RUN_S)))

T = TypeVar("T")


def left_s() -> float:
    """Seconds until the deadline of the whole run: for calls that need a number.  Raises AssertionError after it."""
    left = _ENDS_AT - time.monotonic()
    assert left > 0, "the deadline of the whole run of tests is over"
    return left


def until(condition: Callable[[], T], what: str, told: Callable[[], str] | None = None) -> T:
    """Block until the condition is true and return its value.  Raises AssertionError with `what` at the deadline.

    `told`: what a message of a failure ends with, such as the logs. Where there is a log to follow, use `event` or
    `line`: a condition sees only the moments at which it is read.
    """
    try:
        while not (value := condition()):
            assert time.monotonic() < _ENDS_AT, f"expected before the end of the run of tests: {what}"
            time.sleep(_LOOK_EVERY_S)
    except AssertionError as error:
        if told is None:
            raise
        raise AssertionError(f"{error}\n{told()}") from error
    return value


def event(run: Run, kind: str, replica: str | None = None, text: str = "", after: int = 0) -> Event:
    """The first event of that kind in the run's log, after the first `after` lines, whose text contains `text`."""

    def first() -> Event | None:
        rows = run.events()[after:]
        same = (row for row in rows if row.event == kind and replica in (None, row.replica) and text in row.text)
        return next(same, None)

    return until(first, f'event "{kind}" {text!r} of {run.name}')  # type: ignore[return-value]


def line(log: Path, text: str, after: int = 0) -> str:
    """The first whole line of a log, after the first `after` lines, that contains `text`."""

    def first() -> str | None:
        lines = log.read_text("utf-8", "replace").splitlines(keepends=True)[after:] if log.exists() else []
        return next((row for row in lines if text in row and row.endswith("\n")), None)

    return until(first, f"{text!r} in {log}").rstrip("\n")  # type: ignore[union-attr]


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Block until a process has ended; its exit code."""
    return process.wait(left_s())
