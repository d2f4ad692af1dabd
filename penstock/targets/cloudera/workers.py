"""Nodes that are workers: what the handle orders of the launcher in the application's kernel, and what that says.

The API knows no workers. Only the application's own kernel may launch and stop them (launcher.py), and notes in the run
folder what it did.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run, unit_of
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera import names, session, words
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.waiting import wait
from penstock.wire.client import Client

_ADMIN_S = 3.0
STOP_S = 15.0  # until the launcher has read what it shall stop, and the workbench has
_ENDED_WITH_IT = "ended with the application that launched it"


class Worker(msgspec.Struct, frozen=True):
    """A worker as the launcher has noted it; `status`: a word of the workbench."""

    status: str
    launched_at: str | None = None
    reason: str | None = None

    @property
    def row(self) -> Object:
        """As the API would tell of a job's run."""
        return {"status": self.status, "scheduling_at": self.launched_at}


def are_used(deployment: Deployment) -> bool:
    return names.block_of(deployment).nodes == "workers"


def look(workbench: Workbench, run: Run, application: Object | None) -> dict[str, Worker]:
    """By name. Of one that is named in the handle and not here nothing is known yet.  Raises PenstockError."""
    noted = _noted(workbench, run)
    if words.life(application) != "gone":
        return noted
    named = {name for entry in run.handle().replicas.values() for name in entry.get("workers", ())}
    over = {name: worker for name, worker in noted.items() if words.life(worker.row) == "gone"}
    return {name: Worker("failed", reason=_ENDED_WITH_IT) for name in named} | over


def _noted(workbench: Workbench, run: Run) -> dict[str, Worker]:
    data: bytes | None = None
    if session.is_inside(run):
        with contextlib.suppress(OSError):
            data = (run.path / names.WORKERS).read_bytes()
    else:
        data = workbench.download(_there(run, names.WORKERS))
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Worker])
    except msgspec.MsgspecError:
        return {}


def named(entry: Mapping[str, Any] | None, known: Mapping[str, Worker], n_nodes: int) -> dict[str, Any]:
    """The entry of a replica: a new name for each of its nodes that has no worker, or one that is over."""
    before = list(entry["workers"]) if entry is not None else [None] * n_nodes
    over = {name for name, worker in known.items() if words.life(worker.row) == "gone"}
    return {"workers": [secrets.token_hex(6) if name is None or name in over else name for name in before]}


def living(workbench: Workbench, run: Run, wanted: Collection[str] | None = None) -> list[str]:
    """Those that run, all or of these names.  Raises PenstockError."""
    workers = _noted(workbench, run)
    return [
        name for name, worker in workers.items()
        if words.life(worker.row) != "gone" and (wanted is None or name in wanted)
    ]  # fmt: skip


def leave(workbench: Workbench, run: Run, leaving: Iterable[str], wanted: Collection[str], timeout_s: float) -> None:
    """Order these replicas to leave by the answers to their announcements, and wait until their workers have ended."""
    with contextlib.suppress(PenstockError):
        gateway = Client(run.admin_url, run.admin_token(), _ADMIN_S)
        for key in leaving:
            gateway.post_json("/admin/leave", {"replica": unit_of(key).name})
        wait(lambda: not living(workbench, run, wanted), timeout_s)


def end_all(workbench: Workbench, run: Run, word_s: float) -> None:
    """Wait for those that leave by word, then let the launcher stop the others while it still can."""
    if wait(lambda: not living(workbench, run), word_s):
        return
    if session.is_inside(run):
        (run.path / names.WORKERS_END).touch()
    else:
        workbench.upload(_there(run, names.WORKERS_END), b"{}")
    wait(lambda: not living(workbench, run), STOP_S)


def _there(run: Run, file: str) -> str:
    return f"{names.in_project(names.run_path(run.name))}/{file}"
