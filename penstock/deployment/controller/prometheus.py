"""The Prometheus of a deployment, as a child of its controller: started, watched, restarted, and never needed.

It runs in a session of its own and outlives a killed controller, whose successor finds it in the state. What fails
here (no program, a full disk, a port that is taken) is an event and a note in `status`; serving goes on.
"""

from __future__ import annotations

import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock import processes
from penstock.deployment.metrics import write_grafana, write_settings
from penstock.deployment.observe import last_words
from penstock.errors import PenstockError
from penstock.hardware import network
from penstock.observe import prometheus
from penstock.paths import write_atomically
from penstock.processes import Backoff
from penstock.run_folder import Part, Run
from penstock.wire.announcement import MachineReading, Process
from penstock.wire.client import Client

ROLE = "prometheus"

_TURN_S = 1.0
_ANSWER_S = 2.0
_HUNG_S = 20.0
_END_S = 5.0


class PrometheusChild:
    """`part` is what `status` shows. `last`: as the controller before this one had it. `is_placed`: that one may have
    been on another machine.

    All work is done by one thread, since a health check may block.
    """

    def __init__(self, run: Run, last: Part | None, is_placed: bool = False) -> None:
        self.part = last or Part("gone")
        self.machines: tuple[MachineReading, ...] = ()  # the newest readings, for exporters of GPUs
        self._run, self._host = run, socket.gethostname() if is_placed else None
        if is_placed:
            self.part = msgspec.structs.replace(self.part, state="gone", process=None)
            old = [process for process in processes.find_marked(str(run.path)) if process.role == ROLE]
            processes.end(old, _END_S)
        self._deployment = run.deployment()
        self._folder = run.prometheus_folder
        self._backoff = Backoff(1.0, 60.0, 120.0)
        self._due_at = 0.0
        self._answered_at = time.monotonic()
        self._has_settings = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, ends: bool) -> None:
        """No more restarts. `ends`: Prometheus ends too; else it is for `down` to end, or for another controller."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)
        if ends and self.part.process is not None:
            processes.end([self.part.process], _END_S)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._is_over.wait(_TURN_S if self.try_turn(time.monotonic()) else _TURN_S * 5)

    def try_turn(self, now: float) -> bool:
        """One look at it, and what follows; False when a full disk, or a gateway without an address, kept us from it.

        `now`: monotonic seconds.
        """
        try:
            if not self._has_settings:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_settings(self._run, self._folder, prometheus.Source())
                self._has_settings = True
            self._write_targets()
            self.turn(now)
        except (OSError, PenstockError) as exc:
            print(f"penstock: prometheus: {exc}", flush=True)
            return False
        return True

    def turn(self, now: float) -> None:
        process = self.part.process
        if process is None:
            if now >= self._due_at:
                self._begin(now)
        elif not processes.is_alive(process):
            self._note_end(f"its process {process.pid} was gone{last_words(self._run.log(ROLE))}", now)
        elif self._answers():
            self._answered_at = now
            self.part = msgspec.structs.replace(self.part, state="running")
        elif now - self._answered_at > _HUNG_S:
            processes.signal_process(process, signal.SIGKILL)
            self._note_end(f"it did not answer for {_HUNG_S:.0f} s", now)

    def _answers(self) -> bool:
        try:
            Client(self.part.url or "", timeout_s=_ANSWER_S).get_text("/-/healthy")
        except PenstockError:
            return False
        return True

    def _note_end(self, reason: str, now: float) -> None:
        self._due_at = now + self._backoff.next(now)
        self._run.add_event("prometheus restarted", reason)
        self.part = msgspec.structs.replace(self.part.restarted(reason), state="gone", process=None)

    def _begin(self, now: float) -> None:
        observe = self._deployment.observe
        program = shutil.which(observe.prometheus_binary or prometheus.PROGRAM)
        if program is None:
            self._due_at = now + self._backoff.next(now)
            self._note(f"not installed ({prometheus.INSTALL}); for one elsewhere: penstock metrics --export DIR")
            return
        port = observe.port or self._free_port()
        argv = prometheus.argv(program, observe, self._folder, port)
        self.part = msgspec.structs.replace(
            self.part, state="starting", process=self._start(argv), url=f"http://127.0.0.1:{port}", note=self._host
        )
        self._answered_at = now
        self._run.add_event("prometheus started", self.part.url or "")
        if observe.grafana:
            write_grafana(self._run.path / "grafana", self.part.url or "")

    def _start(self, argv: list[str]) -> Process:
        marks = processes.marks(str(self._run.path), self._run.record().id, ROLE)
        return processes.start_detached(argv, marks, self._run.log(ROLE))

    def _free_port(self) -> int:
        """The same as before where that is free: bookmarks, and Grafana, keep working."""
        last = urlsplit(self.part.url or "").port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if last is not None and probe.connect_ex(("127.0.0.1", last)) != 0:
                return last
        return network.free_lasting_ports(1)[0]

    def _note(self, text: str) -> None:
        if self.part.note != text:
            self._run.add_event("prometheus absent", text)
        self.part = msgspec.structs.replace(self.part, state="gone", note=text, url=None)

    def _write_targets(self) -> None:
        parts = urlsplit(self._run.admin_url)
        _write_changed(self._folder / prometheus.TARGETS, prometheus.targets(self._deployment, [parts.netloc]))
        text = prometheus.dcgm_targets(self._deployment, self._near(self.machines))
        _write_changed(self._folder / prometheus.DCGM_TARGETS, text)

    def _near(self, machines: Iterable[MachineReading]) -> list[MachineReading]:
        """An exporter of this machine is asked on loopback: the name of a host need not lead to it."""
        own = socket.gethostname()
        return [
            msgspec.structs.replace(machine, host="127.0.0.1") if machine.host == own else machine
            for machine in machines
        ]


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text("utf-8") != text:
        write_atomically(path, text.encode())
