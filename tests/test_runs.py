"""Run folders: whole from the start, private where they must be, found again by name."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from samples import NOW, demo_plan, deployment, run_folder

from penstock import paths
from penstock import run_folder as runs
from penstock.errors import PenstockError, UserError
from penstock.run_folder import Artifact, Desired, Handle, Part, Run, State
from penstock.wire.announcement import Process


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_holds_everything(home: Path) -> None:
    wanted = deployment(name="d", replicas=2)
    run = run_folder(wanted)
    assert run.path == home / "runs" / "d"
    assert (run.name, run.exists()) == ("d", True)
    assert (run.record().name, run.record().target, run.record().created_at) == ("d", "local", NOW)
    assert (run.deployment(), run.plan()) == (wanted, demo_plan())
    assert run.artifact() == Artifact(("python", "-m", "penstock.node"), {"launch.json": "{}\n"})
    assert (run.artifact_path / "launch.json").read_text() == "{}\n"
    assert (run.desired(), run.handle(), run.state()) == (Desired("up", 2), Handle("local"), None)
    assert (run.url, run.admin_url) == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    assert run.events() == []
    assert run.log("replica-0").parent.is_dir()


def test_secrets_are_for_the_owner_only() -> None:
    run = run_folder()
    assert run.admin_token() == "secret-token"
    private = {run.admin_token_file: 0o600, run.admin_token_file.parent: 0o700, run.gateway_config: 0o600}
    assert {path: mode(path) for path in private} == private
    texts = [path.read_text() for path in run.path.rglob("*") if path.is_file() and path != run.admin_token_file]
    assert not any("secret-token" in text for text in texts)


def test_a_new_folder_replaces_an_ended_one(home: Path) -> None:
    old = run_folder()
    old.add_event("up", "the first")
    first = old.record().id
    new = run_folder()
    assert new.record().id != first
    assert [event.text for event in new.events()] == ["the first"]
    assert [path.name for path in (home / "runs").iterdir()] == ["penstock-demo"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes, mode: int = 0) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "write_atomically", fail)


@pytest.mark.usefixtures("full_disk")
def test_a_folder_that_could_not_be_filled_leaves_nothing(home: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_folder()
    place = home / "runs" / "penstock-demo"
    assert caught.value.message == f'cannot write run folder "{place}": No space left on device'
    assert list((home / "runs").iterdir()) == []


def test_on_a_full_disk_what_down_writes_goes_in_place(request: pytest.FixtureRequest) -> None:
    run = run_folder()
    run.write_state(State(NOW, "ready", 1, reason="x" * 100))
    request.getfixturevalue("full_disk")
    run.write_desired(Desired("down", 0))
    run.write_state(State(NOW, "down", 0))
    assert (run.desired(), run.state(), run.is_ended()) == (Desired("down", 0), State(NOW, "down", 0), True)
    with pytest.raises(OSError, match="No space left"):
        run.write_state(State(NOW, "down", 0, reason="y" * 1000))
    with pytest.raises(OSError, match="No space left"):
        run.write_handle(Handle("local"))


def test_a_home_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError) as caught:
        paths.folder()
    assert caught.value.message == f'cannot write run folder "{tmp_path / "file" / "runs"}": Not a directory'
    assert caught.value.hint == "Set PENSTOCK_HOME to a folder you may write."
    monkeypatch.setenv("PENSTOCK_HOME", "~nobody-of-that-name/x")
    with pytest.raises(UserError, match=r"cannot use .* as the home of penstock"):
        paths.home()


def test_home_is_in_the_users_folder_unless_said_otherwise_and_private(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode(paths.folder()) == 0o700
    monkeypatch.setenv("PENSTOCK_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert paths.home() == Path("/home/somebody/.penstock")


def test_a_name_is_changed_by_one_command_at_a_time_and_others_see_its_lock() -> None:
    run = run_folder(deployment(name="d"))
    with runs.locked("d"), pytest.raises(UserError) as caught, runs.locked("d"):
        pass
    assert caught.value.message == 'cannot change deployment "d": another penstock command is changing it'
    assert not runs.is_locked(run)
    with runs.locked("d"), runs.locked("e"):
        assert runs.is_locked(run)
    assert not runs.is_locked(run)


def test_what_changes_is_written_whole_and_read_again(tmp_path: Path) -> None:
    run = run_folder()
    run.write_desired(Desired("down", 0))
    run.write_handle(Handle("local", {"replica/0": {"pid": 1, "started_at": 2.0}}))
    run.write_state(State(NOW, "ready", 1))
    again = Run(run.path)
    assert (again.desired(), again.state()) == (Desired("down", 0), State(NOW, "ready", 1))
    assert again.handle().replicas == {"0": {"pid": 1, "started_at": 2.0}}
    (folder := tmp_path / "folder").mkdir()
    for text in (b"one", b"two"):
        paths.write_atomically(folder / "a", text, mode=0o600)
    assert ((folder / "a").read_bytes(), mode(folder / "a")) == (b"two", 0o600)
    assert list(folder.iterdir()) == [folder / "a"]


def test_events_are_lines_and_half_a_line_is_not_read() -> None:
    run = run_folder()
    run.add_event("up", "it starts", who="kim@here")
    with (run.path / "events.jsonl").open("a") as stream:
        stream.write('{"at": 1, "eve')
    (event,) = run.events()
    assert (event.event, event.text, event.who, event.replica) == ("up", "it starts", "kim@here", None)
    run.add_event("down", "after a full disk\nit is whole again", seconds={"end": 1.5})
    first, last = run.events()
    assert (first, last.text, last.seconds) == (event, "after a full disk\nit is whole again", {"end": 1.5})


def test_runs_are_found_by_name_or_the_nearest_is_named() -> None:
    for name in ("llama70", "a"):
        run_folder(deployment(name=name))
    assert runs.find("a").record().name == "a"
    assert [run.name for run in runs.every()] == ["a", "llama70"]
    for name, hint in (("lama70", 'Did you mean "llama70"?'), ("zzz", "Known: a, llama70.")):
        with pytest.raises(UserError) as caught:
            runs.find(name)
        assert (caught.value.message, caught.value.hint) == (f'cannot find deployment "{name}"', hint)


def test_without_runs_no_name_is_found(home: Path) -> None:
    (home / "runs" / ".d.new.x").mkdir(parents=True)  # half made
    (home / "runs" / "d").mkdir()
    assert runs.every() == []
    for name in ("x", "", "..", "../runs"):
        with pytest.raises(UserError) as caught:
            runs.find(name)
        assert caught.value.hint == "There is none on this machine yet; start one: penstock up"


def test_an_address_to_listen_on_becomes_one_to_connect_to() -> None:
    for listen, expected in {
        "127.0.0.1:80": "127.0.0.1:80",
        "0.0.0.0:80": "127.0.0.1:80",
        "host:80": "host:80",
        "::1:80": "[::1]:80",
        "[::1]:80": "[::1]:80",
        ":::80": "[::1]:80",
        "[::]:80": "[::1]:80",
    }.items():
        assert runs.reachable(listen) == expected


def test_a_run_is_ended_when_its_end_was_asked_for_and_written() -> None:
    run = run_folder()
    run.write_desired(Desired("down", 0))
    assert not run.is_ended()
    # A controller says "failed" of replicas that would not start: a `down` that broke off has not ended those.
    broke_off = State(NOW, "failed", 1, controller=Part("gone", Process(7, 1.0, "controller")))
    for state, is_ended in (
        (State(NOW, "stopping", 0), False),
        (broke_off, False),
        (State(NOW, "failed", 0), True),
        (State(NOW, "down", 0), True),
    ):
        run.write_state(state)
        assert run.is_ended() is is_ended
    run.write_desired(Desired("up", 0))
    assert not run.is_ended()


def test_what_down_needs_is_read_also_from_a_damaged_folder() -> None:
    run = run_folder()
    for text in ("", "{}", "[", '{"phase": 1}'):
        for name in ("state.json", "desired.json", "handle.json", "run.json"):
            (run.path / name).write_text(text)
        assert (run.state(), run.desired(), run.handle()) == (None, Desired("up", 0), Handle("local"))


@pytest.mark.parametrize("name", ["plan.json", "run.json", "spec.yaml", "gateway.json", "secrets/admin-token"])
def test_a_file_that_cannot_be_read_is_named(name: str) -> None:
    run = run_folder()
    (run.path / name).unlink()
    with pytest.raises(PenstockError) as caught:
        print(run.plan(), run.record(), run.deployment(), run.url, run.admin_url, run.admin_token())
    assert caught.value.message == f'could not read "{run.path / name}"'
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("penstock down penstock-demo")


@pytest.mark.parametrize("name", ["b/../b", "b/", "./b", "B", "b.old", "", "a" * 5000])
def test_a_name_that_no_deployment_may_have_is_not_found(home: Path, name: str) -> None:
    """The handle of a copy names the processes of the folder it was copied from: `down -a` would end those."""
    run = run_folder(deployment(name="b"))
    shutil.copytree(run.path, home / "runs" / "b.old")
    assert [run.name for run in runs.every()] == ["b"]
    with pytest.raises(UserError, match="cannot find deployment"):
        runs.find(name)


def test_the_events_stay_bounded_and_keep_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_EVENTS_BYTES", 2_000)
    run = run_folder()
    for number in range(200):
        run.add_event("scale", f"number {number}")
    kept = [event.text for event in run.events()]
    assert kept == [f"number {number}" for number in range(200 - len(kept), 200)] and 20 < len(kept) < 100
    assert sum(path.stat().st_size for path in run.path.glob("events*")) < 4_500
    run.add_event("scale", "x" * 10_000)
    assert len(run.events()[-1].text) == 1_000
    monkeypatch.setattr(runs, "_RECENT_BYTES", 1_200)
    assert [event.text for event in run.events(recent=True)][-2:] == ["number 199", "x" * 1_000]
