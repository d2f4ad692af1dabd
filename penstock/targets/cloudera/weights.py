"""A model of a hub comes into the project's files once, by a job without a GPU; nodes start when it is there.

The program of the job: `python -m penstock.targets.cloudera.weights RUN`. What it fetched is noted in the project,
beyond the end of the deployment, so that the next start, of this or another deployment, does not even ask.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from penstock import paths
from penstock.errors import PenstockError
from penstock.models import ModelFacts, fetch, hub, sources
from penstock.models.fetch_files import Progress
from penstock.models.sources import Wanted
from penstock.paths import write_atomically
from penstock.planner import Plan
from penstock.run_folder import Launch, Run
from penstock.targets import Placement
from penstock.targets.cloudera import names, session, words, workloads
from penstock.targets.cloudera.api import Object, Workbench
from penstock.wire.answers import HttpError

_KEPT = "weights"  # of penstock's home: a note for each model that is there
_REPORT = f"{names.PODS}/fetch.json"  # of the run folder
_MOST_RUNS, _PAUSE_S = 5, 5.0  # a hub that cannot be reached, a pod that was killed
_SAY_EVERY_S = 1.0
_VARIABLES = re.compile(r"HF_|(https?|no)_proxy\Z", re.IGNORECASE)


class Kept(msgspec.Struct, frozen=True):
    """A model that is in the project, whole. `folder`: all that goes when it is removed."""

    reference: str
    folder: str


class Report(msgspec.Struct, frozen=True):
    """What the program last said. `reason`: why it ended; `is_final`: another run would end as this one."""

    line: str
    reason: str | None = None
    is_final: bool = False


class Look(msgspec.Struct, frozen=True):
    """Whether the weights are there, and in words how far they are. `is_due`: a run of the job is to be started."""

    state: Literal["there", "coming", "failed"]
    words: str = ""
    is_due: bool = False


# ---- while nodes wait ------------------------------------------------------------------------------------------------


def note_of(model: ModelFacts) -> str:
    """The file of penstock's home that says that this version and form of a model is there."""
    source, commit = sources.as_planned(model)
    what = f"{source}|{commit}|{source.inside}|{model.form}"
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", source.name).strip("-")[-60:]
    return f"{_KEPT}/{slug}-{hashlib.sha256(what.encode()).hexdigest()[:10]}.json"


def bring(workbench: Workbench, run: Run) -> Look:
    """How far the weights of a run are; starts the job, or a run of it again, where nothing brings them.

    Raises PenstockError.
    """
    found = look(workbench, run)
    if found.is_due:
        title = names.workload(run.name, run.record().id, names.WEIGHTS_PART)
        job = _job(workbench, title)
        if job is None:
            body = workloads.instance(run.artifact().files[names.WEIGHTS], "", 0)
            job = workbench.create_job({"name": title, **body})
        active_run(workbench, str(job["id"]))
    return found


def active_run(workbench: Workbench, job: str) -> Object:
    """The active run of a job, or a new one; another command that places the same may start it first."""
    row = words.active(workbench.runs(job))
    if row is None:
        try:
            row = workbench.run_job(job)
        except HttpError:
            row = words.active(workbench.runs(job))
            if row is None:
                raise
    return row


def look(workbench: Workbench, run: Run) -> Look:
    """Raises PenstockError."""
    if names.WEIGHTS not in run.artifact().files:
        return Look("there")
    if read(workbench, run, f"{names.HOME}/{note_of(model_of(run))}") is not None:
        return Look("there")
    job = _job(workbench, names.workload(run.name, run.record().id, names.WEIGHTS_PART))
    rows = workbench.runs(str(job["id"])) if job is not None else []
    row = words.active(rows) or words.newest(rows)
    if row is None:
        return Look("coming", "the job that fetches them starts", is_due=True)
    report = _report(read(workbench, run, f"{names.run_path(run.name)}/{_REPORT}"))
    if words.life(row) == "queued":
        return Look("coming", "the job that fetches them waits for a machine of the workbench")
    if words.life(row) == "placed":
        return Look("coming", report.line if report is not None and report.reason is None else "the job starts")
    return _after(row, len(rows), report, words.NodeRun(row, failure=_why(workbench, row)))


def _after(row: Object, n_runs: int, report: Report | None, node: words.NodeRun) -> Look:
    """What follows when a run of the job has ended, and the weights are not there. Pure but for the clock."""
    reason = report.reason if report is not None and report.reason else f"its job {words.why_gone(node)}"
    is_final = report is not None and report.is_final
    if is_final or words.word(row) == "STOPPED" or n_runs >= _MOST_RUNS:
        return Look("failed", reason)
    ended_at = words.time_of(row.get("finished_at")) or 0.0
    return Look("coming", f"{reason}; the next try continues it", is_due=time.time() - ended_at > _PAUSE_S)


def placement(workbench: Workbench, run: Run) -> Placement:
    """Of a replica whose nodes have not been started, since its weights are not there."""
    found = look(workbench, run)
    if found.state == "failed":
        return Placement("queued", f"the weights could not be fetched: {found.words}", is_final=True)
    return Placement("queued", f"waits for the weights: {found.words}" if found.words else "its nodes start")


def _job(workbench: Workbench, title: str) -> Object | None:
    return next((row for row in workbench.jobs() if row.get("name") == title), None)


def _why(workbench: Workbench, row: Object) -> str | None:
    try:
        return workbench.failure(str(row["id"]))
    except PenstockError:  # it may be an administrator's to read
        return None


def model_of(run: Run) -> ModelFacts:
    """As the nodes have it."""
    return msgspec.json.decode(run.artifact().files["launch.json"], type=Launch).plan.model


def _report(data: bytes | None) -> Report | None:
    try:
        return msgspec.json.decode(data or b"", type=Report)
    except msgspec.MsgspecError:
        return None


def read(workbench: Workbench, run: Run, path: str) -> bytes | None:
    """A file of the project."""
    if not session.is_inside(run):
        return workbench.download(names.in_project(path))
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


# ---- in the job's pod ------------------------------------------------------------------------------------------------


class _Reporter:
    """Writes how far the fetch is, for the controller, and says it in the job's log."""

    def __init__(self, path: Path) -> None:
        self._path, self._last, self._due_at = path, "", 0.0

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + _SAY_EVERY_S
            self.say(progress.line)

    def say(self, line: str) -> None:
        if line != self._last:
            self._last = line
            _log(f"weights {line}")
            self.write(Report(line))

    def write(self, report: Report) -> None:
        write_atomically(self._path, msgspec.json.encode(report))


def variables(plan: Plan) -> Mapping[str, str]:
    """Those of `engine.env` that say how the hub is reached."""
    return {name: value for name, value in plan.env.items() if _VARIABLES.match(name)}


def _log(text: str) -> None:
    sys.stdout.write(f"penstock: {text}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    run = Path(argv[0])
    launch = msgspec.json.decode((run / "artifact" / "launch.json").read_bytes(), type=Launch)
    plan, reporter = launch.plan, _Reporter(run / _REPORT)
    os.environ |= variables(plan)
    reporter.write(Report("the hub is asked"))
    source, commit = sources.as_planned(plan.model)
    wanted = Wanted(launch.cache.allow_pickle, sources.runs_code(plan.args), commit)
    cache = Path(launch.cache.folder) if launch.cache.folder else None
    try:
        folder = fetch.fetch(source, cache=cache, wanted=wanted, show=reporter.show, say=reporter.say)
    except PenstockError as exc:
        reason = " ".join(text for text in (f"{exc.message}.", exc.detail, exc.hint) if text)
        _log(reason)
        reporter.write(Report("", reason, is_final=not exc.is_retryable))
        return exc.exit_code
    place = hub.in_cache(str(folder))
    whole = Path(place.cache, place.folder) if place is not None else folder
    note = paths.home() / note_of(plan.model)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(note, msgspec.json.encode(Kept(plan.model.reference, str(whole))))
    reporter.say("are there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
