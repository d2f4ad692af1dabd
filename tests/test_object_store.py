"""Models in object stores: a store on loopback is listed and read in ranges."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_server import running
from object_server import ObjectServer
from samples import deployment

from penstock.deployment.doctor.model import check_model
from penstock.errors import PenstockError, UserError
from penstock.models import facts, files, kept, manifest, object_store, sources
from penstock.models.fetch import fetch, locate
from penstock.models.part_file import PartFile

TENSORS = bytes(range(256)) * 4
OBJECTS = {
    "team/tiny/config.json": b"{}",
    "team/tiny/model.safetensors": TENSORS,
    "team/tiny/README.md": b"words",
    "team/tiny-2/config.json": b"of another model",
}
SOURCE = sources.parse("s3://bucket/team/tiny")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    server = ObjectServer("bucket", dict(OBJECTS))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(object_store, "_RETRY", {"max_retries": 0})
    monkeypatch.setattr(object_store, "_RANGE_BYTES", 300)
    with running(server):
        yield server


def with_manifest(server: ObjectServer, **changes: Any) -> str:
    digest = hashlib.sha256(TENSORS).hexdigest()
    entry = {"size": len(TENSORS), "sha256": digest, "mtime_ns": 1} | changes
    text = json.dumps({"source": "x", "revision": "", "files": {"model.safetensors": entry}})
    server.objects["team/tiny/MANIFEST.json"] = text.encode()
    return digest


def test_a_prefix_is_listed_with_sizes_and_one_name_for_its_state(store: ObjectServer) -> None:
    listing = sources.resolve(SOURCE)
    assert {name: file.size for name, file in listing.files.items()} == {"config.json": 2, "model.safetensors": 1024}
    assert len(listing.commit) == 40 and listing.commit == sources.resolve(SOURCE).commit
    store.objects["team/tiny/config.json"] = b"[]"
    assert sources.resolve(SOURCE).commit != listing.commit


def test_hashes_come_from_the_manifest_next_to_the_files(store: ObjectServer) -> None:
    digest = with_manifest(store)
    files = sources.resolve(SOURCE).files
    assert (files["model.safetensors"].sha256, files["config.json"].sha256) == (digest, None)
    assert "MANIFEST.json" not in files
    with_manifest(store, sha256="../../evil")
    assert sources.resolve(SOURCE).files["model.safetensors"].sha256 is None
    with_manifest(store, size=7)
    with pytest.raises(UserError, match=r"1 of its files do not fit its MANIFEST\.json"):
        sources.resolve(SOURCE)


def test_a_file_comes_in_ranges_after_what_is_there(store: ObjectServer, tmp_path: Path) -> None:
    listing, path, pieces = sources.resolve(SOURCE), tmp_path / "part", list[int]()
    path.write_bytes(TENSORS[:100])
    part = PartFile(path, pieces.append)
    object_store.fetch_file(listing, "model.safetensors", part)
    assert path.read_bytes() == TENSORS and pieces == [300, 300, 300, 24]
    assert part.sha256 == hashlib.sha256(TENSORS).hexdigest()
    assert store.ranges == [
        f"GET team/tiny/model.safetensors bytes={first}-{min(first + 299, 1023)}" for first in (100, 1000, 400, 700)
    ]
    object_store.fetch_file(listing, "model.safetensors", part)
    assert path.read_bytes() == TENSORS and len(pieces) == 4


def test_a_file_that_is_changed_meanwhile_is_not_mixed_and_a_store_that_fails_is_asked_again(
    store: ObjectServer, tmp_path: Path
) -> None:
    listing, part = sources.resolve(SOURCE), PartFile(tmp_path / "part")
    store.n_failures = 1
    with pytest.raises(PenstockError, match="did not answer as expected") as caught:
        object_store.fetch_file(listing, "model.safetensors", part)
    assert caught.value.is_retryable
    object_store.fetch_file(listing, "model.safetensors", part)
    assert part.path.read_bytes() == TENSORS
    store.objects["team/tiny/model.safetensors"] = TENSORS[::-1]
    with pytest.raises(UserError, match="a file was changed while it was fetched"):
        object_store.fetch_file(listing, "model.safetensors", PartFile(tmp_path / "other"))
    assert (tmp_path / "other").read_bytes() == b""


def test_what_the_store_refuses_is_explained(store: ObjectServer) -> None:
    for name in ("s3://bucket/team/other", "s3://other/team"):
        with pytest.raises(UserError, match=r"there is nothing|no such file or bucket"):
            sources.resolve(sources.parse(name))
    store.status = 403
    with pytest.raises(UserError, match="refuses these credentials") as caught:
        sources.resolve(SOURCE)
    assert "AWS_PROFILE" in str(caught.value.hint) and "hidden" not in str(caught.value.detail)


def test_an_address_with_credentials_or_dots_is_refused_and_a_missing_account_or_package_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("s3://key:hidden@bucket/a", "az://c/a?sig=hidden", "gs://b/../c", "s3://"):
        with pytest.raises(UserError, match="it is no place in an object store") as caught:
            object_store.resolve(sources.parse(name))
        assert "hidden" not in caught.value.message
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for name in ("az://container/tiny", "gs://bucket/tiny"):
        assert object_store._store(sources.parse(name)).prefix == "tiny"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with pytest.raises(UserError, match="no storage account is named"):
        object_store.resolve(sources.parse("az://container/tiny"))
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UserError, match="the package obstore is not installed") as caught:
        object_store.resolve(SOURCE)
    assert caught.value.hint == 'pip install "penstock[objects]"'


def test_keys_and_region_come_from_the_files_of_the_aws_program(
    store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-1\n")
    options = {"access_key_id": "a", "secret_access_key": "b%c", "region": "eu-west-1"}
    assert object_store._aws_profile() == options
    assert len(sources.resolve(SOURCE).files) == 2
    (tmp_path / "credentials").write_text("no section")
    (tmp_path / "config").unlink()
    assert object_store._aws_profile() == {}


def test_a_model_of_a_store_is_fetched_once_and_again_when_it_changed(store: ObjectServer) -> None:
    with_manifest(store)
    folder = fetch(SOURCE)
    assert manifest.fits(folder) and (folder / "model.safetensors").read_bytes() == TENSORS
    n_asked = len(store.ranges)
    assert fetch(SOURCE) == folder and len(store.ranges) == n_asked
    (row,) = (row for row in kept.every() if row.kind == "folder")
    assert (row.name, row.state, row.is_verified) == ("s3://bucket/team/tiny", "whole", True)
    store.objects["team/tiny/config.json"] = b"[]"
    assert (fetch(SOURCE) / "config.json").read_bytes() == b"[]"


def test_a_model_of_a_store_is_planned_and_checked_without_its_weights(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    store.objects["team/tiny/config.json"] = (files.BUNDLED / "config.json").read_bytes()
    wanted = deployment("s3://bucket/team/tiny")
    assert check_model(wanted).findings[0].found == "s3://bucket/team/tiny can be fetched: 1.6 KiB"
    whole = facts.read(wanted.model)
    assert (whole.index_bytes, whole.config["num_hidden_layers"], whole.reference) == (1024, 4, wanted.model)
    planned = facts.read_remote(wanted.model, None)
    assert planned is not None and not any("model.safetensors" in words for words in store.ranges)
    folder = locate(wanted)
    assert planned["safetensors"][1].path == str(folder), "where nodes look for it, and its version"
    assert check_model(wanted).findings[0].found.endswith("in the cache of this machine")
    store.objects.clear()
    assert check_model(deployment("s3://bucket/other")).findings[0].state == "bad"
