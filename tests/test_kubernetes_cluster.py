"""The test cluster itself (kubernetes_cluster.py): what other tests rely on, with real controllers and processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from kubernetes_cluster import Namespace

pytestmark = pytest.mark.hosts

SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"


def pod_of(words: Sequence[str], **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "any", "command": list(words), **spec.pop("container", {})}
    return {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}


def workload(kind: str, name: str, pod: dict[str, Any], **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod}
    head = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}}
    return head | {"spec": {"selector": {"matchLabels": labels}, "template": template, **spec}}


def service(name: str, port: int, **spec: Any) -> dict[str, Any]:
    ports = [{"port": port, "targetPort": 8000, "protocol": "TCP"}]
    head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
    return head | {"spec": {"selector": {"app": name}, "ports": ports, **spec}}


def ask(space: Namespace, pod: str, url: str) -> str:
    """What a pod gets from a URL."""
    code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
    return space.pod(pod).run(["python3", "-c", code]).stdout.strip()


@pytest.mark.nightly
def test_pods_of_a_stateful_set_have_names_volumes_secrets_and_a_service(kubernetes: Namespace) -> None:
    script = 'echo hello from $(hostname) $KEY >/data/index.html; cd /data; exec python3 -c "$0"'
    container = {
        "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "one"}}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}],
        "readinessProbe": {"exec": {"command": ["test", "-f", "/data/index.html"]}, "periodSeconds": 1},
        "securityContext": {"readOnlyRootFilesystem": True},
    }
    volumes = [{"name": "data", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    pod = pod_of(["sh", "-c", script, SERVER], container=container, volumes=volumes)
    kubernetes.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"one": "s3cret"}},
        workload("StatefulSet", "web", pod, replicas=2, serviceName="web", podManagementPolicy="Parallel"),
        service("web", 8000, clusterIP="None"),
        service("front", 80) | {"spec": {**service("web", 80)["spec"], "type": "LoadBalancer"}},
    )
    kubernetes.wait(lambda: all(kubernetes.pod(f"web-{i}").is_ready for i in (0, 1)), "both pods ready")
    kubernetes.wait(lambda: len(kubernetes.call("GET", "endpoints/web")["subsets"][0]["addresses"]) == 2, "endpoints")
    assert ask(kubernetes, "web-0", "http://web-1.web:8000/") == "hello from web-1 s3cret"
    assert ask(kubernetes, "web-1", "http://front/").startswith("hello from web-")
    assert kubernetes.call("GET", "services/front")["status"]["loadBalancer"]["ingress"]
    assert "GET / " in kubernetes.kubectl("logs", "web-1").stdout
    where = kubernetes.pod("web-0").run(["python3", "-c", "import sys, psutil; print(sys.prefix)"]).stdout
    assert sys.prefix not in where
    packages = kubernetes.pod("web-0").run(["python3", "-c", "import penstock"], check=False)
    assert "No module named 'penstock'" in packages.stderr
    kubernetes.pod("web-0").oom()

    def container_status() -> Any:
        return kubernetes.pod("web-0").status["containerStatuses"][0]

    kubernetes.wait(lambda: container_status()["restartCount"] == 1 and container_status()["ready"], "ready again")
    ended = container_status()["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


@pytest.mark.nightly
def test_kubectl_forwards_ports_and_executes_and_ends_with_the_pod(kubernetes: Namespace) -> None:
    kubernetes.apply(workload("Deployment", "web", pod_of(["python3", "-u", "-c", SERVER])), service("web", 80))
    kubernetes.wait(lambda: [pod for pod in kubernetes.pods() if pod.is_ready], "a pod")
    [pod] = kubernetes.pods()
    done = kubernetes.kubectl(
        "exec", "-i", pod.name, "--", "sh", "-c", "cat; hostname; exit 3", stdin="in\n", check=False
    )
    assert (done.returncode, done.stdout) == (3, f"in\n{pod.name}\n")
    argv = ["kubectl", "port-forward", "service/web", ":80"]
    env = {**os.environ, **kubernetes.env}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = re.fullmatch(r"Forwarding from 127\.0\.0\.1:(\d+) -> 8000\n", process.stdout.readline())
            assert port is not None
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/") as answer:
                assert answer.status == 200
            pod.evict()
            assert process.wait(60) == 1
        finally:
            process.kill()
    kubernetes.wait(lambda: pod.status.get("reason") == "Evicted", "the reason")


@pytest.mark.nightly
def test_a_job_completes_and_a_failing_image_and_command_are_told(kubernetes: Namespace) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}}
    pod = pod_of(["sh", "-c", "cat /in/word; [ -w /claim ]"], restartPolicy="Never")
    pod["initContainers"] = [{"name": "first", "image": "any", "command": ["touch", "/claim/was-here"]}]
    mounts = [{"name": "in", "mountPath": "/in"}, {"name": "claim", "mountPath": "/claim"}]
    for container in [*pod["containers"], *pod["initContainers"]]:
        container["volumeMounts"] = mounts
    pod["volumes"] = [
        {"name": "in", "configMap": {"name": "words"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "disk"}},
    ]
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    kubernetes.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"}, "spec": claim},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "words"}, "data": {"word": "abracadabra\n"}},
        job | {"spec": {"template": {"spec": pod}}},
        workload("Deployment", "no-image", pod_of(["true"], container={"image": "missing.example/it:1"})),
        workload("Deployment", "crash", pod_of(["sh", "-c", "echo going down; exit 3"])),
    )

    def reasons() -> set[str]:
        states = [state for pod in kubernetes.objects("pods") for state in pod["status"].get("containerStatuses", [])]
        return {state["state"].get("waiting", {}).get("reason", "") for state in states}

    kubernetes.wait(lambda: {"ImagePullBackOff", "CrashLoopBackOff"} <= reasons(), "both reasons")
    kubernetes.wait(
        lambda: kubernetes.call("GET", "jobs/once", group="/apis/batch/v1")["status"].get("succeeded"), "the job"
    )
    done = kubernetes.pods("job-name=once")[0]
    assert (done.phase, done.log()) == ("Succeeded", "abracadabra\n")
    # The newest of its containers may not have come to its word yet.
    kubernetes.wait(lambda: kubernetes.pods("app=crash")[0].log() == "going down\n", "its log")


@pytest.mark.nightly
def test_pods_of_a_lost_node_are_replaced_and_end_when_it_is_back(kubernetes: Namespace) -> None:
    pod = pod_of(["python3", "-c", SERVER])
    kubernetes.apply(workload("Deployment", "web", pod, replicas=1))
    kubernetes.wait(lambda: [one for one in kubernetes.pods() if one.is_ready], "a pod")
    [first] = kubernetes.pods()
    node = kubernetes.cluster.node(first.node)
    node.lose()
    kubernetes.wait(lambda: [one for one in kubernetes.pods() if one.is_ready and one.name != first.name], "another")
    assert not node.is_ready and first.object is not None
    node.come_back()
    kubernetes.wait(lambda: first.object is None and node.is_ready, "the first to go")
    kubernetes.cluster.api_away()
    kubernetes.cluster.api_back()
    assert [one.is_ready for one in kubernetes.pods()] == [True]
