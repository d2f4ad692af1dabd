"""The program of an application: `python -m penstock.targets.cloudera.application RUN gateway|ui`.

"gateway": keeps up a gateway and a controller; when the deployment shall be down, drains the gateway, and waits to be
stopped. "ui": keeps up the chat page, and a relay by which it reaches the gateway's application.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock import processes
from penstock.errors import PenstockError
from penstock.hardware import network
from penstock.log_lines import bound_log
from penstock.paths import write_atomically
from penstock.processes import Backoff
from penstock.run_folder import Run, Unit, order, unit_of
from penstock.targets.cloudera import inside, names
from penstock.targets.cloudera.api import application_url
from penstock.targets.cloudera.session import workbench_url
from penstock.wire.announcement import GatewayAddress
from penstock.wire.client import Client

_LOOK_S, _ANSWER_S = 0.5, 2.0
_EXIT_S = 30.0  # beyond its drain, as any gateway
_LOGIN = "the workbench's login (its API key as Authorization: Bearer, the gateway's as x-api-key)"


class Child:
    """A process that is started again when it ends, after a pause."""

    def __init__(self, run: Run, role: str, argv: list[str]) -> None:
        self.role, self.argv, self._run = role, argv, run
        self._backoff, self._due_at = Backoff(1.0, 30.0, 60.0), 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def keep_up(self, now: float) -> bool:
        """Whether it was started just now; `now`: monotonic seconds."""
        bound_log(self._run.log(self.role))
        if self._process is not None and self._process.poll() is None:
            return False
        if self._process is not None:
            self._due_at = now + self._backoff.next(now)
            self._run.add_event(f"{self.role} restarted", f"its process ended with code {self._process.returncode}")
            self._process = None
        if now < self._due_at:
            return False
        marks = processes.marks(str(self._run.path), self._run.record().id, self.role)
        with self._run.log(self.role).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.argv],
                env={**os.environ, **marks}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return True

    def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def serve_gateway(run: Run, port: int, host: str) -> None:
    """Until the deployment shall be down, and its gateway has drained. Which units it is, the handle says at any time:
    a gateway that hung has a successor, and an application with a launcher may have none for a while."""
    drained = run.path / names.DRAINED
    drained.unlink(missing_ok=True)
    words = ["-m", "penstock.deployment.placed_unit", "gateway", str(run.path), "--shared"]
    words += ["--listen", f"127.0.0.1:{port}", "--admin", f"{host}:{names.GATEWAY_ADMIN_PORT}"]
    gateway, controller = Child(run, "gateway", words), Child(run, "controller", [])
    unit: str | None = "0"
    noted: str | None = None
    while run.desired().state == "up":
        now = time.monotonic()
        units = [unit_of(key) for key in run.handle().units]
        newest, controller_unit = _newest(units, "gateway"), _newest(units, "controller")
        if newest is not None or (units and controller_unit is None):
            unit = newest  # else the handle is damaged, or the next gateway has no name yet
        if unit is None:
            gateway.end(run.deployment().gateway.drain_s + _EXIT_S)
            run.gateway_address_file.unlink(missing_ok=True)
        if unit is None or gateway.keep_up(now):
            noted = None
        if unit is not None and noted != unit and _answers(run, host):
            _note_address(run, unit, port, host)
            noted = unit
        if noted is not None and controller_unit is not None:  # it reads the gateway's settings
            controller.argv = ["-m", "penstock.deployment.controller", str(run.path), "--unit", controller_unit]
            controller.keep_up(now)
        inside.answer_all(run)
        time.sleep(_LOOK_S)
    controller.end(_EXIT_S)
    gateway.end(run.deployment().gateway.drain_s + _EXIT_S)
    drained.touch()


def _newest(units: Sequence[Unit], kind: str) -> str | None:
    of_kind = sorted((unit for unit in units if unit.kind == kind), key=order)
    return of_kind[-1].name if of_kind else None


def _answers(run: Run, host: str) -> bool:
    with contextlib.suppress(PenstockError):
        client = Client(f"http://{host}:{names.GATEWAY_ADMIN_PORT}", run.admin_token(), _ANSWER_S)
        client.get_json("/admin/health")
        return True
    return False


def _note_address(run: Run, unit: str, port: int, host: str) -> None:
    """For nodes and controller. Clients outside have the application's URL; without a login of the workbench, if the
    file says so."""
    deployment = run.deployment()
    block = names.block_of(deployment)
    url, page_url = (application_url(workbench_url(block), names.subdomain(run.name, part)) for part in ("", "ui"))
    pages = (url, page_url if deployment.chat_page is not None else None)
    both = (*pages, None, None, None) if block.public else (None, None, *pages, _LOGIN)
    address = GatewayAddress(unit, f"127.0.0.1:{port}", (f"{host}:{names.GATEWAY_ADMIN_PORT}",), *both)
    write_atomically(run.gateway_address_file, msgspec.json.encode(address))


def serve_page(run: Run, port: int) -> None:
    """Until the deployment shall be down."""
    inner = network.free_port("127.0.0.1")
    relay = Child(run, "relay", ["-m", "penstock.targets.cloudera.relay", str(run.path), str(inner)])
    words = ["-m", "penstock.deployment.placed_unit", "ui", str(run.path), "--listen", f"127.0.0.1:{port}"]
    page = Child(run, "ui", [*words, "--gateway", f"http://127.0.0.1:{inner}"])
    while run.desired().state == "up":
        for child in (relay, page):
            child.keep_up(time.monotonic())
        time.sleep(_LOOK_S)
    for child in (page, relay):
        child.end(_EXIT_S)


def main(words: list[str]) -> None:
    run, unit = Run(Path(words[0])), words[1]
    port, host = int(os.environ["CDSW_APP_PORT"]), os.environ["CDSW_IP_ADDRESS"]
    if unit == "gateway":
        serve_gateway(run, port, host)
    else:
        serve_page(run, port)
    while True:  # an application whose script ends may be started again
        time.sleep(3600.0)


if __name__ == "__main__":
    main(sys.argv[1:])
