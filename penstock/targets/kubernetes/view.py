"""What the API says of one deployment: its sets, Deployments, pods and events, and the nodes that are lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import msgspec

from penstock.run_folder import Run
from penstock.targets.kubernetes import manifests, objects, weights
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object, block_of

SETS = {"statefulset": "StatefulSet", "lws": "LeaderWorkerSet"}


class View(msgspec.Struct, frozen=True):
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


def look(api: Api, run: Run, before: View | None = None) -> View:
    """A view of now. `before`: the last one; only events tell why a pod took the place of another. Raises ApiError."""
    every_pod = api.list("Pod", objects.labels(run.name))
    pods = tuple(pod for pod in every_pod if pod["metadata"]["labels"].get(objects.COMPONENT) != weights.COMPONENT)
    is_quiet = all(map(is_ready, pods))
    lost = frozenset[str]() if is_quiet else lost_nodes(api)
    now, then = ({pod["metadata"]["uid"] for pod in each} for each in (pods, pods if before is None else before.pods))
    events = () if is_quiet and now == then and pods else tuple(api.list("Event"))
    sets = api.list(SETS[block_of(run.deployment()).shape], objects.labels(run.name, "replica"))
    deployments = {row["metadata"]["name"]: row for row in api.list("Deployment", objects.labels(run.name))}
    return View(time.monotonic(), by_replica(sets), deployments, pods, events, lost)


def lost_nodes(api: Api) -> frozenset[str]:
    """Nodes that are not ready; none where we may not read nodes."""
    try:
        nodes = api.list("Node")
    except ApiError as exc:
        if exc.status != 403:
            raise
        return frozenset()
    return frozenset(node["metadata"]["name"] for node in nodes if not is_ready(node))


def by_replica(sets: Sequence[Object]) -> dict[str, Object]:
    return {row["metadata"]["labels"][objects.REPLICA]: row for row in sets}


def revision_of(set_: Object) -> str:
    return str(set_["metadata"].get("labels", {}).get(objects.REVISION, ""))


@functools.lru_cache(maxsize=16)
def revision_in(template: str) -> str:
    """The revision of the artifact's template of a replica; parsed once, since every look of the controller asks."""
    return revision_of(manifests.from_yaml(template)[0])


def is_ready(row: Object) -> bool:
    conditions = row.get("status", {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
