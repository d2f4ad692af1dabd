"""What the workbench says of one deployment: its applications, the runs of its jobs, and what their pods wrote."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run, Unit, order, unit_of
from penstock.targets import Placement
from penstock.targets.cloudera import names, placing, session, weights, words, workers
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.cloudera.words import NodeRun, PodNote
from penstock.targets.cloudera.workers import Worker

# The whole bytes of one log, since the API of files gives only that; None while there is none.
Read = Callable[[], bytes | None]

_LOOK_S = 1.5
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
            nodes = [launched.get(name, _ORDERED) for name in entry["workers"]]
            placements[unit] = _replica(workbench, run, unit, [(node.row, node.reason) for node in nodes], "worker")
            continue
        if unit.kind == "replica" and not entry.get("jobs"):
            waiting = weights.placement(workbench, run) if waiting is None else waiting
            placements[unit] = waiting
            continue
        if unit.kind == "replica":
            runs = [workbench.job_run(*pair) for pair in entry["jobs"]]
            placements[unit] = _replica(workbench, run, unit, [(row, _failure(workbench, row)) for row in runs], "job")
            continue
        application = entry["application"]  # None: it was not created yet
        if application not in rows:
            rows[application] = workbench.application(application) if application is not None else None
        what = "chat page" if unit.kind == "ui" else "gateway"
        placements[unit] = words.placement_of_application(rows[application], what)
    return placements


def _replica(
    workbench: Workbench, run: Run, unit: Unit, rows: Iterable[tuple[Object | None, str | None]],
    what: Literal["job", "worker"],
) -> Placement:  # fmt: skip
    """`rows`: the run of each node, and why it failed or waits. `what`: a node is."""
    template = msgspec.json.decode(run.artifact().files[names.NODE])
    nodes = {}
    for rank, (row, why) in enumerate(rows):
        note = pod_note(workbench, run, names.node_part(unit.name, rank), row)
        nodes[rank] = NodeRun(row, note, why, template["memory"])
    return words.placement_of_replica(nodes, what)


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


def log_lines(reads: Sequence[Read], follow: bool, last: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
    """Lines of all logs, those of the second and later ones with "n1: " in front; `is_over` ends a followed one."""
    ends = [0] * len(reads)
    first = [_new_lines(rank, read, ends, is_whole=not follow) for rank, read in enumerate(reads)]
    kept = list(itertools.chain.from_iterable(first))
    yield from kept if last is None else kept[-last:] if last else []
    while follow and not is_over():
        time.sleep(_LOOK_S)
        for rank, read in enumerate(reads):
            yield from _new_lines(rank, read, ends, is_whole=False)


def _new_lines(rank: int, read: Read, ends: list[int], is_whole: bool) -> list[str]:
    """What was written since the last look; `is_whole`: the line that is begun too."""
    data = read() or b""
    if len(data) < ends[rank]:  # it was begun again
        ends[rank] = 0
    new = data[ends[rank] :]
    cut = len(new) if is_whole else new.rfind(b"\n") + 1
    ends[rank] += cut
    front = f"n{rank}: " if rank else ""
    return [f"{front}{line}" for line in new[:cut].decode("utf-8", "replace").splitlines()]
