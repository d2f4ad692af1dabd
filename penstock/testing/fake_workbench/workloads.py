"""Applications and jobs of the fake workbench: their records, their pods, and how their statuses move."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

APP_PORT, READONLY_PORT = 8090, 8100
_LOOK_S, _POLL_S = 0.1, 1.0
_STOP_S = 0.5  # a stop kills, and takes a moment
# In every pod; those of sessions, too.
_LIMITS = {"JOB_MAXIMUM_MINUTES": "10080", "SESSION_MAXIMUM_MINUTES": "10080", "IDLE_MAXIMUM_MINUTES": "60"}
_ENGINES = itertools.count(1)


class Pod(Protocol):
    """A started script, alone in its pod."""

    address: str

    def poll(self) -> int | None:
        """The exit code of the script; None while it runs."""

    def kill(self) -> None:
        """End all of it at once."""


class Pods(Protocol):
    """Where pods come from. `folder`: the project's file system, /home/cdsw in every pod, as seen from here."""

    folder: Path

    def start(self, script: str, env: Mapping[str, str]) -> Pod | None:
        """Run a script of the project; None while there is no machine for it. Adds CDSW_IP_ADDRESS."""


class Workload:
    """A run of a job, or an application. `record`: what the API answers, but for the status."""

    def __init__(self, record: dict[str, Any], body: dict[str, Any], prefix: str) -> None:
        self.record, self.body, self.prefix = record, body, prefix
        self.status = "SCHEDULING" if prefix == "ENGINE_" else "STARTING"
        self.engine = f"{record['id']}-{next(_ENGINES):x}"  # new for each start
        self.master: Workload | None = None  # of a worker: the engine that launched it
        self.pod: Pod | None = None
        self.kills_at: float | None = None
        self.ends_at: float | None = None  # a job's time limit
        self.fault: str | None = None
        self.failure_reason: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED", "TIMEDOUT", "SKIPPED")

    def row(self) -> dict[str, Any]:
        return {**self.record, "status": f"{self.prefix}{self.status}"}


class Workloads:
    """All of them, moved on by a thread, or without `moves` by `move`. `env`: of every pod. `faults` and `capacity` may
    change at any time."""

    def __init__(self, pods: Pods, env: Mapping[str, str], moves: bool = True) -> None:
        self._pods, self._env = pods, dict(env)
        self.lock = threading.RLock()
        self.applications: dict[str, Workload] = {}
        self.workers: dict[str, Workload] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, Workload] = {}
        self.next_fault: str | None = None  # of the next run: "schedules for ever", "fails", "times out"
        self.most_minutes: int | None = None  # of the site, for jobs that start from now on, whatever they ask for
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_moving, name="workbench", daemon=True)
        if moves:
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for workload in [*self.applications.values(), *self.runs.values(), *self.workers.values()]:
            if workload.pod is not None:
                workload.pod.kill()

    def new_id(self) -> str:
        return f"{next(self._numbers):04x}-aaaa-bbbb-cccc"

    # ---- what the API orders -----------------------------------------------------------------------------------------

    def create_application(self, body: dict[str, Any]) -> dict[str, Any]:
        own = self.new_id()
        kept = {name: value for name, value in body.items() if name not in ("environment", "project_id")}
        record = {"id": own, **kept, "environment": json.dumps(body.get("environment", {})), "created_at": _now()}
        with self.lock:
            self.applications[own] = Workload(record, body, "APPLICATION_")
            return self.applications[own].row()

    def restart_application(self, own: str) -> None:
        with self.lock:
            before = self.applications[own]
            if before.pod is not None:
                before.pod.kill()
            self._end_workers(before)
            self.applications[own] = Workload(before.record, before.body, "APPLICATION_")

    def create_job(self, body: dict[str, Any]) -> dict[str, Any]:
        own = self.new_id()
        kept = {name: value for name, value in body.items() if name not in ("environment", "project_id")}
        record = {"id": own, **kept, "environment": json.dumps(body.get("environment", {})), "created_at": _now()}
        with self.lock:
            self.jobs[own] = {"record": record, "body": body}
            return record

    def run_job(self, job: str, body: dict[str, Any]) -> dict[str, Any]:
        own = self.new_id()
        record = {"id": own, "job_id": job, "created_at": _now(), "scheduling_at": _now()}
        whole = {**self.jobs[job]["body"]}
        whole["environment"] = {**whole.get("environment", {}), **body.get("environment", {})}
        with self.lock:
            self.runs[own] = Workload(record, whole, "ENGINE_")
            self.runs[own].fault, self.next_fault = self.next_fault, None
            return self.runs[own].row()

    def launch_worker(self, engine: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """None where no engine of that id runs."""
        with self.lock:
            every = [*self.applications.values(), *self.runs.values()]
            master = next((row for row in every if row.engine == engine and row.pod is not None), None)
            if master is None:
                return None
            own = self.new_id()
            self.workers[own] = Workload({"id": own, "created_at": _now()}, body, "ENGINE_")
            self.workers[own].master = master
            return {"id": own, "app_url": f"http://{own}.example"}

    def workers_of(self, engine: str) -> list[Workload]:
        return [row for row in list(self.workers.values()) if row.master is not None and row.master.engine == engine]

    def _end_workers(self, master: Workload) -> None:
        for worker in list(self.workers.values()):
            if worker.master is master and not worker.is_over:
                self._end(worker, "STOPPED")

    def is_active(self, job: str) -> bool:
        return any(run.record["job_id"] == job and not run.is_over for run in self.runs.values())

    def stop(self, workload: Workload) -> None:
        with self.lock:
            if not workload.is_over and workload.status != "STOPPING":
                workload.status, workload.kills_at = "STOPPING", time.monotonic() + _STOP_S

    # ---- what moves by itself ----------------------------------------------------------------------------------------

    def _keep_moving(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.move()

    def move(self) -> None:
        """Move every workload one step on."""
        with self.lock:
            every = [*self.applications.values(), *self.runs.values(), *self.workers.values()]
        for workload in every:
            self._step(workload)

    def _step(self, workload: Workload) -> None:
        if workload.is_over or (workload.fault == "schedules for ever" and workload.status == "SCHEDULING"):
            if workload.fault and not workload.is_over:
                workload.failure_reason = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu"
            return
        if workload.status == "STOPPING":
            if time.monotonic() >= (workload.kills_at or 0.0):
                self._end(workload, "STOPPED")
            return
        if workload.pod is None:
            self._start(workload)
            return
        if workload.fault in ("fails", "times out"):
            self._end(workload, "FAILED" if workload.fault == "fails" else "TIMEDOUT")
            return
        if workload.ends_at is not None and time.monotonic() > workload.ends_at:
            self._end(workload, "TIMEDOUT")
            return
        code = workload.pod.poll()
        if code is not None:
            self._end(workload, "SUCCEEDED" if code == 0 and workload.prefix == "ENGINE_" else "FAILED")
        elif workload.prefix == "ENGINE_":
            workload.status = "RUNNING"
        elif workload.status == "STARTING" and self._answers(workload):
            workload.status = "RUNNING"
            workload.record["running_at"] = _now()

    def _start(self, workload: Workload) -> None:
        env = {
            **self._env,
            "CDSW_ENGINE_ID": workload.engine,
            "CDSW_APP_PORT": str(APP_PORT),
            "CDSW_READONLY_PORT": str(READONLY_PORT),
            "CDSW_CPU_MILLICORES": str(int(workload.body["cpu"] * 1000)),
            "CDSW_MEMORY_MB": str(int(workload.body["memory"] * 1024)),
            **_LIMITS,
            **workload.body.get("environment", {}),
        }
        if workload.master is not None and workload.master.pod is not None:
            env |= {"CDSW_MASTER_ID": workload.master.engine, "CDSW_MASTER_IP": workload.master.pod.address}
        if self.most_minutes is not None:
            env["JOB_MAXIMUM_MINUTES"] = str(min(self.most_minutes, int(env["JOB_MAXIMUM_MINUTES"])))
        pod = self._pods.start(workload.body["script"], env)
        if pod is None:
            return
        with self.lock:
            workload.pod = pod
            if workload.prefix == "ENGINE_":
                workload.status = "STARTING"
                workload.record["starting_at"] = _now()
                workload.ends_at = time.monotonic() + 60.0 * int(env["JOB_MAXIMUM_MINUTES"])

    def _end(self, workload: Workload, status: str) -> None:
        if workload.pod is not None:
            workload.pod.kill()
        with self.lock:
            workload.pod, workload.status = None, status
            workload.record["finished_at" if workload.prefix == "ENGINE_" else "stopped_at"] = _now()
        self._end_workers(workload)

    def _answers(self, workload: Workload) -> bool:
        assert workload.pod is not None
        path = workload.body.get("environment", {}).get("CDSW_APP_POLLING_ENDPOINT", "/")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(workload.pod.address, APP_PORT, timeout=_POLL_S)
            with contextlib.closing(connection):
                connection.request("GET", path)
                return connection.getresponse().status < 500
        return False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
