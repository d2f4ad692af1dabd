"""The models on this machine: what is listed, and what a removal takes away. Bytes here are those of the names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from samples import deployment, end, run_folder

from penstock.cli import main
from penstock.cli import models as verb
from penstock.errors import UserError
from penstock.models import kept, manifest
from penstock.models.kept import Kept, Use


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """A hub's cache: org/tiny in two revisions that share a blob. PENSTOCK_HOME is an empty folder."""
    path = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(path))
    add(path, "tiny", "c0ffee", {"model.safetensors": "shared", "config.json": "first"})
    add(path, "tiny", "c1c1c1", {"model.safetensors": "shared", "config.json": "second!"})
    refs = path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c1c1c1")
    return path


def add(cache: Path, name: str, commit: str, files: dict[str, str], is_noted: bool = True) -> Path:
    """A revision in a cache. Each file's text is also the name of its blob."""
    repository = cache / f"models--org--{name}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file, text in files.items():
        blob = repository / "blobs" / text
        if not blob.exists():
            blob.write_text(text)
        (snapshot / file).symlink_to(f"../../blobs/{text}")
    if is_noted:
        manifest.write(snapshot, manifest.of_folder(snapshot, f"hf://org/{name}", commit, [*files]))
    return snapshot


def add_folder(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.safetensors").write_text("weights")
    (folder / "mine.txt").write_text("of the user")
    manifest.write(folder, manifest.of_folder(folder, "s3://bucket/tiny", "", ["sub/a.safetensors"]))
    kept.note(folder)
    return folder


def fetched() -> list[Kept]:
    return [row for row in kept.every() if row.kind != "bundled"]


def test_every_revision_is_listed_with_its_size_and_state(cache: Path) -> None:
    add(cache, "plain", "d0", {"model.safetensors": "whole"}, is_noted=False)
    add(cache, "config-only", "d0", {"config.json": "{}"}, is_noted=False)
    os.utime(cache / "models--org--plain" / "blobs" / "whole", (4e9, 1e9))
    rows, snapshots = fetched(), cache / "models--org--tiny" / "snapshots"
    manifests = [(snapshots / commit / manifest.NAME).stat().st_size for commit in ("c0ffee", "c1c1c1")]
    assert [(row.name, row.revision, row.n_bytes, row.state, row.is_verified) for row in rows] == [
        ("org/config-only", "d0", 2, "part", False),
        ("org/plain", "d0", 5, "whole", False),
        ("org/tiny", "c0ffee", 11 + manifests[0], "whole", True),
        ("org/tiny", "c1c1c1", 13 + manifests[1], "whole", True),
    ]
    assert rows[1].used_at == 4e9
    assert kept.total_bytes(rows) == 2 + 5 + len("sharedfirstsecond!")
    assert [row.name for row in kept.every() if row.kind == "bundled"] == ["penstock-demo"]


def test_what_is_half_fetched_or_changed_is_said_to_be(cache: Path) -> None:
    add(cache, "half", "d0", {"model.safetensors": "part"}, is_noted=False)
    (cache / "models--org--half" / "blobs" / "x.incomplete").write_text("12345")
    begun = cache / "models--org--begun" / "blobs"
    begun.mkdir(parents=True)
    (begun / "y.incomplete").write_text("123")
    (cache / "models--org--tiny" / "blobs" / "second!").write_text("longer than before")
    shards = add(cache, "shards", "d0", {"m-1.safetensors": "one"}, is_noted=False)
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))

    def states() -> dict[str, str]:
        return {f"{row.name.removeprefix('org/')} {row.revision}": row.state for row in fetched()}

    tiny = {"tiny c0ffee": "whole", "tiny c1c1c1": "changed"}
    assert states() == {"half d0": "part", "begun ": "part", "shards d0": "part", **tiny}
    assert [row.n_bytes for row in fetched() if row.name in ("org/begun", "org/half")] == [3, 9]
    (shards / "m-2.safetensors").write_text("two")
    assert states()["shards d0"] == "whole"
    kept.remove(kept.choose(fetched(), "org/begun"))
    assert not begun.parent.exists()


def test_removing_a_revision_keeps_the_blobs_of_the_others_and_removing_a_model_nothing(cache: Path) -> None:
    repository, locks = cache / "models--org--tiny", cache / ".locks" / "models--org--tiny"
    locks.mkdir(parents=True)
    (repository / "snapshots" / "main").symlink_to("c1c1c1")
    assert kept.remove(kept.choose(fetched(), "org/tiny@c1c1")) == len("second!")
    assert {path.name for path in (repository / "blobs").iterdir()} == {"shared", "first"}
    assert [path.name for path in (repository / "snapshots").iterdir()] == ["c0ffee"]
    assert not (repository / "refs" / "main").exists()
    assert manifest.fits(repository / "snapshots" / "c0ffee")
    assert kept.remove(kept.choose(fetched(), "hf://org/tiny")) == len("sharedfirst")
    assert fetched() == [] and not repository.exists() and not locks.exists()


def test_no_removal_follows_a_link_out_of_the_cache(cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "d0").mkdir(parents=True)
    (outside / "d0" / "model.safetensors").write_text("precious")
    repository = cache / "models--org--tiny"
    (repository / "snapshots" / "c0ffee" / "evil").symlink_to(outside)
    (repository / "snapshots" / "c0ffee" / "evil.safetensors").symlink_to(outside / "d0" / "model.safetensors")
    (cache / "models--org--linked").symlink_to(outside)
    assert {row.name for row in fetched()} == {"org/tiny"}
    kept.remove(kept.choose(fetched(), "org/tiny@c0ffee"))
    (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(tmp_path / "blobs")
    add(cache, "tiny", "c2", {"a.safetensors": "more"})
    with pytest.raises(UserError, match="blobs is a link to"):
        kept.remove(kept.choose(fetched(), "org/tiny@c2"))
    kept.remove(kept.choose(fetched(), "org/tiny"))
    assert (outside / "d0" / "model.safetensors").read_text() == "precious"
    assert (tmp_path / "blobs" / "shared").exists() and not repository.exists()


def test_a_folder_loses_what_was_fetched_and_nothing_else(cache: Path, tmp_path: Path, home: Path) -> None:
    folder = add_folder(tmp_path / "weights")
    own = add_folder(home / "models" / "store--bucket--tiny")
    (own / "mine.txt").unlink()
    assert {row.place for row in fetched() if row.kind == "folder"} == {str(folder), str(own)}
    with pytest.raises(UserError, match="it is in 2 places") as caught:
        kept.choose(fetched(), "s3://bucket/tiny")
    assert caught.value.detail == "\n".join(sorted(map(str, (folder, own))))
    for place in (folder, own):
        assert kept.remove(kept.choose(fetched(), str(place))) == 7
    assert [path.name for path in folder.iterdir()] == ["mine.txt"] and not own.exists()
    assert {row.kind for row in fetched()} == {"cache"}


def test_an_unfinished_fetch_into_a_folder_is_listed_and_removed(cache: Path, tmp_path: Path) -> None:
    (parts := tmp_path / "to" / ".penstock-parts").mkdir(parents=True)
    (parts / "x.penstock.incomplete").write_text("123")
    (parts.parent / "config.json").write_text("{}")
    (parts.parent / ".penstock-fetched.json").write_text('{"config.json": {}, "../../other": {}}')
    (other := tmp_path / "other").write_text("not ours")
    kept.note(parts.parent)
    (row,) = (row for row in fetched() if row.kind == "folder")
    assert (row.state, row.n_bytes, row.name) == ("part", 5, str(parts.parent))
    assert kept.remove([row]) == 5 and not parts.parent.exists() and other.exists()


@pytest.mark.parametrize(
    ("name", "message", "detail"),
    [
        ("org/other", "no such model is on this machine", None),
        ("org/tiny@dd", "no such model is on this machine", "Revisions that are here: c0ffee, c1c1c1."),
        ("penstock-demo", "it is a part of penstock", None),
    ],
)
def test_what_cannot_be_removed_is_explained(cache: Path, name: str, message: str, detail: str | None) -> None:
    with pytest.raises(UserError, match=message) as caught:
        kept.choose(kept.every(), name)
    assert caught.value.detail == detail


def test_what_is_used_or_being_fetched_is_not_removed(cache: Path) -> None:
    rows, snapshots = kept.choose(fetched(), "org/tiny@c0"), cache / "models--org--tiny" / "snapshots"
    kept.check_unused(rows, [Use("qwen", str(snapshots / "c1c1c1"))])
    for path in (snapshots / "c0ffee", snapshots / "c0ffee" / "model.safetensors"):
        with pytest.raises(UserError, match='deployment "qwen" uses it'):
            kept.check_unused(rows, [Use("qwen", str(path))])
    (lock := snapshots.parent / ".penstock-fetch.lock").write_text("")
    with pytest.raises(UserError, match="it is being fetched"):
        kept.check_unused(rows, [])
    kept.check_unused(rows, [], now=lock.stat().st_mtime + 61)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(("models", *words))
    return code, *capsys.readouterr()


def test_the_verb_lists_and_removes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys)
    assert code == 0 and "org/tiny" in out and "whole, verified" in out and "penstock-demo" in out
    code, out, _ = call(capsys, "rm", "org/tiny@c0", "--yes")
    assert (code, out) == (0, "removed org/tiny: 5 B are free\n")
    code, out, _ = call(capsys, "rm", "org/tiny", "--yes", "--json")
    assert code == 0 and json.loads(out)["n_bytes"] == 13
    assert [row["name"] for row in json.loads(call(capsys, "--json")[1])] == ["penstock-demo"]


def test_the_verb_asks_on_a_terminal_and_refuses_elsewhere(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, "rm", "org/tiny")
    assert (code, out) == (2, "") and "this is no terminal" in err and "Add --yes" in err
    asked: list[str] = []
    monkeypatch.setattr(verb, "_confirmed", lambda question: asked.append(question))
    assert call(capsys, "rm", "org/tiny") == (1, "", "nothing was removed\n")
    assert asked[0].startswith("Remove org/tiny (2 revisions), ") and len(fetched()) == 2
    assert call(capsys, "rm")[0] == 2 and call(capsys, "list", "org/tiny")[0] == 2


def test_the_verb_refuses_what_a_running_deployment_uses(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(deployment())
    plan = json.loads((run.path / "plan.json").read_text())
    plan["model"]["path"] = str(cache / "models--org--tiny" / "snapshots" / "c0ffee")
    (run.path / "plan.json").write_text(json.dumps(plan))
    code, _, err = call(capsys, "rm", "org/tiny", "--yes")
    assert code == 2 and f'deployment "{run.name}" uses it' in err and f"penstock down {run.name}" in err
    assert f"used by {run.name}" in call(capsys)[1]
    end(run)
    assert call(capsys, "rm", "org/tiny", "--yes")[0] == 0


def test_a_folder_of_fetch_to_is_listed(cache: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_text("weights")
    assert main.run(("fetch", str(source), "--to", str(tmp_path / "to"))) == 0
    (row,) = (row for row in fetched() if row.kind == "folder")
    assert (row.place, row.n_bytes, row.state) == (str(tmp_path / "to"), 9, "whole")
