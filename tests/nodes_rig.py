"""A gateway and the nodes of one replica, started by hand as any target would start them: here or on real hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import waiting
from hosts import ROOT
from waiting import end

from penstock.errors import PenstockError
from penstock.hardware import Machine
from penstock.hardware.network import free_port
from penstock.models import files
from penstock.models.facts import read_files
from penstock.planner import Plan, launch
from penstock.run_folder import Launch
from penstock.spec import reading
from penstock.spec.deployment import Cache
from penstock.text import GIB
from penstock.wire.announcement import Announcement, GatewayView, ReplicaView
from penstock.wire.client import Client

TOKEN = "rig-token"

Popen = Callable[..., Any]


def plan_for(engine: str, executor: str, parallel: dict[str, int], **engine_fields: Any) -> Plan:
    block = {"kind": engine, "executor": executor, "max_model_len": 1024, "drain_s": 10, **engine_fields}
    facts = {"model": "penstock-demo", "engine": block, "hardware": {"nodes": 2}, "parallel": parallel}
    wanted = reading.from_mapping(facts)
    model = read_files(files.locate(wanted), wanted.model, "safetensors")[1]
    return launch.make(wanted, model, Machine("node1", 2, 16 * GIB, 8 * GIB), engine, "0.32.0", 1)


class Rig:
    """A gateway with its admin address on `address`, and nodes of replica 0."""

    def __init__(
        self, folder: Path, plan: Plan, address: str = "127.0.0.1", is_spread: bool = False, **settings: Any
    ) -> None:
        self.folder, self.run, self.plan = folder, folder / "run", plan
        (self.run / "artifact").mkdir(parents=True)
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        admin, public = free_port(address), free_port("127.0.0.1")
        settings |= {
            "listen": f"127.0.0.1:{public}",
            "admin": f"{address}:{admin}",
            "admin_token_file": str(token),
            "models": [{"name": plan.served_names[0]}],
            "auth": "none",
            "engines_need_key": True,
        }
        (folder / "gateway.json").write_text(json.dumps(settings))
        # The first address does not answer: a node takes the next one.
        urls = ("http://127.0.0.1:9", f"http://{address}:{admin}")
        listen: Any = "loopback" if address == "127.0.0.1" else "network"
        is_spread = is_spread or listen == "network"
        cache = Cache(stage="none")
        made = Launch(plan.deployment, plan, urls, str(token), listen=listen, cache=cache, is_spread=is_spread)
        (self.run / "artifact" / "launch.json").write_bytes(msgspec.json.encode(made))
        self.admin = Client(f"http://{address}:{admin}", api_key=TOKEN, timeout_s=5.0)
        self.client = Client(f"http://127.0.0.1:{public}", timeout_s=60.0)
        self.nodes: list[Any] = []
        self._run_id = secrets.token_hex(4)  # names folders in /tmp: rigs run side by side
        self._gateway = self._start(subprocess.Popen, "penstock.gateway", str(folder / "gateway.json"))
        self.until(self._answers, "the gateway")

    def node(self, rank: int = 0, *words: str, popen: Popen = subprocess.Popen) -> Any:
        argv = [str(self.run / "artifact" / "launch.json"), "--replica", "0", "--rank", str(rank), *words]
        self.nodes.append(self._start(popen, "penstock.node", *argv))
        return self.nodes[-1]

    def _start(self, popen: Popen, *words: str) -> Any:
        more = {"PYTHONPATH": str(ROOT), "PENSTOCK_RUN_ID": self._run_id}
        env = {**os.environ, **more} if popen is subprocess.Popen else more
        with (self.folder / "log").open("ab") as log:
            return popen([sys.executable, "-m", *words], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _answers(self) -> bool:
        with contextlib.suppress(PenstockError):
            return bool(self.admin.get_json("/admin/health"))
        return False

    def row(self) -> ReplicaView | None:
        rows = msgspec.convert(self.admin.get_json("/admin/replicas"), GatewayView).replicas
        return rows[0] if rows else None

    def until(self, is_so: Callable[[], object], what: str) -> None:
        waiting.until(is_so, f"{what}; the log is {self.folder / 'log'}")

    def wait_state(self, state: str) -> Announcement:
        """Until the replica is in that state; it must not fail before."""

        def is_so() -> bool:
            row = self.row()
            assert row is None or row.announcement.state != "failed", row
            return row is not None and row.announcement.state == state

        self.until(is_so, state)
        row = self.row()
        assert row is not None
        return row.announcement

    def stop(self) -> list[int]:
        """As a target ends a replica: every node gets SIGTERM. Their exit codes."""
        for node in self.nodes:
            node.terminate()
        return [end(node) for node in self.nodes]

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                node.kill()
                end(node)
        self._gateway.terminate()
        end(self._gateway)
