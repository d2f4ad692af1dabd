"""The controller's program: `python -m penstock.deployment.controller RUN_FOLDER [--unit NAME]`.

`--unit`: the target placed it, so it waits until the controller before it has ended. `--sockets`: inherited, for the
gateway.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from penstock.deployment.controller.loop import Controller
from penstock.run_folder import Run
from penstock.wire.structs import prepare_loaded
from penstock.world import REAL

_WAIT_S = 1.0


def _hold(run: Run) -> TextIO | None:
    """The lock that makes this the only controller of a run; None when another has it."""
    stream = (run.path / "controller.lock").open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.deployment.controller")
    parser.add_argument("run", type=Path)
    parser.add_argument("--unit")
    parser.add_argument("--sockets", type=lambda text: tuple(map(int, text.split(","))), default=())
    options = parser.parse_args(argv)
    run = Run(options.run)
    lock = _hold(run)
    while lock is None and options.unit is not None and run.desired().state == "up":
        REAL.sleep(_WAIT_S)
        lock = _hold(run)
    if lock is None:
        return 0
    controller = Controller(run, options.unit, options.sockets)
    prepare_loaded()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.stop.set())
    try:
        controller.run_until_stopped()
    finally:
        controller.end_children()
        lock.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
