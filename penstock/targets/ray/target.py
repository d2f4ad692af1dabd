"""Target "ray": a Ray cluster that runs already. Every replica is a job, by the cluster's Jobs API."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import shlex
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock import processes
from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine
from penstock.hardware.detect import machine_in
from penstock.run_folder import Artifact, Handle, Launch, Record, Run, Unit, replica
from penstock.spec.blocks import RayCluster
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets import Placement, Surveyed, Target
from penstock.targets.assumed import machines_of_file
from penstock.targets.ray import driver, jobs_api
from penstock.targets.ray.jobs_api import Dashboard, Job, RayNode
from penstock.targets.ray.placement import (
    LOST,
    WAITS,
    ClusterView,
    as_ray_gives,
    bundle,
    gpu_kind,
    in_words,
    last_word,
    placement_of,
    shortage,
)

_FRESH_S = 1.0
_POLL_S = 0.2
_AGAIN_S = 1.0
_SURVEY_S = 60.0
_PATIENT_S = 30.0  # with the dashboard of a busy cluster
_START_S = 90.0  # a job's supervisor and its environment, before its command begins
_SPARE_S = 25.0  # for the engine's own end after the drain
# Ray looks at a running job once a second. One that is deleted before it saw the end comes back as FAILED.
_MONITORED_S = 2.0
_DELETIONS = 5
_FORGET_S = 60.0
_HERE = "{penstock}"
_SURVEY_ID = "penstock-survey-"  # jobs whose id begins so
_META_ID, _META_REPLICA = "penstock_run_id", "penstock_replica"


class RayJobs(Target):
    name = "ray"
    capabilities = frozenset({"survey"})
    listen = "network"
    is_elastic = True
    executor = "mp"  # a Ray cluster that is not ours: vLLM's ranks need no second Ray

    def __init__(self) -> None:
        self._views: dict[str, ClusterView] = {}
        self._ending: set[str] = set()

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        block = _block(deployment)
        problems = _own_problems(deployment, block)
        try:
            dashboard = Dashboard(block.address)
            dashboard.ray_version()
            nodes = dashboard.nodes()
        except PenstockError as exc:
            return problems if is_rehearsal else [*problems, Problem("ray.address", exc.message, exc.hint)]
        n_gpus, n_nodes = deployment.hardware.gpus_per_node or 0, deployment.hardware.nodes
        kind = gpu_kind(deployment, nodes)
        fit = [
            node for node in nodes if node.resources.get("GPU", 0) >= n_gpus and kind.keys() <= node.resources.keys()
        ]
        if not fit:
            most = max((node.resources.get("GPU", 0) for node in nodes), default=0)
            message = f"{n_gpus}, but the largest of {len(nodes)} nodes has {most:g} GPUs for Ray"
            problems.append(Problem("hardware.gpus_per_node", message, "start Ray there with --num-gpus"))
        elif len(fit) < n_nodes:
            what = f" with {n_gpus} GPUs" if n_gpus else ""
            message = f"{n_nodes} nodes{what}, but the cluster has {len(fit)} alive"
            problems.append(Problem("hardware.nodes", message, "`ray status` on its head lists them"))
        return problems

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        try:
            answers = self._survey(deployment, ["-m", "penstock.hardware.detect"], _SURVEY_S)
        except PenstockError as exc:
            if not is_rehearsal:
                raise
            return machines_of_file(deployment, exc.message)
        kind = gpu_kind(deployment, [RayNode("", answer["address"], answer["resources"]) for answer in answers])
        machines, complaints = [], []
        for answer in answers:
            if not kind.keys() <= answer["resources"].keys():
                continue
            try:
                machine = machine_in(answer["out"])
            except (msgspec.MsgspecError, IndexError):
                last = (answer["err"].strip().splitlines() or ["it printed nothing"])[-1]
                complaints.append(f"{answer['host']}: {last[:300]}")
                continue
            machines.append(as_ray_gives(machine, int(answer["resources"].get("GPU", 0))))
        if not machines:
            raise PenstockError(
                f"could not survey any node of the Ray cluster {_block(deployment).address}",
                detail="\n".join(complaints),
                hint="Set ray.python to an interpreter on its nodes that has vLLM and penstock's requirements, "
                "or ray.runtime_env: {pip: [msgspec, psutil, pyyaml, rich, uvloop, nvidia-ml-py]}.",
            )
        return machines

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        answers = self._survey(deployment, argv, timeout_s)
        return [Surveyed(answer["host"], answer["exit_code"], answer["out"], answer["err"]) for answer in answers]

    def _survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
        block = _block(deployment)
        return _ask_nodes(Dashboard(block.address, _PATIENT_S), block, argv, timeout_s, DEMO_MODEL in argv)

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        block, there = _block(deployment), msgspec.to_builtins(launch)
        here = str(Path(penstock.__file__).parent)
        # The bundled model travels in the package; every other path is the same on the nodes.
        there["plan"]["model"]["path"] = there["plan"]["model"]["path"].replace(here, _HERE)
        there["token_file"] = ""
        argv = ("exec", "python", "-m", "penstock.targets.ray.driver", "drive", "{replica_args}")
        job = _job_body(block, " ".join(argv), launch.plan.drain_s)
        job["metadata"] = {"penstock_run": launch.deployment, _META_ID: "{run_id}", _META_REPLICA: "{replica}"}
        nodes = {"n_nodes": launch.plan.n_nodes, "bundle": bundle(launch.plan), "python": block.python}
        parts = {"launch.json": there, "job.json": job, "nodes.json": nodes}
        return Artifact(argv, {name: json.dumps(part, indent=2) + "\n" for name, part in parts.items()})

    def status(self, run: Run) -> dict[Unit, Placement]:
        is_down, placements = run.desired().state == "down", {}
        for name, entry in run.handle().replicas.items():
            view, job = self._view(entry["address"]), entry["job"]
            placement = placement_of(view, job, is_down or job in self._ending)
            if placement.reason in (WAITS, LOST) and view.nodes:
                is_lost, wanted = placement.reason == LOST, json.loads(run.artifact().files["nodes.json"])
                why = shortage(wanted, view.nodes, view.free, is_lost)
                placement = msgspec.structs.replace(placement, reason=f"{LOST}: it {why}" if is_lost else why)
            placements[replica(name)] = placement
        return placements

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        entry = run.handle().replicas.get(unit.name)
        if entry is None:
            return
        dashboard, job = Dashboard(entry["address"]), entry["job"]
        n_read: int | None = None
        while True:
            row, asked_at = dashboard.job(job), time.monotonic()
            *lines, begun = dashboard.log(job).split("\n")  # a progress bar's \r ends no line
            is_over = not _is_alive(row)
            if begun and (is_over or not follow):
                lines.append(begun)
            if n_read is None:
                n_read = 0 if last is None else max(0, len(lines) - last)
            yield from lines[n_read:]
            if not follow:
                return
            n_read = max(n_read, len(lines))  # fewer lines: Ray's agent did not answer
            if is_over:
                after = self._next_job(run, unit.name, job)
                if after is None:
                    return
                job, n_read = after, 0
            else:  # the answer is the whole log: a long one is asked for less often
                time.sleep(max(_AGAIN_S, 10 * (time.monotonic() - asked_at)))

    def _next_job(self, run: Run, replica: str, job: str) -> str | None:
        """The job after that one, when the replica was placed again; None when the run has ended. Blocks."""
        while not run.is_ended():
            time.sleep(_AGAIN_S)
            current = run.handle().replicas.get(replica, {}).get("job", job)
            if current != job:
                return str(current)
        return None

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        dashboard = Dashboard(_address(run))
        run_id, entries = run.record().id, run.handle().replicas
        jobs, names = dashboard.jobs(), sorted(unit.name for unit in units)
        known = entries | _submitted_before(run, _of_run(jobs, run_id), dashboard.address)
        kept = {name: known[name] for name in names if name in known and _is_alive(jobs.get(known[name]["job"]))}
        wanted = {entry["job"] for entry in kept.values()}
        # One that ended by itself stays in Ray's list, with its log, until `end`.
        extra = [job for job in _of_run(jobs, run_id) if job.id not in wanted and not job.has_ended]
        self._end(dashboard, run, extra and [*extra, *_unread(jobs)], run.plan().drain_s + _SPARE_S)
        problems = []
        for name in names:
            if name not in kept:
                try:
                    kept[name] = {"job": self._place(dashboard, run, name), "address": dashboard.address}
                except PenstockError as exc:
                    problems.append(exc)
        self._views.pop(dashboard.address, None)
        if problems and kept == entries:
            raise problems[0]
        return Handle(self.name, {replica(name).key: entry for name, entry in kept.items()})

    def end(self, run: Run, grace_s: float) -> None:
        dashboard = Dashboard(_address(run))
        try:
            jobs = dashboard.jobs()
        except PenstockError as exc:
            if not run.handle().units:  # nothing was placed that we know of
                return
            raise PenstockError(
                f'could not end the jobs of "{run.name}": {exc.message}',
                hint=f"When the cluster is gone for good: penstock down {run.name} --forget",
                is_retryable=True,
            ) from exc
        self._end(dashboard, run, [*_of_run(jobs, run.record().id), *_unread(jobs)], grace_s)
        self._views.pop(dashboard.address, None)

    # --- placing and ending

    def _place(self, dashboard: Dashboard, run: Run, replica: str) -> str:
        record, files = run.record(), run.artifact().files
        nodes, launch = json.loads(files["nodes.json"]), json.loads(files["launch.json"])
        nodes["bundle"] |= gpu_kind(run.deployment(), dashboard.nodes())
        job = f"penstock-{record.name}-{record.id}-{replica}-{secrets.token_hex(3)}"
        name, data = jobs_api.package(with_model=_HERE in files["launch.json"])
        dashboard.upload(name, data)
        replica_args = nodes | {
            "launch": launch,
            "token": run.admin_token(),
            "environment": processes.marks(_mark(record), record.id, "node"),
            "run_id": record.id,
            "replica": replica,
            "job": job,
            "drain_s": launch["plan"]["drain_s"] + 10.0,
            "wanted": in_words(nodes),
        }
        key = dashboard.upload(f"penstock-{secrets.token_hex(16)}.zip", json.dumps(replica_args).encode())
        values = {"run_id": record.id, "replica": replica, "job": job, "package": name, "replica_args": key}
        body = files["job.json"]
        for word, value in values.items():
            body = body.replace(f"{{{word}}}", value)
        return dashboard.submit(json.loads(body))

    def _end(self, dashboard: Dashboard, run: Run, jobs: Sequence[Job], grace_s: float) -> None:
        """Stop jobs, wait for their end, make sure that nothing of them is left, and have Ray forget them."""
        self._ending |= {job.id for job in jobs}
        alive = [job for job in jobs if not job.has_ended]
        for job in alive:
            note = json.dumps({"grace_s": grace_s}).encode()
            dashboard.upload(driver.stop_note(job.id).removeprefix("gcs://"), note)
            dashboard.stop(job.id)
        left = _wait_ended(dashboard, alive, grace_s + _START_S)
        if left:
            raise PenstockError(
                f'could not end {len(left)} job(s) of "{run.name}" on {dashboard.address}',
                detail=", ".join(left),
                hint="`ray job stop` and `ray job list` on the cluster show more.",
                is_retryable=True,
            )
        ended_at = time.monotonic()
        for job in jobs:
            log = dashboard.log(job.id)
            # A driver that was killed did not see its nodes end; a node that was lost may be back with its folders.
            if driver.LOST in log or (job in alive and driver.ENDED not in log.splitlines()[-5:]):
                record, name = run.record(), job.metadata.get(_META_REPLICA, "0")
                argv = ["-m", "penstock.targets.ray.guard", "sweep", _mark(record), name, record.id]
                _ask_nodes(dashboard, _block(run.deployment()), argv, 30.0)
        if jobs:
            time.sleep(max(0.0, ended_at + _MONITORED_S - time.monotonic()))
        _delete(dashboard, [job.id for job in jobs])

    def _view(self, address: str) -> ClusterView:
        before = self._views.get(address)
        if before is not None and time.monotonic() - before.at < _FRESH_S:
            return before
        try:
            dashboard = Dashboard(address)
            jobs, groups = dashboard.jobs(), dashboard.groups()
            view = ClusterView(time.monotonic(), jobs, groups)
            if {"PENDING", "RESCHEDULING"} & set(groups.values()):
                view = msgspec.structs.replace(view, nodes=tuple(dashboard.nodes()), free=dashboard.free())
        except PenstockError as exc:
            # A dashboard that is away says nothing of the jobs: they run without it.
            away = f"Ray's dashboard does not answer, its last answer: {exc.message}"
            view = msgspec.structs.replace(before or ClusterView(0.0, {}, {}), at=time.monotonic(), away=away)
        self._views[address] = view
        return view


def _block(deployment: Deployment) -> RayCluster:
    return deployment.ray or RayCluster()


def _mark(record: Record) -> str:
    """What its nodes are found by on their machines. No path: another person's run may have the same, elsewhere."""
    return f"ray:{record.name}-{record.id}"


def _own_problems(deployment: Deployment, block: RayCluster) -> list[Problem]:
    problems = []
    if deployment.engine.executor == "ray":
        message = "ray: vLLM would start a second Ray on the nodes of this one"
        problems.append(Problem("engine.executor", message, "use auto or mp: they need no Ray between the nodes"))
    modules = block.runtime_env.get("py_modules") or []
    for name, value in (("working_dir", [block.runtime_env.get("working_dir")]), ("py_modules", modules)):
        for place in value:
            if isinstance(place, str) and "://" not in place:
                message = f'"{place}" is a folder here, which penstock does not send'
                problems.append(Problem(f"ray.runtime_env.{name}", message, "give a URI that the nodes can fetch"))
    return problems


def _job_body(block: RayCluster, entrypoint: str, drain_s: float) -> dict[str, Any]:
    """What `ray job submit` sends: python/ray/dashboard/modules/job/common.py of Ray 2.60, JobSubmitRequest."""
    env = block.runtime_env
    stop_s = int(drain_s + 10.0 + 2 * _SPARE_S)
    return {
        "entrypoint": entrypoint,
        "submission_id": "{job}",
        "runtime_env": {
            **env,
            "py_modules": [*(env.get("py_modules") or []), "gcs://{package}"],
            # By default Ray kills a driver 3 s after it asked it to stop.
            "env_vars": {**(env.get("env_vars") or {}), "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s)},
        },
    }


def _wait_ended(dashboard: Dashboard, jobs: Iterable[Job], timeout_s: float) -> list[str]:
    """The jobs that have not ended in that time."""
    deadline, left = time.monotonic() + timeout_s, [job.id for job in jobs]
    while left and time.monotonic() < deadline:
        now = dashboard.jobs()
        left = [job for job in left if _is_alive(now.get(job))]
        if left:
            time.sleep(_POLL_S)
    return left


def _ask_nodes(
    dashboard: Dashboard, block: RayCluster, argv: Sequence[str], timeout_s: float, with_model: bool = False
) -> list[dict[str, Any]]:
    """Run `python ARGV` on every living node by a short job; one answer a node."""
    name, data = jobs_api.package(with_model)
    dashboard.upload(name, data)
    question = {"argv": [*argv], "python": block.python, "timeout_s": timeout_s}
    encoded = base64.b64encode(json.dumps(question).encode()).decode()
    words = ["exec", "python", "-m", "penstock.targets.ray.driver", "survey", encoded]
    body = _job_body(block, shlex.join(words), 0.0)
    body["submission_id"] = job = f"{_SURVEY_ID}{secrets.token_hex(6)}"
    body["runtime_env"]["py_modules"][-1] = f"gcs://{name}"
    dashboard.submit(body)
    deadline = time.monotonic() + timeout_s + _START_S
    try:
        while True:
            row = dashboard.job(job)
            lines = dashboard.log(job).splitlines()
            for line in reversed(lines):
                if line.startswith(driver.ANSWER) and line.endswith("]"):
                    answers: list[dict[str, Any]] = json.loads(line.removeprefix(driver.ANSWER))
                    return answers
            if not _is_alive(row) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        why = last_word(row) if row is not None and row.has_ended else "its job did not end in time"
        raise PenstockError(f"could not survey the nodes of {dashboard.address}: {why}", detail="\n".join(lines[-10:]))
    finally:
        # Only the exit of the interpreter waits for it.
        threading.Thread(target=_forget, args=(dashboard, job), name="forget-job").start()


def _forget(dashboard: Dashboard, job: str) -> None:
    """End a job of ours that nobody needs any more, and have Ray forget it. Blocks for some seconds, on a busy cluster
    for up to a minute."""
    deadline = time.monotonic() + _FORGET_S
    while time.monotonic() < deadline:
        with contextlib.suppress(PenstockError):  # a dashboard that is busy is asked again
            row = dashboard.job(job)
            if row is not None and not row.has_ended:
                dashboard.stop(job)
            if row is None or not _wait_ended(dashboard, [row], deadline - time.monotonic()):
                time.sleep(_MONITORED_S)
                _delete(dashboard, [job])
                return
        time.sleep(_POLL_S)


def _delete(dashboard: Dashboard, jobs: Iterable[str]) -> None:
    """Have Ray forget jobs that have ended. On a busy head one may come back, and is deleted again."""
    left = [*jobs]
    for _ in range(_DELETIONS):
        if not left:
            return
        for job in left:
            dashboard.delete(job)
        time.sleep(_MONITORED_S / 2)
        now = dashboard.jobs()
        left = [job for job in left if job in now]


def _address(run: Run) -> str:
    for entry in run.handle().units.values():
        return str(entry["address"])
    return _block(run.deployment()).address


def _is_alive(job: Job | None) -> bool:
    return job is not None and not job.has_ended


def _submitted_before(run: Run, jobs: Iterable[Job], address: str) -> dict[str, dict[str, Any]]:
    """The entries of jobs that a controller submitted and, killed, did not note."""
    ordered = run.handle().ordered
    names = {job.metadata.get(_META_REPLICA, ""): job.id for job in jobs if not job.has_ended}
    return {name: {"job": names[name], "address": address} for name in ordered if name in names}


def _of_run(jobs: Mapping[str, Job], run_id: str) -> list[Job]:
    return [job for job in jobs.values() if job.metadata.get(_META_ID) == run_id]


def _unread(jobs: Mapping[str, Job]) -> list[Job]:
    """Surveys that have ended: who asks one looks every 0.2 s and has Ray forget it, unless it was killed."""
    return [job for job in jobs.values() if job.id.startswith(_SURVEY_ID) and job.has_ended]
