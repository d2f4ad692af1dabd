"""The program that puts a hub model into a volume, once: `python -m penstock.models.fetch NAME PATH FORM [--wait]`.

PATH is where the plan has the model: /models/models--Qwen--Qwen3-0.6B/snapshots/main. The volume is a hub's cache, so
revisions share their files; a revision that is whole has a marker file, which is written last. With `--wait` another
process fetches, and this one waits for the marker and reports the progress.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.models import files, hub, manifest, sources
from penstock.models.fetch_files import FilesFetch, Layout
from penstock.paths import write_atomically

MARKER = ".penstock-complete"  # in a revision's folder; it holds the commit
_GB = 10**9
_EVERY_S, _POLL_S = 5.0, 1.0
_WEIGHTS = (".safetensors", ".gguf")

Say = Callable[[str], None]


class _Listing(msgspec.Struct, frozen=True):
    """What a revision comes to: bytes by file. It is in the repository's folder while it is fetched, and after."""

    commit: str
    sizes: dict[str, int]


def fetch(name: str, path: str, form: str, say: Say) -> str:
    """Bring a planned model to `path`, unless it is there whole; its commit. Resumes what was interrupted. Blocks.

    Raises UserError: no such model, no access, too little space, files of another size than the hub's.
    """
    place, name = _place(path), sources.parse(name).name
    repository = Path(place.cache) / place.folder
    wanted_folder = repository / "snapshots" / place.revision
    if (wanted_folder / MARKER).is_file():
        say("weights complete: fetched before")
        return (wanted_folder / MARKER).read_text("utf-8").strip()
    patterns = files.patterns_of(form, place.inside)
    commit, rows = hub.list_hashes(name, place.revision)
    rows = {file: row for file, row in rows.items() if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)}
    sources.check_names(name, (*rows, commit))
    sizes = {file: row[0] for file, row in rows.items()}
    if not any(file.endswith(_WEIGHTS) for file in sizes):
        raise UserError(
            f'cannot fetch model "{name}": revision {place.revision} has no file of its weights that an engine loads',
            detail=f"Looked for {', '.join(patterns)}.",
        )
    snapshot = repository / "snapshots" / commit
    _check_space(name, repository, sizes)
    write_atomically(_listing_file(repository, place.revision), msgspec.json.encode(_Listing(commit, sizes)))
    with _Reporter(lambda: _progress(repository, place.revision), say):
        source = sources.Source("hub", name)
        listing = sources.Listing(source, commit, {file: sources.RemoteFile(*row) for file, row in rows.items()})
        layout = Layout(snapshot, repository)
        _drop_wrong_sizes(name, snapshot, sizes)
        entries = FilesFetch(listing, layout).run(lambda _: None)
    manifest.write(snapshot, manifest.Manifest(str(source), commit, entries))
    layout.remove_notes()
    if not wanted_folder.exists():  # a branch: its name leads to the commit that was fetched for it
        wanted_folder.symlink_to(commit)
    write_atomically(snapshot / MARKER, f"{commit}\n".encode())
    say(f"weights complete: {progress_line(len(sizes), len(sizes), sum(sizes.values()), sizes)}, commit {commit[:12]}")
    return commit


def wait(path: str, say: Say) -> None:
    """Until the marker is there, however long."""
    place = _place(path)
    repository = Path(place.cache) / place.folder
    marker = repository / "snapshots" / place.revision / MARKER
    with _Reporter(lambda: _progress(repository, place.revision), say):
        while not marker.is_file():
            time.sleep(_POLL_S)
    say("weights complete")


def progress_line(n_files: int, n_files_total: int, n_bytes: int, sizes: Mapping[str, int]) -> str:
    """ "weights 17/30 files, 12.3 GB of 30.0 GB"; the status of a deployment is read from it."""
    total = sum(sizes.values())
    return f"weights {n_files}/{n_files_total} files, {min(n_bytes, total) / _GB:.1f} GB of {total / _GB:.1f} GB"


def _place(path: str) -> hub.InCache:
    place = hub.in_cache(path)
    if place is None:
        raise UserError(f'cannot fetch a model to "{path}": it is not a path in a hub\'s cache')
    return place


def _listing_file(repository: Path, revision: str) -> Path:
    return repository / f".penstock-{revision}.json"


def _progress(repository: Path, revision: str) -> str:
    try:
        listing = msgspec.json.decode(_listing_file(repository, revision).read_bytes(), type=_Listing)
    except OSError:
        return "weights: not begun"
    n_present = sum((repository / "snapshots" / listing.commit / name).is_file() for name in listing.sizes)
    return progress_line(n_present, len(listing.sizes), _stored(repository), listing.sizes)


def _stored(repository: Path) -> int:
    """Bytes of all files, those that are being fetched too."""
    total = 0
    for path in repository.glob("blobs/*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed since it was listed
            continue
    return total


def _check_space(name: str, repository: Path, sizes: Mapping[str, int]) -> None:
    repository.mkdir(parents=True, exist_ok=True)
    free, missing = shutil.disk_usage(repository).free, sum(sizes.values()) - _stored(repository)
    if missing > free:
        raise UserError(
            f'cannot fetch model "{name}": {missing / _GB:.1f} GB are missing, and the volume has {free / _GB:.1f} GB',
            hint="Make the volume larger.",
        )


def _drop_wrong_sizes(name: str, snapshot: Path, sizes: Mapping[str, int]) -> None:
    for file, size in sizes.items():
        path = snapshot / file
        present = path.stat().st_size if path.is_file() else size
        if present != size:
            path.resolve().unlink(missing_ok=True)  # so that the next try fetches it
            path.unlink(missing_ok=True)
            raise PenstockError(
                f'could not fetch "{file}" of model "{name}": it has {present} bytes, and the hub {size}',
                is_retryable=True,
            )


class _Reporter:
    """Says a line, in a thread, when it has changed, at most every 5 s."""

    def __init__(self, line: Callable[[], str], say: Say) -> None:
        self._line, self._say = line, say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _report(self) -> None:
        last = ""
        while True:
            line = self._line()
            if line != last:
                self._say(line)
            last = line
            if self._ended.wait(_EVERY_S):
                return


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.models.fetch")
    parser.add_argument("name")
    parser.add_argument("path")
    parser.add_argument("form", choices=tuple(files.PATTERNS))
    parser.add_argument("--wait", action="store_true", help="another process fetches")
    options = parser.parse_args(argv)
    # The first process of a container has no default handlers; threads may be in the middle of a file.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        if options.wait:
            wait(options.path, _say)
        else:
            fetch(options.name, options.path, options.form, _say)
    except PenstockError as error:
        _say(f"penstock: {error.message}. {error.detail or ''} {error.hint or ''}".rstrip())
        return error.exit_code
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
