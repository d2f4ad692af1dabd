"""Nodes as real processes beside a real gateway, with the fake engine: how they leave, and how a probe sees them."""

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
import pytest
from samples import demo_plan

from penstock import processes
from penstock.errors import PenstockError, UserError
from penstock.hardware.network import free_port
from penstock.node.__main__ import rank_of
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.spec.deployment import Parallel
from penstock.wire.announcement import GatewayView, ReplicaView
from penstock.wire.client import Client, Reply

TOKEN = "rig-token"
ONE = demo_plan("fake", drain_s=10.0, args={"load-s": 0.2, "tokens-per-s": 30})
TWO = msgspec.structs.replace(ONE, n_nodes=2, layout=Parallel(tensor=2), executor="mp")


class Rig:
    """A gateway and the nodes of replica 0, all on this machine."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.run, self.launch = folder / "run", folder / "run" / "artifact" / "launch.json"
        self.launch.parent.mkdir(parents=True)
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        admin, public = free_port("127.0.0.1"), free_port("127.0.0.1")
        settings = {
            "listen": f"127.0.0.1:{public}",
            "admin": f"127.0.0.1:{admin}",
            "admin_token_file": str(token),
            "models": [{"name": plan.served_names[0]}],
            "auth": "none",
        }
        (folder / "gateway.json").write_text(json.dumps(settings))
        self.launch.write_bytes(
            msgspec.json.encode(Launch(plan.deployment, plan, (f"http://127.0.0.1:{admin}",), str(token)))
        )
        self.admin = Client(f"http://127.0.0.1:{admin}", api_key=TOKEN, timeout_s=5.0)
        self.client = Client(f"http://127.0.0.1:{public}", timeout_s=30.0)
        self.log = folder / "log"
        self.started: list[subprocess.Popen[bytes]] = []
        self._popen("penstock.gateway", str(folder / "gateway.json"))
        self.wait(self._answers, "the gateway")

    def node(self, rank: int = 0, *words: str) -> subprocess.Popen[bytes]:
        return self._popen("penstock.node", str(self.launch), "--replica", "0", "--rank", str(rank), *words)

    def _popen(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            env = {**os.environ, "PENSTOCK_RUN_ID": "0badcafe"}
            self.started.append(subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=log, stderr=log))
        return self.started[-1]

    def _answers(self) -> bool:
        with contextlib.suppress(PenstockError):
            return bool(self.admin.get_json("/admin/health"))
        return False

    def row(self) -> ReplicaView | None:
        rows = msgspec.convert(self.admin.get_json("/admin/replicas"), GatewayView).replicas
        return rows[0] if rows else None

    def wait(self, is_so: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 60.0
        while not is_so():
            assert time.monotonic() < deadline, f"expected: {what}; {self.row()}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)

    def wait_state(self, state: str) -> None:
        self.wait(lambda: (row := self.row()) is not None and row.announcement.state == state, state)

    def leave(self) -> dict[str, int]:
        answer: dict[str, int] = self.admin.post_json("/admin/leave", {"replica": "0"})
        return answer

    def close(self) -> None:
        for process in reversed(self.started):
            process.terminate()
        for process in reversed(self.started):
            process.wait(20)
        assert processes.sweep(str(self.run)) == [], "nothing is left of the nodes"


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, getattr(request, "param", ONE))
    yield made
    made.close()


@pytest.mark.processes
def test_a_node_that_is_ordered_to_leave_drains_and_exits_as_on_sigterm(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "ready"
    file.write_text("left by an earlier process")
    node = rig.node(0, "--ready-file", str(file))
    rig.wait(lambda: not file.exists(), "a stale ready file is removed")
    rig.wait_state("ready")
    rig.wait(file.exists, "the ready file")
    stream = rig.client.stream_chat([{"role": "user", "content": "hi"}], max_tokens=60)
    next(stream)
    assert rig.leave() == {"in_flight": 1}
    rig.wait_state("stopping")
    assert not file.exists()
    assert rig.leave() == {"in_flight": 1}, "a second order does not cut the drain short"
    *_, reply = stream
    assert isinstance(reply, Reply) and reply.finish_reason == "length"
    assert node.wait(20) == 0


@pytest.mark.processes
@pytest.mark.parametrize("rig", [TWO], indirect=True)
def test_all_nodes_of_a_replica_leave_on_one_order_and_their_successors_stay(rig: Rig, tmp_path: Path) -> None:
    files = [tmp_path / "ready-0", tmp_path / "ready-1"]
    nodes = [rig.node(rank, "--ready-file", str(file)) for rank, file in enumerate(files)]
    rig.wait_state("ready")
    rig.wait(lambda: all(file.exists() for file in files), "both ready files")
    rig.leave()
    assert [node.wait(20) for node in nodes] == [0, 0]
    assert not any(file.exists() for file in files)
    for rank in (0, 1):
        rig.node(rank)
    rig.wait_state("ready")


@pytest.mark.processes
@pytest.mark.parametrize("rig", [TWO], indirect=True)
def test_a_rank_whose_first_node_never_came_leaves_too(rig: Rig) -> None:
    node = rig.node(1)
    rig.leave()
    assert node.wait(20) == 0


@pytest.mark.parametrize(("host", "rank"), [("chat-0", 0), ("chat-7b-12", 12), ("chat-3.chat.svc.cluster.local", 3)])
def test_the_rank_is_the_number_that_the_host_name_ends_in(host: str, rank: int) -> None:
    assert rank_of(host, n_nodes=16) == rank


@pytest.mark.parametrize("host", ["chat", "chat12", "chat-2", "chat-1a"])
def test_a_host_name_without_a_rank_of_this_replica_is_refused(host: str) -> None:
    with pytest.raises(UserError, match=f'host name "{host}"'):
        rank_of(host, n_nodes=2)
