"""The log of a unit: of all its pods, through the API, also over restarts of their containers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.log_lines import as_they_come, in_turn, named
from penstock.run_folder import Run, Unit
from penstock.targets.kubernetes import objects, reasons, weights
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object

_AGAIN_S = 1.0
_NOT_YET = 400  # the API's answer for a container that has not started


def lines(api: Api, run: Run, unit: Unit, follow: bool, last: int | None) -> Iterator[str]:
    """Lines of each of its pods, with the pod's name where there are several; with `follow` until the run has ended."""
    return _followed(api, run, unit, last) if follow else in_turn(_of_pods(api, run, unit, False, last))


def _followed(api: Api, run: Run, unit: Unit, last: int | None) -> Iterator[str]:
    while not run.is_ended():
        sources = _of_pods(api, run, unit, True, last)
        if not sources and _is_gone(api, run):
            return
        yield from sources[0] if len(sources) == 1 else as_they_come(sources)
        time.sleep(_AGAIN_S)  # there is no pod yet, or others have taken their place
        last = None


def _is_gone(api: Api, run: Run) -> bool:
    """Whether the run was ended, maybe by another machine."""
    try:
        return api.find("ConfigMap", objects.anchor(run.name)) is None
    except ApiError as exc:
        if not exc.is_retryable:
            raise
        return False


def _of_pods(api: Api, run: Run, unit: Unit, follow: bool, last: int | None) -> list[Iterator[str]]:
    names = [str(pod["metadata"]["name"]) for pod in _pods(api, run, unit)]
    sources = [_of_pod(api, run, unit, name, follow, last) for name in names]
    if len(sources) == 1:
        return sources
    return [named(f"[{name}]", source) for name, source in zip(names, sources, strict=True)]


def of_weights(api: Api, name: str, pods: Sequence[Object]) -> tuple[str, bool]:
    """What is known of the weights that one of these pods waits for, "weights 17/30 files, 12.3 GB of 30.0 GB", and
    whether nobody will bring them.  Raises ApiError."""
    labels = objects.labels(name, weights.COMPONENT)
    jobs = sorted(api.list("Job", labels), key=lambda job: str(job["metadata"]["creationTimestamp"]))
    tries = [pod for pod in api.list("Pod", labels) if pod.get("status", {}).get("phase") == "Failed"] if jobs else []
    why = reasons.summary(tries[-1:], ())
    if jobs and weights.has_failed(jobs[-1]):
        return f"the weights could not be fetched: {why or 'its time was over'}", True
    waiting = next(pod for pod in pods if reasons.waits(pod))
    last = [*api.logs(waiting["metadata"]["name"], weights.COMPONENT, last=1)]
    said = last[0] if last else reasons.WAITS
    return (f"{said} (the last try: {why})" if why else said), False


def _pods(api: Api, run: Run, unit: Unit) -> list[Object]:
    wanted = objects.labels(run.name, unit.kind)
    if unit.kind == "replica":
        wanted |= {objects.REPLICA: unit.name}
    return sorted(api.list("Pod", wanted), key=lambda pod: str(pod["metadata"]["name"]))


def _container_of(unit: Unit) -> str:
    return "node" if unit.kind == "replica" else unit.kind


def _of_pod(api: Api, run: Run, unit: Unit, name: str, follow: bool, last: int | None) -> Iterator[str]:
    """An init container says why the pod's own has not started."""
    stamp: str | None = None  # of the last line: a container that ended still has its log
    while True:
        try:
            for line in api.logs(name, _container_of(unit), follow, last, stamp, timestamps=True, is_over=run.is_ended):
                stamp, _, text = line.partition(" ")
                yield text
        except ApiError as exc:
            if exc.status not in (_NOT_YET, 404):
                raise
            if exc.status == _NOT_YET and not follow:
                yield from _before(api, name)
            if exc.status == 404:
                stamp = None  # the clock of another node
                if unit.kind != "replica" or _is_gone(api, run):
                    return  # its successor has another name, or there is none
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
