"""The fake workbench with pods in namespaces: each pod is a host of hosts.py, with the project's files as /home/cdsw.

def test_x(place: Place, workbench: Workbench) -> None:
    run = up(place)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, Hosts
from hosts_fixtures import require_hosts
from launching import Place, a_place, call
from place_stubs import Clock, client_of
from waiting import until

from penstock import targets
from penstock.deployment import observe
from penstock.run_folder import Run
from penstock.targets import waiting
from penstock.targets.cloudera import api
from penstock.testing.fake_workbench import kernel, workloads
from penstock.testing.fake_workbench.server import PROJECT, Workbench
from penstock.testing.fake_workbench.workloads import APP_PORT, READONLY_PORT

DOMAIN = "cml.test"
SUBDOMAINS = ("penstock-one", "penstock-one-ui", "penstock-two")
# What a pod has besides its script: the project's file system, a small /dev/shm, and the proxy next to the engine.
_SET_UP = """
mount -t tmpfs tmpfs /home && mkdir -p /home/cdsw && mount --bind {shared} /home/cdsw
umount /dev/shm && mount -t tmpfs -o mode=1777,size={shm_mb}m tmpfs /dev/shm
"""
# A process and all that it starts, in the pod's memory: beyond it the kernel kills, as in a container.
_IN_CGROUP = 'echo 0 > {cgroup}/cgroup.procs && exec "$@"'
_CGROUPS = Path("/sys/fs/cgroup/memory")
LIMITS_MEMORY = (_CGROUPS / "memory.limit_in_bytes").exists()
_PROXY = """
import asyncio, sys
async def pipe(r, w):
    try:
        while data := await r.read(65536):
            w.write(data); await w.drain()
    except OSError:
        pass
    w.close()
async def on(r, w):
    try:
        r2, w2 = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        return w.close()
    await asyncio.gather(pipe(r, w2), pipe(r2, w))
async def main():
    await (await asyncio.start_server(on, sys.argv[1], int(sys.argv[2]))).serve_forever()
asyncio.run(main())
"""
# A process that a test starts finds the workbench by its name, as in a network with its DNS.
_SITE = """
import socket
_real = socket.getaddrinfo
def _ours(host, *args, **kwargs):
    return _real({address!r} if str(host).endswith({domain!r}) else host, *args, **kwargs)
socket.getaddrinfo = _ours
"""


class NoPods:
    """A project's file system, and no machine for any pod."""

    def __init__(self, place: Path) -> None:
        self.folder = place

    def start(self, script: str, env: Mapping[str, str]) -> None:
        return None


class HostPod:
    """A script in a pod."""

    def __init__(self, pods: HostPods, host: Host, process: subprocess.Popen[str], memory_mb: int) -> None:
        self._pods, self.host, self._process, self.memory_mb = pods, host, process, memory_mb
        self.address = host.address
        self._first_kill = threading.Lock()

    def poll(self) -> int | None:
        """The kernel kills one process that is beyond the pod's memory; with it a container ends as a whole."""
        code = self._process.poll()
        return 137 if code is None and self._pods.is_out_of_memory(self.host) else code

    def kill(self) -> None:
        """Once: a test and the workbench may do it at the same time."""
        if self._first_kill.acquire(blocking=False):
            self._pods.free(self.host)

    def take_memory(self) -> None:
        """Have a process in it take more memory than the pod has."""
        words = [sys.executable, "-c", f"bytearray({self.memory_mb} << 20)"]
        self.host.popen([*self._pods.in_cgroup(self.host), *words], stderr=subprocess.DEVNULL)


class HostPods:
    """Pods on these hosts, one each."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self._busy, self._lock = hosts, set[str](), threading.Lock()
        self.folder = Path(tempfile.mkdtemp(dir=hosts.shared, prefix="project-"))
        self.folder.chmod(0o755)
        self.n_free: int | None = None  # fewer than there are hosts
        self.blocked_ports: str | None = None  # "20000-60000": pods do not reach these of each other
        self.shm_mb: Callable[[], int] = lambda: 64

    def start(self, script: str, env: Mapping[str, str]) -> HostPod | None:
        with self._lock:
            free = [host for host in self.hosts if host.name not in self._busy]
            if not free or (self.n_free is not None and len(self._busy) >= self.n_free):
                return None
            host = free[0]
            self._busy.add(host.name)
        host.start()
        host.run(["bash", "-ec", _SET_UP.format(shared=self.folder, shm_mb=self.shm_mb())])
        if self.blocked_ports is not None:
            host.run(["ip", "rule", "add", "ipproto", "tcp", "dport", self.blocked_ports, "prohibit"])
        log = (self.hosts.base / "log" / f"{host.name}.pod").open("a")
        whole = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **env, "CDSW_IP_ADDRESS": host.address}
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        for port in (APP_PORT, READONLY_PORT):
            host.popen([sys.executable, "-c", _PROXY, host.address, str(port)], **quiet)
        words = [*self._limited(host, env), sys.executable, str(Path(kernel.__file__)), script]
        process = host.popen(words, cwd="/home/cdsw", env=whole, **quiet)
        log.close()
        return HostPod(self, host, process, int(env["CDSW_MEMORY_MB"]))

    def _cgroup(self, host: Host) -> Path:
        return _CGROUPS / f"{self.hosts.base.name}-{host.name}"

    def _limited(self, host: Host, env: Mapping[str, str]) -> list[str]:
        """The words before a command that give it the pod's memory; none where this machine has no such cgroups."""
        if not LIMITS_MEMORY:
            return []
        self._cgroup(host).mkdir(exist_ok=True)
        (self._cgroup(host) / "memory.limit_in_bytes").write_text(f"{env['CDSW_MEMORY_MB']}M")
        return self.in_cgroup(host)

    def in_cgroup(self, host: Host) -> list[str]:
        return ["bash", "-c", _IN_CGROUP.format(cgroup=self._cgroup(host)), "pod"]

    def is_out_of_memory(self, host: Host) -> bool:
        try:
            words = (self._cgroup(host) / "memory.oom_control").read_text().split()
        except OSError:
            return False
        return int(words[words.index("oom_kill") + 1]) > 0

    def free(self, host: Host) -> None:
        """Power off, and forget what was on its disks."""
        host.kill()
        with contextlib.suppress(FileNotFoundError):
            self._cgroup(host).rmdir()
        shutil.rmtree(self.hosts.base / "hosts" / host.name, ignore_errors=True)
        self.hosts._furnish(host)
        with self._lock:
            self._busy.discard(host.name)


def join_network(address: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """This process, and those that it starts, find the workbench by name."""
    real = socket.getaddrinfo

    def ours(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real(address if str(host).endswith(DOMAIN) else host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", ours)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(address=address, domain=DOMAIN))
    patch.setenv("PYTHONPATH", str(site))


def file_for(place: Place, workbench: Workbench, name: str = "one", **fields: Any) -> Path:
    """A deployment file for that workbench; all pods run the Python of the tests, which needs no installation."""
    block = {"workbench": workbench.url, "project": PROJECT, "python": sys.executable, "cpu": 1, "memory_gb": 1}
    block |= fields.pop("cloudera", {})
    gateway = {"auth": "keys", "port": 8000, "drain_s": 5, **fields.pop("gateway", {})}
    return place.write(name, target="cloudera", cloudera=block, gateway=gateway, **fields)


def up(place: Place, workbench: Workbench, **fields: Any) -> tuple[Run, str]:
    done = call("up", file_for(place, workbench, **fields), "--json")
    assert done.code == 0, done
    return place.run("one"), str(done.events[0]["key"])


def left_in_files(workbench: Workbench) -> list[str]:
    """Files of deployments in the project, without keys and usage. A session leaves a lock, and its own run folder."""
    runs = workbench.pods.folder / ".penstock" / "runs"
    kept = {path for store in runs.rglob("store.sqlite*") for path in (store, store.parent)}
    paths = {*runs.rglob("*")} - kept if runs.exists() else ()
    return sorted(str(path.relative_to(runs)) for path in paths if not path.name.endswith(".lock"))


def left(workbench: Workbench) -> list[str]:
    return workbench.left() + left_in_files(workbench)


@pytest.fixture
def podless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbench]:
    """A workbench without pods, asked in this process; the key is set."""
    place = tmp_path / "project"
    place.mkdir()
    with Workbench(NoPods(place), DOMAIN, listens=False) as made:
        ask_here(made, monkeypatch, Clock())
        yield made


def ask_here(workbench: Workbench, patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Our client of the API asks this workbench without a socket; who sleeps moves its workloads on."""
    clock.on_sleep.append(workbench.workloads.move)
    for module in (api, waiting, workloads):
        patch.setattr(module, "time", clock)
    patch.setattr(api, "Client", client_of(workbench.ask))
    patch.setenv("CDSW_APIV2_KEY", workbench.key)


@pytest.fixture(scope="session")
def pod_hosts() -> Iterator[Hosts]:
    """Use `workbench`."""
    require_hosts()
    with Hosts(4) as made:
        yield made


@pytest.fixture
def workbench(pod_hosts: Hosts) -> Iterator[Workbench]:
    pods = HostPods(pod_hosts)
    names = " ".join([DOMAIN, *(f"{name}.{DOMAIN}" for name in SUBDOMAINS)])
    with (pod_hosts.base / "etc" / "system" / "hosts").open("a") as file:
        file.write(f"{pod_hosts.own_address} {names}\n")
    try:
        with Workbench(pods, DOMAIN) as made:
            pods.shm_mb = lambda: int(made.project["shared_memory_limit"])
            yield made
    finally:
        shutil.rmtree(pods.folder, ignore_errors=True)  # thousands of files, which the hosts' janitor would wait for


@pytest.fixture
def workbench_place(
    tmp_path: Path,
    workbench: Workbench,
    pod_hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Place]:
    """A place whose deployments run in the workbench; nothing of them may be left there."""
    monkeypatch.setenv("CDSW_APIV2_KEY", workbench.key)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    monkeypatch.delenv("OPENAI_API_KEY")  # `chat` sets it to a key of the deployment
    monkeypatch.setattr(observe, "admin_view", lambda run: None)  # a laptop reaches no pod, as it does here
    targets.load.cache_clear()
    join_network(pod_hosts.own_address, tmp_path, monkeypatch)
    with a_place(tmp_path) as place:
        yield place
    targets.load.cache_clear()
    until(lambda: left(workbench) == [], f"nothing of ours is left: {left(workbench)}")
