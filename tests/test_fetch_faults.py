"""What may go wrong in a fetch, with a hub on loopback and real processes: docs/how-to/weights.md lists it."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer, asked_hub, serving

from penstock.errors import PenstockError, UserError
from penstock.models import fetch, fetch_files, fetch_lock, hub, manifest, part_file, sources

pytestmark = pytest.mark.loopback

NAME = "org/tiny"
FILES = {"config.json": b"{}", "a.safetensors": b"a" * 3_000_000, "b.safetensors": b"b" * 1_500_000}
SOURCE = sources.Source("hub", NAME)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch_lock, "_SETTLE_S", 0.001)
    with asked_hub(monkeypatch, NAME, FILES) as server:
        yield server


def test_a_hub_that_is_busy_is_asked_again_when_it_says_so(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_files, "_MOST_WAIT_S", 0.01)
    monkeypatch.setattr(fetch_files, "_SHOW_S", 0.001)
    served.n_busy = 4
    asked, notes = list[float | None](), set[str]()
    refusal = hub.refusal

    def explain(*words: object) -> hub.HubError:
        error = refusal(*words)  # type: ignore[arg-type]
        asked.append(error.wait_s)
        return error

    monkeypatch.setattr(hub, "refusal", explain)
    folder = fetch.fetch(SOURCE, tmp_path / "to", show=lambda progress: notes.add(progress.note))
    assert manifest.verify(folder) == [] and asked == [7.0] * 4
    assert any("the hub answers: too many requests" in note for note in notes)


def test_the_token_goes_to_the_hub_and_not_where_the_files_are(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with serving(NAME, FILES) as other:
        served.elsewhere = other.url
        fetch.fetch(SOURCE, tmp_path / "to")
        assert other.downloads == ["a.safetensors", "b.safetensors"] and set(other.tokens) == {None}
        assert set(served.tokens) == {"Bearer hidden"}
        # An address there is valid for a while: what it refuses is asked of the hub again.
        other.status = 403
        with pytest.raises(hub.HubError, match=f"{other.url} answers with HTTP 403") as caught:
            fetch.fetch(SOURCE, tmp_path / "again")
    assert caught.value.is_retryable


def test_a_mirror_s_password_is_sent_and_not_shown(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", served.url.replace("//", "//ada:hidden@"))
    folder = fetch.fetch(SOURCE, tmp_path / "to")
    assert manifest.verify(folder) == [] and "Basic YWRhOmhpZGRlbg==" in served.tokens
    served.status = 403
    with pytest.raises(hub.HubError) as caught:
        fetch.fetch(SOURCE, tmp_path / "other")
    assert "hidden" not in f"{caught.value.message}{caught.value.detail}"
    assert f"The page to visit: {served.url}/{NAME}" in str(caught.value.detail)


def test_a_revision_that_moved_since_the_list_is_refused(served: HubServer, tmp_path: Path) -> None:
    served.commit = "0" * 40
    with pytest.raises(UserError, match="the hub answers with commit 000000000000, and not c1899de289a0"):
        fetch.fetch(SOURCE, tmp_path / "to")
    assert not (tmp_path / "to" / manifest.NAME).exists()


def test_a_link_out_of_the_cache_is_not_taken_for_a_file(served: HubServer, tmp_path: Path) -> None:
    folder = fetch.fetch(SOURCE, None, tmp_path / "hub")
    (tmp_path / "other").write_bytes(FILES["b.safetensors"])
    (folder / "b.safetensors").resolve().unlink()
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to(tmp_path / "other")
    assert not manifest.fits(folder) and "out of" in str(manifest.verify(folder)[0])
    assert fetch.fetch(SOURCE, None, tmp_path / "hub") == folder and manifest.verify(folder) == []
    assert (folder / "b.safetensors").resolve().is_relative_to(tmp_path / "hub")
    assert (tmp_path / "other").read_bytes() == FILES["b.safetensors"], "what it led to is not touched"


# Where a process is killed: the object, its method, and after how many calls.
STEPS = {
    "while it lists": ("sources", "resolve", 0),
    "in a file": ("part_file.PartFile", "write", 1),
    "between two files": ("fetch_files.FilesFetch", "_finish", 1),
    "before a file is in its place": ("fetch_files.Layout", "place", 1),
    "before the manifest": ("manifest", "write", 0),
    "after the manifest": ("fetch_files.Layout", "remove_notes", 0),
}
_KILLED = """
import os, signal, threading
from penstock.models import fetch, fetch_files, manifest, part_file, sources
fetch_files._N_AT_ONCE = 1
owner, calls = {owner}, []
before = getattr(owner, {name!r})
def killed(*words, **more):
    calls.append(1)
    if len(calls) > {n_calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(*words, **more)
setattr(owner, {name!r}, killed)
fetch.fetch(sources.parse({model!r}))
"""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("step", STEPS)
def test_a_fetch_that_is_killed_at_any_step_is_continued(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    owner, name, n_calls = STEPS[step]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    code = textwrap.dedent(_KILLED).format(owner=owner, name=name, n_calls=n_calls, model=NAME)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == -signal.SIGKILL, process.stderr
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    finished = {path.name for path in folder.glob("*.safetensors")}
    begun = sum(path.stat().st_size for path in folder.parent.parent.glob("blobs/*.incomplete"))
    served.asked.clear()
    served.ranges.clear()
    assert fetch.fetch(SOURCE) == folder and manifest.verify(folder) == []
    assert finished.isdisjoint(served.downloads), "a file that was there is not fetched again"
    if step == "in a file":
        assert served.ranges == [("a.safetensors", begun)] and begun, "it is continued where it ended"
    assert not list(folder.parent.parent.glob("blobs/*.incomplete"))


def test_a_disk_that_is_full_in_the_middle_keeps_what_came(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk seems large when it is checked; others fill it."""
    write = part_file.PartFile.write

    def full(part: part_file.PartFile, data: bytes) -> None:
        if part.n_bytes >= 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(part, data)

    with monkeypatch.context() as patch:
        patch.setattr(part_file.PartFile, "write", full)
        with pytest.raises(UserError, match="the disk is full") as caught:
            fetch.fetch(SOURCE, None, tmp_path / "hub")
    assert "the next fetch continues it" in f"{caught.value.message}{caught.value.detail}"
    kept = {path.stat().st_size for path in tmp_path.glob("hub/*/blobs/*.incomplete")}
    served.ranges.clear()
    assert manifest.verify(fetch.fetch(SOURCE, None, tmp_path / "hub")) == []
    assert max(kept) >= 1_000_000 and {begin for _, begin in served.ranges} & kept, "it was continued"


def test_a_file_that_always_breaks_off_ends_after_some_tries(served: HubServer, tmp_path: Path) -> None:
    served.cut["a.safetensors"] = 1_000_000
    with pytest.raises(PenstockError, match="the connection ended early") as caught:
        fetch.fetch(SOURCE, tmp_path / "to")
    assert caught.value.is_retryable
    n_asked = len([name for name, _ in served.ranges if name == "a.safetensors"])
    assert n_asked == 5, "six tries with the first, and what came is kept"
    assert max(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) == 1_000_000
