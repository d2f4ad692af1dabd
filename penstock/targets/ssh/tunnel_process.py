"""Keeps one tunnel of ssh up for as long as its run lives: nodes reach the gateway by it, the gateway reaches engines.

    python -m penstock.targets.ssh.tunnel_process SETTINGS.json

A connection of its own, since a shared one that hangs takes everything with it. The far end runs a program that reads
our heartbeat: both ends notice a silent link, and the far one frees its port. What it is doing is in the file beside
its settings, for `status`. It imports little, so that many of them cost little.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_BEAT_S = 3.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_CALM_AFTER_S = 30.0
_START_S = 20.0


class Keeper:
    """`argv` of the settings is one whole command of ssh; it prints a line when the tunnel is up."""

    def __init__(self, settings: Path) -> None:
        self._argv = json.loads(settings.read_bytes())["argv"]
        self._view = settings.with_suffix(".state")
        self._errors = settings.with_suffix(".errors")

    def run(self) -> None:
        """Until a signal."""
        failures = 0
        try:
            while True:
                began = time.monotonic()
                self._one_connection()
                failures = 0 if time.monotonic() - began > _CALM_AFTER_S else failures + 1
                self._tell(False, self._last_words())
                time.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
        finally:
            for path in (self._view, self._errors):
                path.unlink(missing_ok=True)

    def _one_connection(self) -> None:
        with self._errors.open("wb") as errors:
            child = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert child.stdin is not None and child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        os.set_blocking(child.stdin.fileno(), False)
        is_up, began = False, time.monotonic()
        try:
            while child.poll() is None:
                if not is_up and child.stdout.read(16):
                    is_up = True
                    self._tell(True, None)
                if not is_up and time.monotonic() - began > _START_S:
                    return
                with contextlib.suppress(BlockingIOError):
                    if is_up:
                        os.write(child.stdin.fileno(), b"\n")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_BEAT_S if is_up else 0.05)
        except BrokenPipeError:
            pass
        finally:
            child.kill()
            child.wait()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors.read_text("utf-8", "replace").strip().splitlines()
            return "\n".join(lines[-3:])[-600:]
        return ""

    def _tell(self, is_up: bool, why: str | None) -> None:
        new = self._view.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk: the tunnel works all the same
            new.write_text(json.dumps({"is_up": is_up, "at": time.time(), "why": why}))
            new.replace(self._view)


def main(argv: list[str]) -> int:
    """Keep the tunnel of a settings file until a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    Keeper(Path(argv[0])).run()
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
