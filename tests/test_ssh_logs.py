"""Logs that lie on hosts, by a program that stands in for ssh: a host is this machine, or cannot be reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from samples import deployment, run_folder

from penstock import targets
from penstock.deployment import logs, prepare
from penstock.errors import PenstockError, SpecError
from penstock.paths import home
from penstock.run_folder import Desired, Handle, Run, Unit
from penstock.targets import LeftBehind
from penstock.targets.openssh import HostError, Ssh
from penstock.targets.ssh import logs as streams
from penstock.targets.ssh.placement import Node, RunHosts
from penstock.wire.announcement import Process

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


@pytest.fixture
def ssh() -> Iterator[Ssh]:
    made = Ssh(None, f"test{os.getpid()}")
    yield made
    made.close(["here"])


def reading(lines: Iterator[str], into: list[str]) -> HostError | None:
    """Read lines to their end; the error that they end with."""
    try:
        for line in lines:
            into.append(line)
    except HostError as exc:
        return exc
    return None


def node(host: str, folder: Path) -> Node:
    return Node(host, host, str(folder), "/nonexistent/python", Process(1, 0.0), "boot", 21000, 21001)


@pytest.mark.processes
@pytest.mark.nightly
def test_the_log_of_a_living_rank_is_kept_when_the_host_of_an_earlier_one_is_away_and_no_part_of_one(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "there"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "replica-0-1.log").write_text("rank 1 says\n")
    with pytest.raises(LeftBehind):
        RunHosts(run).end_all({"0": [node("away", folder), node("here", folder)]}, 0.0)
    assert run.log("replica-0").read_text() == "here: rank 1 says\n"
    assert not folder.exists()
    program(tmp_path / "bin" / "tail", "#!/bin/sh\necho a part; exit 1\n")
    RunHosts(run).end_all({"1": [node("here", folder)]}, 0.0)
    assert not run.log("replica-1").exists(), "what tail printed before it failed"


@pytest.mark.processes
@pytest.mark.nightly
def test_a_full_disk_here_keeps_no_replica_from_its_end(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "replica-0-0.log").write_text("x" * 100_000)
    run.log("replica-0").symlink_to("/dev/full")
    RunHosts(run).end_all({"0": [node("here", folder)]}, 0.0)
    assert not folder.exists()
    (home() / "left-behind").write_text("")
    with pytest.raises(
        PenstockError, match="could not note that penstock-demo on away, which could not be reached"
    ) as caught:
        RunHosts(run).end_all({"0": [node("away", folder)]}, 0.0)
    assert caught.value.is_retryable and not isinstance(caught.value, LeftBehind)


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [["away"], ["away", "here"], ["here", "away"]])
def test_a_host_that_cannot_be_reached_is_told_after_the_lines_of_the_others(
    ssh: Ssh, hosts: list[str], tmp_path: Path
) -> None:
    python, seen = program(tmp_path / "prints", "#!/bin/sh\necho one\n"), list[str]()
    error = reading(streams.lines(ssh, [streams.Source(host, python, "x") for host in hosts], False, None), seen)
    assert seen == ["here: one"] * hosts.count("here")
    assert error is not None and error.message == "away cannot be reached over ssh: there is no way to it"
    assert (error.is_retryable, error.exit_code) == (True, 1)
    assert error.detail == "ssh: connect to host away port 22: No route to host"
    if "here" in hosts:
        error = reading(streams.lines(ssh, [streams.Source("here", "/no/python", "x")], False, None), [])
        assert error is not None and error.message.startswith("could not read a log on here: ")
        assert not error.is_retryable


def test_followed_logs_of_replicas_tell_a_break_unless_the_deployment_goes_down(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_handle(Handle("ssh", {"replica/0": {}, "replica/1": {}}))

    class Breaking:
        def fetch(self, run: Run) -> None:
            pass

        def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
            yield f"line of {unit.name}"
            if unit.name == "0" or is_down:
                if is_down:
                    run.write_desired(Desired("down", 0))
                raise HostError("a is away", is_retryable=True)

    monkeypatch.setattr(targets, "load", lambda _: Breaking())
    is_down, seen = False, list[str]()
    assert reading(logs.lines(run, "replicas", logs.Selection(follow=True)), []) is not None
    assert reading(logs.lines(run, "replicas", logs.Selection()), seen) is not None
    assert seen == ["[0] line of 0", "[1] line of 1"]
    is_down = True
    seen.clear()
    assert reading(logs.lines(run, "replicas", logs.Selection(follow=True)), seen) is None
    assert sorted(seen) == ["[0] line of 0", "[1] line of 1"]


@pytest.mark.processes
@pytest.mark.nightly
def test_a_rehearsal_without_the_hosts_says_that_they_were_not_asked() -> None:
    wanted = deployment(target="ssh", ssh={"hosts": ["away"]}, gateway={"port": 0}, engine={"kind": "vllm"})
    warning = prepare.rehearse(wanted).plan.warnings[-1]
    assert warning.startswith(
        "not asked: away cannot be reached over ssh: there is no way to it; this is for 1 machine"
    )
    with pytest.raises(SpecError) as caught:
        prepare.prepare(wanted)
    assert [problem.path for problem in caught.value.problems] == ["ssh.hosts[0]"]
