"""The verbs `down` and `clean`: end a deployment, find what nobody owns."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import processes, run_folder, targets
from penstock.errors import PenstockError
from penstock.paths import every_temporary, remove_temporary
from penstock.processes import Marked
from penstock.run_folder import Desired, Run, State
from penstock.spec import deployment
from penstock.targets import LeftBehind

_CONTROLLER_GRACE_S = 3.0
_NOW_GRACE_S = 1.0

OnStep = Callable[[str], None]


def down(run: Run, now: bool = False, on_step: OnStep | None = None, forget: bool = False) -> list[Marked]:
    """End everything of a run: requests in flight finish first, unless `now`. Blocks; safe to repeat.

    Needs nothing alive: a crash leaves a folder from which this still works. `forget`: give up what cannot be reached,
    on machines that are gone for good. Returns what had to be ended by force.
    """
    with run_folder.locked(run.name):
        return end_run(run, now, on_step, forget=forget)


def end_run(
    run: Run, now: bool, on_step: OnStep | None, failure: State | None = None, forget: bool = False
) -> list[Marked]:
    """As `down`, for a caller that holds the lock. `failure`: the state that stays, of a start that failed."""
    say = on_step or (lambda _: None)
    last = failure or run.state()
    run.write_desired(Desired("down", 0))
    say("ending the controller")
    processes.end(
        [p for p in processes.find_marked(str(run.path)) if p.role in ("watchdog", "controller")], _CONTROLLER_GRACE_S
    )
    gateways = [p for p in processes.find_marked(str(run.path)) if p.role == "gateway"]
    if gateways:
        drain_s = _gateway_drain_s(run)
        say("ending the gateway" if now else f"draining the gateway (at most {drain_s:.0f} s)")
        processes.end(gateways, _NOW_GRACE_S if now else drain_s + 2.0)
    say("ending the replicas")
    grace_s = _engine_drain_s(run) + 10.0  # a gateway has drained then, so this is for the engines' own tidy end
    if run.places("gateway"):
        grace_s = max(grace_s, _gateway_drain_s(run) + 2.0)
    try:
        targets.load(run.handle().target).end(run, _NOW_GRACE_S if now else grace_s)
    except PenstockError as exc:
        if not forget and not isinstance(exc, LeftBehind):
            raise
        say(f"{exc.message}. {'It is forgotten.' if forget else exc.hint}")  # the rest still ends
        run.add_event("forgotten" if forget else "left behind", exc.message)
    if forget:
        run_folder.forget_every_left(run)
    swept = processes.sweep(str(run.path))
    # What an engine mapped when it was last seen: its own helpers may have been killed with it.
    announcements = [replica.announcement for replica in (last.replicas if last else ()) if replica.announcement]
    processes.unlink_shared_memory(segment for announcement in announcements for segment in announcement.shared_memory)
    with contextlib.suppress(PenstockError):  # without its id, its temporary folders are for `clean` to find
        remove_temporary(run.record().id)
    _write_end(run, last, failure)
    run.add_event("failed" if failure else "down", (failure.reason or "") if failure else "everything ended")
    return swept


def _gateway_drain_s(run: Run) -> float:
    try:
        return run.deployment().gateway.drain_s
    except PenstockError:  # a damaged folder ends too
        return deployment.GatewaySpec().drain_s


def _engine_drain_s(run: Run) -> float:
    try:
        return run.plan().drain_s
    except PenstockError:
        return deployment.EngineSpec().drain_s


def _write_end(run: Run, last: State | None, failure: State | None) -> None:
    state = State(time.time(), "failed" if failure else "down", 0)
    if failure is not None and last is not None:
        state = msgspec.structs.replace(state, replicas=last.replicas, reason=failure.reason)
    run.write_state(state)


class Leftover(msgspec.Struct, frozen=True):
    """Something that no living deployment owns."""

    kind: str  # "process", "folder" (temporary), "run" (an ended deployment's folder), "host" (not reached by `down`)
    name: str
    what: str
    process: Marked | None = None
    left: run_folder.Left | None = None


def leftovers(with_ended_runs: bool = False) -> list[Leftover]:
    """Processes and temporary folders whose deployment is gone or ended; ended run folders when asked."""
    marked = processes.find_marked()
    ended = [run for run in run_folder.every() if run.is_ended() and not run_folder.is_locked(run)]
    owned = _owned_ids(marked)
    items = [
        Leftover("process", str(process.pid), f"{process.role} of {process.run}: {process.command}", process)
        for process in marked
        if process.run_id not in owned
    ]
    for path, run_id in every_temporary().items():
        if run_id not in owned:
            items.append(Leftover("folder", str(path), "temporary folder of an engine"))
    items += [Leftover("host", left.place, left.what, left=left) for left in run_folder.every_left()]
    if with_ended_runs:
        items += [Leftover("run", str(run.path), f'folder of the ended deployment "{run.name}"') for run in ended]
    return items


def _owned_ids(marked: list[Marked]) -> set[str]:
    """Ids of the launches that have not ended, or that a command is changing now: a `down` may drain for minutes."""
    # A process tells its run folder, so that deployments of another PENSTOCK_HOME are left alone.
    foreign = [Run(Path(process.run)) for process in marked if Path(process.run).is_absolute()]
    known = {run.path: run for run in [*run_folder.every(), *foreign]}
    # Nodes on machines that others share have no run folder there: the target that placed them ends them.
    owned = {process.run_id for process in marked if not Path(process.run).is_absolute()}
    for run in known.values():
        if run_folder.is_locked(run) or (run.exists() and not run.is_ended()):
            try:
                owned.add(run.record().id)
            except PenstockError:  # a damaged folder: its processes know their id
                owned |= {process.run_id for process in marked if process.run == str(run.path)}
    return owned


def clean(items: list[Leftover]) -> list[Leftover]:
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
            with contextlib.suppress(OSError):
                shutil.rmtree(item.name)
            if Path(item.name).exists():
                left.append(item)
    return left
