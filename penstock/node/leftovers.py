"""Ends what a killed node left on this machine: `python -m penstock.node.leftovers RUN_FOLDER LAUNCH_ID REPLICA`.

A job's last step runs it on every node. It finds processes by their mark and temporary folders by their name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence

from penstock import processes
from penstock.node import staging
from penstock.paths import OF_ENGINE, every_temporary, is_held, remove_temporary

_OLD_S = 60.0  # a folder that is just made is locked a moment later


def main(argv: Sequence[str]) -> int:
    run, launch, replica = argv
    for number in (signal.SIGINT, signal.SIGTERM):  # the job may be ended again while this runs
        signal.signal(number, signal.SIG_IGN)
    for process in processes.sweep(run, replica):
        print(f"penstock: ended {process.role or 'process'} {process.pid}, left behind: {process.command}", flush=True)
    remove_temporary(launch, replica)
    _remove_copies()
    return 0


def remove_lost_folders() -> None:
    """Remove temporary folders of this user whose engines died with this machine, or with their node.

    Those that are old, locked by no process and of no launch with a process here.
    """
    living = {process.run_id for process in processes.find_marked()}
    for path, run_id in every_temporary().items():
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_old = status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_S
            if is_old and run_id not in living and OF_ENGINE.match(path.name) and not is_held(path):
                shutil.rmtree(path)
    _remove_copies()


def _remove_copies() -> None:
    """The passing copies of weights that no node of this machine uses."""
    for folder in staging.scratch_folders():
        staging.remove_unused(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
