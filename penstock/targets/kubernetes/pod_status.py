"""Reads pods and events as the API has them. Pure; times in Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from penstock.targets.kubernetes.objects import Object
from penstock.text import show_seconds

NODE = "node"  # the container of a replica's pods that runs penstock.node
_LONGEST = 300


def runs(pod: Object, container: str | None = NODE) -> bool:
    """Whether this container of a pod runs, all of them for None."""
    if pod["metadata"].get("deletionTimestamp") or phase(pod) != "Running":
        return False
    rows = pod.get("status", {}).get("containerStatuses", ())
    rows = [row for row in rows if row["name"] == container] or rows
    return bool(rows) and all("running" in row.get("state", {}) for row in rows)


def label(object_: Object, key: str) -> str | None:
    value = object_["metadata"].get("labels", {}).get(key)
    return None if value is None else str(value)


def node_of(pod: Object) -> str | None:
    name = pod.get("spec", {}).get("nodeName")
    return None if name is None else str(name)


def phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def condition(object_: Object, kind: str) -> Object:
    rows = object_.get("status", {}).get("conditions", ())
    return next((row for row in rows if row.get("type") == kind), {})


def containers(part: Object, *keys: str) -> list[Object]:
    return [row for key in keys for row in part.get(key) or ()]


def about(event: Object) -> Object:
    """The object that an event is about."""
    reference: Object = event.get("involvedObject") or event.get("regarding") or {}
    return reference


def events_of(object_: Object, events: Sequence[Object]) -> list[Object]:
    """The events of an object, oldest first."""
    uid, name = object_["metadata"].get("uid"), object_["metadata"]["name"]
    mine = []
    for event in events:
        reference = about(event)
        if reference.get("uid") == uid if uid and reference.get("uid") else reference.get("name") == name:
            mine.append(event)
    return in_time(mine)


def in_time(events: Sequence[Object]) -> list[Object]:
    """Oldest first."""
    return sorted(events, key=lambda event: event_time(event) or 0.0)


def last_event(events: Sequence[Object], reasons: Iterable[str]) -> Object | None:
    wanted = set(reasons)
    return next((event for event in reversed(events) if event.get("reason") in wanted), None)


def event_time(event: Object) -> float | None:
    series = event.get("series") or {}
    values = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((at for value in values if (at := time_of(value)) is not None), time_of(event.get("firstTimestamp")))


def time_of(text: object) -> float | None:
    """The API's time, "2026-11-22T18:00:00Z"."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def steps(seconds: float) -> str:
    """In steps of 5 s, so that the state on disk is not written each second."""
    whole = seconds // 5 * 5
    return f"{whole:.0f} s" if whole < 60 else show_seconds(whole)


def short(text: str, keep_end: bool = False) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONGEST:
        return line
    return f"...{line[3 - _LONGEST :]}" if keep_end else f"{line[: _LONGEST - 3]}..."
