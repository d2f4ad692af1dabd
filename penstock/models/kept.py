"""The models that are on this machine: a hub's cache, folders that penstock fetched into, and what is bundled.

A row is one revision in one place. A removal first takes away what makes a copy look whole (manifest, names of
branches), then its files: one that is killed leaves a copy "in part", which is removed in the same way. It follows no
link out of its folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock import paths
from penstock.errors import UserError
from penstock.models import fetch_lock, files, hub, manifest
from penstock.models.fetch_files import NOTES, PARTS
from penstock.spec.deployment import DEMO_MODEL
from penstock.text import show_bytes

State = Literal["whole", "part", "changed"]
_PREFIX = "models--"


class Kept(msgspec.Struct, frozen=True):
    """One revision of a model. `place`: the repository's folder in a cache, or the folder itself; `folder`: where an
    engine finds the files. `n_bytes` on disk; `used_at`: last read or written (Unix seconds), by the file system.

    `state`: "changed" does not fit its manifest any more. `is_verified`: hashed when it was fetched, and not changed.
    """

    name: str
    kind: Literal["cache", "folder", "bundled"]
    revision: str
    place: str
    folder: str
    n_bytes: int
    used_at: float | None
    state: State
    is_verified: bool


class Use(NamedTuple):
    """A model that a deployment uses: the deployment, and the model's path."""

    deployment: str
    path: str


def every(caches: Iterable[Path] = ()) -> list[Kept]:
    """All that is here: the machine's hub cache, these further ones, penstock's folders, the bundled model. Reads no
    weights.  Raises UserError for a cache that cannot be read."""
    rows: list[Kept] = []
    for cache in dict.fromkeys(path.expanduser().resolve() for path in (hub.cache(), *caches)):
        for repository in _children(cache):
            if repository.name.startswith(_PREFIX) and not repository.is_symlink():
                rows += _revisions(repository)
    own = _children(paths.home() / "models")
    own += [folder for parent in own for folder in _children(parent)]
    for folder in dict.fromkeys([*own, *_noted()]):
        if folder.resolve() == folder and (row := _plain_folder(folder)):  # links lead elsewhere
            rows.append(row)
    rows.sort(key=lambda row: (row.name.lower(), row.used_at or 0))
    return [*rows, _bundled()]


def total_bytes(rows: Iterable[Kept]) -> int:
    """Bytes on disk of all that was fetched; what two revisions share counts once."""
    places = {(row.kind, row.place): row for row in rows if row.kind != "bundled"}
    return sum(
        sum(_sizes(Path(place) / "blobs").values()) if kind == "cache" else row.n_bytes
        for (kind, place), row in places.items()
    )


def note(folder: Path) -> None:
    """Remember a folder that a model was fetched into, so that it is listed."""
    folder = folder.resolve()
    known = _noted()
    if folder not in known:
        paths.home().mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_noted([*known, folder])


def could_go(folder: Path, caches: Iterable[Path] = (), most: int = 5) -> list[str]:
    """Other models on the disk of a folder that is to be made, those used longest ago first: "org/name (12.3 GiB)"."""
    folder, disk = folder.absolute(), paths.nearest_existing(folder).stat().st_dev
    places: dict[str, list[Kept]] = {}
    with contextlib.suppress(UserError):  # a cache that cannot be read
        for row in every(caches):
            if row.kind != "bundled" and not folder.is_relative_to(row.place):
                places.setdefault(row.place, []).append(row)
    rows = []
    for place, revisions in places.items():
        with contextlib.suppress(OSError):  # removed since it was listed
            if Path(place).stat().st_dev == disk:
                used_at = max(row.used_at or 0.0 for row in revisions)
                rows.append((used_at, revisions[0].name, total_bytes(revisions)))
    return [f"{name} ({show_bytes(n_bytes)})" for _, name, n_bytes in sorted(rows)[:most]]


def choose(rows: Sequence[Kept], name: str) -> list[Kept]:
    """The revisions that "org/name", "org/name@COMMIT" (or its first characters) or a path names. Pure but for links.

    Raises UserError: nothing has that name, it is bundled, or it is in several places.
    """
    word, _, revision = name.rpartition("@") if "@" in name and not Path(name).exists() else (name, "", "")
    word = word.removeprefix("hf://")
    path = str(Path(word).expanduser().resolve())
    rows = [row for row in rows if row.name == word or path in (row.place, row.folder)]
    found = [row for row in rows if row.revision.startswith(revision)]
    if not found:
        known = ", ".join(row.revision[:12] for row in rows)
        raise UserError(
            f'cannot remove "{name}": no such model is on this machine',
            detail=f"Revisions that are here: {known}." if known else None,
            hint="`penstock models` lists all that are here.",
        )
    if found[0].kind == "bundled":
        raise UserError(f'cannot remove "{name}": it is a part of penstock')
    places = sorted({row.place for row in found})
    if len(places) > 1:
        raise UserError(
            f'cannot remove "{name}": it is in {len(places)} places',
            detail="\n".join(places),
            hint="Give one of these paths.",
        )
    return found


def users_of(row: Kept, uses: Sequence[Use]) -> list[str]:
    """The deployments that use it."""
    return [use.deployment for use in uses if _is_inside(Path(use.path), Path(row.folder))]


def check_unused(rows: Sequence[Kept], uses: Sequence[Use], now: float | None = None) -> None:
    """Refuse what a deployment uses, or what is being fetched.  Raises UserError."""
    for row in rows:
        if users := users_of(row, uses):
            raise UserError(
                f'cannot remove "{row.name}": deployment "{users[0]}" uses it',
                detail=f"It uses {row.folder}.",
                hint=f"End it first: penstock down {users[0]}",
            )
        with contextlib.suppress(OSError):
            age_s = (time.time() if now is None else now) - (Path(row.place) / fetch_lock.NAME).stat().st_mtime
            if age_s < fetch_lock.STALE_S:
                raise UserError(
                    f'cannot remove "{row.name}": it is being fetched', hint="Wait for that fetch, or end it first."
                )


def remove(rows: Sequence[Kept]) -> int:
    """Remove the revisions of one place; the bytes that are free now. Idempotent.  Raises UserError."""
    place = Path(rows[0].place)
    try:
        if rows[0].kind == "folder":
            return _remove_folder(place)
        commits = {row.revision for row in rows}
        others = {path.name for path in _children(place / "snapshots") if not path.is_symlink()} - commits
        before = sum(_sizes(place / "blobs").values())
        if others:
            _remove_revisions(place, commits, others)
            return before - sum(_sizes(place / "blobs").values())
        for name in ("refs", "snapshots", "blobs", "."):
            _remove_tree(place / name)
        _remove_tree(place.parent / ".locks" / place.name)
        return before
    except OSError as exc:
        raise UserError(
            f'could not remove "{rows[0].name}": {exc.strerror}', detail=str(place), is_retryable=True
        ) from exc


def _revisions(repository: Path) -> list[Kept]:
    name = repository.name.removeprefix(_PREFIX).replace("--", "/", 1)
    blobs = _sizes(repository / "blobs")
    parts = {path: size for path, size in blobs.items() if path.name.endswith(".incomplete")}
    snapshots = [path for path in _children(repository / "snapshots") if not path.is_symlink()]
    if not snapshots:
        used = _used_at(blobs)
        size = sum(blobs.values())
        return [Kept(name, "cache", "", str(repository), str(repository), size, used, "part", False)] if blobs else []
    rows = []
    for snapshot in snapshots:
        sizes = _sizes(snapshot, repository)
        state, is_verified = _state(snapshot, bool(parts))
        n_bytes = sum(sizes.values()) + (sum(parts.values()) if state == "part" else 0)
        used = _used_at(sizes)
        rows.append(
            Kept(name, "cache", snapshot.name, str(repository), str(snapshot), n_bytes, used, state, is_verified)
        )
    return rows


def _plain_folder(folder: Path) -> Kept | None:
    facts = manifest.read(folder)
    parts = (folder / PARTS).is_dir() or (folder / NOTES).is_file()
    if facts is None and not parts:
        return None
    names = set(_owned_names(folder))
    sizes = {path: size for path, size in _sizes(folder).items() if str(path.relative_to(folder)) in names}
    sizes |= _sizes(folder / PARTS)
    state, is_verified = _state(folder, parts)
    name = facts.source.removeprefix("hf://") if facts is not None else str(folder)
    revision = facts.revision if facts is not None else ""
    n_bytes, used = sum(sizes.values()), _used_at(sizes)
    return Kept(name, "folder", revision, str(folder), str(folder), n_bytes, used, state, is_verified)


def _bundled() -> Kept:
    sizes, place = _sizes(files.BUNDLED), str(files.BUNDLED)
    return Kept(DEMO_MODEL, "bundled", "", place, place, sum(sizes.values()), None, "whole", True)


def _state(folder: Path, has_parts: bool) -> tuple[State, bool]:
    """Whether it is whole, and whether its hashes were checked."""
    if manifest.read(folder) is not None:
        return ("whole", True) if manifest.fits(folder) else ("changed", False)
    shards = files.wanted_shards(folder)
    weights = [folder / name for name in shards] or [*folder.glob("*.gguf"), *folder.glob("*.bin")]
    is_whole = bool(weights) and not has_parts and all(path.is_file() for path in weights)
    return ("whole" if is_whole else "part"), False


def _owned_names(folder: Path) -> list[str]:
    """The files of a folder that a fetch wrote: by its manifest, and by its notes of an unfinished fetch."""
    facts = manifest.read(folder)
    names = list(facts.files) if facts is not None else []
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        names += msgspec.json.decode((folder / NOTES).read_bytes(), type=dict[str, msgspec.Raw])
    return list(dict.fromkeys(names))


def _remove_folder(folder: Path) -> int:
    """Remove what a fetch wrote, and folders that are empty then; other files of the user stay."""
    names, n_bytes = _owned_names(folder), 0
    (folder / NOTES).unlink(missing_ok=True)
    parents = {folder, folder.parent} if folder.is_relative_to(paths.home() / "models") else {folder}
    for name in names:
        path = folder / name
        if ".." in path.parts or not path.parent.resolve().is_relative_to(folder.resolve()):
            continue
        with contextlib.suppress(FileNotFoundError):
            n_bytes += path.lstat().st_size
            path.unlink()
        parents |= {parent for parent in path.parents if parent.is_relative_to(folder)}
    n_bytes += sum(_sizes(folder / PARTS).values())
    _remove_tree(folder / PARTS)
    # The list of what is ours goes last, so that a removal that was killed can go on.
    (folder / manifest.NAME).unlink(missing_ok=True)
    (folder / fetch_lock.NAME).unlink(missing_ok=True)
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # it has other files
            parent.rmdir()
    _write_noted([path for path in _noted() if path != folder])
    return n_bytes


def _remove_revisions(repository: Path, commits: Collection[str], others: Collection[str]) -> None:
    """Remove revisions, and the blobs that none of the others has."""
    snapshots = repository / "snapshots"
    for folder in (snapshots, repository / "refs", repository / "blobs"):
        if folder.is_symlink():
            raise UserError(
                f'cannot remove a revision in "{repository}": {folder.name} is a link to {folder.resolve()}',
                hint="Remove the whole model, which removes only the link.",
            )
    ours = {path for commit in commits for path in _sizes(snapshots / commit, repository)}
    shared = {path for commit in others for path in _sizes(snapshots / commit, repository)}
    for path in (repository / "refs").rglob("*"):
        if path.is_file() and path.read_text("utf-8", "replace").strip() in commits:
            path.unlink()
    for commit in commits:
        (snapshots / commit / manifest.NAME).unlink(missing_ok=True)
        _remove_tree(snapshots / commit)
    for path in snapshots.iterdir():  # a branch's link to a removed revision
        if path.is_symlink() and not path.exists():
            path.unlink()
    for path in ours - shared:
        if path.parent == (repository / "blobs").resolve():
            path.unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    """Remove a folder and what is in it; a link is removed, not followed."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sizes(folder: Path, root: Path | None = None) -> dict[Path, int]:
    """The regular files below a folder by their real paths, and their bytes; links count where they stay in `root`
    (without one, in the folder)."""
    real_root = (root or folder).resolve()
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            real = (Path(parent) / name).resolve()
            with contextlib.suppress(OSError):  # removed since it was listed, or a link that leads nowhere
                if real.is_relative_to(real_root):
                    sizes[real] = real.stat().st_size
    return sizes


def _used_at(sizes: Iterable[Path]) -> float | None:
    times = []
    for path in sizes:
        with contextlib.suppress(OSError):
            facts = path.stat()
            times.append(max(facts.st_atime, facts.st_mtime))
    return max(times, default=None)


def _is_inside(path: Path, folder: Path) -> bool:
    # A file in a cache is a link to a blob, which is in no snapshot.
    places = (path.resolve(), path.parent.resolve() / path.name)
    return any(place.is_relative_to(folder.resolve()) for place in places)


def _children(folder: Path) -> list[Path]:
    """The folders in a folder; none where there is no such folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise UserError(f'cannot read "{folder}": {exc.strerror}') from exc


def _noted_file() -> Path:
    return paths.home() / "fetched_folders.json"


def _noted() -> list[Path]:
    try:
        return [Path(text) for text in msgspec.json.decode(_noted_file().read_bytes(), type=list[str])]
    except (OSError, msgspec.MsgspecError):
        return []


def _write_noted(folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # a home that cannot be written: the folder is not listed
        if folders or _noted_file().exists():
            paths.write_atomically(_noted_file(), msgspec.json.encode([str(path) for path in folders]))
