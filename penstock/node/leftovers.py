"""Ends what a killed node left on this machine: `python -m penstock.node.leftovers RUN_FOLDER LAUNCH_ID REPLICA`.

A job's last step runs it on every node. It finds processes by their mark and temporary folders by their name.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from penstock import processes
from penstock.paths import remove_temporary


def main(argv: Sequence[str]) -> int:
    run, launch, replica = argv
    for number in (signal.SIGINT, signal.SIGTERM):  # the job may be ended again while this runs
        signal.signal(number, signal.SIG_IGN)
    for process in processes.sweep(run, replica):
        print(f"penstock: ended {process.role or 'process'} {process.pid}, left behind: {process.command}", flush=True)
    remove_temporary(launch, replica)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
