"""The log of a unit: of all its pods, through the API, also over restarts of their containers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.log_lines import as_they_come, in_turn, named
from penstock.run_folder import Run, Unit
from penstock.targets.kubernetes import objects, weights, words
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object

_AGAIN_S = 1.0
_NOT_YET = 400  # the API's answer for a container that has not started


def lines(api: Api, run: Run, unit: Unit, follow: bool, last: int | None) -> Iterator[str]:
    """Lines of each of its pods, with the pod's name where there are several; with `follow` until the run has ended."""
    pods = _pods(api, run, unit)
    while follow and not pods and not run.is_ended():
        time.sleep(_AGAIN_S)
        pods = _pods(api, run, unit)
    names = [pod["metadata"]["name"] for pod in pods]
    sources = [_of_pod(api, run, name, _container_of(unit), follow, last) for name in names]
    if len(sources) == 1:
        return sources[0]
    fronted = [named(f"[{name}]", source) for name, source in zip(names, sources, strict=True)]
    return as_they_come(fronted) if follow else in_turn(fronted)


def of_weights(api: Api, name: str, pods: Sequence[Object]) -> tuple[str, bool]:
    """What is known of the weights that one of these pods waits for, "weights 17/30 files, 12.3 GB of 30.0 GB", and
    whether nobody will bring them.  Raises ApiError."""
    labels = objects.labels(name, weights.COMPONENT)
    jobs = sorted(api.list("Job", labels), key=lambda job: str(job["metadata"]["creationTimestamp"]))
    if jobs and weights.has_failed(jobs[-1]):
        why = words.summary(api.list("Pod", labels), ()) or "its time was over"
        return f"the weights could not be fetched: {why}", True
    waiting = next(pod for pod in pods if words.waits(pod))
    last = [*api.logs(waiting["metadata"]["name"], weights.COMPONENT, last=1)]
    return (last[0] if last else words.WAITS), False


def _pods(api: Api, run: Run, unit: Unit) -> list[Object]:
    wanted = objects.labels(run.name, unit.kind)
    if unit.kind == "replica":
        wanted |= {objects.REPLICA: unit.name}
    return sorted(api.list("Pod", wanted), key=lambda pod: str(pod["metadata"]["name"]))


def _container_of(unit: Unit) -> str:
    return "node" if unit.kind == "replica" else unit.kind


def _of_pod(api: Api, run: Run, name: str, container: str, follow: bool, last: int | None) -> Iterator[str]:
    """An init container says why the pod's own has not started."""
    stamp: str | None = None  # of the last line: a container that ended still has its log
    while True:
        try:
            for line in api.logs(name, container, follow, last, stamp, timestamps=True, is_over=run.is_ended):
                stamp, _, words = line.partition(" ")
                yield words
        except ApiError as exc:
            if exc.status != _NOT_YET or not follow:
                yield from _before(api, name) if exc.status == _NOT_YET else ()
                if exc.status not in (_NOT_YET, 404):
                    raise
                return
        if not follow or run.is_ended():
            return
        time.sleep(_AGAIN_S)  # its container starts again, or its pod
        last = None


def _before(api: Api, name: str) -> Iterator[str]:
    pod = api.find("Pod", name) or {}
    for container in pod.get("spec", {}).get("initContainers", ()):
        try:
            yield from api.logs(name, container["name"])
        except ApiError as exc:
            if exc.status not in (_NOT_YET, 404):
                raise
            return
