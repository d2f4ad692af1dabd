"""The client of the API, its proxy and its tunnels against a real API server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_cluster import USERS, Namespace
from launching import wait_until

from penstock.errors import PenstockError
from penstock.hardware.network import free_port
from penstock.targets.kubernetes import access
from penstock.targets.kubernetes.api import Api, ApiError, connect
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts

SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"
COUNT = "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.2; done"


def deployment(name: str, words: list[str]) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "node", "image": "any", "command": words}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    template = {"metadata": {"labels": labels}, "spec": spec}
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels}}
    return head | {"spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}}


@pytest.fixture
def api(kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    for name, value in kubernetes.env.items():
        monkeypatch.setenv(name, value)
    api = connect()
    assert api.context is not None
    yield api
    access.proxy_of(api.context).end()


def test_objects_are_applied_listed_and_deleted_and_conflicts_named(kubernetes: Namespace, api: Api) -> None:
    assert api.namespace == kubernetes.name and api.version() in ((1, 20), None)
    assert api.knows("apps/v1", "StatefulSet") and not api.knows("policy/v1", "PodDisruptionBudget")
    web = deployment("web", ["sleep", "600"])
    assert api.apply(web, dry_run=True)["metadata"]["name"] == "web" and api.find("Deployment", "web") is None
    api.apply(web)
    api.apply(web)
    three = {**web, "spec": {**web["spec"], "replicas": 3}}
    api.apply(three, manager="helm", force=True)
    with pytest.raises(ApiError) as caught:
        api.apply(web)
    assert caught.value.status == 409 and "field .spec.replicas is managed by helm" in caught.value.message
    assert api.apply(web, force=True)["spec"]["replicas"] == 1
    assert api.patch("Deployment", "web", {"spec": {"replicas": 2}}, subresource="scale")["spec"]["replicas"] == 2
    kubernetes.wait(lambda: len(api.list("Pod", {"app": "web"})) == 2, "two pods")
    assert {pod["kind"] for pod in api.list("Pod", all_namespaces=True)} == {"Pod"}
    with pytest.raises(ApiError, match='namespace "absent" does not exist'):
        api.apply({**web, "metadata": {"name": "web", "namespace": "absent"}})
    with pytest.raises(ApiError, match="the API refuses Deployment") as caught:
        api.apply(deployment("Not_A_Name", ["true"]))
    assert "metadata.name" in str(caught.value.detail)
    budget = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"}}
    api.apply({**budget, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}})
    assert api.find("policy/v1beta1/PodDisruptionBudget", "web") and api.list("PodDisruptionBudget") == []
    api.delete_all("Deployment", {"app": "web"})
    assert not api.delete("Deployment", "web")
    big = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "big"}, "binaryData": {"a": "AAAA" * 260_000}}
    assert api.apply(big)["metadata"]["name"] == "big"
    with pytest.raises(ApiError, match="the API refuses ConfigMap"):
        api.apply({**big, "binaryData": {"a": "AAAA" * 400_000}})


@pytest.mark.nightly
def test_rights_that_are_missing_are_named(kubernetes: Namespace, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.cluster.kubeconfig(USERS[0], kubernetes.name)))
    theirs = connect()
    try:
        with pytest.raises(ApiError, match="has no right to create configmaps in namespace") as caught:
            theirs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
        assert caught.value.status == 403
    finally:
        access.proxy_of(str(theirs.context)).end()


@pytest.mark.nightly
def test_calls_and_logs_survive_kubectl_and_the_api_server(kubernetes: Namespace, api: Api) -> None:
    api.apply(deployment("counter", ["sh", "-c", COUNT]))
    kubernetes.wait(lambda: any(pod.phase == "Running" for pod in kubernetes.pods("app=counter")), "the pod runs")
    pod = kubernetes.pods("app=counter")[0].name
    lines: list[str] = []
    is_over = threading.Event()

    source = api.logs(pod, follow=True, is_over=is_over.is_set)
    reader = threading.Thread(target=lines.extend, args=(source,), daemon=True)
    reader.start()
    wait_until(lambda: len(lines) >= 3, "lines come")
    proxy = access.proxy_of(str(api.context))
    assert proxy._child is not None
    os.kill(proxy._child._child.pid, signal.SIGKILL)
    assert api.find("Pod", pod) is not None
    n_lines = len(lines)
    wait_until(lambda: len(lines) >= n_lines + 3, "lines come again")
    kubernetes.cluster.api_away()
    with pytest.raises(ApiError, match=r"could not reach the API server of context .*: connection refused") as caught:
        api.get("Pod", pod)
    assert caught.value.is_retryable
    kubernetes.cluster.api_back()
    kubernetes.wait(lambda: api.find("Pod", pod) is not None, "the API is back")
    n_lines = len(lines)
    wait_until(lambda: len(lines) >= n_lines + 3, "lines come again")
    kubernetes.cluster.api_away(hangs=True)
    with pytest.raises(ApiError, match="no answer within 1 s"):
        api.raw("GET", "/version", timeout_s=1.0)
    kubernetes.cluster.api_back()
    assert api.find("Pod", pod) is not None
    is_over.set()
    reader.join(10.0)
    assert not reader.is_alive()
    assert lines == [f"line {i}" for i in range(len(lines))]  # none lost, none twice
    assert list(api.logs(pod, last=2))[-1].startswith("line ")


@pytest.mark.nightly
def test_a_tunnel_follows_its_service_to_another_pod(kubernetes: Namespace, api: Api) -> None:
    api.apply(deployment("web", ["sh", "-c", f'hostname >host; exec python3 -c "{SERVER}"']))
    ports = [{"name": "http", "port": 80, "targetPort": 8000, "protocol": "TCP"}]
    spec = {"selector": {"app": "web"}, "ports": ports}
    api.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec})

    def host(url: str) -> str | None:
        try:
            return Client(url, timeout_s=2.0).get_text("/host").strip()
        except PenstockError:
            return None

    kubernetes.wait(lambda: any(pod.is_ready for pod in kubernetes.pods("app=web")), "the pod is ready")
    with access.port_forward(api.context, api.namespace, "web", 80, free_port("127.0.0.1")) as tunnel:
        kubernetes.wait(lambda: host(tunnel.url), "the server answers")
        first = host(tunnel.url)
        assert first is not None and api.delete("Pod", first, grace_s=0)
        kubernetes.wait(lambda: host(tunnel.url) not in (None, first), "another pod answers")
        assert tunnel.last_words() is None
    assert host(tunnel.url) is None
