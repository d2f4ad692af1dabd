"""The judge of rendered documents finds what is wrong: one spoiled field at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from test_kubernetes_pods import file, launch, plan

from penstock.targets.kubernetes import replicas
from penstock.targets.kubernetes.objects import Object

schemas = pytest.importorskip("kubernetes_schemas")


def spoiled(change: Callable[[dict[str, Any]], None]) -> list[str]:
    """The problems of the documents of two replicas after `change`, which gets them by kind."""
    made = [*replicas.shared_objects(launch(plan(4)), file(replicas=2)), *replicas.replica(launch(plan(4)), file())]
    by_kind = {one["kind"]: copy.deepcopy(one) for one in made}
    a_set = by_kind["StatefulSet"]
    for where in (a_set["metadata"], a_set["spec"]["selector"], a_set["spec"]["template"]["metadata"]):
        where.get("labels", where.get("matchLabels"))["penstock.dev/replica"] = "0"
    a_set["metadata"]["name"] = "llama-r0"
    by_kind["pod"] = a_set["spec"]["template"]["spec"]
    by_kind["node"] = by_kind["pod"]["containers"][0]
    by_kind["node"]["command"][5] = "0"
    change(by_kind)
    documents = [one for kind, one in by_kind.items() if kind[0].isupper()]
    return schemas.problems_of(documents)  # type: ignore[no-any-return]


def set_at(place: str, *path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(documents: dict[str, Any]) -> None:
        row = documents[place]
        for step in path[:-1]:
            row = row[step]
        row[path[-1]] = value

    return change


def added(place: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda documents: documents[place].setdefault(field, []).append(value)


WRONG = {
    "an unknown field": (set_at("pod", "gpus", value=1), "'gpus' was unexpected"),
    "a wrong type": (set_at("StatefulSet", "spec", "replicas", value="2"), "is not of type 'integer'"),
    "a selector without pods": (
        set_at("StatefulSet", "spec", "selector", "matchLabels", "a", value="b"),
        "its selector does not match",
    ),
    "a quantity": (set_at("node", "resources", "limits", "cpu", value="2x"), "cpu: 2x is no quantity"),
    "too few GPUs": (set_at("node", "resources", "limits", "nvidia.com/gpu", value="2"), "2 GPUs for 4 ranks"),
    "no shared memory": (set_at("pod", "volumes", -1, "emptyDir", value={}), "/dev/shm is not in memory"),
    "a long name": (set_at("StatefulSet", "metadata", "name", value="a" * 53), "no label of at most 52"),
    "no label of ours": (set_at("Service", "metadata", "labels", value={}), "lacks the labels"),
    "a secret": (added("node", "env", {"name": "HF_TOKEN", "value": "x"}), "variable HF_TOKEN shows a secret"),
    "a password": (
        set_at("ConfigMap", "data", "a", value="postgresql://me:word@host/db"),
        "it shows what looks like a secret",
    ),
    "root": (set_at("pod", "securityContext", value={}), "may run as root"),
    "a writable root": (set_at("node", "securityContext", "readOnlyRootFilesystem", value=False), "can be written"),
    "a path of the host": (
        set_at("pod", "volumes", -1, value={"name": "shm", "hostPath": {"path": "/"}}),
        "restricted Pod Security refuses",
    ),
    "too large a map": (set_at("ConfigMap", "data", "a", value="x" * 2**20), "at most 1048576"),
    "a mount without a volume": (
        added("node", "volumeMounts", {"name": "z", "mountPath": "/z"}),
        "mounts differ: ['z']",
    ),
    "a short grace": (set_at("pod", "terminationGracePeriodSeconds", value=100), "before it kills its engine"),
    "a placeholder": (set_at("StatefulSet", "metadata", "name", value="llama-r{replica}"), "a placeholder is left"),
    "a liveness probe": (set_at("node", "livenessProbe", value={"exec": {"command": ["a"]}}), "liveness probe"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_judge_finds(what: str) -> None:
    change, problem = WRONG[what]
    problems = spoiled(change)
    assert [line for line in problems if problem in line], problems


def test_the_judge_has_nothing_against_what_is_sound() -> None:
    assert spoiled(lambda documents: None) == []


def custom(kind: str, spec: Object) -> list[str]:
    api, _, word = kind.rpartition("/")
    labels = {"app.kubernetes.io/managed-by": "penstock", "app.kubernetes.io/instance": "a"}
    metadata = {"name": "a", "labels": labels}
    return schemas.problems_of([{"apiVersion": api, "kind": word, "metadata": metadata, "spec": spec}])  # type: ignore[no-any-return]


def test_durations_compare_and_kinds_without_a_definition_are_named() -> None:
    monitor = {"selector": {}, "endpoints": [{"port": "http", "interval": "15s", "timeout": "30s"}]}
    (problem,) = custom("monitoring.googleapis.com/v1/PodMonitoring", monitor)
    assert "timeout" in problem
    assert "no Widget" in custom("example.com/v1/Widget", {})[0]


def test_custom_kinds_are_judged_by_their_definition_and_its_rules() -> None:
    kind = "gateway.networking.k8s.io/v1/HTTPRoute"
    path = {"type": "PathPrefix", "value": "/"}
    spec = {"parentRefs": [{"name": "gw"}], "rules": [{"matches": [{"path": path}]}]}
    assert custom(kind, spec) == []
    assert "unexpected" in custom(kind, spec | {"host": "a"})[0]
    # A rule in CEL: paths start with a slash.
    (problem,) = custom(kind, {"rules": [{"matches": [{"path": path | {"value": "v1"}}]}]})
    assert "path" in problem
