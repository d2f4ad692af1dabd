"""Where a planned model's files are on this node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from penstock.errors import UserError
from penstock.models import ModelFacts, demo, fetch, hub, sources
from penstock.models.files import BUNDLED
from penstock.planner import Plan
from penstock.spec.deployment import DEMO_MODEL

Show = Callable[[fetch.Progress], None]


def on_this_node(plan: Plan, show: Show = lambda _: None) -> Plan:
    """The plan with the model's files where this machine has them: it may have been made on another.

    The bundled model is in every copy of penstock; a folder must be at the same path; any other model comes from this
    machine's own cache, or from its source, in the same revision. `show` gets the progress.  Raises UserError when it
    is none of these, and PenstockError.
    """
    model = plan.model
    if model.reference == DEMO_MODEL:
        path = str(demo.gguf_file() if model.form == "gguf" else BUNDLED)
    elif "://" in model.path or Path(model.path).exists():  # the engine reads a URL itself
        return plan
    elif sources.is_remote(model.reference):
        path = _fetched(plan, show)
    else:
        raise UserError(
            f'cannot find model "{model.reference}": there is no "{model.path}" on {socket.gethostname()}',
            hint="Put it on a file system that every node has at this path, or use a hub id.",
        )
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path))


def _fetched(plan: Plan, show: Show) -> str:
    """The path on this machine of a model that has another path elsewhere."""
    model, source = plan.model, sources.parse(plan.model.reference)
    bring = partial(
        fetch.fetch,
        allow_pickle=model.form == "none",  # which the plan's file allowed
        with_code=sources.runs_code(plan.args),
        show=show,
        say=_say,
    )
    place = hub.in_cache(model.path)
    if source.kind == "hub" and place is not None:
        source = msgspec.structs.replace(source, revision=place.revision, inside=place.inside or None)
        # A cache that the file names is the same folder on every node that has it.
        cache = Path(place.cache) if os.access(place.cache, os.W_OK) else None
        return str(bring(source, cache=cache) / place.inside)
    commit, inside = _version(model)
    source = msgspec.structs.replace(source, inside=inside or None)
    return str(bring(source, commit=commit) / inside)


def _version(model: ModelFacts) -> tuple[str, str]:
    """The folder of a path like .../s3--bucket--name/COMMIT/file.gguf, which names the version, and what follows."""
    path = Path(model.path)
    folder = path if model.form != "gguf" else next(p for p in path.parents if p.parent.name.count("--"))
    return folder.name, "" if folder == path else str(path.relative_to(folder))


def _say(line: str) -> None:
    print(f"penstock: {line}", flush=True)
