"""The parts of target ssh that need no host: names, words, places, the bundle, what is known of a host."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import pytest
from golden_files import table
from samples import deployment, run_folder

import penstock
from penstock import targets
from penstock.deployment import logs, prepare
from penstock.errors import PenstockError, SpecError
from penstock.paths import control_folder, home
from penstock.run_folder import Desired, Handle, Run, Unit
from penstock.spec.blocks import Ssh as Block
from penstock.targets import LeftBehind
from penstock.targets.openssh import Done, HostError, Ssh, is_legal, reading, short_name
from penstock.targets.ssh import agent, bundle, host_setup, liveness, placement, target
from penstock.targets.ssh import logs as streams
from penstock.targets.ssh.bundle import HostPython
from penstock.targets.ssh.install import HostFacts, HostInstaller, PreparedHost
from penstock.targets.ssh.liveness import Look, Watch
from penstock.targets.ssh.placement import Node, RunHosts, assign
from penstock.targets.ssh.target import OverSsh
from penstock.wire.announcement import Process

BOOT = "5a1c3c60-3d6b-4c54-9e0c-5a3f1d2b7e11"
LEGAL = ["node1", "me@node1", "me.too@10.0.0.1", "ssh://me@node1:2222", "ssh://[fe80::1%eth0]:22", "a-b.example"]
ILLEGAL = ["", "-oProxyCommand=x", "-l", "me@-oX", "a b", "a;b", "$(x)", "a\nb", "node1\n", "@a", "a@", "`x`"]


def test_what_ssh_takes_for_a_host_and_how_messages_name_it() -> None:
    assert [host for host in LEGAL + ILLEGAL if is_legal(host)] == LEGAL
    assert [short_name(host) for host in ("me@a", "ssh://me@b:22", "c")] == ["a", "b:22", "c"]


@pytest.mark.parametrize(("complaint", "meaning"), table("ssh/complaints.yaml").items())
def test_complaints_are_read(complaint: str, meaning: str) -> None:
    meant, hint = reading(complaint)
    assert meaning in meant and ("Is the host on" in (hint or "")) == ("does not answer" in meant)


def test_replicas_go_round_the_hosts_and_those_that_are_placed_stay() -> None:
    assert assign(["a", "b"], 1, ["0", "1", "2"], {}) == {"0": ("a",), "1": ("b",), "2": ("a",)}
    assert assign(["a", "b", "c"], 1, ["1", "3"], {"1": ["b"], "2": ["c"]}) == {"1": ("b",), "3": ("a",)}
    pairs = assign(["a", "b", "c", "d"], 2, ["0", "1", "2"], {})
    assert pairs == {"0": ("a", "b"), "1": ("c", "d"), "2": ("a", "b")}
    assert assign(["a", "b", "c"], 2, ["0", "1"], {}) == {"0": ("a", "b"), "1": ("a", "c")}


def test_a_command_line_holds_no_option_of_the_user_and_asks_for_nothing() -> None:
    argv = Ssh("/x/config", "0badcafe").argv("me@node1")
    assert argv[:3] == ["ssh", "-F", "/x/config"] and argv[-2:] == ["--", "me@node1"]
    assert "BatchMode=yes" in argv
    # ssh adds 40 letters for %C and 17 of its own to the path of a socket, which has 107 bytes at most.
    assert len(str(control_folder("0123456789ab"))) + 1 + 40 + 17 < 107


def python(**fields: Any) -> HostPython:
    ours = {"version": f"{sys.version_info[0]}.{sys.version_info[1]}.0", "implementation": sys.implementation.name}
    return HostPython(**{**ours, "platform": sysconfig.get_platform(), "libc": "glibc 2.17", **fields})


def test_only_what_a_host_lacks_is_brought_and_compiled_files_only_to_a_python_like_ours() -> None:
    assert bundle.lacking({}) == ["msgspec", "psutil", "PyYAML"]
    assert bundle.lacking({"msgspec": "0.19.0", "psutil": "5.9.8", "PyYAML": "6.0.2"}) == ["psutil"]
    assert bundle.is_like_ours(python())
    for other in ({"version": "3.19.1"}, {"platform": "linux-s390x"}, {"libc": ""}):
        assert not bundle.is_like_ours(python(**other))


def test_a_bundle_is_an_installed_package_named_by_its_bytes(tmp_path: Path) -> None:
    small = tmp_path / "x.py"
    small.write_text("X = 1\n")
    members = [("penstock/x.py", small)]
    key = bundle.key_of(members)
    assert key.startswith(f"{penstock.__version__}-") and key == bundle.key_of(members)
    with tarfile.open(fileobj=io.BytesIO(bundle.tarball(members))) as archive:
        assert archive.getnames()[0] == "penstock/x.py"
        assert f"penstock-{penstock.__version__}.dist-info/METADATA" in archive.getnames()
    small.write_text("X = 2\n")
    assert bundle.key_of(members) != key
    names = {name for name, _ in bundle.contents(python(), tmp_path)}
    assert {"penstock/node/supervisor.py", "penstock/targets/ssh/agent.py"} <= names
    assert "penstock/models/demo_model/config.json" in names
    assert [name for name in names if name.startswith("msgspec/")] and not [n for n in names if n.endswith(".pyc")]


class FakeSsh(Ssh):
    """A host that prints these answers, the last again and again; "away" cannot be reached."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def close(self, hosts: Sequence[str]) -> None:
        pass

    def run(self, host: str, words: Sequence[str], given: bytes = b"", timeout_s: float = 30.0) -> Done:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "away":
            raise HostError(f"{host} cannot be reached over ssh: it does not answer", is_retryable=True)
        return Done(0, answer.encode(), "")


def test_a_base_that_was_made_anew_gets_an_environment_of_its_own_and_a_full_disk_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~/vllm/bin/python may be another Python today, whose packages are elsewhere."""
    monkeypatch.setattr(bundle, "_PACKAGE", tmp_path)  # a small one

    def environment(answer: str = "{}", **fields: Any) -> str:
        installer = HostInstaller(FakeSsh(answer), Block(hosts=("a",), python="~/vllm/bin/python"), tmp_path)
        return installer.bring("a", HostFacts("a", "/f", 0, python(**fields), (), ())).python

    has = {"msgspec": "0.20", "psutil": "7", "PyYAML": "6.0.2"}
    first = environment(has=has)
    assert environment(has=has) == first
    assert environment(version="3.19.1", has=has) != first
    assert environment(has={"msgspec": "0.20", "psutil": "7"}) != first
    with pytest.raises(HostError, match="could not bring penstock to a: its disk is full") as caught:
        environment('{"problem": "[Errno 28] No space left on device"}')
    assert "ssh.folder" in (caught.value.hint or "")


def stat(pid: int, name: str = "python", state: str = "S", ticks: int = 4200) -> str:
    return f"{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 {ticks} 1000 1 184467"


def test_processes_are_told_by_boot_and_start_zombies_are_dead_and_a_silent_host_is_believed_for_a_moment() -> None:
    lines = [BOOT, stat(7), stat(8, "a (b) c", ticks=500), stat(9, state="Z"), "."]
    assert liveness.alive(FakeSsh("\n".join(lines) + "\n"), "a", [7, 8, 9]) == (BOOT, {7: 42.0, 8: 5.0})
    with pytest.raises(HostError):  # cut off
        liveness.alive(FakeSsh(f"{BOOT}\n{stat(7)}\n"), "a", [7])
    look = Look(frozenset({7}), BOOT, {7: 42.0}, good_at=100.0, tried_at=104.0, error="it does not answer")
    assert look.has(Process(7, 42.0), BOOT)
    others = ((Process(7, 43.0), BOOT), (Process(7, 42.0), "another"), (Process(8, 42.0), BOOT))
    assert not any(look.has(*other) for other in others)
    assert not look.is_away(104.0) and look.is_away(106.0) and Look(error="never reached").is_away(0.0)


def test_a_watch_remembers_and_forgets() -> None:
    watch = Watch(FakeSsh(f"{BOOT}\n{stat(7)}\n.\n", f"{BOOT}\n.\n", "away"))
    assert watch.see({"a": [7]})["a"].has(Process(7, 42.0), BOOT)
    assert watch.see({"a": [7]})["a"].has(Process(7, 42.0), BOOT), "it is fresh"
    watch.forget(["a"])
    assert not watch.see({"a": [7]})["a"].has(Process(7, 42.0), BOOT)
    late = watch.see_now({"a": [7]})["a"]
    assert late.error is not None and late.boot == BOOT and late.is_away(time.monotonic() + 60)


def test_versions_of_long_ago_are_removed_but_not_those_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"v{number}").mkdir()
        long_ago = time.time() - (40 + number) * 86400
        os.utime(tmp_path / f"v{number}", (long_ago, long_ago))
    monkeypatch.setattr(host_setup, "_command_lines", lambda: [f"{tmp_path}/v6/venv/bin/python -m penstock.node"])
    host_setup.forget_old(tmp_path, "v7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0", "v1", "v2", "v3", "v6", "v7"]


def test_all_that_is_wrong_with_the_file_is_told_at_once() -> None:
    hosts = ["-oProxyCommand=touch /tmp/owned", "node1", "node1"]
    block = {"hosts": hosts, "config": "here", "folder": "there"}
    problems = OverSsh().check(deployment(target="ssh", ssh=block, hardware={"nodes": 4}))
    assert [f"{problem.path}: {problem.message}".partition(" (")[0] for problem in problems][:3] == [
        'ssh.hosts[0]: "-oProxyCommand=touch /tmp/owned" is no host',
        'ssh.hosts[2]: "node1" is there twice',
        "hardware.nodes: 4 nodes a replica, but ssh.hosts has 3",
    ]
    assert [problem.path for problem in problems][3:] == ["ssh.config", "ssh.folder"]
    assert OverSsh().check(deployment(target="ssh"))[0].message == "no host"


def facts(**fields: Any) -> str:
    """What host_setup prints on a host."""
    whole = HostFacts("node1", "/root/.penstock", 1 << 40, python(), (), ())
    return msgspec.json.encode(msgspec.structs.replace(whole, **fields)).decode()


def test_programs_on_a_host_have_the_gpus_of_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(ssh: Ssh, host: str, python: str, verb: str, message: bytes, timeout_s: float) -> bytes:
        sent.append(msgspec.json.decode(message, type=agent.Start).environment)
        return msgspec.json.encode(agent.Started(Process(1, 0.0), BOOT, host, 21000, 21001))

    def run_there(ssh: Ssh, host: str, words: list[str], timeout_s: float) -> Done:
        sent.append(words)
        return Done(0, b"", "")

    sent: list[Any] = []
    monkeypatch.setattr(Ssh, "run", run_there)
    monkeypatch.setattr(OverSsh, "_bring", lambda *_: {"gpu1": PreparedHost("gpu1", "/p", "python")})
    monkeypatch.setattr(placement, "_ask_agent", answer)
    for hardware in ({}, {"gpu_ids": [3, 2]}):
        run = run_folder(deployment(target="ssh", ssh={"hosts": ["gpu1"]}, hardware=hardware))
        OverSsh().survey(run.deployment(), ["-m", "x"], 1.0)
        RunHosts(run)._start("0", 0, [PreparedHost("gpu1", "/p", "python")], 1, None)
    limited = ["env", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=3,2", "python", "-m", "x"]
    assert (sent[0], sent[2]) == (["python", "-m", "x"], limited)
    assert "CUDA_VISIBLE_DEVICES" not in sent[1] and sent[3]["CUDA_VISIBLE_DEVICES"] == "3,2"


@pytest.mark.parametrize("case", table("ssh/refusals.yaml"))
def test_a_host_that_cannot_be_used_is_refused_with_its_reason(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started: the first question is the last."""
    asked = list[str]()

    def run(argv: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], **_: object) -> SimpleNamespace:
        asked.append(argv[-2])
        stdout.write(case["out"].encode())
        stderr.write(case["err"].encode())
        return SimpleNamespace(returncode=case["code"])

    monkeypatch.setattr("subprocess.run", run)
    (problem,) = OverSsh().check(deployment(target="ssh", ssh={"hosts": ["node1"], "python": "py"}))
    assert f"{problem.path}: {problem.message}".startswith(case["problem"]) and case["hint"] in str(problem.hint)
    assert asked == ["node1"]


def test_a_model_that_hosts_lack_is_refused_with_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(target, "Ssh", lambda *_, **__: FakeSsh(facts(absent=(str(tmp_path),))))
    problems = OverSsh().check(deployment(model=str(tmp_path), target="ssh", ssh={"hosts": ["node1", "node2"]}))
    assert [str(problem).partition(" (")[0] for problem in problems] == [
        f'model: {tmp_path} is not on "{host}"' for host in ("node1", "node2")
    ]


# ---- logs that lie on hosts; a program stands in for ssh: a host is this machine, or cannot be reached ---------------


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


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "ssh", PROGRAM)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def run(fake_ssh: None) -> Run:
    return run_folder(deployment(target="ssh", ssh={"hosts": ["away", "here"]}))


@pytest.fixture
def ssh(fake_ssh: None) -> Iterator[Ssh]:
    made = Ssh(None, f"test{os.getpid()}")
    yield made
    made.close(["here"])


def read(lines: Iterator[str], into: list[str]) -> HostError | None:
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
    error = read(streams.lines(ssh, [streams.Source(host, python, "x") for host in hosts], False, None), seen)
    assert seen == ["here: one"] * hosts.count("here")
    assert error is not None and error.message == "away cannot be reached over ssh: there is no way to it"
    assert (error.is_retryable, error.exit_code) == (True, 1)
    assert error.detail == "ssh: connect to host away port 22: No route to host"
    if "here" in hosts:
        error = read(streams.lines(ssh, [streams.Source("here", "/no/python", "x")], False, None), [])
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
    assert read(logs.lines(run, "replicas", logs.Selection(follow=True)), []) is not None
    assert read(logs.lines(run, "replicas", logs.Selection()), seen) is not None
    assert seen == ["[0] line of 0", "[1] line of 1"]
    is_down = True
    seen.clear()
    assert read(logs.lines(run, "replicas", logs.Selection(follow=True)), seen) is None
    assert sorted(seen) == ["[0] line of 0", "[1] line of 1"]


@pytest.mark.processes
@pytest.mark.nightly
def test_a_rehearsal_without_the_hosts_says_that_they_were_not_asked(fake_ssh: None) -> None:
    wanted = deployment(target="ssh", ssh={"hosts": ["away"]}, gateway={"port": 0}, engine={"kind": "vllm"})
    warning = prepare.rehearse(wanted).plan.warnings[-1]
    assert warning.startswith(
        "not asked: away cannot be reached over ssh: there is no way to it; this is for 1 machine"
    )
    with pytest.raises(SpecError) as caught:
        prepare.prepare(wanted)
    assert [problem.path for problem in caught.value.problems] == ["ssh.hosts[0]"]
