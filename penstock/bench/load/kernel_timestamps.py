"""Precise time: when the kernel had the bytes of a stream, and a timer that fires in time to send.

Waking the event loop for every chunk took 13 us, of which the read was 3. So sockets of streams are polled together
every millisecond, with the arrival times that Linux notes (SO_TIMESTAMPNS,
https://docs.kernel.org/networking/timestamping.html). Event loops round timers to milliseconds: hence a timerfd.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from time import perf_counter, time
from typing import Final, Protocol

IS_POSSIBLE: Final = sys.platform == "linux"
TICK_S: Final = 0.001
# With many streams a look costs more than it finds; gaps below two milliseconds are rare there.
_CROWDED_TICK_S: Final = 0.002
_CROWD: Final = 256
_SO_TIMESTAMPNS: Final = 35  # asm-generic/socket.h; Python has no name for it
_READ_BYTES: Final = 16384
_NOTE_BYTES: Final = 64
_OLDEST_S: Final = 5.0
# time.h, sys/timerfd.h
_CLOCK_MONOTONIC: Final = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, 0o2000000
_TFD_TIMER_ABSTIME: Final = 1


class StreamReader(Protocol):
    def take(self, data: bytes, at_s: float) -> bool:
        """A read and its time (`perf_counter`); True when the response ended with it."""

    def released(self) -> None:
        """The connection ended or broke: its owner reads on by itself and finds out which."""


class KernelTimestamps:
    """Reads sockets once a tick, with the kernel's times. Linux only (IS_POSSIBLE), and no TLS."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, StreamReader] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._timer = PreciseTimer(loop, self._on_tick)
        self._is_ticking = False
        self._unpack = struct.Struct("qq").unpack_from

    def add(self, fd: int, owner: StreamReader) -> None:
        """Read `fd` for `owner` from now on. Its transport must be paused."""
        self._sockets[fd] = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
        self._owners[fd] = owner
        self._epoll.register(fd, select.EPOLLIN)
        if not self._is_ticking:
            self._is_ticking = True
            self._timer.set(perf_counter() + TICK_S)

    def remove(self, fd: int) -> None:
        if self._owners.pop(fd, None) is not None:
            self._sockets.pop(fd).detach()
            self._epoll.unregister(fd)

    def close(self) -> None:
        for fd in list(self._owners):
            self.remove(fd)
        self._timer.close()
        self._epoll.close()

    def _on_tick(self) -> None:
        began_s = perf_counter()
        epoch_s = time() - began_s  # each tick again: the clock of day is slewed
        owners, sockets, unpack = self._owners, self._sockets, self._unpack
        for fd, _ in self._epoll.poll(0, len(owners) or 1):
            try:
                data, notes, _, _ = sockets[fd].recvmsg(_READ_BYTES, _NOTE_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data, notes = b"", []
            owner = owners[fd]
            if not data:
                self.remove(fd)
                owner.released()
                continue
            at_s = 0.0
            if notes:
                seconds, nanoseconds = unpack(notes[0][2])
                at_s = seconds + nanoseconds * 1e-9 - epoch_s
            if not began_s - _OLDEST_S < at_s <= began_s:
                # Arrived during this tick, or the clock of day was set, or there is no note.
                at_s = min(at_s, perf_counter()) if at_s > began_s else perf_counter()
            if owner.take(data, at_s):
                self.remove(fd)
        if owners:
            tick_s = TICK_S if len(owners) < _CROWD else _CROWDED_TICK_S
            self._timer.set(max(began_s + tick_s, perf_counter()))
        else:
            self._is_ticking = False


def ask_for_times(sock: socket.socket) -> bool:
    """Have the kernel note when bytes arrive; False where it cannot."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


# struct itimerspec: interval and value, each in seconds and nanoseconds. mypyc cannot compile a ctypes.Structure.
_ITIMERSPEC = ctypes.c_long * 4


class PreciseTimer:
    """Calls `on_time` once, at or after the time it was last set to (`perf_counter` seconds), never before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_time: Callable[[], None]) -> None:
        self._loop, self._on_time = loop, on_time
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = 0.0
        self._fd = -1
        self._spec = _ITIMERSPEC()
        if IS_POSSIBLE:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._on_timer)

    def set(self, at_s: float) -> None:
        self._at_s = at_s
        if self._fd < 0:
            self._handle = self._loop.call_later(max(0.0, at_s - perf_counter()), self._on_loop_timer)
            return
        ns = max(1, round(at_s * 1e9))
        self._spec[2], self._spec[3] = divmod(ns, 10**9)
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
        self._on_time()

    def _on_loop_timer(self) -> None:
        if perf_counter() < self._at_s:
            self.set(self._at_s)
        else:
            self._on_time()
