"""What of a workbench cannot be known before: `doctor` measures it with two nodes and an application, without GPUs.

The nodes are jobs, or workers where the file says so. All bear names of their own, end by themselves, and are removed
also when `doctor` is interrupted; what a killed one leaves, the next one and `clean` remove.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from penstock import paths
from penstock.errors import Finding, PenstockError
from penstock.models import sources
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera import findings, folder, names, placing, words
from penstock.targets.cloudera.api import Object, Workbench, application_url
from penstock.targets.cloudera.findings import Note, Reading, Stream
from penstock.targets.cloudera.names import block_of
from penstock.targets.cloudera.workers import Worker, are_used
from penstock.targets.waiting import wait
from penstock.text import MIB
from penstock.wire.answers import HttpError
from penstock.wire.client import tls_context

Say = Callable[[str], None]


class Answers(msgspec.Struct, frozen=True):
    """What was measured of a project, kept for later starts. `is_public`: the application that answered was without
    a login. `at`: Unix seconds."""

    at: float
    is_public: bool
    reading: Reading


APPLICATION, NODES = "application", ("job-0", "job-1")
START_S, STREAM_S, ANSWER_S = 240.0, 40.0, 60.0
_LIFE_S = 900.0  # then the pods end by themselves, and what is left counts as lost
_BEAT_S = 0.1
_SAMPLE_BYTES = 64 * MIB
_CPU, _MEMORY_GB = 1.0, 1.0
# The gateway's, and two of those that engines choose: penstock's own range, and the system's.
_RANGES = (range(20000, 32000), range(33000, 60000))


def measure(
    workbench: Workbench, deployment: Deployment, runtime: str, download_bytes: int | None, say: Say
) -> list[Finding]:
    """Blocks a minute or two, or until pods got no machine in four. Leaves nothing in the project."""
    remove_lost(workbench)
    own = secrets.token_hex(6)
    nodes = "workers" if are_used(deployment) else "jobs"
    say(f"measuring the workbench with two {nodes} and an application, without GPUs (a minute or two)")
    probe = Probe(workbench, deployment, own)
    try:
        refusals = probe.start(runtime)
        reading = probe.read()
    finally:
        remove(workbench, own)
    keep(workbench, deployment, reading, time.time())
    return [*refusals, *findings.of_reading(reading, deployment, download_bytes)]


class Probe:
    def __init__(self, workbench: Workbench, deployment: Deployment, own: str) -> None:
        self._workbench, self._deployment, self._own = workbench, deployment, own
        self._has_workers = are_used(deployment)
        self._runs: dict[str, tuple[str, str]] = {}
        self._application = ""

    # ---- workloads -----------------------------------------------------------------------------------------------

    def start(self, runtime: str) -> list[Finding]:
        """Send the script and start the pods; findings for what the workbench refused of the file.

        Raises PenstockError where it refuses a job.
        """
        self._workbench.upload(self._file("probe.py"), self._script().encode())
        public = block_of(self._deployment).public
        body = {"script": self._file("probe.py"), "cpu": _CPU, "memory": _MEMORY_GB, "runtime_identifier": runtime}
        if self._has_workers:
            self._send_launcher(body)
        for part in () if self._has_workers else NODES:
            whole = {**body, "name": names.probe(self._own, part), "environment": {"PENSTOCK_PROBE": part}}
            job = self._workbench.create_job(whole)
            run = self._workbench.run_job(str(job["id"]))
            self._runs[part] = (str(job["id"]), str(run["id"]))
        environment = {"PENSTOCK_PROBE": APPLICATION, "CDSW_APP_POLLING_ENDPOINT": "/health"}
        body |= {"name": names.probe(self._own, APPLICATION), "subdomain": names.probe_domain(self._own)}
        body["environment"] = environment
        try:
            row = self._workbench.create_application({**body, "bypass_authentication": public})
        except HttpError as exc:
            if not public or exc.status != 403:
                raise
            refusal = findings.of_public(exc.message)
            row = self._workbench.create_application({**body, "bypass_authentication": False})
            self._application = str(row["id"])
            return [refusal]
        self._application = str(row["id"])
        return []

    def _send_launcher(self, body: Object) -> None:
        """What the launcher of a deployment reads: the body of a node, and a handle that names its workers."""
        environment = {
            "PENSTOCK_UNIT": names.node_part(names.REPLICA, names.RANK),
            "PENSTOCK_PROBE": f"job-{names.RANK}",
        }
        node = msgspec.json.encode({**body, "environment": environment})
        self._workbench.upload(self._file(f"artifact/{names.NODE}"), node)
        launcher = resources.files("penstock.targets.cloudera").joinpath("launcher.py").read_bytes()
        self._workbench.upload(self._file("launcher.py"), launcher)
        self._want_workers(NODES)

    def _want_workers(self, parts: Sequence[str]) -> None:
        handle = {"units": {"replica/0": {"workers": list(parts)}}}
        self._workbench.upload(self._file("handle.json"), msgspec.json.encode(handle))

    def _script(self) -> str:
        model, cache = self._deployment.model, self._deployment.cache.weights or "~/.cache/huggingface/hub"
        if sources.is_remote(model):
            model = f"{cache}/models--{sources.parse(model).name.replace('/', '--')}"
        facts = {
            "id": self._own,
            "folder": f"{names.PROJECT_FOLDER}/{names.probe_folder(self._own)}",
            "ports": [names.GATEWAY_ADMIN_PORT, *map(random.choice, _RANGES)],
            "life_s": _LIFE_S,
            "sample_bytes": _SAMPLE_BYTES,
            "weights": model,
            "workers": self._has_workers,
        }
        text = resources.files("penstock.targets.cloudera").joinpath("probe.py").read_text("utf-8")
        return text.replace("FACTS: dict[str, Any] = {}", f"FACTS = {facts!r}")

    def _file(self, name: str) -> str:
        return f"{names.probe_folder(self._own)}/{name}"

    # ---- readings ------------------------------------------------------------------------------------------------

    def read(self) -> Reading:
        notes: dict[str, Note] = {}
        wait(lambda: self._are_whole(notes), START_S)
        lives = {part: words.life(self._row(part)) for part in (APPLICATION, *NODES)}
        refusals = {part: worker.reason for part, worker in self._workers().items() if worker.reason is not None}
        talking, silent = self._streams() if APPLICATION in notes else (None, None)
        grace = self._stop() if NODES[0] in notes else None
        what: Literal["worker", "job"] = "worker" if self._has_workers else "job"
        return Reading(notes, lives, talking, silent, STREAM_S, grace, what, refusals)

    def _are_whole(self, notes: dict[str, Note]) -> bool:
        """Whether each pod has tried to reach both others, or has ended. Fills `notes`."""
        parts = (APPLICATION, *NODES)
        for part in parts:
            data = self._workbench.download(self._file(f"{part}.json"))
            if data is not None:
                with contextlib.suppress(msgspec.MsgspecError):
                    notes[part] = msgspec.json.decode(data, type=Note)
        if all(part in notes and len(notes[part].reached) == len(parts) - 1 for part in parts):
            return True
        return any(words.life(self._row(part)) == "gone" for part in parts)

    def _row(self, part: str) -> Object | None:
        if part == APPLICATION:
            return self._workbench.application(self._application)
        if not self._has_workers:
            return self._workbench.job_run(*self._runs[part])
        workers = self._workers()
        worker = workers.get(part) if workers else Worker("scheduling")  # the application has not started
        return None if worker is None else worker.row

    def _workers(self) -> dict[str, Worker]:
        """As the launcher has noted them; none where nodes are jobs."""
        data = self._workbench.download(self._file(names.WORKERS)) if self._has_workers else None
        try:
            return msgspec.json.decode(data or b"{}", type=dict[str, Worker])
        except msgspec.MsgspecError:
            return {}

    def _streams(self) -> tuple[Stream, Stream]:
        """One with an event a second, and one that is silent between its first and its last; both at once."""
        url = application_url(self._workbench.url, names.probe_domain(self._own))
        wait(lambda: self._asked(url, "/health", 10.0).status == 200, ANSWER_S)
        results: dict[float, Stream] = {}

        def ask(every_s: float) -> None:
            path = f"/stream?seconds={STREAM_S}&every={every_s}"
            results[every_s] = self._asked(url, path, STREAM_S + ANSWER_S)

        paces = (min(1.0, STREAM_S / 5), STREAM_S)
        threads = [threading.Thread(target=ask, args=(every_s,), daemon=True) for every_s in paces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(STREAM_S + 2 * ANSWER_S)
        lost = Stream(error="no end within its time")
        return results.get(paces[0], lost), results.get(paces[1], lost)

    def _asked(self, url: str, path: str, timeout_s: float) -> Stream:
        parts = urlsplit(url)
        kind: Any = http.client.HTTPConnection
        options: dict[str, Any] = {}
        if parts.scheme == "https":
            kind, options = http.client.HTTPSConnection, {"context": tls_context(ca_file=self._workbench.ca_file)}
        connection = kind(parts.netloc, timeout=timeout_s, **options)
        began, first_s, last = time.monotonic(), None, b""
        status: int | None = None
        error: str | None = None
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self._workbench.key}"})
            answer = connection.getresponse()
            status = answer.status
            while piece := answer.read1(65536):
                first_s = time.monotonic() - began if first_s is None else first_s
                last = piece if b"data:" in piece else last
        except (OSError, http.client.HTTPException) as exc:
            error = str(exc) or type(exc).__name__
        finally:
            connection.close()
        is_whole = b"data: end" in last
        return Stream(status, first_s, time.monotonic() - began, is_whole, error)

    def _stop(self) -> findings.Grace | None:
        """Beats between the order to stop and the end: no clock of another machine is needed."""
        before = self._beats().count("beat")
        try:
            if self._has_workers:
                self._want_workers(NODES[1:])
            else:
                self._workbench.stop_run(*self._runs[NODES[0]])
        except PenstockError:
            return None
        if not wait(lambda: words.life(self._row(NODES[0])) == "gone", placing.STOP_S):
            return findings.Grace(None, "SIGTERM" in self._beats())
        text = self._beats()
        return findings.Grace(max(0, text.count("beat") - before) * _BEAT_S, "SIGTERM" in text)

    def _beats(self) -> str:
        return (self._workbench.download(self._file("beats")) or b"").decode("ascii", "replace")


# ---- what is left ----------------------------------------------------------------------------------------------------


def remove(workbench: Workbench, own: str) -> None:
    """End one measurement: its application, its jobs, its files. Raises PenstockError."""
    with contextlib.suppress(PenstockError):  # pods that look end by themselves
        workbench.upload(f"{names.probe_folder(own)}/end", b"")
    for row in workbench.applications():
        if names.probe_in(str(row.get("name"))) == own:
            placing.end_application(workbench, str(row["id"]))
    jobs = [row for row in workbench.jobs() if names.probe_in(str(row.get("name"))) == own]
    placing.end_jobs(workbench, placing.runs_of(workbench, jobs))
    folder.remove_folder(workbench, names.probe_folder(own))


def lost(workbench: Workbench) -> dict[str, int]:
    """Measurements that are over by their age, with how many workloads each has left."""
    counts: dict[str, int] = {}
    for row in [*workbench.applications(), *workbench.jobs()]:
        own, at = names.probe_in(str(row.get("name"))), words.time_of(row.get("created_at"))
        if own is not None and (at is None or time.time() - at > _LIFE_S):
            counts[own] = counts.get(own, 0) + 1
    return counts


def remove_lost(workbench: Workbench) -> None:
    for own in lost(workbench):
        remove(workbench, own)


# ---- kept for later starts -------------------------------------------------------------------------------------------


def keep(workbench: Workbench, deployment: Deployment, reading: Reading, now: float) -> None:
    """In place of earlier ones, unless pods got no machine. `now`: Unix seconds."""
    if reading.notes.keys() != reading.lives.keys():
        return
    path = _kept(workbench)
    with contextlib.suppress(OSError):  # the next start is then not warned
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomically(path, msgspec.json.encode(Answers(now, block_of(deployment).public, reading)))


def warnings(workbench: Workbench, deployment: Deployment) -> tuple[str, ...]:
    """What of it makes trouble for this deployment; of pods and addresses of another kind nothing is known."""
    try:
        kept = msgspec.json.decode(_kept(workbench).read_bytes(), type=Answers)
    except (OSError, msgspec.MsgspecError):  # there is none, or of another version
        return ()
    block, reading = block_of(deployment), kept.reading
    checks = {"network"} if block.nodes == f"{reading.what}s" else set[str]()
    checks |= {"proxy"} if block.public == kept.is_public else set()
    day = time.strftime("%Y-%m-%d", time.localtime(kept.at))
    rows = findings.of_reading(reading, deployment, None)
    return tuple(
        f"`doctor` found on {day}: {row.found}. {row.cure or ''}".strip()
        for row in rows
        if row.check in checks and row.state != "ok"
    )


def _kept(workbench: Workbench) -> Path:
    key = hashlib.sha256(f"{workbench.url} {workbench.project_id}".encode()).hexdigest()[:12]
    return paths.home() / "workbenches" / f"{key}.json"
