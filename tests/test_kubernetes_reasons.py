"""Words and checks of target kubernetes on a real control plane: its scheduler, quotas and rights."""

from __future__ import annotations

import http.client
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import Namespace
from launching import a_place, call
from samples import deployment
from test_kubernetes_target import file_for, up
from waiting import until

from penstock import targets
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import checks, rights, words
from penstock.targets.kubernetes.api import Api
from penstock.targets.kubernetes.objects import REVISION, Object

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]


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


def set_of(name: str, n_gpus: int = 1, **container: Any) -> Object:
    labels, needs = {"set": name, REVISION: "new"}, {"nvidia.com/gpu": str(n_gpus), "memory": "1Gi"}
    node: Object = {"name": "node", "image": "any", "command": ["sleep", "1000"]}
    node |= {"resources": {"limits": needs, "requests": needs}, "terminationMessagePolicy": "FallbackToLogsOnError"}
    pod = {"containers": [node | container], "terminationGracePeriodSeconds": 1}
    spec = {"replicas": 1, "serviceName": name, "podManagementPolicy": "Parallel"}
    spec |= {"selector": {"matchLabels": {"set": name}}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "labels": labels}, "spec": spec}


def until_it_says(space: Namespace, name: str, state: str, *parts: str) -> None:
    """Until the target sees a StatefulSet in this state, with these parts of its reason."""
    api = api_of(space)

    def is_so() -> bool:
        set_, pods, events = api.find("StatefulSet", name), api.list("Pod", {"set": name}), api.list("Event")
        placement = words.placement_of_replica(set_, pods, events, 1, "new", time.time())
        said.append(str(placement))
        return placement.state == state and all(part in (placement.reason or "") for part in parts)

    said: list[str] = []
    until(is_so, f"{name} is {state}: {parts}", lambda: f"{said[-1]}\n{space.told()}")


def test_a_pod_that_cannot_start_says_why_within_ten_seconds(kubernetes: Namespace) -> None:
    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}}
    kubernetes.apply(
        set_of("large", n_gpus=16),
        set_of("absent", image="missing.example/engine:v1"),
        set_of("keyless", env=[secret]),
        set_of("crash", command=["sh", "-c", "echo cannot load libcuda.so >&2; exit 3"]),
    )
    until_it_says(kubernetes, "large", "queued", "Pending: 0/3 nodes have 16 nvidia.com/gpu free")
    until_it_says(kubernetes, "absent", "queued", "cannot pull image missing.example/engine:v1: ")
    until_it_says(kubernetes, "keyless", "queued", "container node cannot start: ", "absent")
    until_it_says(kubernetes, "crash", "broken", "container node ended with code 3", ": cannot load libcuda.so")


def wanted(n_gpus: int, **fields: Any) -> Deployment:
    hardware = {"gpu": "h100-sxm", "gpus_per_node": n_gpus}
    place = {"target": "kubernetes", "hardware": hardware, "cache": {"weights": "pod"}}
    return deployment("Qwen/Qwen3-8B", name="qwen", **place, **fields)


@pytest.mark.nightly
def test_all_problems_of_a_cluster_are_told_at_once_and_a_quota_says_why_no_pod_is_made(kubernetes: Namespace) -> None:
    api = api_of(kubernetes)
    assert checks.problems(api, wanted(8)) == []
    machine, *_ = checks.machines(api, wanted(8))
    assert (len(machine.gpus), machine.gpus[0].name, machine.assumed) == (8, "NVIDIA H100 80GB HBM3", None)
    bad = wanted(16, kubernetes={"priority_class": "high", "shape": "lws", "hub_token_secret": "hub"})
    paths = [problem.path.partition(".")[2] for problem in checks.problems(api, bad)]
    assert paths == ["shape", "priority_class", "gpus_per_node", "hub_token_secret"]
    spec = {"hard": {"requests.nvidia.com/gpu": "4"}}
    kubernetes.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": spec})
    kubernetes.wait(lambda: (api.get("ResourceQuota", "gpus").get("status") or {}).get("hard"), "the quota counts")
    kubernetes.apply(set_of("two", n_gpus=6))
    until_it_says(kubernetes, "two", "queued", "over quota gpus: requests requests.nvidia.com/gpu=6")
    problems = " ".join(map(str, checks.problems(api, wanted(6, replicas=2))))
    assert "leaves 4 of 4 requests.nvidia.com/gpu, and 12 are needed" in problems


@pytest.mark.nightly
def test_the_rights_that_the_check_asks_for_are_enough_for_a_whole_life(
    kubernetes: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, file = api_of(kubernetes, "alice"), wanted(8)
    (nothing,) = checks.problems(api, file)
    assert "no right in namespace" in nothing.message and "create" in nothing.message
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "penstock"}}
    kubernetes.apply(role | {"rules": rights.policy_rules(file)})
    kubernetes.kubectl("create", "rolebinding", "penstock", "--role=penstock", "--user=alice")
    kubernetes.wait(lambda: checks.problems(api, file) == [], "alice may place")
    (machine,) = checks.machines(api, file)
    assert machine.assumed == "no right to list the cluster's nodes"
    monkeypatch.setenv("PATH", kubernetes.env["PATH"])
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.cluster.kubeconfig("alice", kubernetes.name)))
    targets.load.cache_clear()
    with a_place(tmp_path) as place:
        up(place, file_for(place, kubernetes={"expose": "none"}))
        assert call("logs", "one", "--replica", "0").code == 0
        assert call("scale", "one", 2).code == 0
        assert call("down", "one").code == 0
    targets.load.cache_clear()
