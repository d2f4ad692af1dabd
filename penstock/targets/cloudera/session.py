"""Which workbench and which key: of the file and the environment, or of the pod in which penstock runs."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import UserError
from penstock.run_folder import Run
from penstock.spec.blocks import Cloudera
from penstock.targets.cloudera import names
from penstock.targets.cloudera.api import Workbench

KEY_VARIABLE = "CDSW_APIV2_KEY"


def is_in_pod() -> bool:
    """Whether this is a pod of a workbench: a session, a job or an application."""
    return "CDSW_PROJECT_ID" in os.environ


def time_limits() -> str | None:
    """What ends the session of this terminal, as its environment says, and what goes on; None where it is no session,
    or says nothing."""
    if not is_in_pod() or "PENSTOCK_UNIT" in os.environ:
        return None
    idle, whole = (os.environ.get(f"{kind}_MAXIMUM_MINUTES", "") for kind in ("IDLE", "SESSION"))
    limits = [f"after {idle} idle minutes (IDLE_MAXIMUM_MINUTES)"] if idle.isdigit() else []
    limits += [f"after {whole} minutes in all (SESSION_MAXIMUM_MINUTES)"] if whole.isdigit() else []
    return f"this session ends {' and '.join(limits)}: the deployment goes on" if limits else None


def is_in_project(workbench: Workbench) -> bool:
    """Whether this pod is of that project, and so sees its files."""
    return os.environ.get("CDSW_PROJECT_ID") == workbench.project_id


def is_inside(run: Run) -> bool:
    """Whether the run folder is in the project's file system, so that nothing is copied."""
    return is_in_pod() and run.path == Path(names.run_path(run.name))


def workbench_url(block: Cloudera) -> str:
    """Raises UserError."""
    if block.workbench is not None:
        return block.workbench.rstrip("/")
    domain = os.environ.get("CDSW_DOMAIN")
    if domain is None:
        hint = "example: workbench: https://ml-1234abcd-5678.site.example"
        raise UserError("cannot reach a workbench: cloudera.workbench is not set", hint=hint)
    return f"https://{domain}"


def key_of(block: Cloudera) -> str:
    """The API v2 key.  Raises UserError."""
    if block.key_file is not None and not is_in_pod():
        path = Path(block.key_file).expanduser()
        try:
            key = path.read_text("utf-8").strip()
        except OSError as exc:
            raise UserError(f'cannot read the API key in "{path}": {exc.strerror}') from exc
        if not key:
            raise UserError(f'cannot use the API key in "{path}": the file is empty')
        return key
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        hint = f"Make one under User Settings > API Keys of the workbench, then: export {KEY_VARIABLE}=..."
        raise UserError(f"cannot ask the workbench: {KEY_VARIABLE} is not set", hint=hint)
    return key


def connect(block: Cloudera) -> Workbench:
    """The workbench, not asked yet.  Raises UserError."""
    ca_file = None if block.ca_file is None or is_in_pod() else str(Path(block.ca_file).expanduser())
    workbench = Workbench(workbench_url(block), key_of(block), ca_file)
    if block.project is None and is_in_pod():
        workbench.project_id = os.environ["CDSW_PROJECT_ID"]
    return workbench


def find_project(workbench: Workbench, block: Cloudera) -> str:
    """The id of the file's project, from then on that of the workbench's calls.  Raises UserError."""
    if not workbench.project_id:
        rows = workbench.projects(block.project or "")
        if len(rows) != 1:
            why = "this key sees no such project" if not rows else f"{len(rows)} projects have that name"
            hint = "Create it in the workbench (any template; an empty one will do), or ask its owner to add you."
            raise UserError(f'cannot use project "{block.project}" of {workbench.url}: {why}', hint=hint)
        workbench.project_id = str(rows[0]["id"])
    return workbench.project_id
