"""What the workbench says of one deployment: its applications, the runs of its jobs, and what their pods wrote."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run, Unit, order, unit_of
from penstock.targets import Placement
from penstock.targets.cloudera import names, placing, session, weights, words, workers
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.cloudera.words import NodeRun, PodNote
from penstock.targets.cloudera.workers import Worker

_ASK_WHY_S = 30.0  # a run that waits for longer may have a reason
_LAST_BYTES = 64 * 1024 * 1024
_ORDERED = Worker("scheduling")  # the launcher has not read the handle yet


def look(workbench: Workbench, run: Run) -> dict[Unit, Placement]:
    """The placement of every unit in the run's handle.  Raises PenstockError."""
    units = run.handle().units
    rows: dict[str | None, Object | None] = {}
    placements = {}
    launched: dict[str, Worker] | None = None
    waiting: Placement | None = None
    for unit in sorted(map(unit_of, units), key=order):
        entry = units[unit.key]
        if unit.kind == "replica" and "workers" in entry:
            if launched is None:
                launched = workers.look(workbench, run, placing.find_gateway(workbench, run))
            placements[unit] = _replica_of_workers(workbench, run, unit, entry, launched)
            continue
        if unit.kind == "replica" and not entry.get("jobs"):
            waiting = weights.placement(workbench, run) if waiting is None else waiting
            placements[unit] = waiting
            continue
        if unit.kind == "replica":
            placements[unit] = _replica(workbench, run, unit, entry)
            continue
        application = entry["application"]  # None: it was not created yet
        if application not in rows:
            rows[application] = workbench.application(application) if application is not None else None
        what = "chat page" if unit.kind == "ui" else "gateway"
        placements[unit] = words.placement_of_application(rows[application], what)
    return placements


def _replica(workbench: Workbench, run: Run, unit: Unit, entry: Mapping[str, Any]) -> Placement:
    template = msgspec.json.decode(run.artifact().files[names.NODE])
    nodes = {}
    for rank, (job, job_run) in enumerate(entry["jobs"]):
        row = workbench.job_run(job, job_run)
        note = pod_note(workbench, run, names.node_part(unit.name, rank), row)
        nodes[rank] = NodeRun(row, note, _failure(workbench, row), template["memory"])
    return words.placement_of_replica(nodes)


def _replica_of_workers(
    workbench: Workbench, run: Run, unit: Unit, entry: Mapping[str, Any], launched: Mapping[str, Worker]
) -> Placement:
    template = msgspec.json.decode(run.artifact().files[names.NODE])
    nodes = {}
    for rank, name in enumerate(entry["workers"]):
        worker = launched.get(name, _ORDERED)
        note = pod_note(workbench, run, names.node_part(unit.name, rank), worker.row)
        nodes[rank] = NodeRun(worker.row, note, worker.reason, template["memory"])
    return words.placement_of_replica(nodes, "worker")


def _failure(workbench: Workbench, row: Object | None) -> str | None:
    """The workbench's own reason for a run that failed or waits for long."""
    if row is None:
        return None
    since = words.time_of(row.get("scheduling_at")) or time.time()
    waits = words.life(row) == "queued" and time.time() - since > _ASK_WHY_S
    if not waits and words.word(row) != "FAILED":
        return None
    with contextlib.suppress(PenstockError):  # it may be an administrator's to read
        return workbench.failure(str(row["id"]))
    return None


def pod_note(workbench: Workbench, run: Run, part: str, row: Object | None) -> PodNote:
    """What the pod of a node wrote; of an earlier pod of that node nothing. From afar only where it is needed."""
    file = f"{names.PODS}/{part}.json"
    data: bytes | None = None
    if session.is_inside(run):
        with contextlib.suppress(OSError):
            data = (run.path / file).read_bytes()
    elif words.life(row) == "gone":
        data = workbench.download(names.in_project(f"{names.run_path(run.name)}/{file}"))
    try:
        note = msgspec.json.decode(data or b"{}", type=PodNote)
    except msgspec.MsgspecError:
        return PodNote()
    began = words.time_of((row or {}).get("scheduling_at"))
    is_earlier = began is not None and note.began_at is not None and note.began_at < began - 1.0
    return PodNote() if is_earlier else note


def log_here(run: Run, part: str) -> bytes | None:
    try:
        with run.log(part).open("rb") as stream:
            stream.seek(max(0, run.log(part).stat().st_size - _LAST_BYTES))
            return stream.read()
    except OSError:
        return None
