"""What pods and events say, in words for people, and the placement of a unit. Pure; times in Unix seconds.

Pods name most reasons in their status. Image pulls, volumes and autoscalers speak by events only, which belong to a pod
by its uid: the next pod of a StatefulSet has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from penstock.targets import Placement
from penstock.targets.kubernetes.objects import REVISION, Object
from penstock.text import show_seconds

NODE = "node"  # the container of a replica's pods that runs penstock.node
_PREPARE, _WEIGHTS = "prepare", "weights"  # init containers
WAITS = "waits for the weights"
_LOST_S = 30.0  # a living kubelet removes a pod within seconds after its grace
_REPLACED_S = 10.0  # a StatefulSet makes all its pods at once: one that is younger took the place of another
_UNREADY_S = 60.0  # a probe that timed out on a busy node passes again before
_LEAD_S = 10 * 365 * 86400.0
_LONGEST = 300

# https://github.com/kubernetes/kubernetes/blob/master/pkg/kubelet/images/types.go
_NO_IMAGE = frozenset({
    "ErrImagePull", "ImagePullBackOff", "ImageInspectError", "ErrImageNeverPull", "RegistryUnavailable",
    "InvalidImageName", "SignatureValidationFailed",
})  # fmt: skip
_WRONG = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
# What registries say of an image that is not there, or not for us; all else may pass.
_NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|does not exist|unauthorized|denied|authorization failed|40[134]\b", re.IGNORECASE
)
_STARTS = 3  # a container that failed so often before its pod ever ran will not run
_STARTING = frozenset({"ContainerCreating", "PodInitializing", ""})
# Of status.reason of a failed pod: https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
_FAILED = {
    "Evicted": "was evicted",
    "DeadlineExceeded": "came to its deadline",
    "NodeShutdown": "was ended: its node shuts down",
    "Shutdown": "was ended: its node shuts down",
    "Terminated": "was ended: its node shuts down",
    "Preempting": "was preempted",
    "NodeLost": "is on a node that does not answer",
    "UnexpectedAdmissionError": "was refused by its node",
}
# https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
_DISRUPTED = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate, or does not answer",
    "EvictionByEvictionAPI": "evicted, as when its node is drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node, which shuts down or lacks resources",
}
# The scheduler's reasons after their number, 1.20 to 1.37: pkg/scheduler/framework/plugins
_UNFIT = (
    (r"had untolerated taint(?:\(s\))?(?: \{(?P<what>[^}]*)\})?", "tainted"),
    (r"had taints? ?(?:\{(?P<what>[^}]*)\}, )?that the pod didn't tolerate", "tainted"),
    (r"were unschedulable", "cordoned"),
    (r"didn't match (?:Pod's )?node (?:affinity(?:/selector)?|selector)", "without the labels that it selects"),
    (
        r"(?:had volume node affinity conflict|didn't match PersistentVolume's node affinity)",
        "out of its volume's zone",
    ),
    (r"had no available volume zone", "out of its volume's zone"),
    (r"exceed max volume count", "with as many volumes as they may have"),
    (r"didn't match pod topology spread constraints.*", "excluded by topology spread"),
    (r"didn't (?:match|satisfy) .*affinity.*", "excluded by affinity to other pods"),
)
_AFTER = re.compile(r"\.?\s+(?:no new claims to deallocate|preemption:).*", re.DOTALL)
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_QUOTA = re.compile(r"exceeded quota: (.*?), requested: (.*?), used: (.*?), limited: (.*)", re.DOTALL)
_MOUNT = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_PULL_NOISE = re.compile(
    r'rpc error: code = \w+ desc = |failed to pull and unpack image "[^"]*": |failed to resolve reference "[^"]*": '
    r'|Back-off pulling image "[^"]*"(?:: )?|Failed to pull image "[^"]*": |ErrImagePull: '
)


# ---- placements ------------------------------------------------------------------------------------------------------


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

    "broken" without `is_repaired_by_target` needs `place`: pods for which `is_lost` are deleted by force, and a set of
    another revision than `revision` that serves nothing gets the new template and new pods.
    """
    if set_ is None:
        return Placement("gone", "its StatefulSet is not in the cluster")
    pods = sorted(pods, key=_rank)
    where = ", ".join(dict.fromkeys(filter(None, map(_node_of, pods)))) or None
    is_old = bool(revision) and any(_label(each, REVISION) not in (revision, None) for each in pods or (set_,))
    running = [pod for pod in pods if _runs(pod)]
    lost = [pod for pod in pods if is_lost(pod, now, events, lost_nodes)]
    if is_old and (len(running) < n_nodes or all(_is_unready(pod, now) for pod in running)):
        return Placement("broken", "it is of an earlier revision and serves nothing", where=where)
    if lost:
        return Placement("broken", _lost_words(lost), where=where)
    if len(running) >= n_nodes:
        placed_at = max(filter(None, map(_started_at, running)), default=None)
        silent = [pod for pod in running if _node_of(pod) in lost_nodes]
        reason = f"{_lost_words(silent)}: it is replaced" if silent else None
        ends_at, lead_s = (now, _LEAD_S) if is_old else (None, None)
        return Placement("placed", reason, ends_at=ends_at, lead_s=lead_s, placed_at=placed_at, where=where)
    reason = summary(pods, events, now) or _refused(set_, events) or _missing(set_, len(pods), n_nodes)
    is_final = any(_never_starts(pod, _of(pod, events)) for pod in pods)
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
    ready = [pod for pod in pods if _runs(pod, None) and _condition(pod, "Ready").get("status") == "True"]
    where = ", ".join(dict.fromkeys(filter(None, map(_node_of, ready or pods)))) or None
    if ready:
        return Placement("placed", where=where)
    current = [pod for pod in pods if _phase(pod) not in ("Failed", "Succeeded")] or pods  # the evicted ones stay
    failure = _condition(deployment_, "ReplicaFailure")
    refused = _created_words(failure.get("message", "")) if failure.get("status") == "True" else None
    reason = refused or summary(current, events, now) or ("is not ready yet" if current else "has no pod yet")
    return Placement(
        "queued", reason, is_final=any(_never_starts(pod, _of(pod, events)) for pod in current), where=where
    )


def is_lost(pod: Object, now: float, events: Sequence[Object] = (), lost_nodes: frozenset[str] = frozenset()) -> bool:
    """Whether a pod stays only because its node does not answer: it must be deleted by force.

    Its grace is over, and the node is one of `lost_nodes` or, where nodes cannot be read, the node controller says so.
    """
    ends_at = _time(pod["metadata"].get("deletionTimestamp"))
    if ends_at is None or now < ends_at + _LOST_S:
        return False
    says_lost = pod.get("status", {}).get("reason") == "NodeLost" or _condition(pod, "Ready").get("status") == "Unknown"
    return says_lost or _node_of(pod) in lost_nodes or _last(_of(pod, events), {"NodeNotReady"}) is not None


def summary(pods: Sequence[Object], events: Sequence[Object], now: float | None = None) -> str | None:
    """Why these pods do not run, the gravest reason first; None when they say nothing."""
    reasons = [(pod, *_why(pod, _of(pod, events), now)) for pod in pods]
    weighed = [(weight, words, pod) for pod, weight, words in reasons if words]
    if not weighed:
        return None
    _, words, pod = max(weighed, key=lambda row: row[0])
    same = sum(other == words for _, other, _ in weighed)
    if len(pods) == 1:
        return words
    return f"{same} of {len(pods)} pods: {words}" if same > 1 else f"{pod['metadata']['name']}: {words}"


# ---- one pod ---------------------------------------------------------------------------------------------------------


def _why(pod: Object, events: Sequence[Object], now: float | None) -> tuple[int, str | None]:
    """Why a pod does not run, and how grave that is; `events` are its own."""
    status = pod.get("status", {})
    if _phase(pod) == "Failed" and status.get("reason"):
        what = _FAILED.get(status["reason"], f"failed ({status['reason']})")
        return 5, f"{what}: {_short(status['message'])}" if status.get("message") else what
    if pod["metadata"].get("deletionTimestamp"):
        return 4, f"is being deleted{_disruption(pod)}"
    scheduled = _condition(pod, "PodScheduled")
    if not _node_of(pod):
        return 3, _unscheduled(pod, scheduled, events)
    specs = {spec["name"]: spec for spec in _containers(pod.get("spec", {}), "initContainers", "containers")}
    for container in _containers(status, "initContainerStatuses", "containerStatuses"):
        weight, words = _why_container(container, specs.get(container["name"], {}), events)
        if words:
            return weight, words
    if _runs(pod, None):
        return 0, None
    return _starting(pod, events, now)


def _why_container(container: Object, spec: Object, events: Sequence[Object]) -> tuple[int, str | None]:
    name, state = container["name"], container.get("state", {})
    waiting = state.get("waiting", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if reason in _NO_IMAGE:
        return 5, _image_words(container, reason, message, events)
    if "terminated" in state and state["terminated"].get("exitCode") == 0 and name != NODE:
        return 0, None
    if ended and ("terminated" in state or reason == "CrashLoopBackOff"):
        n_starts = container.get("restartCount", 0) + 1
        times = f", {n_starts} times" if n_starts > 1 else ""
        return 5, f"container {name} {ended_in_words(ended, spec)}{times}{_last_words(ended)}"
    if reason not in _STARTING:
        return 5, f"container {name} cannot start: {_short(message) or reason}"
    if name == _WEIGHTS and "running" in state:
        return 1, WAITS
    return 0, None


def waits(pod: Object) -> bool:
    """Whether a pod fetches its weights, or waits for the Job that does."""
    rows = _containers(pod.get("status", {}), "initContainerStatuses")
    return any(row["name"] == _WEIGHTS and "running" in row.get("state", {}) for row in rows)


def _never_starts(pod: Object, events: Sequence[Object]) -> bool:
    """Whether the kubelet's next tries must fail as this one did: the pod itself, or what it names, is wrong."""
    for container in _containers(pod.get("status", {}), "initContainerStatuses", "containerStatuses"):
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        has_failed = waiting and container.get("lastState", {}).get("terminated", {}).get("exitCode", 0) != 0
        if reason in _WRONG:
            return True
        if reason in _NO_IMAGE:
            words = _image_words(container, reason, message, events)
            return _NO_SUCH_IMAGE.search(words.partition(": ")[2]) is not None
        if has_failed and container.get("restartCount", 0) >= (1 if container["name"] == _PREPARE else _STARTS - 1):
            return True
    return False


def ended_in_words(terminated: Object, spec: Object) -> str:
    """How a container ended, from its state and its part of the pod's spec."""
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        limit = spec.get("resources", {}).get("limits", {}).get("memory")
        return f"was ended by the kernel: out of memory{f' (limit {limit})' if limit else ''}"
    if code == 137:
        return "was killed (code 137)"
    return f"ended with code {code}"


def _last_words(terminated: Object) -> str:
    """The end of its log, which the kubelet keeps by terminationMessagePolicy FallbackToLogsOnError."""
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return f": {_short(' / '.join(lines[-3:]), keep_end=True)}" if lines else ""


def _image_words(container: Object, reason: str, message: str, events: Sequence[Object]) -> str:
    words = _PULL_NOISE.sub("", message).strip()
    if not words:  # before 1.32 a back-off does not repeat the registry's words
        failed = [event for event in events if str(event.get("message", "")).startswith("Failed to pull image")]
        words = _PULL_NOISE.sub("", failed[-1]["message"]).strip() if failed else reason
    return f"cannot pull image {container.get('image', '')}: {_short(words)}"


def _starting(pod: Object, events: Sequence[Object], now: float | None) -> tuple[int, str | None]:
    """A pod that has its node: what its last event says."""
    event = _last(events, _MOUNT | {"FailedCreatePodSandBox", "Pulling", "Pulled", "Created", "Started"})
    message = str(event.get("message", "")) if event else ""
    if event is None:
        return 1, f"starts on {_node_of(pod)}"
    if event["reason"] in _MOUNT:
        return 4, f"cannot mount a volume: {_short(message)}"
    if event["reason"] == "FailedCreatePodSandBox":
        return 4, f"its node cannot start it: {_short(message)}"
    if event["reason"] != "Pulling":
        return 1, f"starts on {_node_of(pod)}"
    quoted = re.search(r'"([^"]+)"', message)
    since = _event_time(event)
    age = f" for {_steps(now - since)}" if now is not None and since is not None and now - since >= 5 else ""
    return 2, f"pulling image {quoted.group(1) if quoted else ''}{age}"


def _disruption(pod: Object) -> str:
    condition = _condition(pod, "DisruptionTarget")
    if pod.get("status", {}).get("reason") == "NodeLost":
        return f": node {_node_of(pod)} does not answer"
    reason = condition.get("reason", "")
    return f": {_DISRUPTED.get(reason) or _short(condition.get('message', '')) or reason}" if reason else ""


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def _unscheduled(pod: Object, condition: Object, events: Sequence[Object]) -> str:
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates", ()))
        return f"Pending: held by scheduling gate {gates}" if gates else "Pending: held by a scheduling gate"
    last = _last([event for event in events if not _is_karpenter(event)], {"FailedScheduling"})
    message = condition.get("message") or (last or {}).get("message") or ""
    words = unschedulable_in_words(message, requests(pod)) if message else "not scheduled yet"
    return f"Pending: {words}{_scaling(events)}"


def unschedulable_in_words(message: str, needs: Mapping[str, str]) -> str:
    """The scheduler's message in words. `needs`: what the pod requests, "nvidia.com/gpu" -> "4".

    "0/8 nodes are available: 2 node(s) had untolerated taint {a: b}, 6 Insufficient nvidia.com/gpu." becomes "0/8 nodes
    have 4 nvidia.com/gpu free (2 tainted a=b)".
    """
    match = re.match(r"(\d+/\d+) nodes are available: (.*)", _AFTER.sub("", message), re.DOTALL)
    if match is None:
        return _short(message)
    lacking, others = [], []
    for part in re.split(r", (?=\d+ )", match.group(2).rstrip(". ")):
        number, _, rest = part.partition(" ")
        if not number.isdigit():
            if "unbound immediate PersistentVolumeClaims" in part:
                return "its PersistentVolumeClaim has no volume yet"
            others.append(part)
        elif rest.startswith("Insufficient "):
            lacking.append(rest.removeprefix("Insufficient "))
        else:
            others.append(f"{number} {_unfit(rest)}")
    amounts = ", ".join(f"{needs[name]} {name}" if name in needs else name for name in sorted(lacking, key=_is_host))
    words = f"{match.group(1)} nodes have {amounts} free" if amounts else f"{match.group(1)} nodes can take it"
    return words + (f" ({', '.join(dict.fromkeys(others))})" if others else "")


def _unfit(reason: str) -> str:
    plain = reason.removeprefix("node(s) ")
    for pattern, words in _UNFIT:
        match = re.fullmatch(pattern, plain)
        if match is None:
            continue
        key, _, value = (match.groupdict().get("what") or "").partition(": ")
        if key in _CONTROL_PLANE or not key:
            return words
        return f"{words} {key}={value}" if value else f"{words} {key}"
    return plain


def _is_host(resource: str) -> bool:
    return resource in ("cpu", "memory", "ephemeral-storage")


def _scaling(events: Sequence[Object]) -> str:
    """What an autoscaler last said of a pod: that of the cluster, or Karpenter."""
    mine = [event for event in events if event.get("reason") != "FailedScheduling" or _is_karpenter(event)]
    event = _last(mine, {"TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp", "Nominated", "FailedScheduling"})
    if event is None:
        return ""
    message, reason = str(event.get("message", "")), event["reason"]
    if reason in ("TriggeredScaleUp", "Nominated"):
        what = re.search(r"\{(.*?)\}", message) or re.search(r"nodeclaim/(\S+?)[,.]?(?:\s|$)", message)
        return f"; a node is being added{f' ({what.group(1)})' if what else ''}"
    if reason == "NotTriggerScaleUp":
        why = message.partition("pod didn't trigger scale-up")[2].lstrip(": ")
        return f"; the autoscaler adds no node{f': {_short(why)}' if why else ''}"
    return f"; the autoscaler could not add a node: {_short(message)}"


def _is_karpenter(event: Object) -> bool:
    source = event.get("reportingComponent") or event.get("source", {}).get("component", "")
    return str(source).startswith(("karpenter", "eks-auto"))


def requests(pod: Object) -> dict[str, str]:
    """What the pod's containers request, by resource: of the first that requests it, for words only."""
    found: dict[str, str] = {}
    for container in _containers(pod.get("spec", {}), "containers", "initContainers"):
        resources = container.get("resources", {})
        found = {**resources.get("limits", {}), **resources.get("requests", {}), **found}
    return {name: str(value) for name, value in found.items()}


# ---- sets that cannot make their pods --------------------------------------------------------------------------------


def _refused(set_: Object, events: Sequence[Object]) -> str | None:
    event = _last(_of(set_, events), {"FailedCreate", "FailedUpdate"})
    return _created_words(str(event.get("message", ""))) if event is not None else None


def _created_words(message: str) -> str:
    """Why the API server refused a pod: the quota, or what another rule says."""
    quota = _QUOTA.search(message)
    if quota is not None:
        name, requested, used, limited = quota.groups()
        return f"over quota {name}: requests {requested}; used {used}; limit {limited}"
    return _short(re.sub(r"^(?:create Pod \S+ in \S+ \S+ failed error: |Error creating: )", "", message))


def _missing(set_: Object, n_pods: int, n_nodes: int) -> str:
    kind = set_.get("kind", "StatefulSet")
    return f"its {kind} has made {n_pods} of {n_nodes} pods" if n_pods < n_nodes else "its pods start"


# ---- reading objects -------------------------------------------------------------------------------------------------


def _runs(pod: Object, container: str | None = NODE) -> bool:
    """Whether this container of a pod runs, all of them for None."""
    if pod["metadata"].get("deletionTimestamp") or _phase(pod) != "Running":
        return False
    rows = pod.get("status", {}).get("containerStatuses", ())
    rows = [row for row in rows if row["name"] == container] or rows
    return bool(rows) and all("running" in row.get("state", {}) for row in rows)


def _has_ended(pod: Object) -> bool:
    """Whether a pod, or its node container, ran or was placed and does not any more."""
    if pod["metadata"].get("deletionTimestamp") or _phase(pod) in ("Failed", "Succeeded"):
        return True
    rows = [row for row in pod.get("status", {}).get("containerStatuses", ()) if row["name"] == NODE]
    return any("terminated" in row.get("state", {}) or "terminated" in row.get("lastState", {}) for row in rows)


def _is_replaced(pods: Sequence[Object]) -> bool:
    times = [at for pod in pods if (at := _time(pod["metadata"].get("creationTimestamp"))) is not None]
    return bool(times) and max(times) - min(times) > _REPLACED_S


def _is_unready(pod: Object, now: float) -> bool:
    ready = _condition(pod, "Ready")
    since = _time(ready.get("lastTransitionTime"))
    return ready.get("status") != "True" and (since is None or now - since > _UNREADY_S)


def _started_at(pod: Object) -> float | None:
    rows = [row for row in pod["status"].get("containerStatuses", ()) if row["name"] == NODE]
    return max((at for row in rows if (at := _time(row["state"]["running"].get("startedAt")))), default=None)


def _lost_words(pods: Iterable[Object]) -> str:
    names = ", ".join(dict.fromkeys(filter(None, map(_node_of, pods))))
    return f"node {names} does not answer"


def _rank(pod: Object) -> tuple[int, str]:
    name = pod["metadata"]["name"]
    last = name.rpartition("-")[2]
    return (int(last) if last.isdigit() else 0, name)


def _label(object_: Object, key: str) -> str | None:
    value = object_["metadata"].get("labels", {}).get(key)
    return None if value is None else str(value)


def _node_of(pod: Object) -> str | None:
    name = pod.get("spec", {}).get("nodeName")
    return None if name is None else str(name)


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _condition(object_: Object, kind: str) -> Object:
    rows = object_.get("status", {}).get("conditions", ())
    return next((row for row in rows if row.get("type") == kind), {})


def _containers(part: Object, *keys: str) -> list[Object]:
    return [row for key in keys for row in part.get(key) or ()]


def _of(object_: Object, events: Sequence[Object]) -> list[Object]:
    """The events of an object, oldest first."""
    uid, name = object_["metadata"].get("uid"), object_["metadata"]["name"]
    mine = []
    for event in events:
        about = event.get("involvedObject") or event.get("regarding") or {}
        if about.get("uid") == uid if uid and about.get("uid") else about.get("name") == name:
            mine.append(event)
    return sorted(mine, key=lambda event: _event_time(event) or 0.0)


def _last(events: Sequence[Object], reasons: Iterable[str]) -> Object | None:
    wanted = set(reasons)
    return next((event for event in reversed(events) if event.get("reason") in wanted), None)


def _event_time(event: Object) -> float | None:
    series = event.get("series") or {}
    values = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((at for value in values if (at := _time(value)) is not None), _time(event.get("firstTimestamp")))


def _time(text: object) -> float | None:
    """The API's time, "2026-11-22T18:00:00Z"."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _steps(seconds: float) -> str:
    """In steps of 5 s, so that the state on disk is not written each second."""
    whole = seconds // 5 * 5
    return f"{whole:.0f} s" if whole < 60 else show_seconds(whole)


def _short(text: str, keep_end: bool = False) -> str:
    line = " ".join(text.split())
    if len(line) <= _LONGEST:
        return line
    return f"...{line[3 - _LONGEST :]}" if keep_end else f"{line[: _LONGEST - 3]}..."
