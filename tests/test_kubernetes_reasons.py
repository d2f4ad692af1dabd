"""Words and checks of target kubernetes on a real control plane: its scheduler, quotas, rights and lost nodes."""

from __future__ import annotations

import http.client
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import Namespace
from launching import a_place, call

from penstock import targets
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Cache, Deployment, Hardware, Replicas
from penstock.targets import Placement
from penstock.targets.kubernetes import checks, rights, words
from penstock.targets.kubernetes.api import Api
from penstock.targets.kubernetes.objects import REVISION, Object

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]

SOON_S = 60.0


class Token:
    """A way to the cluster's API as one user."""

    where = "the test cluster"

    def __init__(self, space: Namespace, user: str) -> None:
        self._plane, self._user = space.cluster.plane, user

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host, _, port = self._plane.url.removeprefix("https://").partition(":")
        context = ssl.create_default_context(cafile=str(self._plane.certificate))
        return http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=context)

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._user}-token"}

    def complaint(self) -> str | None:
        return None


def api_of(space: Namespace, user: str = "admin") -> Api:
    return Api(Token(space, user), space.name)


def set_of(name: str, n_nodes: int = 1, n_gpus: int = 1, **container: Any) -> Object:
    labels = {"set": name, REVISION: "new"}
    needs = {"nvidia.com/gpu": str(n_gpus), "memory": "1Gi"}
    node = {
        "name": "node",
        "image": "any",
        "command": ["sleep", "1000"],
        "resources": {"limits": needs, "requests": needs},
    }
    node["terminationMessagePolicy"] = "FallbackToLogsOnError"
    pod = {"containers": [node | container], "terminationGracePeriodSeconds": 1}
    spec = {"replicas": n_nodes, "serviceName": name, "podManagementPolicy": "Parallel"}
    spec |= {"selector": {"matchLabels": {"set": name}}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "labels": labels}, "spec": spec}


class Replica:
    """A StatefulSet as the target sees it."""

    def __init__(self, space: Namespace, row: Object) -> None:
        self.space, self.api, self.name = space, api_of(space), row["metadata"]["name"]
        self.n_nodes = row["spec"]["replicas"]
        space.apply(row)

    def placement(self) -> Placement:
        pods = self.api.list("Pod", {"set": self.name})
        lost = {row["metadata"]["name"] for row in self.api.list("Node") if not is_ready(row)}
        set_, events = self.api.find("StatefulSet", self.name), self.api.list("Event")
        now = time.time()
        return words.placement_of_replica(set_, pods, events, self.n_nodes, "new", now, frozenset(lost))

    def says(self, state: str, *parts: str, timeout_s: float = SOON_S) -> Placement:
        """Waits for a state and for these parts of its reason."""

        def is_so() -> bool:
            last[0] = self.placement()
            return last[0].state == state and all(part in (last[0].reason or "") for part in parts)

        last = [self.placement()]
        try:
            self.space.wait(is_so, f"{self.name} {state} {parts}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{last[0]}\n{error}") from error
        return last[0]


def is_ready(node: Object) -> bool:
    return any(row["type"] == "Ready" and row["status"] == "True" for row in node["status"]["conditions"])


def test_a_pod_that_cannot_start_says_why_within_ten_seconds(kubernetes: Namespace) -> None:
    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}}
    large = Replica(kubernetes, set_of("large", n_gpus=16))
    absent = Replica(kubernetes, set_of("absent", image="missing.example/engine:v1"))
    keyless = Replica(kubernetes, set_of("keyless", env=[secret]))
    crash = Replica(kubernetes, set_of("crash", command=["sh", "-c", "echo cannot load libcuda.so >&2; exit 3"]))
    large.says("queued", "Pending: 0/3 nodes have 16 nvidia.com/gpu free")
    absent.says("queued", "cannot pull image missing.example/engine:v1: ")
    keyless.says("queued", "container node cannot start: ", "absent")
    crash.says("broken", "container node ended with code 3", ": cannot load libcuda.so")


@pytest.mark.nightly
def test_a_quota_says_why_no_pod_is_made(kubernetes: Namespace) -> None:
    api = api_of(kubernetes)
    spec = {"hard": {"requests.nvidia.com/gpu": "4"}}
    kubernetes.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": spec})
    kubernetes.wait(lambda: (api.get("ResourceQuota", "gpus").get("status") or {}).get("hard"), "the quota counts")
    Replica(kubernetes, set_of("two", n_gpus=6)).says("queued", "over quota gpus: requests requests.nvidia.com/gpu=6")
    wanted = deployment(6, replicas=Replicas(2, 2))
    assert any(
        "leaves 4 of 4 requests.nvidia.com/gpu, and 12 are needed" in str(row) for row in checks.problems(api, wanted)
    )


@pytest.mark.nightly
def test_a_replica_that_loses_pods_is_broken_until_its_set_brings_them_back(kubernetes: Namespace) -> None:
    both = Replica(kubernetes, set_of("both", n_nodes=2))
    placement = both.says("placed")
    assert placement.where is not None and placement.placed_at is not None
    kubernetes.pod("both-1").oom()
    kubernetes.wait(lambda: restarts(kubernetes) == 1, "it runs again, and the next back-off is 2 s")
    both.says("placed")
    kubernetes.pod("both-1").oom()
    placement = both.says("broken", "both-1: container node was ended by the kernel: out of memory (limit 1Gi)")
    assert placement.is_repaired_by_target
    both.says("placed")
    evicted = kubernetes.pod("both-0").object
    assert evicted is not None
    kubernetes.pod("both-0").evict("The node was low on resource: ephemeral-storage.")
    uid = evicted["metadata"]["uid"]
    kubernetes.wait(lambda: (kubernetes.pod("both-0").object or evicted)["metadata"]["uid"] != uid, "another pod")
    both.says("placed")


def restarts(space: Namespace) -> int:
    rows = space.pod("both-1").status.get("containerStatuses", [])
    return sum(row["restartCount"] for row in rows if "running" in row["state"])


@pytest.mark.nightly
def test_a_pod_on_a_lost_node_is_to_be_deleted_by_force_after_its_grace(
    kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "_LOST_S", 2.0)
    one = Replica(kubernetes, set_of("one"))
    host = one.says("placed").where
    assert host is not None
    kubernetes.cluster.node(host).lose()
    one.says("placed", f"node {host} does not answer", timeout_s=60)
    placement = one.says("broken", f"node {host} does not answer", timeout_s=60)
    assert not placement.is_repaired_by_target
    (pod,) = one.api.list("Pod", {"set": "one"})
    assert words.is_lost(pod, time.time(), one.api.list("Event")), "also where nodes cannot be read"
    one.api.delete("Pod", "one-0", grace_s=0)
    assert one.says("placed", timeout_s=60).where != host


def deployment(n_gpus: int, **more: Any) -> Deployment:
    hardware = Hardware(gpu="h100-sxm", gpus_per_node=n_gpus)
    block, cache = Kubernetes(**more.pop("block", {})), Cache(weights="pod")
    return Deployment(
        model="Qwen/Qwen3-8B",
        name="qwen",
        target="kubernetes",
        hardware=hardware,
        kubernetes=block,
        cache=cache,
        **more,
    )


@pytest.mark.nightly
def test_all_problems_of_a_cluster_are_told_at_once(kubernetes: Namespace) -> None:
    api = api_of(kubernetes)
    assert checks.problems(api, deployment(8)) == []
    machine, *_ = checks.machines(api, deployment(8))
    assert (len(machine.gpus), machine.gpus[0].name, machine.assumed) == (8, "NVIDIA H100 80GB HBM3", None)
    bad = deployment(16, block={"priority_class": "high", "shape": "lws", "hub_token_secret": "hub"})
    paths = [problem.path for problem in checks.problems(api, bad)]
    assert paths == [
        "kubernetes.shape",
        "kubernetes.priority_class",
        "hardware.gpus_per_node",
        "kubernetes.hub_token_secret",
    ]


def bind(space: Namespace, user: str, rules: list[Object]) -> None:
    """Give a user these rights in the namespace."""
    group = "rbac.authorization.k8s.io"
    role: Object = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "penstock"}, "rules": rules}
    binding: Object = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": {"name": "penstock"}}
    binding["roleRef"] = {"apiGroup": group, "kind": "Role", "name": "penstock"}
    binding["subjects"] = [{"apiGroup": group, "kind": "User", "name": user}]
    space.apply(role, binding)


@pytest.mark.nightly
def test_the_rights_that_the_check_asks_for_are_enough_for_a_whole_life(
    kubernetes: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, wanted = api_of(kubernetes, "alice"), deployment(8)
    (nothing,) = checks.problems(api, wanted)
    assert "no right in namespace" in nothing.message and "create" in nothing.message
    bind(kubernetes, "alice", rights.policy_rules(wanted))
    kubernetes.wait(lambda: checks.problems(api, wanted) == [], "alice may place")
    (machine,) = checks.machines(api, wanted)
    assert machine.assumed == "no right to list the cluster's nodes"
    monkeypatch.setenv("PATH", kubernetes.env["PATH"])
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.cluster.kubeconfig("alice", kubernetes.name)))
    targets.load.cache_clear()
    with a_place(tmp_path) as place:
        block = {"image": "own", "cpus_per_node": 1, "memory": "1Gi"}
        file = place.write("one", target="kubernetes", kubernetes=block, gateway={"auth": "keys", "port": 8000})
        done = call("up", file)
        assert done.code == 0, done
        assert call("logs", "one", "--replica", "0").code == 0
        assert call("scale", "one", 2).code == 0
        assert call("down", "one").code == 0
    targets.load.cache_clear()
