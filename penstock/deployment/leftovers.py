"""The verb `clean`: what deployments left on this machine, and its removal. What lives, or may live, is never touched.

`judge` decides, from facts about each process and each temporary folder. What cannot be seen from here (a home that is
not mounted) is unknown, not gone; what another home, another user or a container owns is not ours to judge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock import processes, run_folder, targets
from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore
from penstock.gateway.accounting.usage_store import UsageStore
from penstock.paths import every_temporary, home, is_held, owner_of
from penstock.processes import Marked
from penstock.run_folder import Run
from penstock.spec.deployment import is_legal_name
from penstock.targets import Target

# How the run folder of a process looks from here; "replaced": a folder of that name, of another launch.
FolderState = Literal["living", "ended", "replaced", "absent", "unseen"]


class ProcessFacts(msgspec.Struct, frozen=True):
    """A marked process. `is_near`: our user's, in our mount and pid namespaces, of this home or of one not seen."""

    process: Marked
    is_near: bool
    folder: FolderState


class FolderFacts(msgspec.Struct, frozen=True):
    """A temporary folder, and the launch that it belongs to. `is_own`: of this user, and of a launch of this home.
    `is_held`: a process locks it, or listens in it."""

    path: str
    run_id: str
    is_own: bool
    is_held: bool


class Leftover(msgspec.Struct, frozen=True):
    """Something that no living deployment owns, or that may live (`clean` then leaves it alone).

    `kind`: "process", "folder" (temporary), "run" (an ended deployment's folder, without its keys and usage), "keys"
    (those), "host" (not reached by `down`), or the name of the target that still has it.
    """

    kind: str
    name: str
    what: str
    process: Marked | None = None
    left: run_folder.Left | None = None


class Leftovers(msgspec.Struct, frozen=True):
    """`unknown`: of launches whose run folder cannot be seen from here. `silent`: targets that could not be asked."""

    found: list[Leftover]
    unknown: list[Leftover] = []
    silent: list[str] = []


def judge(marked: Sequence[ProcessFacts], folders: Sequence[FolderFacts], living: Iterable[str]) -> Leftovers:
    """What is left behind, and what may live. Pure. `living`: ids of launches whose run folder says so.

    One process of a launch that may live protects all of that launch.
    """
    living = {*living, *(facts.process.run_id for facts in marked if not facts.is_near or facts.folder == "living")}
    unseen = {facts.process.run_id for facts in marked if facts.folder == "unseen"}
    found, unknown = list[Leftover](), list[Leftover]()
    for facts in marked:
        process = facts.process
        if process.run_id in living:
            continue
        what = f"{process.role} of {process.run}: {process.command}"
        items = unknown if process.run_id in unseen else found
        items.append(Leftover("process", str(process.pid), what, process))
    ended = {item.process.run_id for item in found if item.process is not None}
    for folder in folders:
        is_free = not folder.is_held or folder.run_id in ended
        if folder.is_own and is_free and folder.run_id not in living | unseen:
            found.append(Leftover("folder", folder.path, "temporary folder of an engine"))
    return Leftovers(found, unknown)


def leftovers(with_ended_runs: bool = False, keys_of: str | None = None) -> Leftovers:
    """Processes, temporary folders and what targets have whose deployment is gone or ended; ended run folders, and the
    keys and usage of the deployment `keys_of`, when asked.  Raises UserError where it has none, or has not ended.
    """
    keys = Leftovers([]) if keys_of is None else _keys(keys_of)
    marked = [_process_facts(process) for process in processes.find_marked()]
    runs, living = run_folder.every(), set[str]()
    ids = {facts.process.run_id for facts in marked if facts.is_near and facts.folder != "unseen"}
    for run in runs:
        with contextlib.suppress(PenstockError):  # a damaged folder: its processes know their id
            ids.add(run.record().id)
            if _state_of(run) == "living":
                living.add(run.record().id)
    folders = [_folder_facts(path, run_id, ids) for path, run_id in every_temporary().items()]
    judged = judge(marked, folders, living)
    items = [*judged.found]
    items += [Leftover("host", left.place, left.what, left=left) for left in run_folder.every_left()]
    for run in runs if with_ended_runs else ():
        if _state_of(run) == "ended":
            stored = _stored(run)
            stays = f"; {stored} stay until `penstock clean --keys {run.name} --yes`" if stored else ""
            items.append(Leftover("run", str(run.path), f'folder of the ended deployment "{run.name}"{stays}'))
    of_targets, silent = _of_targets(targets.TABLE, lambda target: target.leftovers())
    return Leftovers([*items, *keys.found, *of_targets], judged.unknown, [*keys.silent, *silent])


def _keys(name: str) -> Leftovers:
    """The keys and usage of an ended deployment, on this machine and where its target keeps them."""
    run = Run(home() / "runs" / name)
    if is_legal_name(name) and _state_of(run) not in ("ended", "absent"):
        hint = f"End it first: penstock down {name}"
        raise UserError(f'cannot remove the keys and usage of "{name}": it has not ended', hint=hint)
    is_here = is_legal_name(name) and run.store_file.is_file()
    try:
        chosen = [run.record().target]
    except PenstockError:  # no folder, or a bare store: one of that name elsewhere is another deployment
        chosen = [] if is_here or not is_legal_name(name) else [*targets.TABLE]
    items, silent = _of_targets(chosen, lambda target: target.kept_keys(name))
    if is_here:
        what = f'{_stored(run) or "no keys, no requests"} of the deployment "{name}"'
        items.append(Leftover("keys", str(run.store_file), what))
    if not items:
        kept = sorted(path.parent.name for path in (home() / "runs").glob(f"[!.]*/{run.store_file.name}"))
        known = f"Kept on this machine are those of: {', '.join(kept)}." if kept else "None are kept on this machine."
        raise UserError(f'cannot find keys and usage of "{name}"', detail="\n".join(silent) or None, hint=known)
    return Leftovers(items, silent=silent)


def _stored(run: Run) -> str:
    """What the store in a run folder has: "2 keys and 31 requests"; empty when there is nothing to lose."""
    if not run.store_file.is_file():
        return ""
    try:
        with contextlib.closing(store.connect(str(run.store_file))) as database:
            n_keys = len(KeyStore(database).all())
            n_requests = sum(line.n_requests for line in UsageStore(database).usage(("model",)))
    except PenstockError:
        return "keys and usage that cannot be read"
    texts = (f"{n_keys} key{'s' * (n_keys != 1)}", f"{n_requests} request{'s' * (n_requests != 1)}")
    return " and ".join(texts) if n_keys or n_requests else ""


def _of_targets(
    names: Iterable[str], ask: Callable[[Target], list[run_folder.Left]]
) -> tuple[list[Leftover], list[str]]:
    items, silent = list[Leftover](), list[str]()
    for target in map(targets.load, names):
        try:
            items += [Leftover(target.name, left.place, left.what, left=left) for left in ask(target)]
        except PenstockError as exc:
            silent.append(exc.message)
    return items, silent


def _process_facts(process: Marked) -> ProcessFacts:
    # A node on a machine that others share has no run folder there: the target that placed it ends it.
    is_near = process.run.startswith("/") and processes.is_near(process.pid)
    folder = _folder_seen_by(process) if is_near else "unseen"
    is_of_home = Path(process.run).parent == home() / "runs"
    return ProcessFacts(process, is_near and (folder == "unseen" or is_of_home), folder)


def _folder_seen_by(process: Marked) -> FolderState:
    run = Run(Path(process.run))
    state = _state_of(run, process.run_id)
    # A log that is still there belongs to a folder that is hidden from us: its file system was mounted over, or away.
    return "unseen" if state in ("absent", "replaced") and _writes_a_log(process.pid) else state


def _state_of(run: Run, run_id: str | None = None) -> FolderState:
    """A run folder as it looks from here, for a process of the launch `run_id`."""
    try:
        if run.path not in run.path.parent.iterdir() or all(_is_of_store(run, path) for path in run.path.iterdir()):
            return "absent"
        if run_folder.is_locked(run):  # some command is changing it: a `down` may drain for minutes
            return "living"
        record = run.record()
    except OSError:
        return "unseen"
    except PenstockError:  # a damaged folder
        return "living"
    if run_id is not None and record.id != run_id:
        return "replaced"
    return "ended" if run.is_ended() else "living"


def _is_of_store(run: Run, path: Path) -> bool:
    """Whether a file of the run folder has keys and usage, which outlive the run: the store and SQLite's own."""
    return path.name.startswith(run.store_file.name)


def _writes_a_log(pid: int) -> bool:
    """Whether its output goes to a file that exists."""
    try:
        output = str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return True  # it cannot be known
    return output.startswith("/") and not output.startswith("/dev/") and not output.endswith(" (deleted)")


def _folder_facts(path: Path, run_id: str, ids: Collection[str]) -> FolderFacts:
    try:
        owner = owner_of(path)
        is_of_home = owner.parent == home() / "runs" if owner is not None else run_id in ids
        is_own = is_of_home and path.lstat().st_uid == os.getuid()
        return FolderFacts(str(path), run_id, is_own, is_own and is_held(path))
    except OSError:
        return FolderFacts(str(path), run_id, is_own=False, is_held=True)


def clean(items: Sequence[Leftover]) -> list[Leftover]:
    """Remove leftovers. Returns those that could not be removed."""
    marked = [item.process for item in items if item.process is not None]
    segments = processes.shared_memory(marked)
    stuck = {process.pid for process in processes.end(marked, 3.0)}
    processes.unlink_shared_memory(segments)
    left = [item for item in items if item.process is not None and item.process.pid in stuck]
    for item in items:
        if item.left is not None:
            try:
                targets.finish(item.left)
            except PenstockError:
                left.append(item)
        elif item.process is None:
            place = Path(item.name)
            with contextlib.suppress(OSError):
                if item.kind == "folder" or (item.kind == "run" and not _stored(Run(place))):
                    shutil.rmtree(place)
                else:
                    _empty(Run(place if item.kind == "run" else place.parent), of_keys=item.kind == "keys")
            if Run(place).exists() if item.kind == "run" else place.exists():
                left.append(item)
    return left


def _empty(run: Run, of_keys: bool) -> None:
    """Remove the keys and the usage, or all but those, which the next deployment of that name takes over.

    The record goes last: it makes the folder a run. A write-ahead log goes before its file: the next would read it.
    """
    for path in sorted(sorted(run.path.iterdir(), reverse=True), key=lambda path: path.name == "run.json"):
        if _is_of_store(run, path) == of_keys:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with contextlib.suppress(OSError):  # something stays
        run.path.rmdir()
