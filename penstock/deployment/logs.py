"""The logs of a run, through its target; those of gateway and controller are in the run folder where that is shared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from penstock import targets
from penstock.deployment import events
from penstock.errors import PenstockError, UserError
from penstock.log_lines import as_they_come, in_turn, named
from penstock.run_folder import Run, Unit, order, unit_of

# In front of each line of a node (UTC, with a Z) and of the gateway (local time).
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(Z?)")


class Selection(NamedTuple):
    """Which lines: of one `replica`, the `last` of each log, not before `since` (Unix seconds), of ended ones too."""

    replica: str | None = None
    last: int | None = None
    follow: bool = False
    since: float | None = None
    with_ended: bool = False


def lines(run: Run, part: str, wanted: Selection) -> Iterator[str]:
    """Lines of one part: "replicas" (all, or one), "gateway", "controller" or "events"; with `follow` until it is down.

    Raises UserError for a replica that the run does not have, PenstockError for one whose log cannot be reached: after
    the lines of the others, with `follow` at once.
    """
    target = targets.load(run.handle().target)
    if not run.is_ended():
        events.fetch(run)
    follow = wanted.follow and run.desired().state == "up"  # nothing more comes from what has ended
    if part == "replicas":
        yield from _replica_lines(run, wanted, follow)
    elif part == "events":
        yield from map(events.line_of, (events.followed if follow else events.listed)(run, wanted.since, wanted.last))
    else:
        units = [] if target.shares_files else [unit for unit in map(unit_of, run.handle().units) if unit.kind == part]
        if units:
            found = target.logs(run, max(units, key=order), follow, wanted.last)
        else:
            found = run.log_lines(part, follow, wanted.last)
        yield from not_before(wanted.since, found)


def not_before(since: float | None, lines: Iterable[str]) -> Iterator[str]:
    """Lines from that time on (Unix seconds); a line without a time goes with the one before it, or is kept."""
    is_late = True
    for line in lines:
        stamp = _STAMP.search(line[:40]) if since is not None else None
        if stamp is not None and since is not None:
            at = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}").replace(tzinfo=UTC if stamp[3] else None)
            is_late = at.timestamp() >= since - 1
        if is_late:
            yield line


def _replica_lines(run: Run, wanted: Selection, follow: bool) -> Iterator[str]:
    handle, replica = run.handle(), wanted.replica
    written = {path.stem.removeprefix("replica-") for path in (run.path / "logs").glob("replica-*.log")}
    names = sorted({*written, *handle.replicas})
    if handle.replicas and replica is None and not wanted.with_ended and run.desired().state == "up":
        names = sorted(handle.replicas)
    if replica is not None and replica not in names:
        raise UserError(f'cannot find replica "{replica}" of "{run.name}"', hint=f"It has: {', '.join(names)}.")
    target = targets.load(handle.target)

    def of_one(name: str) -> Iterator[str]:
        try:
            yield from not_before(wanted.since, target.logs(run, Unit("replica", name), follow, wanted.last))
        except PenstockError:
            # `down` ends the connections that its logs are read by.
            if not follow or run.desired().state == "up":
                raise

    if replica is not None or len(names) == 1:
        yield from of_one(replica or names[0])
    else:
        fronted = [named(f"[{name}]", of_one(name)) for name in names]
        yield from as_they_come(fronted) if follow else in_turn(fronted)
