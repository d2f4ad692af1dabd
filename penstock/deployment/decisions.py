"""The autoscaler's decisions as events of a run, and read back from them: events reach every machine that asks."""

from __future__ import annotations

import re

import msgspec

from penstock.deployment import events
from penstock.run_folder import Run

EVENT = "autoscale"
_BY_HAND = "scale"
_TEXT = re.compile(r"(\d+) -> (\d+|auto)(?: replicas(?:, (pinned))?)?(?:: (.*))?\Z", re.DOTALL)


class Decided(msgspec.Struct, frozen=True):
    """A change of the number of replicas, or of the reason for it. `at`: Unix seconds; `after`: None when `scale auto`
    gave the number back to the load; `who` asked for it, None when nobody did."""

    at: float
    before: int = msgspec.field(name="from")
    after: int | None = msgspec.field(name="to")
    reason: str
    who: str | None = None


def write_text(before: int, after: int, reason: str) -> str:
    """The text of an event: "2 -> 3: load 2.40 replicas"."""
    return f"{before} -> {after}: {reason}"


def listed(run: Run, since: float) -> list[Decided]:
    """The decisions since then (Unix seconds), the newest last."""
    made = []
    for event in events.listed(run, since):
        match = _TEXT.match(event.text) if event.event in (EVENT, _BY_HAND) else None
        if match is not None:
            after = None if match[2] == "auto" else int(match[2])
            reason = match[4] or match[3] or "asked for"
            made.append(Decided(event.at, int(match[1]), after, reason, event.who))
    return made
