"""One replica over two real hosts without a target: its nodes are started by hand, as any target would start them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from hosts import ROOT, Hosts, Inside

from penstock.errors import PenstockError
from penstock.hardware import Machine
from penstock.hardware.network import free_port
from penstock.models import files
from penstock.models.facts import read_files
from penstock.planner import Plan, launch
from penstock.run_folder import Launch
from penstock.spec import reading
from penstock.text import GIB
from penstock.wire.announcement import Announcement, GatewayView, ReplicaView
from penstock.wire.client import Client

TOKEN = "rig-token"
ENGINE_VERSIONS = {"vllm": "0.32.0", "fake": "1"}


def plan_for(engine: str, executor: str, parallel: dict[str, int], **engine_fields: Any) -> Plan:
    wanted = reading.from_mapping(
        {
            "model": "penstock-demo",
            "engine": {"kind": engine, "executor": executor, "max_model_len": 1024, "drain_s": 10, **engine_fields},
            "hardware": {"nodes": 2},
            "parallel": parallel,
        }
    )
    facts = read_files(files.locate(wanted), wanted.model, "safetensors")[1]
    machine = Machine("node1", 2, 16 * GIB, 8 * GIB)
    return launch.make(wanted, facts, machine, engine, ENGINE_VERSIONS[engine], 1)


class Replica:
    """A gateway here, and one node of replica 0 on each host."""

    def __init__(self, hosts: Hosts, plan: Plan) -> None:
        self.hosts, self.plan = hosts, plan
        self.folder = hosts.shared / "run"
        (self.folder / "artifact").mkdir(parents=True)
        token = self.folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        self._admin, self._public = free_port(hosts.own_address), free_port("127.0.0.1")
        settings = {
            "listen": f"127.0.0.1:{self._public}",
            "admin": f"{hosts.own_address}:{self._admin}",
            "admin_token_file": str(token),
            "models": [{"name": plan.served_names[0]}],
            "auth": "none",
            "engines_need_key": True,
        }
        (self.folder / "gateway.json").write_text(json.dumps(settings))
        # The first address does not answer: a node takes the next one.
        urls = ("http://127.0.0.1:9", f"http://{hosts.own_address}:{self._admin}")
        told = Launch(plan.deployment, plan, urls, str(token), listen="network")
        (self.folder / "artifact" / "launch.json").write_bytes(msgspec.json.encode(told))
        self.nodes: dict[int, Inside] = {}
        with (self.folder / "gateway.log").open("wb") as log:
            argv = [sys.executable, "-m", "penstock.gateway", str(self.folder / "gateway.json")]
            self._gateway = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.client = Client(f"http://127.0.0.1:{self._public}", timeout_s=60.0)

    def start(self, *ranks: int, env: dict[str, str] | None = None) -> None:
        for rank in ranks:
            argv = [sys.executable, "-m", "penstock.node", str(self.folder / "artifact" / "launch.json")]
            argv += ["--replica", "0", "--rank", str(rank), "--hosts", ",".join(self.hosts.names)]
            more = {"PYTHONPATH": str(ROOT), "PENSTOCK_RUN_ID": "0badcafe", **(env or {})}
            with self.log(rank).open("ab") as log:
                options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.nodes[rank] = self.hosts[rank].popen(argv, env=more, **options)

    def log(self, rank: int) -> Path:
        return self.folder / f"node{rank}.log"

    def row(self) -> ReplicaView | None:
        admin = Client(f"http://{self.hosts.own_address}:{self._admin}", api_key=TOKEN, timeout_s=5.0)
        try:
            view = msgspec.convert(admin.get_json("/admin/replicas"), GatewayView)
        except PenstockError:
            return None
        return view.replicas[0] if view.replicas else None

    def wait(self, is_so: Callable[[Announcement], object], what: str, timeout_s: float = 300.0) -> Announcement:
        deadline = time.monotonic() + timeout_s
        while True:
            row = self.row()
            if row is not None and is_so(row.announcement):
                return row.announcement
            assert time.monotonic() < deadline, f"expected: {what}; it is {row}\n{self._tails()}"
            time.sleep(0.1)

    def wait_ready(self) -> Announcement:
        found = self.wait(lambda told: told.state in ("ready", "failed"), "ready")
        assert found.state == "ready", f"{found.reason}\n{self._tails()}"
        return found

    def stop(self) -> dict[int, int]:
        """As a target ends a replica: every node is told at once. Their exit codes."""
        for node in self.nodes.values():
            node.terminate()
        return {rank: node.wait(60) for rank, node in self.nodes.items()}

    def close(self) -> None:
        self._gateway.terminate()
        self._gateway.wait(10)

    def _tails(self) -> str:
        paths = [self.log(rank) for rank in (0, 1)] + [self.folder / "gateway.log"]
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text("utf-8", "replace").splitlines()[-25:])
            for path in paths
            if path.exists()
        )


@contextlib.contextmanager
def a_replica(hosts: Hosts, plan: Plan) -> Iterator[Replica]:
    replica = Replica(hosts, plan)
    try:
        yield replica
    finally:
        for rank, node in replica.nodes.items():
            if hosts[rank].is_on and node.poll() is None:
                node.kill()
                node.wait(10)
        replica.close()
