"""How clients outside the cluster reach the gateway and the chat page, and which pods may reach which ports. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from penstock.chat.page.proxied import clean_prefix
from penstock.errors import Problem
from penstock.spec.deployment import Deployment, Ui
from penstock.targets.kubernetes import monitoring, objects, weights
from penstock.targets.kubernetes.objects import (
    ADMIN_PORT,
    COMPONENT,
    ENGINE_PORT,
    GATEWAY_PORT,
    UI_PORT,
    Object,
    block_of,
    build,
)
from penstock.text import MIB

# Between two bytes of an answer, or for the whole of one where a controller knows no other limit. AWS allows 4000.
STREAM_S = 3600
_DNS, _PICKER_PORT = 53, 9002  # https://gateway-api-inference-extension.sigs.k8s.io/guides/
_PARENT = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*\Z")
# The fields that only some ways to expose read.
_READ_BY = {
    "host": ("Ingress", "HTTPRoute"),
    "tls_secret": ("LoadBalancer", "Ingress"),
    "issuer": ("Ingress",),
    "ingress_class": ("Ingress",),
    "route_parent": ("HTTPRoute",),
}


def exposed(deployment: Deployment, is_gke: bool = False, monitors: monitoring.Kinds = "none") -> list[Object]:
    """What `kubernetes.expose` asks for, and the network policies. `is_gke`: the cluster knows GCPBackendPolicy."""
    block, entries = block_of(deployment), list[Object]()
    if block.expose == "LoadBalancer":
        entries.append(_load_balancer(deployment))
    elif block.expose == "Ingress":
        entries.append(_ingress(deployment))
    elif block.expose == "HTTPRoute":
        entries += _route(deployment, is_gke)
    if block.inference_pool:
        entries.append(_inference_pool(deployment))
    return [*entries, *_policies(deployment, monitors)]


def has_tls_in_pod(deployment: Deployment) -> bool:
    """Whether the gateway speaks TLS itself: a load balancer passes connections on as they are."""
    block = block_of(deployment)
    return block.expose == "LoadBalancer" and block.tls_secret is not None


def page_path(page: Ui) -> str:
    """Where clients outside have the chat page, without a slash at its end."""
    return clean_prefix(page.root_path or "")


def service_port(deployment: Deployment) -> Object:
    scheme = "https" if has_tls_in_pod(deployment) else "http"
    port = {"name": "http", "port": deployment.gateway.port, "targetPort": "http", "protocol": "TCP"}
    return {**port, "appProtocol": scheme}


def _load_balancer(deployment: Deployment) -> Object:
    """Next to the Service inside the cluster, so that it comes and goes without a change of that one's address."""
    spec = {
        "type": "LoadBalancer",
        "selector": objects.labels(deployment.name, "gateway"),
        "ports": [service_port(deployment)],
    }
    return build("v1/Service", objects.public(deployment.name), deployment, "gateway", spec=spec)


def _ingress(deployment: Deployment) -> Object:
    block, name = block_of(deployment), deployment.name
    service = {"name": objects.gateway(name), "port": {"name": "http"}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": {"service": service}}]
    page = deployment.chat_page
    if page is not None:
        service = {"name": objects.ui(name), "port": {"name": "http"}}
        paths.insert(0, {"path": page_path(page), "pathType": "Prefix", "backend": {"service": service}})
    spec: Object = {"rules": [{"host": block.host, "http": {"paths": paths}}]}
    if block.ingress_class is not None:
        spec["ingressClassName"] = block.ingress_class
    secret = block.tls_secret or (f"{name}-tls" if block.issuer is not None else None)
    if secret is not None:
        spec["tls"] = [{"hosts": [block.host], "secretName": secret}]
    ingress = build("networking.k8s.io/v1/Ingress", objects.public(name), deployment, "gateway", spec=spec)
    # https://cert-manager.io/docs/usage/ingress/#supported-annotations
    certificate = {} if block.issuer is None else {"cert-manager.io/cluster-issuer": block.issuer}
    ingress["metadata"]["annotations"] = _stream_annotations(deployment.gateway.limits.body_bytes) | certificate
    return ingress


def _stream_annotations(body_bytes: int) -> dict[str, str]:
    """For streams that last and are not buffered, by controller; each one ignores those of the others."""
    seconds, body = str(STREAM_S), f"{-(-body_bytes // MIB)}m"
    return {
        # https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/
        "nginx.ingress.kubernetes.io/proxy-read-timeout": seconds,
        "nginx.ingress.kubernetes.io/proxy-send-timeout": seconds,
        "nginx.ingress.kubernetes.io/proxy-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-request-buffering": "off",
        "nginx.ingress.kubernetes.io/proxy-body-size": body,
        # https://docs.nginx.com/nginx-ingress-controller/configuration/ingress-resources/advanced-configuration-with-annotations/
        "nginx.org/proxy-read-timeout": f"{seconds}s",
        "nginx.org/proxy-send-timeout": f"{seconds}s",
        "nginx.org/proxy-buffering": "false",
        "nginx.org/client-max-body-size": body,
        # https://www.haproxy.com/documentation/kubernetes-ingress/community/configuration-reference/ingress/
        "haproxy.org/timeout-server": f"{seconds}s",
        # https://haproxy-ingress.github.io/docs/configuration/keys/#timeout
        "haproxy-ingress.github.io/timeout-server": f"{seconds}s",
        # https://kubernetes-sigs.github.io/aws-load-balancer-controller/latest/guide/ingress/annotations/
        "alb.ingress.kubernetes.io/target-type": "ip",
        "alb.ingress.kubernetes.io/healthcheck-path": "/health",
        "alb.ingress.kubernetes.io/load-balancer-attributes": f"idle_timeout.timeout_seconds={seconds}",
        # https://azure.github.io/application-gateway-kubernetes-ingress/annotations/
        "appgw.ingress.kubernetes.io/request-timeout": seconds,
    }


def _route(deployment: Deployment, is_gke: bool) -> list[Object]:
    """Envoy ends requests after 15 s where a route names no timeout; GKE rejects a route that names one, and takes it
    from a GCPBackendPolicy."""
    block, name = block_of(deployment), deployment.name
    space, _, parent = (block.route_parent or "").rpartition("/")
    backend: Object = {"name": objects.gateway(name), "port": deployment.gateway.port}
    if block.inference_pool:
        backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": objects.gateway(name)}
    backends: list[tuple[str, Object]] = [("/", backend)]
    page = deployment.chat_page
    if page is not None:
        backends.insert(0, (page_path(page), {"name": objects.ui(name), "port": page.port}))
    rules: list[Object] = [
        {"matches": [{"path": {"type": "PathPrefix", "value": path}}], "backendRefs": [each]} for path, each in backends
    ]
    for rule in rules if not is_gke else ():
        rule["timeouts"] = {"request": f"{STREAM_S}s", "backendRequest": f"{STREAM_S}s"}
    spec: Object = {"parentRefs": [{"namespace": space, "name": parent}], "rules": rules}
    if block.host is not None:
        spec["hostnames"] = [block.host]
    kind = "gateway.networking.k8s.io/v1/HTTPRoute"
    route = build(kind, objects.public(name), deployment, "gateway", spec=spec)
    return [route, *_google_policies(deployment)] if is_gke else [route]


def _google_policies(deployment: Deployment) -> list[Object]:
    # https://cloud.google.com/kubernetes-engine/docs/how-to/configure-gateway-resources#configure_backend_service_timeout
    kind, name = "networking.gke.io/v1/GCPBackendPolicy", objects.gateway(deployment.name)
    target = {"group": "", "kind": "Service", "name": name}
    if block_of(deployment).inference_pool:
        target = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    default = {"timeoutSec": STREAM_S}
    spec = {"default": default, "targetRef": target}
    policies = [build(kind, objects.public(deployment.name), deployment, "gateway", spec=spec)]
    if deployment.chat_page is not None:
        page = objects.ui(deployment.name)
        target = {"group": "", "kind": "Service", "name": page}
        policies.append(build(kind, page, deployment, "ui", spec={"default": default, "targetRef": target}))
        # Without it Google asks for /, which leads to the login. Same page, #configure_health_check
        check = {"config": {"type": "HTTP", "httpHealthCheck": {"port": UI_PORT, "requestPath": "/health"}}}
        kind = "networking.gke.io/v1/HealthCheckPolicy"
        policies.append(build(kind, page, deployment, "ui", spec={"default": check, "targetRef": target}))
    return policies


def _inference_pool(deployment: Deployment) -> Object:
    """Our gateway's pods as endpoints; the site's endpoint picker is the Service NAME-epp. Without it requests pass."""
    # https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
    spec = {
        "selector": {"matchLabels": objects.labels(deployment.name, "gateway")},
        "targetPorts": [{"number": GATEWAY_PORT}],
        "endpointPickerRef": {
            "name": f"{deployment.name}-epp",
            "port": {"number": _PICKER_PORT},
            "failureMode": "FailOpen",
        },
    }
    kind = "inference.networking.k8s.io/v1/InferencePool"
    return build(kind, objects.gateway(deployment.name), deployment, "gateway", spec=spec)


def _policies(deployment: Deployment, monitors: monitoring.Kinds) -> list[Object]:
    """Engines take requests from gateways and from the Prometheus that asks them: Google's collectors, or pods with the
    label that the operator sets. Ranks of vLLM talk on many ports among themselves. Only pods of the deployment reach
    the admin port. Engines that need no network for their weights reach each other, the gateways and DNS alone.

    Policies add up: another one may allow more. Where the network ignores policies, keys remain.
    """
    name = deployment.name
    ours = {"podSelector": {"matchLabels": objects.labels(name)}}
    gateways = {"podSelector": {"matchLabels": objects.labels(name, "gateway")}}
    replicas = {"podSelector": {"matchLabels": objects.labels(name, "replica")}}
    google = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gmp-system"}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    scrapers = {"google": [google], "operator": [operator]}.get(monitors, [])
    to_engines = {"from": [gateways, *scrapers], "ports": [_tcp(ENGINE_PORT)]}
    to_admin = {"from": [ours], "ports": [_tcp(ADMIN_PORT)]}
    dns = {"ports": [_tcp(_DNS), {"protocol": "UDP", "port": _DNS}]}
    out = [{"to": [replicas]}, {"to": [gateways], "ports": [_tcp(ADMIN_PORT)]}, dns]
    policies = [
        _policy(deployment, objects.gateway(name), "gateway", [{"ports": [_tcp(GATEWAY_PORT)]}, to_admin]),
        _policy(
            deployment, objects.nodes(name), "replica", [to_engines, {"from": [replicas]}],
            None if weights.come_to_replicas(deployment) else out,
        ),
    ]  # fmt: skip
    if deployment.chat_page is not None:
        policies.append(_policy(deployment, objects.ui(name), "ui", [{"ports": [_tcp(UI_PORT)]}]))
    return policies


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _policy(
    deployment: Deployment, name: str, component: str, ingress: list[Any], egress: list[Any] | None = None
) -> Object:
    spec: Object = {"podSelector": {"matchLabels": {objects.INSTANCE: deployment.name, COMPONENT: component}}}
    spec |= {"policyTypes": ["Ingress"], "ingress": ingress}
    if egress is not None:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return build("networking.k8s.io/v1/NetworkPolicy", name, deployment, component, spec=spec)


# ---- before ----------------------------------------------------------------------------------------------------------


def problems(deployment: Deployment) -> list[Problem]:
    """What the file asks of gateway and traffic, and cannot have."""
    return [*_gateway_problems(deployment), *_store_problems(deployment), *_expose_problems(deployment)]


def _gateway_problems(deployment: Deployment) -> Iterator[Problem]:
    gateway = deployment.gateway
    if gateway.auth == "none":
        message = "every pod of the cluster could use the engines"
        yield Problem("gateway.auth", message, "remove auth: none; penstock up prints a key")
    if not 0 < gateway.port < 65536:
        yield Problem("gateway.port", f"{gateway.port} is not the port of a Service", "example: port: 8000")
    for field in ("tls_cert", "tls_key"):
        if getattr(gateway, field) is not None:
            hint = "put both into a Secret (kubectl create secret tls), and name it in kubernetes.tls_secret"
            yield Problem(f"gateway.{field}", "is a file of this machine", hint)
    for index, upstream in enumerate(gateway.upstreams):
        if upstream.key_file is not None or upstream.key_env is not None:
            yield Problem(f"gateway.upstreams[{index}]", "its key does not reach the gateway's pods")


def _store_problems(deployment: Deployment) -> Iterator[Problem]:
    block, store = block_of(deployment), deployment.gateway.store
    if block.gateways < 1:
        yield Problem("kubernetes.gateways", f"{block.gateways} is less than 1")
    if store is not None and "://" not in store:
        hint = "remove it, for a claim of the cluster, or give a postgresql:// URL"
        yield Problem("gateway.store", "is a file of this machine", hint)
    if has_postgres(deployment):
        if block.gateway_image is None and block.image is None:
            hint = "name an image with Python 3.11, msgspec, psutil, pyyaml and psycopg[binary]"
            yield Problem("kubernetes.gateway_image", "is missing: the engine's image has no psycopg", hint)
        return
    if block.gateways > 1:
        hint = "set gateway.store: postgresql://USER@HOST/DATABASE, or gateways: 1"
        yield Problem("kubernetes.gateways", f"{block.gateways} gateways cannot share a file of keys", hint)
    if block.postgres_secret is not None:
        yield Problem("kubernetes.postgres_secret", "gateway.store is no postgresql:// URL", "set gateway.store")


def has_postgres(deployment: Deployment) -> bool:
    return (deployment.gateway.store or "").startswith(("postgresql://", "postgres://"))


def _expose_problems(deployment: Deployment) -> Iterator[Problem]:
    block = block_of(deployment)
    for field, ways in _READ_BY.items():
        if getattr(block, field) is not None and block.expose not in ways:
            hint = "the Gateway's listener has the certificate" if field != "host" and ways[-1] == "Ingress" else None
            message = f"is for expose: {' and '.join(ways)}, and expose is {block.expose}"
            yield Problem(f"kubernetes.{field}", message, hint if block.expose == "HTTPRoute" else None)
    if block.expose == "Ingress" and block.host is None:
        yield Problem("kubernetes.host", "is missing: an Ingress without one takes every host", "host: llm.example.org")
    if block.expose == "HTTPRoute" and not _PARENT.match(block.route_parent or ""):
        wrong = "is missing" if block.route_parent is None else f'"{block.route_parent}" is not NAMESPACE/NAME'
        yield Problem("kubernetes.route_parent", wrong, "the Gateway that the site has: kubectl get gateways -A")
