"""Where a planned model's files are on this node."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.models import ModelFacts, demo, hub
from penstock.models.files import BUNDLED, patterns_of
from penstock.planner import Plan
from penstock.spec.deployment import DEMO_MODEL


def on_this_node(plan: Plan) -> Plan:
    """The plan with the model's files where this machine has them: it may have been made on another.

    The bundled model is in every copy of penstock; a folder must be at the same path; a hub model comes from this
    machine's own cache, or the hub, in the same revision.  Raises UserError when it is none of these.
    """
    model = plan.model
    if model.reference == DEMO_MODEL:
        path = str(demo.gguf_file() if model.form == "gguf" else BUNDLED)
    elif "://" in model.path or Path(model.path).exists():  # the engine reads a URL itself
        return plan
    elif place := hub.in_cache(model.path):
        path = _snapshot_here(model, place)
    else:
        raise UserError(
            f'cannot find model "{model.reference}": there is no "{model.path}" on {socket.gethostname()}',
            hint="Put it on a file system that every node has at this path, or use a hub id.",
        )
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path))


def _snapshot_here(model: ModelFacts, place: hub.InCache) -> str:
    """The path, in this machine's cache, of a hub model that has another path elsewhere."""
    patterns = patterns_of(model.form, place.inside)
    return str(hub.download(model.reference, patterns, revision=place.revision) / place.inside)
