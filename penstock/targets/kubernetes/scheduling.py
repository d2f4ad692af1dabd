"""Why a pod has no node yet: what the scheduler and autoscalers say, in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.pod_status import containers, last_event, short

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
