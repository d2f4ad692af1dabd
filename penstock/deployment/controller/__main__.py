"""The controller's program: `python -m penstock.deployment.controller RUN_FOLDER`."""

from __future__ import annotations

import fcntl
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from penstock.deployment.controller.loop import Controller
from penstock.run_folder import Run


def _hold(run: Run) -> TextIO | None:
    """The lock that makes us the only controller of a run; None when another has it."""
    stream = (run.path / "controller.lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def main(argv: Sequence[str]) -> int:
    """Control the run in a folder until it is to go down; the exit code of the process."""
    run = Run(Path(argv[0]))
    lock = _hold(run)
    if lock is None:
        return 0
    controller = Controller(run)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.stop.set())
    try:
        controller.run_until_stopped()
    finally:
        controller.end_warden()
        lock.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
