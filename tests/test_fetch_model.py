"""A model from a hub on loopback into a cache, a folder or a volume, and what can go wrong on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import msgspec
import pytest
from hub_server import COMMIT, HubServer, asked_hub, serving
from waiting import until

from penstock.cli import fetch as fetch_verb
from penstock.cli import main
from penstock.engines.vllm.engine import Vllm
from penstock.errors import PenstockError, UserError
from penstock.models import fetch, fetch_files, fetch_lock, hub, manifest, sources, volume

pytestmark = pytest.mark.loopback

NAME = "org/tiny"
FILES = {"config.json": b"{}", "tokenizer.json": b"{    }", "a.safetensors": b"a" * 100, "b.safetensors": b"b" * 50}
SOURCE = sources.Source("hub", NAME)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    with asked_hub(monkeypatch, NAME, FILES | {"README.md": b"#", "original/x.pth": b"x"}) as server:
        yield server


def snapshot(cache: Path) -> Path:
    return cache / "models--org--tiny" / "snapshots" / COMMIT


def test_a_model_comes_into_the_cache_in_the_hub_s_own_layout_or_as_plain_files(
    served: HubServer, tmp_path: Path
) -> None:
    seen: list[fetch.Progress] = []
    folder = fetch.fetch(SOURCE, None, tmp_path, show=seen.append)
    assert folder == snapshot(tmp_path) and manifest.verify(folder) == []
    assert {path.name for path in folder.iterdir()} == {*FILES, manifest.NAME}
    assert seen[-1].line.startswith("4/4 files, 158 B of 158 B")
    assert huggingface_hub.snapshot_download(
        NAME, cache_dir=tmp_path, local_files_only=True, allow_patterns="*.json"
    ) == str(folder)
    served.asked.clear()
    assert fetch.fetch(SOURCE, None, tmp_path) == folder and served.downloads == []
    assert fetch.kept(SOURCE, tmp_path) == folder
    plain = fetch.fetch(SOURCE, tmp_path / "to")
    assert {path.name for path in plain.iterdir()} == {*FILES, manifest.NAME}
    assert not any(path.is_symlink() for path in plain.iterdir()) and manifest.fits(plain, COMMIT)


def test_a_finished_file_is_neither_fetched_nor_read_again(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch.fetch(SOURCE, None, tmp_path)
    (snapshot(tmp_path) / manifest.NAME).rename(snapshot(tmp_path) / fetch_files.NOTES)
    read: list[Path] = []
    monkeypatch.setattr(manifest, "sha256_of", lambda path, _=None: str(read.append(path)))  # type: ignore[func-returns-value]
    served.asked.clear()
    fetch.fetch(SOURCE, None, tmp_path)
    assert served.downloads == [] and read == [] and manifest.fits(snapshot(tmp_path))


def test_wrong_bytes_are_fetched_again_and_never_kept(served: HubServer, tmp_path: Path) -> None:
    listing = sources.resolve(SOURCE)
    served.files["a.safetensors"] = b"x" * 100
    with pytest.raises(PenstockError, match="its hash is not the one of the source"):
        fetch_files.FilesFetch(listing, fetch_files.Layout(tmp_path)).run(lambda _: None)
    assert not (tmp_path / "a.safetensors").exists() and not list(tmp_path.rglob("*.incomplete"))
    served.files["a.safetensors"] = b"a" * 99
    with pytest.raises(PenstockError, match="the server has 99 bytes, and the list of files says 100"):
        fetch_files.FilesFetch(listing, fetch_files.Layout(tmp_path)).run(lambda _: None)
    served.files["a.safetensors"] = FILES["a.safetensors"]
    assert manifest.verify(fetch.fetch(SOURCE, tmp_path)) == []


def test_verify_finds_one_flipped_byte_and_the_next_fetch_replaces_it(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main.run(["fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{snapshot(tmp_path)}\n"
    path = (snapshot(tmp_path) / "a.safetensors").resolve()
    times = path.stat()
    path.write_bytes(b"a" * 99 + b"b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert main.run(["fetch", NAME, "--verify"]) == 1
    assert "a.safetensors: its SHA-256 is" in capsys.readouterr().err
    assert main.run(["fetch", NAME]) == 0 and main.run(["fetch", NAME, "--verify"]) == 0
    assert "every byte is right (4 files" in capsys.readouterr().out


def test_a_folder_that_differs_from_its_manifest_is_not_called_right(
    served: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "to"
    assert main.run(["fetch", NAME, "--to", str(folder)]) == 0
    before, path = manifest.read(folder), folder / "a.safetensors"
    os.utime(path)  # a copy of the same content
    assert main.run(["fetch", str(folder)]) == 0
    after = manifest.read(folder)
    assert before and after and (before.source, before.revision) == (after.source, after.revision)
    assert manifest.fits(folder)
    path.write_bytes(b"a" * 99 + b"b")
    cure = f"penstock fetch hf://{NAME}@{COMMIT} --to {folder} fetches these files again."
    monkeypatch.setattr(fetch_verb, "_SHOW_S", -1.0)
    for words in ([str(folder)], [str(folder), "--verify"], [NAME, "--to", str(folder), "--verify"]):
        capsys.readouterr()
        assert main.run(["fetch", *words]) != 0
        error = capsys.readouterr().err
        assert "a.safetensors: its SHA-256 is" in error and cure in error
        assert (" of 158 B, " in error) == ("--verify" in words), "it says how far it is"
    assert main.run(["fetch", f"hf://{NAME}@{COMMIT}", "--to", str(folder)]) == 0
    assert path.read_bytes() == FILES["a.safetensors"] and manifest.verify(folder) == []


def test_what_is_missing_short_newer_or_a_link_out_of_the_cache_does_not_fit(served: HubServer, tmp_path: Path) -> None:
    folder = fetch.fetch(SOURCE, None, tmp_path / "hub")
    counted: list[int] = []
    assert manifest.verify(folder, counted.append) == [] and sum(counted) == 158
    assert manifest.fits(folder, COMMIT) and not manifest.fits(folder, "c1")
    path = folder / "config.json"
    os.utime(path, ns=(0, 0))
    assert not manifest.fits(folder) and manifest.verify(folder) == []
    path.resolve().write_bytes(b"{")
    assert [str(problem) for problem in manifest.verify(folder)] == ["config.json: 1 bytes instead of 2"]
    path.unlink()
    assert [problem.message for problem in manifest.verify(folder)] == ["missing"] and not manifest.fits(folder)
    (tmp_path / "outside").write_bytes(b"{}")
    path.symlink_to(tmp_path / "outside")
    assert "link out of" in manifest.verify(folder)[0].message and not manifest.fits(folder)
    (folder / manifest.NAME).write_text("{")
    assert manifest.read(folder) is None and "has no MANIFEST.json" in manifest.verify(folder)[0].message


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("", '"" is no model'),  # an unset variable of a script, and not the current folder
        ("llama-3.1-8b", "Give its hub id: meta-llama/Meta-Llama-3.1-8B"),
        ("https://huggingface.co/org/tiny/tree/main", "Give its name: org/tiny."),
    ],
)
def test_a_word_that_is_no_source_is_explained(
    word: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"a")
    assert main.run(["fetch", word]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / manifest.NAME).exists()


@pytest.mark.parametrize("address", ["hub.example.com", "http://hub:port", "ftp://hub"])
def test_an_address_of_the_hub_that_is_none_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    for words in (["fetch", NAME], ["plan", NAME], ["up", NAME]):
        assert main.run(words) == 2
        assert f'cannot use HF_ENDPOINT "{address}"' in capsys.readouterr().err


def test_a_dry_run_says_files_and_bytes_and_writes_nothing(
    served: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["fetch", NAME, "--to", str(tmp_path / "to"), "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["event"], facts["missing_bytes"], facts["revision"]) == ("plan", 158, COMMIT)
    assert main.run(["pull", NAME, "--to", str(tmp_path / "to"), "--dry-run"]) == 0
    assert "4 files, 158 B" in capsys.readouterr().out and not (tmp_path / "to").exists()


def test_too_small_a_disk_is_refused_with_what_could_go(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for cache, name in ((tmp_path, "old"), (tmp_path / "hub", "older")):
        (old := cache / f"models--org--{name}" / "blobs").mkdir(parents=True)
        (old / "x").write_bytes(b"x" * 10)
    os.utime(old / "x", (1e9, 1e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9, total=10**12))
    with pytest.raises(UserError, match=r"3\.7 GiB of space are missing") as caught:
        fetch.fetch(SOURCE, None, tmp_path)
    assert "org/older (10 B), org/old (10 B)." in str(caught.value.detail) and not snapshot(tmp_path).exists()
    with pytest.raises(UserError) as caught:  # on the same disk, whatever kind of place it is
        fetch.fetch(SOURCE, tmp_path / "plain")
    assert "org/older (10 B)." in str(caught.value.detail)


def test_a_cache_that_cannot_be_written_is_used(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch.fetch(SOURCE, None, tmp_path)
    (folder / manifest.NAME).unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(fetch_lock.FetchLock, "_create", refuse)
    assert fetch.fetch(SOURCE, None, tmp_path) == folder
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="Read-only file system"):
        fetch.fetch(SOURCE, None, tmp_path)


def test_without_the_hub_what_was_fetched_before_is_used(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch.fetch(SOURCE, None, tmp_path)
    served.status = 503
    lines: list[str] = []
    assert fetch.fetch(SOURCE, None, tmp_path, say=lines.append) == folder and "fetched before" in lines[0]
    with pytest.raises(hub.HubError):
        fetch.fetch(SOURCE, None, tmp_path / "other")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a//b", "a\nb", "a\\b", "C:/x", "", "./a", "\x1b[2J"]
)
def test_unsafe_names_of_a_hub_are_refused(served: HubServer, tmp_path: Path, name: str) -> None:
    served.files = FILES | {name: b"{}"}
    with pytest.raises(UserError, match="unsafe name"):
        fetch.fetch(SOURCE, tmp_path)


def test_one_fetches_and_another_waits_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_lock, "_POLL_S", 0.005)
    lines: list[str] = []
    with fetch_lock.FetchLock(tmp_path, lines.append):
        other = fetch_lock.FetchLock(tmp_path, lines.append)
        waits = threading.Thread(target=lambda: other.__enter__().__exit__(), daemon=True)
        waits.start()
        until(lambda: lines, "the other waits")
    waits.join(5)
    assert f"waiting for process {os.getpid()}" in lines[0] and not (tmp_path / fetch_lock.NAME).exists()


def test_the_lock_of_a_process_that_died_or_stands_still_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_lock, "_POLL_S", 0.001)
    monkeypatch.setattr(fetch_lock, "_SETTLE_S", 0.001)
    monkeypatch.setattr(fetch_lock, "STALE_S", 0.01)
    for host in (fetch_lock._view(), "elsewhere 1"):
        owner = fetch_lock.Owner(host, 2**22 + 1, 1, "other")
        (tmp_path / fetch_lock.NAME).write_bytes(msgspec.json.encode(owner))
        with fetch_lock.FetchLock(tmp_path, lambda _: None) as lock:
            assert lock._is_ours()
    assert not (tmp_path / fetch_lock.NAME).exists()


@pytest.mark.processes
def test_of_two_processes_one_fetches(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with serving(NAME, FILES | {"a.safetensors": os.urandom(3_000_000)}) as server:
        environment |= {"HF_ENDPOINT": server.url, "NO_PROXY": "127.0.0.1", "PENSTOCK_HOME": str(tmp_path / "home")}
        environment["HF_HUB_CACHE"] = str(tmp_path / "hub")
        argv = [sys.executable, "-m", "penstock", "fetch", NAME]
        both = [subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [process.communicate()[0] for process in both]
        assert sorted(server.downloads) == sorted(FILES)
    folder = snapshot(tmp_path / "hub")
    assert outputs == [f"{folder}\n"] * 2 and manifest.verify(folder) == []


def test_a_rehearsal_refuses_pickled_weights_as_up_does(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with what an earlier rehearsal kept of the repository."""
    monkeypatch.setattr(Vllm, "missing", lambda self: None)
    monkeypatch.setattr(Vllm, "version", lambda self: "0.33.0")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 64}
    served.files = {"config.json": json.dumps(config).encode(), "pytorch_model.bin": b"x" * 100}
    words = ["up", NAME, "--engine", "vllm", "--json", "--set", "gateway.port=0", "--set", f"cache.weights={tmp_path}"]
    errors = []
    for more in (["--dry-run"], ["--dry-run"], []):
        assert main.run([*words, *more]) == 2
        errors.append(json.loads(capsys.readouterr().out.splitlines()[-1])["error"])
    assert errors[0] == errors[1] == errors[2]
    assert "Its weights are pickled (pytorch_model.bin)" in errors[0]["detail"] and errors[0]["hint"]
    assert served.downloads.count("pytorch_model.bin") == 0
    assert main.run([*words, "--dry-run", "--set", "cache.allow_pickle=true"]) == 0


def test_errors_say_what_is_missing(served: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["penstock-demo", "--verify"], 'cannot verify "penstock-demo": it is a part of penstock'),
        ([f"{NAME}:Q4_K_M"], 'it has no GGUF file "Q4_K_M"'),
        ([f"{NAME}@v9"], "Check the name and the revision."),
    ):
        assert main.run(["fetch", *words]) == 2
        assert expected in capsys.readouterr().err


# ---- the program that fetches into a volume --------------------------------------------------------------------------


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
