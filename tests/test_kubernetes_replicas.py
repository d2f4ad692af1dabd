"""Rendered replicas on a real API server, in pods with the image and the volumes that they ask for."""

from __future__ import annotations

import json

import pytest
from kubernetes_cluster import Namespace
from samples import demo_plan, deployment

from penstock.run_folder import Launch
from penstock.targets.kubernetes import archive, objects, replicas

pytestmark = pytest.mark.hosts


@pytest.mark.nightly
def test_a_replica_starts_from_the_archive_and_its_set_is_the_same_when_applied_again(kubernetes: Namespace) -> None:
    block = {"image": "any", "cpus_per_node": 1, "memory": "2Gi", "patch": {"metadata": {"labels": {"team": "a"}}}}
    wanted = deployment(name="demo", target="kubernetes", kubernetes=block)
    launch = Launch("demo", demo_plan("fake"), (), "", listen="network")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": objects.secrets("demo")}}
    code = archive.config_map(wanted, archive.archive())
    made = [code, *replicas.shared_objects(launch, wanted), *replicas.replica(launch, wanted)]
    rows = json.loads(json.dumps(made).replace(replicas.NUMBER, "0"))
    kubernetes.apply(secret | {"stringData": {"admin-token": "x"}}, *rows)
    pod = kubernetes.pod("demo-r0-0")
    kubernetes.wait(lambda: pod.phase == "Running", "the init container has prepared the pod")
    assert "run folder /penstock/runs/demo" in pod.log("prepare")
    kubernetes.wait(lambda: "waiting for the gateway" in pod.log("node"), "the node knows where to announce")
    assert "http://demo-gateway-pods:8001" in pod.log("node")
    secrets = "/penstock/runs/demo/secrets"
    assert pod.run(["stat", "-c", "%a", secrets, f"{secrets}/admin-token"]).stdout.split() == ["700", "600"]
    assert pod.run(["python3", "-c", "import penstock; print(penstock.__file__)"]).stdout.startswith("/penstock/code/")
    generation = kubernetes.call("GET", "statefulsets/demo-r0", group="/apis/apps/v1")["metadata"]["generation"]
    kubernetes.apply(*rows)
    again = kubernetes.call("GET", "statefulsets/demo-r0", group="/apis/apps/v1")
    assert again["metadata"]["generation"] == generation
