"""Why pods do not run: what their status and their events say, in words for people. Pure; times in Unix seconds.

Pods name most reasons in their status. Image pulls, volumes and autoscalers speak by events only, which belong to a pod
by its uid: the next pod of a StatefulSet has the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.pod_status import (
    NODE,
    about,
    condition,
    containers,
    event_time,
    events_of,
    in_time,
    last_event,
    node_of,
    phase,
    runs,
    short,
    steps,
)

_PREPARE, _WEIGHTS, _PACKAGES = "prepare", "weights", "packages"  # init containers
WAITS = "waits for the weights"

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
_QUOTA = re.compile(r"exceeded quota: (.*?), requested: (.*?), used: (.*?), limited: (.*)", re.DOTALL)
_MOUNT = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_PULL_NOISE = re.compile(
    r'rpc error: code = \w+ desc = |failed to pull and unpack image "[^"]*": |failed to resolve reference "[^"]*": '
    r'|Back-off pulling image "[^"]*"(?:: )?|Failed to pull image "[^"]*": |ErrImagePull: '
)


def summary(pods: Sequence[Object], events: Sequence[Object], now: float | None = None) -> str | None:
    """Why these pods do not run, the gravest reason first; None when they say nothing."""
    reasons = [(pod, *_why(pod, events_of(pod, events), now)) for pod in pods]
    weighed = [(weight, words, pod) for pod, weight, words in reasons if words]
    if not weighed:
        return None
    _, words, pod = max(weighed, key=lambda row: row[0])
    same = sum(other == words for _, other, _ in weighed)
    if len(pods) == 1:
        return words
    return f"{same} of {len(pods)} pods: {words}" if same > 1 else f"{pod['metadata']['name']}: {words}"


def _why(pod: Object, events: Sequence[Object], now: float | None) -> tuple[int, str | None]:
    """Why a pod does not run, and how grave that is; `events` are its own."""
    status = pod.get("status", {})
    if phase(pod) == "Failed" and status.get("reason"):
        what = _FAILED.get(status["reason"], f"failed ({status['reason']})")
        return 5, f"{what}: {short(status['message'])}" if status.get("message") else what
    if pod["metadata"].get("deletionTimestamp"):
        return 4, f"is being deleted{_disruption(pod, events)}"
    scheduled = condition(pod, "PodScheduled")
    if not node_of(pod):
        return 3, unscheduled(pod, scheduled, events)
    specs = {spec["name"]: spec for spec in containers(pod.get("spec", {}), "initContainers", "containers")}
    for container in containers(status, "initContainerStatuses", "containerStatuses"):
        weight, words = _why_container(container, specs.get(container["name"], {}), events)
        if words:
            return weight, words
    if runs(pod, None):
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
        times = f", end number {n_starts}" if n_starts > 1 else ""
        return 5, f"container {name} {ended_in_words(ended, spec)}{times}{_last_words(ended)}"
    if reason not in _STARTING:
        return 5, f"container {name} cannot start: {short(message) or reason}"
    if name == _WEIGHTS and "running" in state:
        return 1, WAITS
    if name == _PACKAGES and "running" in state:
        return 1, "installs the chat page's packages"
    return 0, None


def waits(pod: Object) -> bool:
    """Whether a pod fetches its weights, or waits for the Job that does."""
    rows = containers(pod.get("status", {}), "initContainerStatuses")
    return any(row["name"] == _WEIGHTS and "running" in row.get("state", {}) for row in rows)


def never_starts(pod: Object, events: Sequence[Object]) -> bool:
    """Whether the kubelet's next tries must fail as this one did: the pod itself, or what it names, is wrong."""
    for container in containers(pod.get("status", {}), "initContainerStatuses", "containerStatuses"):
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        has_failed = waiting and container.get("lastState", {}).get("terminated", {}).get("exitCode", 0) != 0
        if reason in _WRONG:
            return "timed out" not in message  # the kubelet has not read the Secret yet, which may exist
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
    """The end of its log, which the kubelet keeps by terminationMessagePolicy FallbackToLogsOnError; nothing where it
    was killed, since the log does not say why."""
    if terminated.get("exitCode") == 137:
        return ""
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return f": {short(' / '.join(lines[-3:]), keep_end=True)}" if lines else ""


def _image_words(container: Object, reason: str, message: str, events: Sequence[Object]) -> str:
    words = _PULL_NOISE.sub("", message).strip()
    if not words:  # before 1.32 a back-off does not repeat the registry's words
        failed = [event for event in events if str(event.get("message", "")).startswith("Failed to pull image")]
        words = _PULL_NOISE.sub("", failed[-1]["message"]).strip() if failed else reason
    return f"cannot pull image {container.get('image', '')}: {short(words)}"


def _starting(pod: Object, events: Sequence[Object], now: float | None) -> tuple[int, str | None]:
    """A pod that has its node: what its last event says."""
    event = last_event(events, _MOUNT | {"FailedCreatePodSandBox", "Pulling", "Pulled", "Created", "Started"})
    message = str(event.get("message", "")) if event else ""
    if event is None:
        return 1, f"starts on {node_of(pod)}"
    if event["reason"] in _MOUNT:
        return 4, f"cannot mount a volume: {short(message)}"
    if event["reason"] == "FailedCreatePodSandBox":
        return 4, f"its node cannot start it: {short(message)}"
    if event["reason"] != "Pulling":
        return 1, f"starts on {node_of(pod)}"
    quoted = re.search(r'"([^"]+)"', message)
    since = event_time(event)
    age = f" for {steps(now - since)}" if now is not None and since is not None and now - since >= 5 else ""
    return 2, f"pulling image {quoted.group(1) if quoted else ''}{age}"


def _disruption(pod: Object, events: Sequence[Object]) -> str:
    disruption = condition(pod, "DisruptionTarget")
    if pod.get("status", {}).get("reason") == "NodeLost":
        return f": node {node_of(pod)} does not answer"
    reason = disruption.get("reason", "")
    if not reason and last_event(events, {"Preempted"}) is not None:  # before 1.26 there is no such condition
        reason = "PreemptionByScheduler"
    return f": {_DISRUPTED.get(reason) or short(disruption.get('message', '')) or reason}" if reason else ""


# ---- sets that cannot make their pods --------------------------------------------------------------------------------


def refused(set_: Object, events: Sequence[Object]) -> str | None:
    """Why a set cannot make its pods; None when it can. The sets that a LeaderWorkerSet makes begin with its name."""
    name, mine = set_["metadata"]["name"], events_of(set_, events)
    if set_.get("kind") == "LeaderWorkerSet":
        mine = in_time([row for row in events if f"{about(row).get('name', '')}-".startswith(f"{name}-")])
    event = last_event(mine, {"FailedCreate", "FailedUpdate", "SuccessfulCreate"})
    return refusal_in_words(str(event.get("message", ""))) if event and event["reason"] != "SuccessfulCreate" else None


def refusal_in_words(message: str) -> str:
    """Why the API server refused a pod: the quota, or what another rule says."""
    quota = _QUOTA.search(message)
    if quota is not None:
        name, requested, used, limited = quota.groups()
        return f"over quota {name}: requests {requested}; used {used}; limit {limited}"
    return short(re.sub(r"^(?:create Pod \S+ in \S+ \S+ failed error: |Error creating: )", "", message))


def missing(set_: Object, n_pods: int, n_nodes: int) -> str:
    kind = set_.get("kind", "StatefulSet")
    return f"its {kind} has made {n_pods} of {n_nodes} pods" if n_pods < n_nodes else "its pods start"


# ---- no node yet: what the scheduler and autoscalers say ---------------------------------------------------------

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


def unscheduled(pod: Object, condition: Object, events: Sequence[Object]) -> str:
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates", ()))
        return f"Pending: held by scheduling gate {gates}" if gates else "Pending: held by a scheduling gate"
    last = last_event([event for event in events if not _is_karpenter(event)], {"FailedScheduling"})
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
        return short(message)
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
    event = last_event(
        mine, {"TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp", "Nominated", "FailedScheduling"}
    )
    if event is None:
        return ""
    message, reason = str(event.get("message", "")), event["reason"]
    if reason in ("TriggeredScaleUp", "Nominated"):
        what = re.search(r"\{(.*?)\}", message) or re.search(r"nodeclaim/(\S+?)[,.]?(?:\s|$)", message)
        return f"; a node is being added{f' ({what.group(1)})' if what else ''}"
    if reason == "NotTriggerScaleUp":
        why = message.partition("pod didn't trigger scale-up")[2].lstrip(": ")
        return f"; the autoscaler adds no node{f': {short(why)}' if why else ''}"
    return f"; the autoscaler could not add a node: {short(message)}"


def _is_karpenter(event: Object) -> bool:
    source = event.get("reportingComponent") or event.get("source", {}).get("component", "")
    return str(source).startswith(("karpenter", "eks-auto"))


def requests(pod: Object) -> dict[str, str]:
    """What the pod's containers request, by resource: of the first that requests it, for words only."""
    found: dict[str, str] = {}
    for container in containers(pod.get("spec", {}), "containers", "initContainers"):
        resources = container.get("resources", {})
        found = {**resources.get("limits", {}), **resources.get("requests", {}), **found}
    return {name: str(value) for name, value in found.items()}
