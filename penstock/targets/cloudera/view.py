"""What the workbench says of one deployment: its applications, the runs of its jobs, and what their pods wrote."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run, Unit, order, unit_of
from penstock.targets import Placement
from penstock.targets.cloudera import names, placing, session, weights, words, workers
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.cloudera.words import NodeRun, PodNote
from penstock.targets.cloudera.workers import Worker

# All bytes of one log, since the API of files gives only that, with ".1" of the older one; None: there is none.
Read = Callable[[str], bytes | None]

_LOOK_S = 1.5
_COMPARED_BYTES = 200
_ASK_WHY_S = 30.0  # a run that waits for longer may have a reason
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


def log_here(run: Run, part: str, ending: str) -> bytes | None:
    with contextlib.suppress(OSError):
        return Path(f"{run.log(part)}{ending}").read_bytes()
    return None


def log_lines(reads: Sequence[Read], follow: bool, last: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
    """Lines of all logs, those of the second and later ones with "n1: " in front; `is_over` ends a followed one."""
    ends = dict[int, tuple[int, bytes]]()
    first = [_new_lines(rank, read, ends, is_whole=not follow) for rank, read in enumerate(reads)]
    kept = list(itertools.chain.from_iterable(first))
    yield from kept if last is None else kept[-last:] if last else []
    while follow and not is_over():
        time.sleep(_LOOK_S)
        for rank, read in enumerate(reads):
            yield from _new_lines(rank, read, ends, is_whole=False)


def _new_lines(rank: int, read: Read, ends: dict[int, tuple[int, bytes]], is_whole: bool) -> list[str]:
    """What was written since the last look; `is_whole`: the line that is begun too."""
    data, rest, (end, before) = read("") or b"", b"", ends.get(rank, (0, b""))
    if rank not in ends or len(data) < end or not data[:end].endswith(before):  # the older one has what was there
        rest, end = (read(".1") or b"")[end:], 0
    new = rest + data[end:]
    cut = len(new) if is_whole else new.rfind(b"\n") + 1
    end = max(0, end + cut - len(rest))
    ends[rank] = end, data[max(0, end - _COMPARED_BYTES) : end]
    front = f"n{rank}: " if rank else ""
    return [f"{front}{line}" for line in new[:cut].decode("utf-8", "replace").splitlines()]
