"""MANIFEST.json: what a folder of weights must hold, and whether it does.

It is written last, by rename: a folder with one was whole and had the right hashes at that time. `fits` compares sizes
and times (milliseconds for 200 files); `verify` reads every byte. In a hub's cache it is in the snapshot's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from penstock.errors import Problem
from penstock.models import hub
from penstock.paths import write_atomically

NAME = "MANIFEST.json"
_N_THREADS = 4
_BLOCK_BYTES = 4 << 20


class Entry(msgspec.Struct, frozen=True):
    """A file: bytes, SHA-256 (hexadecimal), and the time of its last change in nanoseconds."""

    size: int
    sha256: str
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True):
    """`source` as in sources.Source ("hf://org/name"), `revision` the commit, files by their names in the folder."""

    source: str
    revision: str
    files: dict[str, Entry]

    @property
    def n_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder; None without one, or when it is damaged."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def write(folder: Path, manifest: Manifest) -> None:
    """Put it into the folder, whole. The caller has written, synced and checked the files before."""
    write_atomically(folder / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def entry_of(path: Path, sha256: str) -> Entry:
    facts = path.stat()
    return Entry(facts.st_size, sha256, facts.st_mtime_ns)


def of_folder(folder: Path, source: str, revision: str, names: Sequence[str]) -> Manifest:
    """The manifest of files that are there, by reading them all."""
    with ThreadPoolExecutor(_N_THREADS) as pool:
        hashes = list(pool.map(lambda name: sha256_of(folder / name), names))
    entries = {name: entry_of(folder / name, digest) for name, digest in zip(names, hashes, strict=True)}
    return Manifest(source, revision, entries)


def fits(folder: Path, revision: str | None = None) -> bool:
    """Whether a folder has a manifest (of that revision) and every file in it with its size and time. Reads no file."""
    manifest = read(folder)
    if manifest is None or (revision is not None and manifest.revision != revision):
        return False
    return not any(is_changed(folder, name, entry) for name, entry in manifest.files.items())


def verify(folder: Path, progress: Callable[[int], None] | None = None) -> list[Problem]:
    """What is wrong with the files of a folder that has a manifest, by reading every byte; `progress`: bytes read."""
    manifest = read(folder)
    if manifest is None:
        return [Problem("", f"{folder} has no {NAME}", "penstock fetch writes it")]
    with ThreadPoolExecutor(_N_THREADS) as pool:
        words = pool.map(lambda item: _wrong(folder, item[0], item[1], progress), manifest.files.items())
        return [Problem(name, word) for name, word in zip(manifest.files, words, strict=True) if word]


def distrust(folder: Path, names: Sequence[str]) -> None:
    """Let the folder fit no longer, so that the next fetch reads these files, and replaces those with wrong bytes."""
    manifest = read(folder)
    if manifest is not None and names:
        bad = {name: msgspec.structs.replace(manifest.files[name], mtime_ns=0) for name in names}
        with contextlib.suppress(OSError):  # a folder that cannot be written
            write(folder, msgspec.structs.replace(manifest, files=manifest.files | bad))


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Reads the file once, about 1.4 GB/s a core with SHA instructions."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while n_bytes := stream.readinto(buffer):
            digest.update(buffer[:n_bytes])
            if progress is not None:
                progress(n_bytes)
    return digest.hexdigest()


def git_sha1_of(path: Path) -> str:
    """The name that git gives a small file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects"""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def is_changed(folder: Path, name: str, entry: Entry) -> bool:
    """Whether a file is missing, has another size or time, or is a link out of its cache."""
    try:
        hub.check_inside(folder / name, folder)
        facts = (folder / name).stat()
    except (OSError, ValueError):
        return True
    return (facts.st_size, facts.st_mtime_ns) != (entry.size, entry.mtime_ns)


def _wrong(folder: Path, name: str, entry: Entry, progress: Callable[[int], None] | None) -> str | None:
    path = folder / name
    try:
        hub.check_inside(path, folder)
        size = path.stat().st_size
        if size != entry.size:
            return f"{size:,} bytes instead of {entry.size:,}"
        digest = sha256_of(path, progress)
    except ValueError as exc:
        return str(exc)
    except FileNotFoundError:
        return "missing"
    except OSError as exc:
        return f"it could not be read: {exc.strerror}"
    return None if digest == entry.sha256 else f"its SHA-256 is {digest[:12]}..., not {entry.sha256[:12]}..."
