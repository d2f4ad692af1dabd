"""The program that fetches a hub model into a volume, against a hub on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import COMMIT, HubServer, asked_hub

from penstock.errors import PenstockError, UserError
from penstock.models import manifest, volume

NAME = "org/tiny"
FILES = {"config.json": b"{}", "tokenizer.json": b"{    }", "a.safetensors": b"a" * 100, "b.safetensors": b"b" * 50}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with asked_hub(monkeypatch, NAME, FILES | {"README.md": b"#", "original/x.pth": b"x"}) as server:
        yield server


def path_in(volume: Path, revision: str = "main") -> str:
    return f"{volume}/models--org--tiny/snapshots/{revision}"


def test_a_model_is_fetched_once_and_is_whole_when_the_marker_is_there(served: HubServer, tmp_path: Path) -> None:
    lines: list[str] = []
    assert volume.fetch(NAME, path_in(tmp_path), "safetensors", lines.append) == COMMIT
    folder = Path(path_in(tmp_path))
    assert {path.name for path in folder.iterdir()} == {*FILES, volume.MARKER, manifest.NAME}
    assert all((folder / name).read_bytes() == body for name, body in FILES.items())
    assert (folder / volume.MARKER).read_text() == f"{COMMIT}\n"
    assert lines[-1].startswith("weights complete: weights 4/4 files, 0.0 GB of 0.0 GB, commit c1899de")
    waited: list[str] = []
    volume.wait(path_in(tmp_path), waited.append)
    assert waited == ["weights 4/4 files, 0.0 GB of 0.0 GB", "weights complete"]
    n_asked = len(served.asked)
    for path in (path_in(tmp_path), path_in(tmp_path, COMMIT)):
        assert volume.fetch(NAME, path, "safetensors", lines.append) == COMMIT
    assert lines[-1] == "weights complete: fetched before" and len(served.asked) == n_asked
    # Without the marker the files are looked at, and not fetched again.
    (folder / volume.MARKER).unlink()
    served.asked.clear()
    volume.fetch(NAME, path_in(tmp_path), "safetensors", lines.append)
    assert served.downloads == [] and (folder / volume.MARKER).is_file()


def test_a_download_that_breaks_off_leaves_no_marker_and_is_resumed(served: HubServer, tmp_path: Path) -> None:
    served.cut["a.safetensors"] = 10
    with pytest.raises(PenstockError):
        volume.fetch(NAME, path_in(tmp_path), "safetensors", lambda _: None)
    assert not Path(path_in(tmp_path)).exists()
    served.cut.clear()
    volume.fetch(NAME, path_in(tmp_path), "safetensors", lambda _: None)
    assert Path(path_in(tmp_path), volume.MARKER).is_file()


def test_all_parts_of_a_gguf_are_fetched(served: HubServer, tmp_path: Path) -> None:
    parts = {f"q4/m-0000{number}-of-00002.gguf": b"x" for number in (1, 2)}
    served.files = FILES | parts
    volume.fetch(NAME, f"{path_in(tmp_path)}/q4/m-00001-of-00002.gguf", "gguf", lambda _: None)
    assert all((Path(path_in(tmp_path)) / name).is_file() for name in parts)
    assert not (Path(path_in(tmp_path)) / "a.safetensors").exists()


def test_a_file_of_another_size_is_refused_and_dropped(served: HubServer, tmp_path: Path) -> None:
    volume.fetch(NAME, path_in(tmp_path, COMMIT), "safetensors", lambda _: None)
    broken = Path(path_in(tmp_path, COMMIT), "config.json")
    Path(broken.parent, volume.MARKER).unlink()
    broken.resolve().write_bytes(b"{")
    with pytest.raises(PenstockError, match='of model "org/tiny": it has 1 bytes, and the hub 2') as caught:
        volume.fetch(NAME, path_in(tmp_path, COMMIT), "safetensors", lambda _: None)
    assert caught.value.is_retryable and not broken.exists(), "the next try fetches it"


def test_a_full_volume_and_a_repository_without_weights_are_refused(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="has no file of its weights"):
        volume.fetch(NAME, path_in(tmp_path), "gguf", lambda _: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match=r"GB are missing, and the volume has 0\.0 GB"):
        volume.fetch(NAME, path_in(tmp_path), "safetensors", lambda _: None)
    with pytest.raises(UserError, match="not a path in a hub's cache"):
        volume.fetch(NAME, "/models", "safetensors", lambda _: None)


def test_the_one_that_waits_ends_when_the_marker_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(path_in(tmp_path))

    def complete(_: float) -> None:
        folder.mkdir(parents=True)
        (folder / volume.MARKER).touch()

    monkeypatch.setattr(volume, "time", SimpleNamespace(sleep=complete))
    assert volume.main([NAME, path_in(tmp_path), "safetensors", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == ["weights: not begun", "weights complete"]
    assert volume.main([NAME, "/models", "safetensors"]) == 2
    assert "penstock: cannot fetch a model" in capsys.readouterr().out
