"""All objects of a deployment in the order in which they are applied, as one YAML stream. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.run_folder import Artifact, Launch
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import monitoring, objects, pods, replicas, scaling, services, traffic, weights
from penstock.targets.kubernetes.objects import Object

MANIFESTS, REPLICA = "manifests.yaml", "replica.yaml"
# What kubectl (go-yaml) would not read as text although PyYAML does, so that it needs quotes: a digest like 12e34567.
_READ_BY_GO = {
    "float": r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$",
    "int": r"^[-+]?0[oO]?[0-9]+$",
    "bool": r"^[yYnN]$",
}
_HEAD = """\
# Made by `penstock render`, for namespace {namespace}. Apply it with: kubectl apply --server-side -f -
# The Secret {secret} is not here. Without `penstock up`, make it first:
#   kubectl create secret generic {secret} --from-literal=admin-token="$(openssl rand -hex 24)"{key}
# The Secret {scrape}, for Prometheus, follows from that token: docs/how-to/kubernetes.md.
"""
_HEAD_KEY = """ \\
#     --from-literal=first-key-hash="$(printf %s "$KEY" | sha256sum | cut -d' ' -f1)"   # KEY: the first client's\
"""


class Cluster(msgspec.Struct, frozen=True):
    """What a cluster has: which objects its Prometheus reads, whether its Gateways are Google's, and its newest HPA."""

    monitors: monitoring.Kinds = "annotations"
    is_gke: bool = False
    hpa: scaling.HpaVersion = "autoscaling/v2"


def artifact(launch: Launch, deployment: Deployment, cluster: Cluster) -> Artifact:
    """What `up` applies. `document` is the whole stream; of replicas there is also the template of one."""
    there = in_pods(launch, deployment)
    storage = weights.storage(deployment, there.plan)
    template = replicas.replica(there, deployment, storage)
    files = _controller_files(there, deployment, template)
    shared = _shared_objects(there, deployment, cluster, storage, files)
    first = [instance(template, str(number)) for number in range(deployment.replicas.first)]
    name = deployment.name
    key = _HEAD_KEY if deployment.gateway.auth == "keys" else ""
    space = objects.block_of(deployment).namespace or "default (kubernetes.namespace names another)"
    head = _HEAD.format(namespace=space, secret=objects.secrets(name), scrape=objects.scrape(name), key=key)
    stream = head + to_yaml(_in_namespace([*shared, *(row for rows in first for row in rows)], deployment))
    argv = ("kubectl", "apply", "--server-side", f"--field-manager={objects.MANAGER}", "-f", MANIFESTS)
    return Artifact(argv, {**files, MANIFESTS: stream}, MANIFESTS)


def in_pods(launch: Launch, deployment: Deployment) -> Launch:
    """The launch as the pods have it: their paths, and the gateway by its name in the cluster."""
    plan = weights.in_pods(launch.plan, deployment)
    stage = weights.STAGE_FOLDER if weights.is_staged(deployment) else "none"
    cache = msgspec.structs.replace(deployment.cache, stage=stage)
    return replicas.in_pods(msgspec.structs.replace(launch, plan=plan, cache=cache), deployment)


def _in_namespace(rows: Iterable[Object], deployment: Deployment) -> list[Object]:
    """The objects with the namespace that the file names, if it does: else they go to the one that kubectl uses."""
    space = objects.block_of(deployment).namespace
    where = {} if space is None else {"namespace": space}
    return [row | {"metadata": {"name": row["metadata"]["name"], **where, **row["metadata"]}} for row in rows]


def _shared_objects(
    launch: Launch, deployment: Deployment, cluster: Cluster, storage: replicas.Storage, files: dict[str, str]
) -> list[Object]:
    """All but the replicas; the anchor first."""
    plan = launch.plan
    data = _run_data(launch, deployment, files)
    anchor = services.anchor(deployment, data)
    anchor["metadata"]["annotations"] = {objects.CONFIG: files[objects.CONFIG_FILE]}
    return [
        anchor,
        pods.code_map(deployment, pods.archive()),
        *weights.objects_of(deployment, plan),
        *replicas.shared_objects(launch, deployment, storage),
        *traffic.exposed(deployment, cluster.is_gke, cluster.monitors),
        *monitoring.monitors(deployment, cluster.monitors),
        *services.gateway(deployment, plan, cluster.monitors),
        *services.controller(deployment, plan),
        *scaling.objects_of(deployment, plan, cluster.hpa, cluster.monitors == "google"),
        *services.page(deployment, plan),
    ]


def _controller_files(launch: Launch, deployment: Deployment, template: Sequence[Object]) -> dict[str, str]:
    """The files of the artifact that the controller needs."""
    text = to_yaml(template)
    config = hashlib.sha256(f"{reading.to_yaml(deployment)}{text}{_json(launch)}".encode()).hexdigest()[:16]
    return {REPLICA: text, objects.CONFIG_FILE: config}


def _run_data(launch: Launch, deployment: Deployment, files: dict[str, str]) -> dict[str, str]:
    return {
        "spec.yaml": reading.to_yaml(deployment),
        "plan.json": _json(launch.plan),
        "artifact.json": _json(Artifact((), files)),
    }


def instance(template: Sequence[Object], replica: str) -> list[Object]:
    """The objects of one replica."""
    rows: list[Object] = json.loads(json.dumps(template).replace(replicas.NUMBER, replica))
    return rows


def is_replica(row: Object) -> bool:
    return objects.REPLICA in row["metadata"].get("labels", {})


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


@functools.cache
def _dumper() -> type:
    """Text of several lines as a block; no aliases, which kubectl reads but people do not."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def block(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    for tag, words in _READ_BY_GO.items():
        Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(words), None)
    return Dumper


def to_yaml(rows: Iterable[Mapping[str, Any]]) -> str:
    """One document for each object, fields in our order."""
    import yaml

    options: Any = {"Dumper": _dumper(), "sort_keys": False, "width": 10_000, "allow_unicode": True}
    return "".join(f"---\n{yaml.dump(row, **options)}" for row in rows)


def from_yaml(stream: str) -> list[Object]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [row for row in yaml.load_all(stream, Loader=loader) if row]
