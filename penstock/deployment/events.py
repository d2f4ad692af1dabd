"""What happened to a deployment, from its run folder: starts, restarts, drains, and who changed what."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import time
from collections.abc import Collection, Iterator, Sequence

import msgspec

from penstock import targets
from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.text import printable
from penstock.wire.live import Event

_POLL_S = 0.3
_FETCH_S = 1.0
AUTOSCALE, _BY_HAND = "autoscale", "scale"
_DECISION = re.compile(r"(\d+) -> (\d+|auto)(?: replicas(?:, (pinned))?)?(?:: (.*))?\Z", re.DOTALL)


def asked_by() -> str:
    """user@host of the person who runs this process, by its user id: $USER can be anything."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container with a user id that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def listed(
    run: Run, since: float | None = None, last: int | None = None, kinds: Collection[str] | None = None
) -> list[Event]:
    """The `last` events (of these `kinds`), not before `since` (Unix seconds), the newest last; of an ended deployment
    too.  Raises PenstockError where none is known and the target does not answer: there may be some."""
    silence = None if run.is_ended() else fetch(run)
    chosen = _chosen([event for event in run.events() if kinds is None or event.event in kinds], since, last)
    if silence is not None and not chosen:
        raise silence
    return chosen


def followed(run: Run, since: float | None = None, last: int | None = None) -> Iterator[Event]:
    """As `listed`, then each new event until the deployment has ended."""
    before = listed(run)
    yield from _chosen(before, since, last)
    known, seen, fetched_at = set(map(_key, before)), _version(run), time.monotonic()
    while True:
        is_over = run.is_ended()  # then read once more: its last events may have come since
        version = _version(run)
        if version != seen:
            seen, recent = version, run.events(recent=True)
            yield from (event for event in recent if _key(event) not in known)
            known = set(map(_key, recent))
        if is_over:
            return
        time.sleep(_POLL_S)
        if time.monotonic() - fetched_at >= _FETCH_S:
            fetch(run)
            fetched_at = time.monotonic()


def line_of(event: Event) -> str:
    """An event in one line; times are UTC, as in the logs."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.at))
    where = f" [replica {event.replica}]" if event.replica is not None else ""
    who = f" (by {event.who})" if event.who else ""
    return " ".join(printable(f"{at} {event.event}{where}: {event.text}{who}").split("\n"))


def _chosen(events: Sequence[Event], since: float | None, last: int | None) -> list[Event]:
    chosen = [event for event in events if since is None or event.at >= since]
    return chosen if last is None else chosen[len(chosen) - min(last, len(chosen)) :]


def _key(event: Event) -> tuple[object, ...]:
    """What a target fetches late may be older than what was seen, so its place says nothing."""
    return event.at, event.event, event.text, event.replica


def fetch(run: Run) -> PenstockError | None:
    """Bring the run's folder up to date; why that failed: what is known stays, and the target may answer again."""
    try:
        targets.load(run.handle().target).fetch(run)
    except PenstockError as exc:
        return exc
    return None


def _version(run: Run) -> list[tuple[int, int, int]]:
    """Changes when a line was appended, and when a target has written a file again."""
    version = []
    for file in (run.events_file, run.fetched_events_file):
        with contextlib.suppress(OSError):
            status = file.stat()
            version.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return version


# ---- the autoscaler's decisions: events, since those reach every machine that asks -----------------------------------


class Decided(msgspec.Struct, frozen=True):
    """A change of the number of replicas, or of the reason for it. `at`: Unix seconds; `after`: None when `scale auto`
    gave the number back to the load; `who` asked for it, None when nobody did."""

    at: float
    before: int = msgspec.field(name="from")
    after: int | None = msgspec.field(name="to")
    reason: str
    who: str | None = None


def decision_text(before: int, after: int, reason: str) -> str:
    """The text of an event: "2 -> 3: load 2.40 replicas"."""
    return f"{before} -> {after}: {reason}"


def decisions(run: Run, since: float) -> list[Decided]:
    """The decisions since then (Unix seconds), the newest last.  Raises PenstockError as `listed` does."""
    made = []
    for event in listed(run, since, kinds=(AUTOSCALE, _BY_HAND)):
        match = _DECISION.match(event.text)
        if match is not None:
            after = None if match[2] == "auto" else int(match[2])
            reason = match[4] or match[3] or "asked for"
            made.append(Decided(event.at, int(match[1]), after, reason, event.who))
    return made
