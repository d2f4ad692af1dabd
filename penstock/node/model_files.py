"""Where a planned model's files are on this node."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.models import ModelFacts, demo, hub
from penstock.models.files import BUNDLED, PATTERNS
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
    elif Path(model.path).exists():
        return plan
    elif _SNAPSHOT.search(model.path):
        path = _snapshot_here(model)
    else:
        raise UserError(
            f'cannot find model "{model.reference}": there is no "{model.path}" on {socket.gethostname()}',
            hint="Put it on a file system that every node has at this path, or use a hub id.",
        )
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path))


# Of huggingface_hub's cache: models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca/...
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(/.*)?\Z")


def _snapshot_here(model: ModelFacts) -> str:
    """The path, in this machine's cache, of a hub model that has another path elsewhere."""
    match = _SNAPSHOT.search(model.path)
    assert match is not None
    revision, inside = match.group(1), (match.group(2) or "").lstrip("/")
    patterns = PATTERNS[model.form] if model.form in PATTERNS and not inside else (inside, *PATTERNS["gguf"][1:])
    return str(hub.download(model.reference, patterns, revision=revision) / inside)
