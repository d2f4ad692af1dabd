"""The logs of a run: of its replicas through the target, of its gateway and controller from the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from penstock import targets
from penstock.errors import PenstockError, UserError
from penstock.log_lines import as_they_come, file_lines, in_turn, named
from penstock.run_folder import Run, Unit


def lines(run: Run, part: str, replica: str | None, last: int | None, follow: bool) -> Iterator[str]:
    """Lines of one part: "replicas" (all, or one), "gateway", "controller" or "events"; with `follow` until it is down.

    Raises UserError for a replica that the run does not have, PenstockError for one whose log cannot be reached: after
    the lines of the others, with `follow` at once.
    """
    follow = follow and run.desired().state == "up"  # nothing more comes from what has ended
    if part == "replicas":
        yield from _replica_lines(run, replica, last, follow)
    elif part == "events":
        yield from map(_event_text, file_lines(run.path / "events.jsonl", follow, last, run.is_ended))
    else:
        yield from run.log_lines(part, follow, last)


def _replica_lines(run: Run, replica: str | None, last: int | None, follow: bool) -> Iterator[str]:
    handle = run.handle()
    written = {path.stem.removeprefix("replica-") for path in (run.path / "logs").glob("replica-*.log")}
    names = sorted({*written, *handle.replicas})
    if replica is not None and replica not in names:
        raise UserError(f'cannot find replica "{replica}" of "{run.name}"', hint=f"It has: {', '.join(names)}.")
    target = targets.load(handle.target)

    def of_one(name: str) -> Iterator[str]:
        try:
            yield from target.logs(run, Unit("replica", name), follow, last)
        except PenstockError:
            # `down` ends the connections that its logs are read by.
            if not follow or run.desired().state == "up":
                raise

    if replica is not None or len(names) == 1:
        yield from of_one(replica or names[0])
    else:
        fronted = [named(f"[{name}]", of_one(name)) for name in names]
        yield from as_they_come(fronted) if follow else in_turn(fronted)


def _event_text(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("at", 0)))
    where = f" [replica {event['replica']}]" if "replica" in event else ""
    return f"{at} {event.get('event')}{where}: {event.get('text')}"
