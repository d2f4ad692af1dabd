"""A program next to the controller that serving never needs: started, watched, restarted.

It runs in a session of its own and outlives a killed controller, whose successor finds it in the state. What fails
here (no program, a full disk, a port that is taken) is an event and a note in `status`; serving goes on.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from penstock.deployment.observe import last_words
from penstock.errors import PenstockError
from penstock.hardware import network
from penstock.log_lines import bound_log
from penstock.processes import Backoff, marks
from penstock.run_folder import Part, Run
from penstock.wire.announcement import Process
from penstock.wire.client import Client
from penstock.world import REAL, Thread, World

_TURN_S = 1.0
_ANSWER_S = 2.0
_HUNG_S = 20.0
_END_S = 5.0


class Command(NamedTuple):
    """What to start, and where it will answer."""

    argv: list[str]
    url: str


class Service(Protocol):
    """What the program is. `role`: its mark, its log, its name in `status`. `health`: the path that it answers.

    `start_s`: how long it may take until its first answer. All methods may block, and raise OSError or PenstockError:
    they are called again.
    """

    role: str
    health: str
    start_s: float

    def prepare(self) -> None:
        """Before each look: the files that it reads."""

    def command(self, url: str | None) -> Command | str:
        """`url`: where it answered last. A text says why it cannot start."""

    def outdated(self) -> str | None:
        """Why one that runs must start again with other settings."""


class Child:
    """`part` is what `status` shows. `last`: as the controller before this one had it. `is_placed`: that one may have
    been on another machine.

    All work is done by one thread, since a health check may block.
    """

    def __init__(
        self, run: Run, service: Service, last: Part | None, is_placed: bool = False, world: World = REAL
    ) -> None:
        self.part = last or Part("gone")
        self.service, self._world, self._processes = service, world, world.processes
        self._run, self._host = run, socket.gethostname() if is_placed else None
        if is_placed:
            self.part = msgspec.structs.replace(self.part, state="gone", process=None)
        # One may live that was not noted.
        if self.part.process is None or not self._processes.is_alive(self.part.process):
            old = [process for process in self._processes.find_marked(str(run.path)) if process.role == service.role]
            self._processes.end(old, _END_S)
        self._backoff = Backoff(1.0, 60.0, 120.0)
        self._due_at = 0.0
        self._silent_at = self._world.now() + service.start_s
        self._is_over = world.event()
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = self._world.thread(self._watch, self.service.role)

    def stop(self, ends: bool) -> None:
        """No more restarts. `ends`: the program ends too; else it is for `down` to end, or for another controller."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S)
        if ends and self.part.process is not None:
            self._processes.end([self.part.process], _END_S)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._is_over.wait(_TURN_S if self.try_turn(self._world.now()) else _TURN_S * 5)

    def try_turn(self, now: float) -> bool:
        """One look at it, and what follows; False when a full disk, or a gateway without an address, kept us from it.

        `now`: monotonic seconds.
        """
        try:
            self.service.prepare()
            bound_log(self._run.log(self.service.role))
            self.turn(now)
        except (OSError, PenstockError) as exc:
            print(f"penstock: {self.service.role}: {exc}", flush=True)
            if self.part.process is None:  # a gateway without an address gets one
                waits = isinstance(exc, PenstockError) and exc.is_retryable
                self.part = msgspec.structs.replace(self.part, state="queued" if waits else "gone", note=str(exc))
            return False
        return True

    def turn(self, now: float) -> None:
        process = self.part.process
        if process is None:
            if now >= self._due_at:
                self._begin(now)
        elif not self._processes.is_alive(process):
            self._note_end(f"its process {process.pid} was gone{last_words(self._run.log(self.service.role))}", now)
        elif (reason := self.service.outdated()) is not None:
            self._processes.end([process], _END_S)
            self._note_end(reason, now)
        elif self._answers():
            self._silent_at = now + _HUNG_S
            self.part = msgspec.structs.replace(self.part, state="running")
        elif now > self._silent_at:
            self._processes.signal_process(process, signal.SIGKILL)
            silent_s = self.service.start_s if self.part.state == "starting" else _HUNG_S
            self._note_end(f"it did not answer for {silent_s:.0f} s", now)

    def _answers(self) -> bool:
        try:
            Client(self.part.url or "", timeout_s=_ANSWER_S).get_text(self.service.health)
        except PenstockError:
            return False
        return True

    def _note_end(self, reason: str, now: float) -> None:
        self._due_at = now + self._backoff.next(now)
        self._run.add_event(f"{self.service.role} restarted", reason)
        self.part = msgspec.structs.replace(self.part.restarted(reason), state="gone", process=None)

    def _begin(self, now: float) -> None:
        command = self.service.command(self.part.url)
        if isinstance(command, str):
            self._due_at = now + self._backoff.next(now)
            self._note(command)
            return
        self.part = msgspec.structs.replace(
            self.part, state="starting", process=self._start(command.argv), url=command.url, note=self._host
        )
        self._silent_at = now + self.service.start_s
        self._run.add_event(f"{self.service.role} started", command.url)

    def _start(self, argv: list[str]) -> Process:
        carried = marks(str(self._run.path), self._run.record().id, self.service.role)
        return self._processes.start_detached(argv, carried, self._run.log(self.service.role))

    def _note(self, text: str) -> None:
        if self.part.note != text:
            self._run.add_event(f"{self.service.role} absent", text)
        self.part = msgspec.structs.replace(self.part, state="gone", note=text, url=None)


def lasting_port(url: str | None) -> int:
    """A free port of loopback; that of `url` where it is free: bookmarks keep working."""
    last = urlsplit(url or "").port
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if last is not None and probe.connect_ex(("127.0.0.1", last)) != 0:
            return last
    return network.free_lasting_ports(1)[0]
