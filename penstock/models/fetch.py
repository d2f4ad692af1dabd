"""Brings a model's files to this machine: complete, with the right hashes, once. `fetch(sources.parse("org/name"))`.

Eight files at once go to partial files, which a killed fetch continues. Each complete file is hashed, put where it
belongs, and noted; the next fetch does not read it again. The manifest comes last. Hub files go into the hub's own
cache, in its layout, so that every program that reads that cache finds them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import paths
from penstock.errors import PenstockError, UserError
from penstock.models import fetch_lock, hub, manifest, sources
from penstock.models.fetch_files import NOTES, FilesFetch, Layout, Peers, Progress
from penstock.models.sources import Listing, Source

__all__ = ["FetchPlan", "Layout", "Progress", "fetch", "folder_of", "found", "is_broken_off", "kept", "prepare"]

Show = Callable[[Progress], None]
_GB = 10**9
# Bytes left free on a disk: a tenth of it, or 5 GB, whichever is less. 2 % more than the files for what goes with them.
_FREE_SHARE, _FREE_BYTES, _OVERHEAD = 0.1, 5 * _GB, 1.02
_LEAST_MEASURED_BYTES = 100 * 10**6


class FetchPlan(msgspec.Struct, frozen=True):
    """What a fetch would do: `missing_bytes` of `listing` are not in `folder`; `expected_s` at the rate of the last
    fetch from there; None before the first."""

    listing: Listing
    folder: Path
    missing_bytes: int
    free_bytes: int
    needed_bytes: int
    expected_s: float | None


def fetch(
    source: Source,
    to: Path | None = None,
    cache: Path | None = None,
    *,
    allow_pickle: bool = False,
    with_code: bool = False,
    show: Show = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    peers: Peers | None = None,
) -> Path:
    """The folder with the model's files, whole. Blocks; resumes; idempotent: what fits is not fetched again.

    `to`: a folder that gets plain files; else the hub's cache (`cache`, or the machine's), or penstock's folder for
    other sources. A folder of this machine stays where it is, but for a `cache`, which gets a copy. `show` gets the
    progress twice a second; what it raises ends the fetch.  Raises UserError, and PenstockError when a retry may help.
    """

    def resolve() -> Listing:
        return sources.resolve(source, allow_pickle, with_code)

    try:
        listing = resolve() if peers is None else peers.listing(resolve)
    except hub.HubError as exc:
        folder = kept(source, cache) if exc.status is None and to is None else None
        if folder is None:
            raise
        say(f"{exc.message}; using what was fetched before")
        return folder
    layout = _layout(listing, to, cache)
    if _has(layout.folder, listing):
        _keep_name(listing, layout)
        if peers is not None:
            peers.begin(listing, layout)
        _finish(peers)
        return layout.folder
    plan = prepare(listing, to, cache)
    try:
        _fetch_missing(plan, layout, show, say, peers)
    except OSError as exc:
        if not paths.is_full(exc) and not layout.missing(listing):  # whole, in a cache that cannot be written
            return layout.folder
        raise _disk_error(plan, exc) from exc
    return layout.folder


def prepare(listing: Listing, to: Path | None = None, cache: Path | None = None) -> FetchPlan:
    """What fetching a listing would take.  Raises UserError when the disk is too small, with what could go."""
    layout = _layout(listing, to, cache)
    missing = layout.missing(listing)
    n_bytes = max(0, sum(missing.values()) - layout.n_partial_bytes(listing))
    free, total = paths.free_bytes(layout.folder), paths.total_bytes(layout.folder)
    needed = int(n_bytes * _OVERHEAD + min(_FREE_SHARE * total, _FREE_BYTES)) if n_bytes else 0
    rate = _read_rates().get(_host(listing.source))
    plan = FetchPlan(listing, layout.folder, n_bytes, free, needed, n_bytes / rate if rate else None)
    if needed > free:
        raise _too_small(plan)
    return plan


def folder_of(listing: Listing, to: Path | None = None, cache: Path | None = None) -> Path:
    """Where `fetch` puts the files of a listing."""
    return _layout(listing, to, cache).folder


def kept(source: Source, cache: Path | None = None) -> Path | None:
    """The folder of a model that was fetched before and fits its manifest; asks nobody."""
    folder = found(source, cache)
    return folder if folder is not None and manifest.fits(folder) else None


def found(source: Source, cache: Path | None = None) -> Path | None:
    """The folder where this machine keeps a source, whole or in part; None when it has none. Asks nobody."""
    commit = source.revision or ("main" if source.kind == "hub" else "")
    folder = _layout(Listing(source, commit, {}), None, cache).folder
    if source.kind == "hub":
        with contextlib.suppress(OSError):
            folder = folder.parent / (folder.parent.parent / "refs" / commit).read_text("utf-8").strip()
    elif not commit and not manifest.fits(folder):  # the version that was fetched last
        versions = [path for path in folder.glob("*/") if (path / manifest.NAME).is_file()]
        folder = max(versions, key=lambda path: (path / manifest.NAME).stat().st_mtime, default=folder)
    return folder if folder.is_dir() else None


def is_broken_off(folder: Path) -> bool:
    """Whether a fetch into that folder has begun and not ended."""
    return (folder / NOTES).exists()


def _layout(listing: Listing, to: Path | None, cache: Path | None) -> Layout:
    source = listing.source
    if to is not None:
        return Layout(to)
    if source.kind == "folder" and cache is None:
        path = Path(source.name)
        return Layout(path.parent if path.is_file() else path)
    if source.kind == "hub":
        repository = (cache or hub.cache()) / f"models--{source.name.replace('/', '--')}"
        return Layout(repository / "snapshots" / listing.commit, repository)
    slug = source.name.replace("://", "--").replace("/", "--")
    folder = (cache or paths.home() / "models") / f"{source.kind}--{slug}"
    return Layout(folder / listing.commit if listing.commit else folder)


def _has(folder: Path, listing: Listing) -> bool:
    """Whether the folder was fetched whole before. Its manifest may have more files, of another form of the weights."""
    if not manifest.fits(folder, listing.commit):
        return False
    facts = manifest.read(folder)
    return facts is not None and all(
        name in facts.files and facts.files[name].size == file.size and file.sha256 in (None, facts.files[name].sha256)
        for name, file in listing.files.items()
    )


def _fetch_missing(
    plan: FetchPlan, layout: Layout, show: Show, say: Callable[[str], None], peers: Peers | None
) -> None:
    layout.root.mkdir(parents=True, exist_ok=True)
    files = FilesFetch(plan.listing, layout, peers)
    with fetch_lock.FetchLock(layout.root, say, lambda: files.progress().line) as lock:
        if peers is not None:
            peers.begin(plan.listing, layout)
        if _has(layout.folder, plan.listing):  # by the process that this one waited for
            _finish(peers)
            return
        began = time.monotonic()
        entries = files.run(show, lambda: lock.is_lost)
        seconds = time.monotonic() - began
        before = manifest.read(layout.folder)
        if before is not None and before.revision == plan.listing.commit:
            entries = {name: e for name, e in before.files.items() if (layout.folder / name).exists()} | entries
        source = msgspec.structs.replace(plan.listing.source, revision=None, inside=None)
        manifest.write(layout.folder, manifest.Manifest(str(source), plan.listing.commit, entries))
        _finish(peers)
        layout.remove_notes()
        _keep_name(plan.listing, layout)
    if files.n_fetched_bytes > _LEAST_MEASURED_BYTES:
        _write_rate(_host(plan.listing.source), files.n_fetched_bytes / seconds)


def _finish(peers: Peers | None) -> None:
    if peers is not None:
        peers.finish()


def _keep_name(listing: Listing, layout: Layout) -> None:
    """Let the branch or tag lead to the commit, as the hub's package does: refs/main."""
    revision = listing.source.revision or "main"
    if layout.repository is None or revision == listing.commit:
        return
    path = layout.repository / "refs" / revision
    with contextlib.suppress(OSError):  # a cache that cannot be written has it, or is asked for by commit
        if not path.is_file() or path.read_text("utf-8").strip() != listing.commit:
            path.parent.mkdir(parents=True, exist_ok=True)
            paths.write_atomically(path, listing.commit.encode())


def _too_small(plan: FetchPlan) -> UserError:
    lack = (plan.needed_bytes - plan.free_bytes) / _GB
    detail = (
        f"{plan.missing_bytes / _GB:.1f} GB are missing in {plan.folder}; with what stays free that is "
        f"{plan.needed_bytes / _GB:.1f} GB, and {plan.free_bytes / _GB:.1f} GB are free."
    )
    least_used = _least_used(plan)
    if least_used:
        detail += "\nUsed least recently, and not removed by penstock: " + ", ".join(least_used) + "."
    return UserError(
        f'cannot fetch "{plan.listing.source}": {lack:.1f} GB of space are missing',
        detail=detail,
        hint="Remove a model that you no longer need (penstock models rm NAME), or give another folder with --to.",
    )


def _least_used(plan: FetchPlan, most: int = 5) -> list[str]:
    """The models next to this one in a cache that were used longest ago, as "org/name (12.3 GB)"."""
    place = hub.in_cache(str(plan.folder))
    if place is None:
        return []
    rows = []
    for repository in Path(place.cache).glob("models--*"):
        facts = [path.stat() for path in repository.glob("blobs/*") if path.is_file()]
        if facts and repository.name != place.folder:
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            rows.append((max(fact.st_atime for fact in facts), name, sum(fact.st_size for fact in facts)))
    return [f"{name} ({n_bytes / _GB:.1f} GB)" for _, name, n_bytes in sorted(rows)[:most]]


def _disk_error(plan: FetchPlan, exc: OSError) -> PenstockError:
    what = f'"{plan.listing.source}" into {plan.folder}'
    if paths.is_full(exc):
        least_used = _least_used(plan)
        detail = "What was fetched is kept, and the next fetch continues it."
        if least_used:
            detail += f" Used least recently: {', '.join(least_used)}."
        return UserError(f"could not fetch {what}: the disk is full", detail=detail, hint="Free some space, try again.")
    hint = "Give a folder that you can write with --to, or set HF_HUB_CACHE."
    return UserError(f"cannot fetch {what}: {exc.strerror}", detail=str(exc.filename or ""), hint=hint)


def _host(source: Source) -> str:
    return hub.endpoint() if source.kind == "hub" else source.kind


def _read_rates() -> dict[str, float]:
    try:
        return msgspec.json.decode((paths.home() / "fetch_rates.json").read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write_rate(host: str, bytes_per_s: float) -> None:
    with contextlib.suppress(OSError):
        paths.home().mkdir(parents=True, exist_ok=True, mode=0o700)
        rates = msgspec.json.encode(_read_rates() | {host: round(bytes_per_s)})
        paths.write_atomically(paths.home() / "fetch_rates.json", rates)


if __name__ == "__main__":  # the command of a Job in Kubernetes
    from penstock.models.volume import main

    sys.exit(main())
