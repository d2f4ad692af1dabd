"""What the controller does next: a pure function of what it observes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.deployment.observe import Observation
from penstock.run_folder import Desired
from penstock.wire.announcement import ReplicaView

_LEAD_S = 60.0


class Decision(msgspec.Struct, frozen=True):
    """What to do now. `place` is the whole set of replicas that shall be placed, None when it is right already.

    `forget` names failed replicas that nobody asks for any more.
    """

    start_gateway: bool = False
    place: tuple[str, ...] | None = None
    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


def decide(
    desired: Desired,
    seen: Observation,
    failed: frozenset[str],
    drain_over: Callable[[str], bool],
    leaving: frozenset[str] = frozenset(),
) -> Decision:
    """The next step towards what is desired. `drain_over(replica)`: it has had its time to drain. Pure.

    Replicas beyond the number (failed ones first, then the highest numbers) are drained first, and ended when nothing
    runs on them. Those that are `leaving` (their machines will be taken away) get a successor, and are kept until it
    is ready.
    """
    current = sorted(seen.placements, key=_number)
    staying = [name for name in current if name not in leaving]
    wanted = _wanted(staying, desired.replicas, failed, taken=current)
    rows = {row.announcement.replica: row for row in (seen.view.replicas if seen.view else ())}
    n_missing = desired.replicas - sum(_is_ready(rows.get(name)) for name in wanted)
    kept = [name for name in current if name in leaving and not _is_gone(seen, name)][: max(0, n_missing)]
    extra = [name for name in current if name not in wanted and name not in kept]
    in_flight = {name: row.in_flight for name, row in rows.items()}
    drained = [
        name
        for name in extra
        if drain_over(name)
        or (seen.view is not None and (name not in rows or rows[name].is_draining) and not in_flight.get(name))
    ]
    again = [name for name in wanted if name not in failed and _is_to_mend(seen, name) and name in current]
    absent = [name for name in wanted if name not in failed and name not in current]
    place = None
    if again or absent or drained:
        place = tuple(name for name in [*wanted, *kept, *extra] if name not in drained and name not in failed)
    undrain = tuple(name for name in wanted if name in rows and rows[name].is_draining)
    forget = tuple(sorted(failed - {*wanted, *current}, key=_number))
    return Decision(not seen.gateway_is_alive, place, tuple(extra), undrain, tuple(again), forget)


def leaving(seen: Observation, now: float, drain_s: float) -> frozenset[str]:
    """Ready replicas whose machines are taken away so soon that the next one must be started. `now`: Unix seconds.

    The lead is the target's, or twice the time that this start took and the drain. One that is not ready yet is not
    leaving: else a limit shorter than a start would place for ever.
    """
    found = set()
    for row in seen.view.replicas if seen.view else ():
        told, placement = row.announcement, seen.placements.get(row.announcement.replica)
        if placement is None or placement.ends_at is None or told.state != "ready":
            continue
        lead_s = placement.lead_s
        if lead_s is None:
            lead_s = 2 * (told.ready_after_s or 0.0) + drain_s + _LEAD_S
        if placement.ends_at - now < lead_s:
            found.add(told.replica)
    return frozenset(found)


def _is_ready(row: ReplicaView | None) -> bool:
    return row is not None and row.is_alive and row.announcement.state == "ready"


def _wanted(current: Sequence[str], n_replicas: int, failed: frozenset[str], taken: Sequence[str] = ()) -> list[str]:
    """The replicas to keep: of `current` those that did not fail, lowest numbers first, then numbers nobody has."""
    kept = sorted(current, key=lambda name: (name in failed, _number(name)))[:n_replicas]
    number = 0
    while len(kept) < n_replicas:
        if str(number) not in kept and str(number) not in taken:
            kept.append(str(number))
        number += 1
    return sorted(kept, key=_number)


def _number(name: str) -> tuple[int, str]:
    return len(name), name


def _is_gone(seen: Observation, name: str) -> bool:
    placement = seen.placements.get(name)
    return placement is not None and placement.state == "gone"


def _is_to_mend(seen: Observation, name: str) -> bool:
    """Whether placing it again brings something back: all of it, or the nodes that it lost."""
    placement = seen.placements.get(name)
    return placement is not None and placement.state in ("gone", "broken")
