"""One pod of the test cluster, as a kubelet runs it: volumes, init containers, restarts, probes, status, its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from kubernetes_api import MERGE, ApiError, Object
from kubernetes_sandbox import ContainerProcess, Sandbox, execute, now
from kubernetes_volumes import NotYet, environment_of, expand, memory_volumes, mounts_of, prepare_volumes

if TYPE_CHECKING:
    from kubernetes_kubelet import Kubelet, NodeState

RETRY_S, PULL_S = 0.5, 1.0
BACKOFF_S_MIN, BACKOFF_S_MAX = 1.0, 8.0  # the kubelet's are 10 s and 300 s
PROBE_S, UNREADY_AFTER = 1.0, 3  # what a kubelet takes where a probe does not say; penstock's do not
STEADY_S = 20.0  # after so long a run the back-off begins anew; the kubelet's is 600 s
ABSENT_REGISTRY = "missing.example/"  # images whose pull fails
KUBELETS = {"Initialized", "Ready", "ContainersReady"}  # conditions that the kubelet writes


class ContainerRun:
    """A container over all its restarts, and what its status says."""

    def __init__(self, spec: Object, is_init: bool) -> None:
        self.spec, self.name, self.is_init = spec, str(spec["name"]), is_init
        self.process: ContainerProcess | None = None
        self.state: Object = {"waiting": {"reason": "ContainerCreating" if is_init else "PodInitializing"}}
        self.last: Object = {}
        self.restarts = 0
        self.is_ready = False
        self._delay_s = BACKOFF_S_MIN

    def backoff_s(self, ran_s: float) -> float:
        self._delay_s = BACKOFF_S_MIN if ran_s > STEADY_S else self._delay_s
        delay_s, self._delay_s = self._delay_s, min(self._delay_s * 2, BACKOFF_S_MAX)
        return delay_s

    def status(self, uid: str) -> Object:
        identity = f"local://{uid}-{self.name}-{self.restarts}"
        is_running = "running" in self.state
        image = self.spec["image"]
        return {
            "name": self.name,
            "image": image,
            "imageID": "" if "waiting" in self.state and not self.last else f"local://{image}",
            "containerID": identity if is_running or "terminated" in self.state else "",
            "ready": self.is_ready,
            "started": is_running,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last,
        }


class PodRun:
    """A pod from its binding to its deletion; `run` is one task."""

    def __init__(self, kubelet: Kubelet, node: NodeState, pod: Object) -> None:
        self.kubelet, self.node, self.pod = kubelet, node, pod
        meta = pod["metadata"]
        self.uid, self.name, self.namespace = str(meta["uid"]), str(meta["name"]), str(meta["namespace"])
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder = kubelet.base / "pods" / self.uid
        self.logs = kubelet.base / "log" / "pods" / self.uid
        self.ending = asyncio.Event()  # deleted, or evicted
        self.hurry = asyncio.Event()  # nothing is waited for any more
        self.is_gone = False  # the object does not exist any more
        self.grace_s: float | None = None
        self.sandbox: Sandbox | None = None
        self.address = ""
        self.phase, self.reason, self.message = "Pending", "", ""
        self.started_at = now()
        self.inits = [ContainerRun(one, True) for one in pod["spec"].get("initContainers", [])]
        self.containers = [ContainerRun(one, False) for one in pod["spec"]["containers"]]
        self._told: Object = {}
        self._telling = asyncio.Lock()

    # ---- its life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        life = asyncio.create_task(self._live())
        ending = asyncio.create_task(self.ending.wait())
        try:
            await asyncio.wait({life, ending}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
                await self._clear()
                await ending
            await self._end(life)
        finally:
            for task in (life, ending):
                task.cancel()
            await asyncio.gather(life, ending, return_exceptions=True)
            await self._clear()

    def update(self, pod: Object | None) -> None:
        """The object changed; None: it was removed, so nothing is left to wait for."""
        if pod is None:
            self.is_gone = True
            self.hurry.set()
        else:
            self.pod = pod
            if "deletionTimestamp" not in pod["metadata"]:
                if self._told and _readiness(pod["status"]) != _readiness(self._told):
                    # The node controller took the node for lost; the kubelet corrects what it wrote.
                    self._told = {}
                    self.kubelet.spawn(self.tell())
                return
            self.grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 30)
        self.ending.set()

    async def _live(self) -> None:
        self.address = self.kubelet.free_addresses.pop(0)
        self.sandbox = Sandbox(self.kubelet.base, self.folder, self._hostname(), self.kubelet.note)
        memory = memory_volumes(self.pod, self.folder)
        await self.sandbox.start(self.kubelet.bridge, self.address, memory)
        await self.tell()
        volumes = await self._until_there(self._volumes, None)
        for run in self.inits:
            if not await self._keep(run, volumes):
                self.phase = "Failed"
                await self.tell()
                return
        self.phase = "Running"
        for run in self.containers:
            run.state = {"waiting": {"reason": "ContainerCreating"}}
        codes = await asyncio.gather(*(self._keep(run, volumes) for run in self.containers))
        self.phase = "Succeeded" if all(codes) else "Failed"
        await self.tell()

    async def _volumes(self) -> dict[str, Path]:
        volumes = await prepare_volumes(self.kubelet.api, self.pod, self.folder, self.kubelet.base / "claims")
        etc = self.folder / "etc"
        etc.mkdir(exist_ok=True)
        name = self._hostname()
        if subdomain := self.pod["spec"].get("subdomain"):
            name = f"{name}.{subdomain}.{self.namespace}.svc.cluster.local {name}"
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{self.address} {name}", ""]))
        (etc / "hostname").write_text(self._hostname() + "\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n")
        search = f"{self.namespace}.svc.cluster.local svc.cluster.local cluster.local"
        lines = f"search {search}\nnameserver {self.kubelet.name_server}\noptions ndots:5 timeout:2\n"
        (etc / "resolv.conf").write_text(lines)
        return volumes

    async def _keep(self, run: ContainerRun, volumes: dict[str, Path]) -> bool:
        """Run a container, again as its policy says; whether its last exit code was 0."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        if run.spec["image"].startswith(ABSENT_REGISTRY):
            await self._pull_in_vain(run)
        self.event("Pulled", f'Container image "{run.spec["image"]}" already present on machine', run)
        while True:
            env = await self._until_there(lambda: self._environment(run), run)
            began = time.monotonic()
            code = await self._once(run, env, volumes)
            if (code == 0 and (run.is_init or policy == "OnFailure")) or policy == "Never":
                return code == 0
            delay_s = run.backoff_s(time.monotonic() - began)
            run.last, ended = run.state, f"{self.name}_{self.namespace}({self.uid})"
            words = f"back-off {delay_s:.0f}s restarting failed container={run.name} pod={ended}"
            run.state = {"waiting": {"reason": "CrashLoopBackOff", "message": words}}
            self.event("BackOff", "Back-off restarting failed container", run, "Warning")
            await self.tell()
            await asyncio.sleep(delay_s)
            run.restarts += 1

    async def _environment(self, run: ContainerRun) -> dict[str, str]:
        own = {**self.pod, "status": {**self.pod.get("status", {}), "podIP": self.address, "hostIP": self.node.address}}
        return await environment_of(self.kubelet.api, own, run.spec, self.kubelet.service_environment())

    async def _once(self, run: ContainerRun, env: dict[str, str], volumes: dict[str, Path]) -> int:
        """One process of a container, from its start to its exit code."""
        assert self.sandbox is not None
        words = [expand(word, env) for word in [*run.spec.get("command", []), *run.spec.get("args", [])]]
        run.process = await self.sandbox.run(
            words,
            env,
            mounts_of(run.spec, volumes),
            self.logs / run.name / f"{run.restarts}.log",
            is_root_read_only=(run.spec.get("securityContext") or {}).get("readOnlyRootFilesystem", False),
        )
        run.state = {"running": {"startedAt": run.process.started_at}}
        self.event("Created", f"Created container {run.name}", run)
        self.event("Started", f"Started container {run.name}", run)
        run.is_ready = not run.is_init and "readinessProbe" not in run.spec
        self.kubelet.register(self, run)
        probing = asyncio.create_task(self._probe(run, run.process))
        try:
            await self.tell()
            code = await run.process.wait()
            await asyncio.wait_for(run.process.copying, 5)
        finally:
            probing.cancel()
            run.is_ready = False
        ended = _ended(run.process, code)
        if code and run.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = (self.logs / run.name / f"{run.restarts}.log").read_text("utf-8", "replace").splitlines()[-80:]
            ended["message"] = "".join(f"{line.partition(' ')[2]}\n" for line in lines)[-2048:]
        run.state = {"terminated": ended | {"containerID": run.status(self.uid)["containerID"]}}
        run.is_ready = run.is_init and code == 0
        await self.tell()
        return code

    async def _until_there(self, make: Callable[[], Awaitable[Any]], run: ContainerRun | None) -> Any:
        """What `make` gives once all objects that it needs are there; until then, the reason is told."""
        while True:
            try:
                return await make()
            except NotYet as error:
                if run is not None:
                    run.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
                words = str(error) if run is None else f"Error: {error}"
                self.event(error.reason, words, run, "Warning")
                await self.tell()
                await asyncio.sleep(RETRY_S)

    async def _pull_in_vain(self, run: ContainerRun) -> None:
        """For ever: the pull of an image that is not there, as the kubelet tells it."""
        image = run.spec["image"]
        words = f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": not found'
        states = (("ErrImagePull", words), ("ImagePullBackOff", f'Back-off pulling image "{image}"'))
        for reason, message in itertools.cycle(states):
            if reason == "ErrImagePull":
                self.event("Failed", f'Failed to pull image "{image}": {words}', run, "Warning")
            self.event("Failed", f"Error: {reason}", run, "Warning")
            run.state = {"waiting": {"reason": reason, "message": message}}
            await self.tell()
            await asyncio.sleep(PULL_S)

    async def _end(self, life: asyncio.Task[None]) -> None:
        """SIGTERM, the grace period, SIGKILL; then the object goes."""
        life.cancel()
        await asyncio.wait({life})
        grace_s = 0 if self.hurry.is_set() or self.namespace in self.kubelet.swept else self.grace_s or 0
        everything = [(run, run.process) for run in [*self.inits, *self.containers]]
        alive = [(run, process) for run, process in everything if process and process.process.returncode is None]
        for run, process in alive:
            self.event("Killing", f"Stopping container {run.name}", run)
            hook = (run.spec.get("lifecycle") or {}).get("preStop", {}).get("exec")
            if hook and grace_s:
                await execute(process, hook["command"], grace_s)
            process.send(signal.SIGTERM)
        exits = [asyncio.create_task(process.wait()) for _, process in alive]
        if exits and grace_s:
            hurry = asyncio.create_task(self.hurry.wait())
            either: list[asyncio.Future[Any]] = [asyncio.gather(*exits), hurry]
            await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        for (run, process), waiting in zip(alive, exits, strict=True):
            process.send(signal.SIGKILL)
            run.state, run.is_ready = {"terminated": _ended(process, await waiting)}, False
        await self._clear()
        if self.reason == "Evicted":
            await self.tell()
        while self.reason == "Evicted" and not self.is_gone and "deletionTimestamp" not in self.pod["metadata"]:
            self.ending.clear()
            await self.ending.wait()
        if self.is_gone:
            return
        await self.tell()
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        with contextlib.suppress(ApiError):
            await self.kubelet.write(self.node, "DELETE", self.path, body)

    async def evict(self, message: str) -> None:
        self.phase, self.reason, self.message, self.grace_s = "Failed", "Evicted", message, 0
        self.event("Evicted", message, None, "Warning")
        self.ending.set()

    async def _clear(self) -> None:
        for run in [*self.inits, *self.containers]:
            if run.process is not None:
                run.process.send(signal.SIGKILL)
                await run.process.wait()
        if self.sandbox is not None:
            sandbox, self.sandbox = self.sandbox, None
            await sandbox.stop()
            self.kubelet.free_addresses.append(self.address)
            self.kubelet.forget(self)
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    # ---- what it tells -----------------------------------------------------------------------------------------------

    async def _probe(self, run: ContainerRun, process: ContainerProcess) -> None:
        """Readiness, as long as the process runs. https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/"""
        probe = run.spec.get("readinessProbe")
        if probe is None:
            return
        n_failures = 0
        while True:
            is_well = await self._ask(probe, run, process)
            n_failures = 0 if is_well else n_failures + 1
            if not is_well:
                self.event("Unhealthy", "Readiness probe failed", run, "Warning")
            is_ready = is_well or (run.is_ready and n_failures < UNREADY_AFTER)
            if is_ready != run.is_ready:
                run.is_ready = is_ready
                await self.tell()
            await asyncio.sleep(probe["periodSeconds"])

    async def _ask(self, probe: Object, run: ContainerRun, process: ContainerProcess) -> bool:
        if "exec" in probe:
            return await execute(process, probe["exec"]["command"], PROBE_S)
        place = probe["httpGet"]
        [port] = [port["containerPort"] for port in run.spec["ports"] if port["name"] == place["port"]]
        try:
            answer = await self.kubelet.plain.get(f"http://{self.address}:{port}{place['path']}", timeout=PROBE_S)
            return 200 <= answer.status_code < 400
        except httpx.TransportError:
            return False

    def event(self, reason: str, message: str, run: ContainerRun | None, kind: str = "Normal") -> None:
        field = "" if run is None else f"spec.{'initContainers' if run.is_init else 'containers'}{{{run.name}}}"
        self.kubelet.spawn(self.kubelet.event(self, reason, message, field, kind))

    async def tell(self) -> None:
        """Write the pod's status, where it differs from what was written last."""
        async with self._telling:
            status = self.status()
            if status == self._told or self.is_gone:
                return
            body = {"metadata": {"uid": self.uid}, "status": status}
            with contextlib.suppress(ApiError):  # deleted, or replaced by another of the same name
                await self.kubelet.write(self.node, "PATCH", self.path + "/status", body, MERGE)
                self._told = status

    def status(self) -> Object:
        is_initialized = all(run.is_ready for run in self.inits)
        are_ready = self.phase == "Running" and all(run.is_ready for run in self.containers)
        unready = [run.name for run in self.containers if not run.is_ready]
        words = f"containers with unready status: [{' '.join(unready)}]"
        why = "PodCompleted" if self.phase == "Succeeded" else "ContainersNotReady"
        status: Object = {
            "phase": self.phase,
            "hostIP": self.node.address,
            "startTime": self.started_at,
            "conditions": [
                self._condition("Initialized", is_initialized, "ContainersNotInitialized", ""),
                self._condition("Ready", are_ready, why, words),
                self._condition("ContainersReady", are_ready, why, words),
                *(one for one in self.pod["status"].get("conditions", []) if one["type"] not in KUBELETS),
            ],
            "containerStatuses": [run.status(self.uid) for run in self.containers],
        }
        if self.inits:
            status["initContainerStatuses"] = [run.status(self.uid) for run in self.inits]
        if self.address:
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        return status | ({"reason": self.reason, "message": self.message} if self.reason else {})

    def _condition(self, kind: str, is_so: bool, reason: str, message: str) -> Object:
        value = "True" if is_so else "False"
        before = next((one for one in self._told.get("conditions", []) if one["type"] == kind), None)
        since = before["lastTransitionTime"] if before and before["status"] == value else now()
        found = {"type": kind, "status": value, "lastProbeTime": None, "lastTransitionTime": since}
        return found if is_so else found | {"reason": reason, "message": message}

    def _hostname(self) -> str:
        return str(self.pod["spec"].get("hostname") or self.name)


def _ended(process: ContainerProcess, code: int) -> Object:
    reason = "OOMKilled" if process.killed_for_memory else "Error" if code else "Completed"
    return {"exitCode": code, "reason": reason, "startedAt": process.started_at, "finishedAt": now()}


def _readiness(status: Object) -> str | None:
    return next((one["status"] for one in status.get("conditions", ()) if one["type"] == "Ready"), None)
