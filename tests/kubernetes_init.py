"""Runs a program as pid 1 of a process table of its own, and ends exactly as it does.

`unshare --pid --fork` exits 1 where its child was killed by SIGKILL, which is how the kernel ends a container that
needs too much memory. Standard library only: every container starts with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1  # linux/sched.h, linux/prctl.h


def main() -> None:
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if child == 0:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(sys.argv[1], sys.argv[1:])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


if __name__ == "__main__":
    main()
