"""What `clean` may touch: never what lives, nor what may live; containers and other users are out of bounds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from launching import Place, call, private_folders
from samples import NOW, deployment, end, run_folder
from waiting import until

from penstock import processes
from penstock import run_folder as runs
from penstock.deployment import leftovers
from penstock.deployment.leftovers import FolderFacts, FolderState, ProcessFacts, judge
from penstock.errors import UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore, Limits
from penstock.paths import make_private
from penstock.processes import Marked
from penstock.run_folder import Desired, Run

OWN = os.getpid()


def facts(folder: FolderState, run_id: str = "a", is_near: bool = True, pid: int = 7) -> ProcessFacts:
    return ProcessFacts(Marked(pid, 1.0, "node", "/h/runs/one", run_id, "0", "python"), is_near, folder)


@pytest.mark.parametrize(
    ("folder", "is_near", "found", "unknown"),
    [
        ("absent", True, ["7", "/tmp/a"], []),
        ("ended", True, ["7", "/tmp/a"], []),
        ("replaced", True, ["7", "/tmp/a"], []),
        ("living", True, [], []),
        ("unseen", True, [], ["7"]),  # an unmounted home: unknown, not gone
        ("absent", False, [], []),  # in a container, or another user's
        ("ended", False, [], []),
    ],
)
def test_only_what_is_seen_to_have_ended_is_left_behind(
    folder: FolderState, is_near: bool, found: list[str], unknown: list[str]
) -> None:
    judged = judge([facts(folder, is_near=is_near)], [FolderFacts("/tmp/a", "a", True, False)], [])
    assert [item.name for item in judged.found] == found
    assert [item.name for item in judged.unknown] == unknown


def test_one_process_that_may_live_protects_its_launch() -> None:
    for other in (facts("unseen", pid=8), facts("living", pid=8), facts("absent", is_near=False, pid=8)):
        assert judge([facts("absent"), other], [FolderFacts("/tmp/a", "a", True, False)], []).found == []
    assert [item.name for item in judge([facts("absent"), facts("living", "b", pid=8)], [], []).found] == ["7"]


def test_a_folder_that_another_user_owns_or_a_process_holds_is_left_alone() -> None:
    def is_found(run_id: str, is_own: bool, is_held: bool) -> bool:
        return bool(judge([], [FolderFacts("/tmp/a", run_id, is_own, is_held)], ["living"]).found)

    cases = [("a", True, False), ("a", False, False), ("a", True, True), ("living", True, False)]
    assert [is_found(*case) for case in cases] == [True, False, False, False]
    held_by_what_is_removed = FolderFacts("/tmp/a", "a", is_own=True, is_held=True)
    assert len(judge([facts("absent")], [held_by_what_is_removed], []).found) == 2


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Marked]:
    """The marked processes of this machine, as the test says; temporary folders are under tmp_path."""
    found: list[Marked] = []
    monkeypatch.setattr(processes, "find_marked", lambda *_: found)
    monkeypatch.setattr(processes, "is_near", lambda _: True)
    monkeypatch.setattr(leftovers, "_writes_a_log", lambda pid: pid == OWN)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return found


def process_of(run: Run, run_id: str | None = None) -> Marked:
    return Marked(7, 1.0, "node", str(run.path), run_id or run.record().id, "0", "python -m penstock.node")


def private_folder(tmp_path: Path, run_id: str) -> Path:
    path = tmp_path / f"penstock-{run_id}-0"
    path.mkdir()
    return path


def names(with_ended_runs: bool = True) -> list[str]:
    return [item.name for item in leftovers.leftovers(with_ended_runs).found]


def test_what_an_ended_deployment_left_is_found_and_removed(tmp_path: Path, marked: list[Marked]) -> None:
    run = run_folder()
    end(run)
    marked.append(process_of(run))
    folder = private_folder(tmp_path, run.record().id)
    with runs.locked(run.name):
        assert names() == [], "what a command is changing is left alone"
    items = leftovers.leftovers(with_ended_runs=True).found
    found = [("process", "7"), ("folder", str(folder)), ("run", str(run.path))]
    assert [(item.kind, item.name) for item in items] == found
    assert items[0].what == f"node of {run.path}: python -m penstock.node"
    assert names(with_ended_runs=False) == ["7", str(folder)]
    marked.clear()
    assert leftovers.clean(leftovers.leftovers().found) == []
    assert not folder.exists()


def test_what_may_live_is_left_alone(tmp_path: Path, marked: list[Marked], monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean --yes` used to kill what ran under another PENSTOCK_HOME, and what a `down` was draining."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "other"))
    run = run_folder(deployment(name="d"))
    process = process_of(run)
    marked.append(process)
    private_folder(tmp_path, process.run_id)
    for home in ("mine", "other"):
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / home))
        assert names() == [], "it runs"
    run.write_desired(Desired("down", 0))
    assert names() == [], "a `down` that broke off is for `down`"
    (run.path / "run.json").write_text("")
    assert names() == [], "a damaged folder is for `down` too"
    run.path.rename(run.path.with_name("moved"))
    marked[:] = [Marked(OWN, 1.0, "node", str(run.path), process.run_id, "0", "python")]
    assert names() == [], "its log is still there, so its folder is hidden"
    marked[:] = [Marked(7, 1.0, "node", "ray:chat-0a1b2c", process.run_id, "0", "python")]
    assert names() == [], "placed from another machine, whose target ends it"


def test_another_home_is_left_alone(tmp_path: Path, marked: list[Marked], monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean --yes` used to remove temporary folders of every PENSTOCK_HOME of the user."""
    made: dict[str, list[str]] = {}
    for home, pid, earlier_id in (("mine", 7, "a1"), ("other", 8, "b2")):
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / home))
        run = run_folder()
        end(run)
        known, earlier = private_folder(tmp_path, run.record().id), tmp_path / f"penstock-{earlier_id}-0"
        make_private(earlier)  # of a launch whose id no run folder has any more
        marked.append(Marked(pid, 1.0, "node", str(run.path), earlier_id, "0", "python"))
        made[home] = sorted([str(pid), str(known), str(earlier)])
    private_folder(tmp_path, "0a1b2c")  # of no launch that is known here
    for home, own in made.items():
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / home))
        assert sorted(names(with_ended_runs=False)) == own
    marked.clear()
    assert leftovers.clean(leftovers.leftovers().found) == []
    left = {path.name for path in tmp_path.glob("penstock-*")}
    assert left == {*(Path(path).name for path in made["mine"] if path != "7"), "penstock-0a1b2c-0", "penstock-b2-0"}


def test_a_home_that_is_not_mounted_is_unknown(
    tmp_path: Path, marked: list[Marked], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked.append(process_of(Run(tmp_path / "away" / "runs" / "one"), run_id="0a1b2c"))
    private_folder(tmp_path, "0a1b2c")
    assert names() == []
    assert [item.name for item in leftovers.leftovers().unknown] == ["7"]
    (tmp_path / "away" / "runs").mkdir(parents=True)
    assert names() == [], "its folder was removed, which is for that home"
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "away"))
    assert "7" in names()


def test_of_the_same_name_an_earlier_launch_is_left_behind_and_a_folder_that_is_no_engines_is_not(
    tmp_path: Path, marked: list[Marked]
) -> None:
    for name in ("penstock-home-abc", "penstock-notes-2024", "penstock-0a1b-0-x", "penstock-0a1b"):
        (tmp_path / name).mkdir()
    assert names() == []
    marked.append(process_of(run_folder(), run_id="0a1b2c"))
    assert names() == ["7"]


@pytest.mark.usefixtures("marked")
def test_keys_and_usage_outlive_a_deployment_until_they_are_named() -> None:
    """`clean --runs --yes` used to delete them without a word, and its hint left the folders out."""
    run = run_folder()
    with closing(store.connect(str(run.store_file))) as database:
        KeyStore(database).create("alice", Limits(), NOW)
    with pytest.raises(UserError, match="it has not ended"):
        leftovers.leftovers(keys_of=run.name)
    end(run)
    shown = call("clean", "--runs")
    assert f"; 1 key and 0 requests stay until `penstock clean --keys {run.name} --yes`" in shown.out
    assert "run `penstock clean --runs --yes` to remove these" in shown.out
    assert call("clean", "--runs", "--yes").out.endswith("removed\n")
    assert [path.name for path in run.path.iterdir()] == ["store.sqlite"] and names() == []
    assert leftovers._state_of(run, "0a1b2c") == "absent", "what ran there is left behind"
    run = run_folder()
    with closing(store.connect(str(run.store_file))) as database:
        assert [key.name for key in KeyStore(database).all()] == ["alice"], "the next of that name has them"
    end(run)
    shown = call("clean", "--runs", "--keys", run.name)
    assert f'1 key and 0 requests of the deployment "{run.name}"' in shown.out
    assert f"run `penstock clean --runs --keys {run.name} --yes` to remove these" in shown.out
    assert call("clean", "--runs", "--keys", run.name, "--yes").code == 0 and not run.path.exists()
    refused = call("clean", "--keys", run.name, "--yes")
    assert refused.code == 2 and f'cannot find keys and usage of "{run.name}"' in refused.err


@pytest.mark.usefixtures("marked")
def test_a_folder_without_keys_and_usage_goes_whole() -> None:
    run = run_folder()
    store.connect(str(run.store_file)).close()
    end(run)
    assert leftovers.clean(leftovers.leftovers(with_ended_runs=True).found) == [] and not run.path.exists()


ROLES = ("gateway", "node", "engine")


def pids_of(run_id: str) -> set[int]:
    """The gateway, the node and the engine of a launch, also in other namespaces."""
    return {found.pid for found in processes.find_marked() if found.run_id == run_id and found.role in ROLES}


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("is_container", [True, False], ids=["a container", "an unmounted home"])
def test_clean_and_down_do_not_touch_what_they_cannot_see(place: Place, is_container: bool) -> None:
    """A deployment whose home is a file system of its own, which `clean` does not see. It killed all of it, and so did
    a `down` of another deployment of the same path.
    """
    folder, file, home = place.folder, place.write("one"), Path(os.environ["PENSTOCK_HOME"])
    home.mkdir(exist_ok=True)
    penstock = f"{sys.executable} -m penstock.cli.main"
    script = f"""
        mount -t tmpfs tmpfs {home}; {penstock} up {file}; cp {home}/runs/one/run.json {folder}/run
        mv {folder}/run {folder}/run.json; while [ ! -e {folder}/go ]; do sleep 0.1; done
        {":" if is_container else f"umount -l {home}; {penstock} clean --yes --json > {folder}/cleaned.json"}
        touch {folder}/done; while [ ! -e {folder}/stop ]; do sleep 0.1; done
    """
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    child = subprocess.Popen([*namespaces, "sh", "-ec", script])
    try:
        until(lambda: (folder / "run.json").exists() or child.poll() is not None, "it runs")
        run_id = json.loads((folder / "run.json").read_text())["id"]
        before = pids_of(run_id)
        (folder / "go").touch()
        until(lambda: (folder / "done").exists() or child.poll() is not None, "clean has ended")
        if is_container:
            assert call("up", file).code == 0, "one of the same path, in this namespace"
            assert call("down", "one", "--now").code == 0
            cleaned = call("clean", "--yes", "--json").json
        else:
            cleaned = json.loads((folder / "cleaned.json").read_text())
        after, folders = pids_of(run_id), private_folders(run_id)
    finally:
        (folder / "stop").touch()
        child.wait(30)
        for path in private_folders(run_id):
            shutil.rmtree(path)
    assert len(before) == 3 and after == before and folders
    assert run_id not in json.dumps(cleaned["found"]), cleaned
    assert (run_id in json.dumps(cleaned["unknown"])) is not is_container, "unknown is shown, another namespace is not"
