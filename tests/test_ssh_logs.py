"""Logs that lie on hosts, by a program that stands in for ssh: one host runs things here, the other cannot be reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from samples import deployment, run_folder

from penstock.announce import Process
from penstock.runs import Run
from penstock.ssh.placing import Node
from penstock.targets import LeftBehind
from penstock.targets.ssh import _Room

PROGRAM = """#!/bin/sh
case " $* " in *" -O exit "*) exit 0 ;; esac
while [ "$1" != -- ]; do shift; done
if [ "$2" = away ]; then echo "ssh: connect to host away port 22: No route to host" >&2; exit 255; fi
shift 2
exec sh -c "$*"
"""


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "ssh", PROGRAM)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def run() -> Run:
    return run_folder(deployment(target="ssh", ssh={"hosts": ["away", "here"]}))


def node(host: str, folder: Path) -> Node:
    return Node(host, host, str(folder), "/nonexistent/python", Process(1, 0.0), "boot", 21000, 21001)


def test_the_log_of_a_living_rank_is_kept_when_the_host_of_an_earlier_one_is_away(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "replica-0-1.log").write_text("rank 1 says\n")
    with pytest.raises(LeftBehind):
        _Room(run).end_all({"0": [node("away", folder), node("here", folder)]}, 0.0)
    assert run.log("replica-0").read_text() == "here: rank 1 says\n"
    assert not folder.exists()


def test_what_tail_printed_before_it_failed_is_not_taken_for_a_log(run: Run, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "tail", "#!/bin/sh\necho a part; exit 1\n")
    _Room(run).end_all({"0": [node("here", tmp_path / "there")]}, 0.0)
    assert not run.log("replica-0").exists()
