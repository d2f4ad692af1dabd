"""Services of the fake VESSL: workers whose command is executed for real, behind a gateway of its own.

A worker is a container of `containers`; all of them share this machine, so each gets ports of its own. VESSL's gateway
is one that passes connections to ready workers in turn. What changes by itself (readiness, a rollout, a worker that
ended) is worked out at each call.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.testing.fake_vessl.containers import Container, Pace

_PROBE_EVERY_S, _PROBE_S = 0.2, 10.0
_PORTS = 10  # between those of two workers
_PIECE = 65_536


class Balancer:
    """Passes each connection to one of `ports`, in turn."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._n = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        ports, self._n = self.ports, self._n + 1
        try:
            worker = socket.create_connection(("127.0.0.1", ports[self._n % len(ports)]))
        except (OSError, ZeroDivisionError):
            client.close()
            return
        back = threading.Thread(target=_pass_on, args=(worker, client), daemon=True)
        back.start()
        _pass_on(client, worker)
        back.join()
        client.close()
        worker.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass
class Worker:
    name: str
    container: Container
    port: int
    probe: list[str]
    is_ready: bool = False
    probed_at: float = 0.0

    def look(self) -> None:
        """Ask its health check, as VESSL does before it sends requests there."""
        if self.container.status != "running":
            self.is_ready = False
        elif not self.is_ready and time.monotonic() - self.probed_at > _PROBE_EVERY_S:
            self.probed_at = time.monotonic()
            argv = [sys.executable, *self.probe[1:]]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S)
            self.is_ready = done.returncode == 0

    @property
    def status(self) -> str:
        words = {"running": "running", "stopping": "terminating"}
        return "deleted" if self.container.has_ended else words.get(self.container.status, "pending")


@dataclass
class Revision:
    number: int
    yaml_spec: str
    form: dict[str, Any]
    variables: Mapping[str, str]
    folder: Path
    pace: Pace
    is_wanted: bool = False
    is_over: bool = False
    workers: list[Worker] = field(default_factory=list)
    n_started: int = 0

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.container.has_ended]

    @property
    def ready(self) -> list[Worker]:
        return [worker for worker in self.living if worker.is_ready]

    @property
    def status(self) -> str:
        if self.is_over:
            return "stopping" if self.living else "stopped"
        return "running" if self.ready else "deploying" if self.is_wanted else "ready"

    def settle(self) -> None:
        for worker in self.living:
            worker.look()
        while self.is_wanted and len(self.living) < self.form["service"]["autoscaling"]["min"]:
            self._start()
        for worker in self.living[self.form["service"]["autoscaling"]["max"] :]:
            worker.container.terminate()

    def end(self) -> None:
        self.is_wanted, self.is_over = False, True
        for worker in self.living:
            worker.container.terminate()

    def _start(self) -> None:
        port = int(self.form["service"]["expose"])
        taken = {worker.port for worker in self.living}
        own = next(number for number in range(port, 65_536, _PORTS) if number not in taken)
        command = self.form["run"][0]["command"]
        for number in (0, 1):  # the gateway's, and its control port
            command = re.sub(rf"\b{port + number}\b", str(own + number), command)
        probe = [re.sub(rf"\b{port}\b", str(own), word) for word in self.form["service"]["healthcheck"]["exec"]]
        self.n_started += 1
        name = f"revision-{self.number}-{self.n_started}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        form = {**self.form, "run": [{"command": command}]}
        container = Container(self.number, self.yaml_spec, form, folder, self.variables, self.pace)
        self.workers.append(Worker(name, container, own, probe))


class Service:
    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description
        self.revisions: dict[int, Revision] = {}
        self.balancer = Balancer()
        self.active = 0
        self.rollout: int | None = None

    def settle(self) -> None:
        for revision in self.revisions.values():
            revision.settle()
        wanted = self.revisions.get(self.rollout or 0)
        if wanted is not None and wanted.is_over:
            self.rollout = None
        elif wanted is not None and wanted.ready:
            self.active, self.rollout = wanted.number, None
            for revision in self.revisions.values():
                if revision is not wanted and not revision.is_over:
                    revision.end()
        active = self.revisions.get(self.active)
        self.balancer.ports = [worker.port for worker in active.ready] if active is not None else []

    @property
    def workers(self) -> list[tuple[Revision, Worker]]:
        return [(revision, worker) for revision in self.revisions.values() for worker in revision.workers]

    def close(self) -> None:
        self.balancer.close()
        for _, worker in self.workers:
            worker.container.terminate(without_grace=True)
            worker.container.wait(10.0)
