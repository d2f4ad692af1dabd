"""The kubelet of all nodes of a test cluster: nodes, heartbeats, pods (kubernetes_pod.py), and what its parts share."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from kubernetes_api import MERGE, Api, ApiError, Object, Table
from kubernetes_pod import ContainerRun, PodRun
from kubernetes_sandbox import now

HEARTBEAT_S = 2.0
KUBELET_PORT = 10250
GPU_LABELS = {  # https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-feature-discovery.html
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.family": "hopper",
}


@dataclass
class NodeState:
    """A node as the kubelet sees it; while it is not `connected` nothing of it reaches the API server."""

    name: str
    address: str
    connected: asyncio.Event = field(default_factory=asyncio.Event)


class Kubelet:
    """Runs on an event loop of its own thread; kubernetes_cluster.py calls it from there."""

    def __init__(self, base: Path, api: Api, slot: int, note: Callable[[int], None]) -> None:
        self.base, self.api, self.note = base, api, note
        self.bridge = f"pk{slot}"
        self.network = f"10.77.{slot}"
        self.name_server = f"10.78.{slot}.10"
        self.service_address = f"10.78.{slot}.1"
        self.plain = httpx.AsyncClient(trust_env=False)
        self.nodes: dict[str, NodeState] = {}
        self.pods: dict[str, PodRun] = {}
        self.table = Table(api, "/api/v1/pods", self._changed)
        self.swept: set[str] = set()
        self.errors: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.free_addresses = [f"{self.network}.{i}" for i in range(20, 254)]
        self._number = 0
        self._events: dict[tuple[str, str, str, str], Object] = {}

    # ---- nodes -------------------------------------------------------------------------------------------------------

    async def add_node(self, name: str, number: int, labels: dict[str, str], resources: dict[str, str]) -> None:
        node = NodeState(name, f"{self.network}.{1 + number}")
        node.connected.set()
        self.nodes[name] = node
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", **labels}
        body = {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}
        await self.api.call("POST", "/api/v1/nodes", body)
        lease = {"metadata": {"name": name}, "spec": self._lease(node)}
        await self.api.call("POST", LEASES, lease)
        await self.api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": self._status(node, resources)}, MERGE)
        self.spawn(self._heartbeat(node, resources))

    def _lease(self, node: NodeState) -> Object:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"holderIdentity": node.name, "leaseDurationSeconds": 40, "renewTime": stamp}

    def _status(self, node: NodeState, resources: dict[str, str]) -> Object:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
        return {
            "capacity": resources,
            "allocatable": resources,
            "addresses": [{"type": "InternalIP", "address": node.address}, {"type": "Hostname", "address": node.name}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "conditions": [ready | {"lastTransitionTime": now()}],
            "nodeInfo": {"kubeletVersion": "v1.20.2", "operatingSystem": "linux", "architecture": "amd64"},
        }

    async def _heartbeat(self, node: NodeState, resources: dict[str, str]) -> None:
        """Its lease; its status every fifth time, and after it was away."""
        n_beats = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if not node.connected.is_set():
                await node.connected.wait()
                n_beats = 0
            with contextlib.suppress(httpx.TransportError, ApiError):
                if n_beats % 5 == 0:
                    status = {"status": self._status(node, resources)}
                    await self.api.call("PATCH", f"/api/v1/nodes/{node.name}/status", status, MERGE)
                n_beats += 1
                await self.api.call("PATCH", f"{LEASES}/{node.name}", {"spec": self._lease(node)}, MERGE)

    async def power_off(self, name: str) -> None:
        """The network first, so no peer is told; then all processes."""
        node = self.nodes[name]
        node.connected.clear()
        runs = [run for run in self.pods.values() if run.node is node]
        for run in runs:
            if run.sandbox is not None:
                await run.sandbox.unplug()
        for run in runs:
            self.pods.pop(run.uid)
            task = self._runs.pop(run.uid)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def connect(self, name: str) -> None:
        """The node is back: what was deleted while it was away ends, all others start again."""
        self.nodes[name].connected.set()
        for item in list(self.table.objects.values()):
            self._changed(None, item)

    # ---- pods --------------------------------------------------------------------------------------------------------

    def _changed(self, old: Object | None, new: Object | None) -> None:
        item = new or old
        assert item is not None
        node, uid = self.nodes.get(item["spec"].get("nodeName", "")), item["metadata"]["uid"]
        if node is None or not node.connected.is_set():
            return
        run = self.pods.get(uid)
        if run is not None:
            run.update(new)
        elif new is not None:
            self._start(node, new)

    def _start(self, node: NodeState, pod: Object) -> None:
        is_deleted = "deletionTimestamp" in pod["metadata"]
        phase = pod["status"].get("phase", "Pending")
        if phase in ("Succeeded", "Failed") and not is_deleted:
            return
        self.pods[pod["metadata"]["uid"]] = run = PodRun(self, node, pod)
        if is_deleted:
            run.phase = phase
            run.update(pod)
        self._runs[run.uid] = self.spawn(self._run(run))

    async def _run(self, run: PodRun) -> None:
        try:
            await run.run()
        finally:
            if self.pods.get(run.uid) is run:
                self.pods.pop(run.uid)
                self._runs.pop(run.uid, None)

    def find(self, namespace: str, name: str) -> PodRun | None:
        return next((run for run in self.pods.values() if (run.namespace, run.name) == (namespace, name)), None)

    async def sweep(self, namespace: str) -> None:
        """A test is over: its pods have no grace."""
        self.swept.add(namespace)
        for run in self.pods.values():
            if run.namespace == namespace:
                run.hurry.set()
                run.ending.set()

    def register(self, pod: PodRun, run: ContainerRun) -> None:
        """Write down where a container is, for the tests' kubectl."""
        assert run.process is not None
        folder = self.base / "run" / "containers" / pod.namespace / pod.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / run.name).write_text(str(run.process.process.pid), "utf-8")

    def forget(self, pod: PodRun) -> None:
        """The pod is over; its port-forwards end."""
        shutil.rmtree(self.base / "run" / "containers" / pod.namespace / pod.name, ignore_errors=True)

    # ---- what pods share ---------------------------------------------------------------------------------------------

    async def write(
        self, node: NodeState, method: str, path: str, body: Object, media: str = "application/json"
    ) -> None:
        """A call in the name of a node: it waits while the node is cut off or the server is away."""
        await node.connected.wait()
        await self.api.insist(method, path, body, media)

    async def event(self, pod: PodRun, reason: str, message: str, field_path: str, kind: str) -> None:
        """Tell an event; the same one again only counts."""
        path = f"/api/v1/namespaces/{pod.namespace}/events"
        key = (pod.uid, reason, message, field_path)
        await pod.node.connected.wait()
        with contextlib.suppress(ApiError, httpx.TransportError):  # events may be lost
            if (known := self._events.get(key)) is not None:
                known["count"] += 1
                body = {"count": known["count"], "lastTimestamp": now()}
                await self.api.call("PATCH", f"{path}/{known['metadata']['name']}", body, MERGE)
                return
            thing = {"kind": "Pod", "apiVersion": "v1", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
            self._number += 1
            event: Object = {
                "metadata": {"name": f"{pod.name}.{pod.uid[:8]}{self._number:08x}", "namespace": pod.namespace},
                "involvedObject": thing | ({"fieldPath": field_path} if field_path else {}),
                "reason": reason, "message": message, "type": kind, "count": 1,
                "firstTimestamp": now(), "lastTimestamp": now(),
                "source": {"component": "kubelet", "host": pod.node.name},
            }  # fmt: skip
            self._events[key] = event
            await self.api.call("POST", path, event)

    def service_environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": self.service_address, "KUBERNETES_SERVICE_PORT": "443"}

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that is held until it ends; an error of it is kept for the test that looks."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(repr(error))

    async def close(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.plain.aclose()


LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
