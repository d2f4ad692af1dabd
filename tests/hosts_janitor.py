"""Clears away after a set of hosts (hosts.py) when the process that made it has ended, in whatever way.

`python hosts_janitor.py BASE LIFELINE` waits until nobody holds the writing end of the pipe LIFELINE any more: the
kernel closes it for a process that was killed, too. The journal BASE/run/journal says what to undo. `bury` also runs
at the start of later hosts, for those whose janitor was killed as well. Standard library only: it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

DEATH_S = 5.0


def started_at(pid: int) -> str | None:
    """When a process began, in ticks since boot: with it, a pid names one process for ever. None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def note(base: Path, line: str) -> None:
    """Add a line to the journal of `base`: what must be undone."""
    with (base / "run" / "journal").open("a") as journal:
        journal.write(line + "\n")


def note_pid(base: Path, pid: int) -> None:
    start = started_at(pid)
    if start is not None:
        note(base, f"pid {pid} {start}")


def bury(base: Path) -> None:
    """Undo what the journal of `base` names, and remove the folder. Idempotent."""
    lines = [line.split() for line in _lines(base / "run" / "journal")]
    pids = [(int(words[1]), words[2]) for words in lines if words[0] == "pid"]
    for pid, start in pids:
        if started_at(pid) == start:
            os.kill(pid, signal.SIGKILL)
    _wait_for_death(pids)
    # After the processes, so that their clients outside were told; before the kernel gets to the network namespaces,
    # which it takes apart some time after their last process.
    for words in lines:
        if words[0] == "ip":
            subprocess.run(words, capture_output=True)
    for words in lines:
        if words[0] == "cgroup":
            _remove_cgroup(Path(words[1]))
    if str(base) not in Path("/proc/self/mountinfo").read_text("utf-8"):  # never delete through a mount
        shutil.rmtree(base, ignore_errors=True)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text("utf-8").splitlines() if line]
    except FileNotFoundError:
        return []


def _wait_for_death(pids: list[tuple[int, str]]) -> None:
    for pid, start in pids:
        with contextlib.suppress(ProcessLookupError):
            ends = os.pidfd_open(pid)
            if started_at(pid) == start:
                select.select([ends], [], [], DEATH_S)
            os.close(ends)


def _remove_cgroup(path: Path) -> None:
    """A control group and those in it. The kernel refuses while a dying process is still inside."""
    deadline = time.monotonic() + DEATH_S
    while path.exists() and time.monotonic() < deadline:
        for folder, _, _ in os.walk(path, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                time.sleep(0.02)


def main() -> None:
    base, lifeline = Path(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(lifeline, 1)
    bury(base)


if __name__ == "__main__":
    main()
