"""Facts of a model from a folder, the catalogue, and a hub on loopback that serves ranges, redirects and refusals."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_server import LoopbackHandler, LoopbackServer, running

from penstock.errors import UserError
from penstock.models import StoredTensor, catalog, facts, files

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
NAME = "someone/tiny"
CATALOGUED = catalog.model("llama-3.1-70b").hf_id


def shard(*tensors: tuple[str, str, tuple[int, ...], int]) -> bytes:
    """A safetensors file: (name, dtype, shape, bytes) of each tensor, without the data."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, n_bytes in tensors:
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    header = json.dumps(rows).encode()
    return struct.pack("<Q", len(header)) + header


ONE = shard(("embed", "BF16", (100, 64), 12_800), ("norm", "F32", (64,), 256))
TWO = shard(("head", "BF16", (100, 64), 12_800))
INDEX = {
    "metadata": {"total_size": 25_856},
    "weight_map": {"embed": "a.safetensors", "norm": "a.safetensors", "head": "b.safetensors"},
}


class Hub(LoopbackServer):
    """A hub: files by path ("name/resolve/main/x"), what was asked, and how it misbehaves."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.token: str | None = None
        self.n_broken = 0
        self.asked: list[tuple[str, str | None, str | None]] = []

    def add(self, name: str, **files: bytes) -> None:
        self.files |= {f"{name}/resolve/main/{path.replace('__', '.')}": body for path, body in files.items()}

    @property
    def paths(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _, _ in self.asked]


class _Handler(LoopbackHandler):
    protocol_version = "HTTP/1.0"
    server: Hub

    def do_GET(self) -> None:
        hub, path = self.server, self.path.lstrip("/")
        token, wanted = self.headers.get("Authorization"), self.headers.get("Range")
        hub.asked.append((path, token, wanted))
        if hub.n_broken:
            hub.n_broken -= 1
            return self.send(500)
        if path in hub.moved:
            return self.send(302, headers={"Location": hub.moved[path]})
        if path in hub.refused or (hub.token and token != f"Bearer {hub.token}"):
            status, code = hub.refused.get(path, (401, "GatedRepo"))
            return self.send(status, headers={"X-Error-Code": code, "X-Error-Message": "ask first"})
        if path not in hub.files:
            return self.send(404, headers={"X-Error-Code": "EntryNotFound"})
        end = int(wanted.removeprefix("bytes=0-")) + 1 if wanted else None
        return self.send(206 if wanted else 200, hub.files[path][:end], {"X-Repo-Commit": "c0ffee"})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that HF_ENDPOINT points to, with an empty cache, no token, not offline."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (path / name.replace("__", ".")).write_bytes(body)
    return path


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_folder_with_only_a_config_is_enough(tmp_path: Path) -> None:
    read = facts.read(str(folder(tmp_path, config__json=as_json(CONFIG))))
    assert (read.config, read.tensors, read.index_bytes, read.notes) == (CONFIG, None, None, ())
    assert read.source == f"{tmp_path}: config.json alone"
    assert facts.read(str(tmp_path / "config.json")).config == CONFIG
    # An index without all its shards gives the bytes.
    (tmp_path / files.INDEX).write_bytes(as_json(INDEX))
    none = facts.read(str(tmp_path))
    one = facts.read(str(folder(tmp_path, a__safetensors=ONE)))
    assert (none.tensors, none.index_bytes, len(none.notes)) == (None, 25_856, 0)
    assert (one.tensors, one.index_bytes, len(one.notes)) == (None, 25_856, 1)


def test_a_folder_has_every_tensor_of_every_shard_that_counts(tmp_path: Path) -> None:
    """Those of the index, where there is one; Mistral's second copy of the weights is left out."""
    path = folder(tmp_path / "m", config__json=as_json(CONFIG), a__safetensors=ONE, b__safetensors=TWO)
    read = facts.read(str(path))
    assert read.tensors == (
        StoredTensor("embed", "BF16", (100, 64)),
        StoredTensor("norm", "F32", (64,)),
        StoredTensor("head", "BF16", (100, 64)),
    )
    assert read.index_bytes == 25_856 and read.source.endswith(": 2 safetensors headers")
    (path / files.INDEX).write_bytes(as_json({**INDEX, "weight_map": {"embed": "a.safetensors"}}))
    assert [tensor.name for tensor in facts.read(str(path)).tensors or ()] == ["embed", "norm"]
    path = folder(tmp_path / "n", config__json=as_json(CONFIG), a__safetensors=ONE, consolidated__safetensors=ONE)
    assert facts.read(str(path)).index_bytes == 13_056
    (path / "a.safetensors").unlink()
    assert facts.read(str(path)).index_bytes == 13_056


def test_a_shard_that_is_none_has_a_note_and_is_not_counted(tmp_path: Path) -> None:
    headers = (b"not json!", b"[]", b'{"a": 1}', b"{", b'{"a": {"dtype": "F32", "shape": [1]}}')
    files = [struct.pack("<Q", len(header)) + header for header in headers]
    for body in (b"version https://git-lfs.github.com/spec/v1\n", b"", *files):
        read = facts.read(str(folder(tmp_path, config__json=as_json(CONFIG), a__safetensors=body)))
        assert read.tensors is None
        assert "could not be read" in read.notes[0] and "Git LFS" in read.notes[0]


def test_models_of_the_catalogue_and_the_bundled_one_need_no_network() -> None:
    read = facts.read("llama-3.1-70b")
    assert read.config["num_hidden_layers"] == 80
    assert (read.index_bytes, read.hub_id) == (141_107_412_992, CATALOGUED)
    read = facts.read("penstock-demo")
    assert read.config["architectures"] == ["LlamaForCausalLM"]
    assert read.tensors and read.index_bytes and read.index_bytes < 10_000_000


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    hints = {"llama-3.1-70": "Did you mean llama-3.1-70b, ", "./nowhere/config.json": "Check the path"}
    hints |= {"a/b/c": "Check the path", f"{tmp_path}/m.gguf": "Give the folder", "gpt4": "`penstock plan --list`"}
    hints |= {"llama-3": "llama-3.1-8b, llama-3.1-70b, llama-3.1-405b", "llama-3-8b": "Did you mean llama-3.1-8b?"}
    hints |= {"qwen": "and 16 more?"}
    for reference, hint in hints.items():
        with pytest.raises(UserError) as caught:
            facts.read(reference)
        assert hint in str(caught.value.hint)


def sharded(served: Hub, name: str = NAME) -> None:
    served.add(name, config__json=as_json(CONFIG), a__safetensors=ONE, b__safetensors=TWO)
    served.files[f"{name}/resolve/main/{files.INDEX}"] = as_json(INDEX)


@pytest.mark.loopback
def test_a_hub_repository_is_read_by_its_headers_and_a_second_time_by_its_config(served: Hub, home: Path) -> None:
    sharded(served)
    first = facts.read(NAME)
    assert (first.config, first.index_bytes, first.hub_id, first.notes) == (CONFIG, 25_856, NAME, ())
    assert [tensor.name for tensor in first.tensors or ()] == ["embed", "norm", "head"]
    assert all(wanted for path, _, wanted in served.asked if path.endswith(".safetensors"))  # never a whole shard
    served.asked.clear()
    assert facts.read(NAME) == first
    assert served.paths == ["config.json"]
    (kept,) = (home / "cache" / "facts").iterdir()
    kept.write_bytes(b"{")  # a damaged copy is read anew
    assert facts.read(NAME) == first


@pytest.mark.loopback
def test_the_old_format_gives_bytes_and_headers_that_could_not_be_read_are_told_and_asked_again(served: Hub) -> None:
    served.add("someone/old", config__json=as_json(CONFIG))
    served.files["someone/old/resolve/main/pytorch_model.bin.index.json"] = as_json(INDEX)
    read = facts.read("someone/old")
    assert (read.tensors, read.index_bytes, read.notes) == (None, 25_856, ())
    sharded(served)
    served.refused[f"{NAME}/resolve/main/b.safetensors"] = (429, "")
    found = facts.read(NAME)
    assert (found.tensors, found.index_bytes) == (None, 25_856)
    assert "too many requests" in found.notes[0]
    served.refused.clear()
    assert facts.read(NAME).tensors


@pytest.mark.loopback
def test_the_token_goes_to_the_hub_and_to_no_other_host(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    served.token = "hf_secret"
    served.add(NAME, model__safetensors=ONE)
    served.files["renamed/config.json"] = as_json(CONFIG)
    served.moved[f"{NAME}/resolve/main/config.json"] = "/renamed/config.json"
    with running(Hub()) as other:
        other.files["blob"] = ONE
        served.moved[f"{NAME}/resolve/main/model.safetensors"] = f"{other.url}/blob"
        assert facts.read(NAME).index_bytes == 13_056
    assert {token for _, token, _ in served.asked} == {"Bearer hf_secret"}
    assert [token for _, token, _ in other.asked] == [None]
    assert other.asked[0][2] is not None  # the range goes along


@pytest.mark.loopback
def test_a_hub_that_breaks_is_asked_again_and_then_what_was_kept_is_used(served: Hub) -> None:
    with pytest.raises(UserError, match="no such file"):
        facts.read(NAME)
    served.asked.clear()
    sharded(served)
    served.n_broken = 1
    kept = facts.read(NAME)
    assert kept.tensors and served.paths[:2] == ["config.json", "config.json"]
    served.n_broken = 2
    read = facts.read(NAME)
    assert read.tensors == kept.tensors
    assert "HTTP 500; using what an earlier plan read" in read.notes[0]


@pytest.mark.loopback
def test_a_gated_model_is_explained_or_taken_from_the_catalogue(served: Hub) -> None:
    served.token = "another"
    with pytest.raises(UserError, match="it is gated") as caught:
        facts.read(NAME)
    assert caught.value.hint == "Accept the licence on its hub page, then set HF_TOKEN."
    assert caught.value.exit_code == 2 and "ask first" in str(caught.value.detail)
    found = facts.read(CATALOGUED)
    assert (found.reference, found.config["num_hidden_layers"]) == (CATALOGUED, 80)
    assert "it is gated; using the catalogue's copy" in found.notes[0]


def test_offline_nothing_is_asked_and_the_hubs_own_cache_is_used(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(served)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert facts.read(CATALOGUED).notes[0].startswith("HF_HUB_OFFLINE is set; using the catalogue's copy")
    with pytest.raises(UserError, match="nothing of it is kept"):
        facts.read(NAME)
    assert served.asked == []
    with pytest.raises(UserError) as caught:
        facts.read("meta-llama/Llama-3.3-70B-Instruct")
    assert "Did you mean llama-3.1-70b?" in str(caught.value.hint)
    cache = tmp_path / "hf" / "models--someone--tiny"
    folder(cache / "refs", main=b"abc123\n")
    folder(cache / "snapshots" / "abc123", config__json=as_json(CONFIG), model__safetensors=ONE)
    found = facts.read(NAME)
    assert (found.index_bytes, found.hub_id) == (13_056, NAME)
    assert "using the hub's cache" in found.notes[0]


@pytest.mark.loopback
def test_a_repository_that_differs_in_training_alone_has_the_layers_of_the_catalogue(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.token = "another"  # gated, as Meta's are
    for name in ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"):
        read = facts.read(name)
        assert (read.reference, read.hub_id, read.config["num_hidden_layers"]) == (name, name, 80)
        assert "using the catalogue's copy of meta-llama/Meta-Llama-3.1-70B" in read.notes[0]
        assert "with the same layers; its context may differ" in read.notes[1]
    assert facts.read("llama-3.1-70b-instruct").config == facts.read("llama-3.1-70b").config
    for name in ("unsloth/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct-FP8"):
        with pytest.raises(UserError):
            facts.read(name)


@pytest.mark.loopback
def test_no_network_is_explained(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(UserError, match="could not reach the hub") as caught:
        facts.read(NAME)
    assert caught.value.is_retryable
    assert facts.read(CATALOGUED).config["num_hidden_layers"] == 80


@pytest.mark.loopback
def test_an_index_cannot_lead_out_of_the_folder(served: Hub) -> None:
    served.add(NAME, config__json=as_json(CONFIG))
    index = {"weight_map": {"a": "../../x.safetensors", "b": "/etc/y.safetensors", "c": 5}}
    served.files[f"{NAME}/resolve/main/{files.INDEX}"] = as_json(index)
    assert facts.read(NAME).tensors is None
    assert not [path for path in served.paths if path in ("x.safetensors", "y.safetensors")]


def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    for content in (b"{", b"[" * 100_000, b"\x00", b'{"a": ' + b"1" * 5000 + b"}", b"[1, 2]", b"7", b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match="it is not"):
            facts.read_folder(tmp_path, "m")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match="could not read"):
        facts.read_folder(tmp_path, "m")
