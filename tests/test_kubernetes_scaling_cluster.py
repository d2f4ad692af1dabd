"""The number of replicas in a cluster follows the load, set by penstock's controller and by a real HPA."""

# ruff: noqa: F811 - fixtures of test_kubernetes_target
from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import Namespace
from kubernetes_metrics_adapter import serving
from launching import Asking, Place, ask, call, now
from test_kubernetes_target import file_for, place, up  # noqa: F401 - fixtures
from waiting import until

from penstock.deployment import metrics
from penstock.run_folder import Run
from penstock.targets.kubernetes.scaling import GAUGE
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]

# Replicas for one request at a time, that may end at once, and that requests which wait order.
FIELDS: dict[str, Any] = {
    "replicas": {"max": 2, "metric": "waiting", "target": 1, "down": {"stabilization_window_seconds": 0}},
    "gateway": {"max_in_flight": 1, "hold_s": 100},
}
SLOW, N_TOKENS = {"load-s": 0.5, "tokens-per-s": 20}, 160
HPA = "/apis/autoscaling/v1"


def file_of(place: Place, **fields: Any) -> Path:
    replicas = {**FIELDS["replicas"], **fields.pop("replicas", {})}
    return file_for(place, args=SLOW, gateway=FIELDS["gateway"], replicas=replicas, **fields)


def sets(space: Namespace) -> list[str]:
    return sorted(row["metadata"]["name"] for row in space.objects("statefulsets", "/apis/apps/v1"))


def gauge_of(run: Run) -> int | None:
    """What the gateway publishes, None while there is none."""
    match = re.search(rf"^{GAUGE}\{{[^}}]*\}} (\d+)$", metrics.page(run, of_engines=False), re.MULTILINE)
    return int(match[1]) if match else None


def dial(space: Namespace) -> int:
    return int(space.call("GET", "deployments/one-scale/scale", group="/apis/apps/v1")["spec"]["replicas"])


@pytest.mark.nightly
def test_a_real_hpa_sets_the_number_from_the_gauge(place: Place, kubernetes: Namespace) -> None:
    """Burst, drain and pin; each new number is the HPA's, and penstock only follows."""
    file = file_of(place, replicas={"min": 1, "actuator": "hpa"})
    run, key = up(place, file)
    gauge = functools.partial(gauge_of, run)
    with serving(kubernetes.cluster, GAUGE, gauge) as answers:
        assert dial(kubernetes) == 1
        streams = [Asking(run.url, N_TOKENS, key=key) for _ in range(4)]
        until(lambda: gauge() == 2, "the gauge says two")
        kubernetes.wait(lambda: dial(kubernetes) == 2, "HPA sets two")
        until(lambda: len(sets(kubernetes)) == 2, "the controller follows")
        for stream in streams:
            stream.check_is_whole()
        kubernetes.wait(lambda: dial(kubernetes) == 1, "HPA sets one")
        until(lambda: len(sets(kubernetes)) == 1, "one has drained")
        assert kubernetes.pods("app.kubernetes.io/component=scale") == [], "the dial has no pods"
        assert call("scale", "one", 2).code == 0
        kubernetes.wait(lambda: dial(kubernetes) == 2, "a pinned number goes the same way")
        assert len(answers) > 3
        reasons = [row["reason"] for row in call("autoscale", "explain", "one", "--json").events]
        assert any("hpa asks for 2" in reason for reason in reasons), reasons
    assert call("scale", "one", "auto").code == 0
    kubernetes.call("PATCH", "deployments/one-scale/scale", {"spec": {"replicas": 1}}, group="/apis/apps/v1")
    until(lambda: now(run).desired_replicas == 1, "whoever turns the dial is followed")
    ask(run, key=key)


def test_another_autoscaler_is_refused_and_one_of_an_earlier_file_ends(place: Place, kubernetes: Namespace) -> None:
    head = {"apiVersion": "autoscaling/v1", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "theirs"}}
    scaled = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "one-r0"}
    theirs = head | {"spec": {"scaleTargetRef": scaled, "minReplicas": 1, "maxReplicas": 3}}
    kubernetes.apply(theirs)
    refused = call("up", file_of(place, replicas={"min": 1}))
    assert refused.code == 2
    assert 'HorizontalPodAutoscaler "theirs" scales "one-r0" too, and one alone may' in refused.err
    kubernetes.call("DELETE", "horizontalpodautoscalers/theirs", group=HPA)
    run, key = up(place, file_of(place, replicas={"min": 1, "actuator": "hpa"}))
    assert [row["metadata"]["name"] for row in kubernetes.objects("horizontalpodautoscalers", HPA)] == ["one-scale"]
    assert call("up", file_of(place, replicas={"min": 1}), "--replace").code == 0
    assert kubernetes.objects("horizontalpodautoscalers", HPA) == []
    assert "one-scale" not in kubernetes.kubectl("get", "deployments", "-o", "name").stdout
    Client(run.url, api_key=key).models()
