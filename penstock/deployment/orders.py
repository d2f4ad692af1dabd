"""The verbs `scale`, and `sleep` and `wake`: all replicas free their GPUs' memory, or take it again."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from penstock import run_folder, targets
from penstock.deployment import observe
from penstock.deployment.events import asked_by
from penstock.deployment.start import OnState, revive, watch
from penstock.errors import PenstockError, UserError
from penstock.planner import launch
from penstock.run_folder import Order, ReplicaStatus, Run, State
from penstock.spec.deployment import Deployment
from penstock.targets import Target
from penstock.wire.announcement import ACTIVE, ASLEEP, SERVING, SLEEPLESS

_IN_BETWEEN = ("sleeping", "waking")
_AWAKE = (*ACTIVE, "draining", "failed", "gone")


def scale(run: Run, n_replicas: int | None) -> None:
    """Ask for this many replicas, or with None for as many as the load needs; the controller places and drains.

    Raises PlanError when the machine is too small, and UserError where the number cannot follow the load.
    """
    with run_folder.locked(run.name):
        desired = run.desired()
        if desired.state == "down":
            raise UserError(f'cannot scale deployment "{run.name}": it is down', hint=f"penstock up {run.name}")
        deployment, before = run.deployment(), replicas_now(run)
        follows_load = deployment.replicas.follows_load
        target = targets.load(deployment.target)
        if n_replicas is None:
            if not follows_load:
                raise UserError(
                    f'cannot scale deployment "{run.name}" by its load: its file asks for {deployment.replicas.min}',
                    hint="Set replicas.max above replicas.min in its file, and: penstock up --replace",
                )
            target.order(run, msgspec.structs.replace(desired, replicas=before, is_pinned=False))
            run.add_event("scale", f"{before} -> auto: the load decides", who=asked_by())
        else:
            _check_room(run, target, deployment, n_replicas - before)
            target.order(run, msgspec.structs.replace(desired, replicas=n_replicas, is_pinned=follows_load))
            pinned = ", pinned" if follows_load else ""
            run.add_event("scale", f"{before} -> {n_replicas} replicas{pinned}", who=asked_by())
        revive(run)


def replicas_now(run: Run) -> int:
    """How many replicas there shall be: what was asked for, or what the load needs."""
    desired, state = run.desired(), run.state()
    if desired.is_pinned or state is None or state.scaling is None:
        return desired.replicas
    return state.scaling.replicas


def _check_room(run: Run, target: Target, deployment: Deployment, n_more: int) -> None:
    if n_more <= 0 or target.is_elastic:
        return
    now, then = (target.nodes_per_machine(deployment, run.handle(), n) for n in (0, n_more))
    for machine, n_before, n_after in zip(target.machines(deployment), now, then, strict=True):
        if n_after > n_before:
            launch.check_room(deployment, run.plan(), machine, n_after - n_before)


def wait_scaled(run: Run, n_replicas: int, on_state: OnState, timeout_s: float | None = None) -> State:
    """Block until exactly this many replicas are ready.  Raises PenstockError for one that failed."""
    state = watch(run, on_state, lambda state: is_scaled(state, n_replicas), timeout_s)
    failed = next((replica for replica in state.replicas if replica.state == "failed"), None)
    if failed is not None:
        raise PenstockError(f"could not start replica {failed.replica}: {failed.reason}")
    return state


def is_scaled(state: State, n_replicas: int) -> bool:
    settled = len(state.replicas) == n_replicas and all(r.state in (*SERVING, "failed") for r in state.replicas)
    return settled and state.desired_replicas == n_replicas


# ---- sleep and wake -------------------------------------------------------------------------------------------------


def order(run: Run, word: Literal["sleep", "wake"]) -> dict[str, str]:
    """Ask every replica to sleep when no request runs on it, or to wake; the states of those that can, by name.

    Raises UserError where none can sleep.
    """
    with run_folder.locked(run.name):
        desired, plan = run.desired(), run.plan()
        if desired.state == "down":
            raise UserError(f'cannot {word} deployment "{run.name}": it is down', hint=f"penstock up {run.name}")
        if plan.sleep is None:
            raise UserError(
                f'cannot {word} deployment "{run.name}": it was started without engine.sleep',
                hint="Write `sleep: {level: auto}` into the block engine of its file, and `penstock up --replace`.",
            )
        rows = observe.now_state(run, time.time()).replicas
        asked = {row.replica: row.state for row in rows if row.state in SERVING}
        if not asked:
            raise UserError(
                f'cannot {word} deployment "{run.name}": no replica is ready', hint=f"penstock status {run.name}"
            )
        new = msgspec.structs.replace(desired, order=Order(word, time.time()))
        targets.load(run.record().target).order(run, new)
        run.add_event(word, "every replica", who=asked_by())
        revive(run)
        return asked


def wait_ordered(
    run: Run,
    word: Literal["sleep", "wake"],
    asked: Mapping[str, str],
    on_state: OnState,
    timeout_s: float | None = None,
) -> State:
    """Block until each replica that `order` asked sleeps, or is awake.

    Raises PenstockError for one that does not sleep: it cannot, its engine was lost, or a request woke it.
    """
    were_asleep = {name for name, state in asked.items() if state in _IN_BETWEEN}

    def is_done(state: State) -> bool:
        rows = [row for row in state.replicas if row.replica in asked]
        if word == "wake":
            return all(row.state in _AWAKE for row in rows)
        were_asleep.update(row.replica for row in rows if is_asleep(row))
        return all(is_asleep(row) or _why_awake(row, were_asleep) is not None for row in rows)

    state = watch(run, on_state, is_done, timeout_s)
    rows = [row for row in state.replicas if row.replica in asked]
    awake = {row.replica: why for row in rows if (why := _why_awake(row, were_asleep)) is not None}
    if word == "sleep" and awake:
        name, why = next(iter(awake.items()))
        raise PenstockError(f'replica {name} of "{run.name}" {why}', is_retryable=True)
    return state


def is_asleep(row: ReplicaStatus) -> bool:
    progress = row.announcement.progress if row.announcement is not None else None
    return row.state == "sleeping" and progress is not None and progress.stage.startswith(ASLEEP)


def _why_awake(row: ReplicaStatus, were_asleep: Collection[str]) -> str | None:
    """Why a replica that was asked to sleep will not; None while it may."""
    if row.state not in SERVING:
        return f"is {row.state}" + (f": {row.reason}" if row.reason else "")
    if row.state == "ready" and row.reason is not None and row.reason.startswith(SLEEPLESS):
        return row.reason
    return "was woken by a request" if row.state == "ready" and row.replica in were_asleep else None
