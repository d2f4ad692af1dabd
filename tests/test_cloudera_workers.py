"""Nodes as workers (`cloudera.nodes: workers`): the launcher in the application's kernel, and a whole life in pods."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cloudera_rig import file_for, up
from launching import PROMPT, Place, call, now, replica_of, wait_ready
from waiting import until

from penstock.targets.cloudera import launcher
from penstock.targets.cloudera.launcher import Launcher
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import Workload

WORKERS: dict[str, Any] = {"cloudera": {"nodes": "workers"}}


# ---- the launcher ----------------------------------------------------------------------------------------------------


class Api:
    """The module, as an older version has it: no names, no labels."""

    def __init__(self) -> None:
        self.workers: dict[str, str] = {}
        self.refuses_rank: str | None = None
        self.asked: list[dict[str, Any]] = []

    def launch_workers(
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        script: str = "",
        env: dict[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        assert n == 1 and env is not None
        if env["PENSTOCK_UNIT"].endswith(self.refuses_rank or "-"):
            return [{"engineId": "e", "message": "quota exceeded"}]
        self.asked.append({"cpu": cpu, "memory": memory, "gpu": nvidia_gpu, "script": script, "env": env})
        own = f"w{len(self.asked)}"
        self.workers[own] = "running"
        return [{"id": own}]

    def list_workers(self) -> list[dict[str, str]]:
        return [{"id": own, "status": status} for own, status in self.workers.items()]

    def stop_workers(self, *ids: str) -> None:
        assert ids, "without an id all are stopped"
        for own in ids:
            self.workers[own] = "stopped"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launcher, "_LOOK_S", 0.0)
    node = {"script": "start.py", "cpu": 2, "memory": 8, "nvidia_gpu": 1}
    node["environment"] = {"PENSTOCK_UNIT": "r{replica}-n{rank}", "JOB_MAXIMUM_MINUTES": "35000"}
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "node.json").write_text(json.dumps(node))
    return tmp_path


def wants(run: Path, **replicas: list[str]) -> None:
    units = {f"replica/{name[1:]}": {"workers": names} for name, names in replicas.items()}
    (run / "handle.json").write_text(json.dumps({"target": "cloudera", "units": {"gateway/0": {}, **units}}))


def noted(run: Path) -> dict[str, dict[str, Any]]:
    workers: dict[str, dict[str, Any]] = json.loads((run / "workers.json").read_text())
    return workers


def silent(words: str) -> None:
    pass


def test_the_launcher_launches_what_the_handle_names_and_stops_the_rest(run: Path) -> None:
    api = Api()
    made = Launcher(run, silent, api)
    made.step()
    assert noted(run) == {}, "without a handle nothing is known"
    wants(run, r0=["a", "b"], r1=["c"])
    made.step()
    made.step()
    assert [row["env"]["PENSTOCK_UNIT"] for row in api.asked] == ["r0-n0", "r0-n1", "r1-n0"]
    assert api.asked[1]["env"] == {"PENSTOCK_UNIT": "r0-n1", "PENSTOCK_WORKER": "b"}
    assert (api.asked[0]["cpu"], api.asked[0]["memory"], api.asked[0]["gpu"]) == (2, 8, 1)
    assert {name: worker["status"] for name, worker in noted(run).items()} == dict.fromkeys("abc", "running")
    wants(run, r0=["a", "b"])
    made.step()
    made.step()
    assert api.workers == {"w1": "running", "w2": "running", "w3": "stopped"} and "c" not in noted(run)
    (run / "handle.json").write_text('{"target": ')
    made.step()
    assert api.workers["w1"] == "running", "a damaged handle ends nothing"
    (run / "workers.end").touch()
    made.step()
    assert set(api.workers.values()) == {"stopped"}


def test_a_refused_worker_ends_those_that_were_launched_with_it(run: Path) -> None:
    api, words = Api(), list[str]()
    api.refuses_rank = "n1"
    wants(run, r0=["a", "b", "c"])
    made = Launcher(run, words.append, api)
    made.step()
    made.step()
    assert api.workers == {"w1": "stopped"}
    assert noted(run)["b"]["reason"] == "was not launched: quota exceeded" and "quota exceeded" in words[0]
    assert noted(run)["c"]["reason"] == "was not launched: worker 1 was refused"
    assert noted(run)["a"]["status"] == "stopped" and len(api.asked) == 1, "a name is launched once"


def test_workers_of_an_earlier_start_are_gone_and_one_that_is_not_listed_too(run: Path) -> None:
    api = Api()
    wants(run, r0=["a"])
    Launcher(run, silent, api).step()
    made = Launcher(run, silent, api)
    assert (noted(run)["a"]["status"], noted(run)["a"]["reason"]) == ("failed", launcher._ORPHANED)
    made.step()
    assert len(api.asked) == 1, "who places it again gives it another name"
    wants(run, r0=["b"])
    made.step()
    api.workers.clear()
    made.step()
    assert "not in the workbench's list" in noted(run)["b"]["reason"]


def test_what_the_module_cannot_do_is_the_reason(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = json.loads((run / "artifact" / "node.json").read_text())
    (run / "artifact" / "node.json").write_text(json.dumps({**node, "accelerator_label_id": "3"}))
    wants(run, r0=["a"])
    Launcher(run, silent, Api()).step()
    assert noted(run)["a"]["reason"].endswith("takes no accelerator_label_id: nodes: jobs can")
    monkeypatch.setitem(sys.modules, "cml.workers_v1", None)
    wants(run, r0=["b"])
    Launcher(run, silent).step()
    assert "the application's runtime has no cml.workers_v1" in noted(run)["b"]["reason"]


# ---- in pods ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def living(workbench: Workbench) -> list[Workload]:
    return [row for row in workbench.workloads.workers.values() if not row.is_over]


def gateway_of(workbench: Workbench) -> Workload:
    [found] = workbench.workloads.applications.values()
    return found


def answers() -> bool:
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 8)
    return expected_text(PROMPT, 8) in done.out


@pytest.mark.nightly
@pytest.mark.hosts
def test_a_deployment_lives_on_workers(place: Place, workbench: Workbench) -> None:
    workbench.refuses_workers = "quota exceeded: 2 CPU of 2 in use"
    assert call("up", file_for(place, workbench, **WORKERS), "--json", "--no-wait").code == 0
    run = place.run()
    until(lambda: "was not launched: quota exceeded" in call("status", "one").out, "the words of the workbench")
    workbench.refuses_workers = None
    wait_ready(run)
    assert answers() and workbench.workloads.jobs == {}
    assert "penstock: ready after" in call("logs", "one", "--replica", "0").out
    [first] = living(workbench)
    first.fault = "fails"
    until(lambda: first.is_over and len(living(workbench)) == 1, "another worker is launched")
    wait_ready(run)
    assert "its worker failed" in call("events", "one").out
    assert call("scale", "one", 2).code == 0
    wait_ready(run, 2)
    assert call("scale", "one", 1).code == 0
    until(lambda: len(living(workbench)) == 1, "the second worker has left")
    assert "replica 1 drained and ended" in call("events", "one").out
    over = [row.status for row in workbench.workloads.workers.values() if row.is_over]
    assert sorted(over) == ["FAILED", "SUCCEEDED"], "the second replica left by word"
    assert call("down", "one").code == 0
    assert living(workbench) == [] and now(run).phase == "down"
    assert workbench.workloads.workers[max(workbench.workloads.workers)].status != "RUNNING"


@pytest.mark.hosts
@pytest.mark.nightly
def test_workers_that_ended_with_their_application_are_placed_anew(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench, **WORKERS)
    wait_ready(run)
    [first] = living(workbench)
    workbench.workloads.restart_application(gateway_of(workbench).record["id"])
    until(lambda: first.is_over and len(living(workbench)) == 1, "another worker is launched")
    until(lambda: now(run).controller.n_restarts == 1 and now(run).phase == "ready", "ready again")
    assert answers()
    assert "ended with the application that launched it" in call("events", "one").out
    workbench.workloads.stop(gateway_of(workbench))
    until(lambda: gateway_of(workbench).status == "STOPPED", "the application has stopped")
    until(lambda: replica_of(run).state != "ready", "the replica is gone")
    assert living(workbench) == []
    assert call("up", file_for(place, workbench, **WORKERS), "--json").code == 0
    wait_ready(run)
    assert answers()
