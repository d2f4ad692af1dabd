"""What `doctor` measured of a project, for the checks of later starts: workbenches/KEY.json in the penstock home."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import msgspec

from penstock import paths
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera import findings
from penstock.targets.cloudera.api import Workbench
from penstock.targets.cloudera.findings import Reading
from penstock.targets.cloudera.names import block_of


class Answers(msgspec.Struct, frozen=True):
    """`is_public`: the application that answered was without a login. `at`: Unix seconds."""

    at: float
    is_public: bool
    reading: Reading


def keep(workbench: Workbench, deployment: Deployment, reading: Reading, now: float) -> None:
    """In place of earlier ones, unless pods got no machine. `now`: Unix seconds."""
    if reading.notes.keys() != reading.lives.keys():
        return
    path = _path(workbench)
    with contextlib.suppress(OSError):  # the next start is then not warned
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomically(path, msgspec.json.encode(Answers(now, block_of(deployment).public, reading)))


def warnings(workbench: Workbench, deployment: Deployment) -> tuple[str, ...]:
    """What of it makes trouble for this deployment; of pods and addresses of another kind nothing is known."""
    try:
        answers = msgspec.json.decode(_path(workbench).read_bytes(), type=Answers)
    except (OSError, msgspec.MsgspecError):  # there is none, or of another version
        return ()
    block, reading = block_of(deployment), answers.reading
    checks = {"network"} if block.nodes == f"{reading.what}s" else set[str]()
    checks |= {"proxy"} if block.public == answers.is_public else set()
    day = time.strftime("%Y-%m-%d", time.localtime(answers.at))
    rows = findings.of_reading(reading, deployment, None)
    return tuple(
        f"`doctor` found on {day}: {row.found}. {row.cure or ''}".strip()
        for row in rows
        if row.check in checks and row.state != "ok"
    )


def _path(workbench: Workbench) -> Path:
    key = hashlib.sha256(f"{workbench.url} {workbench.project_id}".encode()).hexdigest()[:12]
    return paths.home() / "workbenches" / f"{key}.json"
