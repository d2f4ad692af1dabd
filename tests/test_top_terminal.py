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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from samples import deployment, run_folder

pytestmark = pytest.mark.processes

_ON, _OFF = b"\033[?1049h", b"\033[?1049l"  # the alternate screen
_SHOWN = b"\033[?25h"  # the cursor
_DEADLINE_S = 60.0


class Screen:
    """`penstock top` behind a pseudo-terminal whose other end is this test's."""

    def __init__(self, home: Path, **env: str) -> None:
        self.file, self._end = pty.openpty()
        self.before = termios.tcgetattr(self._end)
        self.data = b""
        self.resize(24, 80)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "top"],
            stdin=self._end, stdout=self._end, stderr=self._end, start_new_session=True,
            env={**os.environ, "PENSTOCK_HOME": str(home), "TERM": "xterm", **env},
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        self.data = b""
        os.write(self.file, keys)

    def wait_for(self, text: str) -> str:
        """What was drawn since the last key, without colours, once this is a part of it."""
        deadline = time.monotonic() + _DEADLINE_S
        while text not in (shown := re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", self.data.decode("utf-8", "replace"))):
            assert time.monotonic() < deadline, f"expected {text!r} in {shown[-2000:]!r}"
            if select.select([self.file], [], [], 0.2)[0]:
                self.data += os.read(self.file, 65536)
        return shown

    def wait_for_lines(self, n_max: int) -> None:
        """Until it draws fewer lines: what it was drawing when the terminal changed comes first."""
        deadline = time.monotonic() + _DEADLINE_S
        self.data = b""
        while self.wait_for("quit").count("\n") >= n_max:
            assert time.monotonic() < deadline, self.data[-2000:]
            self.data = b""

    def check_ended(self, code: int) -> None:
        """It has ended so, and left the terminal as it was."""
        assert self.process.wait(_DEADLINE_S) == code
        while select.select([self.file], [], [], 0.1)[0]:
            self.data += os.read(self.file, 65536)
        assert termios.tcgetattr(self._end) == self.before
        assert self.data.rfind(_OFF) > self.data.rfind(_ON) and _SHOWN in self.data[-40:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.file)
        os.close(self._end)


@contextmanager
def started(home: Path, **env: str) -> Iterator[Screen]:
    screen = Screen(home, **env)
    try:
        screen.wait_for("? help")
        yield screen
    finally:
        screen.close()


def test_a_terminal_shows_what_keys_ask_for_and_is_restored(home: Path) -> None:
    for name in ("one", "two"):
        run_folder(deployment(name=name)).add_event("up", f"{name} begins", who="kim@here")
    with started(home) as screen:
        assert "one begins (by kim@here)" in screen.wait_for("what `status` knows")
        assert termios.tcgetattr(screen._end) != screen.before
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
        assert os.WIFSTOPPED(status) and termios.tcgetattr(screen._end) == screen.before, "the shell's, while it waits"
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
    screen = Screen(home, TERM="dumb")
    try:
        screen.wait_for("REPLICA STATE")
        assert screen.process.wait(_DEADLINE_S) == 0 and b"\033" not in screen.data
    finally:
        screen.close()
