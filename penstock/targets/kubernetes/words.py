"""The placement of a unit, from what its pods and events say. Pure; times in Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.targets import Placement
from penstock.targets.kubernetes.objects import REVISION, Object
from penstock.targets.kubernetes.pod_status import (
    NODE,
    condition,
    containers,
    event_time,
    events_of,
    label,
    last_event,
    node_of,
    phase,
    runs,
    short,
    time_of,
)
from penstock.targets.kubernetes.reasons import (
    ended_in_words,
    missing,
    never_starts,
    refusal_in_words,
    refused,
    summary,
)
from penstock.wire.announcement import Restart

_LOST_S = 30.0  # a living kubelet removes a pod within seconds after its grace
_REPLACED_S = 10.0  # a StatefulSet makes all its pods at once: one that is younger took the place of another
_UNREADY_S = 60.0  # a probe that timed out on a busy node passes again before
_LEAD_S = 10 * 365 * 86400.0
_SILENT_S = 5.0
_WAITING_S = 20.0
_LOST_EVENTS = frozenset({"NodeNotReady", "TaintManagerEviction"})
_SAME_S = 5.0  # the node controller tells of the event when it writes the condition
_OLD = "it is of an earlier revision: the next is placed"


def placement_of_replica(
    set_: Object | None,
    pods: Sequence[Object],
    events: Sequence[Object],
    n_nodes: int,
    revision: str,
    now: float,
    lost_nodes: frozenset[str] = frozenset(),
) -> Placement:
    """Where a replica is. `pods`: its own; `events`: of the namespace; `lost_nodes`: names of nodes that are not ready.

    "broken" without `is_repaired_by_target` needs `place`: `lost_pods` are deleted by force, and a set of
    another revision than `revision` that serves nothing gets the new template and new pods.
    """
    if set_ is None:
        return Placement("gone", "its set of pods is not in the cluster")
    pods = sorted(pods, key=_rank)
    where = ", ".join(dict.fromkeys(filter(None, map(node_of, pods)))) or None
    is_old = bool(revision) and any(label(each, REVISION) not in (revision, None) for each in pods or (set_,))
    running = [pod for pod in pods if runs(pod)]
    lost = lost_pods(pods, now, events, lost_nodes, n_nodes)
    if is_old and (len(running) < n_nodes or all(_is_unready(pod, now) for pod in running)):
        return Placement("broken", "it is of an earlier revision and serves nothing", where=where)
    if lost:
        return Placement("broken", _lost_words(lost), where=where)
    if len(running) >= n_nodes:
        placed_at = max(filter(None, map(_started_at, running)), default=None)
        silent = [pod for pod in running if node_of(pod) in lost_nodes]
        reason = f"{_lost_words(silent)}: it is replaced" if silent else None
        reason = reason or (_OLD if is_old else None)
        ends_at, lead_s = (now, _LEAD_S) if is_old else (None, None)
        restart = last_restart(set_, pods, events)
        return Placement(
            "placed", reason, ends_at=ends_at, lead_s=lead_s, placed_at=placed_at, where=where, restart=restart
        )
    reason = summary(pods, events, now) or refused(set_, events) or missing(set_, len(pods), n_nodes)
    is_final = any(never_starts(pod, events_of(pod, events)) for pod in pods)
    if any(map(_has_ended, pods)) or (running and (len(pods) < n_nodes or _is_replaced(pods))):
        return Placement("broken", reason, is_final, is_repaired_by_target=True, where=where)
    return Placement("queued", reason, is_final, where=where)


def placement_of_deployment(
    deployment_: Object | None, pods: Sequence[Object], events: Sequence[Object], now: float
) -> Placement:
    """Where the gateway or the controller is, by its Deployment: "placed" when one of its pods is ready."""
    if deployment_ is None:
        return Placement("gone", "its Deployment is not in the cluster")
    if deployment_.get("spec", {}).get("replicas", 1) == 0:
        return Placement("gone", "its Deployment is scaled to 0")
    ready = [pod for pod in pods if runs(pod, None) and condition(pod, "Ready").get("status") == "True"]
    where = ", ".join(dict.fromkeys(filter(None, map(node_of, ready or pods)))) or None
    if ready:
        return Placement("placed", where=where, restart=last_restart(deployment_, ready, events))
    current = [pod for pod in pods if phase(pod) not in ("Failed", "Succeeded")] or pods  # the evicted ones stay
    failure = condition(deployment_, "ReplicaFailure")
    refusal = refusal_in_words(failure.get("message", "")) if failure.get("status") == "True" else None
    reason = refusal or summary(current, events, now) or ("is not ready yet" if current else "has no pod yet")
    return Placement(
        "queued", reason, is_final=any(never_starts(pod, events_of(pod, events)) for pod in current), where=where
    )


def last_restart(owner: Object, pods: Sequence[Object], events: Sequence[Object]) -> Restart | None:
    """The last time that one of these pods took the place of another, or that its container was started again.

    `owner`: their set or Deployment; `events`: what is left of those of pods that are gone.
    """
    restarts = [restart for pod in pods for restart in (_again(pod), _instead(owner, pod, events)) if restart]
    return max(restarts, key=lambda restart: restart.at, default=None)


def _again(pod: Object) -> Restart | None:
    specs = {spec["name"]: spec for spec in containers(pod.get("spec", {}), "containers")}
    for row in containers(pod.get("status", {}), "containerStatuses"):
        ended = row.get("lastState", {}).get("terminated")
        at = time_of(ended.get("finishedAt")) if ended else None
        if ended and at is not None:
            return Restart(at, f"container {row['name']} {ended_in_words(ended, specs.get(row['name'], {}))}")
    return None


def _instead(owner: Object, pod: Object, events: Sequence[Object]) -> Restart | None:
    name, at = pod["metadata"]["name"], time_of(pod["metadata"].get("creationTimestamp"))
    rolled_out = condition(owner, "Progressing")  # a Deployment's pods are younger after each rollout
    since = time_of(rolled_out.get("lastUpdateTime") or owner["metadata"].get("creationTimestamp"))
    if at is None or since is None or at <= since + _REPLACED_S or rolled_out.get("reason") == "ReplicaSetUpdated":
        return None
    others = [event for event in events if event.get("involvedObject", {}).get("name") == name]
    evicted = last_event(sorted(others, key=lambda event: event_time(event) or 0.0), {"Evicted", "Preempted"})
    why = f": {short(evicted['message'])}" if evicted else ""
    return Restart(at, f"pod {name} took the place of another{why}")


def is_lost(
    pod: Object,
    now: float,
    events: Sequence[Object] = (),
    lost_nodes: frozenset[str] = frozenset(),
    is_silent: bool = False,
) -> bool:
    """Whether a pod stays only because its node does not answer: it must be deleted by force.

    Its grace is over, and the node is one of `lost_nodes` or, where nodes cannot be read, the node controller says so.
    With `is_silent` nobody hears the pod either, so that its grace, which its node cannot keep, is not waited for.
    """
    ends_at = time_of(pod["metadata"].get("deletionTimestamp"))
    if ends_at is None:
        return False
    asked_at = ends_at - float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    if is_silent and now >= asked_at + _SILENT_S and _is_cut_off(pod, asked_at, events, lost_nodes):
        return True
    if now < ends_at + _LOST_S:
        return False
    says_lost = pod.get("status", {}).get("reason") == "NodeLost" or condition(pod, "Ready").get("status") == "Unknown"
    return says_lost or node_of(pod) in lost_nodes or last_event(events_of(pod, events), _LOST_EVENTS) is not None


def lost_pods(
    pods: Sequence[Object], now: float, events: Sequence[Object], lost_nodes: frozenset[str], n_nodes: int
) -> list[Object]:
    """The pods of a replica to delete by force. Of several nodes that serve nothing since one does not answer, that
    one: the others wait for it, while the cluster would wait for minutes."""
    is_waiting = n_nodes > 1 and not any(condition(pod, "Ready").get("status") == "True" for pod in pods)
    return [
        pod
        for pod in pods
        if is_lost(pod, now, events, lost_nodes)
        or (is_waiting and _is_cut_off(pod, now - _WAITING_S, events, lost_nodes))
    ]


def _is_cut_off(pod: Object, at: float, events: Sequence[Object], lost_nodes: frozenset[str]) -> bool:
    """Whether the pod's node did not answer at that time already: the node controller, not the pod, made it unready."""
    ready = condition(pod, "Ready")
    since, event = time_of(ready.get("lastTransitionTime")), last_event(events_of(pod, events), {"NodeNotReady"})
    if ready.get("status") == "True" or since is None or since > at:
        return False
    told_at = event_time(event) if event is not None else None
    return node_of(pod) in lost_nodes or (told_at is not None and abs(told_at - since) <= _SAME_S)


def _has_ended(pod: Object) -> bool:
    """Whether a pod, or its node container, ran or was placed and does not any more."""
    if pod["metadata"].get("deletionTimestamp") or phase(pod) in ("Failed", "Succeeded"):
        return True
    rows = [row for row in pod.get("status", {}).get("containerStatuses", ()) if row["name"] == NODE]
    return any("terminated" in row.get("state", {}) or "terminated" in row.get("lastState", {}) for row in rows)


def _is_replaced(pods: Sequence[Object]) -> bool:
    times = [at for pod in pods if (at := time_of(pod["metadata"].get("creationTimestamp"))) is not None]
    return bool(times) and max(times) - min(times) > _REPLACED_S


def _is_unready(pod: Object, now: float) -> bool:
    ready = condition(pod, "Ready")
    since = time_of(ready.get("lastTransitionTime"))
    return ready.get("status") != "True" and (since is None or now - since > _UNREADY_S)


def _started_at(pod: Object) -> float | None:
    rows = [row for row in pod["status"].get("containerStatuses", ()) if row["name"] == NODE]
    return max((at for row in rows if (at := time_of(row["state"]["running"].get("startedAt")))), default=None)


def _lost_words(pods: Iterable[Object]) -> str:
    names = ", ".join(dict.fromkeys(filter(None, map(node_of, pods))))
    return f"node {names} does not answer"


def _rank(pod: Object) -> tuple[int, str]:
    name = pod["metadata"]["name"]
    last = name.rpartition("-")[2]
    return (int(last) if last.isdigit() else 0, name)
