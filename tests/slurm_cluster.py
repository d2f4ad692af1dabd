"""penstock on the test cluster: its verbs run on the login node, as a user there types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hosts import PATH, ROOT, HostProcess
from hosts_slurm import Slurm
from waiting import event, until

from penstock.run_folder import Run

ENV = {"PYTHONPATH": str(ROOT), "PENSTOCK_NATIVE": "0", "PATH": f"/root/bin:{PATH}"}


@dataclass
class Desk:
    """A user at the login node."""

    slurm: Slurm
    names: list[str] = field(default_factory=list)

    def call(self, *words: object) -> str:
        """Standard output of a verb that must go well."""
        return self.ask(*words, check=True)[1]

    def ask(self, *words: object, check: bool = False) -> tuple[int, str, str]:
        """A verb's exit code, output and errors."""
        argv = [sys.executable, "-m", "penstock", *map(str, words)]
        done = self.slurm.login.run(argv, env=ENV, check=check)
        return done.returncode, done.stdout, done.stderr

    def python(self, code: str, *words: str) -> str:
        """What a program says that has penstock as a library."""
        argv = [sys.executable, "-c", code, *words]
        return self.slurm.login.run(argv, env=ENV).stdout

    def write(self, name: str = "one", args: dict[str, Any] | None = None, **fields: Any) -> str:
        """A deployment file with the fake engine on login. `engine`, `gateway` and `slurm` are merged."""
        facts = {
            "name": name,
            "model": "penstock-demo",
            "target": "slurm",
            **fields,
            "engine": {"kind": "fake", "args": args or {}, "drain_s": 10, **fields.get("engine", {})},
            "gateway": {"port": 0, "auth": "none", "hold_s": 20, "drain_s": 10, **fields.get("gateway", {})},
            "slurm": {"cpus_per_node": 2, "time": "10", **fields.get("slurm", {})},
        }
        (self.home / f"{name}.yaml").write_text(yaml.safe_dump(facts), "utf-8")
        return f"/root/{name}.yaml"

    @property
    def home(self) -> Path:
        """Root's home, which all hosts share, as seen from outside."""
        return self.slurm.hosts.base / "root"

    def run_path(self, name: str = "one") -> Path:
        return self.home / ".penstock" / "runs" / name

    def up(self, file: str, *words: object) -> None:
        self.names.append(Path(file).stem)
        self.call("up", file, *words)

    def down(self, *words: object) -> None:
        """End "one"; nothing of any deployment may be left."""
        self.call("down", "one", *words)
        assert self.left() == []

    def status(self, name: str = "one") -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.call("status", name, "--json"))
        return status

    def replica(self, number: str = "0", name: str = "one") -> dict[str, Any]:
        return next((row for row in self.status(name)["replicas"] if row["replica"] == number), {})

    def job(self, unit: str = "0", name: str = "one", kind: str = "replica") -> int:
        handle = json.loads((self.run_path(name) / "handle.json").read_text("utf-8"))
        return int(handle["units"][f"{kind}/{unit}"]["job"])

    def run_of(self, name: str = "one") -> Run:
        """Its run folder, read from outside."""
        return Run(self.run_path(name))

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        until(is_so, what, self.said)

    def event(self, kind: str, text: str = "") -> None:
        """Block until the event is in the log of "one"."""
        event(self.run_of(), kind, text=text)

    def said(self) -> str:
        logs = sorted(self.home.glob(".penstock/runs/*/logs/*.log"))
        return "\n".join(f"{log.name}: {log.read_text('utf-8', 'replace')[-1500:]}" for log in logs)

    def answer(self, name: str = "one", text: str = "tell me a story") -> str:
        """What the deployment says to one message, through its gateway."""
        return self.call("chat", name, "-m", text, "--max-tokens", 8).strip()

    def marked(self) -> list[tuple[str, HostProcess]]:
        """Processes of deployments on any host."""
        hosts = [self.slurm.login, *self.slurm.hosts]
        return [
            (host.name, one) for host in hosts if host.is_on for one in host.processes() if "PENSTOCK_RUN" in one.env
        ]

    def left(self) -> list[str]:
        """What deployments left on any host: processes, jobs, temporary folders, shared memory."""
        found = [f"{host}: {one.pid} {one.argv}" for host, one in self.marked()]
        for host in [self.slurm.login, *(node for node in self.slurm.hosts if node.is_on)]:
            names = host.run(["sh", "-c", "ls -d /tmp/penstock-*-* /dev/shm/* 2>/dev/null"], check=False).stdout
            found += [f"{host.name}: {name}" for name in names.split() if not name.startswith("/tmp/penstock-hosts-")]
        return found + self.slurm.run(["squeue", "-h"]).splitlines()
