"""Applies the objects of a deployment and places its replicas, on the machine of `up` or in the controller's pod."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Sequence

from penstock import paths
from penstock.errors import PenstockError
from penstock.run_folder import Run, Unit, replica, unit_of
from penstock.targets.kubernetes import folder, manifests, objects, scaling, services, weights, words
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object, block_of
from penstock.targets.kubernetes.view import SETS, by_replica, look, revision_of
from penstock.targets.waiting import wait
from penstock.wire.announcement import engine_key, scrape_key

SPARE_S = 30.0  # beyond the pods' own grace, until the API has deleted them
_PLACED_S = 120.0  # a replica of several nodes gets so long before the next one is placed


def apply_shared(api: Api, run: Run, units: Collection[Unit]) -> Object:
    """Everything but replicas, and only the services that are named."""
    folder.note_cluster(run, api)
    rows = manifests.from_yaml(run.artifact().files[manifests.MANIFESTS])
    kinds = {unit.kind for unit in units}
    left_out = {name for kind, name in _services(run).items() if kind not in kinds}
    first, *rest = [row for row in rows if not manifests.is_replica(row)]
    anchor = apply(api, first)
    _write_secrets(api, run, anchor)
    if "controller" in kinds:
        folder.order(api, run, run.desired())
    _end_other_actuators(api, run, rest)
    for row in rest:
        if row["kind"] == "Deployment" and row["metadata"]["name"] in left_out:
            continue
        for subject in row.get("subjects", ()):
            if subject["name"] == objects.controller(run.name):
                subject["namespace"] = api.namespace
        if row["kind"] == "PodDisruptionBudget" and not api.knows(row["apiVersion"], row["kind"]):
            continue  # a cluster before 1.21: drains are not slowed down, and nothing else is lost
        apply(api, row if weights.is_kept(row) else objects.owned(row, anchor))
    return anchor


def _end_other_actuators(api: Api, run: Run, rows: Sequence[Object]) -> None:
    """Those of an earlier file: two would each set the number."""
    wanted = {(row["kind"], row["metadata"]["name"]) for row in rows}
    for kind in (*scaling.KINDS, "Deployment"):
        try:
            found = api.list(kind, objects.labels(run.name, scaling.COMPONENT))
        except ApiError as exc:
            if exc.status not in (403, 404):  # a cluster without KEDA, a user who never made one
                raise
            continue
        for name in [row["metadata"]["name"] for row in found]:
            if (kind, name) not in wanted:
                api.delete(kind, name)


def _write_secrets(api: Api, run: Run, anchor: Object) -> None:
    """The deployment's Secret, with what it has already: nodes and clients of an earlier `up` know that. Prometheus
    reads one of its own."""
    found = api.find("Secret", objects.secrets(run.name))
    data = dict((found or {}).get("data") or {})
    own = {folder.ADMIN_TOKEN: run.admin_token()}
    if run.first_key_file.exists():
        own[folder.FIRST_KEY] = run.first_key_file.read_text("utf-8").strip()
    for key, value in own.items():
        data.setdefault(key, base64.b64encode(value.encode()).decode())
    paths.write_atomically(run.admin_token_file, base64.b64decode(data[folder.ADMIN_TOKEN]), mode=0o600)
    if folder.FIRST_KEY in ((found or {}).get("data") or {}):
        run.first_key_file.unlink(missing_ok=True)
    token = base64.b64decode(data[folder.ADMIN_TOKEN]).decode().strip()
    scrape = {"token": base64.b64encode(scrape_key(engine_key(token)).encode()).decode()}
    for name, content in ((objects.secrets(run.name), data), (objects.scrape(run.name), scrape)):
        metadata = {"name": name, "labels": objects.labels(run.name)}
        row: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": content}
        api.apply(objects.owned(row, anchor), force=True)


def scale(api: Api, run: Run, units: Collection[Unit]) -> None:
    """Gateway, controller and chat page run when they are named. A gateway of a new number replaces one that hung."""
    for kind, name in _services(run).items():
        found = api.find("Deployment", name)
        wanted = {unit for unit in units if unit.kind == kind}
        if found is None:
            continue
        if not wanted:
            api.patch("Deployment", name, {"spec": {"replicas": 0}})
        elif found["spec"].get("replicas") == 0:
            n_pods = block_of(run.deployment()).gateways if kind == "gateway" else 1
            api.patch("Deployment", name, {"spec": {"replicas": n_pods}})
        elif kind == "gateway" and not wanted & set(map(unit_of, run.handle().units)) and run.handle().units:
            api.delete_all("Pod", objects.labels(run.name, kind))


def _services(run: Run) -> dict[str, str]:
    """The names of their Deployments."""
    name = run.name
    return {"gateway": objects.gateway(name), "controller": objects.controller(name), "ui": objects.ui(name)}


def place_replicas(api: Api, run: Run, anchor: Object, names: Sequence[str]) -> list[Unit]:
    kind = SETS[block_of(run.deployment()).shape]
    sets = by_replica(api.list(kind, objects.labels(run.name, "replica")))
    for name in sets.keys() - set(names):
        api.delete(kind, objects.replica_set(run.name, name))
    template = manifests.from_yaml(run.artifact().files[manifests.REPLICA])
    revision = revision_of(template[0])
    n_nodes, kept, refusals = run.plan().n_nodes, [], list[PenstockError]()
    for name in names:
        present = sets.get(name)
        try:
            if present is not None:
                present = _repaired(api, run, present, revision)
            if present is None:
                for row in manifests.instance(template, name):
                    apply(api, objects.owned(row, anchor))
                if n_nodes > 1 and name != names[-1]:  # else two replicas may each get half of the machines
                    _wait_placed(api, run, name, n_nodes)
            kept.append(replica(name))
        except ApiError as exc:
            refusals.append(exc)
    _wait_gone(api, run, sorted(sets.keys() - set(names)), run.plan().drain_s + SPARE_S)
    if refusals and {unit.name for unit in kept} == sets.keys():
        raise refusals[0]
    return kept


def _repaired(api: Api, run: Run, set_: Object, revision: str) -> Object | None:
    """The set as it is, without pods that stay on lost nodes; None for one of another revision that serves nothing,
    which was deleted."""
    view, name = look(api, run), set_["metadata"]["labels"][objects.REPLICA]
    now, pods = time.time(), view.of("replica", name)
    n_nodes = run.plan().n_nodes
    for pod in words.lost_pods(pods, now, view.events, view.lost_nodes, n_nodes):
        api.delete("Pod", pod["metadata"]["name"], grace_s=0)
    placement = words.placement_of_replica(set_, pods, view.events, n_nodes, revision, now, view.lost_nodes)
    if placement.state == "broken" and revision_of(set_) != revision:
        api.delete(set_["kind"], set_["metadata"]["name"])
        _wait_gone(api, run, [name], run.plan().drain_s + SPARE_S)
        return None
    return set_


def _wait_placed(api: Api, run: Run, name: str, n_nodes: int) -> None:
    def is_placed() -> bool:
        pods = api.list("Pod", objects.labels(run.name, "replica") | {objects.REPLICA: name})
        return sum(pod.get("spec", {}).get("nodeName") is not None for pod in pods) >= n_nodes

    wait(is_placed, _PLACED_S)


def _wait_gone(api: Api, run: Run, names: Sequence[str], timeout_s: float) -> None:
    """Until no pod of these replicas is left; then by force."""
    if not names:
        return

    def left() -> list[Object]:
        pods = api.list("Pod", objects.labels(run.name, "replica"))
        return [pod for pod in pods if pod["metadata"]["labels"].get(objects.REPLICA) in names]

    if not wait(lambda: not left(), timeout_s):
        for pod in left():
            api.delete("Pod", pod["metadata"]["name"], grace_s=0)


def allow(api: Api, run: Run, n_replicas: int) -> None:
    """Let the controller change more replicas than the file has: its Role names them. For verbs of a user."""
    if n_replicas > run.deployment().replicas.max:
        anchor = api.get("ConfigMap", objects.anchor(run.name))
        apply(api, objects.owned(services.role(run.deployment(), n_replicas), anchor))


def apply(api: Api, row: Object) -> Object:
    """Apply an object. Fields of an object that is ours are taken from other managers, those of others are not."""
    metadata = row["metadata"]
    found = api.find(row["kind"], metadata["name"])
    is_ours = found is not None and found["metadata"].get("labels", {}).get(objects.MANAGED_BY) == objects.MANAGER
    if is_ours and found is not None and (found.get("immutable") or row["kind"] == "PersistentVolumeClaim"):
        return found  # a claim may grow, and the size that we would ask for may be less
    if is_ours and found is not None and row["kind"] == "Job" and weights.has_failed(found):
        api.delete("Job", metadata["name"])
    return api.apply(row, force=is_ours)
