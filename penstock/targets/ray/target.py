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
from penstock.hardware import Machine, catalog
from penstock.log_lines import last_words
from penstock.planner import Plan
from penstock.run_folder import Artifact, Handle, Launch, Record, Run, Unit, replica
from penstock.spec.blocks import RayCluster
from penstock.spec.deployment import Deployment
from penstock.targets import Placement, Surveyed, Target
from penstock.targets.ray import driver, jobs_api
from penstock.targets.ray.jobs_api import Dashboard, Job, RayNode

_FRESH_S = 1.0
_POLL_S = 0.2
_AGAIN_S = 1.0
_WHY_FRESH_S = 3.0
_SURVEY_S = 60.0
_WAITS = "Ray waits for free machines"
_START_S = 90.0  # a job's supervisor and its environment, before its command begins
_SPARE_S = 25.0  # for the engine's own end after the drain
# Ray looks at a running job once a second. One that is deleted before it saw the end comes back as FAILED.
_MONITORED_S = 2.0
_KIND = "accelerator_type:"
_HERE = "{penstock}"
_META_ID, _META_REPLICA = "penstock_run_id", "penstock_replica"


class RayJobs(Target):
    name = "ray"
    capabilities = frozenset({"survey"})
    listen = "network"
    is_elastic = True
    owns_ray = True

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}
        self._whys: dict[str, tuple[float, str]] = {}
        self._ending: set[str] = set()

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        block = _block(deployment)
        found = _own_problems(deployment, block)
        try:
            dashboard = Dashboard(block.address)
            dashboard.ray_version()
            nodes = dashboard.nodes()
        except PenstockError as exc:
            return [*found, Problem("ray.address", exc.message, exc.hint)]
        n_gpus, n_nodes = deployment.hardware.gpus_per_node or 0, deployment.hardware.nodes
        pin = _pin(deployment, nodes)
        fit = [node for node in nodes if node.resources.get("GPU", 0) >= n_gpus and pin.keys() <= node.resources.keys()]
        if not fit:
            most = max((node.resources.get("GPU", 0) for node in nodes), default=0)
            message = f"{n_gpus}, but the largest of {len(nodes)} nodes has {most:g} GPUs for Ray"
            found.append(Problem("hardware.gpus_per_node", message, "start Ray there with --num-gpus"))
        elif len(fit) < n_nodes:
            what = f" with {n_gpus} GPUs" if n_gpus else ""
            message = f"{n_nodes} nodes{what}, but the cluster has {len(fit)} alive"
            found.append(Problem("hardware.nodes", message, "`ray status` on its head lists them"))
        return found

    def machines(self, deployment: Deployment) -> list[Machine]:
        answers = self._ask(deployment, ["-m", "penstock.hardware.node_facts"], _SURVEY_S)
        pin = _pin(deployment, [RayNode("", told["address"], told["resources"]) for told in answers])
        found, wrong = [], []
        for told in answers:
            if not pin.keys() <= told["resources"].keys():
                continue
            try:
                facts = msgspec.json.decode(told["out"].strip().splitlines()[-1], type=_Facts)
            except (msgspec.MsgspecError, IndexError):
                last = (told["err"].strip().splitlines() or ["it printed nothing"])[-1]
                wrong.append(f"{told['host']}: {last[:300]}")
                continue
            found.append(_as_ray_gives(facts.machine, int(told["resources"].get("GPU", 0))))
        if not found:
            raise PenstockError(
                f"could not survey any node of the Ray cluster {_block(deployment).address}",
                detail="\n".join(wrong),
                hint="Set ray.python to an interpreter on its nodes that has vLLM and penstock's requirements, "
                "or ray.runtime_env: {pip: [msgspec, psutil, pyyaml, rich, uvloop]}.",
            )
        return found

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        answers = self._ask(deployment, argv, timeout_s)
        return [Surveyed(told["host"], told["exit_code"], told["out"], told["err"]) for told in answers]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        block = _block(deployment)
        told = msgspec.to_builtins(launch)
        here = str(Path(penstock.__file__).parent)
        # The bundled model travels in the package; every other path is the same on the nodes.
        told["plan"]["model"]["path"] = told["plan"]["model"]["path"].replace(here, _HERE)
        told["token_file"] = ""
        argv = ("exec", "python", "-m", "penstock.targets.ray.driver", "drive", "{parcel}")
        job = _job_body(block, " ".join(map(shlex.quote, argv[:-1])) + " {parcel}", launch.plan.drain_s)
        job["metadata"] = {"penstock_run": launch.deployment, _META_ID: "{run_id}", _META_REPLICA: "{replica}"}
        nodes = {"n_nodes": launch.plan.n_nodes, "bundle": _bundle(launch.plan), "python": block.python}
        parts = {"launch.json": told, "job.json": job, "nodes.json": nodes}
        return Artifact(argv, {name: jobs_api.dumped(part) + "\n" for name, part in parts.items()})

    def status(self, run: Run) -> dict[Unit, Placement]:
        is_down = run.desired().state == "down"
        placements = {}
        for name, entry in run.handle().replicas.items():
            placement = self._placement(entry["address"], entry["job"], is_down)
            if placement.reason == _WAITS:
                placement = msgspec.structs.replace(placement, reason=self._why(entry["address"], run))
            placements[replica(name)] = placement
        return placements

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        entry = run.handle().replicas.get(unit.name)
        if entry is None:
            return
        dashboard, job = Dashboard(entry["address"]), entry["job"]
        if not follow:
            lines = dashboard.log(job)
            yield from lines if last is None else lines[max(0, len(lines) - last) :]
            return
        there = len(dashboard.log(job)) if last is not None else 0
        skip = max(0, there - (last or 0)) if last is not None else 0
        while True:
            is_whole = True
            try:
                for number, line in enumerate(dashboard.follow(job)):
                    if number >= skip:
                        skip = number + 1
                        yield line
            except jobs_api.Broken:
                is_whole = False
            row = dashboard.job(job)
            if row is None or (is_whole and row.has_ended):
                after = self._next_job(run, unit.name, job)
                if after is None:
                    return
                job, skip = after, 0
            else:  # its lines come again from the first
                time.sleep(_AGAIN_S)

    def _next_job(self, run: Run, replica: str, job: str) -> str | None:
        """The job after that one, when the replica was placed again; None when the run has ended. Blocks."""
        while not run.is_ended():
            time.sleep(_AGAIN_S)
            found = run.handle().replicas.get(replica, {}).get("job", job)
            if found != job:
                return str(found)
        return None

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        dashboard = Dashboard(_address(run))
        run_id, entries = run.record().id, run.handle().replicas
        jobs, names = dashboard.jobs(), sorted(unit.name for unit in units)
        kept = {name: entries[name] for name in names if name in entries and _is_alive(jobs.get(entries[name]["job"]))}
        wanted = {entry["job"] for entry in kept.values()}
        # One that ended by itself stays in Ray's list, with its log, until `end`.
        extra = [job for job in _of_run(jobs, run_id) if job.id not in wanted and not job.has_ended]
        self._end(dashboard, run, extra, run.plan().drain_s + _SPARE_S)
        problems = []
        for name in names:
            if name not in kept:
                try:
                    kept[name] = {"job": self._place(dashboard, run, name), "address": dashboard.address}
                except PenstockError as exc:
                    problems.append(exc)
        self._looks.pop(dashboard.address, None)
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
                hint=f"When the cluster is gone for good, so are they: remove {run.path}",
                is_retryable=True,
            ) from exc
        self._end(dashboard, run, _of_run(jobs, run.record().id), grace_s)
        self._looks.pop(dashboard.address, None)

    # --- placing and ending

    def _place(self, dashboard: Dashboard, run: Run, replica: str) -> str:
        record, files = run.record(), run.artifact().files
        nodes, launch = json.loads(files["nodes.json"]), json.loads(files["launch.json"])
        nodes["bundle"] |= _pin(run.deployment(), dashboard.nodes())
        job = f"penstock-{record.name}-{record.id}-{replica}-{secrets.token_hex(3)}"
        name, data = jobs_api.package(with_model=_HERE in files["launch.json"])
        dashboard.upload(name, data)
        environment = processes.marks(_mark(record), record.id, "node")
        parcel = nodes | {
            "launch": launch,
            "token": run.admin_token(),
            "environment": environment,
            "run_id": record.id,
            "replica": replica,
            "job": job,
            "drain_s": launch["plan"]["drain_s"] + 10.0,
            "wanted": _in_words(nodes),
        }
        key = dashboard.upload(f"penstock-{secrets.token_hex(16)}.zip", json.dumps(parcel).encode())
        values = {"run_id": record.id, "replica": replica, "job": job, "package": name, "parcel": key}
        body = files["job.json"]
        for word, value in values.items():
            body = body.replace(f"{{{word}}}", value)
        return dashboard.submit(json.loads(body))

    def _end(self, dashboard: Dashboard, run: Run, jobs: Iterable[Job], grace_s: float) -> None:
        """Stop jobs, wait for their end, make sure that nothing of them is left, and have Ray forget them."""
        ending = list(jobs)
        self._ending |= {job.id for job in ending}
        alive = [job for job in ending if not job.has_ended]
        for job in alive:
            note = json.dumps({"grace_s": grace_s}).encode()
            dashboard.upload(driver.stop_note(job.id).removeprefix("gcs://"), note)
            dashboard.stop(job.id)
        left = self._wait_ended(dashboard, alive, grace_s + _START_S)
        if left:
            raise PenstockError(
                f'could not end {len(left)} job(s) of "{run.name}" on {dashboard.address}',
                detail=", ".join(left),
                hint="`ray job stop` and `ray job list` on the cluster show more.",
                is_retryable=True,
            )
        ended_at = time.monotonic()
        for job in alive:
            if driver.ENDED not in dashboard.log(job.id)[-5:]:
                self._sweep(dashboard, run, job)
        if ending:
            time.sleep(max(0.0, ended_at + _MONITORED_S - time.monotonic()))
        for job in ending:
            dashboard.delete(job.id)

    def _wait_ended(self, dashboard: Dashboard, jobs: Iterable[Job], timeout_s: float) -> list[str]:
        deadline, left = time.monotonic() + timeout_s, [job.id for job in jobs]
        while left and time.monotonic() < deadline:
            now = dashboard.jobs()
            left = [job for job in left if _is_alive(now.get(job))]
            if left:
                time.sleep(_POLL_S)
        return left

    def _sweep(self, dashboard: Dashboard, run: Run, job: Job) -> None:
        """A driver that was killed could not see its nodes end."""
        record, replica, block = run.record(), job.metadata.get(_META_REPLICA, "0"), _block(run.deployment())
        argv = ["-m", "penstock.targets.ray.guard", "sweep", _mark(record), replica, record.id]
        _ask(dashboard, block, argv, 30.0)

    # --- looking

    def _placement(self, address: str, job: str, is_down: bool) -> Placement:
        look = self._look(address)
        row = look.jobs.get(job)
        if row is None:
            if look.away is not None:
                return Placement("placed", look.away)
            return Placement("gone", f"Ray does not know its job {job}")
        if row.state == "PENDING":
            return Placement("queued", "Ray prepares its job")
        if row.state == "RUNNING":
            return _of_group(look.groups.get(job), look.away)
        if row.state == "STOPPED":
            is_ours = is_down or job in self._ending
            return Placement("gone", "its job was stopped", is_final=not is_ours)
        return Placement("gone", f"its job has ended: {_last_word(row)}")

    def _look(self, address: str) -> _Look:
        before = self._looks.get(address)
        if before is not None and time.monotonic() - before.at < _FRESH_S:
            return before
        try:
            dashboard = Dashboard(address)
            look = _Look(time.monotonic(), dashboard.jobs(), dashboard.groups())
        except PenstockError as exc:
            # A dashboard that is away says nothing of the jobs: they run without it.
            away = f"Ray's dashboard does not answer, its last answer: {exc.message}"
            look = _Look(time.monotonic(), before.jobs if before else {}, before.groups if before else {}, away)
        self._looks[address] = look
        return look

    def _why(self, address: str, run: Run) -> str:
        """What a placement group waits for, in numbers."""
        before = self._whys.get(address)
        if before is not None and time.monotonic() - before[0] < _WHY_FRESH_S:
            return before[1]
        try:
            dashboard = Dashboard(address)
            why = _shortage(json.loads(run.artifact().files["nodes.json"]), dashboard.nodes(), dashboard.free())
        except PenstockError:
            why = _WAITS
        self._whys[address] = (time.monotonic(), why)
        return why

    def _ask(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
        block = _block(deployment)
        return _ask(Dashboard(block.address), block, argv, timeout_s)


class _Facts(msgspec.Struct, frozen=True):
    """What is needed of what `penstock.hardware.node_facts` prints."""

    machine: Machine


class _Look(msgspec.Struct, frozen=True):
    """What a cluster told, and when. `away`: why this is not its newest word."""

    at: float
    jobs: dict[str, Job]
    groups: dict[str, str]
    away: str | None = None


def _block(deployment: Deployment) -> RayCluster:
    return deployment.ray or RayCluster()


def _mark(record: Record) -> str:
    """What its nodes are found by on their machines. No path: somebody else's run may have the same, elsewhere."""
    return f"ray:{record.name}-{record.id}"


def _pin(deployment: Deployment, nodes: Sequence[RayNode]) -> dict[str, float]:
    """What to ask of a node beside its GPUs, so that they are those of `hardware.gpu`; nothing where all are alike.

    https://docs.ray.io/en/latest/ray-core/scheduling/accelerators.html: a node with H100s has "accelerator_type:H100".
    """
    if deployment.hardware.gpu is None:
        return {}
    name = f"{_KIND}{catalog.gpu(deployment.hardware.gpu).id.partition('-')[0].upper()}"
    kinds = {found for node in nodes for found in node.resources if found.startswith(_KIND)}
    return {name: 0.001} if name in kinds and len(kinds) > 1 else {}


def _as_ray_gives(machine: Machine, n_gpus: int) -> Machine:
    """A machine with as many GPUs as Ray gives out there. Those that others hold now are free when ours are placed."""
    gpus = tuple(msgspec.structs.replace(gpu, memory_free_bytes=gpu.memory_bytes) for gpu in machine.gpus[:n_gpus])
    return msgspec.structs.replace(machine, gpus=gpus)


def _own_problems(deployment: Deployment, block: RayCluster) -> list[Problem]:
    found = []
    if deployment.engine.executor == "ray":
        message = "ray: vLLM would start a second Ray on the nodes of this one"
        found.append(Problem("engine.executor", message, "use auto or mp: they need no Ray between the nodes"))
    modules = block.runtime_env.get("py_modules") or []
    for name, value in (("working_dir", [block.runtime_env.get("working_dir")]), ("py_modules", modules)):
        for place in value:
            if isinstance(place, str) and "://" not in place:
                message = f'"{place}" is a folder here, which penstock does not send'
                found.append(Problem(f"ray.runtime_env.{name}", message, "give a URI that the nodes can fetch"))
    return found


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


def _bundle(plan: Plan) -> dict[str, float]:
    """What Ray reserves on each node; the driver lowers CPU to what the largest node has."""
    if plan.device == "cuda":
        return {"GPU": float(plan.ranks_each), "CPU": float(plan.ranks_each + 1)}
    return {"CPU": float(plan.n_threads + 1)}


def _in_words(nodes: Mapping[str, Any]) -> str:
    told = ", ".join(f"{amount:g} {name}" for name, amount in nodes["bundle"].items())
    return f"{nodes['n_nodes']} node(s) with {told} free on each"


def _shortage(wanted: Mapping[str, Any], nodes: Sequence[RayNode], free: Mapping[str, Mapping[str, float]]) -> str:
    """Why a replica is not placed: how many nodes it needs, and what is free of what it needs on each. Pure."""
    most_cpus = max((node.resources.get("CPU", 0.0) for node in nodes), default=1.0)
    bundle = {name: min(n, most_cpus) if name == "CPU" else n for name, n in wanted["bundle"].items()}
    told, n_fit = [], 0
    for node in nodes:
        here = free.get(node.id, node.resources)
        short = [name for name, amount in bundle.items() if here.get(name, 0.0) < amount]
        n_fit += not short
        told += [f"{node.address} has {here.get(name, 0.0):g} of {node.resources.get(name, 0):g}" for name in short[:1]]
    needs = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return f"needs {wanted['n_nodes']} node(s) with {needs} free, {n_fit} of {len(nodes)} have it: " + ", ".join(
        told[:8]
    )


def _ask(dashboard: Dashboard, block: RayCluster, argv: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """Run `python ARGV` on every living node by a short job; one answer a node."""
    name, data = jobs_api.package(with_model=False)
    dashboard.upload(name, data)
    order = {"argv": [*argv], "python": block.python, "timeout_s": timeout_s}
    encoded = base64.b64encode(json.dumps(order).encode()).decode()
    words = ["exec", "python", "-m", "penstock.targets.ray.driver", "survey", encoded]
    body = _job_body(block, " ".join(map(shlex.quote, words)), 0.0)
    body["submission_id"] = job = f"penstock-survey-{secrets.token_hex(6)}"
    body["runtime_env"]["py_modules"][-1] = f"gcs://{name}"
    dashboard.submit(body)
    deadline = time.monotonic() + timeout_s + _START_S
    try:
        while True:
            row = dashboard.job(job)
            lines = dashboard.log(job)
            for line in reversed(lines):
                if line.startswith(driver.ANSWER) and line.endswith("]"):
                    found: list[dict[str, Any]] = json.loads(line.removeprefix(driver.ANSWER))
                    return found
            if not _is_alive(row) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        why = _last_word(row) if row is not None and row.has_ended else "its job did not end in time"
        raise PenstockError(f"could not survey the nodes of {dashboard.address}: {why}", detail="\n".join(lines[-10:]))
    finally:
        # Nobody waits for it but the interpreter's end.
        threading.Thread(target=_forget, args=(dashboard, job), name="forget-job").start()


def _forget(dashboard: Dashboard, job: str) -> None:
    """End a job of ours that nobody needs any more, and have Ray forget it. Blocks for some seconds."""
    with contextlib.suppress(PenstockError):
        if _is_alive(dashboard.job(job)):
            dashboard.stop(job)
        deadline = time.monotonic() + 10.0
        while _is_alive(dashboard.job(job)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        time.sleep(_MONITORED_S)
        dashboard.delete(job)


def _address(run: Run) -> str:
    for entry in run.handle().units.values():
        return str(entry["address"])
    return _block(run.deployment()).address


def _is_alive(job: Job | None) -> bool:
    return job is not None and not job.has_ended


def _of_run(jobs: Mapping[str, Job], run_id: str) -> list[Job]:
    return [job for job in jobs.values() if job.metadata.get(_META_ID) == run_id]


def _of_group(state: str | None, away: str | None) -> Placement:
    """A running job's placement by its placement group's state."""
    if state == "CREATED":
        return Placement("placed", away)
    if state == "RESCHEDULING":
        return Placement("broken", "Ray lost a node of it, and waits for another", is_repaired_by_target=True)
    if state == "REMOVED":
        return Placement("placed", "its nodes have ended")
    return Placement("queued", "its driver starts" if state is None else _WAITS)


def _last_word(job: Job) -> str:
    return last_words(job.message.splitlines(), signs=("Error", "penstock: ")) or job.state.lower()
