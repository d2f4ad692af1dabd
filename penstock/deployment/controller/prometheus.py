"""The Prometheus of a deployment, as a child of its controller."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.deployment.controller.child import Command, lasting_port
from penstock.deployment.metrics import write_grafana, write_settings
from penstock.observe import prometheus
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.wire.announcement import MachineReading


class Prometheus:
    """A `Service`. `machines`: their newest readings, for exporters of GPUs."""

    role = "prometheus"
    health = "/-/healthy"
    start_s = 20.0

    def __init__(self, run: Run) -> None:
        self.machines: tuple[MachineReading, ...] = ()
        self._run, self._deployment = run, run.deployment()
        self._folder = run.prometheus_folder
        self._has_settings = False

    def prepare(self) -> None:
        if not self._has_settings:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_settings(self._run, self._folder, prometheus.Source())
            self._has_settings = True
        parts = urlsplit(self._run.admin_url)
        _write_changed(self._folder / prometheus.TARGETS, prometheus.targets(self._deployment, [parts.netloc]))
        text = prometheus.dcgm_targets(self._deployment, self._near(self.machines))
        _write_changed(self._folder / prometheus.DCGM_TARGETS, text)

    def command(self, url: str | None) -> Command | str:
        observe = self._deployment.observe
        program = shutil.which(observe.prometheus_binary or prometheus.PROGRAM)
        if program is None:
            return f"not installed ({prometheus.INSTALL}); for one elsewhere: penstock metrics --export DIR"
        port = observe.port or lasting_port(url)
        command = Command(prometheus.argv(program, observe, self._folder, port), f"http://127.0.0.1:{port}")
        if observe.grafana:
            write_grafana(self._run.path / "grafana", command.url)
        return command

    def outdated(self) -> str | None:
        """It reads its targets again when they change."""
        return None

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
