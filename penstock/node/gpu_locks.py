"""GPUs that a node claims on a machine without a scheduler: one lock per GPU, which ends with the process.

Two replicas that start at the same time both see all GPUs free; the locks keep them apart. Users do not see each
other's locks, only each other's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
import time
from collections.abc import Callable, Sequence
from typing import IO

from penstock.errors import PenstockError
from penstock.hardware import Gpu
from penstock.hardware.detect import gpus
from penstock.paths import gpu_locks_folder, make_private
from penstock.text import show_bytes

_WAIT_S = 30.0  # a dead predecessor's memory is free after a few seconds
_POLL_S = 0.5


class Claim:
    """GPUs of this process until `release`, or its end."""

    def __init__(self, indices: tuple[int, ...], locks: Sequence[IO[bytes]]) -> None:
        self.indices = indices
        self._locks = list(locks)

    def release(self) -> None:
        for lock in self._locks:
            lock.close()
        self._locks.clear()


def claim(count: int, utilization: float, wait_s: float = _WAIT_S, look: Callable[[], Sequence[Gpu]] = gpus) -> Claim:
    """`count` of this process's GPUs with that share of their memory free. Blocks for at most `wait_s`.

    Raises PenstockError with what is free.
    """
    deadline = time.monotonic() + wait_s
    while True:
        machine = look()
        claim = _take(machine, count, utilization)
        if len(claim.indices) == count:
            return claim
        claim.release()
        if time.monotonic() > deadline:
            raise PenstockError(
                f"could not get {count} GPUs on this machine: {_free_text(machine, utilization)}",
                hint="nvidia-smi there shows what holds the others; or lower engine.gpu_memory_utilization.",
                is_retryable=True,
            )
        # Out of step with another process that waits for the same GPUs.
        time.sleep(_POLL_S * random.uniform(0.5, 1.5))


def _take(machine: Sequence[Gpu], count: int, utilization: float) -> Claim:
    """At most `count` GPUs."""
    locks: dict[int, IO[bytes]] = {}
    for gpu in machine:
        if len(locks) < count and gpu.memory_free_bytes >= gpu.memory_bytes * utilization:
            lock = _lock(gpu.index)
            if lock is not None:
                locks[gpu.index] = lock
    return Claim(tuple(locks), list(locks.values()))


def _lock(index: int) -> IO[bytes] | None:
    lock = (make_private(gpu_locks_folder()) / str(index)).open("ab")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    lock.close()
    return None


def _free_text(machine: Sequence[Gpu], utilization: float) -> str:
    if not machine:
        return "it has none"
    free = ", ".join(f"GPU {gpu.index} {show_bytes(gpu.memory_free_bytes)}" for gpu in machine)
    return f"free are {free} ({utilization:.0%} of each is needed), less those that other replicas hold"
