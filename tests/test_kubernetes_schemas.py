"""The judge of rendered documents finds what is wrong: one spoiled field at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from test_kubernetes_render import rendered

from penstock.targets.kubernetes import manifests
from penstock.targets.kubernetes.objects import Object

schemas = pytest.importorskip("kubernetes_schemas")

SET = "spec template spec"
NODE = f"{SET} containers 0"
DISK = {"name": "shm", "hostPath": {"path": "/"}}
WRONG: list[tuple[str, str, Any, str]] = [  # kind, place, value, words of the problem
    ("StatefulSet", f"{SET} gpus", 1, "'gpus' was unexpected"),
    ("StatefulSet", "spec replicas", "2", "is not of type 'integer'"),
    ("StatefulSet", "spec selector matchLabels a", "b", "its selector does not match"),
    ("StatefulSet", f"{NODE} resources limits cpu", "2x", "cpu: 2x is no quantity"),
    ("StatefulSet", f"{NODE} resources limits nvidia.com/gpu", "2", "2 GPUs for 8 ranks"),
    ("StatefulSet", f"{SET} volumes -1 emptyDir", {}, "/dev/shm is not in memory"),
    ("StatefulSet", "metadata name", "a" * 53, "no label of at most 52"),
    ("Service", "metadata labels", {}, "lacks the labels"),
    ("StatefulSet", f"{NODE} env 0", {"name": "HF_TOKEN", "value": "x"}, "variable HF_TOKEN shows a secret"),
    ("ConfigMap", "data a", "postgresql://me:word@host/db", "it shows what looks like a secret"),
    ("StatefulSet", f"{SET} securityContext", {}, "may run as root"),
    ("StatefulSet", f"{NODE} securityContext readOnlyRootFilesystem", False, "can be written"),
    ("StatefulSet", f"{SET} volumes -1", DISK, "restricted Pod Security refuses"),
    ("ConfigMap", "data a", "x" * 2**20, "at most 1048576"),
    ("StatefulSet", f"{NODE} volumeMounts 0", {"name": "z", "mountPath": "/z"}, "mounts differ: ['z']"),
    ("StatefulSet", f"{SET} terminationGracePeriodSeconds", 100, "before it kills its engine"),
    ("StatefulSet", "metadata name", "llama-r{replica}", "a placeholder is left"),
    ("StatefulSet", f"{NODE} livenessProbe", {"exec": {"command": ["a"]}}, "liveness probe"),
    ("Service", "spec selector a", "b", "it selects no pods"),
    ("StatefulSet", f"{SET} volumes 2 configMap name", "other", "there is no ConfigMap/other"),
]


def spoiled(documents: list[Object], kind: str, place: str, value: Any) -> list[Object]:
    """Documents whose first of a kind has another value at a place."""
    changed = copy.deepcopy(documents)
    row: Any = next(document for document in changed if document["kind"] == kind)
    *steps, last = [int(step) if step.lstrip("-").isdigit() else step for step in place.split()]
    for step in steps:
        row = row[step]
    row[last] = value
    return changed


def test_the_judge_finds_what_is_wrong(tmp_path: Path) -> None:
    kinds = {row[0] for row in WRONG}
    documents = [row for row in manifests.from_yaml(rendered(tmp_path, "gpus-of-a-node")) if row["kind"] in kinds]
    for kind, place, value, words in WRONG:
        problems = schemas.problems_of(spoiled(documents, kind, place, value))
        assert [line for line in problems if words in line], (words, problems)


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
