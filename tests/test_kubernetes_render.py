"""`render` for target kubernetes: one YAML stream, offline, the same each time, legal, and what the goldens say."""

from __future__ import annotations

import copy
import re
import socket
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from golden_files import table
from kubernetes_control_plane import CACHE
from kubernetes_goldens import kept
from kubernetes_schemas import problems_of
from launching import call

from penstock.targets.kubernetes import manifests
from penstock.targets.kubernetes.objects import Object

SHAPES: dict[str, dict[str, Any]] = table("kubernetes/shapes.yaml")


def file_of(folder: Path, shape: str) -> Path:
    path = folder / f"{shape}.yaml"
    fields = SHAPES[shape]
    engine = {"kind": "vllm", "max_model_len": 8192, **fields.get("engine", {})}
    path.write_text(yaml.safe_dump({"name": "llama", "target": "kubernetes", **fields, "engine": engine}), "utf-8")
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, no program, and a home without anything."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("`render` asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_SECRET", "never-in-a-manifest")
    return tmp_path


def rendered(folder: Path, shape: str) -> str:
    done = call("render", file_of(folder, shape))
    assert done.code == 0, done
    return done.out


def plain(stream: str) -> str:
    """Without what each change of penstock's code changes: hashes, the archive, launch and plan."""
    rows = manifests.from_yaml(stream)
    for row in rows:
        for field in ("data", "binaryData"):
            if row["kind"] == "ConfigMap" and field in row:
                row[field] = sorted(row[field])
    text = stream.partition("---\n")[0] + manifests.to_yaml(rows)
    text = re.sub(r"(llama-(?:code|launch|weights)-)[0-9a-f]{10}", r"\1HASH", text)
    return re.sub(r"(penstock.dev/(?:revision|config): )'?[0-9a-f]{10,16}'?", r"\1HASH", text)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_rendered_offline_and_twice_the_same_and_as_its_golden(shape: str, alone: Path) -> None:
    stream = rendered(alone, shape)
    assert rendered(alone, shape) == stream
    assert "never-in-a-manifest" not in stream
    assert plain(stream) == kept(f"{shape}.yaml", plain(stream))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_legal_for_the_oldest_and_the_newest_kubernetes(shape: str, alone: Path) -> None:
    assert problems_of(manifests.from_yaml(rendered(alone, shape))) == []


@pytest.mark.hosts
def test_kubectl_takes_the_stream_and_kustomize_changes_it(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = str(CACHE / "kubectl")
    base = alone / "base"
    base.mkdir()
    (base / "all.yaml").write_text(rendered(alone, "one-gpu"), "utf-8")
    (base / "kustomization.yaml").write_text("namespace: team\nresources: [all.yaml]\n", "utf-8")
    built = subprocess.run([kubectl, "kustomize", str(base)], capture_output=True, text=True, check=True).stdout
    rows, ours = manifests.from_yaml(built), manifests.from_yaml((base / "all.yaml").read_text("utf-8"))
    assert {row["metadata"]["namespace"] for row in rows} == {"team"}
    names = {(row["kind"], row["metadata"]["name"]) for row in rows}
    assert names == {(row["kind"], row["metadata"]["name"]) for row in ours}
    [binding] = [row for row in rows if row["kind"] == "RoleBinding"]
    assert binding["subjects"][0]["namespace"] == "team"


@pytest.mark.parametrize(
    "word", ["12e34567", "1e5", "+.5", "0o17", "017", "1_0", "y", "N", "no", "1.", "0x1f", "null", "2026-01-01"]
)
def test_a_word_that_kubectl_would_not_read_as_text_is_quoted(word: str) -> None:
    assert f": '{word}'\n" in manifests.to_yaml([{"a": word}])


def test_numbers_and_words_stay_plain() -> None:
    assert manifests.to_yaml([{"a": 1.5, "b": 10, "c": True, "d": "e5", "e": "1e5x", "f": "yes-no"}]) == (
        "---\na: 1.5\nb: 10\nc: true\nd: e5\ne: 1e5x\nf: yes-no\n"
    )


# ---- the judge of documents, by one spoiled field at a time ----------------------------------------------------------

TOO_BIG = ("ConfigMap", "data a", "x" * 2**20, "at most 1048576")
WRONG: list[tuple[str, str, Any, str]] = [*table("kubernetes/spoiled.yaml"), TOO_BIG]


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
        problems = problems_of(spoiled(documents, kind, place, value))
        assert [line for line in problems if words in line], (words, problems)


def custom(kind: str, spec: Object) -> list[str]:
    api, _, word = kind.rpartition("/")
    labels = {"app.kubernetes.io/managed-by": "penstock", "app.kubernetes.io/instance": "a"}
    metadata = {"name": "a", "labels": labels}
    return problems_of([{"apiVersion": api, "kind": word, "metadata": metadata, "spec": spec}])


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
