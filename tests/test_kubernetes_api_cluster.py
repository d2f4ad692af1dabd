"""The client of the API against a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_cluster import Namespace

from penstock.targets.kubernetes import access
from penstock.targets.kubernetes.api import Api, ApiError, connect

pytestmark = pytest.mark.hosts


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
