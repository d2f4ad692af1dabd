"""The verb `scale`."""

from __future__ import annotations

from penstock import run_folder, targets
from penstock.deployment.events import asked_by
from penstock.deployment.start import OnState, revive, watch
from penstock.errors import PenstockError, UserError
from penstock.planner import launch
from penstock.run_folder import Desired, Run, State
from penstock.wire.announcement import SERVING


def scale(run: Run, n_replicas: int) -> None:
    """Ask for this many replicas; the controller places and drains. Raises PlanError when the machine is too small."""
    with run_folder.locked(run.name):
        desired = run.desired()
        if desired.state == "down":
            raise UserError(f'cannot scale deployment "{run.name}": it is down', hint=f"penstock up {run.name}")
        more = n_replicas - desired.replicas
        deployment = run.deployment()
        target = targets.load(deployment.target)
        if more > 0 and not target.is_elastic:
            now, then = (target.nodes_per_machine(deployment, run.handle(), n_more) for n_more in (0, more))
            for machine, n_before, n_after in zip(target.machines(deployment), now, then, strict=True):
                if n_after > n_before:
                    launch.check_room(deployment, run.plan(), machine, n_after - n_before)
        target.order(run, Desired("up", n_replicas))
        run.add_event("scale", f"{desired.replicas} -> {n_replicas} replicas", who=asked_by())
        revive(run)


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
