"""Target "kubernetes": a replica is a StatefulSet (or a LeaderWorkerSet), gateway and controller are Deployments.

`up` applies all objects; from then on the controller in the cluster places and ends replicas. Everything belongs to one
ConfigMap, the anchor, so that any machine with the kubeconfig can end it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from penstock import paths
from penstock.errors import PenstockError, Problem, UserError
from penstock.hardware import Machine
from penstock.run_folder import (
    Artifact,
    Desired,
    Handle,
    Kind,
    Launch,
    Left,
    Run,
    Unit,
    is_locked,
    living,
    order,
    replica,
    unit_of,
)
from penstock.spec.deployment import Deployment
from penstock.targets import Adopted, Placement, Target, Tunnel, machines_of_file
from penstock.targets.kubernetes import (
    access,
    checks,
    folder,
    manifests,
    monitoring,
    objects,
    pod_logs,
    reasons,
    weights,
    words,
)
from penstock.targets.kubernetes.api import Api, ApiError, connect
from penstock.targets.kubernetes.objects import Object, block_of
from penstock.wire.announcement import engine_key, scrape_key

_FRESH_S = 1.0
_POLL_S = 0.3
_SPARE_S = 30.0  # beyond the pods' own grace, until the API has deleted them
_PLACED_S = 120.0  # a replica of several nodes gets so long before the next one is placed
_SETS = {"statefulset": "StatefulSet", "lws": "LeaderWorkerSet"}
# All that a deployment may have, in the order in which it is deleted; the anchor is last.
_KINDS = (
    *("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "Ingress", "HTTPRoute", "InferencePool", "Service"),
    *("PodDisruptionBudget", "NetworkPolicy", "GCPBackendPolicy", "PodMonitoring", "ServiceMonitor", "PodMonitor"),
    *("RoleBinding", "Role", "ServiceAccount", "Secret", "PersistentVolumeClaim", "ConfigMap"),
)


class _View(msgspec.Struct, frozen=True):
    """What the API said of one deployment, at a moment in monotonic seconds."""

    at: float
    sets: dict[str, Object] = {}
    deployments: dict[str, Object] = {}
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    lost_nodes: frozenset[str] = frozenset()

    def of(self, component: str, replica: str | None = None) -> list[Object]:
        wanted = {objects.COMPONENT: component} | ({objects.REPLICA: replica} if replica is not None else {})
        return [pod for pod in self.pods if wanted.items() <= pod["metadata"].get("labels", {}).items()]


class Kubernetes(Target):
    name = "kubernetes"
    capabilities = frozenset({"places-gateway", "rolls", "tunnels", "keeps-weights"})
    listen = "network"
    has_own_caches = True
    fetches_models = True
    is_elastic = True
    executor = "mp"  # the engine's image has no Ray

    def __init__(self) -> None:
        self._apis: dict[tuple[str | None, str | None], Api] = {}
        self._last: dict[str, dict[Unit, Placement]] = {}
        self._views: dict[str, _View] = {}
        self._publisher = folder.Publisher()
        self._cluster: manifests.Cluster | None = None  # as last asked; `render` asks nothing
        self._has_nodes = True

    # ---- before ------------------------------------------------------------------------------------------------------

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        return objects.PLACED

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        problems = checks.file_problems(deployment)
        if problems or is_rehearsal:
            return problems
        try:
            api = self._api(deployment)
        except PenstockError as exc:
            return [Problem("target", exc.message, exc.hint)]
        self._cluster = manifests.Cluster(_monitors(api), api.knows("networking.gke.io/v1", "GCPBackendPolicy"))
        return checks.problems(api, deployment)

    def warnings(self, deployment: Deployment) -> tuple[str, ...]:
        return weights.warnings(deployment)

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        if is_rehearsal:
            names = [f"node-{rank + 1}" for rank in range(deployment.hardware.nodes)]
            return machines_of_file(deployment, names, "a rehearsal does not ask the cluster")
        return checks.machines(self._api(deployment), deployment)

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        wanted = block_of(deployment).monitoring
        cluster = self._cluster or manifests.Cluster(is_gke=wanted == "google")
        if wanted != "auto":
            cluster = msgspec.structs.replace(cluster, monitors=wanted)
        return manifests.artifact(launch, deployment, cluster)

    # ---- placing -----------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        api = self._api_of(run)
        is_inside = folder.is_inside(run)
        has_controller = not is_inside and api.find("Deployment", objects.controller(run.name)) is not None
        anchor = (
            self._apply_shared(api, run, units) if not is_inside else api.get("ConfigMap", objects.anchor(run.name))
        )
        self._scale(api, run, units)
        if has_controller and any(unit.kind == "controller" for unit in units):
            return _handle(units)  # the replicas are the controller's business
        kept = self._place_replicas(api, run, anchor, sorted(unit.name for unit in units if unit.kind == "replica"))
        self._views.pop(str(run.path), None)
        return _handle([*kept, *(unit for unit in units if unit.kind != "replica")])

    def _apply_shared(self, api: Api, run: Run, units: Collection[Unit]) -> Object:
        """Everything but replicas, and only the services that are named."""
        folder.note_cluster(run, api)
        rows = manifests.from_yaml(run.artifact().files[manifests.MANIFESTS])
        kinds = {unit.kind for unit in units}
        left_out = {objects.gateway(run.name)} if "gateway" not in kinds else set()
        left_out |= {objects.controller(run.name)} if "controller" not in kinds else set()
        first, *rest = [row for row in rows if not manifests.is_replica(row)]
        anchor = _apply(api, first)
        self._write_secrets(api, run, anchor)
        if "controller" in kinds:
            folder.order(api, run, run.desired())
        for row in rest:
            if row["kind"] == "Deployment" and row["metadata"]["name"] in left_out:
                continue
            for subject in row.get("subjects", ()):
                if subject["name"] == objects.controller(run.name):
                    subject["namespace"] = api.namespace
            if row["kind"] == "PodDisruptionBudget" and not api.knows(row["apiVersion"], row["kind"]):
                continue  # a cluster before 1.21: drains are not slowed down, and nothing else is lost
            _apply(api, row if weights.is_kept(row) else objects.owned(row, anchor))
        return anchor

    def _write_secrets(self, api: Api, run: Run, anchor: Object) -> None:
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

    def _scale(self, api: Api, run: Run, units: Collection[Unit]) -> None:
        """Gateway and controller run when they are named. A gateway of a new number replaces one that hung."""
        names = {"gateway": objects.gateway(run.name), "controller": objects.controller(run.name)}
        for kind, name in names.items():
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

    def _place_replicas(self, api: Api, run: Run, anchor: Object, names: Sequence[str]) -> list[Unit]:
        kind = _SETS[block_of(run.deployment()).shape]
        sets = _by_replica(api.list(kind, objects.labels(run.name, "replica")))
        for name in sets.keys() - set(names):
            api.delete(kind, objects.replica_set(run.name, name))
        template = manifests.from_yaml(run.artifact().files[manifests.REPLICA])
        revision = _revision_of(template[0])
        n_nodes, kept, refusals = run.plan().n_nodes, [], list[PenstockError]()
        for name in names:
            present = sets.get(name)
            try:
                if present is not None:
                    present = self._repaired(api, run, present, revision)
                if present is None:
                    for row in manifests.instance(template, name):
                        _apply(api, objects.owned(row, anchor))
                    if n_nodes > 1 and name != names[-1]:  # else two replicas may each get half of the machines
                        self._wait_placed(api, run, name, n_nodes)
                kept.append(replica(name))
            except ApiError as exc:
                refusals.append(exc)
        self._wait_gone(api, run, sorted(sets.keys() - set(names)), run.plan().drain_s + _SPARE_S)
        if refusals and {unit.name for unit in kept} == sets.keys():
            raise refusals[0]
        return kept

    def _repaired(self, api: Api, run: Run, set_: Object, revision: str) -> Object | None:
        """The set as it is, without pods that stay on lost nodes; None for one of another revision that serves nothing,
        which was deleted."""
        view, name = self._view(api, run), set_["metadata"]["labels"][objects.REPLICA]
        now, pods = time.time(), view.of("replica", name)
        for pod in pods:
            if words.is_lost(pod, now, view.events, view.lost_nodes):
                api.delete("Pod", pod["metadata"]["name"], grace_s=0)
        placement = words.placement_of_replica(
            set_, pods, view.events, run.plan().n_nodes, revision, now, view.lost_nodes
        )
        if placement.state == "broken" and _revision_of(set_) != revision:
            api.delete(set_["kind"], set_["metadata"]["name"])
            self._wait_gone(api, run, [name], run.plan().drain_s + _SPARE_S)
            return None
        return set_

    def _wait_placed(self, api: Api, run: Run, name: str, n_nodes: int) -> None:
        def is_placed() -> bool:
            pods = api.list("Pod", objects.labels(run.name, "replica") | {objects.REPLICA: name})
            return sum(pod.get("spec", {}).get("nodeName") is not None for pod in pods) >= n_nodes

        _wait(is_placed, _PLACED_S)

    def _wait_gone(self, api: Api, run: Run, names: Sequence[str], timeout_s: float) -> None:
        """Until no pod of these replicas is left; then by force."""
        if not names:
            return

        def left() -> list[Object]:
            pods = api.list("Pod", objects.labels(run.name, "replica"))
            return [pod for pod in pods if pod["metadata"]["labels"].get(objects.REPLICA) in names]

        if not _wait(lambda: not left(), timeout_s):
            for pod in left():
                api.delete("Pod", pod["metadata"]["name"], grace_s=0)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def status(self, run: Run) -> dict[Unit, Placement]:
        units = sorted(map(unit_of, run.handle().units), key=order)
        before = self._last.get(str(run.path), {})
        try:
            api = self._api_of(run)
            view = self._view(api, run)
        except PenstockError as exc:
            # What the API does not tell has not changed: pods run without it.
            unknown = Placement("placed", exc.message)
            return {unit: msgspec.structs.replace(before.get(unit, unknown), reason=exc.message) for unit in units}
        now, revision = time.time(), _revision_of(manifests.from_yaml(run.artifact().files[manifests.REPLICA])[0])
        placements = {}
        for unit in units:
            if unit.kind == "replica":
                placements[unit] = words.placement_of_replica(
                    view.sets.get(unit.name), view.of("replica", unit.name), view.events, run.plan().n_nodes, revision,
                    now, view.lost_nodes,
                )  # fmt: skip
                placements[unit] = _with_weights(api, run, placements[unit], view.of("replica", unit.name))
            else:
                found = view.deployments.get(f"{run.name}-{unit.kind}")
                placements[unit] = words.placement_of_deployment(found, view.of(unit.kind), view.events, now)
        self._last[str(run.path)] = placements
        running = [u.name for u, place in placements.items() if u.kind == "gateway" and place.state == "placed"]
        if running:
            folder.note_gateway(api, run, running[-1])
        return placements

    def _view(self, api: Api, run: Run) -> _View:
        before = self._views.get(str(run.path))
        if before is not None and time.monotonic() - before.at < _FRESH_S:
            return before
        fetch = weights.COMPONENT
        every_pod = api.list("Pod", objects.labels(run.name))
        pods = tuple(pod for pod in every_pod if pod["metadata"]["labels"].get(objects.COMPONENT) != fetch)
        is_quiet = all(_is_ready(pod) for pod in pods)
        lost = frozenset[str]() if is_quiet else self._lost_nodes(api)
        events = () if is_quiet and pods else tuple(api.list("Event"))
        sets = api.list(_SETS[block_of(run.deployment()).shape], objects.labels(run.name, "replica"))
        deployments = {row["metadata"]["name"]: row for row in api.list("Deployment", objects.labels(run.name))}
        view = _View(time.monotonic(), _by_replica(sets), deployments, pods, events, lost)
        self._views[str(run.path)] = view
        return view

    def _lost_nodes(self, api: Api) -> frozenset[str]:
        """Nodes that are not ready; none where we may not read nodes."""
        if not self._has_nodes:
            return frozenset()
        try:
            nodes = api.list("Node")
        except ApiError as exc:
            self._has_nodes = exc.status != 403
            return frozenset()
        return frozenset(node["metadata"]["name"] for node in nodes if not _is_ready(node))

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        return pod_logs.lines(self._api_of(run), run, unit, follow, last)

    # ---- the run folder ----------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> None:
        api, is_inside = self._api_of(run), folder.is_inside(run)
        if not (is_inside or is_locked(run) or run.state() is None):
            folder.follow(api, run)
        folder.fetch(api, run)
        if is_inside:
            sets = api.list(_SETS[block_of(run.deployment()).shape], objects.labels(run.name, "replica"))
            names = {unit.name: unit for unit in map(unit_of, run.handle().units) if unit.kind == "gateway"}
            gateway = names or {"0": Unit("gateway", "0")}
            run.write_handle(_handle([*map(replica, _by_replica(sets)), *gateway.values(), Unit("controller", "0")]))

    def order(self, run: Run, desired: Desired) -> None:
        folder.order(self._api_of(run), run, desired)

    def keep_up(self, run: Run) -> None:
        if folder.is_inside(run):
            with contextlib.suppress(PenstockError):  # the next call tries again; `status` has the reason
                api = self._api_of(run)
                self._publisher.exchange(api, run, time.monotonic())
                self._release_lost(api, run)

    def _release_lost(self, api: Api, run: Run) -> None:
        """Delete a gateway's pods that stay on lost nodes: the next one waits for their claim, next to them."""
        view, now = self._view(api, run), time.time()
        for pod in (*view.of("gateway"), *view.of("controller")):
            if words.is_lost(pod, now, view.events, view.lost_nodes):
                api.delete("Pod", pod["metadata"]["name"], grace_s=0)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, run: Run, grace_s: float) -> None:
        api, name = self._api_of(run), run.name
        anchor = api.find("ConfigMap", objects.anchor(name))
        for kind in ("controller", "gateway"):
            if api.delete("Deployment", f"{name}-{kind}"):
                _wait(functools.partial(_has_no_pod, api, name, kind), grace_s + _SPARE_S)
        for kind in ("StatefulSet", "LeaderWorkerSet", "Job"):
            if kind != "LeaderWorkerSet" or api.knows(*_LWS):
                api.delete_all(kind, objects.labels(name))
        self._end_pods(api, name, grace_s)
        for kind in _KINDS:
            for row in _listed(api, kind, objects.labels(name)):
                if not weights.is_kept({"kind": kind, **row}):
                    api.delete(kind, row["metadata"]["name"])
        if anchor is not None:
            api.delete("ConfigMap", objects.anchor(name), propagation="Background")
        self._views.pop(str(run.path), None)

    def _end_pods(self, api: Api, name: str, grace_s: float) -> None:
        """Their sets are deleted: wait until they have drained, at most `grace_s`, then by force."""
        labels = objects.labels(name)

        def left() -> list[Object]:
            return api.list("Pod", labels)

        for force_s, wait_s in ((None, grace_s), (1, _SPARE_S), (0, _SPARE_S)):
            pods = left()
            for pod in pods:
                if force_s is not None or "deletionTimestamp" not in pod["metadata"]:
                    api.delete("Pod", pod["metadata"]["name"], grace_s=force_s)
            if not pods or _wait(lambda: not left(), wait_s):
                return
        raise PenstockError(
            f'could not end {len(left())} pods of "{name}"', hint=f"kubectl get pods -l {objects.selector(labels)}",
            is_retryable=True,
        )  # fmt: skip

    def end_weights(self, run: Run) -> None:
        api, source = self._api_of(run), weights.source_of(run.deployment())
        if source is None or source.kind != "claim":
            return
        pods = api.list("Pod", {objects.MANAGED_BY: objects.MANAGER})
        users = {pod["metadata"]["labels"][objects.INSTANCE] for pod in pods if weights.mounts(pod, source.name)}
        if users:
            message = f'cannot remove the weights in claim "{source.name}": {", ".join(sorted(users))} uses them'
            raise UserError(message, hint=f"End it first: penstock down {min(users)}")
        api.delete("PersistentVolumeClaim", source.name)
        _wait(lambda: api.find("PersistentVolumeClaim", source.name) is None, _SPARE_S)

    # ---- from any machine --------------------------------------------------------------------------------------------

    def adopt(self, name: str, deployment: Deployment | None = None) -> Adopted | None:
        if not access.is_configured():
            return None
        api = self._connected(None, None) if deployment is None else self._api(deployment)
        if deployment is None and api.find("ConfigMap", objects.anchor(name)) is None:
            api = self._elsewhere(api, name)
        run = folder.adopt(api, name)
        return None if run is None else Adopted(run, f'context "{api.context}", namespace "{api.namespace}"')

    def _elsewhere(self, api: Api, name: str) -> Api:
        """The API of the only other namespace that has such a deployment; `api` where we may not ask, or none has."""
        wanted = f"metadata.name={objects.anchor(name)}"
        try:
            rows = api.list("ConfigMap", objects.labels(name), all_namespaces=True, fields=wanted)
        except ApiError as exc:
            if exc.status != 403:
                raise
            return api
        return self._connected(api.context, rows[0]["metadata"]["namespace"]) if len(rows) == 1 else api

    def leftovers(self) -> list[Left]:
        if not access.is_configured():
            return []
        places = {(cluster.context, cluster.namespace) for cluster in map(folder.cluster_of, living()) if cluster}
        current = self._connected(None, None)
        apis = [self._connected(*place) for place in sorted(places - {(current.context, current.namespace)}, key=str)]
        return [left for api in [current, *apis] for left in _without_anchor(api)]

    def tunnel(self, run: Run, port: int) -> AbstractContextManager[Tunnel]:
        api = self._api_of(run)
        return access.port_forward(
            api.context, api.namespace, objects.gateway(run.name), run.deployment().gateway.port, port
        )

    def inside(self, run: Run, words: Sequence[str], is_terminal: bool) -> list[str]:
        api = self._api_of(run)
        store = run.deployment().gateway.store or f"{objects.STORE_FOLDER}/store.sqlite"
        argv = ["env", f"PENSTOCK_STORE={store}", "python3", "-m", "penstock", *words]
        workload = f"deployment/{objects.gateway(run.name)}"
        return access.exec_argv(api.context, api.namespace, workload, "gateway", argv, is_terminal)

    # ---- the API -----------------------------------------------------------------------------------------------------

    def _api(self, deployment: Deployment) -> Api:
        if folder.is_in_pod():
            return self._connected(None, None)
        block = block_of(deployment)
        return self._connected(block.context, block.namespace)

    def _api_of(self, run: Run) -> Api:
        """Of the cluster that the run was started in, whatever the kubeconfig says by now."""
        cluster = folder.cluster_of(run)
        return self._api(run.deployment()) if cluster is None else self._connected(cluster.context, cluster.namespace)

    def _connected(self, context: str | None, namespace: str | None) -> Api:
        if (context, namespace) not in self._apis:
            self._apis[context, namespace] = connect(context, namespace)
        return self._apis[context, namespace]


def finish(left: Left) -> None:
    """Delete what is left of a deployment without an anchor. Raises PenstockError."""
    api = connect(left.facts["context"], left.facts["namespace"])
    if api.find("ConfigMap", objects.anchor(left.run_id)) is not None:
        raise PenstockError(f'cannot remove objects of "{left.run_id}": it was started again')
    for kind, name in left.facts["objects"]:
        api.delete(kind, name)


def _without_anchor(api: Api) -> list[Left]:
    """Objects with our labels whose deployment's anchor is gone, by deployment; not those that keep weights."""
    ours = {objects.MANAGED_BY: objects.MANAGER}
    by_name: dict[str, list[tuple[str, str]]] = {}
    for kind in _KINDS:
        for row in _listed(api, kind, ours):
            labels, own_name = row["metadata"]["labels"], row["metadata"]["name"]
            if not weights.is_kept({"kind": kind, **row}):
                by_name.setdefault(labels.get(objects.INSTANCE, ""), []).append((kind, own_name))
    place = f'namespace "{api.namespace}" of context "{api.context}"'
    return [
        Left(
            Kubernetes.name, name, place, f'{len(rows)} objects of "{name}"',
            {"context": api.context, "namespace": api.namespace, "objects": rows},
        )
        for name, rows in sorted(by_name.items())
        if ("ConfigMap", objects.anchor(name)) not in rows
    ]  # fmt: skip


_LWS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")


def _handle(units: Collection[Unit]) -> Handle:
    return Handle(Kubernetes.name, {unit.key: {} for unit in sorted(units, key=order)})


def _by_replica(sets: Sequence[Object]) -> dict[str, Object]:
    return {row["metadata"]["labels"][objects.REPLICA]: row for row in sets}


def _revision_of(set_: Object) -> str:
    return str(set_["metadata"].get("labels", {}).get(objects.REVISION, ""))


def _is_ready(row: Object) -> bool:
    conditions = row.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _with_weights(api: Api, run: Run, placement: Placement, pods: Sequence[Object]) -> Placement:
    """With the progress of the weights that it waits for."""
    if not placement.reason or reasons.WAITS not in placement.reason:
        return placement
    try:
        said, is_lost = pod_logs.of_weights(api, run.name, pods)
    except ApiError:  # without the right to read logs, or a container that has just ended
        return placement
    reason = said if is_lost else placement.reason.replace(reasons.WAITS, said)
    return msgspec.structs.replace(placement, reason=reason, is_final=is_lost)


def _has_no_pod(api: Api, name: str, component: str) -> bool:
    return not api.list("Pod", objects.labels(name, component))


def _listed(api: Api, kind: str, labels: Mapping[str, str]) -> list[Object]:
    """Objects of a kind; none where the cluster does not know the kind."""
    try:
        return api.list(kind, labels)
    except ApiError as exc:
        if exc.status in (403, 404):
            return []
        raise


def _apply(api: Api, row: Object) -> Object:
    """Apply an object. Fields of an object that is ours are taken from other managers, those of others are not."""
    metadata = row["metadata"]
    found = api.find(row["kind"], metadata["name"])
    is_ours = found is not None and found["metadata"].get("labels", {}).get(objects.MANAGED_BY) == objects.MANAGER
    if is_ours and found is not None and (found.get("immutable") or row["kind"] == "PersistentVolumeClaim"):
        return found  # a claim may grow, and the size that we would ask for may be less
    if is_ours and found is not None and row["kind"] == "Job" and weights.has_failed(found):
        api.delete("Job", metadata["name"])
    return api.apply(row, force=is_ours)


def _monitors(api: Api) -> monitoring.Kinds:
    """What the cluster has that reads such objects."""
    if api.knows("monitoring.googleapis.com/v1", "PodMonitoring"):
        return "google"
    return "operator" if api.knows("monitoring.coreos.com/v1", "PodMonitor") else "annotations"


def _wait(is_so: Callable[[], Any], timeout_s: float) -> bool:
    """Whether it became so in time. Blocks."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(_POLL_S)
    return True
