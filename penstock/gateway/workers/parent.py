"""The gateway in the foreground until SIGTERM or SIGINT: one process, or workers on one port under a parent.

The parent opens all sockets, forks, and keeps the sockets open: while a worker that died is replaced, its connections
wait in the kernel's queue instead of being refused. The parent serves nothing and has no event loop. Worker 0 also
has the admin address and tells the others what comes in there (`relay`).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.gateway.accounting.quota import AT_ONCE
from penstock.gateway.accounting.store import Store
from penstock.gateway.config import GatewayConfig
from penstock.gateway.service import Gateway, Seat, Sockets, open_sockets
from penstock.gateway.workers.shared_memory import IN_FLIGHT, Board, SharedCounters

# A worker that ends at once, again and again, must not keep a core busy.
RESTART_S = 0.5
RESTART_S_MAX = 10.0
# What a worker may need beyond `drain_s`, in which requests finish, to cut the rest and to write what is left.
EXTRA_S = 10.0
GC_THRESHOLD = 20_000
_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger("penstock.gateway")


def serve(config: GatewayConfig, token: str, on_bound: Callable[[Sockets], None] | None = None) -> None:
    """Serves until a signal, then drains. Raises UserError.

    `on_bound` is called once, when every address is bound and the store could be opened.
    """
    sockets = open_sockets(config)
    if config.store is not None:
        # Whoever is told of the address may rely on it. And a worker that cannot open the store would be started again
        # for ever; its connection cannot be made here, for it must not cross the fork.
        Store(config.store).close()
    if on_bound is not None:
        on_bound(sockets)
    if config.workers == 1:
        run_loop(lambda: Gateway(config, token, sockets), config)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-gw-") as folder:
        _Parent(config, token, sockets, Path(folder)).run()


def run_loop(make: Callable[[], Gateway], config: GatewayConfig) -> None:
    """One event loop with one gateway on it."""
    # Until the loop hears signals they wait: the handler from before would end a worker with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        log.info("uvloop is not installed: serving on asyncio, slower")
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(make, config))


async def _serve(make: Callable[[], Gateway], config: GatewayConfig) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        # A worker's first signal may come twice: Ctrl-C and systemd tell the whole group, and the parent passes it on.
        # So the parent counts, and kills.
        if stop.is_set() and config.workers == 1:
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gateway = make()
    await gateway.start()
    # What is here now stays: the collector need not look at it again and again. A request makes some tens of objects
    # without cycles: looking after every 700 finds nothing, and a cycle that there is waits a little longer.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await stop.wait()
    n_cut = await gateway.stop()
    if n_cut:
        log.warning("%d requests were not done within drain_s %.1f", n_cut, config.drain_s)


class _Parent:
    """Starts the workers, replaces those that die, and ends them."""

    def __init__(self, config: GatewayConfig, token: str, sockets: Sockets, folder: Path) -> None:
        self._config, self._token, self._sockets, self._folder = config, token, sockets, folder
        self._counters = SharedCounters(config.workers, passing=(IN_FLIGHT, AT_ONCE))
        self._name = secrets.token_hex(8)
        self._numbers, self._drains = Board(config.workers), Board(1)
        self._workers: dict[int, int] = {}  # pid -> slot
        self._started_at = [0.0] * config.workers
        self._delay_s = [RESTART_S] * config.workers
        self._due: dict[int, float] = {}  # slot -> when to start it again

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for slot in range(self._config.workers):
            self._start(slot)
        while True:
            now = time.monotonic()
            wait_s = min((max(0.0, due - now) for due in self._due.values()), default=3600.0)
            received = signal.sigtimedwait(_SIGNALS, wait_s)
            if received is not None and received.si_signo != signal.SIGCHLD:
                break
            self._reap()
            for slot in [slot for slot, due in self._due.items() if due <= time.monotonic()]:
                del self._due[slot]
                self._start(slot)
        self._stop()

    def _start(self, slot: int) -> None:
        self._started_at[slot] = time.monotonic()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._work(slot, parent)
        self._workers[pid] = slot

    def _work(self, slot: int, parent: int) -> None:
        """The child; does not return."""
        code = 1
        try:
            _die_with(parent)
            self._counters.bind(slot)
            for other, sock in enumerate(self._sockets.public):
                if other != slot:
                    sock.close()
            boards = (self._numbers, self._drains)
            seat = Seat(slot, self._config.workers, self._counters, self._folder, *boards, self._name)
            run_loop(lambda: Gateway(self._config, self._token, self._sockets, seat), self._config)
            code = 0
        except BaseException:
            log.exception("worker %d failed", slot)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            # Not sys.exit: what the parent registered to be done at its end is not the child's to do.
            os._exit(code)

    def _reap(self, *, replaces: bool = True) -> None:
        for pid, slot in list(self._workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            del self._workers[pid]
            self._counters.clear(slot)
            self._numbers.retire(slot)
            if not replaces:
                continue
            lived_s = time.monotonic() - self._started_at[slot]
            self._delay_s[slot] = RESTART_S if lived_s > RESTART_S_MAX else min(self._delay_s[slot] * 2, RESTART_S_MAX)
            log.error(
                "worker %d ended (%d), restart in %.1f s",
                slot,
                os.waitstatus_to_exitcode(status),
                self._delay_s[slot] - RESTART_S,
            )
            self._due[slot] = time.monotonic() + self._delay_s[slot] - RESTART_S

    def _stop(self) -> None:
        """Lets every worker drain; a second signal, or time, ends what is left, and then this process with 1."""
        self._sockets.close()
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + self._config.drain_s + EXTRA_S
        while self._workers and (left_s := deadline - time.monotonic()) > 0:
            received = signal.sigtimedwait(_SIGNALS, min(left_s, 1.0))
            if received is not None and received.si_signo != signal.SIGCHLD:
                break
            self._reap(replaces=False)
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self._workers:
            # Not os._exit: our caller has folders to remove.
            raise SystemExit(1)


def _die_with(parent: int) -> None:
    """A parent that was killed leaves no workers behind. `parent` is its id, taken before the fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
