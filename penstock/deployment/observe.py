"""A run as it is now: what its target places, what its gateway knows, which of its processes live. Changes nothing."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock import processes, targets
from penstock.errors import PenstockError
from penstock.planner import Plan
from penstock.planner.memory.measured import Difference, difference
from penstock.run_folder import Desired, Handle, Part, Phase, ReplicaStatus, Run, State
from penstock.targets import Placement
from penstock.wire.announcement import GatewayView, Restart
from penstock.wire.client import Client

_TIMEOUT_S = 2.0
_FRESH_S = 5.0


class History(msgspec.Struct, frozen=True):
    """What an observation alone cannot know: restarts of parts, and nodes that were placed again."""

    controller: Part = Part("gone")
    gateway: Part = Part("gone")
    replicas: dict[str, tuple[Restart, ...]] = {}
    failed: dict[str, ReplicaStatus] = {}
    refused: dict[str, str] = {}  # by the target when they were last placed, and why
    was_ready: bool = False


class Observation(msgspec.Struct, frozen=True):
    """One look: placements by replica, the gateway's view (None when it does not answer).

    Of a gateway that the target places: its part as it is now, and what the target says (None when it cannot).
    """

    placements: dict[str, Placement]
    view: GatewayView | None
    gateway_is_alive: bool
    gateway: Part | None = None
    gateway_jobs: dict[str, Placement] | None = None


def look(run: Run, handle: Handle, gateway: Part) -> Observation:
    """Ask the target and the gateway. Blocks for at most a few seconds."""
    target = targets.load(handle.target)
    placements = target.status(run, handle) if handle.replicas else {}
    if run.is_gateway_placed:
        jobs = target.gateway_jobs(run)
        part = gateway if jobs is None else _placed(run, gateway, jobs)
        is_alive = part.state == "running"
        return Observation(placements, admin_view(run) if is_alive else None, is_alive, part, jobs)
    alive = gateway.process is not None and processes.is_alive(gateway.process)
    return Observation(placements, admin_view(run) if alive else None, alive)


def _placed(run: Run, last: Part, jobs: dict[str, Placement]) -> Part:
    """The gateway's part, from its target's word and the address that its newest job wrote."""
    alive = {job: place for job, place in jobs.items() if place.state in ("queued", "placed")}
    serving = run.gateway_address().job if run.gateway_address_file.exists() else None
    names = list(jobs)
    newest = next(reversed(alive), None)
    if serving in alive:
        # It has told its address: a queue that still has it waiting was asked before it started.
        notes = [f"job {serving}" if alive[serving].state == "queued" else alive[serving].reason]
        if newest is not None and newest != serving:
            notes.append(alive[newest].reason)
        return msgspec.structs.replace(last, state="running", job=serving, note="; ".join(filter(None, notes)))
    # One that is older than the last that served cannot take its address back.
    if newest is None or (serving in names and names.index(serving) > names.index(newest)):
        return msgspec.structs.replace(last, state="gone", note=None)
    place = jobs[newest]
    state: Literal["queued", "starting"] = "queued" if place.state == "queued" else "starting"
    return msgspec.structs.replace(last, state=state, job=newest, note=place.reason)


def admin_client(run: Run) -> Client:
    """The gateway's admin address, with its token."""
    return Client(run.admin_url, api_key=run.admin_token(), timeout_s=_TIMEOUT_S)


def admin_view(run: Run) -> GatewayView | None:
    """The gateway's replica table; None when it does not answer."""
    try:
        return msgspec.convert(admin_client(run).get_json("/admin/replicas"), GatewayView)
    except (PenstockError, OSError, msgspec.ValidationError):
        return None


def summarise(desired: Desired, seen: Observation, history: History, now: float) -> State:
    """The state of a deployment from one look. Pure; `now` in Unix seconds."""
    rows = {row.announcement.replica: row for row in (seen.view.replicas if seen.view else ())}
    names = sorted({*seen.placements, *history.failed, *history.refused}, key=lambda name: (len(name), name))
    replicas = []
    for name in names:
        waits = Placement("queued", history.refused[name]) if name in history.refused else Placement("gone")
        placement = seen.placements.get(name, waits)
        row, earlier = rows.get(name), history.replicas.get(name, ())
        if name in history.failed:
            replicas.append(history.failed[name])
            continue
        told = row.announcement if row else None
        # A node that was placed again is remembered with what it had told: until the new one speaks, both say it.
        earlier = tuple(restart for restart in earlier if told is None or restart not in told.restarts)
        state = _replica_state(placement, told.state if row and told and row.is_alive else None)
        restarts = (*earlier, *(told.restarts if told else ()))
        replicas.append(
            ReplicaStatus(
                replica=name,
                state="draining" if row and row.is_draining and state == "ready" else state,
                placement=placement.state,
                announcement=told,
                in_flight=row.in_flight if row else 0,
                is_draining=row.is_draining if row else False,
                n_restarts=len(earlier) + (told.n_restarts if told else 0),
                restarts=restarts[-10:],
                reason=placement.reason or (told.reason if told else None),
                starts_at=placement.starts_at,
                ends_at=placement.ends_at,
            )
        )
    gateway = msgspec.structs.replace(history.gateway, state="running" if seen.gateway_is_alive else "gone")
    if seen.gateway is not None:
        gateway = msgspec.structs.replace(
            seen.gateway, n_restarts=history.gateway.n_restarts, restarts=history.gateway.restarts
        )
    return State(
        observed_at=round(now, 3),
        phase=_phase(desired, replicas, seen, history.was_ready),
        desired_replicas=desired.replicas,
        replicas=tuple(replicas),
        controller=history.controller,
        gateway=gateway,
        requests_total=seen.view.requests_total if seen.view else 0,
        reason=next((replica.reason for replica in replicas if replica.state == "failed"), None),
    )


def _replica_state(placement: Placement, told: str | None) -> str:
    if placement.state == "broken":  # its first node may be alive, and says more
        return told if told and told != "ready" else "broken"
    if placement.state != "placed":
        return placement.state
    return told or "starting"


def _phase(desired: Desired, replicas: list[ReplicaStatus], seen: Observation, has_been_ready: bool) -> Phase:
    if desired.state == "down":
        return "stopping" if replicas or seen.gateway_is_alive else "down"
    n_ready = sum(replica.state == "ready" for replica in replicas)
    if n_ready >= desired.replicas and seen.view is not None:
        return "ready"
    if any(replica.state == "failed" for replica in replicas):
        return "degraded" if n_ready else "failed"
    was_ready = has_been_ready or any(replica.n_restarts or _has_been_ready(replica) for replica in replicas)
    return "degraded" if n_ready or was_ready else "starting"


def _has_been_ready(replica: ReplicaStatus) -> bool:
    return bool(replica.announcement and replica.announcement.ready_after_s is not None)


def kv_cache_differences(plan: Plan, state: State) -> dict[str, Difference]:
    """By replica, the KV cache of one GPU that its engine reported, against the plan's; pure. Empty without a plan."""
    if plan.forecast is None:
        return {}
    found = {
        replica.replica: difference(plan.forecast.kv_cache_gib, replica.announcement.measured)
        for replica in state.replicas
        if replica.announcement is not None
    }
    return {name: one for name, one in found.items() if one is not None}


def now_state(run: Run, now: float) -> State:
    """The truth about a run: the controller's last word when it is alive and fresh, else a look of our own."""
    last, desired = run.state(), run.desired()
    if last is not None and run.is_ended():
        return last
    controller = last.controller if last else Part("gone")
    alive = controller.process is not None and processes.is_alive(controller.process)
    if last is not None and alive and now - last.observed_at < _FRESH_S:
        return last if desired.state == "up" else msgspec.structs.replace(last, phase="stopping")
    history = History(
        controller=msgspec.structs.replace(controller, state="running" if alive else "gone"),
        gateway=last.gateway if last else Part("gone"),
        replicas={replica.replica: replica.restarts for replica in (last.replicas if last else ())},
        failed={replica.replica: replica for replica in (last.replicas if last else ()) if replica.state == "failed"},
        was_ready=last is not None and last.phase in ("ready", "degraded"),
    )
    state = summarise(desired, look(run, run.handle(), history.gateway), history, now)
    if desired.state == "down":  # also when nothing of it lives any more: a `down` that broke off wrote no end
        return msgspec.structs.replace(state, phase="stopping")
    return state
