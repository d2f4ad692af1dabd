"""Ends what a killed node left on this machine: `python -m penstock.node.leftovers RUN_FOLDER LAUNCH_ID REPLICA`.

A job's last step runs it on every node. It finds processes by their mark and temporary folders by their name.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock import processes


def main(argv: Sequence[str]) -> int:
    """Sweep one replica's leftovers; the exit code of the process."""
    run, launch, replica = argv
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends the job wants it tidy
        signal.signal(number, signal.SIG_IGN)
    for process in processes.sweep(run, replica):
        print(f"penstock: ended {process.role or 'process'} {process.pid}, left behind: {process.command}", flush=True)
    # engine_process.private_folder, whose end tells node and part
    ours = re.compile(rf"penstock-{re.escape(launch)}-{re.escape(replica)}(n[0-9]+)?[a-z]?\Z")
    for path in Path(tempfile.gettempdir()).glob(f"penstock-{launch}-*"):
        if ours.match(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
