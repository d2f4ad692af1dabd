"""Faults that penstock once had, to be planted again: the simulation must find each."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.deployment import observe
from penstock.deployment.controller import loop
from penstock.deployment.controller.loop import Controller
from penstock.gateway.connections import engine
from penstock.gateway.streams import Ending
from penstock.targets import local

_POST_EACH = Controller._post_each


class Fault(NamedTuple):
    """`commit` fixed it; `patches` bring it back: (owner, name, value) each."""

    commit: str
    patches: tuple[tuple[Any, str, Any], ...]


def _without_sight(controller: Controller) -> bool:
    return not controller.stop.is_set() and controller.run.exists() and controller.run.desired().state == "up"


def _believes_old_leases(desired: Any, seen: Any, history: Any, now: float, scaling: Any = None) -> Any:
    if seen.view is not None:
        rows = tuple(msgspec.structs.replace(row, age_s=0.0) if row.is_alive else row for row in seen.view.replicas)
        seen = msgspec.structs.replace(seen, view=msgspec.structs.replace(seen.view, replicas=rows))
    return observe.summarise(desired, seen, history, now, scaling)


def _forgets_nothing(controller: Controller, path: str, replicas: Any) -> None:
    if path != "/admin/forget":
        _POST_EACH(controller, path, replicas)


FAULTS = {
    # A controller that is killed between a start and its note leaves a replica that nobody ends.
    "unnoted start is not adopted": Fault("44084469", ((local, "_started_before", lambda run, name: {}),)),
    "order is not noted before the start": Fault(
        "44084469", ((Controller, "_note_ordered", lambda self, units: None),)
    ),
    # A home that is unmounted for a moment looks like a run that was removed.
    "hidden home ends the controller": Fault("78e12f40", ((Controller, "_is_wanted", _without_sight),)),
    # The lease of the node before makes its successor "ready" while that loads.
    "old lease counts as ready": Fault(
        "ebf9db7b", ((loop, "summarise", _believes_old_leases), (Controller, "_post_each", _forgets_nothing))
    ),
    # An engine that is lost after its last event, and before the end of its answer, makes a whole stream an error.
    "whole stream ends as an error": Fault("3487f1b4", ((Ending, "has_done", lambda self: False),)),
    # Nothing ends the connections of a machine without power, once another node has its replica's name.
    "machine without power holds requests": Fault("e2c19f5a", ((engine, "USER_TIMEOUT_MS", 10**9),)),
}
