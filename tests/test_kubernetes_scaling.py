"""Who sets the number of replicas on Kubernetes: the objects for HPA and KEDA, and one owner only: no cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from samples import deployment
from test_kubernetes_checks import StubApi, named

from penstock.planner import Plan
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Deployment, Replicas
from penstock.targets.kubernetes import checks, objects, scaling
from penstock.targets.kubernetes.objects import Object

KEDA_URL = "http://prometheus.monitoring.svc:9090"


def wanted(actuator: Any = "hpa", least: int = 1, url: str | None = None) -> Deployment:
    replicas = Replicas(min=least, max=4, actuator=actuator)
    return Deployment(model="m", name="one", target="kubernetes", replicas=replicas,
                      kubernetes=Kubernetes(prometheus_url=url, image="own"))  # fmt: skip


def made(deployment: Deployment, plan: Plan, **words: Any) -> dict[str, Object]:
    rows = scaling.objects_of(deployment, plan, words.get("hpa", "autoscaling/v2"), words.get("is_google", False))
    return {row["kind"]: row for row in rows}


@pytest.fixture
def plan() -> Plan:
    from samples import demo_plan

    return demo_plan()


def test_the_dial_is_a_deployment_that_never_makes_a_pod(plan: Plan) -> None:
    dial = made(wanted(), plan)["Deployment"]
    assert dial["spec"]["paused"] is True
    assert "replicas" not in dial["spec"], "`up` never takes the number from the one that sets it"
    assert scaling.number_of(dial) == 1
    assert made(wanted("penstock"), plan) == {}


def test_hpa_divides_the_gauge_by_one(plan: Plan) -> None:
    rows = made(wanted(), plan, hpa="autoscaling/v2beta2")
    hpa = rows["HorizontalPodAutoscaler"]
    assert hpa["apiVersion"] == "autoscaling/v2beta2"
    assert hpa["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "one-scale"}
    [metric] = hpa["spec"]["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    rule = yaml.safe_load(rows["ConfigMap"]["data"]["prometheus-adapter.yaml"])
    assert rule["rules"]["external"][0]["name"] == {"as": metric["external"]["metric"]["name"]}
    google = made(wanted(), plan, is_google=True)
    assert "ConfigMap" not in google, "Google's own adapter needs no rule"
    [metric] = google["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == "prometheus.googleapis.com|penstock_desired_replicas|gauge"


def test_keda_takes_no_answer_for_zero(plan: Plan) -> None:
    scaled = made(wanted("keda", 0, KEDA_URL), plan)["ScaledObject"]["spec"]
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["query"] == 'max(penstock_desired_replicas{deployment="one"})'
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert (scaled["minReplicaCount"], scaled["fallback"]["behavior"]) == (0, "currentReplicas")


def problems(deployment: Deployment, **kinds: list[Object]) -> list[str]:
    api = StubApi(**kinds)
    return [str(problem) for problem in checks._actuator_problems(api, deployment)]  # type: ignore[arg-type]


def scaler(name: str, target: str, **metadata: Any) -> Object:
    return named(name, metadata=metadata, spec={"scaleTargetRef": {"name": target}})


@pytest.mark.parametrize("target", ["one-scale", "one-r0", "one-r12"])
def test_another_autoscaler_of_the_same_replicas_is_refused(target: str) -> None:
    found = problems(wanted("penstock"), HorizontalPodAutoscaler=[scaler("theirs", target)])
    assert len(found) == 1 and f'HorizontalPodAutoscaler "theirs" scales "{target}" too' in found[0]


def test_our_own_and_those_of_others_are_not_refused() -> None:
    ours = scaler("one-scale", "one-scale", labels=objects.labels("one", scaling.COMPONENT))
    of_keda = scaler("keda-hpa", "one-scale", ownerReferences=[{"kind": "ScaledObject", "name": "one-scale"}])
    others = [scaler("a", "one-gateway"), scaler("b", "one-rx"), scaler("c", "two-r0")]
    assert problems(wanted(), HorizontalPodAutoscaler=[ours, of_keda, *others]) == []


def test_keda_needs_its_prometheus_and_nobody_else_does() -> None:
    def told(deployment: Deployment) -> list[str]:
        return [str(problem) for problem in scaling.problems(deployment)]

    assert told(wanted("keda", 0, KEDA_URL)) == told(wanted()) == []
    assert "is missing with replicas.actuator: keda" in told(wanted("keda"))[0]
    assert "is for replicas.actuator: keda" in told(wanted("hpa", url=KEDA_URL))[0]
    assert "is no URL" in told(wanted("keda", url="prometheus:9090"))[0]


def test_a_cluster_without_keda_is_told() -> None:
    api = StubApi()
    rows = [str(problem) for problem in checks._kind_problems(api, wanted("keda", 0, KEDA_URL))]  # type: ignore[arg-type]
    assert any("no kind ScaledObject" in row for row in rows)


def test_a_file_with_an_actuator_is_read() -> None:
    block = {"min": 0, "max": 4, "actuator": "keda"}
    found = deployment("m", target="kubernetes", replicas=block, kubernetes={"prometheus_url": KEDA_URL})
    assert msgspec.to_builtins(found.replicas)["actuator"] == "keda"
