"""Ends a deployment, from any machine, and finds what is left of those whose anchor is gone."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from penstock.errors import PenstockError, UserError
from penstock.run_folder import Left, Run
from penstock.targets.kubernetes import objects, scaling, weights
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.placing import SPARE_S
from penstock.targets.waiting import wait

# All that a deployment may have, in the order in which it is deleted; ConfigMaps are last, with them the anchor.
_KINDS = (
    *("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "Ingress", "HTTPRoute", "InferencePool", "Service"),
    *(
        "PodDisruptionBudget",
        "NetworkPolicy",
        "GCPBackendPolicy",
        "HealthCheckPolicy",
        "PodMonitoring",
        "ServiceMonitor",
        "PodMonitor",
    ),
    *("PrometheusRule", "Rules", *scaling.KINDS),
    *("RoleBinding", "Role", "ServiceAccount", "Secret", "PersistentVolumeClaim", "ConfigMap"),
)
TARGET = "kubernetes"
_LWS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")


def end(api: Api, run: Run, grace_s: float) -> None:
    name = run.name
    api.delete("Deployment", objects.ui(name))
    for kind in ("controller", "gateway"):
        if api.delete("Deployment", f"{name}-{kind}"):
            wait(functools.partial(_has_no_pod, api, objects.labels(name, kind)), grace_s + SPARE_S)
    for kind in ("StatefulSet", "LeaderWorkerSet", "Job"):
        if kind != "LeaderWorkerSet" or api.knows(*_LWS):
            api.delete_all(kind, objects.labels(name))
    _end_pods(api, name, grace_s)
    for kind in _KINDS:
        for row in _listed(api, kind, objects.labels(name)):
            if not weights.is_kept({"kind": kind, **row}):
                api.delete(kind, row["metadata"]["name"])


def _end_pods(api: Api, name: str, grace_s: float) -> None:
    """Their sets are deleted: wait until they have drained, at most `grace_s`, then by force."""
    labels = objects.labels(name)
    for force_s, wait_s in ((None, grace_s), (1, SPARE_S), (0, SPARE_S)):
        pods = api.list("Pod", labels)
        for pod in pods:
            if force_s is not None or "deletionTimestamp" not in pod["metadata"]:
                api.delete("Pod", pod["metadata"]["name"], grace_s=force_s)
        if not pods or wait(functools.partial(_has_no_pod, api, labels), wait_s):
            return
    message = f'could not end {len(api.list("Pod", labels))} pods of "{name}"'
    raise PenstockError(message, hint=f"kubectl get pods -l {objects.selector(labels)}", is_retryable=True)


def _has_no_pod(api: Api, labels: Mapping[str, str]) -> bool:
    return not api.list("Pod", labels)


def end_weights(api: Api, run: Run) -> None:
    source = weights.source_of(run.deployment())
    if source is None or source.kind != "claim":
        return
    pods = api.list("Pod", {objects.MANAGED_BY: objects.MANAGER})
    users = {pod["metadata"]["labels"][objects.INSTANCE] for pod in pods if weights.mounts(pod, source.name)}
    if users:
        message = f'cannot remove the weights in claim "{source.name}": {", ".join(sorted(users))} uses them'
        raise UserError(message, hint=f"End it first: penstock down {min(users)}")
    api.delete("PersistentVolumeClaim", source.name)
    wait(lambda: api.find("PersistentVolumeClaim", source.name) is None, SPARE_S)


def without_anchor(api: Api) -> list[Left]:
    """Objects with our labels whose deployment's anchor is gone, by deployment; not those that outlive it."""
    ours = {objects.MANAGED_BY: objects.MANAGER}
    by_name: dict[str, list[tuple[str, str]]] = {}
    for kind in _KINDS:
        for row in _listed(api, kind, ours):
            labels, own_name = row["metadata"]["labels"], row["metadata"]["name"]
            if not weights.is_kept({"kind": kind, **row}):
                by_name.setdefault(labels.get(objects.INSTANCE, ""), []).append((kind, own_name))
    return [
        _left(api, name, rows, f'{len(rows)} objects of "{name}"')
        for name, rows in sorted(by_name.items())
        if ("ConfigMap", objects.anchor(name)) not in rows
    ]


def kept_keys(api: Api, name: str) -> list[Left]:
    """The claim with the keys and usage of a deployment that has ended."""
    claim = api.find("PersistentVolumeClaim", objects.store(name))
    if claim is None or not weights.is_kept(claim) or api.find("ConfigMap", objects.anchor(name)) is not None:
        return []
    rows = [("PersistentVolumeClaim", objects.store(name))]
    return [_left(api, name, rows, f'keys and usage of "{name}", in claim "{objects.store(name)}"')]


def _left(api: Api, name: str, rows: list[tuple[str, str]], what: str) -> Left:
    place = f'namespace "{api.namespace}" of context "{api.context}"'
    return Left(TARGET, name, place, what, {"context": api.context, "namespace": api.namespace, "objects": rows})


def _listed(api: Api, kind: str, labels: Mapping[str, str]) -> list[Object]:
    """Objects of a kind; none where the cluster does not know the kind."""
    try:
        return api.list(kind, labels)
    except ApiError as exc:
        if exc.status in (403, 404):
            return []
        raise
