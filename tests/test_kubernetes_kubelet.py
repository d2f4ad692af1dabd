"""Target kubernetes on a real kubelet, containerd and runc: users, modes, limits, hooks and streams are the kernel's
and the kubelet's, which kubernetes_cluster.py only imitates.
"""

# ruff: noqa: F811 - fixtures of test_kubernetes_target
from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_cluster import Cluster, Namespace, Pod
from kubernetes_real_image import IMAGE
from kubernetes_real_node import RealNode, missing
from launching import Place, call, started, wait_ready
from test_kubernetes_target import file_for, kinds_left, place  # noqa: F401 - fixtures
from waiting import until

from penstock.text import GIB, MIB

pytestmark = [pytest.mark.hosts, pytest.mark.nightly, pytest.mark.xdist_group("kubernetes")]
RUN = "/penstock/runs/one"
CONTAINERS = {"replica": "node", "gateway": "gateway", "controller": "controller"}
LIMITS = {"replica": GIB, "gateway": 1536 * MIB, "controller": 512 * MIB}
# Two replicas, gateway and controller on a machine of two cores.
LITTLE_CPU = {"spec": {"containers": [{"name": "node", "resources": {"requests": {"cpu": "100m"}}}]}}
# https://man7.org/linux/man-pages/man5/proc_pid_status.5.html: nothing may be gained; 2 is a filter of system calls.
RESTRICTED = {"NoNewPrivs": "1", "Seccomp": "2", "CapPrm": "0" * 16, "CapEff": "0" * 16, "CapBnd": "0" * 16}


@pytest.fixture
def node() -> Iterator[RealNode]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(0) as cluster:
        yield RealNode(cluster)


@pytest.fixture
def kubernetes(node: RealNode) -> Iterator[Namespace]:
    with node.cluster.namespace() as space:
        yield space


def test_a_deployment_lives_in_real_pods(place: Place, kubernetes: Namespace, node: RealNode) -> None:
    block = {"image": IMAGE, "expose": "none", "patch": LITTLE_CPU}
    done = call("up", file_for(place, kubernetes=block), "--json")
    assert done.code == 0, f"{done}\n{kubernetes.told()}\n{node.tail()}"
    _check_chat()
    for part, container in CONTAINERS.items():
        _check_restricted(kubernetes, node, part, container)
    _check_files(kubernetes)
    assert "owner" in _output("keys", "list", "--deployment", "one")
    assert call("scale", "one", 2).code == 0
    wait_ready(place.run("one"), 2)
    assert call("scale", "one", 1).code == 0
    wait_ready(place.run("one"))
    _check_killed(place, kubernetes, node)
    _check_gateway_leaves(kubernetes)
    _check_chat()
    assert call("down", "one").code == 0
    assert kinds_left(kubernetes) == []


def _pod(space: Namespace, component: str) -> Pod:
    [pod] = space.pods(f"app.kubernetes.io/component={component}")
    return pod


def _inside(space: Namespace, component: str, *words: str) -> str:
    """What a command in a pod's container prints, errors among it."""
    argv = ["exec", _pod(space, component).name, "-c", CONTAINERS[component], "--", *words]
    done = space.kubectl(*argv, check=False)
    return (done.stdout + done.stderr).strip()


def _pids(group: Path) -> list[int]:
    pids = [int(pid) for pid in (group / "cgroup.procs").read_text("utf-8").split()]
    assert pids
    return pids


def _check_chat() -> None:
    assert _output("chat", "one", "-m", "tell me a story", "--max-tokens", 8).startswith("1:tell 2:me")


def _output(*words: object) -> str:
    """Of a command in a process: kubectl writes to its standard output, and `chat` keeps a key in its variables."""
    with started(*words) as child:
        out, err = child.communicate(timeout=60.0)
    assert child.returncode == 0, (out, err)
    return out


def _check_restricted(space: Namespace, node: RealNode, component: str, container: str) -> None:
    group = node.control_group(_pod(space, component), container)
    assert int((group / "memory.limit_in_bytes").read_text("utf-8")) == LIMITS[component]
    for pid in _pids(group):
        text = Path(f"/proc/{pid}/status").read_text("utf-8")
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        assert {name: status[name] for name in RESTRICTED} == RESTRICTED, (component, text)
        assert {*status["Uid"].split(), *status["Gid"].split(), *status["Groups"].split()} == {"1000"}, text
    assert "Read-only file system" in _inside(space, component, "touch", "/usr/new")
    for folder in ("/tmp", "/penstock", RUN):
        assert _inside(space, component, "touch", f"{folder}/new") == "", folder


def _check_files(space: Namespace) -> None:
    for name, mode in (("secrets", "700"), ("secrets/admin-token", "600"), ("spec.yaml", "644")):
        assert _inside(space, "gateway", "stat", "-c", "%a %u %g", f"{RUN}/{name}") == f"{mode} 1000 1000", name
    shm = _inside(space, "replica", "df", "-m", "/dev/shm").splitlines()[-1].split()
    assert shm[1] == "1024", "the size of the memory volume"
    token = "/var/run/secrets/kubernetes.io"
    assert "No such file" in _inside(space, "gateway", "ls", token)
    assert _inside(space, "controller", "ls", token) == "serviceaccount"


def _check_killed(place: Place, space: Namespace, node: RealNode) -> None:
    """The kubelet starts a container again that was killed; whoever follows its log sees both."""
    pod, lines = _pod(space, "replica"), list[str]()

    def starts(number: int) -> Callable[[], bool]:
        return lambda: sum("penstock: ready after" in line for line in lines) == number

    with started("logs", "one", "-f", "--replica", 0) as follower:
        assert follower.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(follower.stdout,), daemon=True)
        reader.start()
        until(starts(1), "the log has the first start")
        for pid in _pids(node.control_group(pod, "node")):
            with contextlib.suppress(ProcessLookupError):  # it went with the first process of its table
                os.kill(pid, signal.SIGKILL)
        until(lambda: _restarts(pod) == 1, "the container runs again")
        until(starts(2), "the log has the second start")
        follower.kill()
        reader.join()
    wait_ready(place.run("one"))


def _restarts(pod: Pod) -> int:
    return sum(int(row["restartCount"]) for row in pod.status.get("containerStatuses", []))


def _check_gateway_leaves(space: Namespace) -> None:
    """A gateway that is deleted runs its hook, ends by itself, and its successor has its store."""
    old = _pod(space, "gateway")
    space.kubectl("delete", "pod", old.name, "--wait", timeout_s=90.0)
    gateways = "app.kubernetes.io/component=gateway"
    space.wait(lambda: any(pod.is_ready for pod in space.pods(gateways)), "another gateway is ready")
    events = [event["reason"] for event in space.objects("events") if event["involvedObject"]["name"] == old.name]
    assert "Killing" in events and "FailedPreStopHook" not in events, events
