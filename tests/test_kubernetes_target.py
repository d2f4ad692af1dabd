"""Target kubernetes on a real API server, controller manager and scheduler, with pods as processes of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_recorded
import pytest
from kubernetes_cluster import Namespace
from launching import Place, a_place, ask, call, wait_ready
from waiting import until

from penstock import targets
from penstock.gateway.accounting.key_store import hash_of
from penstock.run_folder import Run
from penstock.testing.conformance import check_target

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]


@pytest.fixture
def place(tmp_path: Path, kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in kubernetes.env.items():
        monkeypatch.setenv(name, value)
    targets.load.cache_clear()
    with a_place(tmp_path) as place:
        yield place
    targets.load.cache_clear()
    until(lambda: kinds_left(kubernetes) == [], f"nothing of ours is left: {kinds_left(kubernetes)}")


def kinds_left(space: Namespace) -> list[str]:
    kinds = "all,configmap,secret,pvc,role,rolebinding,serviceaccount,networkpolicy,ingress,hpa"
    done = space.kubectl("get", kinds, "-l", "app.kubernetes.io/managed-by=penstock", "-o", "name")
    return sorted(line for line in done.stdout.split() if line != "persistentvolumeclaim/one-store")


def file_for(place: Place, **fields: Any) -> Path:
    own = {"image": "own", "cpus_per_node": 1, "memory": "1Gi", "expose": "LoadBalancer"}
    block = own | fields.pop("kubernetes", {})
    gateway = {"auth": "keys", "port": 8000, **fields.pop("gateway", {})}
    return place.write("one", target="kubernetes", kubernetes=block, gateway=gateway, **fields)


def up(place: Place, file: Path) -> tuple[Run, str]:
    """The run and the key of its first client."""
    done = call("up", file, "--json")
    assert done.code == 0, done
    return place.run("one"), str(done.events[0]["key"])


def test_kubernetes_keeps_the_contract_and_answers_as_recorded(
    place: Place, kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded answers judge the stub of the API, on which the same contract runs without a cluster."""
    run, launch = place.written(file_for(place))
    exchanges = kubernetes_recorded.listen(monkeypatch, kubernetes.name)
    target = targets.load("kubernetes")
    check_target(target, run, launch, sys.executable, lambda: kinds_left(kubernetes))
    (keys,) = target.kept_keys("one")
    targets.finish(keys)
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        kubernetes_recorded.record(exchanges)
    assert kubernetes_recorded.strays(exchanges) == []


def test_a_deployment_lives_in_the_cluster(place: Place, kubernetes: Namespace) -> None:
    run, key = up(place, file_for(place, replicas=2))
    wait_ready(run, 2)
    ask(run, key=key)
    log = call("logs", "one", "--replica", "0")
    assert "penstock: ready after" in log.out, log
    assert call("scale", "one", 1).code == 0
    wait_ready(run)
    assert call("down", "one").code == 0


def test_kubectl_applies_what_render_prints(place: Place, kubernetes: Namespace) -> None:
    file = file_for(place, kubernetes={"namespace": kubernetes.name})
    stream, key = call("render", file), "sk-of-a-client"
    assert stream.code == 0, stream
    words = f"--from-literal=admin-token=s3cret --from-literal=first-key-hash={hash_of(key)}"
    kubernetes.kubectl("create", "secret", "generic", "one-secrets", *words.split())
    judged = kubernetes.kubectl("create", "--dry-run=client", "-f", "-", stdin=stream.out)
    assert "statefulset.apps/one-r0 created (dry run)" in judged.stdout
    apply = ("apply", "--server-side", "--field-manager=argocd", "-f", "-")
    assert "statefulset.apps/one-r0 serverside-applied" in kubernetes.kubectl(*apply, stdin=stream.out).stdout
    until(lambda: call("status", "one").out.startswith("one is ready"), "it is ready")
    run = place.run("one")
    ask(run, key=key)
    assert call("scale", "one", 2).code == 0
    assert len(kubernetes.objects("statefulsets", "/apis/apps/v1")) == 2
    assert call("down", "one").code == 0
    kubernetes.kubectl("delete", "secret", "one-secrets")
