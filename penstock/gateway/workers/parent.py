"""Runs the gateway in the foreground until SIGTERM or SIGINT: one process, or several workers under a parent.

Each worker is a whole gateway. The parent opens both listening sockets and forks; all workers accept from the same
queues, so a worker that hangs or dies takes no connection that it had not accepted. The parent serves no client: it
relays admin calls, keeps each worker's last report, replaces workers that end and kills those that do not report.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from penstock.gateway.accounting.access_log import AccessLog
from penstock.gateway.accounting.store import connect
from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections.shared_server import Share
from penstock.gateway.service import Gateway, Sockets, open_sockets
from penstock.gateway.workers.link import WorkerSlot
from penstock.gateway.workers.messages import AdminCall, Frames, Report, Reports, frame
from penstock.wire.structs import prepare_loaded
from penstock.world import REAL, World

# A worker that ends at once, again and again, must not keep a core busy.
RESTART_S = 0.5
RESTART_S_MAX = 10.0
# What a worker may need beyond `drain_s`, in which requests finish, to cut the rest and to write what is left.
EXTRA_S = 10.0
START_S = 60.0  # until the first report
HANG_S = 5.0  # without a report: five were due
CALL_S = 0.5  # for the others' reports; what a worker that hangs reported last stands for it
TICK_S = 0.2
MAX_UNSENT_BYTES = 16 * 2**20
GC_THRESHOLD = 20_000
_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD))
# Which earlier call about the same replica a call takes the place of.
_ANNOUNCE, _LEAVE, _FORGET = b"/admin/announce", b"/admin/leave", b"/admin/forget"
_NEWS = b"/admin/news"
_KINDS: Final = {_ANNOUNCE: "state", b"/admin/drain": "drain", b"/admin/undrain": "drain", _LEAVE: "drain"}

log = logging.getLogger("penstock.gateway")


def serve(
    config: GatewayConfig,
    token: str,
    on_bound: Callable[[Sockets], None] | None = None,
    inherited: Sequence[int] = (),
) -> None:
    """Serves until a signal, then drains. Raises UserError.

    `on_bound` is called once, when every address is bound and the store could be opened. `inherited`: the public and
    the admin socket, which are bound already.
    """
    prepare_loaded()
    sockets = open_sockets(config, inherited)
    if config.store is not None:
        # Before the address is known: a worker that cannot open the store would be restarted for ever. Workers make
        # their own connections, which must not cross the fork.
        connect(config.store).close()
    if config.access_log is not None:
        AccessLog(config.access_log)
    if on_bound is not None:
        on_bound(sockets)
    if config.workers == 1:
        run_loop(lambda: Gateway(config, token, sockets), config)
    else:
        _Parent(config, token, sockets).run()


def run_loop(make: Callable[[], Gateway], config: GatewayConfig) -> None:
    # Until the loop hears signals they wait: the handler from before would end a worker with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(make, config))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # an engine's image may lack it, which costs speed only
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve(make: Callable[[], Gateway], config: GatewayConfig) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        # A worker's first signal may come twice, from the terminal (Ctrl-C) or systemd and from the parent; so the
        # parent counts, and kills.
        if stop.is_set() and config.workers == 1:
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gateway = make()
    await gateway.start()
    # What is here now stays, so the collector need not look at it again. A request makes some tens of objects without
    # cycles: looking after every 700 finds nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await stop.wait()
    n_cut = await gateway.stop()
    if n_cut:
        log.warning("%d requests were not done within drain_s %.1f", n_cut, config.drain_s)


@dataclass(eq=False)
class _Worker:
    slot: int
    pid: int
    socket: socket.socket
    started_at: float
    reported_at: float | None = None
    frames: Frames = field(default_factory=Frames)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass
class _Gathering:
    """`asker` waits for the reports of the others, `missing` of which have not answered."""

    asker: _Worker
    number: int
    missing: set[int]
    until: float


class _Named(msgspec.Struct):
    """The part of an admin call's body that the parent reads."""

    replica: str
    state: str = ""
    lease_s: float = math.inf  # a drain holds until it is taken back


class _Kept(NamedTuple):
    """An admin call that a new worker must know of."""

    path: bytes
    body: bytes
    state: str
    until: float


class _Parent:
    """Starts the workers, replaces those that end or hang, and ends them."""

    def __init__(self, config: GatewayConfig, token: str, sockets: Sockets, world: World = REAL) -> None:
        self._now = world.now
        self._config, self._token, self._sockets = config, token, sockets
        self._public, self._admin = Share(config.workers), Share(config.workers)
        self._selector = selectors.PollSelector()  # no file of its own that a child would inherit
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._workers: dict[int, _Worker] = {}  # by slot
        self._reports: dict[int, bytes] = {}  # the last of each slot
        self._ended: set[int] = set()  # slots whose report is that of a worker that ended
        self._delay_s = [RESTART_S] * config.workers
        self._due: dict[int, float] = dict.fromkeys(range(config.workers), 0.0)  # slot -> when to start it
        self._gatherings: dict[int, _Gathering] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[tuple[str, str], _Kept] = {}  # by replica and kind
        self._n_signals = 0
        self._began_at = self._now()

    def run(self) -> None:
        self._catch_signals()
        while not self._n_signals:
            self._turn()
            self._kill_hung()
            self._start_due()
        self._stop()

    def _catch_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for sock in (self._wake_reader, self._wake_writer):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _turn(self) -> None:
        """Waits for news of the workers, a moment at most, and does what they ask."""
        began_at = self._now()
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                numbers = self._wake_reader.recv(4096)
                self._n_signals += sum(number != signal.SIGCHLD for number in numbers)
            else:
                self._read(key.data)
                self._write(key.data)
        now = self._now()
        if now - began_at > TICK_S + HANG_S / 2:
            # This process did not run for a while, so perhaps the workers did not either (Ctrl-Z).
            for worker in self._workers.values():
                worker.reported_at = now
        for number, gathering in list(self._gatherings.items()):
            if not gathering.missing or now >= gathering.until:
                del self._gatherings[number]
                self._answer(gathering)
        self._reap()

    # Workers come and go.

    def _start_due(self) -> None:
        for slot in [slot for slot, due in self._due.items() if due <= self._now()]:
            del self._due[slot]
            self._start(slot)

    def _start(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        now = self._now()
        calls = tuple(self._calls_that_hold())
        # A signal between the fork and the child's own handlers waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            ours.close()
            shares = (self._public.of(slot), self._admin.of(slot))
            self._work(WorkerSlot(slot, theirs, *shares, calls, self._reports.get(slot), self._began_at))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        ours.setblocking(False)
        worker = self._workers[slot] = _Worker(slot, pid, ours, now)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _work(self, slot: WorkerSlot) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            # The other workers' sockets must end with the parent, or nobody would learn that it has died.
            for worker in self._workers.values():
                worker.socket.close()
            self._wake_reader.close()
            self._wake_writer.close()
            run_loop(lambda: Gateway(self._config, self._token, self._sockets, slot), self._config)
            code = 0
        except BaseException:
            log.exception("worker %d failed", slot.index)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # a full disk
                    stream.flush()
            # Not sys.exit: what the parent registered to be done at its end is not the child's to do.
            os._exit(code)

    def _kill_hung(self) -> None:
        now = self._now()
        for worker in self._workers.values():
            since = worker.reported_at or worker.started_at + START_S - HANG_S
            if now - since > HANG_S or len(worker.unsent) > MAX_UNSENT_BYTES:
                log.error("worker %d hangs: no report for %.0f s", worker.slot, now - since)
                os.kill(worker.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for slot, worker in list(self._workers.items()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._read(worker)  # its last reports
            self._selector.unregister(worker.socket)
            worker.socket.close()
            del self._workers[slot]
            self._ended.add(slot)
            for gathering in self._gatherings.values():
                gathering.missing.discard(slot)
            if self._n_signals:
                continue
            now = self._now()
            lived_s = now - worker.started_at
            self._delay_s[slot] = RESTART_S if lived_s > RESTART_S_MAX else min(self._delay_s[slot] * 2, RESTART_S_MAX)
            pause_s = self._delay_s[slot] - RESTART_S
            code = os.waitstatus_to_exitcode(status)
            log.error("worker %d ended (%d), restart in %.1f s", slot, code, pause_s)
            self._due[slot] = now + pause_s

    def _stop(self) -> None:
        """Drains every worker; a second signal, or time, kills what is left and ends this process with 1."""
        self._sockets.close()
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGTERM)
        deadline = self._now() + self._config.drain_s + EXTRA_S
        while self._workers and self._n_signals < 2 and self._now() < deadline:
            self._turn()
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
        if self._workers:
            # Not os._exit: our caller has folders to remove.
            raise SystemExit(1)

    # Messages.

    def _read(self, worker: _Worker) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := worker.socket.recv(1 << 18):
                for message in worker.frames.feed(data):
                    if isinstance(message, Report):
                        self._take_report(worker, message)
                    elif isinstance(message, AdminCall):
                        self._pass_on(worker, message)

    def _take_report(self, worker: _Worker, report: Report) -> None:
        worker.reported_at = self._now()
        self._reports[worker.slot] = report.content
        self._ended.discard(worker.slot)
        if report.number in self._gatherings:
            self._gatherings[report.number].missing.discard(worker.slot)

    def _pass_on(self, asker: _Worker, call: AdminCall) -> None:
        others = [worker for worker in self._workers.values() if worker is not asker]
        number = 0
        if call.number:
            number = next(self._numbers)
            # One that starts has nothing to report; it was given every call that holds.
            missing = {worker.slot for worker in others if worker.reported_at is not None}
            until = self._now() + CALL_S
            self._gatherings[number] = _Gathering(asker, call.number, missing, until)
        self._keep(call)
        for worker in others:
            self._send(worker, frame(AdminCall(call.path, call.body, number)))

    def _keep(self, call: AdminCall) -> None:
        """Keeps the call for workers that start later. Of calls about one replica the last counts."""
        if call.path == _NEWS:
            self._calls["", "news"] = _Kept(call.path, call.body, "", math.inf)
            return
        if call.path not in _KINDS and call.path != _FORGET:
            return
        named, now = msgspec.json.decode(call.body, type=_Named), self._now()
        state, drain = (named.replica, "state"), (named.replica, "drain")
        before = self._calls.get(state)
        if call.path == _ANNOUNCE and before is not None:
            is_another = (before.state == "stopping" and named.state != "stopping") or before.until < now
            if is_another and drain in self._calls and self._calls[drain].path == _LEAVE:
                del self._calls[drain]  # the node that was ordered to leave is gone
        if call.path in (_FORGET, b"/admin/undrain"):
            self._calls.pop(drain, None)
            if call.path == _FORGET:
                self._calls.pop(state, None)
        else:
            kept = _Kept(call.path, call.body, named.state, now + named.lease_s)
            self._calls[named.replica, _KINDS[call.path]] = kept

    def _calls_that_hold(self) -> Iterator[tuple[bytes, bytes]]:
        now = self._now()
        for (replica, _), kept in self._calls.items():
            state = self._calls.get((replica, "state"))
            has_left = kept.path == _LEAVE and state is not None and state.until < now
            if kept.until > now and not has_left:
                yield kept.path, kept.body

    def _answer(self, gathering: _Gathering) -> None:
        asker = gathering.asker
        if self._workers.get(asker.slot) is not asker:
            return
        others = [slot for slot in self._reports if slot != asker.slot]
        running = [self._reports[slot] for slot in others if slot not in self._ended]
        ended = [self._reports[slot] for slot in others if slot in self._ended]
        self._send(asker, frame(Reports(gathering.number, running, ended)))

    def _send(self, worker: _Worker, data: bytes) -> None:
        worker.unsent += data
        self._write(worker)

    def _write(self, worker: _Worker) -> None:
        if worker.unsent:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                del worker.unsent[: worker.socket.send(worker.unsent)]
        if self._workers.get(worker.slot) is worker:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
            self._selector.modify(worker.socket, events, worker)
