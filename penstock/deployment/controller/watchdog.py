"""Brings the controller back when it is killed. Nothing else: it imports little, so that little can end it.

    python -m penstock.deployment.controller.watchdog RUN_FOLDER PID

The controller starts its watchdog and starts another when that one is gone; each watches the other.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

_SOON_S = 0.5
_CRASH_LOOP_S = 10.0  # a controller that lived for less is brought back after this pause, not at once


class Sight:
    """Tells a run folder that was removed from one that cannot be seen: its home is unmounted or was moved, and usually
    comes back. The folder of all runs is another then, or there is none.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._runs = run, _identity(run.parent)

    def is_hidden(self) -> bool:
        runs = _identity(self._run.parent)
        if (self._run / "run.json").exists():
            self._runs = runs  # mounted anew, it may have another number
        return runs != self._runs


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def wait_for_end(pid: int) -> None:
    """Block until the process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):  # a kernel before 5.3
        while Path(f"/proc/{pid}").exists():
            time.sleep(_SOON_S)
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def is_wanted(run: Path) -> bool:
    """Whether the run still exists and its end was not asked for."""
    try:
        return bool(json.loads((run / "desired.json").read_bytes())["state"] == "up")
    except (OSError, ValueError, KeyError):
        return False


def main(argv: list[str]) -> int:
    run, pid = Path(argv[0]), int(argv[1])
    sight = Sight(run)
    began = time.monotonic()
    wait_for_end(pid)
    lived_s = time.monotonic() - began
    time.sleep(_SOON_S if lived_s > _CRASH_LOOP_S else _CRASH_LOOP_S / 2)
    while sight.is_hidden():
        time.sleep(_SOON_S)
    if not is_wanted(run):
        return 0
    with (run / "logs" / "controller.log").open("ab") as log:
        log.write(f"penstock: controller {pid} is gone, starting another\n".encode())
        subprocess.Popen(
            [sys.executable, "-m", "penstock.deployment.controller", str(run)],
            env={**os.environ, "PENSTOCK_ROLE": "controller"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        ).returncode = 0  # it outlives us on purpose
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
