"""The verb `scale`."""

from __future__ import annotations

import msgspec

from penstock import run_folder, targets
from penstock.deployment.events import asked_by
from penstock.deployment.start import OnState, revive, watch
from penstock.errors import PenstockError, UserError
from penstock.planner import launch
from penstock.run_folder import Run, State
from penstock.spec.deployment import Deployment
from penstock.targets import Target
from penstock.wire.announcement import SERVING


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
