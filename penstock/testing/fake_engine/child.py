"""The fake engine's EngineCore: a child that is named as vLLM's is, and survives a kill -9 of the parent.

As an orphan it ends after `ORPHAN_S`, so that a failed test leaves nothing for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

NAME = "VLLM::EngineCore"
ORPHAN_S = 600.0
_PR_SET_NAME = 15  # <linux/prctl.h>


def fork() -> int:
    """The pid of a new EngineCore. Call it before any thread, event loop or socket is made."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _rename(NAME)
        _live()
    finally:
        os._exit(0)


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _live() -> None:
    parent = os.getppid()
    orphaned_s = 0.0
    while orphaned_s < ORPHAN_S:
        time.sleep(1.0)
        orphaned_s = orphaned_s + 1.0 if os.getppid() != parent else 0.0


def _rename(name: str) -> None:
    """Changes what `ps` shows, as setproctitle does: the thread name and the argument area of our own memory."""
    if sys.platform != "linux":
        return
    import ctypes  # 10 ms, and only the child needs it

    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    # proc(5): arg_start and arg_end are fields 48 and 49 of stat; field 3 is the first after the name in brackets.
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[45]), int(stat[46])
    if end - start > len(name) + 1:
        # A last byte that is not NUL tells the kernel that this is a title, to be read up to its first NUL.
        ctypes.memmove(start, name.encode().ljust(end - start - 1, b"\0") + b"\1", end - start)
