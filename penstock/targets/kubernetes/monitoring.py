"""How Prometheus finds the pages of gateway and engines, and which rules it gets. Pure.

Both want the scrape key: Secret NAME-scrape, key "token". It opens what watchers read, and changes nothing.
"""

from __future__ import annotations

from typing import Literal

from penstock.observe import rules
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import objects
from penstock.targets.kubernetes.objects import GATEWAY_PORT, INSTANCE, REPLICA, Object, block_of, build

Kinds = Literal["google", "operator", "annotations", "none"]

_EVERY = "15s"
# The label of a pod -> that of its series. The gateway's own series have `replica` already.
_LABELS = {INSTANCE: "deployment", REPLICA: "replica"}
# Only the first node of a replica serves a page.
# https://kubernetes.io/docs/reference/labels-annotations-taints/#apps-kubernetes.io-pod-index (from 1.28)
# https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
_FIRST = {
    "statefulset": {"apps.kubernetes.io/pod-index": "0"},
    "lws": {"leaderworkerset.sigs.k8s.io/worker-index": "0"},
}


def monitors(deployment: Deployment, kinds: Kinds) -> list[Object]:
    """One monitor for the gateway's pods and one for the engines', with the labels `deployment` and `replica`, and with
    `observe.prometheus` the rules and alerts.

    They carry `kubernetes.labels` too: a Prometheus of the operator may take only those with a certain label.
    """
    block, monitor = block_of(deployment), {"google": _google, "operator": _operator}.get(kinds)
    if monitor is None:
        return []
    entries = [monitor(deployment, "gateway", {})]
    if deployment.engine.kind != "llamacpp":  # its page wants the engine's own key
        first = _FIRST[block.shape] if deployment.hardware.nodes > 1 else {}
        entries.append(monitor(deployment, "replica", first))
    if deployment.observe.prometheus:
        entries.append(_rules(deployment, kinds))
    for entry in entries:
        entry["metadata"]["labels"] = dict(block.labels) | entry["metadata"]["labels"]
    return [*entries, *(_collector_rights(deployment) if kinds == "google" else [])]


def scrape_annotations(kinds: Kinds) -> dict[str, str]:
    """For the gateway's pods, by the convention of Prometheus's example configuration. They cannot name a key: the
    scrape job must send it."""
    # https://github.com/prometheus/prometheus/blob/main/documentation/examples/prometheus-kubernetes.yml
    if kinds != "annotations":
        return {}
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(GATEWAY_PORT), "prometheus.io/path": "/metrics"}


def _google(deployment: Deployment, component: str, more: dict[str, str]) -> Object:
    # https://github.com/GoogleCloudPlatform/prometheus-engine/blob/main/doc/api.md#podmonitoring
    secret = {"name": objects.scrape(deployment.name), "key": "token"}
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": _EVERY,
        "authorization": {"type": "Bearer", "credentials": {"secret": secret}},
    }
    spec = {
        "selector": {"matchLabels": objects.labels(deployment.name, component, **more)},
        "endpoints": [endpoint],
        "targetLabels": {"fromPod": [{"from": label, "to": name} for label, name in _of(component).items()]},
    }
    kind = "monitoring.googleapis.com/v1/PodMonitoring"
    return build(kind, f"{deployment.name}-{component}", deployment, component, spec=spec)


def _operator(deployment: Deployment, component: str, more: dict[str, str]) -> Object:
    # https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor
    relabelings = [
        {"sourceLabels": [f"__meta_kubernetes_pod_label_{_as_meta(label)}"], "targetLabel": name}
        for label, name in _of(component).items()
    ]
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": _EVERY,
        "honorLabels": True,  # the gateway's series name the replica that they are of
        "authorization": {"type": "Bearer", "credentials": {"name": objects.scrape(deployment.name), "key": "token"}},
        "relabelings": relabelings,
    }
    selector = {"matchLabels": objects.labels(deployment.name, component, **more)}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    kind = "monitoring.coreos.com/v1/PodMonitor"
    return build(kind, f"{deployment.name}-{component}", deployment, component, spec=spec)


def _rules(deployment: Deployment, kinds: Kinds) -> Object:
    # https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PrometheusRule
    # https://github.com/GoogleCloudPlatform/prometheus-engine/blob/main/doc/api.md#rules
    kind = "monitoring.googleapis.com/v1/Rules" if kinds == "google" else "monitoring.coreos.com/v1/PrometheusRule"
    return build(kind, f"{deployment.name}-rules", deployment, spec=rules.plain(rules.groups(deployment)))


def _of(component: str) -> dict[str, str]:
    return {label: name for label, name in _LABELS.items() if component == "replica" or label != REPLICA}


def _as_meta(label: str) -> str:
    # https://prometheus.io/docs/prometheus/latest/configuration/configuration/#pod
    return "".join(letter if letter.isalnum() else "_" for letter in label)


def _collector_rights(deployment: Deployment) -> list[Object]:
    """Google's collector reads that one Secret."""
    # https://cloud.google.com/stackdriver/docs/managed-prometheus/setup-managed#gmp-scrape-auth
    name = objects.scrape(deployment.name)
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["get", "list", "watch"]}
    role = build("rbac.authorization.k8s.io/v1/Role", name, deployment, rules=[rule])
    binding = build(
        "rbac.authorization.k8s.io/v1/RoleBinding",
        name,
        deployment,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": "collector", "namespace": "gmp-system"}],
    )
    return [role, binding]
