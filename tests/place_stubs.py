"""Places in memory, one class each, at the seam where a target leaves this process: its commands, its API, its ssh.

Nothing starts, listens or waits: `Clock.sleep` moves the time, and with it the jobs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_recorded
import msgspec

from penstock.hardware import Machine, NodeFacts
from penstock.run_folder import Run
from penstock.targets.openssh import Done, Ssh
from penstock.targets.ray import driver
from penstock.targets.ray.jobs_api import Job, RayNode
from penstock.targets.slurm.queue import SEPARATOR
from penstock.targets.ssh import agent
from penstock.targets.ssh.logs import Source
from penstock.testing.fake_vessl.containers import Container
from penstock.text import GIB
from penstock.wire.announcement import GatewayAddress, Process
from penstock.wire.client import Client
from penstock.wire.container import ContainerView

HOSTS = ("node1", "node2")


class Clock:
    """Stands in for the module `time`: only sleeping takes time."""

    def __init__(self) -> None:
        self.now, self.on_sleep = 1000.0, list[Callable[[], None]]()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for step in self.on_sleep:
            step()


def client_of(ask: Callable[[str, str, bytes, Mapping[str, str]], tuple[int, bytes]]) -> type[Client]:
    """A `Client` whose requests are calls of `ask`: no socket."""

    class Asking(Client):
        @contextlib.contextmanager
        def _exchange(
            self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
        ) -> Iterator[Any]:
            lines = {"authorization": f"Bearer {self.api_key}", **(headers or {})}
            status, data = ask(method, self._root + path, body or b"", lines)
            read = io.BytesIO(data).read
            answer = SimpleNamespace(status=status, reason="", read=read, getheader=lambda name: None)
            if status >= 400:
                raise self._http_error(path, answer)  # type: ignore[arg-type]
            yield answer

    return Asking


def answer(argv: Sequence[str], rank: int) -> str:
    """What `python ARGV` prints on a node: `-c CODE ...` is run here, and the facts of a node are made up."""
    if argv[:2] == ["-m", "penstock.hardware.detect"]:
        return msgspec.json.encode(NodeFacts("node1", Machine("node1", 8, 16 * GIB, 16 * GIB), (), GIB)).decode() + "\n"
    words = [word.replace("{rank}", str(rank)) for word in argv]
    printed, before = io.StringIO(), sys.argv
    sys.argv = ["-c", *words[2:]]
    try:
        with contextlib.redirect_stdout(printed):
            exec(words[1], {})
    finally:
        sys.argv = before
    return printed.getvalue()


class SlurmStub:
    """slurmctld and two nodes: `ask` takes what `commands.ask` takes. A job starts at the next question after it was
    submitted, and ends at the next after a signal."""

    SITE = {
        "partition": "PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 Nodes=node[1-2] State=UP\n",
        "node": "".join(
            f"NodeName={name} CPUEfctv=8 CPUTot=8 Gres=(null) RealMemory=16000 State=IDLE Partitions=main\n"
            for name in HOSTS
        ),
    }

    def __init__(self, run: Run) -> None:
        self.run, self.jobs = run, dict[str, dict[str, str]]()

    def ask(self, words: Sequence[str], *_: object, **__: object) -> CompletedProcess[str]:
        return CompletedProcess(words, 0, getattr(self, f"_{words[0]}")(list(words[1:])), "")

    def survey(self, argv: Sequence[str], name: str, timeout_s: float) -> str:
        """In place of `srun`: the answers of both nodes lie in the folder that the script names."""
        script = argv[argv.index("-c") + 1]
        folder = Path(re.findall(r"^at=(\S+)/\$SLURM_PROCID$", script, re.MULTILINE)[0])
        python = argv[argv.index("survey") + 1 :]
        for rank, host in enumerate(HOSTS):
            out = answer(python[python.index("-c" if "-c" in python else "-m") :], rank)
            for kind, text in (("host", host), ("code", "0"), ("out", out), ("err", "")):
                (folder / f"{rank}.{kind}").write_text(text)
        return ""

    def living(self) -> list[str]:
        return [number for number, job in self.jobs.items() if job["state"] in ("PENDING", "RUNNING")]

    def _bash(self, words: list[str]) -> str:
        return answer(["-m", "penstock.hardware.detect"], 0)

    def _scontrol(self, words: list[str]) -> str:
        return self.SITE.get(words[1], "") if words[0] == "show" else ""

    def _sbatch(self, words: list[str]) -> str:
        if "--test-only" in words:
            return ""
        name = next(word for word in words if word.startswith("--job-name=")).partition("=")[2]
        file, unit = Path(words[-3]), words[-1] if "-gateway-" in name else words[-2]
        folder = re.findall(r"^#SBATCH --chdir=(\S+)$", file.read_text(), re.MULTILINE)[0]
        number = str(len(self.jobs) + 1)
        self.jobs[number] = {"name": name, "folder": folder.strip("'\""), "state": "PENDING", "unit": unit}
        return f"{number}\n"

    def _squeue(self, words: list[str]) -> str:
        if "-s" in words:
            return "".join(f"{number}.0\n" for number, job in self.jobs.items() if job["state"] == "RUNNING")
        self._move()
        rows = (
            (number, job["state"], "N/A", "N/A", "node1", job["name"], job["folder"], "None")
            for number, job in self.jobs.items()
        )
        return "".join(SEPARATOR.join(row) + "\n" for row in rows)

    def _scancel(self, words: list[str]) -> str:
        is_signal = any(word.startswith("--signal") for word in words)
        for number in (word for word in words if word in self.living()):
            self.jobs[number]["state"] = "COMPLETED" if is_signal else "CANCELLED"
        return ""

    def _move(self) -> None:
        for number, job in self.jobs.items():
            if job["state"] == "PENDING":
                job["state"] = "RUNNING"
                (self.run.path / "logs").mkdir(exist_ok=True)
                (self.run.path / "logs" / f"{job['name']}_{number}.log").write_text("the engine starts\n")
                if "-gateway-" in job["name"]:
                    address = GatewayAddress(job["name"].rpartition("-")[2], "node1:8000", ("node1:8001",))
                    self.run.gateway_folder.mkdir(exist_ok=True)
                    self.run.gateway_address_file.write_bytes(msgspec.json.encode(address))


class RayStub:
    """A Ray with two nodes: the methods of `Dashboard`, and `RayStub(address)` is the dashboard itself. A job runs at
    the first look after it was submitted."""

    address = "http://ray:8265"

    def __init__(self) -> None:
        self.rows, self.entrypoints = dict[str, Job](), dict[str, str]()
        self.packages = set[str]()

    def __call__(self, address: str, timeout_s: float = 0.0) -> RayStub:
        return self

    def ray_version(self) -> str:
        return "2.60.0"

    def nodes(self) -> list[RayNode]:
        return [RayNode(name, f"10.0.0.{rank}", {"CPU": 8.0}) for rank, name in enumerate(HOSTS)]

    def free(self) -> dict[str, dict[str, float]]:
        return {node.id: node.resources for node in self.nodes()}

    def groups(self) -> dict[str, str]:
        return {name: "CREATED" for name, job in self.rows.items() if job.state == "RUNNING"}

    def jobs(self) -> dict[str, Job]:
        for name, job in self.rows.items():
            if job.state == "PENDING":
                state = "SUCCEEDED" if " survey " in self.entrypoints[name] else "RUNNING"
                self.rows[name] = msgspec.structs.replace(job, state=state)
        return dict(self.rows)

    def job(self, name: str) -> Job | None:
        return self.jobs().get(name)

    def submit(self, body: Mapping[str, Any]) -> str:
        name = str(body["submission_id"])
        assert name not in self.rows, "Ray refuses a second job of that id"
        uris = re.findall(r"gcs://([\w.-]+)", json.dumps(body))
        assert set(uris) <= self.packages, "what a job needs was uploaded before"
        self.rows[name], self.entrypoints[name] = Job(name, "PENDING", "", body.get("metadata", {})), body["entrypoint"]
        return name

    def stop(self, name: str) -> None:
        if name in self.rows and not self.rows[name].has_ended:
            self.rows[name] = msgspec.structs.replace(self.rows[name], state="STOPPED")

    def delete(self, name: str) -> None:
        job = self.rows.pop(name, None)
        assert job is None or job.has_ended, "Ray refuses to forget a job that runs"

    def upload(self, name: str, data: bytes) -> str:
        self.packages.add(name)
        return f"gcs://{name}"

    def log(self, name: str) -> str:
        words = shlex.split(self.entrypoints.get(name, ""))
        if "survey" in words:
            argv = json.loads(base64.b64decode(words[-1]))["argv"]
            rows = [
                {"host": node.id, "address": node.address, "resources": node.resources, "exit_code": 0}
                | {"out": answer(argv, rank), "err": ""}
                for rank, node in enumerate(self.nodes())
            ]
            return driver.ANSWER + json.dumps(rows) + "\n"
        ended = f"{driver.ENDED}\n" if name in self.rows and self.rows[name].has_ended else ""
        return f"the engine starts\n{ended}"


class SshStub(Ssh):
    """Hosts that ssh reaches, each with a Python and the agent on it: processes are rows of a table."""

    BOOT = "5a1c3c60-3d6b-4c54-9e0c-5a3f1d2b7e11"
    FACTS = {
        "free_bytes": 1 << 40, "versions": ["here"], "absent": [],
        "python": {"version": "3.11.2", "implementation": "cpython", "platform": "linux-x86_64", "libc": "glibc 2.36",
                   "has": {"msgspec": "0.20", "psutil": "7", "PyYAML": "6.0.2"}},
    }  # fmt: skip
    processes: dict[str, dict[int, str]]  # host -> pid -> replica, of all connections
    folders: set[str]
    _pids: Iterator[int]

    @classmethod
    def new(cls) -> type[SshStub]:
        """Hosts of their own."""
        fields = {"processes": {host: {} for host in HOSTS}, "folders": set(), "_pids": itertools.count(100)}
        return type("Hosts", (cls,), fields)

    def run(self, host: str, words: Sequence[str], given: bytes = b"", timeout_s: float = 30.0) -> Done:
        return Done(0, self._answer(host, list(words), given).encode(), "")

    def close(self, hosts: Sequence[str]) -> None:
        pass

    def lines(self, sources: Sequence[Source], follow: bool, last: int | None) -> Iterator[str]:
        yield from ("the engine starts" for _ in sources)

    def _answer(self, host: str, words: list[str], given: bytes) -> str:
        if "look" in words or "install" in words:
            return json.dumps({"name": host, "folder": "/root/.penstock", **self.FACTS})
        if words[:2] == ["sh", "-c"]:
            rows = [f"{pid} (python) S{' 1' * 18} 4200 1" for pid in self.processes[host]]
            return "\n".join([self.BOOT, *rows, ".", ""])
        if words[1:3] == ["-m", "penstock.targets.ssh.agent"]:
            return self._agent(host, words[3], given)
        if words[0] == "rm":
            self.folders.discard(words[-1])
        elif words[1:2] in (["-c"], ["-m"]):
            return answer(words[1:], 0)
        return ""

    def _agent(self, host: str, verb: str, given: bytes) -> str:
        here = self.processes[host]
        if verb == "start":
            start = msgspec.json.decode(given, type=agent.Start)
            pid = next(self._pids)
            here[pid] = start.replica
            self.folders.add(start.folder)
            ports = start.ports or (pid + 20_000, pid + 30_000)
            started = agent.Started(Process(pid, 42.0), self.BOOT, host, *ports, start.local)
            return msgspec.json.encode(started).decode()
        end = msgspec.json.decode(given, type=agent.End)
        for pid in [pid for pid, replica in here.items() if end.replica in (None, replica)]:
            del here[pid]
        return msgspec.json.encode(agent.Ended()).decode()


class TunnelsStub:
    """Tunnels that are always up."""

    def __init__(self, *_: object) -> None:
        self.kept = set[tuple[str, int]]()

    def keep(self, tunnel: Any) -> None:
        self.kept.add((tunnel.replica, tunnel.rank))

    def end(self, replica: str | None = None) -> None:
        self.kept = {key for key in self.kept if replica not in (None, key[0])}

    def trouble(self, replica: str, rank: int) -> str | None:
        return None


class PodStub:
    """A script in a pod, that runs until it is killed."""

    address = "10.0.0.9"

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = 137


class PodsStub:
    """Pods of the fake workbench without a process: each writes what a unit's program would write first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, script: str, env: Mapping[str, str]) -> PodStub:
        run, part = self.folder / Path(script).parent.parent, env["PENSTOCK_UNIT"]
        unit = re.fullmatch(r"r(\w+)-n0", part)
        (run / "logs").mkdir(exist_ok=True)
        name = "gateway" if unit is None else f"replica-{unit[1]}"
        (run / "logs" / f"{name}.log").write_text("the program starts\n")
        if unit is None:
            (run / "gateway").mkdir(exist_ok=True)
            address = GatewayAddress("0", "10.0.0.9:8000", ("10.0.0.9:8001",))
            (run / "gateway" / "address.json").write_bytes(msgspec.json.encode(address))
        return PodStub()


class ContainerStub(Container):
    """A run of the fake VESSL whose program is a set of replicas; `control` is its control port."""

    def __post_init__(self) -> None:
        self.status, self.started_at, self.replicas = "running", 0.0, {"0"}
        self.logs = [(0.0, f"[replica-{name}] the engine starts") for name in ("0", "1")]

    def terminate(self, status: str = "terminated", reason: str = "", without_grace: bool = False) -> None:
        self.status = status

    def wait(self, timeout_s: float) -> None:
        pass

    def processes(self) -> list[int]:
        return []

    def get_json(self, path: str) -> Any:
        units: dict[str, str | None] = dict.fromkeys(f"replica/{name}" for name in self.replicas)
        return msgspec.to_builtins(ContainerView("1", units=units))

    def post_json(self, path: str, value: Any) -> Any:
        if path.endswith("/replicas"):
            self.replicas = set(value.replicas)
        elif path.endswith("/end"):
            self.status = "completed"
        return self.get_json(path)


class KubernetesStub:
    """The API server of an empty namespace. Which kinds it serves and in which words was recorded of a real one
    (kubernetes_recorded.py): what was never asked or answered there is an AssertionError. At a list of pods those that
    were there at the last list run, and those that were being deleted are gone."""

    NAMESPACE, NOON = "team", "2026-11-27T12:00:00Z"
    _PATH = re.compile(
        r"(?P<all>/apis?(?:/(?P<group>[a-z.\d]+))?/v\w+/namespaces/team/(?P<kind>\w+))(?:/(?P<name>.+))?"
    )

    def __init__(self) -> None:
        self.objects, self.asked = dict[str, dict[str, Any]](), set[str]()
        self._recorded = kubernetes_recorded.recorded()

    def ask(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float = 0.0
    ) -> tuple[int, bytes]:
        """In place of `Api._exchange`."""
        request = kubernetes_recorded.request_of(method, target, headers, self.NAMESPACE)
        path = self._PATH.fullmatch(urlsplit(target).path)
        if path is None or not self._known(f"GET {path['all']}", " 200"):  # not of a deployment, or not served
            status = next(code for code in (200, 201, 404) if f"{request} {code}" in self._recorded)
            answer = self._recorded[f"{request} {status}"]
        elif path["name"] is None:
            status, answer = 200, self._list(path, parse_qs(urlsplit(target).query).get("labelSelector", [""])[0])
        else:
            status, answer = self._named(method, path, headers.get("content-type", ""), json.loads(data or b"null"))
        said = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self._judge(kubernetes_recorded.exchange(method, target, headers, self.NAMESPACE, status, said))
        return status, said

    def lines(self, path: str, query: Mapping[str, object], is_over: object) -> Iterator[str]:
        """In place of `Api._lines`."""
        assert path.removesuffix("/log") in self.objects
        yield f"{self.NOON} penstock: waiting for the gateway"

    def _known(self, start: str, end: str = "") -> dict[str, Any]:
        """Recorded answers by the beginning and the end of their keys."""
        start = start.replace(f"/{self.NAMESPACE}", "/NS")
        return {key: row for key, row in self._recorded.items() if key.startswith(start) and key.endswith(end)}

    def _judge(self, row: kubernetes_recorded.Exchange) -> None:
        assert row.key in self._recorded, f"never asked of a real API server, or never answered so: {row.key}"
        self.asked.add(row.key)
        objects = kubernetes_recorded.objects_in(row.answer)
        if objects is None:
            assert row.answer == self._recorded[row.key], row.key
        for each in objects or ():
            if "deletionTimestamp" in each["metadata"]:
                del each["status"]  # it may have been in any
            assert any(kubernetes_recorded.is_within(each, other) for other in self._like(row)), f"{row.key}: {each}"

    def _like(self, row: kubernetes_recorded.Exchange) -> Iterator[Any]:
        """Recorded objects of the same kind."""
        path = row.request.split(" ")[1]
        place = re.sub(r"(/namespaces/NS/\w+)/.*", r"\1", path)
        for key, answer in self._recorded.items():
            if key.split(" ")[1].startswith(place):
                yield from kubernetes_recorded.objects_in(answer) or ()

    def _list(self, path: re.Match[str], selector: str) -> dict[str, Any]:
        if path["kind"] == "pods":
            self._step(path["all"])
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        rows = [row for at, row in self.objects.items() if at.rpartition("/")[0] == path["all"]]
        rows = [row for row in rows if wanted.items() <= row["metadata"].get("labels", {}).items()]
        head = next(iter(self._known(f"GET {path['all']}", " 200").values()))
        items = [{key: value for key, value in row.items() if key not in ("kind", "apiVersion")} for row in rows]
        return {"kind": head["kind"], "apiVersion": head["apiVersion"], "metadata": {}, "items": items}

    def _named(self, method: str, path: re.Match[str], media: str, body: Any) -> tuple[int, Any]:
        at, found = path.string, self.objects.get(path.string)
        status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        details = {"name": path["name"], "kind": path["kind"]} | ({"group": path["group"]} if path["group"] else {})
        if media == "application/apply-patch+yaml":
            meta = {"uid": self.NOON, "creationTimestamp": self.NOON, "namespace": self.NAMESPACE}
            self.objects[at] = _merged(found or {"metadata": meta}, body)
            return 200 if found else 201, self.objects[at]
        if found is None:
            message = f'{".".join(filter(None, (path["kind"], path["group"])))} "{path["name"]}" not found'
            failed = {"status": "Failure", "message": message, "reason": "NotFound", "code": 404}
            return 404, status | failed | {"details": details}
        if method == "PATCH":
            self.objects[at] = _merged(found, body)
        elif method == "DELETE" and path["kind"] == "pods":
            found["metadata"] |= {"deletionTimestamp": self.NOON}
        elif method == "DELETE":
            del self.objects[at]
            if path["kind"] not in ("persistentvolumeclaims", "serviceaccounts"):
                return 200, status | {"details": details | {"uid": self.NOON}}
        return 200, self.objects.get(at, found)

    def _step(self, pods: str) -> None:
        """What makes pods of sets and runs them, between two questions."""
        wanted = dict[str, Any]()
        for at, row in self.objects.items():
            kind, name = at.split("/")[-2:]
            if kind in ("statefulsets", "deployments") and row["spec"]["replicas"]:
                end = "0" if kind == "statefulsets" else "7654f49fcc-8ct54"
                wanted[f"{pods}/{name}-{end}"] = row["spec"]["template"]["metadata"]["labels"]
        there = {at: row for at, row in self.objects.items() if at.startswith(f"{pods}/")}
        for at, pod in there.items():
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects[at]
            elif at not in wanted:
                pod["metadata"]["deletionTimestamp"] = self.NOON
        for at, labels in wanted.items():
            if "deletionTimestamp" not in there.get(at, {"metadata": {}})["metadata"]:
                self.objects[at] = self._pod(at.rpartition("/")[2], labels, "Running" if at in there else "Pending")

    def _pod(self, name: str, labels: Mapping[str, str], phase: str) -> dict[str, Any]:
        """As it was recorded in that phase."""
        shown = re.sub(r"(?<=-gateway-).+", "*", name)
        for item in self._recorded["GET /api/v1/namespaces/NS/pods one 200"]["items"]:
            meta = item["metadata"]
            if (meta["name"], item["status"]["phase"]) == (shown, phase) and "deletionTimestamp" not in meta:
                made: dict[str, Any] = json.loads(
                    json.dumps(item).replace('"*"', f'"{self.NOON}"').replace('"NS"', '"team"')
                )
                return _merged(made, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}})
        raise AssertionError(f"no pod {shown} was ever {phase}")


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the fields of `new`; lists are replaced."""
    both = {
        key: _merged(old[key], value)
        for key, value in new.items()
        if isinstance(value, dict) and isinstance(old.get(key), dict)
    }
    return {**old, **new, **both}
