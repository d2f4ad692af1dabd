"""An alarm that goes off on time. asyncio's timers (uvloop's too) have the grain of epoll, a millisecond.

On Linux it is a timerfd, https://man7.org/linux/man-pages/man2/timerfd_create.2.html, through ctypes because Python
has it only from 3.13 on; `perf_counter` is CLOCK_MONOTONIC there. Elsewhere it is the loop's own timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from time import perf_counter

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, 0o2000000
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls `ring` once at or after the time it was last set to (`perf_counter` seconds), never before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self._fd = -1
        self._spec = _Itimerspec()
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._on_timer)

    def set(self, at_s: float) -> None:
        """Rings at `at_s`, at once when that is past."""
        self._at_s = at_s
        if self._fd < 0:
            self._handle = self._loop.call_later(max(0.0, at_s - perf_counter()), self._on_loop_timer)
            return
        ns = max(1, round(at_s * 1e9))
        self._spec.value.s, self._spec.value.ns = divmod(ns, 10**9)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set again since
            return
        self._ring()

    def _on_loop_timer(self) -> None:
        if perf_counter() < self._at_s:
            self.set(self._at_s)
        else:
            self._ring()
