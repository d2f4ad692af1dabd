"""What a run's status means for the units inside it. Pure.

https://docs.vessl.ai "Manage runs"; the values are those of the SDK's ResponseRunExecutionInfo.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.targets import Placement
from penstock.targets.vessl.api import Execution
from penstock.wire.container import ContainerView

_WAITS = {
    "queued": "waits for a machine",
    "pending": "waits for a machine",
    "initializing": "pulls the image and what it imports (charged)",
}
_RUNS = ("running", "stopping", "waitToBeKilled")


class Silence(NamedTuple):
    """Why a container tells nothing, and whether it has told something before, or is not asked."""

    why: str
    was_heard: bool


def placement(
    unit: str, execution: Execution | None, view: ContainerView | None, is_spot: bool, silence: Silence | None = None
) -> Placement:
    """Of the unit with that key. `view`: what its container tells, None in its `silence`."""
    if execution is None:
        return Placement("gone", "it has no run in VESSL: it was not created, or was deleted")
    status = execution.status
    if status in _WAITS:
        return Placement("queued", _with_reason(_WAITS[status], execution))
    if execution.has_ended:
        return Placement("gone", ended(execution, is_spot), is_final=status == "terminated")
    if status == "idle":
        return Placement("gone", f"run {execution.id} is idle and still charged: terminate it")
    if view is None:
        known = "" if status in _RUNS else f"VESSL calls its run {status}; "
        if silence is None or not silence.was_heard:
            return Placement("queued", f"{known}its container starts")
        return Placement("placed", f"{known}{silence.why}")
    if view.refusal is not None:
        return Placement("queued", view.refusal, is_final=True)
    if view.stage is not None:
        return Placement("queued", view.stage)
    if not unit.startswith("replica/"):
        return Placement("placed")
    why = view.units.get(unit, "it was ended")
    return Placement("placed", where=f"run {execution.id}") if why is None else Placement("gone", why)


def ended(execution: Execution, is_spot: bool) -> str:
    """Why a run that has ended did, as far as VESSL tells."""
    words = _with_reason(f"VESSL ended run {execution.id} as {execution.status}", execution)
    if execution.status == "completed":
        return f"run {execution.id} has completed: its time (vessl.max_hours) was over, or another machine ended it"
    if is_spot and execution.status in ("failed", "terminated"):
        return f"{words}; on spot machines that is most likely a reclaim, and `penstock up` starts it again"
    return words


def _with_reason(words: str, execution: Execution) -> str:
    return f"{words}: {execution.status_reason}" if execution.status_reason else words
