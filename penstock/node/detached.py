"""Starts a node outside this process's tree: `python -m penstock.node.detached RUN_FOLDER LAUNCH_ID REPLICA ARGS...`.

Slurm without control groups (proctrack/linuxproc) sends TERM to every process below a job's task: an engine would break
its streams at once. So this process is the task, and passes signals on to the node alone, by way of a guard that is no
child of it. When this process is killed, the guard ends the node and all that it started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from threading import Thread

from penstock.node import leftovers
from penstock.processes import MARK_REPLICA, MARK_ROLE, MARK_RUN, MARK_RUN_ID

_KILLED = 128 + signal.SIGKILL


def main(argv: Sequence[str]) -> int:
    """The exit code of the node; as after SIGKILL where its guard is gone too."""
    signals_in, signals = os.pipe()
    codes, codes_out = os.pipe()
    if os.fork() == 0:
        if os.fork():
            os._exit(0)
        os.close(signals)  # its end then shows the guard that the task is gone
        os.setsid()
        _guard(argv, signals_in, codes_out)
        os._exit(0)
    os.wait()
    os.close(codes_out)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.write(signals, bytes([number])))
    code = os.read(codes, 1)
    return code[0] if code else _KILLED


def _guard(argv: Sequence[str], signals_in: int, codes_out: int) -> None:
    run, launch_id, replica, *words = argv
    # Marks of the node alone: what ends a replica's processes by their marks must not end the task or the guard.
    marks = {MARK_RUN: run, MARK_RUN_ID: launch_id, MARK_REPLICA: replica, MARK_ROLE: "node"}
    words = [f"{run}/artifact/launch.json", "--replica", replica, *words]
    node = subprocess.Popen([sys.executable, "-m", "penstock.node", *words], env=os.environ | marks)

    def pass_on() -> None:
        while number := os.read(signals_in, 1):
            node.send_signal(number[0])
        node.kill()

    Thread(target=pass_on, daemon=True).start()
    code = node.wait()
    try:
        os.write(codes_out, bytes([code if code >= 0 else 128 - code]))
    except BrokenPipeError:
        leftovers.main([run, launch_id, replica])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
