"""Creates what a deployment has in the project, and ends what is not wanted: an application, a job for each node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock import processes
from penstock.errors import PenstockError
from penstock.run_folder import Handle, Run, Unit, order, unit_of
from penstock.targets.cloudera import folder, names, session, weights, words, workers, workloads
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.waiting import wait
from penstock.wire.client import Client

TARGET = "cloudera"
_ADMIN_S = 3.0
_TIDY_S = 15.0  # beyond its drain a node ends its engine
STOP_S = 60.0  # until the workbench has stopped what it was asked to
_HUNG_GRACE_S = 2.0

Entries = dict[str, dict[str, Any]]
WAITS: dict[str, Any] = {"jobs": []}  # the entry of a replica whose weights are not there


def place(workbench: Workbench, run: Run, units: Collection[Unit]) -> Handle:
    """As `Target.place`. Replicas first: a controller that starts finds them in the handle, and creates none twice."""
    is_inside, before = session.is_inside(run), dict(run.handle().units)
    entries: Entries = dict(before)
    if not entries:
        _sweep_jobs(workbench, run, {})
        folder.send_code(workbench, workloads.code_of(run.deployment()))
        if not is_inside:
            folder.send(workbench, run)
    leaving = {
        key: entries.pop(key) for key in list(entries) if key.startswith("replica/") and unit_of(key) not in units
    }
    wanted = [unit for unit in sorted(units, key=order) if unit.kind == "replica"]
    if workers.are_used(run.deployment()):
        problems = list[PenstockError]()
        _order_workers(workbench, run, wanted, leaving, entries, is_inside)
    else:
        _end_replicas(workbench, run, leaving, is_inside)
        problems = _place_jobs(workbench, run, wanted, entries)
    if problems and not entries:
        raise problems[0]
    _place_services(workbench, run, units, entries, is_inside)
    if problems and entries == before:
        raise problems[0]
    if workers.are_used(run.deployment()) and not is_inside and entries != before:
        _write_handle(workbench, run, entries, is_inside)  # the launcher reads it there
        wait(lambda: not workers.living(workbench, run, _names_of(leaving)), workers.STOP_S)
    return Handle(TARGET, {unit.key: entries[unit.key] for unit in sorted(map(unit_of, entries), key=order)})


def _place_jobs(workbench: Workbench, run: Run, wanted: Sequence[Unit], entries: Entries) -> list[PenstockError]:
    """Start the nodes of these replicas that do not run; why some could not be started."""
    problems: list[PenstockError] = []
    jobs: dict[str, Object] | None = None
    found: weights.Look | None = None
    for unit in wanted:
        missing = _missing_ranks(workbench, run, entries.get(unit.key))
        if not missing:
            continue
        try:
            found = weights.bring(workbench, run) if found is None else found
            if found.state != "there":
                entries[unit.key] = WAITS
                continue
            jobs = {str(row.get("name")): row for row in workbench.jobs()} if jobs is None else jobs
            entries[unit.key] = _start_replica(workbench, run, unit, entries.get(unit.key), missing, jobs)
        except PenstockError as exc:
            problems.append(exc)
    if jobs is not None:
        _sweep_jobs(workbench, run, entries)
    return problems


def _order_workers(
    workbench: Workbench, run: Run, wanted: Sequence[Unit], leaving: Entries, entries: Entries, is_inside: bool
) -> None:
    """The launcher in the application launches what the handle names, and stops what it does not."""
    if leaving and is_inside:
        workers.leave(workbench, run, leaving, _names_of(leaving), run.plan().drain_s + _TIDY_S)
    application = find_gateway(workbench, run)
    known = workers.look(workbench, run, application)
    new = [unit for unit in wanted if entries.get(unit.key, WAITS) == WAITS]
    are_there = not new or weights.bring(workbench, run).state == "there"
    for unit in wanted:
        if unit in new and not are_there:
            entries[unit.key] = WAITS
        else:
            before = None if unit in new else entries[unit.key]
            entries[unit.key] = workers.named(before, known, run.plan().n_nodes)


def _names_of(entries: Entries) -> set[str]:
    return {str(name) for entry in entries.values() for name in entry.get("workers", ())}


# ---- applications ----------------------------------------------------------------------------------------------------


def _place_services(workbench: Workbench, run: Run, units: Collection[Unit], entries: Entries, is_inside: bool) -> None:
    """Gateway and controller are one application. Its own program brings back what dies in it."""
    for kinds, part in ((("gateway", "controller"), "gateway"), (("ui",), "ui")):
        wanted = {unit for unit in units if unit.kind in kinds}
        had = {unit_of(key) for key in entries if unit_of(key).kind in kinds}
        application = next((str(entries[unit.key]["application"]) for unit in had), None)
        is_own = is_inside and part == "gateway" and os.environ.get("PENSTOCK_UNIT") == "gateway"
        launches = part == "gateway" and workers.are_used(run.deployment())
        if launches and application is None:
            application = _find_application(workbench, run, part)
        if not wanted and not (launches and any(unit.kind == "replica" for unit in units)):
            if application is not None and not is_own:
                end_application(workbench, application)
            _replace(entries, had, {})
            continue
        if is_own:
            application = application or _find_application(workbench, run, part)
            _replace(entries, had, {unit.key: {"application": application} for unit in wanted})
            if had != wanted:
                run.write_handle(Handle(TARGET, entries))  # the next gateway takes its name from it
                _end_hung(run, had - wanted)
            continue
        application = application or _find_application(workbench, run, part)
        row = workbench.application(application) if application is not None else None
        is_new = row is None
        # A program with a launcher is not restarted for other units, since its workers would end: it reads the handle.
        if row is None or words.life(row) == "gone" or (had != wanted and not launches):
            # Before it starts: its program reads there which units it is.
            _replace(entries, had, {unit.key: {"application": application} for unit in wanted})
            _write_handle(workbench, run, entries, is_inside)
            row = _start_application(workbench, run, part, row)
        _replace(entries, had | wanted, {unit.key: {"application": str(row["id"])} for unit in wanted})
        if is_new:
            _write_handle(workbench, run, entries, is_inside)


def _replace(entries: Entries, had: Collection[Unit], new: Mapping[str, dict[str, Any]]) -> None:
    for unit in had:
        entries.pop(unit.key, None)
    entries.update(new)


def _write_handle(workbench: Workbench, run: Run, entries: Entries, is_inside: bool) -> None:
    run.write_handle(Handle(TARGET, entries))
    if not is_inside:
        folder.send_file(workbench, run, "handle.json")


def find_gateway(workbench: Workbench, run: Run) -> Object | None:
    """The application with gateway, controller and launcher; None when there is none."""
    ids = [entry["application"] for key, entry in run.handle().units.items() if unit_of(key).kind == "gateway"]
    application = str(ids[0]) if ids and ids[0] is not None else _find_application(workbench, run, "gateway")
    return None if application is None else workbench.application(application)


def require_gateway(workbench: Workbench, run: Run) -> None:
    """Raises PenstockError where its application does not run: nobody would answer."""
    place = words.placement_of_application(find_gateway(workbench, run), "gateway")
    if place.state == "gone":
        hint = "`penstock up FILE` starts it again."
        raise PenstockError(f'cannot reach the gateway of "{run.name}": {place.reason}', hint=hint)


def _find_application(workbench: Workbench, run: Run, part: str) -> str | None:
    title = names.workload(run.name, run.record().id, part)
    return next((str(row["id"]) for row in workbench.applications() if row.get("name") == title), None)


def _start_application(workbench: Workbench, run: Run, part: str, row: Object | None) -> Object:
    """The row of an application that runs, or starts."""
    if row is not None:
        workbench.restart_application(str(row["id"]))
        return row
    file = names.APPLICATION if part == "gateway" else names.PAGE
    body = workloads.instance(run.artifact().files[file], "", 0)
    domain = names.subdomain(run.name, "" if part == "gateway" else part)
    return workbench.create_application(
        {"name": names.workload(run.name, run.record().id, part), "subdomain": domain, **body}
    )


def _end_hung(run: Run, units: Collection[Unit]) -> None:
    """A gateway that does not answer: the application starts the next one, under its name."""
    if any(unit.kind == "gateway" for unit in units):
        hung = [process for process in processes.find_marked(str(run.path)) if process.role == "gateway"]
        processes.end(hung, _HUNG_GRACE_S)


def end_application(workbench: Workbench, application: str) -> None:
    """Stop it, wait, delete it. Nothing when it is gone."""
    row = workbench.application(application)
    if row is None:
        return
    if words.life(row) != "gone":
        workbench.stop_application(application)
        wait(lambda: words.life(workbench.application(application)) == "gone", STOP_S)
    workbench.delete_application(application)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _missing_ranks(workbench: Workbench, run: Run, entry: Mapping[str, Any] | None) -> list[int]:
    """Nodes of a replica that do not run and wait for nothing."""
    if entry is None or entry == WAITS:
        return list(range(run.plan().n_nodes))
    rows = [workbench.job_run(job, job_run) for job, job_run in entry["jobs"]]
    return [rank for rank, row in enumerate(rows) if words.life(row) == "gone"]


def _start_replica(
    workbench: Workbench, run: Run, unit: Unit, entry: Mapping[str, Any] | None, ranks: Sequence[int],
    jobs: Mapping[str, Object],
) -> dict[str, Any]:  # fmt: skip
    """The entry of a replica whose nodes all have a run; `jobs`: those of the project, by name.

    When one is refused, those that were started before it are ended: a part of a replica holds GPUs for nothing.
    """
    template, launch = run.artifact().files[names.NODE], run.record().id
    pairs = {rank: list(pair) for rank, pair in enumerate(entry["jobs"])} if entry is not None else {}
    started: list[tuple[str, str]] = []
    try:
        for rank in ranks:
            title = names.workload(run.name, launch, names.node_part(unit.name, rank))
            job = jobs.get(title) or workbench.create_job(
                {"name": title, **workloads.instance(template, unit.name, rank)}
            )
            row = weights.active_run(workbench, str(job["id"]))
            pairs[rank] = [str(job["id"]), str(row["id"])]
            started.append((str(job["id"]), str(row["id"])))
    except PenstockError:
        for job_id, run_id in started:
            with contextlib.suppress(PenstockError):
                workbench.stop_run(job_id, run_id)
        raise
    return {"jobs": [pairs[rank] for rank in sorted(pairs)]}


def _end_replicas(workbench: Workbench, run: Run, leaving: Mapping[str, Mapping[str, Any]], is_inside: bool) -> None:
    """A stop has no grace, so nodes are first ordered to leave, by the answers to their announcements."""
    if not leaving:
        return
    pairs = [(str(job), str(job_run)) for entry in leaving.values() for job, job_run in entry["jobs"]]
    if is_inside:
        with contextlib.suppress(PenstockError):
            gateway = Client(run.admin_url, run.admin_token(), _ADMIN_S)
            for key in leaving:
                gateway.post_json("/admin/leave", {"replica": unit_of(key).name})
            wait(lambda: not running(workbench, pairs), run.plan().drain_s + _TIDY_S)
    end_jobs(workbench, pairs)


def running(workbench: Workbench, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[1] and words.life(workbench.job_run(*pair)) != "gone"]


def end_jobs(workbench: Workbench, pairs: Sequence[tuple[str, str]]) -> None:
    """Stop these runs, wait until they have stopped, delete their jobs."""
    for pair in running(workbench, pairs):
        workbench.stop_run(*pair)
    wait(lambda: not running(workbench, pairs), STOP_S)
    for job, _ in pairs:
        workbench.delete_job(job)


def _sweep_jobs(workbench: Workbench, run: Run, entries: Entries) -> None:
    """End jobs of the deployment that no entry names: of an earlier launch, or of a controller that was killed."""
    kept = {str(job) for entry in entries.values() for job, _ in entry.get("jobs", ())}
    own = names.workload(run.name, run.record().id, names.WEIGHTS_PART)
    titles = {str(row["id"]): str(row.get("name")) for row in workbench.jobs()}
    ours = {job for job, title in titles.items() if names.is_of(title, run.name) and title != own}
    rows = [{"id": job} for job in sorted(ours - kept)]
    end_jobs(workbench, runs_of(workbench, rows))


def runs_of(workbench: Workbench, jobs: Sequence[Object]) -> list[tuple[str, str]]:
    """Each job with each of its runs that may be active, or with none."""
    pairs = []
    for job in jobs:
        rows = [row for row in workbench.runs(str(job["id"])) if words.life(row) != "gone"]
        pairs += [(str(job["id"]), str(row["id"])) for row in rows] or [(str(job["id"]), "")]
    return pairs
