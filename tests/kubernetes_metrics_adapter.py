"""An external metrics adapter for a test cluster: what HPA asks for, served as Prometheus's adapter does.

    with serving(cluster, "penstock_desired_replicas", read) as answers:  # `read`: the number, None for no answer
        ...

It listens on the bridge of the cluster, where the API server reaches it through an APIService and a Service without
pods. https://github.com/kubernetes/metrics/blob/master/IMPLEMENTATIONS.md
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes_cluster import ApiError, Cluster
from loopback_server import LoopbackHandler, LoopbackServer, running
from waiting import until

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
KIND = f"{GROUP}/{VERSION}"
NAME = f"{VERSION}.{GROUP}"
SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
SPACE = "/api/v1/namespaces/kube-system/services"


@contextmanager
def serving(cluster: Cluster, metric: str, read: Callable[[], int | None]) -> Iterator[list[int | None]]:
    """Registered as long as the block; the list has every answer."""
    answers: list[int | None] = []

    class Handler(LoopbackHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.endswith(metric):
                answers.append(read())
                self._answer(200, _values(metric, answers[-1]))
            elif path.endswith(KIND):
                self._answer(200, _resources(metric))
            else:
                self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})

        def _answer(self, status: int, body: Any) -> None:
            self.send(status, json.dumps(body).encode(), {"content-type": "application/json"})

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.plane.certificate, cluster.plane.key)
    server = LoopbackServer(Handler, cluster.address)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        _register(cluster, server.server_port)
        try:
            yield answers
        finally:
            for path in (f"{SERVICES}/{NAME}", f"{SPACE}/adapter"):
                cluster.call("DELETE", path)


def _register(cluster: Cluster, port: int) -> None:
    service = {"type": "ExternalName", "externalName": cluster.address}
    cluster.call("POST", SPACE, {"metadata": {"name": "adapter"}, "spec": service})
    spec = {"service": {"namespace": "kube-system", "name": "adapter", "port": port}, "insecureSkipTLSVerify": True}
    spec |= {"group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100}
    cluster.call("POST", SERVICES, {"metadata": {"name": NAME}, "spec": spec})

    def is_served() -> bool:
        try:
            return bool(cluster.call("GET", f"/apis/{KIND}")["resources"])
        except ApiError:
            return False

    until(is_served, "the API server serves the adapter's group")


def _resources(metric: str) -> Any:
    resource = {"name": metric, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
    kind = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": KIND}
    return kind | {"resources": [resource | {"verbs": ["get"]}]}


def _values(metric: str, value: int | None) -> Any:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    items = [{"metricName": metric, "metricLabels": {}, "timestamp": moment, "value": str(value)}]
    body = {"kind": "ExternalMetricValueList", "apiVersion": KIND, "metadata": {}}
    return body | {"items": items if value is not None else []}
