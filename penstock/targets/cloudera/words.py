"""What the workbench's words about applications and job runs make of a unit. Pure; times in Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from penstock.targets import Placement
from penstock.targets.cloudera.api import Object

Life = Literal["queued", "placed", "gone"]

# Versions spell them "ENGINE_RUNNING", "running"; the prefix and the case are dropped.
_LIVES: dict[str, Life] = {
    "UNKNOWN": "placed",
    "SCHEDULING": "queued",
    "STARTING": "placed",
    "RUNNING": "placed",
    "STOPPING": "placed",
    "STOPPED": "gone",
    "SUCCEEDED": "gone",
    "FAILED": "gone",
    "TIMEDOUT": "gone",
    "SKIPPED": "gone",
}
_WHY = {
    "STOPPED": "was stopped in the workbench",
    "SUCCEEDED": "ended",
    "FAILED": "failed",
    "TIMEDOUT": "reached its time limit",
    "SKIPPED": "was skipped: another run of the same job was active",
}
_OOM = ("oom", "out of memory", "exit code 137", "code -9")


class PodNote(msgspec.Struct, frozen=True):
    """What the script of a pod wrote: when its time is over and by which limit, how it ended."""

    address: str | None = None
    began_at: float | None = None
    ends_at: float | None = None
    ends_by: str | None = None
    ended_at: float | None = None
    code: int | None = None
    reason: str | None = None


class NodeRun(msgspec.Struct, frozen=True):
    """One node of a replica: its run as the API has it (None: gone), its pod's note, the workbench's own reason."""

    row: Object | None
    note: PodNote = PodNote()
    failure: str | None = None
    memory_gb: float | None = None


def word(row: Object | None) -> str:
    """The status without its prefix, "RUNNING"; one that is not known counts as UNKNOWN."""
    text = str((row or {}).get("status") or "").upper()
    text = text.removeprefix("APPLICATION_").removeprefix("ENGINE_")
    return text if text in _LIVES else "UNKNOWN"


def life(row: Object | None) -> Life:
    return "gone" if row is None else _LIVES[word(row)]


def placement_of_replica(nodes: Mapping[int, NodeRun], what: Literal["job", "worker"] = "job") -> Placement:
    """`what`: a node is."""
    lives = {rank: life(node.row) for rank, node in nodes.items()}
    gone = [rank for rank, state in lives.items() if state == "gone"]
    many = len(nodes) > 1
    if gone:
        reasons = [f"{f'node {rank} ' if many else f'its {what} '}{why_gone(nodes[rank])}" for rank in gone]
        is_stopped = all(word(nodes[rank].row) == "STOPPED" for rank in gone)
        state: Literal["gone", "broken"] = "gone" if len(gone) == len(nodes) else "broken"
        return Placement(state, "; ".join(reasons), is_final=is_stopped and state == "gone")
    ends = [(node.note.ends_at, node.note.ends_by) for node in nodes.values() if node.note.ends_at is not None]
    queued = [rank for rank, state in lives.items() if state == "queued"]
    if queued:
        which = f"{len(queued)} of {len(nodes)} nodes wait" if many else "waits"
        reason = next((f": {nodes[rank].failure}" for rank in queued if nodes[rank].failure), "")
        return Placement("queued", f"{which} for a machine of the workbench{reason}")
    where = ", ".join(node.note.address for node in nodes.values() if node.note.address)
    ends_at, ends_by = min(ends, key=lambda end: end[0], default=(None, None))
    return Placement("placed", ends_at=ends_at, ends_by=ends_by, where=where or None)


def why_gone(node: NodeRun) -> str:
    """ "failed: it had more memory than 48 GB"."""
    if node.row is None:
        return "was deleted in the workbench"
    status = word(node.row)
    if node.note.reason:
        return f"{_WHY[status]}: {node.note.reason}"
    if status != "FAILED":
        return f"{_WHY[status]}{f': {node.failure}' if node.failure else ''}"
    was_cut = node.note.began_at is not None and node.note.ended_at is None
    if (node.failure and any(text in node.failure.lower() for text in _OOM)) or (was_cut and not node.failure):
        size = f" than {node.memory_gb:g} GB" if node.memory_gb is not None else ""
        words = (
            f"failed: its pod needed more memory{size}"
            if node.failure
            else (f"failed without a word: most often its pod needed more memory{size}")
        )
        return f"{words}; raise cloudera.memory_gb{f' ({node.failure})' if node.failure else ''}"
    if node.failure:
        return f"failed: {node.failure}"
    return "failed" if node.note.code is None else f"failed: penstock ended with code {node.note.code}"


def placement_of_application(row: Object | None, what: str) -> Placement:
    status = word(row)
    if row is None:
        return Placement("gone", f"the application of the {what} was deleted in the workbench")
    if status == "STARTING":
        return Placement("queued", f"the application of the {what} starts")
    if life(row) == "gone":
        return Placement("gone", f"the application of the {what} {_WHY[status]}")
    return Placement("placed")


def newest(runs: Sequence[Object]) -> Object | None:
    """The last run of a job: lists of the API are in no promised order."""
    return max(runs, key=lambda row: time_of(row.get("scheduling_at") or row.get("created_at")) or 0.0, default=None)


def active(runs: Sequence[Object]) -> Object | None:
    """The run of a job that is not over. It need not be the newest: a run that found another active was skipped."""
    return newest([row for row in runs if life(row) != "gone"])


def time_of(text: object) -> float | None:
    """The API's time, "2026-11-22T18:00:00Z"."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None
