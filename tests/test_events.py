"""Events: what the controller notes of a state that changed, and what `penstock events` prints of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from samples import NOW, deployment, end, run_folder, told

from penstock import targets
from penstock.cli import keys, main
from penstock.deployment import events, preflight
from penstock.deployment.controller.changes import Noted, changes, noted_of
from penstock.errors import PenstockError, UserError
from penstock.log_lines import bound_log
from penstock.run_folder import Artifact, ReplicaStatus, Run, State
from penstock.targets.kubernetes import folder, objects
from penstock.wire.announcement import Restart
from penstock.wire.live import Event

Shell = Callable[..., tuple[int, str, str]]
STAGES = {"imports": 6.0, "weights": 20.4, "first token": 0.5, "files": 0.01}


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    def call(*argv: str) -> tuple[int, str, str]:
        code = main.run(argv)
        return code, *capsys.readouterr()

    return call


def row(name: str = "0", state: str = "ready", is_draining: bool = False, **facts: object) -> ReplicaStatus:
    shown = "draining" if is_draining else state
    return ReplicaStatus(name, shown, "placed", told(name, state, **facts), is_draining=is_draining, in_flight=2)


def state(*replicas: ReplicaStatus, phase: str = "ready", reason: str | None = None) -> State:
    return State(NOW, phase, 1, replicas, reason=reason)  # type: ignore[arg-type]


def test_a_start_is_one_event_with_the_seconds_of_its_stages() -> None:
    ready = row(started_at=5.0, ready_after_s=41.2, start_s=STAGES)
    none, noted = changes(state(row(state="loading"), phase="starting"), Noted())
    assert none == ()
    (phase, start), noted = changes(state(ready), noted)
    assert (phase.kind, phase.text) == ("phase", "starting -> ready")
    assert start.text == "ready after 41.2 s: imports 6.0 s, weights 20.4 s, first token 500 ms"
    assert (start.kind, start.replica, start.seconds) == ("replica ready", "0", STAGES)
    lost = state(ReplicaStatus("0", "starting", "placed"))  # a new gateway has no announcement yet
    for again in (state(ready), lost, state(ready)):
        none, noted = changes(again, noted)
        assert none == ()
    (second,), _ = changes(state(row(started_at=99.0)), noted)
    assert (second.kind, second.text) == ("replica ready", "ready")


def test_how_the_weights_are_loaded_and_where_compiled_code_came_from_is_noted_once() -> None:
    words = "131 GiB at 2.10 GB/s on ext4: about 1m06s to read; prefetch, since it is on a network"
    carried = "compiled code from node1: 412 files, 41.0 MiB in 900 ms"
    loading = state(row(state="loading", loading=words, carried=carried), phase="starting")
    noticed, noted = changes(loading, Noted("starting"))
    expected = {("weights", words, "0"), ("carried", carried, "0")}
    assert {(event.kind, event.text, event.replica) for event in noticed} == expected
    assert changes(loading, noted)[0] == ()
    measured = {"load_s": 70.2, "load_expected_s": 67.0}
    ready = state(row(started_at=5.0, ready_after_s=90.0, loading=words, measured=measured), phase="starting")
    (start,), _ = changes(ready, noted)
    assert start.text == "ready after 1m30s; weights loaded in 1m10s (1m07s expected to read them)"


def test_restarts_of_an_engine_and_drains_are_noted_once() -> None:
    noted, restarts = Noted(), (Restart(NOW, "was killed by signal 9"), Restart(NOW + 9, "stalled"))

    def noticed(**facts: Any) -> list[tuple[str, str]]:
        nonlocal noted
        found, noted = changes(state(row(**facts)), noted)
        return [(event.kind, event.text) for event in found]

    first = [("engine restarted", "was killed by signal 9"), ("replica ready", "ready")]
    assert noticed(restarts=restarts[:1]) == first
    drains = ("replica draining", "it finishes 2 requests and gets no more")
    assert noticed(restarts=restarts, is_draining=True) == [("engine restarted", "stalled"), drains]
    assert noticed(restarts=restarts, is_draining=True) == []
    assert [noticed(restarts=restarts, state=word) for word in ("busy", "busy", "ready", "busy")] == [
        *([("replica busy", "")], [], [], [("replica busy", "")])
    ]


def test_a_controller_that_continues_repeats_nothing() -> None:
    last = state(row(restarts=(Restart(NOW, "stalled"),)), row("1", is_draining=True))
    assert changes(last, noted_of(last))[0] == ()
    assert noted_of(None) == Noted()
    (failed,), _ = changes(state(*last.replicas, phase="failed", reason="no memory"), noted_of(last))
    assert failed.text == "ready -> failed: no memory"


@pytest.mark.loopback
def test_events_are_listed_with_who_asked_also_of_an_ended_deployment(shell: Shell) -> None:
    run = run_folder(deployment(name="d"))
    run.add_event("scale", "1 -> 2 replicas", who="kim@login1")
    run.add_event("replica ready", "ready after 3 s", "1", seconds={"weights": 2.0})
    words = [" scale: 1 -> 2 replicas (by kim@login1)", " replica ready [replica 1]: ready after 3 s"]
    for _ in range(2):
        lines = shell("events", "d")[1].splitlines()
        assert [line[20:] for line in lines] == words
        end(run)
    assert lines[0][:11].endswith("T") and lines[0][19:20] == "Z"
    first, second = map(json.loads, shell("events", "d", "--json")[1].splitlines())
    assert (first["event"], first["who"], second["replica"]) == ("scale", "kim@login1", "1")
    assert second["seconds"] == {"weights": 2.0} and "who" not in second
    assert shell("events", "d", "-n", "1")[1].splitlines() == lines[1:]
    assert shell("events", "d", "-n", "0")[1] == ""
    assert shell("events", "d", "--follow")[1].splitlines() == lines, "of an ended one there are no more"
    assert shell("logs", "d", "--part", "events")[1].splitlines() == lines


@pytest.mark.loopback
def test_old_events_are_left_out_by_time_and_number(shell: Shell) -> None:
    run = run_folder(deployment(name="d"))
    old = msgspec.json.encode(Event(1000.0, "up", "long ago"))
    run.events_file.write_bytes(b"".join(old + b"\n" for _ in range(99)))
    run.add_event("scale", "now")
    assert len(shell("events", "d")[1].splitlines()) == 50
    assert [line[21:] for line in shell("events", "d", "--since", "1h")[1].splitlines()] == ["scale: now"]
    assert len(shell("events", "d", "--since", "52w", "-n", "3")[1].splitlines()) <= 3


@pytest.mark.loopback
def test_a_hostile_text_stays_one_line_and_moves_no_cursor(shell: Shell) -> None:
    run = run_folder(deployment(name="d"))
    run.add_event("place failed", "\033[2J\r\nerror: gone\a", "\n\033]0;x", who="a\nb")
    output = shell("events", "d")[1]
    assert output.count("\n") == 1 and not {"\033", "\a", "\r"} & set(output)


def test_what_a_silent_place_may_know_is_not_shown_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(deployment(name="d"))

    def silent(_: Run) -> None:
        raise PenstockError("the cluster does not answer")

    monkeypatch.setattr(targets.load("local"), "fetch", silent)
    for ask in (lambda: events.listed(run), lambda: events.decisions(run, 0.0)):
        with pytest.raises(PenstockError, match="does not answer"):
            ask()
    run.add_event("scale", "1 -> 2 replicas")
    assert [event.text for event in events.listed(run)] == ["1 -> 2 replicas"], "what is known stays"
    with pytest.raises(UserError, match="no machine"):
        preflight.least([])


def test_new_events_are_followed_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a target writes the file again, of which the first lines are gone, and when it was full."""
    run = run_folder(deployment(name="d"))
    for number in range(3):
        run.add_event("scale", f"{number}")
    late = msgspec.json.encode(Event(NOW - 9e8, "replica ready", "late")) + b"\n"
    steps: list[Callable[[], object]] = [
        lambda: run.add_event("scale", "3"),
        lambda: bound_log(run.events_file, 1),
        lambda: run.add_event("scale", "4"),
        lambda: run.fetched_events_file.write_bytes(late),
        lambda: run.events_file.write_bytes(b"".join(run.events_file.read_bytes().splitlines(True)[-1:])),
        lambda: (run.add_event("scale", "5"), end(run)),  # type: ignore[func-returns-value]
    ]
    monkeypatch.setattr("time.sleep", lambda _: steps.pop(0)())
    assert [event.text for event in events.followed(run, last=2)] == ["1", "2", "3", "4", "late", "5"]
    assert steps == []


def test_what_verbs_noted_here_stays_next_to_what_a_controller_elsewhere_noted() -> None:
    run = run_folder(deployment(name="d"))
    run._write("artifact.json", Artifact(("x",), {objects.CONFIG_FILE: "c"}))
    run.events_file.write_bytes(msgspec.json.encode(Event(20.0, "scale", "here")) + b"\n")

    class Cluster:
        lines = (Event(10.0, "replica ready", "first"), Event(30.0, "replica ready", "second"))

        def find(self, kind: str, name: str) -> dict[str, Any] | None:
            text = "".join(msgspec.json.encode(line).decode() + "\n" for line in self.lines)
            metadata = {"name": name, "annotations": {objects.CONFIG: "another"}}
            return {"metadata": metadata, "data": {"events.jsonl": text}} if name == objects.state("d") else None

    for _ in range(2):
        folder.fetch(Cluster(), run)  # type: ignore[arg-type]
        assert [event.text for event in run.events()] == ["first", "here", "second"]
        run.events_file.touch()


def test_who_asked_is_the_user_of_the_process_not_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "root-of-all")
    name, _, host = events.asked_by().partition("@")
    assert name != "root-of-all" and name and host
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    assert events.asked_by() == f"4000000000@{host}"


@pytest.mark.loopback
def test_changes_of_keys_are_events_without_their_secrets(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SEEN_S", 0.0)
    run = run_folder(deployment(name="d"))
    config = json.loads(run.gateway_config.read_bytes()) | {"store": str(run.store_file)}
    run.gateway_config.write_text(json.dumps(config))
    first = shell("keys", "create", "alice", "--rpm", "60", "--deployment", "d")[1].strip()
    second = shell("keys", "rotate", "alice", "--grace", "1h", "--deployment", "d")[1].strip()
    shell("keys", "revoke", "alice", "--deployment", "d")
    shell("keys", "create", "elsewhere", "--store", str(run.path / "other.sqlite"))
    shell("keys", "list", "--deployment", "d")
    noted = run.events()
    assert [event.event for event in noted] == ["key created", "key rotated", "key revoked"]
    assert noted[0].text.startswith("alice (") and noted[0].text.endswith("), 60 requests/min")
    assert noted[1].text.endswith("the old secret is valid for 1h00m")
    assert {event.who for event in noted} == {events.asked_by()}
    content = run.events_file.read_text()
    assert not any(secret[5:] in content for secret in (first, second)) and first.startswith("sk-")
