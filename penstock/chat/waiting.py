"""What an answer waits for, in words for the person who waits."""

from __future__ import annotations

from typing import Final

from penstock.text import show_seconds
from penstock.wire.waiting import PROMPT_STAGE, Waiting

_STAGES: Final = {
    "queued": "it is in the cluster's queue",
    "starting": "starting",
    "loading": "loading",
    "warming": "warming up",
    "restarting": "restarting",
    "sleeping": "waking up",
    "waking": "waking up",
}


def show_waiting(waiting: Waiting) -> str:
    """ "waiting for a replica: loading 17/30 shards, about 40 s", "in the queue: 3 before you", "processing prompt"."""
    if waiting.stage == PROMPT_STAGE:
        return "processing prompt"
    before = f"{waiting.ahead} before you" if waiting.ahead else ""
    if waiting.stage == "queue":
        return f"in the queue: {before or 'you are next'}" if waiting.ahead is not None else "in the queue"
    progress = _STAGES.get(waiting.stage, "")
    if progress and waiting.shards_total:
        progress += f" {waiting.shards_done or 0}/{waiting.shards_total} shards"
    elif progress and waiting.fraction is not None:
        progress += f" {waiting.fraction:.0%}"
    left = f"about {_whole_seconds(waiting.eta_s)}" if waiting.eta_s is not None else ""
    known = ", ".join(part for part in (progress, left, before) if part)
    return f"waiting for a replica: {known}" if known else "waiting for a replica"


def _whole_seconds(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else show_seconds(seconds)
