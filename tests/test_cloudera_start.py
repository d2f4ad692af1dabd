"""What runs in pods before nodes, in the fake's kernel: the launcher of workers, and the script with the environment.

The program of the script is a small one under penstock's name, and the package index a folder with one wheel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.targets.cloudera import launcher, workloads
from penstock.targets.cloudera.launcher import Launcher
from penstock.testing.fake_workbench import kernel

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


# ---- the script of the pods ------------------------------------------------------------------------------------------


PROGRAM = """\
import os, sys, tiny
print("program", sys.argv[1:], tiny.__name__, flush=True)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A run folder, penstock's code as a zip, and a wheel of the package "tiny"."""
    (tmp_path / "run" / "secrets").mkdir(parents=True)
    (tmp_path / "run" / "secrets" / "admin-token").write_text("secret")
    (tmp_path / "code").mkdir()
    with zipfile.ZipFile(tmp_path / "code" / "abc.zip", "w") as whole:
        for package in ("penstock", "penstock/targets", "penstock/targets/cloudera"):
            whole.writestr(f"{package}/__init__.py", "")
        whole.writestr("penstock/targets/cloudera/application.py", PROGRAM)
        whole.writestr("penstock/node.py", PROGRAM)
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return tmp_path


def run_script(project: Path, unit: str, code: int = 0, requirements: tuple[str, ...] = ("tiny==1.0",)) -> int:
    """The exit code of the kernel."""
    facts = {
        "home": str(project), "run": str(project / "run"), "code": str(project / "code" / "abc"), "python": None,
        "nodes": "jobs", "venv": str(project / "venv"), "requirements": list(requirements),
        "dashboard_port": None,
        "pip": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels")},
    }  # fmt: skip
    text = Path(workloads.__file__).with_name("start.py").read_text("utf-8")
    text, count = re.subn(r"^FACTS: .*$", f"FACTS = {facts!r}", text, flags=re.MULTILINE)
    assert count == 1
    (project / "start.py").write_text(text)
    env = {
        **os.environ,
        "PENSTOCK_UNIT": unit,
        "CODE": str(code),
        "JOB_MAXIMUM_MINUTES": "10",
        "IDLE_MAXIMUM_MINUTES": "60",
    }
    env.pop("SESSION_MAXIMUM_MINUTES", None)
    env.pop("CDSW_APP_PORT", None)
    argv = [sys.executable, str(Path(kernel.__file__)), "start.py"]
    return subprocess.run(argv, cwd=project, env=env, capture_output=True, check=False).returncode


def note(project: Path, unit: str) -> dict[str, object]:
    facts: dict[str, object] = json.loads((project / "run" / "pods" / f"{unit}.json").read_text())
    return facts


@pytest.mark.processes
@pytest.mark.nightly
def test_the_application_makes_the_environment_and_nodes_use_it(project: Path) -> None:
    assert run_script(project, "gateway") == 0
    log = (project / "run" / "logs" / "controller.log").read_text()
    assert "penstock: installs tiny==1.0" in log and "program" in log and "'gateway'] tiny" in log
    assert (project / "run" / "secrets" / "admin-token").stat().st_mode & 0o077 == 0, "files of the API are for all"
    assert run_script(project, "r1-n1", code=3) == 1, "a program that fails fails its run"
    words = (project / "run" / "logs" / "replica-1-n1.log").read_text()
    assert "'--replica', '1', '--rank', '1'" in words and "installs" not in words
    pod = note(project, "r1-n1")
    assert pod["code"] == 3 and isinstance(pod["began_at"], float) and pod["ends_at"] == pod["began_at"] + 600
    assert pod["ends_by"] == "JOB_MAXIMUM_MINUTES=10"
    assert pod["limits"] == {"JOB_MAXIMUM_MINUTES": 10, "IDLE_MAXIMUM_MINUTES": 60}
    assert "ends_at" not in note(project, "gateway"), "an application has no limit"


@pytest.mark.processes
@pytest.mark.nightly
def test_an_environment_that_cannot_be_made_is_the_reason_of_every_pod(project: Path) -> None:
    assert run_script(project, "gateway", requirements=("absent==1.0",)) == 1
    assert run_script(project, "r0-n0", requirements=("absent==1.0",)) == 1
    for unit in ("gateway", "r0-n0"):
        reason = str(note(project, unit)["reason"])
        assert reason.startswith("could not install the engine: ERROR: No matching distribution"), reason
