"""`penstock top` in a real pseudo-terminal: keys, sizes, Ctrl-Z, signals, and the terminal as it was after each end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from samples import deployment, run_folder
from waiting import left_s, until

pytestmark = pytest.mark.processes

_ON, _OFF = b"\033[?1049h", b"\033[?1049l"  # the alternate screen
_SHOWN = b"\033[?25h"  # the cursor


class Screen:
    """`penstock top` behind a pseudo-terminal whose other end is this test's."""

    def __init__(self, home: Path, **env: str) -> None:
        self.file, self._end = pty.openpty()
        self.before = self.settings()
        self.data = b""
        self.resize(24, 80)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "top"],
            stdin=self._end, stdout=self._end, stderr=self._end, start_new_session=True,
            env={**os.environ, "PENSTOCK_HOME": str(home), "TERM": "xterm", **env},
        )  # fmt: skip

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._end)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        self.data = b""
        os.write(self.file, keys)

    def shown(self) -> str:
        """What was drawn since the last key, without colours."""
        if select.select([self.file], [], [], 0)[0]:
            self.data += os.read(self.file, 65536)
        return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", self.data.decode("utf-8", "replace"))

    def wait_for(self, text: str) -> str:
        """What was drawn since the last key once this is a part of it."""
        return until(lambda: shown if text in (shown := self.shown()) else "", f"{text!r} is shown")

    def wait_for_lines(self, n_max: int) -> None:
        """Until it draws fewer lines: what it was drawing when the terminal changed comes first."""

        def is_smaller() -> bool:
            self.data = b""
            return self.wait_for("quit").count("\n") < n_max

        until(is_smaller, f"fewer than {n_max} lines")

    def check_ended(self, code: int) -> None:
        """It has ended so, and left the terminal as it was."""
        assert self.process.wait(left_s()) == code
        while select.select([self.file], [], [], 0.1)[0]:
            self.data += os.read(self.file, 65536)
        assert self.settings() == self.before
        assert self.data.rfind(_OFF) > self.data.rfind(_ON) and _SHOWN in self.data[-40:]


@contextmanager
def started(home: Path, first: str = "? help", **env: str) -> Iterator[Screen]:
    screen = Screen(home, **env)
    try:
        screen.wait_for(first)
        yield screen
    finally:
        if screen.process.poll() is None:
            screen.process.kill()
            screen.process.wait()
        os.close(screen.file)
        os.close(screen._end)


def test_a_terminal_shows_what_keys_ask_for_and_is_restored(home: Path) -> None:
    for name in ("one", "two"):
        run_folder(deployment(name=name)).add_event("up", f"{name} begins", who="kim@here")
    with started(home) as screen:
        assert "one begins (by kim@here)" in screen.wait_for("what `status` knows")
        assert screen.settings() != screen.before
        screen.press(b"\t")
        screen.wait_for("two begins")
        screen.press(b"/")
        screen.wait_for("/_")
        screen.press(b"q\033")  # a letter of the filter, and escape alone
        screen.wait_for("q quit")
        screen.press(b"\033")
        os.write(screen.file, b"[B")  # an arrow that comes in two parts is no escape
        screen.press(b"?")
        screen.wait_for("this help")
        screen.resize(10, 60)
        screen.process.send_signal(signal.SIGWINCH)
        screen.wait_for_lines(12)
        screen.press(b"p")
        screen.wait_for("PAUSED")
        screen.process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(screen.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and screen.settings() == screen.before, "the shell's, while it waits"
        screen.data = b""
        screen.process.send_signal(signal.SIGCONT)
        screen.wait_for("PAUSED")
        screen.press(b"q")
        screen.check_ended(0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_leaves_the_terminal_as_it_was(home: Path, number: signal.Signals, code: int) -> None:
    run_folder(deployment(name="one"))
    with started(home, NO_COLOR="1") as screen:
        assert b"\033[32m" not in screen.data and b"\033[36m" not in screen.data
        screen.process.send_signal(number)
        screen.check_ended(code)


@pytest.mark.nightly
def test_a_dumb_terminal_gets_it_once(home: Path) -> None:
    run_folder(deployment(name="one"))
    with started(home, "REPLICA STATE", TERM="dumb") as screen:
        assert screen.process.wait(left_s()) == 0 and b"\033" not in screen.data
