"""Where a planned model's files are on this node."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.models import ModelFacts, demo, fetch, hub, sources
from penstock.models.files import BUNDLED
from penstock.models.sources import Source
from penstock.node.staging import Show, Stage
from penstock.planner import Plan
from penstock.spec.deployment import DEMO_MODEL


def on_this_node(plan: Plan, stage: Stage, show: Show = lambda _: None) -> Plan:
    """The plan with the model's files where this machine has them: it may have been made on another.

    The bundled model is in every copy of penstock; a folder must be at the same path, or come from a node that has it;
    any other model comes from this machine's own cache, other nodes, or its source, in the same revision. `show` gets
    the progress of what is fetched. Blocks.  Raises PenstockError.
    """
    model = plan.model
    if model.reference == DEMO_MODEL:
        path = str(demo.gguf_file() if model.form == "gguf" else BUNDLED)
    elif "://" in model.path:  # the engine reads a URL itself
        return plan
    elif Path(model.path).exists() and not fetch.is_broken_off(Path(model.path)):
        path = _copy_here(model.path, stage, show) if stage.is_for(model.path) else model.path
    elif sources.is_remote(model.reference):
        path = _fetched(model, stage, show)
    elif stage.is_for(model.path):  # another node may have it
        path = _copy_here(model.path, stage, show)
    else:
        raise UserError(
            f'cannot find model "{model.reference}": there is no "{model.path}" on {socket.gethostname()}',
            hint="Put it on a file system that every node has at this path, set cache.stage, or use a hub id.",
        )
    return (
        plan if path == model.path else msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path))
    )


def _fetched(model: ModelFacts, stage: Stage, show: Show) -> str:
    """The path of a model that is fetched, and may have another one elsewhere."""
    source, commit = sources.as_planned(model)
    here = fetch.found(source)
    return str(stage.bring(source, str(here or hub.cache()), show, commit) / (source.inside or ""))


def _copy_here(path: str, stage: Stage, show: Show) -> str:
    """The path of the copy of a folder, or of a GGUF file with what goes with it."""
    inside = Path(path).name if path.endswith(".gguf") else None
    source = Source("folder", str(Path(path).parent) if inside else path, inside=inside)
    try:
        return str(stage.bring(source, path, show) / (inside or ""))
    except PenstockError as exc:
        if not stage.is_passing or not Path(path).exists():
            raise
        print(f"penstock: the weights are read where they are: {exc.message}", flush=True)
        return path
