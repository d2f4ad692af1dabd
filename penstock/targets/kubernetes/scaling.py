"""The number of replicas as another autoscaler sets it: HPA or KEDA, from the gauge that the gateways publish. Pure.

Each replica is a set of its own, so no object of a deployment counts replicas. The dial does: a Deployment that is
paused before it has made a ReplicaSet, so that it never has a pod, and whose /scale is the number. The other autoscaler
alone writes it, and penstock's controller places what it reads there. All smoothing is done in the gauge: the other one
follows at once, up and down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from penstock.engines.vllm import images
from penstock.errors import Problem
from penstock.planner import Plan
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import objects, pods
from penstock.targets.kubernetes.objects import Object, block_of, build
from penstock.targets.kubernetes.pods import Pod

GAUGE = "penstock_desired_replicas"
HpaVersion = Literal["autoscaling/v2", "autoscaling/v2beta2"]  # v2 is there from Kubernetes 1.23, with the same words
SCALED_OBJECT = "keda.sh/v1alpha1"
KINDS = ("HorizontalPodAutoscaler", "ScaledObject")
COMPONENT = "scale"
_POLL_S = 5  # of KEDA, whose default of 30 s would come on top of every start
_EVERY_S = 15  # HPA decides once in that time


def objects_of(deployment: Deployment, plan: Plan, hpa: HpaVersion, is_google: bool) -> list[Object]:
    """None where penstock's controller sets the number itself."""
    actuator = deployment.replicas.actuator
    if actuator == "penstock":
        return []
    if actuator == "keda":
        return [_dial(deployment, plan), _scaled_object(deployment)]
    adapter = [] if is_google else [_adapter(deployment)]
    return [_dial(deployment, plan), _hpa(deployment, hpa, is_google), *adapter]


def problems(deployment: Deployment) -> Iterator[Problem]:
    """What is wrong in the file."""
    url, is_keda = block_of(deployment).prometheus_url, deployment.replicas.actuator == "keda"
    if is_keda and url is None:
        hint = "the Prometheus that KEDA asks: http://NAME.NAMESPACE.svc:9090"
        yield Problem("kubernetes.prometheus_url", "is missing with replicas.actuator: keda", hint)
    elif url is not None and not is_keda:
        yield Problem("kubernetes.prometheus_url", "is for replicas.actuator: keda", "remove it")
    elif url is not None and not url.startswith(("http://", "https://")):
        message = f'"{url}" is no URL'
        yield Problem("kubernetes.prometheus_url", message, "example: http://prometheus.monitoring.svc:9090")


def foreign_owners(deployment: Deployment, autoscalers: Sequence[Object]) -> Iterator[Problem]:
    """Objects that set the replicas of one of ours next to penstock. `autoscalers`: all those of `KINDS`."""
    name, dial = deployment.name, objects.dial(deployment.name)
    replica, ours = objects.replica_set(name, ""), objects.labels(name).items()
    for row in autoscalers:
        target = row["spec"].get("scaleTargetRef", {}).get("name", "")
        number = target.removeprefix(replica) if target.startswith(replica) else ""
        is_ours = ours <= (row["metadata"].get("labels") or {}).items()
        is_of_ours = any(  # KEDA makes an HPA for its object
            owner.get("kind") == "ScaledObject" and owner.get("name") == dial
            for owner in row["metadata"].get("ownerReferences") or ()
        )
        if (target == dial or number.isdigit()) and not (is_ours or is_of_ours):
            what = f'{row.get("kind", "an autoscaler")} "{row["metadata"]["name"]}" scales "{target}"'
            hint = "delete it; replicas.actuator says who sets the number"
            yield Problem("replicas.actuator", f"{what} too, and one alone may", hint)


def number_of(dial: Object) -> int:
    """What the other autoscaler asks for."""
    return int(dial["spec"].get("replicas", 1))


def _dial(deployment: Deployment, plan: Plan) -> Object:
    name = deployment.name
    image = block_of(deployment).gateway_image or images.image(deployment, plan)
    needs = {"cpu": "1m", "memory": "1Mi"}
    template = pods.pod_template(deployment, Pod(COMPONENT, "none", image, (), (), needs, 0, has_secrets=False))
    for unused in ("initContainers", "volumes"):
        del template["spec"][unused]
    for unused in ("command", "env", "volumeMounts"):
        del template["spec"]["containers"][0][unused]
    selector = {"matchLabels": objects.labels(name, COMPONENT)}
    spec = {"paused": True, "selector": selector, "template": template}
    return build("apps/v1/Deployment", objects.dial(name), deployment, COMPONENT, spec=spec)


def _target(deployment: Deployment) -> Object:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": objects.dial(deployment.name)}


def _behavior(deployment: Deployment) -> Object:
    """At once to any number: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/"""
    every = {"type": "Pods", "value": deployment.replicas.max, "periodSeconds": _EVERY_S}
    at_once = {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [every]}
    return {"scaleUp": at_once, "scaleDown": at_once}


def _hpa(deployment: Deployment, version: HpaVersion, is_google: bool) -> Object:
    """The sum over "1 for each pod" is the gauge itself; a dial without pods leaves nothing for HPA's tolerance."""
    name = f"prometheus.googleapis.com|{GAUGE}|gauge" if is_google else GAUGE
    # Labels by their path: https://cloud.google.com/kubernetes-engine/docs/how-to/horizontal-pod-autoscaling
    label = "metric.labels.deployment" if is_google else "deployment"
    metric = {"name": name, "selector": {"matchLabels": {label: deployment.name}}}
    external = {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}}
    spec = {
        "scaleTargetRef": _target(deployment),
        "minReplicas": deployment.replicas.min,
        "maxReplicas": deployment.replicas.max,
        "metrics": [{"type": "External", "external": external}],
        "behavior": _behavior(deployment),
    }
    return build(f"{version}/HorizontalPodAutoscaler", objects.dial(deployment.name), deployment, COMPONENT, spec=spec)


def _adapter(deployment: Deployment) -> Object:
    """The rule by which Prometheus's adapter serves the gauge to HPA, as values of its Helm chart."""
    # https://github.com/kubernetes-sigs/prometheus-adapter/blob/master/docs/externalmetrics.md
    rule = f"""\
rules:
  external:
    - seriesQuery: '{GAUGE}'
      resources: {{overrides: {{namespace: {{resource: namespace}}}}}}
      name: {{as: {GAUGE}}}
      metricsQuery: max(<<.Series>>{{<<.LabelMatchers>>}}) by (deployment)
"""
    data = {"prometheus-adapter.yaml": rule}
    return build("v1/ConfigMap", f"{objects.dial(deployment.name)}-adapter", deployment, COMPONENT, data=data)


def _scaled_object(deployment: Deployment) -> Object:
    # https://keda.sh/docs/latest/reference/scaledobject-spec/, https://keda.sh/docs/latest/scalers/prometheus/
    replicas = deployment.replicas
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": block_of(deployment).prometheus_url or "",
            "query": f'max({GAUGE}{{deployment="{deployment.name}"}})',
            "threshold": "1",
            "activationThreshold": "0",
            "ignoreNullValues": "false",  # no answer is not 0
        },
    }
    spec = {
        "scaleTargetRef": _target(deployment),
        "pollingInterval": _POLL_S,
        "cooldownPeriod": 0,
        "minReplicaCount": replicas.min,
        "maxReplicaCount": replicas.max,
        # Without a metric what there is stays.
        "fallback": {"failureThreshold": 3, "replicas": max(1, replicas.min), "behavior": "currentReplicas"},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(deployment)}},
        "triggers": [trigger],
    }
    return build(f"{SCALED_OBJECT}/ScaledObject", objects.dial(deployment.name), deployment, COMPONENT, spec=spec)
