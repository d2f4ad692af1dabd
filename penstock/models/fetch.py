"""Brings a model's files to this machine: complete, with the right hashes, once. `fetch(sources.parse("org/name"))`.

Eight files at once go to partial files, which a killed fetch continues. Each complete file is hashed, put where it
belongs, and noted; the next fetch does not read it again. The manifest comes last. Hub files go into the hub's own
cache, in its layout, so that every program that reads that cache finds them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import paths
from penstock.errors import PenstockError, UserError
from penstock.models import fetch_lock, files, hub, manifest, sources
from penstock.models.fetch_files import NOTES, FilesFetch, Layout, Peers, Progress
from penstock.models.kept import could_go
from penstock.models.manifest import Manifest
from penstock.models.sources import PLAIN, Listing, Source, Wanted
from penstock.spec.deployment import Deployment
from penstock.text import show_bytes

__all__ = [
    "FetchPlan", "Layout", "Progress", "fetch", "folder_of", "found", "is_broken_off", "kept", "locate", "path_in",
    "prepare", "repair",
]  # fmt: skip

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
    wanted: Wanted = PLAIN,
    *,
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
        return sources.resolve(source, wanted.pickles, wanted.code)

    if source.kind == "folder" and to is None and cache is None and _is_as_fetched(Path(source.name)):
        return Path(source.name)
    try:
        listing = resolve() if peers is None else peers.listing(resolve)
    except hub.HubError as exc:
        folder = _usable(source, cache) if exc.is_retryable and to is None else None
        if folder is None:
            raise
        say(f"{exc.message}; using what was fetched before")
        return folder
    if wanted.commit not in (None, listing.commit):
        raise UserError(
            f'cannot fetch "{source}": its files have changed since this was planned',
            detail=f"Planned with version {str(wanted.commit)[:12]}; now it is {listing.commit[:12]}.",
            hint="Plan again: penstock up --replace",
        )
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


def locate(deployment: Deployment, show: Show = lambda _: None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of a deployment's model, or its GGUF file, on this machine; fetched first where it comes from
    elsewhere.  Raises as `fetch`, and UserError for no such folder."""
    source = sources.of_deployment(deployment)
    if source is None:
        return files.locate(deployment)
    folder = fetch(
        source,
        cache=Path(deployment.cache.folder).expanduser() if deployment.cache.folder else None,
        wanted=Wanted(deployment.cache.allow_pickle, sources.runs_code(deployment.engine.flags)),
        show=show,
        say=say,
    )
    return path_in(folder, source)


def path_in(folder: Path, source: Source) -> Path:
    """What an engine opens of a fetched source: the folder, or the GGUF file that the source names."""
    if source.inside in (None, "gguf"):
        return folder
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    chosen = [name for name in sources.choose(str(source), names, source.inside) if name.lower().endswith(".gguf")]
    return folder / chosen[0]


def prepare(listing: Listing, to: Path | None = None, cache: Path | None = None) -> FetchPlan:
    """What fetching a listing would take.  Raises UserError when the disk is too small, with what could go."""
    layout = _layout(listing, to, cache)
    missing = layout.missing(listing)
    n_bytes = max(0, sum(missing.values()) - layout.n_partial_bytes(listing))
    free, total = paths.free_bytes(layout.folder), shutil.disk_usage(paths.nearest_existing(layout.folder)).total
    needed = int(n_bytes * _OVERHEAD + min(_FREE_SHARE * total, _FREE_BYTES)) if n_bytes else 0
    rate = _read_rates().get(_host(listing.source))
    plan = FetchPlan(listing, layout.folder, n_bytes, free, needed, n_bytes / rate if rate else None)
    if needed > free:
        raise _too_small(plan)
    return plan


def repair(folder: Path, facts: Manifest) -> str:
    """How the files of a folder that differ from its manifest are made right again, as a hint. Pure."""
    if "://" not in facts.source:
        return f"Copy these files there again; without {manifest.NAME} they are taken as they are."
    revision = f"@{facts.revision}" if facts.source.startswith("hf://") else ""
    return f"penstock fetch {facts.source}{revision} --to {folder} fetches these files again."


def _is_as_fetched(folder: Path) -> bool:
    """Whether a folder of this machine has a manifest; its files are read where a time differs.  Raises UserError for
    one of another content: a new manifest would call it right."""
    facts = manifest.read(folder)
    if facts is None or manifest.fits(folder):
        return facts is not None
    if problems := manifest.verify(folder):
        raise UserError(
            f'cannot use "{folder}": {len(problems)} of its files are not those of its {manifest.NAME}',
            detail="\n".join(map(str, problems)),
            hint=repair(folder, facts),
        )
    entries = {name: manifest.entry_of(folder / name, entry.sha256) for name, entry in facts.files.items()}
    with contextlib.suppress(OSError):  # a folder that cannot be written
        manifest.write(folder, msgspec.structs.replace(facts, files=entries))
    return True


def folder_of(listing: Listing, to: Path | None = None, cache: Path | None = None) -> Path:
    """Where `fetch` puts the files of a listing."""
    return _layout(listing, to, cache).folder


def kept(source: Source, cache: Path | None = None) -> Path | None:
    """The folder of a model that was fetched before and fits its manifest; asks nobody."""
    folder = found(source, cache)
    return folder if folder is not None and manifest.fits(folder) else None


def _usable(source: Source, cache: Path | None) -> Path | None:
    """What is here when the source cannot be asked: what fits its manifest, or another program's copy that lacks no
    weights."""
    folder = found(source, cache)
    if folder is None or manifest.fits(folder):
        return folder
    names = files.wanted_shards(folder) if source.inside is None else []
    weights = [folder / name for name in names] or files.gguf_parts(folder)
    return folder if manifest.read(folder) is None and weights and all(path.is_file() for path in weights) else None


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
    under_way = FilesFetch(plan.listing, layout, peers)
    with fetch_lock.FetchLock(layout.root, say, lambda: under_way.progress().line) as lock:
        if peers is not None:
            peers.begin(plan.listing, layout)
        if _has(layout.folder, plan.listing):  # by the process that this one waited for
            _finish(peers)
            return
        began = time.monotonic()
        entries = under_way.run(show, lambda: lock.is_lost)
        seconds = time.monotonic() - began
        before = manifest.read(layout.folder)
        if before is not None and before.revision == plan.listing.commit:
            entries = {name: e for name, e in before.files.items() if (layout.folder / name).exists()} | entries
        source = msgspec.structs.replace(plan.listing.source, revision=None, inside=None)
        manifest.write(layout.folder, Manifest(str(source), plan.listing.commit, entries))
        _finish(peers)
        layout.remove_notes()
        _keep_name(plan.listing, layout)
    if under_way.n_fetched_bytes > _LEAST_MEASURED_BYTES:
        _write_rate(_host(plan.listing.source), under_way.n_fetched_bytes / seconds)


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
    detail = (
        f"{show_bytes(plan.missing_bytes)} are to be fetched into {plan.folder}; with what stays free that is "
        f"{show_bytes(plan.needed_bytes)}, and {show_bytes(plan.free_bytes)} are free."
    )
    least_used = _could_go(plan)
    if least_used:
        detail += "\nUsed least recently, and not removed by penstock: " + ", ".join(least_used) + "."
    lack = show_bytes(plan.needed_bytes - plan.free_bytes)
    return UserError(
        f'cannot fetch "{plan.listing.source}": {lack} of space are missing',
        detail=detail,
        hint="Remove a model that you no longer need (penstock models rm NAME), or give another folder with --to.",
    )


def _could_go(plan: FetchPlan) -> list[str]:
    place = hub.in_cache(str(plan.folder))
    return could_go(plan.folder, [Path(place.cache)] if place is not None else [])


def _disk_error(plan: FetchPlan, exc: OSError) -> PenstockError:
    what = f'"{plan.listing.source}" into {plan.folder}'
    if paths.is_full(exc):
        detail = "What was fetched is kept, and the next fetch continues it."
        if least_used := _could_go(plan):
            detail += f" Used least recently: {', '.join(least_used)}."
        return UserError(f"could not fetch {what}: the disk is full", detail=detail, hint="Free some space, try again.")
    hint = "Give a folder that you can write with --to, or set HF_HUB_CACHE."
    return UserError(f"cannot fetch {what}: {exc.strerror}", detail=str(exc.filename or ""), hint=hint)


def _host(source: Source) -> str:
    return hub.shown_endpoint() if source.kind == "hub" else source.kind


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
