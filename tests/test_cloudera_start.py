"""The script of the pods in the fake's kernel: it unpacks penstock, makes the Python environment, and starts a program.

The program here is a small one under penstock's name, and the package index a folder with one wheel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock.targets.cloudera import workloads
from penstock.testing.fake_workbench import kernel

pytestmark = pytest.mark.processes
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


def run(project: Path, unit: str, code: int = 0, requirements: tuple[str, ...] = ("tiny==1.0",)) -> int:
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


def test_the_application_makes_the_environment_and_nodes_use_it(project: Path) -> None:
    assert run(project, "gateway") == 0
    log = (project / "run" / "logs" / "controller.log").read_text()
    assert "penstock: installs tiny==1.0" in log and "program" in log and "'gateway'] tiny" in log
    assert (project / "run" / "secrets" / "admin-token").stat().st_mode & 0o077 == 0, "files of the API are for all"
    assert run(project, "r1-n1", code=3) == 1, "a program that fails fails its run"
    words = (project / "run" / "logs" / "replica-1-n1.log").read_text()
    assert "'--replica', '1', '--rank', '1'" in words and "installs" not in words
    pod = note(project, "r1-n1")
    assert pod["code"] == 3 and isinstance(pod["began_at"], float) and pod["ends_at"] == pod["began_at"] + 600
    assert pod["ends_by"] == "JOB_MAXIMUM_MINUTES=10"
    assert pod["limits"] == {"JOB_MAXIMUM_MINUTES": 10, "IDLE_MAXIMUM_MINUTES": 60}
    assert "ends_at" not in note(project, "gateway"), "an application has no limit"


@pytest.mark.nightly
def test_an_environment_that_cannot_be_made_is_the_reason_of_every_pod(project: Path) -> None:
    assert run(project, "gateway", requirements=("absent==1.0",)) == 1
    assert run(project, "r0-n0", requirements=("absent==1.0",)) == 1
    for unit in ("gateway", "r0-n0"):
        reason = str(note(project, unit)["reason"])
        assert reason.startswith("could not install the engine: ERROR: No matching distribution"), reason
