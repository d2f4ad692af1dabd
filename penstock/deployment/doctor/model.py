"""Whether the model of a file is available: on this machine's disk or on the hub, without downloading its weights."""

from __future__ import annotations

import os

import msgspec

from penstock import targets
from penstock.errors import Finding, PenstockError
from penstock.models import Facts, facts, files, hub, sources
from penstock.node.checks.machine import find_weights
from penstock.spec.deployment import Deployment
from penstock.text import show_bytes


class ModelCheck(msgspec.Struct, frozen=True):
    """`whole`: the facts for planning. `download_bytes`: of a hub id. `is_absent`: `up` would download the model
    here."""

    findings: tuple[Finding, ...] = ()
    whole: Facts | None = None
    download_bytes: int | None = None
    is_absent: bool = False


def check_model(deployment: Deployment) -> ModelCheck:
    """Check the model from this machine. Reads a few kilobytes from the hub (seconds)."""
    if sources.is_remote(deployment.model):
        check = _fetched(deployment)
        is_fetched = deployment.target in targets.TABLE and targets.load(deployment.target).fetches_models
        return _left_to_nodes(deployment.model, check) if is_fetched else check
    try:
        path = files.locate(deployment)
        whole = None if path.is_file() else facts.read_folder(path, deployment.model)
    except PenstockError as error:
        is_here = deployment.target not in targets.TABLE or targets.load(deployment.target).is_this_machine
        if not is_here and error.message.endswith("no such folder"):
            return ModelCheck()  # the nodes must have it
        return ModelCheck((_bad(error),))
    return ModelCheck((Finding("model", "ok", f"{deployment.model} ({path})"),), whole)


def _fetched(deployment: Deployment) -> ModelCheck:
    model, source = deployment.model, sources.parse(deployment.model)
    here = find_weights(model, deployment.cache.folder, is_read=False)
    is_absent = bool(here.absent)
    if not is_absent:
        finding = Finding("model", "ok", f"{model}: {show_bytes(here.n_bytes)} in the cache of this machine")
        return ModelCheck((finding,), _read(model), here.n_bytes)
    if source.kind == "hub" and hub.is_offline():
        text = f"{model} is not in the cache of this machine, and HF_HUB_OFFLINE is set"
        finding = Finding("model", "bad", text, "Unset HF_HUB_OFFLINE, or give a folder.")
        return ModelCheck((finding,), is_absent=True, download_bytes=0)
    try:
        if source.kind == "hub":
            _check_access(source)
        n_bytes = sources.resolve(source, deployment.cache.allow_pickle).n_bytes
    except PenstockError as error:
        return ModelCheck((_bad(error),), is_absent=True, download_bytes=0)
    where = "is on the hub" if source.kind == "hub" else "can be fetched"
    finding = Finding("model", "ok", f"{model} {where}: {show_bytes(n_bytes) if n_bytes else 'size unknown'}")
    return ModelCheck((finding,), _read(model), n_bytes, is_absent=True)


def _check_access(source: sources.Source) -> None:
    """The hub lists the files of a gated repository to everybody, and gives them to few.  Raises HubError."""
    try:
        hub.read_json(source.name, files.CONFIG, source.revision)
    except hub.HubError as error:
        if not error.is_missing:  # repositories of GGUF files lack config.json
            raise


def _left_to_nodes(model: str, check: ModelCheck) -> ModelCheck:
    """What the hub refuses to this machine it may give to the nodes: the catalogue's facts are enough for a plan."""
    (finding,) = check.findings
    whole = _read(model) if finding.state == "bad" else None
    if whole is None:
        return check
    words = f"{finding.found}; planned from {whole.source}"
    finding = Finding("model", "warning", words, "The nodes need access to it: a token where it is gated.")
    return msgspec.structs.replace(check, findings=(finding,), whole=whole)


def _read(model: str) -> Facts | None:
    try:
        return facts.read(model)
    except PenstockError:
        return None


def _bad(error: PenstockError) -> Finding:
    text = error.message + (f": {error.detail}" if error.detail else "")
    cure = error.hint
    if "HF_TOKEN" in (cure or "") and not os.environ.get("HF_TOKEN"):
        cure = f"{cure} (HF_TOKEN is not set here)"
    return Finding("model", "bad", text, cure)
