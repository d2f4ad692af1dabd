"""A run as it is now: what its target places, what its gateway knows, which of its processes live. Changes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import msgspec

from penstock import log_lines, processes, targets
from penstock.errors import PenstockError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.usage_store import UsageStore
from penstock.planner import Plan
from penstock.planner.memory.measured import Difference, difference
from penstock.run_folder import Desired, Part, Phase, ReplicaStatus, Run, State, Unit, order
from penstock.targets import Placement
from penstock.wire.announcement import ACTIVE, SERVING, UPSTREAM, Announcement, GatewayView, ReplicaView, Restart
from penstock.wire.client import Client
from penstock.wire.gateways import ask_each, clients, joined
from penstock.wire.scaling import Scaling
from penstock.world import Processes

_TIMEOUT_S = 2.0
_GATEWAY_STARTS = 3  # a gateway that died this often during `up` will not come
_FRESH_S = 5.0
_LAST_LINES = 20
_PLACED_FRESH_S = 60.0  # its files come by a shared file system, and its clock is another machine's


class History(msgspec.Struct, frozen=True):
    """What an observation alone cannot know: restarts, failures, and units that the target refused, with its reason."""

    controller: Part = Part("gone")
    gateway: Part = Part("gone")
    replicas: dict[str, tuple[Restart, ...]] = {}
    failed: dict[str, ReplicaStatus] = {}
    refused: dict[str, str] = {}
    was_ready: bool = False
    prometheus: Part | None = None
    ui: Part | None = None


class Observation(msgspec.Struct, frozen=True):
    """One look. `view`: the gateway's replica table, None when it does not answer. A gateway next to `up` counts as a
    unit too; its name is the number of its restarts. `page_url`: of a placed chat page, for clients outside."""

    placements: dict[Unit, Placement]
    view: GatewayView | None
    gateway: Part
    page_url: str | None = None


def look(run: Run, last: Part, of: Processes = processes) -> Observation:
    """Ask the target and the gateway; `last`: the gateway as it was. Blocks for at most a few seconds."""
    handle = run.handle()
    placements = targets.load(handle.target).status(run) if handle.units else {}
    if run.places("gateway"):
        part = _placed(run, last, placements)
    else:
        part, local = _local(run, last, of)
        placements = placements | local
    view = admin_view(run) if part.state == "running" else None
    return Observation(placements, view, part, run.public_page_url)


def _local(run: Run, last: Part, of: Processes) -> tuple[Part, dict[Unit, Placement]]:
    if last.process is None:
        return msgspec.structs.replace(last, state="gone"), {}
    unit = Unit("gateway", str(last.n_restarts))
    if of.is_alive(last.process):
        return msgspec.structs.replace(last, state="running", unit=unit.name), {unit: Placement("placed")}
    reason = f"its process {last.process.pid} was gone{last_words(run.log('gateway'))}"
    return msgspec.structs.replace(last, state="gone", unit=unit.name), {unit: Placement("gone", reason)}


def _placed(run: Run, last: Part, placements: Mapping[Unit, Placement]) -> Part:
    alive = sorted(
        (unit for unit, place in placements.items() if unit.kind == "gateway" and place.state != "gone"), key=order
    )
    serving = Unit("gateway", run.gateway_address().unit) if run.gateway_address_file.exists() else None
    newest = alive[-1] if alive else None
    if serving in alive:
        # It has written its address: a queue in which it still waits was read before it started.
        is_late = placements[serving].state == "queued"
        notes = [f"gateway {serving.name}" if is_late else placements[serving].reason]
        if newest is not None and newest != serving:
            notes.append(placements[newest].reason)
        note = "; ".join(filter(None, notes))
        return msgspec.structs.replace(last, state="running", unit=serving.name, note=note)
    # One that is older than the last that served cannot take its address back.
    if newest is None or (serving is not None and order(newest) < order(serving)):
        return msgspec.structs.replace(last, state="gone", note=None)
    place = placements[newest]
    state: Literal["queued", "starting"] = "queued" if place.state == "queued" else "starting"
    return msgspec.structs.replace(last, state=state, unit=newest.name, note=place.reason)


def last_words(log: Path) -> str:
    """The last line of a log as the end of a sentence, where it is an error."""
    line = log_lines.last_words(log_lines.file_lines(log, follow=False, last=_LAST_LINES), signs=(), most=200) or ""
    explains = any(word in line.lower() for word in ("error", "err=", "cannot "))
    return f"; its last line: {line}" if explains else ""


def gateways(run: Run, timeout_s: float = _TIMEOUT_S) -> list[Client]:
    """Clients of the admin port, one for each gateway.  Raises PenstockError while there is none."""
    return clients(run.admin_url, run.admin_token(), timeout_s)


def admin_view(run: Run) -> GatewayView | None:
    """The replica table of all gateways; None when none answers."""
    try:
        answers = ask_each(gateways(run), lambda gateway: gateway.get_json("/admin/replicas"))
        return joined([msgspec.convert(answer, GatewayView) for answer in answers])
    except (PenstockError, OSError, msgspec.ValidationError):
        return None


def has_failed(state: State) -> bool:
    """Whether a start does not succeed: a replica failed, or no gateway of it lived."""
    is_gateway_lost = state.gateway.n_restarts >= _GATEWAY_STARTS and state.requests_total == 0
    return is_gateway_lost or any(row.state == "failed" for row in state.replicas)


def summarise(
    desired: Desired, seen: Observation, history: History, now: float, scaling: Scaling | None = None
) -> State:
    """The state of a deployment from one look. Pure; `now` in Unix seconds. `scaling` has the number of replicas where
    that follows the load."""
    if scaling is not None:
        desired = msgspec.structs.replace(desired, replicas=scaling.replicas)
    rows = {row.announcement.replica: row for row in (seen.view.replicas if seen.view else ())}
    placements = {unit.name: placement for unit, placement in seen.placements.items() if unit.kind == "replica"}
    names = sorted({*placements, *history.failed, *history.refused}, key=lambda name: (len(name), name))
    replicas = []
    for name in names:
        waits = Placement("queued", history.refused[name]) if name in history.refused else Placement("gone")
        placement = placements.get(name, waits)
        row, earlier = rows.get(name), history.replicas.get(name, ())
        if name in history.failed:
            replicas.append(history.failed[name])
            continue
        announcement = _kept(row.announcement) if row else None
        # A node that was placed again is remembered with its restarts: until the new one announces, both have them.
        earlier = tuple(restart for restart in earlier if announcement is None or restart not in announcement.restarts)
        # The lease of a node that was placed again may still run: what it announced before is not true any more.
        is_old = row is not None and bool(earlier) and now - row.age_s < earlier[-1].at
        state, why = _replica_state(placement, None if is_old else row, now, seen.view is not None)
        restarts = (*earlier, *(announcement.restarts if announcement else ()))
        replicas.append(
            ReplicaStatus(
                replica=name,
                state="draining" if row and row.is_draining and state in ACTIVE else state,
                placement=placement.state,
                announcement=announcement,
                in_flight=row.in_flight if row else 0,
                is_draining=row.is_draining if row else False,
                n_restarts=len(earlier) + (announcement.n_restarts if announcement else 0),
                restarts=restarts[-10:],
                reason=placement.reason or why,
                starts_at=placement.starts_at,
                ends_at=placement.ends_at,
                ends_by=placement.ends_by,
            )
        )
    gateway = msgspec.structs.replace(
        history.gateway, state=seen.gateway.state, unit=seen.gateway.unit, note=seen.gateway.note
    )
    # Those whose time is over serve until a successor does.
    in_time = [row for row in replicas if row.ends_at is None or row.ends_at > now]
    return State(
        observed_at=round(now, 3),
        phase=_phase(desired, in_time, seen, history.was_ready, scaling),
        desired_replicas=desired.replicas,
        replicas=tuple(replicas),
        controller=history.controller,
        gateway=gateway,
        prometheus=history.prometheus,
        ui=_page(seen, history.ui),
        requests_total=seen.view.requests_total if seen.view else 0,
        reason=next((replica.reason for replica in replicas if replica.state == "failed"), None),
        scaling=scaling,
        upstreams=tuple(_upstream(row) for name, row in sorted(rows.items()) if name.startswith(UPSTREAM)),
    )


def _upstream(row: ReplicaView) -> ReplicaStatus:
    facts = row.announcement
    state = facts.state if row.is_alive else "silent"
    return ReplicaStatus(facts.replica, state, "elsewhere", _kept(facts), row.in_flight, reason=facts.reason)


_PAGE_STATES: dict[str, Literal["running", "queued", "starting", "gone"]] = {
    "placed": "running", "queued": "queued", "broken": "starting", "gone": "gone"
}  # fmt: skip


def _page(seen: Observation, last: Part | None) -> Part | None:
    """The chat page: the controller's own, or as its target sees the one that it placed."""
    unit = next((unit for unit in seen.placements if unit.kind == "ui"), None)
    if unit is None:
        return last
    place = seen.placements[unit]
    state, url = _PAGE_STATES[place.state], seen.page_url
    return msgspec.structs.replace(last or Part("gone"), state=state, unit=unit.name, note=place.reason, url=url)


def _kept(announcement: Announcement) -> Announcement:
    """Without what changes each second, which would be written each second."""
    load = announcement.load
    if load is not None:
        load = msgspec.structs.replace(load, prompt_tokens=0.0, output_tokens=0.0, cached_tokens=0.0, at_s=0.0)
    return msgspec.structs.replace(announcement, machines=(), load=load)


def is_silent(row: ReplicaView, placement: Placement, wall_s: float) -> bool:
    """Whether a placed unit has stopped announcing since it was placed. `wall_s`: Unix time."""
    if placement.state != "placed" or row.is_alive or row.announcement.state in ("stopping", "failed"):
        return False
    return wall_s - row.age_s > (placement.placed_at or 0.0)


def _replica_state(
    placement: Placement, row: ReplicaView | None, now: float, is_gateway_heard: bool
) -> tuple[str, str | None]:
    """The state, and the reason as far as the target does not know one."""
    announcement = row.announcement if row is not None else None
    why = announcement.reason if announcement is not None else None
    heard = announcement.state if announcement is not None and row is not None and row.is_alive else None
    if placement.state == "broken":  # its first node may be alive, and says more
        return heard if heard and heard not in SERVING else "broken", why
    if placement.state != "placed":
        return placement.state, why
    if row is not None and is_silent(row, placement, now):
        where = placement.where or "its node"
        silent_s = row.age_s // 5 * 5  # steps, so that the state on disk is not written each second
        return "silent", f"{where} has not reported for {silent_s:.0f} s: the machine or the network may be down"
    return heard or "starting", why if heard or not is_gateway_heard else "its node has not reported yet"


def _phase(
    desired: Desired, replicas: list[ReplicaStatus], seen: Observation, has_been_ready: bool, scaling: Scaling | None
) -> Phase:
    """Where the number follows the load it is "ready" with the least: more are on their way. One that wakes starts."""
    if desired.state == "down":
        return "stopping" if replicas or seen.gateway.state == "running" else "down"
    n_ready = sum(replica.state in SERVING for replica in replicas)
    n_least = desired.replicas
    if scaling is not None and not scaling.is_pinned:
        n_least = min(n_least, max(scaling.least, 1))
        has_been_ready = has_been_ready and scaling.least > 0
    if n_ready >= n_least and seen.view is not None:
        return "ready"
    if any(replica.state == "failed" for replica in replicas):
        return "degraded" if n_ready else "failed"
    was_ready = has_been_ready or any(
        replica.n_restarts or (replica.announcement and replica.announcement.ready_after_s is not None)
        for replica in replicas
    )
    return "degraded" if n_ready or was_ready else "starting"


def kv_cache_differences(plan: Plan, state: State) -> dict[str, Difference]:
    """By replica, the KV cache that its engine reported against the plan's; pure. Empty without a forecast."""
    if plan.forecast is None:
        return {}
    gaps = {
        replica.replica: difference(plan.forecast.kv_cache_gib, replica.announcement.measured)
        for replica in state.replicas
        if replica.announcement is not None
    }
    return {name: gap for name, gap in gaps.items() if gap is not None}


def cost_usd(run: Run) -> float | None:
    """The cost of all requests so far; None without a price, or with a store elsewhere."""
    if run.places("gateway") and not targets.load(run.record().target).shares_files:
        return None
    place = run.gateway_file().store
    if run.deployment().gateway.price is None or place is None or store.is_postgres(place):
        return None
    with contextlib.suppress(PenstockError):
        lines = UsageStore(store.connect(place, store.BUSY_S)).usage(("model",))
        return sum(line.cost_usd or 0.0 for line in lines)
    return None


def now_state(run: Run, now: float) -> State:
    """The state of a run: the controller's last one when it is alive and fresh, else a look of our own.

    Where the target keeps it and cannot be reached: the last known, which says so.  Raises PenstockError without one.
    """
    if run.is_ended():
        return cast(State, run.state())
    try:
        targets.load(run.handle().target).fetch(run)
    except PenstockError as exc:
        known = run.state()
        if known is None:
            raise
        at = time.strftime("%H:%M:%S", time.localtime(known.observed_at))
        return msgspec.structs.replace(known, reason=f"{exc.message}; this is what was seen at {at}")
    if run.is_ended():  # by another machine
        return cast(State, run.state())
    last, desired = run.state(), run.desired()
    controller = _controller(run, last.controller if last else Part("gone"))
    alive = controller.state == "running"
    fresh_s = _FRESH_S if controller.unit is None else _PLACED_FRESH_S
    if last is not None and alive and now - last.observed_at < fresh_s:
        return last if desired.state == "up" else msgspec.structs.replace(last, phase="stopping")
    history = History(
        controller=controller,
        gateway=last.gateway if last else Part("gone"),
        replicas={replica.replica: replica.restarts for replica in (last.replicas if last else ())},
        failed={replica.replica: replica for replica in (last.replicas if last else ()) if replica.state == "failed"},
        was_ready=last is not None and last.phase in ("ready", "degraded"),
        prometheus=last.prometheus if last else None,
        ui=last.ui if last else None,
    )
    scaling = last.scaling if last is not None else None
    if scaling is not None and desired.is_pinned:
        scaling = msgspec.structs.replace(scaling, replicas=desired.replicas, is_pinned=True)
    state = summarise(desired, look(run, history.gateway), history, now, scaling)
    if desired.state == "down":  # also when nothing of it lives any more: a `down` that broke off wrote no end
        return msgspec.structs.replace(state, phase="stopping")
    return state


def _controller(run: Run, last: Part) -> Part:
    """The controller as it is now. A placed one runs when it has written its name; before that it waits or starts."""
    if not run.places("controller"):
        is_alive = last.process is not None and processes.is_alive(last.process)
        return msgspec.structs.replace(last, state="running" if is_alive else "gone")
    placements = targets.load(run.handle().target).status(run)
    units = sorted((u for u, p in placements.items() if u.kind == "controller" and p.state != "gone"), key=order)
    own = next((unit for unit in units if unit.name == last.unit), None)
    if own is not None and placements[own].state == "placed":
        return msgspec.structs.replace(last, state="running", note=None)
    if not units:
        why = [place.reason for unit, place in placements.items() if unit.kind == "controller" and place.reason]
        return msgspec.structs.replace(last, state="gone", note=why[-1] if why else None)
    newest = placements[units[-1]]
    state: Literal["queued", "starting"] = "queued" if newest.state == "queued" else "starting"
    return msgspec.structs.replace(last, state=state, note=newest.reason)
