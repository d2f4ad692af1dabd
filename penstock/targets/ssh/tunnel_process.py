"""Keeps one ssh tunnel up for as long as its run lives: nodes reach the gateway by it, the gateway reaches engines.

    python -m penstock.targets.ssh.tunnel_process SETTINGS.json

A connection of its own, since a shared one that hangs takes everything with it. The far end reads our heartbeat: both
ends notice a silent link, and the far one frees its port. SETTINGS.state says whether the tunnel is up, for `status`.
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

from penstock import paths
from penstock.processes import Backoff

_BEAT_S = 3.0
_START_S = 20.0


class TunnelProcess:
    """`argv` of the settings is one whole command of ssh; it prints a line when the tunnel is up."""

    def __init__(self, settings: Path) -> None:
        self._argv = json.loads(settings.read_bytes())["argv"]
        self._state = settings.with_suffix(".state")
        self._errors = settings.with_suffix(".errors")
        self._backoff = Backoff(0.5, 4.0, 30.0)

    def run(self) -> None:
        """Until a signal."""
        try:
            while True:
                self._connect()
                self._note(False, self._last_words())
                time.sleep(self._backoff.next(time.monotonic()))
        finally:
            for path in (self._state, self._errors):
                path.unlink(missing_ok=True)

    def _connect(self) -> None:
        """One connection, until it ends or does not come up."""
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
                    self._note(True, None)
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

    def _note(self, is_up: bool, why: str | None) -> None:
        with contextlib.suppress(OSError):  # the tunnel works with a full disk too
            paths.write_atomically(self._state, json.dumps({"is_up": is_up, "at": time.time(), "why": why}).encode())


def main(argv: list[str]) -> int:
    """Keep the tunnel of a settings file until a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    TunnelProcess(Path(argv[0])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
