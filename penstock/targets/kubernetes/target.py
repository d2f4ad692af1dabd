"""Target "kubernetes": a replica is a StatefulSet (or a LeaderWorkerSet), gateway and controller are Deployments.

`up` applies all objects; from then on the controller in the cluster places and ends replicas. Everything belongs to one
ConfigMap, the anchor, so that any machine with the kubeconfig can end it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine
from penstock.paths import home
from penstock.planner import Plan
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
from penstock.targets import Adopted, Placement, Target, Tunnel
from penstock.targets.kubernetes import (
    access,
    capacity,
    checks,
    ending,
    folder,
    manifests,
    monitoring,
    objects,
    placing,
    pod_logs,
    reasons,
    scaling,
    weights,
    words,
)
from penstock.targets.kubernetes.api import Api, ApiError, connect
from penstock.targets.kubernetes.objects import Object, block_of
from penstock.targets.kubernetes.view import SETS, View, by_replica, look, revision_in

_FRESH_S = 1.0


class Kubernetes(Target):
    name = "kubernetes"
    capabilities = frozenset({"places-gateway", "tunnels", "keeps-weights", "actuators"})
    listen = "network"
    has_own_caches = True
    fetches_models = True
    is_elastic = True
    executor = "mp"  # the engine's image has no Ray

    def __init__(self) -> None:
        self._apis: dict[tuple[str | None, str | None], Api] = {}
        self._last: dict[str, dict[Unit, Placement]] = {}
        self._views: dict[str, View] = {}
        self._publisher = folder.Publisher()
        self._cluster: manifests.Cluster | None = None  # as last asked; `render` asks nothing
        self._places: dict[str, folder.Cluster] = {}  # by deployment

    # ---- before ------------------------------------------------------------------------------------------------------

    def placed(self, deployment: Deployment) -> tuple[Kind, ...]:
        return objects.placed(deployment)

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        problems = checks.file_problems(deployment)
        if problems or is_rehearsal:
            return problems
        try:
            api = self._api(deployment)
        except PenstockError as exc:
            return [Problem("target", exc.message, exc.hint)]
        is_gke = api.knows("networking.gke.io/v1", "GCPBackendPolicy")
        has_v2 = api.knows("autoscaling/v2", "HorizontalPodAutoscaler")
        hpa: scaling.HpaVersion = "autoscaling/v2" if has_v2 else "autoscaling/v2beta2"
        self._cluster = manifests.Cluster(_monitors(api), is_gke, hpa)
        return checks.problems(api, deployment)

    def warnings(self, deployment: Deployment, plan: Plan) -> tuple[str, ...]:
        return weights.warnings(deployment)

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        if is_rehearsal:
            return capacity.of_file(deployment, "a rehearsal does not ask the cluster")
        return checks.machines(self._api(deployment), deployment)

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        wanted = block_of(deployment).monitoring
        cluster = self._cluster or manifests.Cluster(is_gke=wanted == "google")
        if wanted != "auto":
            cluster = msgspec.structs.replace(cluster, monitors=wanted)
        return manifests.artifact(launch, deployment, cluster)

    # ---- placing -----------------------------------------------------------------------------------------------------

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        api, is_inside = self._api_of(run), folder.is_inside(run)
        names, others = sorted(unit.name for unit in units if unit.kind == "replica"), list[Unit]()
        if is_inside:
            anchor = api.get("ConfigMap", objects.anchor(run.name))
        else:
            had_controller = api.find("Deployment", objects.controller(run.name)) is not None
            anchor = placing.apply_shared(api, run, units)
        placing.scale(api, run, units)
        if not is_inside and any(unit.kind == "controller" for unit in units):
            if had_controller:
                return _handle(units)  # the replicas are the controller's business
            if run.plan().n_nodes > 1:  # the others wait until it is placed, and `up` does not
                names, others = names[:1], list(map(replica, names[1:]))
        kept = placing.place_replicas(api, run, anchor, names)
        self._views.pop(str(run.path), None)
        return _handle([*kept, *others, *(unit for unit in units if unit.kind != "replica")])

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
        now, revision = time.time(), revision_in(run.artifact().files[manifests.REPLICA])
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

    def asked_replicas(self, run: Run) -> int | None:
        try:
            dial = self._view(self._api_of(run), run).deployments.get(objects.dial(run.name))
        except PenstockError:  # `status` has the reason
            return None
        return None if dial is None else scaling.number_of(dial)

    def _view(self, api: Api, run: Run) -> View:
        before = self._views.get(str(run.path))
        if before is not None and time.monotonic() - before.at < _FRESH_S:
            return before
        view = self._views[str(run.path)] = look(api, run, before)
        return view

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        return pod_logs.lines(self._api_of(run), run, unit, follow, last)

    # ---- the run folder ----------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> None:
        api, is_inside = self._api_of(run), folder.is_inside(run)
        if not (is_inside or is_locked(run) or run.state() is None):
            folder.follow(api, run)
        folder.fetch(api, run)
        if is_inside:
            sets = api.list(SETS[block_of(run.deployment()).shape], objects.labels(run.name, "replica"))
            names = {unit.name: unit for unit in map(unit_of, run.handle().units) if unit.kind == "gateway"}
            gateway = names or {"0": Unit("gateway", "0")}
            others = [Unit(kind, "0") for kind in objects.placed(run.deployment()) if kind in ("controller", "ui")]
            run.write_handle(_handle([*map(replica, by_replica(sets)), *gateway.values(), *others]))

    def order(self, run: Run, desired: Desired) -> None:
        api = self._api_of(run)
        if not folder.is_inside(run):
            placing.allow(api, run, desired.replicas)
        folder.order(api, run, desired)

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
            if words.is_lost(pod, now, view.events, view.lost_nodes, is_silent=True):
                api.delete("Pod", pod["metadata"]["name"], grace_s=0)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, run: Run, grace_s: float) -> None:
        ending.end(self._api_of(run), run, grace_s)
        self._views.pop(str(run.path), None)

    def end_weights(self, run: Run) -> None:
        ending.end_weights(self._api_of(run), run)

    def rolls(self, run: Run, deployment: Deployment) -> bool:
        with contextlib.suppress(PenstockError):  # a context that does not exist is for `check` to report
            return self._api_of(run) is self._api(deployment)
        return False

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
        return [left for api in [current, *apis] for left in ending.without_anchor(api)]

    def kept_keys(self, name: str) -> list[Left]:
        if not access.is_configured():
            return []
        cluster = folder.cluster_of(Run(home() / "runs" / name))
        api = self._connected(*((None, None) if cluster is None else (cluster.context, cluster.namespace)))
        return ending.kept_keys(api, name)

    def tunnel(self, run: Run, port: int, kind: Kind = "gateway") -> AbstractContextManager[Tunnel]:
        api, deployment = self._api_of(run), run.deployment()
        service, its_port = objects.gateway(run.name), deployment.gateway.port
        if kind == "ui" and deployment.chat_page is not None:
            service, its_port = objects.ui(run.name), deployment.chat_page.port
        return access.port_forward(api.context, api.namespace, service, its_port, port)

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
        block, kept = block_of(deployment), self._place_of(deployment.name)
        if kept is not None and block.context in (None, kept.context) and block.namespace in (None, kept.namespace):
            return self._connected(kept.context, kept.namespace)
        return self._connected(block.context, block.namespace)

    def _place_of(self, name: str) -> folder.Cluster | None:
        """Where the deployment of that name runs, which its file need not say; remembered while `up` replaces its
        folder."""
        run = Run(home() / "runs" / name)
        if not run.exists() or run.is_ended():
            self._places.pop(name, None)
        elif (cluster := folder.cluster_of(run)) is not None:
            self._places[name] = cluster
        return self._places.get(name)

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


def _handle(units: Collection[Unit]) -> Handle:
    return Handle(Kubernetes.name, {unit.key: {} for unit in sorted(units, key=order)})


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


def _monitors(api: Api) -> monitoring.Kinds:
    """What the cluster has that reads such objects."""
    if api.knows("monitoring.googleapis.com/v1", "PodMonitoring"):
        return "google"
    return "operator" if api.knows("monitoring.coreos.com/v1", "PodMonitor") else "annotations"
