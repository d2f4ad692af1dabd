"""Fetches the files of a listing, eight at once, into a layout: partial file with its hash, final place, note."""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.models import hub, manifest
from penstock.models.manifest import Entry, Manifest
from penstock.models.part_file import CannotContinueError, PartFile
from penstock.models.sources import FETCHERS, Listing, RemoteFile
from penstock.paths import write_atomically
from penstock.text import show_bytes, show_seconds

_N_AT_ONCE = 8
_N_TRIES, _FIRST_WAIT_S = 6, 1.0
_SHOW_S = 0.5
_RATE_OVER_S = 10.0
_MOST_WAIT_S = 600.0
PARTS = ".penstock-parts"  # of files that are not complete, in a folder that is no cache
NOTES = ".penstock-fetched.json"  # the files that were fetched and hashed, until there is a manifest

FetchFile = Callable[[Listing, str, PartFile], None]


class Peers(Protocol):
    """Other machines that fetch the same model now, or have it: they are asked before its source is."""

    def listing(self, resolve: Callable[[], Listing]) -> Listing:
        """What the source has, as another machine knows it, or `resolve` says.  Raises PenstockError."""

    def begin(self, listing: Listing, layout: Layout) -> None:
        """From now on this machine gives others what is in `layout`."""

    def fetch_file(self, listing: Listing, name: str, part: PartFile, from_source: FetchFile) -> None:
        """As a `FetchFile`: from another machine, or by `from_source`."""

    def confirm(self, listing: Listing, name: str, digest: str) -> None:
        """Compare the SHA-256 of a file of which the source tells no hash.  Raises PenstockError."""

    def finish(self) -> None:
        """This machine has all files."""


class Progress(msgspec.Struct, frozen=True):
    """Bytes and files that are there of all, the latter where files are counted; `rate_bytes_per_s` over the last ten
    seconds. `note`: why it waits."""

    n_bytes: int
    total_bytes: int
    n_files: int = 0
    total_files: int = 0
    rate_bytes_per_s: float | None = None
    note: str = ""

    @property
    def left_s(self) -> float | None:
        return (self.total_bytes - self.n_bytes) / self.rate_bytes_per_s if self.rate_bytes_per_s else None

    @property
    def done(self) -> str:
        """ "17/30 files, 12.3 GiB of 30.0 GiB"."""
        files = f"{self.n_files}/{self.total_files} files, " if self.total_files else ""
        return f"{files}{show_bytes(self.n_bytes)} of {show_bytes(self.total_bytes)}"

    @property
    def line(self) -> str:
        """ "17/30 files, 12.3 GiB of 30.0 GiB, 1.1 GiB/s, 16.1 s left"."""
        words = [self.done]
        if self.rate_bytes_per_s and self.left_s is not None:
            left = [f"{show_seconds(self.left_s)} left"] if self.n_bytes < self.total_bytes else []
            words += [f"{show_bytes(self.rate_bytes_per_s)}/s", *left]
        return ", ".join([*words, *([self.note] if self.note else [])])


class Layout:
    """Where files go: plain files in `folder`, or, with `repository`, a snapshot of it whose files link to blobs."""

    def __init__(self, folder: Path, repository: Path | None = None) -> None:
        self.folder, self.repository = folder, repository
        self.root = repository or folder
        self._parts = repository / "blobs" if repository is not None else folder / PARTS

    def part(self, listing: Listing, name: str) -> Path:
        """The partial file. Its name has the content's hash: another revision continues none but the same bytes."""
        file = listing.files[name]
        content = file.sha256 or file.git_sha1 or f"{listing.commit}-{file.size}"
        return self._parts / f"{content}-{zlib.crc32(name.encode()):08x}.penstock.incomplete"

    def missing(self, listing: Listing) -> dict[str, int]:
        """Bytes of the files that are absent, or have another size."""
        return {name: f.size for name, f in listing.files.items() if _size(self.folder / name) != f.size}

    def n_partial_bytes(self, listing: Listing) -> int:
        return sum(_size(self.part(listing, name)) or 0 for name in listing.files)

    def blob(self, file: RemoteFile) -> Path | None:
        """The same content, fetched for another revision."""
        key = file.sha256 or file.git_sha1
        path = self.repository / "blobs" / key if self.repository is not None and key else None
        return path if path is not None and _size(path) == file.size else None

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(parents=True, exist_ok=True)

    def place(self, part: Path, name: str, digest: str) -> None:
        """Move a file to its place, by rename. `digest` becomes its name among the blobs."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.repository is None:
            part.replace(path)
            return
        blob = self.repository / "blobs" / digest
        if part != blob:
            part.replace(blob)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a file system without links
            blob.replace(path)

    def notes(self, commit: str) -> dict[str, Entry]:
        """What was noted for this commit; the manifest's, when nothing is under way."""
        try:
            facts: Manifest | None = msgspec.json.decode((self.folder / NOTES).read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError):
            facts = manifest.read(self.folder)
        return facts.files if facts is not None and facts.revision == commit else {}

    def write_notes(self, facts: Manifest) -> None:
        write_atomically(self.folder / NOTES, msgspec.json.encode(facts))

    def remove_notes(self) -> None:
        (self.folder / NOTES).unlink(missing_ok=True)
        if self.repository is None:
            with contextlib.suppress(OSError):
                self._parts.rmdir()


class FilesFetch:
    """One fetch of a listing. `run` blocks; `progress` may be called from other threads."""

    def __init__(self, listing: Listing, layout: Layout, peers: Peers | None = None) -> None:
        self._listing, self._layout, self._peers = listing, layout, peers
        self._fetch_file = _fetcher(listing.source.kind)
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = dict.fromkeys(listing.files, 0)
        self._entries: dict[str, Entry] = {}
        self._notes: dict[str, Entry] = {}
        self._waiting: dict[str, str] = {}
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._samples: collections.deque[tuple[float, int]] = collections.deque()
        self.n_fetched_bytes = 0

    def run(self, show: Callable[[Progress], None], is_lost: Callable[[], bool] = lambda: False) -> dict[str, Entry]:
        """Fetch what is missing; the entries of all files.  Raises PenstockError, and OSError of the disk."""
        self._layout.make()
        self._notes = self._layout.notes(self._listing.commit)
        names = sorted(self._listing.files, key=lambda name: -self._listing.files[name].size)
        queue = collections.deque(names)
        # Daemons: Ctrl-C ends the program at once, in the middle of a file.
        threads = [threading.Thread(target=self._work, args=(queue,), daemon=True) for _ in range(_N_AT_ONCE)]
        try:
            for thread in threads:
                thread.start()
            while living := [thread for thread in threads if thread.is_alive()]:
                living[0].join(_SHOW_S)
                show(self.progress())
                if is_lost():
                    raise PenstockError("could not go on: another process fetches this model now", is_retryable=True)
        finally:
            self._stopped.set()
        if self._error is not None:
            raise self._error
        show(self.progress())  # small files may be there before the first look
        return self._entries

    def progress(self) -> Progress:
        with self._lock:
            n_bytes = sum(self._bytes.values())
            now, samples = time.monotonic(), self._samples
            samples.append((now, self.n_fetched_bytes))
            while now - samples[0][0] > _RATE_OVER_S and len(samples) > 2:
                samples.popleft()
            seconds = now - samples[0][0]
            rate = (self.n_fetched_bytes - samples[0][1]) / seconds if seconds > _SHOW_S else None
            note = next(iter(self._waiting.values()), "")
            total = self._listing.n_bytes
            return Progress(min(n_bytes, total), total, len(self._entries), len(self._bytes), rate or None, note)

    def _work(self, queue: collections.deque[str]) -> None:
        while not self._stopped.is_set():
            try:
                name = queue.popleft()
            except IndexError:
                return
            try:
                self._bring(name)
            except Exception as exc:  # noqa: BLE001 - raised again by `run`, in the thread that asked
                self._error = self._error or exc
                self._stopped.set()

    def _bring(self, name: str) -> None:
        file, path = self._listing.files[name], self._layout.folder / name
        note = self._notes.get(name)
        is_same = note is not None and file.sha256 in (None, note.sha256)
        if note is not None and is_same and not manifest.is_changed(self._layout.folder, name, note):
            return self._finish(name, note)
        if note is not None and file.sha256 is None and file.git_sha1 is None and self._listing.commit:
            file = msgspec.structs.replace(file, sha256=note.sha256)
        if self._place_present(name, file, path):
            return None
        path = self._layout.part(self._listing, name)
        if (_size(path) or 0) > file.size:
            path.unlink()
        with self._noted(name, "reading what came before"):
            part = PartFile(path, lambda n_bytes: self._add(name, n_bytes), file.size if file.git_sha1 else None)
        with part:
            try:
                self._fetch_patiently(name, file, part)
                part.sync()
            except PenstockError:
                if not part.n_bytes:
                    path.unlink(missing_ok=True)
                raise
        self._layout.place(path, name, file.sha256 or file.git_sha1 or part.sha256)
        self._finish(name, manifest.entry_of(self._layout.folder / name, part.sha256))
        return None

    def _fetch_patiently(self, name: str, file: RemoteFile, part: PartFile) -> None:
        """Until the whole file is there with the right hash. Tries count anew when more has come than ever before."""
        n_tries, furthest = 0, part.n_bytes
        while True:
            self._set_bytes(name, part.n_bytes)
            try:
                if part.n_bytes != file.size:
                    self._receive(name, part)
                return self._check_hash(name, file, part)
            except PenstockError as exc:
                n_tries = 1 if part.n_bytes > furthest else n_tries + 1
                furthest = max(furthest, part.n_bytes)
                if not exc.is_retryable or n_tries == _N_TRIES:
                    raise
                if isinstance(exc, CannotContinueError):
                    part.clear()
                self._wait(name, exc, n_tries - 1)
            if self._stopped.is_set():
                raise PenstockError("the fetch was stopped")

    def _receive(self, name: str, part: PartFile) -> None:
        if self._peers is None:
            self._fetch_file(self._listing, name, part)
        else:
            self._peers.fetch_file(self._listing, name, part, self._fetch_file)

    def _place_present(self, name: str, file: RemoteFile, path: Path) -> bool:
        """Use what another program fetched, once its hash is right."""
        for present in (path, self._layout.blob(file)):
            if present is None or _size(present) != file.size:
                continue
            try:
                hub.check_inside(present, self._layout.folder)
            except ValueError:  # a link out of the cache is no file of it, and where it leads is left alone
                present.unlink()
                continue
            try:
                with self._noted(name, "reading what is here"):
                    digest = self._check_present(name, file, present)
            except PenstockError:
                if self._listing.source.kind == "folder" and self._layout.folder == Path(self._listing.source.name):
                    raise
                present.resolve().unlink(missing_ok=True)
                continue
            if present != path:
                self._layout.place(present, name, present.name)
            self._finish(name, manifest.entry_of(path, digest))
            return True
        return False

    def _check_present(self, name: str, file: RemoteFile, path: Path) -> str:
        """The SHA-256 of a file that another program fetched.  Raises PenstockError when it is not the source's."""
        digest = manifest.sha256_of(path)
        git_sha1 = manifest.git_sha1_of(path) if file.git_sha1 is not None and file.sha256 is None else None
        self._compare(name, file, digest, git_sha1)
        return digest

    def _check_hash(self, name: str, file: RemoteFile, part: PartFile) -> None:
        if part.n_bytes != file.size:
            raise PenstockError(
                f"could not fetch {self._named(name)}: {part.n_bytes:,} bytes instead of {file.size:,}",
                is_retryable=True,
            )
        try:
            self._compare(name, file, part.sha256, part.git_sha1)
            if self._peers is not None and file.sha256 is None and file.git_sha1 is None:
                self._peers.confirm(self._listing, name, part.sha256)
        except PenstockError:
            part.clear()  # wrong bytes are never continued
            raise

    def _compare(self, name: str, file: RemoteFile, sha256: str, git_sha1: str | None) -> None:
        is_right = file.sha256 == sha256 if file.sha256 is not None else file.git_sha1 in (None, git_sha1)
        if not is_right:
            raise PenstockError(
                f"could not fetch {self._named(name)}: its hash is not the one of the source",
                detail="What came was damaged on the way, or was changed; it is not kept.",
                is_retryable=True,
            )

    def _named(self, name: str) -> str:
        return f'"{name}" of "{self._listing.source}"'

    def _wait(self, name: str, error: PenstockError, n_try: int) -> None:
        """Before the next try: as long as the source asks, else 1, 2, 4 ... s, less up to half of it."""
        asked = error.wait_s if isinstance(error, hub.HubError) else None
        seconds = (
            min(asked + random.random(), _MOST_WAIT_S) if asked else _FIRST_WAIT_S * 2**n_try * random.uniform(0.5, 1)
        )
        with self._noted(name, f"waiting {show_seconds(seconds)}: {error.message}"):
            self._stopped.wait(seconds)

    @contextlib.contextmanager
    def _noted(self, name: str, text: str) -> Iterator[None]:
        """What the progress says of a file as long as this lasts."""
        with self._lock:
            self._waiting[name] = text
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[name]

    def _add(self, name: str, n_bytes: int) -> None:
        with self._lock:
            self._bytes[name] += n_bytes
            self.n_fetched_bytes += max(0, n_bytes)
        if self._stopped.is_set():
            raise PenstockError("the fetch was stopped")

    def _set_bytes(self, name: str, n_bytes: int) -> None:
        with self._lock:
            self._bytes[name] = n_bytes

    def _finish(self, name: str, entry: Entry) -> None:
        with self._lock:
            self._bytes[name], self._entries[name] = entry.size, entry
            self._layout.write_notes(Manifest(str(self._listing.source), self._listing.commit, self._entries))


def _fetcher(kind: str) -> FetchFile:
    module, function = FETCHERS[kind].split(":")  # type: ignore[index]
    fetch_file: FetchFile = getattr(importlib.import_module(module), function)
    return fetch_file


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
