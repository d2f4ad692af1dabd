"""What the controller does next: a pure function of what it observes and of what it remembers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from penstock.deployment.observe import Observation, is_silent
from penstock.run_folder import Desired, Kind, Unit, order, replica
from penstock.targets import Placement
from penstock.wire.announcement import SERVING, ReplicaView

_LEAD_S = 60.0
_GATEWAY_LEAD_S = 120.0
_CONTROLLER_LEAD_S = 120.0
_CONTROLLER_PAUSE_S = 30.0
# A gateway that lives and does not answer for so long is ended: next to `up`, placed by the target, and one that has
# not written its address yet.
_HUNG_S, _PLACED_HUNG_S, _STARTING_HUNG_S = 8.0, 20.0, 180.0
_HANDOVER_S = 60.0
_LATE_S = 2.0
_TAKEN_AWAY = "its machines are taken away soon: the next is placed"
_LOST = "its machines may be lost, it does not report: the next is placed"


class Event(msgspec.Struct, frozen=True):
    """A line for events.jsonl. `seconds`: of a start, by stage."""

    kind: str
    text: str
    replica: str | None = None
    seconds: dict[str, float] = {}


class Memory(msgspec.Struct, frozen=True):
    """What is known from earlier looks; times in monotonic seconds.

    `failed`: replicas that are not placed again. `silent`: replicas that stopped announcing. `drain_since`: when a
    replica was first ordered to drain. `own`: the name of this controller, when it was placed. `silent_since`: since
    when the gateway does not answer; `handover_since`: since when two serve; `n_ready`: replicas that the last gateway
    knew; `lives_s`: how long a unit had to live when that was first seen; `due_at`: before that time a lost replica is
    not placed again.
    """

    drain_s: float
    gateway_drain_s: float
    failed: frozenset[str] = frozenset()
    drain_since: dict[str, float] = {}
    leaving: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    gateway_due_at: float = 0.0
    controller_due_at: float = 0.0
    own: str | None = None
    silent_since: float | None = None
    handover_since: float | None = None
    n_ready: int = 0
    lives_s: dict[str, float] = {}
    due_at: dict[str, float] = {}


class Decision(msgspec.Struct, frozen=True):
    """What to do now. `place` is the whole set of units that shall be placed, None when it is right already.

    `again`: replicas in it that are gone or broken, and due. `evict`: those of them whose last lease the gateway
    forgets, so that it does not count for the next. `forget`: failed replicas that are not wanted any more.
    `starts_gateway`: a gateway in `place` is new, `is_restart`: because none was left. `hands_over`: another controller
    runs, this one ends.
    """

    place: tuple[Unit, ...] | None = None
    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    starts_gateway: bool = False
    is_restart: bool = False
    hands_over: bool = False
    events: tuple[Event, ...] = ()


def decide(desired: Desired, seen: Observation, memory: Memory, now: float, wall_s: float) -> tuple[Decision, Memory]:
    """The next step towards what is desired, and what to remember. `now`: monotonic, `wall_s`: Unix seconds. Pure."""
    # A replica that left before its successor was ready is not placed again, also not when it was lost and requeued.
    rows = {row.announcement.replica: row for row in (seen.view.replicas if seen.view else ())}
    # One that was told to leave says so until its process ends: the next must not be drained in its place.
    alive = {name for name, row in rows.items() if row.is_alive and row.announcement.state != "stopping"}
    left = {name for name in memory.leaving if name not in alive and replica(name) in seen.placements}
    silent = {name for name, row in rows.items() if _is_lost(seen, row, wall_s)}
    # Twice: by then `status`, which a target reads too, names the lost machine.
    lost = silent & memory.silent
    leaving_now = leaving(seen, wall_s, memory.drain_s) | left | lost
    events = [
        Event("replica leaving", _LOST if name in lost else _why_leaving(seen, name), name)
        for name in sorted(leaving_now - memory.leaving)
    ]
    memory = msgspec.structs.replace(memory, leaving=leaving_now, silent=frozenset(silent))
    decision = _replicas(desired, seen, memory, now, silent)
    gateways, services, memory = _gateways(seen, memory, now, wall_s)
    controllers, hands_over, memory = _controllers(seen, memory, now, wall_s)
    replicas = decision.place if decision.place is not None else tuple(_of(seen, "replica"))
    place = (*controllers, *gateways, *replicas, *_of(seen, "ui"))  # a cluster brings its chat page back itself
    is_right = decision.place is None and set(place) == set(seen.placements)
    drain_since = {name: memory.drain_since.get(name, now) for name in decision.drain}
    return msgspec.structs.replace(
        decision,
        place=None if is_right else place,
        starts_gateway=services.starts_gateway,
        is_restart=services.is_restart,
        hands_over=hands_over,
        events=(*events, *services.events),
    ), msgspec.structs.replace(memory, drain_since=drain_since)


# ---- replicas --------------------------------------------------------------------------------------------------------


def _replicas(desired: Desired, seen: Observation, memory: Memory, now: float, silent: Collection[str]) -> Decision:
    """Replicas beyond the number (failed ones first, then queued ones, then the highest numbers) drain, and end when
    nothing runs on them. A replica whose machines are about to be reclaimed, or are silent, is replaced before it is
    ended.

    A silent one is ended when no request runs on it any more: it may have lost its way to the gateway alone.
    """
    failed = memory.failed
    current = [unit.name for unit in _of(seen, "replica")]
    staying = [name for name in current if name not in memory.leaving]
    down = {name for name in current if seen.placements[replica(name)].state in ("gone", "broken")}
    queued = {name for name in current if seen.placements[replica(name)].state == "queued"}
    wanted = _wanted(staying, desired.replicas, failed | down, queued, taken=current)
    rows = {row.announcement.replica: row for row in (seen.view.replicas if seen.view else ())}
    n_missing = desired.replicas - sum(_is_ready(rows.get(name)) for name in wanted)
    kept = [name for name in current if name in memory.leaving and not _is_gone(seen, name) and name not in queued]
    kept = kept[: max(0, n_missing)]
    extra = [name for name in current if name not in wanted and name not in kept]
    busy = {name for name, row in rows.items() if row.in_flight}
    idle = {name for name in extra if name not in busy and (name not in rows or rows[name].is_draining)}
    drained = [
        name
        for name in extra
        if now - memory.drain_since.get(name, now) > memory.drain_s
        or name in queued
        or (name in silent and name not in busy)
        or (seen.view is not None and name in idle)
    ]
    lost = [name for name in wanted if name not in failed and name in current and _is_to_repair(seen, name)]
    absent = [name for name in wanted if name not in failed and name not in current]
    place = None
    if lost or absent or drained:
        names = [name for name in [*wanted, *kept, *extra] if name not in drained and name not in failed]
        place = tuple(map(replica, names))
    undrain = tuple(name for name in wanted if name in rows and rows[name].is_draining)
    again = tuple(name for name in lost if now >= memory.due_at.get(name, now))
    evict = tuple(name for name in again if _is_gone(seen, name))
    forget = tuple(sorted(failed - {*wanted, *current}, key=_number))
    return Decision(place, tuple(extra), undrain, again, evict, forget)


def leaving(seen: Observation, wall_s: float, drain_s: float) -> frozenset[str]:
    """Ready replicas whose machines are taken away so soon that the next one must be started.

    The lead is the target's, or twice the time that this start took and the drain. One that is not ready yet is not
    leaving: else a limit shorter than a start would place for ever.
    """
    names = set()
    for row in seen.view.replicas if seen.view else ():
        announcement, placement = row.announcement, seen.placements.get(replica(row.announcement.replica))
        if placement is None or placement.ends_at is None or announcement.state not in SERVING:
            continue
        lead_s = placement.lead_s
        if lead_s is None:
            lead_s = 2 * (announcement.ready_after_s or 0.0) + drain_s + _LEAD_S
        if placement.ends_at - wall_s < lead_s:
            names.add(announcement.replica)
    return frozenset(names)


def _why_leaving(seen: Observation, name: str) -> str:
    placement = seen.placements.get(replica(name))
    return (placement.reason if placement is not None else None) or _TAKEN_AWAY


def _is_lost(seen: Observation, row: ReplicaView, wall_s: float) -> bool:
    placement = seen.placements.get(replica(row.announcement.replica))
    is_late = row.age_s > row.announcement.lease_s + _LATE_S
    return is_late and placement is not None and placement.placed_at is not None and is_silent(row, placement, wall_s)


def _is_ready(row: ReplicaView | None) -> bool:
    return row is not None and row.is_alive and row.announcement.state in SERVING


def _wanted(
    current: Sequence[str], n_replicas: int, down: Collection[str], queued: Collection[str], taken: Sequence[str]
) -> list[str]:
    """The replicas to keep: of `current` first those that are not `down`, then those that are not `queued`, lowest
    numbers first, then free numbers."""
    kept = sorted(current, key=lambda name: (name in down, name in queued, _number(name)))[:n_replicas]
    number = 0
    while len(kept) < n_replicas:
        if str(number) not in kept and str(number) not in taken:
            kept.append(str(number))
        number += 1
    return sorted(kept, key=_number)


def _number(name: str) -> tuple[int, str]:
    return len(name), name


def _is_gone(seen: Observation, name: str) -> bool:
    placement = seen.placements.get(replica(name))
    return placement is not None and placement.state == "gone"


def _is_to_repair(seen: Observation, name: str) -> bool:
    """Whether placing it again brings something back: all of it, or the nodes that it lost."""
    placement = seen.placements[replica(name)]
    return placement.state == "gone" or (placement.state == "broken" and not placement.is_repaired_by_target)


# ---- gateways and controllers ----------------------------------------------------------------------------------------

# Each one that is started has the next number. The newest that listens has its address in the run's folder, which is
# where nodes and verbs find it; an older one cannot take that back.


def _gateways(
    seen: Observation, memory: Memory, now: float, wall_s: float
) -> tuple[tuple[Unit, ...], Decision, Memory]:
    current = _of(seen, "gateway")
    alive = _alive(seen, current)
    is_due = now >= memory.gateway_due_at
    new = _next("gateway", current, seen.gateway.unit)
    if not alive:
        memory = msgspec.structs.replace(memory, silent_since=None)
        restart = Decision(starts_gateway=True, is_restart=True)
        return ((new,), restart, memory) if is_due else (current, Decision(), memory)
    newest, serving = alive[-1], seen.gateway.unit if seen.gateway.state == "running" else None
    hung, memory = _hung(seen, memory, newest, now)
    if hung is not None:
        event = Event("gateway hung", f"gateway {hung.name} did not answer")
        return tuple(unit for unit in alive if unit != hung), Decision(events=(event,)), memory
    if serving == newest.name:
        return _hand_over(seen, memory, alive, now, wall_s)
    if seen.gateway.state == "gone" and is_due:  # the next one took over and died
        return (*alive, new), Decision(starts_gateway=True), memory
    return current, Decision(), memory


def _hand_over(
    seen: Observation, memory: Memory, alive: Sequence[Unit], now: float, wall_s: float
) -> tuple[tuple[Unit, ...], Decision, Memory]:
    """The newest serves: older ones drain once it knows the replicas that they knew, or the next is placed."""
    *older, newest = alive
    n_ready = sum(map(_is_ready, seen.view.replicas if seen.view else ()))
    if older:
        since = memory.handover_since if memory.handover_since is not None else now
        memory = msgspec.structs.replace(memory, handover_since=since)
        if n_ready < memory.n_ready and now - since <= _HANDOVER_S:
            return tuple(alive), Decision(), memory
        drain = ", ".join(unit.name for unit in older)
        return (newest,), Decision(events=(Event("gateway moved", f"gateway {drain} drains"),)), memory
    memory = msgspec.structs.replace(memory, n_ready=n_ready, handover_since=None)
    lead_s = memory.gateway_drain_s + (seen.placements[newest].lead_s or _GATEWAY_LEAD_S)
    is_leaving, memory = _is_leaving(newest, seen.placements[newest], lead_s, memory, wall_s)
    if is_leaving and now >= memory.gateway_due_at:
        event = Event("gateway leaving", f"the machine of gateway {newest.name} is taken away soon: the next is placed")
        new = _next("gateway", alive, None)
        return (newest, new), Decision(starts_gateway=True, events=(event,)), memory
    return (newest,), Decision(), memory


def _hung(seen: Observation, memory: Memory, newest: Unit, now: float) -> tuple[Unit | None, Memory]:
    part = seen.gateway
    if seen.view is not None or part.state not in ("running", "starting"):
        return None, msgspec.structs.replace(memory, silent_since=None)
    since = memory.silent_since if memory.silent_since is not None else now
    limit_s = _STARTING_HUNG_S if part.state == "starting" else _HUNG_S if part.process else _PLACED_HUNG_S
    if now - since <= limit_s:
        return None, msgspec.structs.replace(memory, silent_since=since)
    hung = Unit("gateway", part.unit) if part.unit is not None else newest
    return hung, msgspec.structs.replace(memory, silent_since=None)


def _controllers(seen: Observation, memory: Memory, now: float, wall_s: float) -> tuple[tuple[Unit, ...], bool, Memory]:
    """The controllers to have, and whether this one ends; none where they are not placed."""
    if memory.own is None:
        return (), False, memory
    own = Unit("controller", memory.own)
    later = [unit for unit in _alive(seen, _of(seen, "controller")) if order(unit) > order(own)]
    if later:
        return (own, later[-1]), seen.placements[later[-1]].state == "placed", memory
    place = seen.placements.get(own, Placement("placed"))
    is_leaving, memory = _is_leaving(own, place, place.lead_s or _CONTROLLER_LEAD_S, memory, wall_s)
    if not is_leaving or now < memory.controller_due_at:
        return (own,), False, memory
    memory = msgspec.structs.replace(memory, controller_due_at=now + _CONTROLLER_PAUSE_S)
    return (own, _next("controller", _of(seen, "controller"), memory.own)), False, memory


def _is_leaving(unit: Unit, place: Placement, lead_s: float, memory: Memory, wall_s: float) -> tuple[bool, Memory]:
    """Whether its machine is taken away within the lead, or within half of its life: a unit whose limit is short must
    not be replaced for ever."""
    if place.ends_at is None:
        return False, memory
    left_s = place.ends_at - wall_s
    lives: Mapping[str, float] = {unit.key: left_s} | memory.lives_s
    memory = msgspec.structs.replace(memory, lives_s=dict(lives))
    return left_s < min(lead_s, lives[unit.key] / 2), memory


def _of(seen: Observation, kind: Kind) -> tuple[Unit, ...]:
    return tuple(sorted((unit for unit in seen.placements if unit.kind == kind), key=order))


def _alive(seen: Observation, units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if seen.placements[unit].state != "gone"]


def _next(kind: Kind, units: Sequence[Unit], last: str | None) -> Unit:
    """The unit after all of these, and after the last that served."""
    numbers = [int(unit.name) for unit in units] + ([int(last)] if last is not None else [])
    return Unit(kind, str(max(numbers, default=-1) + 1))
