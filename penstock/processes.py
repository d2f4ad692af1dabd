"""Processes by pid and start time: started detached and marked, found by the mark, ended with what they leave.

Every process of penstock carries PENSTOCK_RUN (its run folder) and PENSTOCK_RUN_ID in its environment, and so do the
children that an engine forks. A pid alone is never trusted: it is compared with the process's start time.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.wire.announcement import Process

MARK_RUN = "PENSTOCK_RUN"
MARK_RUN_ID = "PENSTOCK_RUN_ID"
MARK_ROLE = "PENSTOCK_ROLE"
MARK_REPLICA = "PENSTOCK_REPLICA"
MARK_RANK = "PENSTOCK_RANK"  # of a node among those of its replica

_SEGMENT = re.compile(r"(?:^|\s)(/dev/shm/[^/\s]+)(?= \(deleted\)$|$)", re.MULTILINE)
_CLOCK_STEP_S = 1.0
_DYING_S = 20.0  # a killed engine gives hundreds of GB back
# Python's helper that unlinks shared memory of dead processes; it ends when no process holds its pipe.
_TRACKER = "multiprocessing.resource_tracker"


class Backoff:
    """How long restarts wait: `first_s`, then twice as long each time, at most `most_s`; `first_s` again after `calm_s`
    without a failure. Pure: the caller passes `now` in seconds."""

    def __init__(self, first_s: float, most_s: float, calm_s: float) -> None:
        self._first_s, self._most_s, self._calm_s = first_s, most_s, calm_s
        self._wait_s = 0.0
        self._until = 0.0

    def next(self, now: float) -> float:
        """Seconds to wait after a failure at `now`."""
        is_calm = self._wait_s == 0 or now - self._until > self._calm_s
        self._wait_s = self._first_s if is_calm else min(self._most_s, self._wait_s * 2)
        self._until = now + self._wait_s
        return self._wait_s


class Marks(NamedTuple):
    """What the processes of one node carry; None: any."""

    run: str
    replica: str | None = None
    rank: str | None = None


class Marked(Process, frozen=True, omit_defaults=True):
    """A process of a run, found by its environment."""

    run: str = ""
    run_id: str = ""
    replica: str = ""
    command: str = ""


def marks(run: str, run_id: str, role: str) -> dict[str, str]:
    """The environment that makes a process of a run findable."""
    return {MARK_RUN: run, MARK_RUN_ID: run_id, MARK_ROLE: role}


def identify(pid: int, role: str = "") -> Process:
    """The identity of a living process.  Raises psutil.NoSuchProcess."""
    return Process(pid, started_at(pid), role)


def started_at(pid: int) -> float:
    """When a process started, in seconds since boot.  Raises psutil.NoSuchProcess.

    psutil's create_time depends on the wall clock: after a step of it (NTP) every process would look like another.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as exc:
        raise psutil.NoSuchProcess(pid) from exc
    # proc(5): starttime is field 22, in clock ticks; field 3 is the first after the name in brackets.
    return round(int(stat.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK"), 2)


def start_detached(
    argv: Sequence[str],
    marks: Mapping[str, str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    files: Sequence[int] = (),
) -> Process:
    """Start a process in a new session, its output appended to `log`. It outlives this one.

    `files`: descriptors that it inherits under the same numbers.
    """
    env = {**(os.environ if environment is None else environment), **marks}
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/",
            pass_fds=files,
        )  # fmt: skip
    child.returncode = 0  # `is_alive` reaps it; without this, the garbage collector warns
    return identify(child.pid, marks.get(MARK_ROLE, ""))


def is_alive(process: Process) -> bool:
    """Whether that process still runs; a zombie does not, once its threads have ended. Reaps a child.

    Until then it may hold memory, of GPUs too: killing a large engine takes seconds.
    """
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)
    try:
        same = started_at(process.pid) == process.started_at
        is_zombie = psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        return same and (not is_zombie or len([*Path(f"/proc/{process.pid}/task").iterdir()]) > 1)
    except (psutil.Error, OSError):
        return False


def environment(process: Process) -> dict[str, str]:
    """What a process was started with; empty where it is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        return dict(psutil.Process(process.pid).environ()) if is_alive(process) else {}
    return {}


def raise_file_limit() -> int:
    """Raise the soft limit of this process's open files to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses what is above another limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def is_near(pid: int) -> bool:
    """Whether a process is our user's, and sees the files and the processes that we see: it is in no container."""
    entry, own = Path(f"/proc/{pid}"), Path("/proc/self")
    with contextlib.suppress(OSError):
        is_same_view = all((entry / name).samefile(own / name) for name in ("ns/mnt", "ns/pid", "root"))
        return is_same_view and entry.stat().st_uid == os.getuid()
    return False


def _means(pid: int, run: str) -> bool:
    """Whether a process's run folder is the one that we see at that path: in a container it may be another."""
    if not run.startswith("/") or is_near(pid):
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/root{run}").samefile(run)
    return False


def find_marked(run: str | None = None, replica: str | None = None, rank: str | None = None) -> list[Marked]:
    """Living processes with the mark of a run folder (and replica, and rank), or of any. Never this process."""
    marked, wanted = [], ((MARK_RUN, run), (MARK_REPLICA, replica), (MARK_RANK, rank))
    for entry in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            env = {} if entry.pid == os.getpid() else entry.environ()
            is_wanted = MARK_RUN in env and all(value is None or env.get(name) == value for name, value in wanted)
            if is_wanted and (run is None or _means(entry.pid, run)) and entry.status() != psutil.STATUS_ZOMBIE:
                role, run_id, of = (env.get(name, "") for name in (MARK_ROLE, MARK_RUN_ID, MARK_REPLICA))
                command = " ".join(entry.cmdline())[:200]
                marked.append(Marked(entry.pid, started_at(entry.pid), role, env[MARK_RUN], run_id, of, command))
    return marked


def signal_process(process: Process, number: signal.Signals) -> None:
    """Send a signal to that process, if it still runs."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until they are gone, at most `timeout_s`; those that still live."""
    deadline, left = time.monotonic() + timeout_s, [*processes]
    while (left := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def end(processes: Sequence[Process], grace_s: float) -> list[Process]:
    """SIGTERM, wait `grace_s`, SIGKILL, wait; those that could not be ended. Idempotent; blocks."""
    for process in processes:
        signal_process(process, signal.SIGTERM)
    left = wait_gone(processes, grace_s)
    for process in left:
        signal_process(process, signal.SIGKILL)
    return wait_gone(left, 5.0)


def sweep(run: str, replica: str | None = None, rank: str | None = None, keep: Iterable[int] = ()) -> list[Marked]:
    """Kill all with the mark of a run (or one replica or node of it), and unlink the shared memory they mapped.

    Returns what it killed. Python's resource trackers get two seconds to clean up: killing them leaks segments.
    """
    kept, swept = set(keep), list[Marked]()
    for _ in range(10):  # a process may fork while we look
        living = [process for process in find_marked(run, replica, rank) if process.pid not in kept]
        if not living:
            break
        swept += living
        segments = shared_memory(living)
        trackers = [process for process in living if _TRACKER in process.command]
        others = [process for process in living if process not in trackers]
        for process in others:
            signal_process(process, signal.SIGKILL)
        wait_gone(others, _DYING_S)
        for tracker in wait_gone(trackers, 2.0):
            signal_process(tracker, signal.SIGKILL)
        unlink_shared_memory(segments)
    return swept


def shared_memory(processes: Iterable[Process]) -> list[str]:
    """Segments in /dev/shm that these processes map or have open, made by this user since the first of them started.

    A file that was there before, or in a folder, is not a segment of theirs: users keep weights in /dev/shm.
    """
    living = list(processes)
    since = min((process.started_at for process in living), default=0.0) - _CLOCK_STEP_S
    wall_s, own = since + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), list[str]()
    for path in sorted({path for process in living for path in _segments_of(process.pid)}):
        with contextlib.suppress(OSError):
            status = Path(path).lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= wall_s:
                own.append(path)
    return own


def _segments_of(pid: int) -> set[str]:
    paths = set[str]()
    with contextlib.suppress(OSError):
        paths.update(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.update(_SEGMENT.findall(str(link.readlink())))
    return paths


def unlink_shared_memory(segments: Iterable[str]) -> None:
    """Remove segments that no living process maps or has open any more."""
    wanted = {segment for segment in segments if Path(segment).exists()}
    used = {path for pid in psutil.pids() for path in _segments_of(pid)} if wanted else set()
    for segment in wanted - used:
        Path(segment).unlink(missing_ok=True)
