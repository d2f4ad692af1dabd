"""An external metrics adapter for a test cluster: what HPA asks for, served as Prometheus's adapter does.

    with Adapter(cluster, "penstock_desired_replicas", read) as adapter:  # `read`: the number, None for no answer
        ...
        adapter.n_asked

It listens on the bridge of the cluster, where the API server reaches it through an APIService and a Service without
pods. https://github.com/kubernetes/metrics/blob/master/IMPLEMENTATIONS.md
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes_cluster import ApiError, Cluster

GROUP = "external.metrics.k8s.io/v1beta1"
NAME = "v1beta1.external.metrics.k8s.io"
SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
SPACE = "/api/v1/namespaces/kube-system/services"
START_S = 30.0


class Adapter:
    """Registered from the constructor to `close`."""

    def __init__(self, cluster: Cluster, metric: str, read: Callable[[], int | None]) -> None:
        self.cluster, self.metric, self.read = cluster, metric, read
        self.n_asked = 0
        adapter = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, body = adapter._answer(self.path)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((cluster.address, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cluster.plane.certificate, cluster.plane.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._register(self._server.server_address[1])

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for path in (f"{SERVICES}/{NAME}", f"{SPACE}/adapter"):
            self.cluster.call("DELETE", path)
        self._server.shutdown()
        self._server.server_close()

    def _register(self, port: int) -> None:
        service = {"type": "ExternalName", "externalName": self.cluster.address}
        self.cluster.call("POST", SPACE, {"metadata": {"name": "adapter"}, "spec": service})
        group, _, version = GROUP.partition("/")
        spec = {
            "service": {"namespace": "kube-system", "name": "adapter", "port": port},
            "group": group,
            "version": version,
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        }
        self.cluster.call("POST", SERVICES, {"metadata": {"name": NAME}, "spec": spec})
        deadline = time.monotonic() + START_S
        while not self._is_served():
            assert time.monotonic() < deadline, self.cluster.call("GET", f"{SERVICES}/{NAME}")["status"]
            time.sleep(0.2)

    def _is_served(self) -> bool:
        try:
            return bool(self.cluster.call("GET", f"/apis/{GROUP}")["resources"])
        except ApiError:
            return False

    def _answer(self, path: str) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path.endswith(GROUP):
            resource = {"name": self.metric, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
            kind = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP}
            return 200, kind | {"resources": [resource | {"verbs": ["get"]}]}
        if not path.endswith(self.metric):
            return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        self.n_asked += 1
        value = self.read()
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        items = [{"metricName": self.metric, "metricLabels": {}, "timestamp": moment, "value": str(value)}]
        body = {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}}
        return 200, body | {"items": items if value is not None else []}
