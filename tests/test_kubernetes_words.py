"""What pods and events of Kubernetes say, in words, and the placement of units; with the API's real JSON shapes."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from golden_files import cases
from kubernetes_goldens import kept, sections
from samples import deployment

from penstock.targets import Placement
from penstock.targets.kubernetes import reasons, words
from penstock.targets.kubernetes.objects import REVISION, Object
from penstock.targets.kubernetes.view import look
from penstock.wire.announcement import Restart

NOW = 1_790_000_000.0


def at(seconds: float) -> str:
    """The API's time, `seconds` after NOW."""
    return datetime.fromtimestamp(NOW + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(rank: int = 0, node: str | None = "node-1", phase: str = "Pending", **more: Any) -> Object:
    metadata = {
        "name": f"qwen-r0-{rank}",
        "uid": f"uid-{rank}",
        "creationTimestamp": at(-100),
        "labels": {REVISION: "new"},
    }
    limits = {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}
    spec: Object = {"containers": [{"name": "node", "resources": {"limits": limits, "requests": limits}}]}
    if node is not None:
        spec["nodeName"] = node
    status = {"phase": phase, "conditions": more.pop("conditions", [])} | more.pop("status", {})
    return {"metadata": metadata | more.pop("metadata", {}), "spec": spec, "status": status | more}


def unscheduled(rank: int = 0) -> Object:
    return pod(rank, None, conditions=[{**UNSCHEDULED, "reason": "Unschedulable", "message": SHORT}])


def starting(*statuses: Object, init: tuple[Object, ...] = ()) -> Object:
    return pod(containerStatuses=[*statuses], initContainerStatuses=[*init])


def container(name: str = "node", image: str = "vllm/vllm-openai:v0.27.1", **more: Any) -> Object:
    return {"name": name, "image": image, "ready": False, "restartCount": 0} | more


def waiting(reason: str, message: str = "", **more: Any) -> Object:
    return container(state={"waiting": {"reason": reason, "message": message}}, **more)


def running(rank: int = 0, node: str = "node-1", started: float = -50, is_ready: bool = True, **more: Any) -> Object:
    state = {"running": {"startedAt": at(started)}}
    ready = {"type": "Ready", "status": "True" if is_ready else "False", "lastTransitionTime": at(started + 1)}
    return pod(rank, node, "Running", containerStatuses=[container(state=state)], conditions=[ready], **more)


def event(reason: str, message: str, ago: float = 10, of: str = "uid-0", **more: Any) -> Object:
    about = {"kind": "Pod", "name": "qwen-r0-0", "uid": of}
    return {"reason": reason, "message": message, "lastTimestamp": at(-ago), "involvedObject": about} | more


SET: Object = {
    "kind": "StatefulSet",
    "metadata": {"name": "qwen-r0", "uid": "uid-set", "labels": {REVISION: "new"}},
    "spec": {"replicas": 1},
}


def place(pods: list[Object], events: tuple[Object, ...] = (), n_nodes: int = 1, **more: Any) -> Placement:
    a_set, revision = more.pop("a_set", SET), more.pop("revision", "new")
    return words.placement_of_replica(a_set, pods, events, n_nodes, revision, NOW, **more)


# ---- placements ------------------------------------------------------------------------------------------------------

NEEDS = {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}


@pytest.mark.parametrize(("message", "expected"), cases("kubernetes/scheduler.txt"))
def test_the_schedulers_message_becomes_words(message: str, expected: str) -> None:
    """Messages of Kubernetes 1.20, 1.24 to 1.34, and 1.35."""
    assert reasons.unschedulable_in_words(message, NEEDS) == expected


UNSCHEDULED = {"type": "PodScheduled", "status": "False"}
SHORT = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
SCALE_UP = "pod triggered scale-up: [{gpu-pool 0->1 (max: 4)}]"
GATED = pod(node=None, conditions=[{**UNSCHEDULED, "reason": "SchedulingGated"}])
GATED["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
SCALED_UP = event("TriggeredScaleUp", SCALE_UP, 60)
FULL = event("NotTriggerScaleUp", "pod didn't trigger scale-up: 2 max node group size reached", 5)
CLAIMED = event("Nominated", "Pod should schedule on: nodeclaim/gpu-x7k2p", reportingComponent="karpenter")
NO_NODE = event("FailedScaleUp", "Node scale up in zones us-central1-a failed: GCE out of resources.")
NOT_FOUND = (
    'rpc error: code = NotFound desc = failed to pull and unpack image "docker.io/a/b:c": failed to resolve reference '
    '"docker.io/a/b:c": docker.io/a/b:c: not found'
)
BACK_OFF = 'Back-off pulling image "a/b:c"'
NOT_PULLED = event("Failed", f'Failed to pull image "a/b:c": {NOT_FOUND}'), event("Failed", "Error: ErrImagePull", 5)
PULLING = event("Pulling", 'Pulling image "a/b:c"', 43)
NO_MAP = event("FailedMount", 'MountVolume.SetUp failed for volume "launch" : configmap "x" not found', 2)
TWICE = event("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) b')
CREATING, WAITS = waiting("ContainerCreating"), waiting("PodInitializing")
SLOW_SECRET = waiting("CreateContainerConfigError", "failed to sync secret cache: timed out waiting")
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
CRASH = {"terminated": {"exitCode": 1, "reason": "Error", "message": "Traceback\n  File x\nKeyError: 'a'\n"}}
UNFIT = {"terminated": {"exitCode": 3, "message": "cannot use this image: it has no msgspec\n"}}
COPIED = container("copy", state={"terminated": {"exitCode": 0}})
RUNS = {"running": {"startedAt": at(-20)}}
QUOTA = (
    'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: exceeded quota: gpus, '
    "requested: requests.nvidia.com/gpu=4, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8"
)
REFUSED = event("FailedCreate", 'Error creating: pods "x" is forbidden: no', 60, of="uid-set")
LWS = SET | {"kind": "LeaderWorkerSet"}
REFUSED_LWS = tuple(
    event("FailedCreate", message, of="uid-workers", involvedObject={"name": name})
    for message, name in (("Error creating: over", "qwen-r0-0"), ("not ours", "qwen-r01"))
)
MADE = event("SuccessfulCreate", "create Pod qwen-r0-0 in StatefulSet qwen-r0 successful", 5, of="uid-set")
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
SHUT_DOWN = {"reason": "Terminated", "message": "Pod was terminated in response to ..."}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "x"}
DELETED = running(1, metadata={"deletionTimestamp": at(20)})
PREEMPTED = event("Preempted", "Preempted by ml/other on node node-1", of="uid-1")
LOST: dict[str, Any] = {"lost_nodes": frozenset({"node-1"})}
POD_SECURITY = 'pods "qwen-gateway-1" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot'
INSECURE = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": POD_SECURITY}


def crashed(n: int, state: Object, message: str = "back-off 10s restarting") -> Object:
    return waiting("CrashLoopBackOff", message, restartCount=n, lastState=state)


def pulls(reason: str, message: str, image: str = "a/b:c") -> Object:
    return waiting(reason, message, image=image)


def both(*others: Object, events: tuple[Object, ...] = ()) -> Placement:
    """Of a replica of two nodes whose first pod runs."""
    return place([running(0), *others], events, n_nodes=2)


def serves(n: int | None, *pods: Object, **more: Any) -> Placement:
    """Of a Deployment with so many replicas, or of none."""
    deployment = None if n is None else {"metadata": {"name": "g"}, "spec": {"replicas": n}, **more}
    return words.placement_of_deployment(deployment, pods, (), NOW)


def placements() -> dict[str, Placement]:
    """golden/kubernetes/placements.txt has what is said of each."""
    return {
        "unscheduled": place([unscheduled()]),
        "the autoscaler adds a node": place([unscheduled()], (SCALED_UP,)),
        "the autoscaler adds none after all": place([unscheduled()], (SCALED_UP, FULL)),
        "Karpenter adds a node": place([unscheduled()], (CLAIMED,)),
        "the cloud has no node": place([unscheduled()], (NO_NODE,)),
        "events of an earlier pod": place([unscheduled()], (event("TriggeredScaleUp", SCALE_UP, of="uid-earlier"),)),
        "gated": place([GATED]),
        "an image that is not there": place([starting(pulls("ErrImagePull", NOT_FOUND))]),
        "before 1.32 only events tell why": place([starting(pulls("ImagePullBackOff", BACK_OFF))], NOT_PULLED),
        "since 1.32": place([starting(pulls("ImagePullBackOff", f"{BACK_OFF}: ErrImagePull: {NOT_FOUND}"))]),
        "a registry that is busy": place([starting(pulls("ErrImagePull", "toomanyrequests: rate", "a/denied:404"))]),
        "no secret": place([starting(waiting("CreateContainerConfigError", 'secret "hub" not found'))]),
        "a secret that is late": place([starting(SLOW_SECRET)]),
        "a crash": place([starting(crashed(1, CRASH))]),
        "crash after crash": place([starting(crashed(2, CRASH))]),
        "out of memory, and waits": place([starting(crashed(1, OOM))]),
        "out of memory": place([starting(container(state=OOM))]),
        "pulls": place([starting(CREATING)], (PULLING,)),
        "has pulled": place([starting(CREATING)], (PULLING, event("Pulled", "Successfully pulled image", 2))),
        "no ConfigMap": place([starting(CREATING)], (NO_MAP,)),
        "a disk of another node": place([starting(CREATING)], (TWICE,)),
        "no container yet": place([starting()]),
        "an init container failed": place([starting(WAITS, init=(COPIED, crashed(1, UNFIT) | {"name": "prepare"}))]),
        "waits for the weights": place([starting(WAITS, init=(container("weights", state=RUNS),))]),
        "one of two pods is not ready": place([running(1, "node-2", -20, is_ready=False), running(0)], n_nodes=2),
        "no set": place([], a_set=None),
        "over quota": place([], (event("FailedCreate", QUOTA, of="uid-set"),)),
        "refused": place([], (REFUSED,)),
        "no longer refused": place([], (REFUSED, MADE)),
        "a LeaderWorkerSet is refused by the sets that it makes": place([], REFUSED_LWS, a_set=LWS),
        "the second pod waits": both(unscheduled(1)),
        "both pods wait": place([unscheduled(0), unscheduled(1)], n_nodes=2),
        "the second pod is not there": both(),
        "it was evicted": both(pod(1, phase="Failed", status=EVICTED)),
        "it is deleted": both(DELETED),
        "it is preempted": both(DELETED | {"status": {"phase": "Running", "conditions": [DISRUPTED]}}),
        "it is preempted, as only an event tells": both(DELETED, events=(PREEMPTED,)),
        "its node shuts down": both(pod(1, phase="Failed", status=SHUT_DOWN)),
        "it starts again": both(pod(1, metadata={"creationTimestamp": at(-5)})),
        "its node is lost": place([running(0)], **LOST),
        "its node is lost, and its grace is over": place([running(0, metadata={"deletionTimestamp": at(-31)})], **LOST),
        "another revision serves": place([running(0)], revision="newer"),
        "its probe fails once": place([running(0, started=-30, is_ready=False)], revision="newer"),
        "another revision never served": place([running(0, started=-500, is_ready=False)], revision="newer"),
        "another revision cannot start": place([starting(waiting("ErrImagePull"))], revision="newer"),
        "another revision has no pod": place([], revision="newer"),
        "one of two gateways is ready": serves(2, running(0), pod(1, None)),
        "no gateway": serves(None),
        "a gateway that is scaled to 0": serves(0),
        "a gateway without a pod": serves(1),
        "a gateway that is not ready": serves(1, running(0, is_ready=False)),
        "a gateway after an eviction": serves(1, pod(0, phase="Failed", status=EVICTED), pod(1)),
        "a gateway that is refused": serves(1, status={"conditions": [INSECURE]}),
        "a chat page installs packages": serves(1, starting(WAITS, init=(container("packages", state=RUNS),))),
    }


def told(placement: Placement) -> list[str]:
    """Its words, and what else is set; times from now on."""
    facts = {name: value for name, value in msgspec.structs.asdict(placement).items() if value not in (None, False)}
    state, reason = facts.pop("state"), facts.pop("reason", None)
    rest = [f"{name} {value - NOW if name.endswith('_at') else value}" for name, value in facts.items()]
    return [": ".join(filter(None, (state, reason))), *rest]


def test_placements_are_told_in_words() -> None:
    text = sections({name: told(placement) for name, placement in placements().items()})
    assert text == kept("placements.txt", text)


# ---- lost nodes and restarts -----------------------------------------------------------------------------------------


def test_a_pod_on_a_lost_node_is_deleted_by_force_only_after_its_grace() -> None:
    ending = running(0, metadata={"deletionTimestamp": at(-31)})
    assert not words.is_lost(running(0), NOW, (), frozenset({"node-1"}))
    assert not words.is_lost(ending, NOW), "its node may be busy"
    assert not words.is_lost(running(0, metadata={"deletionTimestamp": at(-10)}), NOW, (), frozenset({"node-1"}))
    assert words.is_lost(ending, NOW, (), frozenset({"node-1"}))
    assert words.is_lost(ending, NOW, (event("NodeNotReady", "Node is not ready", 300),))
    assert words.is_lost(running(0, metadata={"deletionTimestamp": at(-31)}, status={"reason": "NodeLost"}), NOW)


def test_what_the_cluster_brought_back_is_a_restart_with_its_reason() -> None:
    assert place([running(0)]).restart is None
    again = running(0)
    again["status"]["containerStatuses"][0]["lastState"] = {"terminated": OOM["terminated"] | {"finishedAt": at(-52)}}
    words_of = "container node was ended by the kernel: out of memory (limit 64Gi)"
    assert place([again]).restart == Restart(NOW - 52, words_of)
    other = running(0, metadata={"creationTimestamp": at(-60), "uid": "uid-9"})
    owner = SET | {"metadata": SET["metadata"] | {"creationTimestamp": at(-100)}}
    evicted = event("Evicted", "The node was low on resource: memory.", of="uid-0")
    assert words.last_restart(owner, [other], [evicted]) == Restart(
        NOW - 60, "pod qwen-r0-0 took the place of another: The node was low on resource: memory."
    )
    rolled_out = owner | {"status": {"conditions": [{"type": "Progressing", "lastUpdateTime": at(-55)}]}}
    assert words.last_restart(rolled_out, [other], []) is None, "a rollout made it"


def test_a_look_that_missed_the_change_of_a_pod_still_asks_why() -> None:
    rows = {"Pod": [running(metadata={"labels": {}})], "Event": [event("Evicted", "The node was low on resource.")]}
    api: Any = SimpleNamespace(list=lambda kind, *_: rows.get(kind, []))
    run: Any = SimpleNamespace(name="qwen", deployment=lambda: deployment(target="kubernetes"))
    before = look(api, run)
    assert before.events == look(api, run, before).events == (), "all is quiet"
    rows["Pod"] = [running(metadata={"labels": {}, "uid": "uid-9"})]
    assert look(api, run, before).events == tuple(rows["Event"])


def test_a_pod_whose_node_was_silent_before_its_end_has_no_grace() -> None:
    ending = {"deletionTimestamp": at(30), "deletionGracePeriodSeconds": 60}
    silent = running(0, started=-46, is_ready=False, metadata=ending)  # unready for 45 s, deleted 30 s ago
    told = event("NodeNotReady", "Node is not ready", 45)
    nobody, both = frozenset[str](), frozenset({"node-1"})
    for events, nodes in (((told,), nobody), ((), both)):
        assert words.is_lost(silent, NOW, events, nodes, is_silent=True)
        assert not words.is_lost(silent, NOW, events, nodes)
        assert not words.is_lost(running(0, metadata=ending), NOW, events, nodes, is_silent=True), "it is ready"
        draining = running(0, started=-20, is_ready=False, metadata=ending)
        assert not words.is_lost(draining, NOW, events, nodes, is_silent=True), "it became unready by its end"
    assert not words.is_lost(silent, NOW, is_silent=True), "its node answers"
    early = event("NodeNotReady", "Node is not ready", 500)
    assert not words.is_lost(silent, NOW, (early,), is_silent=True), "that was another time"


def test_a_replica_of_two_nodes_that_waits_for_a_lost_one_gets_another() -> None:
    first = running(0, started=-500, is_ready=False)
    silent = running(1, node="node-2", started=-41, is_ready=False)  # made unready 40 s ago
    told = event("NodeNotReady", "Node is not ready", 40, of="uid-1")
    placement = place([first, silent], (told,), n_nodes=2)
    assert (placement.state, placement.reason) == ("broken", "node node-2 does not answer")
    assert not placement.is_repaired_by_target
    assert words.lost_pods([first, silent], NOW, (told,), frozenset(), 2) == [silent]
    assert words.lost_pods([running(0), silent], NOW, (told,), frozenset(), 2) == [], "it serves"
    evicted = event("TaintManagerEviction", "Marking for deletion Pod a/qwen-r0-1", 100, of="uid-1")
    ended = running(1, node="node-2", is_ready=False, metadata={"deletionTimestamp": at(-31)})
    assert words.lost_pods([first, ended], NOW, (evicted,), frozenset(), 2) == [ended], "it never was ready"
