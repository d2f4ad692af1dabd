"""Where a planned model's files are on this node."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.models import ModelFacts
from penstock.models.files import _PATTERNS, BUNDLED, _hub_error, read_facts
from penstock.planner import Plan
from penstock.spec.deployment import DEMO_MODEL


def on_this_node(plan: Plan) -> Plan:
    """The plan with the model's files where this machine has them: it may have been made on another.

    The bundled model is in every copy of penstock; a folder must be at the same path; a hub model comes from this
    machine's own cache, or the hub, in the same revision.  Raises UserError when it is none of these.
    """
    model = plan.model
    if model.reference == DEMO_MODEL:
        path = read_facts(model.reference, BUNDLED, model.form).path
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
    try:
        import huggingface_hub
    except ImportError as exc:
        raise UserError(
            f'cannot fetch model "{model.reference}" on {socket.gethostname()}: huggingface_hub is not installed there',
            hint="pip install huggingface_hub there, or put the model on a file system that every node has.",
        ) from exc
    found = _SNAPSHOT.search(model.path)
    assert found is not None
    revision, inside = found.group(1), (found.group(2) or "").lstrip("/")
    patterns = _PATTERNS[model.form] if model.form in _PATTERNS and not inside else [inside, *_PATTERNS["gguf"][1:]]
    try:
        folder = huggingface_hub.snapshot_download(model.reference, revision=revision, allow_patterns=patterns)
    except Exception as exc:  # as in `_from_hub`
        raise _hub_error(model.reference, exc) from exc
    return str(Path(folder) / inside)
