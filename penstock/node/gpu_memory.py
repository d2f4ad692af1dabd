"""Waits until an engine that ended has given its GPU memory back, which takes seconds after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from penstock.hardware import Gpu
from penstock.hardware.detect import gpus
from penstock.node.checks.machine import gpu_holders
from penstock.text import GIB, show_bytes

_WAIT_S = 20.0
_POLL_S = 0.5
_SLACK_BYTES = 2 * GIB  # what others of the machine may have taken since


class GpuMemory:
    """The memory of this node's GPUs before its engine started. `indices`: of the GPUs; empty: all that it sees."""

    def __init__(self, indices: Collection[int], look: Callable[[], Sequence[Gpu]] = gpus) -> None:
        self._indices, self._look = frozenset(indices), look
        self._free = self._free_bytes()

    def wait_free(self, timeout_s: float = _WAIT_S) -> str | None:
        """Block until as much is free as before, at most `timeout_s`; what is still held, for people, or None."""
        return _wait(self._held, timeout_s)

    def _held(self) -> list[str]:
        free = self._free_bytes()
        held = {index: before - free.get(index, before) for index, before in self._free.items()}
        return [f"GPU {index} {show_bytes(n_bytes)}" for index, n_bytes in held.items() if n_bytes > _SLACK_BYTES]

    def _free_bytes(self) -> dict[int, int]:
        return {
            gpu.index: gpu.memory_free_bytes for gpu in self._look() if not self._indices or gpu.index in self._indices
        }


def wait_released(pids: Collection[int], timeout_s: float = _WAIT_S) -> str | None:
    """Block until the driver lists none of these processes, at most `timeout_s`; what they still hold, or None."""

    def held() -> list[str]:
        holders = [holder for holder in (gpu_holders() if pids else ()) if holder.pid in pids]
        return [f"GPU {holder.gpu} {show_bytes(holder.n_bytes)} (process {holder.pid})" for holder in holders]

    return _wait(held, timeout_s)


def _wait(look: Callable[[], Sequence[str]], timeout_s: float) -> str | None:
    """Block until nothing is held, at most `timeout_s`; what still is, or None."""
    deadline = time.monotonic() + timeout_s
    while held := look():
        if time.monotonic() > deadline:
            return ", ".join(held)
        time.sleep(_POLL_S)
    return None
