"""Ends a deployment from any machine, and finds what is left of those whose run folder is gone."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.planner import Plan
from penstock.run_folder import Left, Run
from penstock.targets.cloudera import folder, measuring, names, placing, session, weights, words, workers, workloads
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.waiting import wait

_MEASUREMENT = "doctor/"  # no legal name of a deployment begins so
_REMOVAL = f"{names.HOME}/remove-weights.py"
_SCRIPT = "import shutil\nshutil.rmtree({folder!r}, ignore_errors=True)\n"
_REMOVAL_S = 600.0  # a job may wait for a machine
_WORD_S = 8.0  # until the program of the application, and those of nodes, look for the word


def end(workbench: Workbench, run: Run, grace_s: float) -> None:
    """The gateway drains by word; nodes, which serve nobody then, end by word; the rest is stopped."""
    applications, jobs = _workloads(workbench, run.name)
    gateways = [row for row in applications if str(row.get("name")).endswith("-gateway")]
    has_word = any(words.word(row) == "RUNNING" for row in gateways)
    if has_word:
        _drain(workbench, run, gateways, grace_s)
        if workers.are_used(run.deployment()):
            workers.end_all(workbench, run, min(grace_s, _WORD_S))
    for row in [*gateways, *(row for row in applications if row not in gateways)]:
        placing.end_application(workbench, str(row["id"]))
    if has_word:
        pairs = placing.runs_of(workbench, jobs)
        wait(lambda: not placing.running(workbench, pairs), min(grace_s, _WORD_S))
    placing.end_jobs(workbench, placing.runs_of(workbench, _workloads(workbench, run.name)[1]))
    if not session.is_inside(run):
        folder.remove(workbench, run.name)
        return
    for path in (run.path / names.PODS).glob("*"):
        path.unlink(missing_ok=True)


def _drain(workbench: Workbench, run: Run, gateways: list[Object], grace_s: float) -> None:
    """Until the gateway has drained, its application is gone, or the time is over."""
    drained = names.in_project(f"{names.run_path(run.name)}/{names.DRAINED}")
    path = names.in_project(f"{names.run_path(run.name)}/desired.json")
    if not session.is_inside(run):
        workbench.upload(path, msgspec.json.encode(run.desired()))

    def is_over() -> bool:
        if workbench.download(drained) is not None:
            return True
        rows = [workbench.application(str(row["id"])) for row in gateways]
        return not any(words.life(row) == "placed" for row in rows)

    wait(is_over, max(grace_s, 1.0))


def end_weights(workbench: Workbench, run: Run) -> None:
    """Remove what a job fetched for a deployment that has ended.  Raises UserError while another one uses it."""
    if names.WEIGHTS not in run.artifact().files:
        return
    model = weights.model_of(run)
    note = f"{names.HOME}/{weights.note_of(model)}"
    data = weights.read(workbench, run, note)
    if data is None:
        return
    users = [name for name in _others(workbench, run.name) if _uses(workbench, name, model.reference)]
    if users:
        verb = "use" if len(users) > 1 else "uses"
        message = f'cannot remove the weights of "{run.name}": {", ".join(users)} {verb} them'
        raise UserError(message, hint=f"End it first: penstock down {users[0]}")
    kept = msgspec.json.decode(data, type=weights.Kept)
    if session.is_inside(run):
        Path(note).unlink(missing_ok=True)
        shutil.rmtree(kept.folder, ignore_errors=True)
        return
    workbench.delete_file(names.in_project(note))  # first: what is half removed is not there
    _remove_by_job(workbench, run, kept.folder)


def _remove_by_job(workbench: Workbench, run: Run, folder: str) -> None:
    """The API of files would follow the links of a hub's cache, and wants a call for each file."""
    script, body = names.in_project(_REMOVAL), workloads.instance(run.artifact().files[names.WEIGHTS], "", 0)
    workbench.upload(script, _SCRIPT.format(folder=folder).encode())
    title = names.workload(run.name, run.record().id, names.WEIGHTS_PART)
    job = str(workbench.create_job({**body, "name": title, "script": script})["id"])
    pair = (job, str(workbench.run_job(job)["id"]))
    is_over = wait(lambda: not placing.running(workbench, [pair]), _REMOVAL_S)
    row = workbench.job_run(*pair)
    placing.end_jobs(workbench, [pair])
    workbench.delete_file(script)
    if not is_over or words.word(row) != "SUCCEEDED":
        why = words.why_gone(words.NodeRun(row)) if is_over else "got no machine of the workbench"
        hint = f"Remove it in a session of the project: rm -r {folder}"
        raise PenstockError(f'could not remove the weights of "{run.name}": the job for it {why}', hint=hint)


def _others(workbench: Workbench, name: str) -> list[str]:
    """The other deployments that have a run folder in the project."""
    runs = names.in_project(f"{names.HOME}/runs")
    rows = [folder.path_of(row, runs).rpartition("/")[2] for row in workbench.files(runs) if row.get("is_dir")]
    return sorted(other for other in rows if other != name)


def _uses(workbench: Workbench, name: str, reference: str) -> bool:
    """Whether a deployment that shall run has that model."""
    there = names.in_project(names.run_path(name))
    plan, desired = workbench.download(f"{there}/plan.json"), workbench.download(f"{there}/desired.json")
    try:
        is_up = msgspec.json.decode(desired or b"{}").get("state") == "up"
        return is_up and msgspec.json.decode(plan or b"", type=Plan).model.reference == reference
    except msgspec.MsgspecError:
        return False


def _workloads(workbench: Workbench, name: str) -> tuple[list[Object], list[Object]]:
    """The applications and the jobs of a deployment."""
    applications = [row for row in workbench.applications() if names.is_of(str(row.get("name")), name)]
    return applications, [row for row in workbench.jobs() if names.is_of(str(row.get("name")), name)]


def without_folder(workbench: Workbench, place: folder.Place) -> list[Left]:
    """Applications and jobs of deployments that have no run folder in the project."""
    titles: dict[str, int] = {}
    for row in [*workbench.applications(), *workbench.jobs()]:
        name = names.deployment_in(str(row.get("name")))
        if name is not None:
            titles[name] = titles.get(name, 0) + 1
    counts = {name: (f'of "{name}"', count) for name, count in sorted(titles.items()) if not _is_there(workbench, name)}
    for own, count in measuring.lost(workbench).items():
        counts[f"{_MEASUREMENT}{own}"] = ("of a measurement of `doctor`", count)
    whats = {name: f"{count} workload{'s' * (count > 1)} {of}" for name, (of, count) in counts.items()}
    return [_left(place, name, what) for name, what in whats.items()]


def kept_keys(workbench: Workbench, place: folder.Place, name: str) -> list[Left]:
    """What `folder.remove` keeps of a deployment that has ended."""
    if _is_there(workbench, name) or not folder.kept_keys(workbench, name):
        return []
    return [_left(place, name, f'keys and usage of "{name}"', with_keys=True)]


def _left(place: folder.Place, name: str, what: str, with_keys: bool = False) -> Left:
    where = f'project "{place.project or place.project_id}" of {place.workbench}'
    return Left(placing.TARGET, name, where, what, {**msgspec.to_builtins(place), "with_keys": with_keys})


def _is_there(workbench: Workbench, name: str) -> bool:
    return workbench.download(names.in_project(f"{names.run_path(name)}/run.json")) is not None


def end_lost(workbench: Workbench, name: str, with_keys: bool) -> None:
    """Stop and delete what a deployment without a folder, or a measurement, has left.  Raises PenstockError."""
    if name.startswith(_MEASUREMENT):
        measuring.remove(workbench, name.removeprefix(_MEASUREMENT))
        return
    if _is_there(workbench, name):
        raise PenstockError(f'cannot remove what is left of "{name}": it was started again')
    applications, jobs = _workloads(workbench, name)
    for row in applications:
        placing.end_application(workbench, str(row["id"]))
    placing.end_jobs(workbench, placing.runs_of(workbench, jobs))
    with contextlib.suppress(PenstockError):
        folder.remove(workbench, name, with_keys)
