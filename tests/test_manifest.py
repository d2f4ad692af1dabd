"""MANIFEST.json of a folder of weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.models import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hub's cache with one snapshot."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "c0"
    (blobs := tmp_path / "models--org--tiny" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "e1").write_bytes(b"weights")
    (snapshot / "a.safetensors").symlink_to("../../blobs/e1")
    (snapshot / "config.json").write_bytes(b"{}")
    manifest.write(snapshot, manifest.of_folder(snapshot, "hf://org/tiny", "c0", ["a.safetensors", "config.json"]))
    return snapshot


def test_a_whole_folder_fits_and_has_the_right_bytes(folder: Path) -> None:
    assert manifest.fits(folder) and manifest.fits(folder, "c0") and not manifest.fits(folder, "c1")
    counted: list[int] = []
    assert manifest.verify(folder, counted.append) == [] and sum(counted) == 9
    facts = manifest.read(folder)
    assert facts is not None and (facts.source, facts.n_bytes) == ("hf://org/tiny", 9)


def test_what_is_missing_short_newer_or_a_link_out_of_the_cache_does_not_fit(folder: Path, tmp_path: Path) -> None:
    path = folder / "config.json"
    os.utime(path, ns=(0, 0))
    assert not manifest.fits(folder) and manifest.verify(folder) == []
    path.write_bytes(b"{")
    assert [str(problem) for problem in manifest.verify(folder)] == ["config.json: 1 bytes instead of 2"]
    path.unlink()
    assert [problem.message for problem in manifest.verify(folder)] == ["missing"] and not manifest.fits(folder)
    (tmp_path.parent / "outside").write_bytes(b"{}")
    path.symlink_to(tmp_path.parent / "outside")
    assert "link out of" in manifest.verify(folder)[0].message and not manifest.fits(folder)
    (folder / manifest.NAME).write_text("{")
    assert manifest.read(folder) is None and "has no MANIFEST.json" in manifest.verify(folder)[0].message
    (folder / manifest.NAME).unlink()
    assert manifest.read(folder) is None and not manifest.fits(folder)
