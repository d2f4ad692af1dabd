"""What penstock does when its parts die, hang or never come up: real processes, the fake engine, signals from outside.

Each time: status tells the truth, the part comes back or the refusal says why, and `down` leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launching import Place, ask, call, engine_pid, kill, now, pid_of, pids, private_folders, replica_of, started
from waiting import left_s, until

from penstock import processes
from penstock.engines import Command
from penstock.node.__main__ import TimedLines
from penstock.node.engine_process import EngineProcess
from penstock.run_folder import Artifact, Run
from penstock.targets.local import Local
from penstock.wire.announcement import Restart

pytestmark = pytest.mark.processes


def restarts(run: Run, part: str) -> list[Restart]:
    """What `status` tells about the restarts of a part."""
    facts = call("status", run.name, "--json").json
    told = facts["replicas"][0] if part == "replica" else facts[part]
    return [Restart(**restart) for restart in told["restarts"]]


def wait_restarted(run: Run, part: str, n_before: int, words: str) -> None:
    """Status names the part with a reason, and everything is ready again."""

    def is_told() -> bool:
        told = restarts(run, part)
        return len(told) > n_before and words in told[-1].reason

    until(is_told, f'status tells a restart of the {part} for "{words}"')
    until(lambda: now(run).phase == "ready", "everything is ready again")


def child_pid(run: Run, replica: str = "0") -> int:
    (pid,) = [pid for pid in pids(run, "engine", replica) if pid != engine_pid(run, replica)]
    return pid


def check_killed(place: Place, run: Run, part: str, victim: int, words: str, is_answered: bool = True) -> None:
    """Kill one process: a request of that moment is held and answered, status tells, the part is back."""
    n_before = len(restarts(run, part))
    kill(victim)
    if is_answered:
        ask(run)
    wait_restarted(run, part, n_before, words)
    place.note(run)
    assert victim not in [process.pid for process in processes.find_marked(str(run.path))]
    ask(run)


def test_killed_gateway_node_engine_and_engine_child_come_back(place: Place) -> None:
    run = place.up(place.write("one", args={"child": True}))
    gateway = pid_of(run, "gateway")
    check_killed(place, run, "gateway", gateway, f"its process {gateway} was gone", is_answered=False)

    orphans, node = pids(run, "engine"), pid_of(run, "node")
    check_killed(place, run, "replica", node, f"its node process {node} is gone")
    assert not set(orphans) & set(pids(run, "engine")), "the killed node's engine and its child are ended"

    orphan = child_pid(run)
    check_killed(place, run, "replica", engine_pid(run), "was killed by signal 9")
    assert orphan not in pids(run, "engine"), "the killed engine's child is ended"

    # Its server lives on for a moment and answers 500.
    check_killed(place, run, "replica", child_pid(run), "EngineCore")
    text = call("status").out
    assert "restarts, newest first:" in text and "its node process" in text
    assert len(restarts(run, "replica")) == 3
    assert call("down").code == 0
    place.assert_nothing_left()


def test_killed_controller_and_watchdog_come_back(place: Place) -> None:
    run = place.up(place.write("one"))
    parts = {role: pid_of(run, role) for role in ("gateway", "node", "engine")}
    watchdog = pid_of(run, "watchdog")
    kill(watchdog)
    until(lambda: bool({*pids(run, "watchdog")} - {watchdog}), "another watchdog")
    assert f"watchdog restarted: its process {watchdog} was gone" in call("logs", "--part", "events").out

    controller = pid_of(run, "controller")
    kill(controller)
    until(lambda: now(run).controller.state == "gone", "status tells that the controller is gone")
    assert now(run).phase == "ready", "what it looked after goes on"
    ask(run)
    wait_restarted(run, "controller", 0, f"its process {controller} was gone")
    until(lambda: len(pids(run, "watchdog")) == 1, "one watchdog")
    assert {role: pid_of(run, role) for role in parts} == parts, "nothing else was touched"


def kill_all(run: Run) -> None:
    def is_empty() -> bool:
        """Again and again: a controller that outlives its watchdog by a moment starts another."""
        left = processes.find_marked(str(run.path))
        kill(*(process.pid for process in left))
        return not left

    until(is_empty, "all of it is gone")


@pytest.mark.nightly
def test_what_is_killed_at_once_is_revived_by_up(place: Place) -> None:
    file = place.write("one")
    run = place.up(file)

    def kill_both() -> None:
        kill(pid_of(run, "watchdog"), pid_of(run, "controller"))
        until(lambda: not pids(run, "controller") and not pids(run, "watchdog"), "both are gone")

    kill_both()
    assert "the controller is gone: nothing is restarted until" in call("status").out
    kill(engine := engine_pid(run), pid_of(run, "gateway"))
    until(lambda: now(run).gateway.state == "gone", "status sees by itself that the gateway is gone")
    assert call("up", file, "--json").events[0]["was_running"] is True
    wait_restarted(run, "gateway", 0, "was gone")
    assert engine_pid(place.note(run)) != engine
    kill_all(run)
    state = now(run)
    assert (state.phase, state.controller.state, state.replicas[0].state) == ("degraded", "gone", "gone")
    assert call("up", file).code == 0
    ask(place.note(run))
    kill_both()
    assert call("down").code == 0, "down needs nothing alive"
    place.assert_nothing_left()


@pytest.mark.nightly
def test_shared_memory_of_killed_processes_is_removed(place: Place) -> None:
    """As vLLM's does, the engine maps a segment that only its polite end would unlink."""
    hook, tag = place.folder / "hook", f"penstock-test-{os.getpid()}"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import mmap, os, sys\n"
        "if 'penstock.testing.fake_engine' in sys.orig_argv:\n"
        f"    descriptor = os.open(f'/dev/shm/{tag}-{{os.getpid()}}', os.O_CREAT | os.O_RDWR)\n"
        "    os.ftruncate(descriptor, 4096)\n"
        "    kept = mmap.mmap(descriptor, 4096)\n"
    )
    run = place.up(place.write("one", engine={"env": {"PYTHONPATH": str(hook)}}))

    def is_told() -> bool:
        told = replica_of(run).announcement
        return told is not None and told.shared_memory == (f"/dev/shm/{tag}-{engine_pid(run)}",)

    def check_segments(*of: int) -> None:
        assert {path.name for path in Path("/dev/shm").glob(f"{tag}-*")} == {f"{tag}-{pid}" for pid in of}

    first = engine_pid(run)
    kill(pid_of(run, "node"))
    wait_restarted(run, "replica", 0, "node process")
    assert engine_pid(run) != first
    check_segments(engine_pid(run))  # the orphan's went with it
    until(is_told, "status knows the segment")
    kill(pid_of(run, "node"), engine_pid(run))
    wait_restarted(run, "replica", 1, "node process")
    check_segments(engine_pid(run))  # nobody mapped it any more, but its node had told of it
    until(is_told, "status knows the segment")
    kill_all(run)
    assert call("down").code == 0
    check_segments()


def test_hanging_engine_is_found_stalled_and_its_request_is_answered_after_all(place: Place) -> None:
    # The first request is the node's probe.
    faults = {"hang-after-requests": 1, "fault-once": str(place.folder / "hung")}
    run = place.up(place.write("one", args=faults, engine={"stall_s": 3}))
    ask(run)
    wait_restarted(run, "replica", 0, "stalled: 1 request(s) running")
    place.note(run)
    ask(run)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("args", "engine", "reading", "hint"),
    [
        ({"oom": "kv-cache"}, {}, "the KV cache for one request of max_model_len does not fit", "Set engine.max_model"),
        ({"crash-at-start": "ValueError: no such thing"}, {}, "ValueError: no such thing", "logs"),
        ({"load-s": 30}, {"start_timeout_s": 3}, "it was not ready after", "penstock logs one"),
    ],
    ids=["what is known", "an error nobody knows", "too slow"],
)
def test_failed_start_says_why_and_leaves_nothing(
    place: Place, args: dict[str, Any], engine: dict[str, Any], reading: str, hint: str
) -> None:
    done = call("up", place.write("one", args=args, engine=engine))
    place.run()
    assert done.code == 1, done
    for words in ('error: could not start replica 0 of "one"', reading, hint, "its last lines:"):
        assert words in done.err
    place.assert_nothing_left()
    facts = call("status", "one", "--json").json
    assert facts["phase"] == "failed" and reading in facts["reason"]
    tail = facts["replicas"][0]["announcement"]["log_tail"]
    assert 0 < len(tail) <= 20 and tail[-1] in call("logs", "one").out
    assert reading in call("status", "one").out
    assert call("ls", "--json").json == [] and "failed" in call("ls", "--all").out


def test_down_ends_an_engine_that_ignores_sigterm(place: Place) -> None:
    loading = {"load-s": 25, "ignore-sigterm-while-loading": True, "child": True}
    assert call("up", place.write("one", args=loading), "--no-wait").code == 0
    until(lambda: replica_of(place.run()).state == "loading", "the engine loads")
    ask(place.up(place.write("two", args={"ignore-sigterm": True, "child": True})))
    with started("down", "--all") as ending:
        assert ending.wait(left_s()) == 0, "within seconds, although both engines have to be killed"
    place.assert_nothing_left()


@pytest.mark.nightly
def test_orphans_of_a_deleted_run_folder_are_found_and_cleaned(place: Place) -> None:
    run, other = place.up(place.write("one")), place.up(place.write("two"))
    path, run_id = str(run.path), run.record().id
    until(lambda: remove(run.path), "the folder is gone")
    until(lambda: not pids(run, "controller") and not pids(run, "watchdog"), "the controller ends by itself")
    dry = call("clean")
    assert dry.code == 0 and "node of" in dry.out and f"penstock-{run_id}-0" in dry.out
    assert str(other.path) not in dry.out
    assert processes.find_marked(path), "a dry run removes nothing"
    assert call("clean", "--yes").code == 0
    place.assert_nothing_left_of(path)
    ask(other)


def remove(path: Path) -> bool:
    """As `rm -rf`, again while somebody writes into it."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def test_two_ups_at_once_start_one_deployment(place: Place) -> None:
    file = place.write("one", args={"load-s": 0.5})
    with started("up", file) as first, started("up", file) as second:
        codes = sorted(child.wait(left_s()) for child in (first, second))
        refused = [child for child in (first, second) if child.returncode == 2]
        words = [child.stderr.read() for child in refused if child.stderr is not None]
    assert codes in ([0, 0], [0, 2])
    assert all("another penstock command is changing it" in text for text in words)
    run = place.run()
    assert len(pids(run, "controller")) == len(pids(run, "node")) == 1
    ask(run)


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["run.json", "handle.json"])
def test_down_ends_a_deployment_whose_folder_is_damaged(place: Place, broken: str) -> None:
    run = place.up(place.write("one"))
    run_id = run.record().id
    kill(pid_of(run, "watchdog"), pid_of(run, "controller"))  # a living controller would write some of them anew
    (run.path / broken).write_text("")
    assert call("down", "one", "--now").code == 0
    assert run.is_ended() and processes.find_marked(str(run.path)) == []
    for folder in private_folders(run_id):
        assert broken == "run.json", "its id is not known any more: for `clean` to find"
        shutil.rmtree(folder)
    ask(place.up(place.write("one")))


@pytest.mark.nightly
def test_node_that_dies_before_it_says_anything_fails_the_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    render = Local.render

    def damaged(*args: Any) -> Artifact:
        return msgspec.structs.replace(render(*args), files={"launch.json": "{}"})

    monkeypatch.setattr(Local, "render", damaged)
    told = call("up", place.write("one"))
    place.run()
    assert told.code == 1
    assert "its node ended 3 times before its first report" in told.err
    assert "ValidationError" in told.err, "the node's own last lines are shown"


def test_on_a_full_disk_the_controller_survives_down_works_and_up_refuses(place: Place) -> None:
    """A home of its own, 100 MiB, that fills while a deployment runs."""
    file, home = place.write("one"), Path(os.environ["PENSTOCK_HOME"])
    home.mkdir(exist_ok=True)
    penstock, controller = f"{sys.executable} -m penstock.cli.main", f'pgrep -f "penstock.deployment.controller {home}"'
    script = f"""
        mount -t tmpfs -o size=100m tmpfs {home}; {penstock} up {file} >&2
        cat /dev/zero > {home}/filler 2> /dev/null || true
        before=$({controller}); sleep 3; [ "$before" = "$({controller})" ] && echo "the controller lives"
        {penstock} status one; {penstock} down one
        {sys.executable} -c "from penstock import processes; print(len(processes.find_marked()), 'processes left')"
        {penstock} ls; {penstock} up {file} --json || echo "refused"
    """
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    for line in ("the controller lives", "one is ready", "one is down", "0 processes left", "(1 ended: ", "refused"):
        assert line in done.stdout, done
    assert " of its disk are free" in done.stdout, done


@pytest.mark.nightly
def test_engine_is_read_although_its_log_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output pipe holds 64 KiB: an engine that nobody reads stops."""
    lines, full = list[str](), Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    marks = processes.Marks(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", TimedLines(full))
        engine = EngineProcess(Command(("seq", "30000"), {}), tmp_path / "engine", marks, lines.append)
        until(lambda: engine.exit_code() == 0, "it ends")
        engine.end(0)
    assert len(lines) == 30000
    with contextlib.suppress(OSError):
        full.close()
