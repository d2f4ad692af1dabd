"""Ends a deployment from any machine, and finds what is left of those whose run folder is gone."""

from __future__ import annotations

import contextlib

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Left, Run
from penstock.targets.cloudera import folder, measuring, names, placing, session, words, workers
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.waiting import wait

_MEASUREMENT = "doctor/"  # no legal name of a deployment begins so
_WORD_S = 8.0  # until the program of the application, and those of nodes, look for the word


def end(workbench: Workbench, run: Run, grace_s: float) -> None:
    """The gateway drains by word; nodes, which serve nobody then, end by word; the rest is stopped."""
    applications, jobs = _workloads(workbench, run.name)
    gateways = [row for row in applications if str(row.get("name")).endswith("-gateway")]
    if any(words.word(row) == "RUNNING" for row in gateways):
        _drain(workbench, run, gateways, grace_s)
        if workers.are_used(run.deployment()):
            workers.end_all(workbench, run, min(grace_s, _WORD_S))
    for row in [*gateways, *(row for row in applications if row not in gateways)]:
        placing.end_application(workbench, str(row["id"]))
    if gateways:
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
    lost = []
    for name, count in sorted(titles.items()):
        record = names.in_project(f"{names.run_path(name)}/run.json")
        if workbench.download(record) is None:
            where = f'project "{place.project or place.project_id}" of {place.workbench}'
            what = f'{count} workload{"s" if count > 1 else ""} of "{name}"'
            lost.append(Left(placing.TARGET, name, where, what, msgspec.to_builtins(place)))
    where = f'project "{place.project or place.project_id}" of {place.workbench}'
    for own, count in measuring.lost(workbench).items():
        what = f"{count} workload{'s' if count > 1 else ''} of a measurement of `doctor`"
        lost.append(Left(placing.TARGET, f"{_MEASUREMENT}{own}", where, what, msgspec.to_builtins(place)))
    return lost


def end_lost(workbench: Workbench, name: str) -> None:
    """Stop and delete what a deployment without a folder, or a measurement, has left.  Raises PenstockError."""
    if name.startswith(_MEASUREMENT):
        measuring.remove(workbench, name.removeprefix(_MEASUREMENT))
        return
    if workbench.download(names.in_project(f"{names.run_path(name)}/run.json")) is not None:
        raise PenstockError(f'cannot remove workloads of "{name}": it was started again')
    applications, jobs = _workloads(workbench, name)
    for row in applications:
        placing.end_application(workbench, str(row["id"]))
    placing.end_jobs(workbench, placing.runs_of(workbench, jobs))
    with contextlib.suppress(PenstockError):
        folder.remove(workbench, name)
