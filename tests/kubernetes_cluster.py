"""A Kubernetes cluster to test on: a real control plane (1.20.2), nodes and pods of namespaces on this machine.

    with Cluster() as cluster:                        # about 10 s; nodes node-1, node-2, node-3 with 8 GPUs each
        with cluster.namespace() as space:            # a fresh one; its pods are killed at the end
            space.apply({"kind": "Deployment", ...})  # server-side apply, as kubectl does
            space.wait(lambda: space.pod("web-0").is_ready, "web-0 ready")
            space.pod("web-0").log(), .address, .status, .run(["hostname"])
            space.kubectl("get", "pods").stdout       # kubectl 1.37
            space.env, space.kubeconfig               # for `penstock` and kubectl: KUBECONFIG, PATH
        cluster.call("GET", "/api/v1/nodes")          # the API as administrator

Fixtures (kubernetes_fixtures.py): `kubernetes`, a Namespace of the cluster that all tests of a run share.

Faults:

    cluster.node("node-1").lose() / come_back()       # power loss: processes are killed, heartbeats stop
    cluster.api_away() / api_back()                   # the API server is killed (hangs=True: stopped) / is back
    space.pod("web-0").kill_process("web")            # SIGKILL; oom("web"): the same, told as OOMKilled
    space.pod("web-0").evict()
    an image "missing.example/..."                    # ErrImagePull, ImagePullBackOff

What differs from a real cluster. In 1.20 server-side apply needs `protocol` in each port of a Service; policy/v1 and
autoscaling/v2 are not there. Every image is the root of this machine with `python3` (and the packages of the
Python that runs the tests, but not penstock) first in PATH; users of securityContext are not applied, all is root.
Files of the pod are in an overlay in memory. No limits, no liveness or startup probes, no hook but preStop. A cluster
IP relays TCP (the client's address is the bridge's); no NodePort, no NetworkPolicy. StorageClass `standard` makes a
folder a claim, on all nodes, for any access mode. LoadBalancers get their cluster IP as address, which works from
here. `kubectl exec` and `port-forward` are the shim's (kubernetes_kubectl.py).

Addresses: this process and the API server 10.77.S.1, nodes 10.77.S.2 ..., pods 10.77.S.20 ..., services 10.78.S.0/24
with S the slot (hosts_slots.py). After SIGKILL of this process hosts_janitor.py ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hosts
from hosts_janitor import bury, note, note_pid
from hosts_slots import SLOTS, take_slot
from kubernetes_api import MERGE, Api, ApiError, Object
from kubernetes_control_plane import ADMIN, CACHE, ControlPlane, missing_programs
from kubernetes_kubelet import GPU_LABELS, Kubelet
from kubernetes_logs import LogServer
from kubernetes_pod import PodRun
from kubernetes_sandbox import enter, environment, make_image
from kubernetes_services import Services
from waiting import until

__all__ = ["ApiError", "Cluster", "Namespace", "Object", "Pod", "missing"]

T = TypeVar("T")
RESOURCES = {"cpu": "64", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
CALL_S = 60.0
SHIM = Path(__file__).with_name("kubernetes_kubectl.py")


@functools.cache
def missing() -> str | None:
    """Why no cluster can be made on this machine; None where one can."""
    if absent := missing_programs():
        return f"not installed: {', '.join(absent)} (`make kubernetes` installs them)"
    if reason := hosts.missing():
        return reason
    layers = "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work"
    probe = f"mount -t tmpfs t /mnt && mkdir /mnt/upper /mnt/work && mount -t overlay -o {layers} o /mnt/upper"
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", probe], capture_output=True, text=True)
    return f"no overlay over the root here: {tried.stderr.strip()}" if tried.returncode else None


class Cluster(contextlib.ExitStack):
    """Started by the constructor, ended by close(), which leaves nothing behind."""

    def __init__(self, n_nodes: int = 3) -> None:
        super().__init__()
        reason = missing()
        assert reason is None, reason
        self._numbers = itertools.count(1)
        try:
            self._start(n_nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, n_nodes: int) -> None:
        """What is started is ended by the callback after it, the last one first."""
        self.slot, lock = take_slot()
        self.callback(os.close, lock)
        self.base = Path(tempfile.mkdtemp(prefix="penstock-hosts-k8s-", dir="/tmp"))
        self.callback(bury, self.base)
        self.base.chmod(0o755)
        for folder in ("run", "log", "bin", "claims", "pods"):
            (self.base / folder).mkdir()
        self.address = f"10.77.{self.slot}.1"
        SLOTS.joinpath(str(self.slot)).write_text(str(self.base))
        self._start_janitor(lock)
        make_image(self.base / "image")
        self._write_shim()
        self._make_bridge(n_nodes)
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="kubelet", daemon=True)
        thread.start()
        self.callback(thread.join, 10)
        self.callback(self.loop.call_soon_threadsafe, self.loop.stop)
        noted = functools.partial(note_pid, self.base)
        self.plane = ControlPlane(self.base, self.address, f"10.78.{self.slot}.0/24", noted)
        self.callback(self.plane.stop)
        self.plane.start()
        self.api = Api(self.plane.url, f"{ADMIN}-token", self.plane.certificate)
        self.kubelet = Kubelet(self.base, self.api, self.slot, noted)
        self.services = Services(self.api, self.kubelet)
        self.logs = LogServer(self.kubelet, self.plane.certificate, self.plane.key)
        self.callback(lambda: self._do(self._end()))
        self._do(self._begin(n_nodes))

    def _start_janitor(self, lock: int) -> None:
        lifeline, life = os.pipe()
        argv = [sys.executable, "-I", str(Path(__file__).with_name("hosts_janitor.py")), str(self.base), str(lifeline)]
        null, kept = subprocess.DEVNULL, [lifeline, lock]
        janitor = subprocess.Popen(argv, pass_fds=kept, start_new_session=True, stdin=null, stdout=null, stderr=null)
        self.callback(janitor.wait, 30)
        self.callback(os.close, life)
        self.callback(os.close, lifeline)

    async def _begin(self, n_nodes: int) -> None:
        await self.services.start()
        for i in range(1, n_nodes + 1):
            await self.kubelet.add_node(f"node-{i}", i, GPU_LABELS, RESOURCES)
            await self.logs.start(self.kubelet.nodes[f"node-{i}"])
        self.kubelet.spawn(self.kubelet.table.run())

    def _make_bridge(self, n_nodes: int) -> None:
        bridge = f"pk{self.slot}"
        note(self.base, f"ip link del {bridge}")
        lines = [f"link add {bridge} type bridge", f"link set {bridge} up", f"addr add {self.address}/24 dev {bridge}"]
        lines += [f"addr add 10.77.{self.slot}.{1 + i}/32 dev {bridge}" for i in range(1, n_nodes + 1)]
        lines += [f"addr add 10.78.{self.slot}.1/32 dev {bridge}"]
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)

    def _write_shim(self) -> None:
        shim = self.base / "bin" / "kubectl"
        real, place = CACHE / "kubectl", self.base / "run" / "containers"
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {SHIM} {real} {place} "$@"\n')
        shim.chmod(0o755)

    async def _end(self) -> None:
        with contextlib.suppress(Exception):
            self.services.close()
            self.logs.close()
            await self.kubelet.close()
            await self.api.close()

    def _do(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    # ---- use ---------------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: object = None, media: str = "application/json") -> Object:
        """The API as administrator: ApiError unless it succeeds."""
        return self._do(self.api.call(method, path, body, media))

    def kubeconfig(self, user: str, namespace: str, token: str | None = None) -> Path:
        """A file with the context "test"; `user` is one of USERS, whom no role gives rights, or anyone with a token."""
        path = self.base / f"{user}-{namespace}.kubeconfig"
        self.plane.write_kubeconfig(path, user, namespace, token)
        return path

    @contextlib.contextmanager
    def namespace(self) -> Iterator[Namespace]:
        """A fresh namespace; at the end its pods are killed and it is deleted, which nobody waits for."""
        space = Namespace(self, f"test-{next(self._numbers)}")
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": space.name}})
        space.wait(space.has_account, "the namespace's service account")
        try:
            yield space
        finally:
            self.heal()
            with contextlib.suppress(ApiError):  # the test deleted it
                self.call("DELETE", space.path())
            self._do(self.kubelet.sweep(space.name))

    def node(self, name: str) -> Node:
        return Node(self, name)

    def heal(self) -> None:
        """The API server and all nodes are there again."""
        self.api_back()
        for name, node in self.kubelet.nodes.items():
            if not node.connected.is_set():
                self.node(name).come_back()

    def api_away(self, *, hangs: bool = False) -> None:
        """Nothing answers any more; with `hangs` connections are taken and stay silent."""
        self.plane.stop_api(hangs)

    def api_back(self) -> None:
        """The API server answers again. Idempotent."""
        self.plane.resume_api()


@dataclass(frozen=True)
class Node:
    """A node of the cluster. All its methods are idempotent."""

    cluster: Cluster
    name: str

    def lose(self) -> None:
        """Power loss: the network falls silent, then all processes of its pods are killed; no heartbeats."""
        self.cluster._do(self.cluster.kubelet.power_off(self.name))

    def come_back(self) -> None:
        """Power and network are there: pods that were deleted end, the others run again."""
        self.cluster._do(self.cluster.kubelet.connect(self.name))

    @property
    def is_ready(self) -> bool:
        """What the API server says."""
        found = self.cluster.call("GET", f"/api/v1/nodes/{self.name}")
        return any(one["type"] == "Ready" and one["status"] == "True" for one in found["status"]["conditions"])


@dataclass(frozen=True)
class Namespace:
    """A namespace of one test."""

    cluster: Cluster
    name: str

    def path(self, rest: str = "", group: str = "/api/v1") -> str:
        """The API's path of the namespace, or of something in it: path("deployments/a", "/apis/apps/v1")."""
        return f"{group}/namespaces/{self.name}" + (f"/{rest}" if rest else "")

    def call(self, method: str, rest: str, body: object = None, group: str = "/api/v1") -> Object:
        """The API as administrator, on something in this namespace."""
        media = MERGE if method == "PATCH" else "application/json"
        return self.cluster.call(method, self.path(rest, group), body, media)

    def objects(self, kind: str, group: str = "/api/v1", labels: str = "") -> list[Object]:
        """Objects of a kind ("pods"; "deployments", "/apis/apps/v1"), with a label selector."""
        found: list[Object] = self.call("GET", f"{kind}?labelSelector={labels}", group=group)["items"]
        return found

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig(ADMIN, self.name)

    @property
    def env(self) -> dict[str, str]:
        """Variables for programs that use kubectl: the administrator in this namespace."""
        path = f"{self.cluster.base / 'bin'}:{os.environ['PATH']}"
        # What an earlier cluster on the same address had is in the usual cache.
        return {"KUBECONFIG": str(self.kubeconfig), "PATH": path, "KUBECACHEDIR": str(self.cluster.base / "kubectl")}

    def kubectl(
        self, *words: str, check: bool = True, stdin: str = "", timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        argv, env = [str(self.cluster.base / "bin" / "kubectl"), *words], {**os.environ, **self.env}
        done = subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0 or not check, f"kubectl {words} exited {done.returncode}: {done.stderr}"
        return done

    def apply(self, *objects: Object) -> None:
        """Server-side apply of objects (JSON or YAML as dicts) in this namespace."""
        import yaml

        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def pod(self, name: str) -> Pod:
        return Pod(self, name)

    def pods(self, labels: str = "") -> list[Pod]:
        """Those that exist and are not being deleted, by name."""
        found = [one["metadata"] for one in self.objects("pods", labels=labels)]
        return [Pod(self, meta["name"]) for meta in found if "deletionTimestamp" not in meta]

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        """Until it is so; AssertionError with the namespace's pods and events otherwise."""
        until(is_so, what, self.told)

    def told(self) -> str:
        """Pods, events and ends of logs, for messages of failed tests."""
        words = [self.kubectl("get", "pods,events", "-o", "wide", check=False).stdout]
        words += [f"errors of the rig: {self.cluster.kubelet.errors}"]
        for run in list(self.cluster.kubelet.pods.values()):
            if run.namespace == self.name:
                words += [
                    f"{run.name}: {file.read_text('utf-8', 'replace')[-1500:]}" for file in run.logs.rglob("*.log")
                ]
        return "\n".join(words)

    def has_account(self) -> bool:
        """Whether pods can be made: they need the service account and its token."""
        try:
            return bool(self.call("GET", "serviceaccounts/default").get("secrets"))
        except ApiError:
            return False


@dataclass(frozen=True)
class Pod:
    """A pod by its name; each property asks the API server anew."""

    space: Namespace
    name: str

    @property
    def object(self) -> Object | None:
        try:
            return self.space.call("GET", f"pods/{self.name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    @property
    def status(self) -> Object:
        found = self.object
        return {} if found is None else dict(found["status"])

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def address(self) -> str:
        return str(self.status.get("podIP", ""))

    @property
    def node(self) -> str:
        found = self.object
        return "" if found is None else str(found["spec"].get("nodeName", ""))

    @property
    def is_ready(self) -> bool:
        return any(one["type"] == "Ready" and one["status"] == "True" for one in self.status.get("conditions", []))

    def log(self, container: str = "") -> str:
        """Through the API server and the kubelet."""
        return str(self.space.call("GET", f"pods/{self.name}/log?container={container}")["text"])

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a program in a container that runs, with its environment."""
        pid = self._process()
        argv = enter(pid, words)
        done = subprocess.run(argv, env=environment(pid), capture_output=True, text=True, timeout=CALL_S)
        assert done.returncode == 0, f"{words} in {self.name} exited {done.returncode}: {done.stderr}"
        return done

    def kill_process(self, container: str = "") -> None:
        """SIGKILL to a container's first process."""
        os.kill(self._process(container), signal.SIGKILL)

    def oom(self, container: str) -> None:
        """Killed as by the kernel, whose memory limit the container met."""
        self._process(container)
        for one in self._run().containers:
            if one.process and one.name == container:
                one.process.killed_for_memory = True
        self.kill_process(container)

    def evict(self) -> None:
        """By its kubelet: the pod stays, Failed with the reason Evicted."""
        self.space.cluster._do(self._run().evict("The node was low on resource: ephemeral-storage."))

    def _run(self) -> PodRun:
        run = self.space.cluster.kubelet.find(self.space.name, self.name)
        assert run is not None, f"no pod {self.name} runs"
        return run

    def _process(self, container: str = "") -> int:
        """The outer number of a container's first process, once it runs: a pod is Running a moment before."""
        pids: list[int] = []

        def runs() -> bool:
            for one in self._run().containers:
                if one.process and container in ("", one.name) and one.process.pid:
                    pids.append(one.process.pid)
            return bool(pids)

        self.space.wait(runs, f"container {container!r} of pod {self.name} runs")
        return pids[0]
