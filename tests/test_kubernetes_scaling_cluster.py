"""The number of replicas in a cluster follows the load, set by penstock's controller and by a real HPA."""

# ruff: noqa: F811 - fixtures of test_kubernetes_target
from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autoscale_story
import pytest
from autoscale_story import FIELDS, SLOW
from kubernetes_cluster import Namespace
from kubernetes_metrics_adapter import serving
from launching import Asking, Place, ask, call, now, wait_ready
from test_kubernetes_target import file_for, place, up  # noqa: F401 - fixtures
from waiting import until

from penstock.deployment import metrics
from penstock.run_folder import Run
from penstock.targets.kubernetes.scaling import GAUGE
from penstock.wire.client import Client

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]
HPA = "/apis/autoscaling/v1"


def file_of(place: Place, **fields: Any) -> Path:
    replicas = {**FIELDS["replicas"], **fields.pop("replicas", {})}
    return file_for(place, args=SLOW, gateway=FIELDS["gateway"], replicas=replicas, **fields)


def sets(space: Namespace) -> list[str]:
    return sorted(row["metadata"]["name"] for row in space.objects("statefulsets", "/apis/apps/v1"))


class Pods:
    """The pods of replicas from now on, by the replica: the uids of those that ever were, and most of one at once."""

    def __init__(self, space: Namespace) -> None:
        self.uids: dict[str, set[str]] = {}
        self.most_at_once = 0
        self._space, self._is_over = space, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            rows = self._space.objects("pods", labels="app.kubernetes.io/component=replica")
            names = [row["metadata"]["name"] for row in rows]
            self.most_at_once = max([self.most_at_once, *map(names.count, names)])
            for row in rows:
                self.uids.setdefault(row["metadata"]["name"], set()).add(row["metadata"]["uid"])

    def of(self, name: str) -> int:
        return len(self.uids.get(name, ()))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(10.0)


@pytest.fixture
def pods(kubernetes: Namespace) -> Iterator[Pods]:
    seen = Pods(kubernetes)
    yield seen
    seen.end()


@pytest.mark.nightly
def test_a_controllers_pod_that_is_lost_at_each_phase_places_nothing_twice(
    place: Place, kubernetes: Namespace, pods: Pods
) -> None:
    """The next pod has nothing but what the API keeps. Each phase prints a row of docs/measurements/faults.md (-s)."""
    replicas = {"min": 0, "max": 2, "idle_s": 10}
    run, key = up(place, file_for(place, args=SLOW | {"load-s": 4.0}, gateway=FIELDS["gateway"], replicas=replicas))
    began = 0.0

    def lose_controller() -> float:
        (controller,) = kubernetes.pods("app.kubernetes.io/component=controller")
        kubernetes.kubectl("delete", "pod", controller.name, "--wait=false", "--grace-period=0", "--force")
        return time.monotonic()

    def row(phase: str, *streams: Asking) -> None:
        seconds, n_lost = time.monotonic() - began, sum(stream.end().error is not None for stream in streams)
        print(f"| kubernetes | controller's pod | {phase} | {seconds:.1f} | {n_lost} of {len(streams)} |", flush=True)
        assert n_lost == 0, [stream.error for stream in streams]

    streams = [Asking(run.url, autoscale_story.N_TOKENS, key=key) for _ in range(4)]
    until(lambda: sets(kubernetes) == ["one-r0", "one-r1"], "requests wait: the second is placed")
    began = lose_controller()
    assert call("scale", "one", 2).code == 0, "it stays wanted when the streams end first"
    wait_ready(run, 2)
    row("placed, one loads", *streams)
    assert (pods.of("one-r0-0"), pods.of("one-r1-0")) == (1, 1)

    n_second = pods.of("one-r1-0")
    streams = [Asking(run.url, 200, key=key) for _ in range(2)]
    until(lambda: all(row.in_flight for row in now(run).replicas), "both are busy")
    assert call("scale", "one", 1, "--no-wait").code == 0
    until(lambda: "replica draining" in call("logs", "one", "--part", "events").out, "one drains")
    began = lose_controller()
    wait_ready(run)
    row("one drains", *streams)
    assert (pods.of("one-r0-0"), pods.of("one-r1-0")) == (1, n_second)

    assert call("scale", "one", "auto").code == 0
    until(lambda: sets(kubernetes) == [], "nobody asks: all end")
    n_first, held = pods.of("one-r0-0"), Asking(run.url, 8, key=key)
    until(lambda: sets(kubernetes) == ["one-r0"], "the request wakes one")
    began = lose_controller()
    held.end()
    wait_ready(run)
    row("woken, one loads", held)
    assert (pods.of("one-r0-0"), pods.most_at_once) == (n_first + 1, 1)


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
        streams = [Asking(run.url, autoscale_story.N_TOKENS, key=key) for _ in range(4)]
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
