"""What pods and events of Kubernetes say, in words, and the placement of units; with the API's real JSON shapes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.targets import Placement
from penstock.targets.kubernetes import reasons, scheduling, words
from penstock.targets.kubernetes.objects import REVISION, Object
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
    return words.placement_of_replica(SET, pods, events, n_nodes, more.pop("revision", "new"), NOW, **more)


# ---- the scheduler ---------------------------------------------------------------------------------------------------

NEEDS = {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (  # 1.20
            "0/8 nodes are available: 2 node(s) had taint {dedicated: ml}, that the pod didn't tolerate, "
            "6 Insufficient nvidia.com/gpu.",
            "0/8 nodes have 4 nvidia.com/gpu free (2 tainted dedicated=ml)",
        ),
        (
            "0/3 nodes are available: 1 node(s) had taint {node-role.kubernetes.io/master: }, that the pod didn't "
            "tolerate, 2 node(s) didn't match Pod's node affinity.",
            "0/3 nodes can take it (1 tainted, 2 without the labels that it selects)",
        ),
        (  # 1.24 to 1.34
            "0/8 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
            "1 node(s) were unschedulable, 6 Insufficient cpu, 6 Insufficient nvidia.com/gpu. preemption: 0/8 nodes "
            "are available: 2 Preemption is not helpful for scheduling, 6 No preemption victims found for incoming "
            "pod..",
            "0/8 nodes have 4 nvidia.com/gpu, 16 cpu free (1 tainted, 1 cordoned)",
        ),
        (  # 1.35
            "0/17 nodes are available: 17 node(s) had untolerated taint(s). no new claims to deallocate, preemption: "
            "0/17 nodes are available: 17 Preemption is not helpful for scheduling.",
            "0/17 nodes can take it (17 tainted)",
        ),
        ("0/2 nodes are available: 2 Too many pods.", "0/2 nodes can take it (2 Too many pods)"),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/2 nodes are "
            "available: 2 Preemption is not helpful for scheduling.",
            "its PersistentVolumeClaim has no volume yet",
        ),
        (
            '0/4 nodes are available: persistentvolumeclaim "models" not found. preemption: not eligible due to '
            "preemptionPolicy=Never.",
            '0/4 nodes can take it (persistentvolumeclaim "models" not found)',
        ),
        ("no nodes available to schedule pods", "no nodes available to schedule pods"),
    ],
)
def test_the_schedulers_message_becomes_words(message: str, expected: str) -> None:
    assert scheduling.unschedulable_in_words(message, NEEDS) == expected


SHORT = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
SCALE_UP = "pod triggered scale-up: [{gpu-pool 0->1 (max: 4)}]"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), ""),
        ((event("TriggeredScaleUp", SCALE_UP),), "; a node is being added (gpu-pool 0->1 (max: 4))"),
        (
            (
                event("TriggeredScaleUp", SCALE_UP, 60),
                event("NotTriggerScaleUp", "pod didn't trigger scale-up: 2 max node group size reached", 5),
            ),
            "; the autoscaler adds no node: 2 max node group size reached",
        ),
        (
            (event("Nominated", "Pod should schedule on: nodeclaim/gpu-x7k2p", reportingComponent="karpenter"),),
            "; a node is being added (gpu-x7k2p)",
        ),
        (
            (event("FailedScaleUp", "Node scale up in zones us-central1-a failed: GCE out of resources."),),
            "; the autoscaler could not add a node: Node scale up in zones us-central1-a failed: GCE out of resources.",
        ),
        ((event("TriggeredScaleUp", SCALE_UP, of="uid-earlier"),), ""),
    ],
)
def test_an_unscheduled_pod_is_queued_with_what_the_autoscaler_does(events: tuple[Object, ...], expected: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SHORT}
    placement = place([pod(node=None, conditions=[scheduled])], events)
    assert (placement.state, placement.where) == ("queued", None)
    assert placement.reason == f"Pending: 0/8 nodes have 4 nvidia.com/gpu free{expected}"


def test_a_gated_pod_says_which_gate_holds_it() -> None:
    gated = pod(node=None, conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])
    gated["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    assert place([gated]).reason == "Pending: held by scheduling gate kueue.x-k8s.io/admission"


# ---- containers that do not start ------------------------------------------------------------------------------------

NOT_FOUND = (
    'rpc error: code = NotFound desc = failed to pull and unpack image "docker.io/a/b:c": failed to resolve reference '
    '"docker.io/a/b:c": docker.io/a/b:c: not found'
)
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
CRASH = {"terminated": {"exitCode": 1, "reason": "Error", "message": "Traceback\n  File x\nKeyError: 'a'\n"}}


@pytest.mark.parametrize(
    ("status", "events", "expected"),
    [
        (
            [waiting("ErrImagePull", NOT_FOUND, image="a/b:c")],
            (),
            "cannot pull image a/b:c: docker.io/a/b:c: not found",
        ),
        (  # before 1.32 only events have the registry's words
            [waiting("ImagePullBackOff", 'Back-off pulling image "a/b:c"', image="a/b:c")],
            (event("Failed", f'Failed to pull image "a/b:c": {NOT_FOUND}'), event("Failed", "Error: ErrImagePull", 5)),
            "cannot pull image a/b:c: docker.io/a/b:c: not found",
        ),
        (
            [waiting("ImagePullBackOff", f'Back-off pulling image "a/b:c": ErrImagePull: {NOT_FOUND}', image="a/b:c")],
            (),
            "cannot pull image a/b:c: docker.io/a/b:c: not found",
        ),
        (
            [waiting("CreateContainerConfigError", 'secret "hub" not found')],
            (),
            'container node cannot start: secret "hub" not found',
        ),
        (
            [waiting("CrashLoopBackOff", "back-off 10s restarting", restartCount=2, lastState=CRASH)],
            (),
            "container node ended with code 1, end number 3: Traceback / File x / KeyError: 'a'",
        ),
        (
            [waiting("CrashLoopBackOff", "back-off 10s", restartCount=1, lastState=OOM)],
            (),
            "container node was ended by the kernel: out of memory (limit 64Gi), end number 2",
        ),
        ([container(state=OOM)], (), "container node was ended by the kernel: out of memory (limit 64Gi)"),
        (
            [waiting("ContainerCreating")],
            (event("Pulling", 'Pulling image "a/b:c"', 43),),
            "pulling image a/b:c for 40 s",
        ),
        (
            [waiting("ContainerCreating")],
            (event("Pulling", 'Pulling image "a/b:c"', 43), event("Pulled", "Successfully pulled image", 2)),
            "starts on node-1",
        ),
        (
            [waiting("ContainerCreating")],
            (event("FailedMount", 'MountVolume.SetUp failed for volume "launch" : configmap "x" not found', 2),),
            'cannot mount a volume: MountVolume.SetUp failed for volume "launch" : configmap "x" not found',
        ),
        (
            [waiting("ContainerCreating")],
            (event("FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) b'),),
            'cannot mount a volume: Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) b',
        ),
        ([], (), "starts on node-1"),
    ],
)
def test_a_container_that_does_not_start_says_why(
    status: list[Object], events: tuple[Object, ...], expected: str
) -> None:
    placement = place([pod(containerStatuses=status)], events)
    assert placement.reason == expected
    assert placement.state in ("queued", "broken")
    assert placement.where == "node-1"


def test_an_init_container_that_failed_is_shown_before_those_that_wait_for_it() -> None:
    ended = {"terminated": {"exitCode": 3, "message": "cannot use this image: it has no msgspec\n"}}
    prepare = waiting("CrashLoopBackOff", name="prepare", restartCount=1, lastState=ended)
    done = container("copy", state={"terminated": {"exitCode": 0}})
    placement = place([pod(initContainerStatuses=[done, prepare], containerStatuses=[waiting("PodInitializing")])])
    expected = "container prepare ended with code 3, end number 2: cannot use this image: it has no msgspec"
    assert (placement.state, placement.reason) == ("queued", expected)


def test_a_replica_says_that_it_waits_for_the_weights() -> None:
    state = {"running": {"startedAt": at(-20)}}
    waits = pod(
        initContainerStatuses=[container("weights", state=state)], containerStatuses=[waiting("PodInitializing")]
    )
    assert place([waits]).reason == "waits for the weights"


def test_a_chat_page_says_that_it_installs_packages() -> None:
    state = {"running": {"startedAt": at(-20)}}
    installs = pod(
        initContainerStatuses=[container("packages", state=state)], containerStatuses=[waiting("PodInitializing")]
    )
    assert (
        words.placement_of_deployment({"spec": {}}, [installs], [], NOW).reason == "installs the chat page's packages"
    )


# ---- placements of replicas ------------------------------------------------------------------------------------------


def test_a_replica_is_placed_when_all_its_node_containers_run_ready_or_not() -> None:
    pods = [running(1, "node-2", -20, is_ready=False), running(0, "node-1", -50)]
    placement = place(pods, n_nodes=2)
    assert (placement.state, placement.where, placement.placed_at) == ("placed", "node-1, node-2", NOW - 20)
    assert placement.reason is None


def test_a_replica_without_its_set_is_gone() -> None:
    assert words.placement_of_replica(None, [], [], 1, "new", NOW).state == "gone"


def test_a_quota_is_named_by_the_events_of_the_set() -> None:
    message = (
        'create Pod qwen-r0-0 in StatefulSet qwen-r0 failed error: pods "qwen-r0-0" is forbidden: exceeded quota: '
        "gpus, requested: requests.nvidia.com/gpu=4, used: requests.nvidia.com/gpu=8, limited: "
        "requests.nvidia.com/gpu=8"
    )
    placement = place([], (event("FailedCreate", message, of="uid-set"),))
    expected = (
        "over quota gpus: requests requests.nvidia.com/gpu=4; used requests.nvidia.com/gpu=8; limit "
        "requests.nvidia.com/gpu=8"
    )
    assert (placement.state, placement.reason) == ("queued", expected)


def test_a_set_that_makes_its_pods_again_is_not_refused_any_more() -> None:
    refused = event("FailedCreate", 'Error creating: pods "x" is forbidden: no', 60, of="uid-set")
    made = event("SuccessfulCreate", "create Pod qwen-r0-0 in StatefulSet qwen-r0 successful", 5, of="uid-set")
    assert place([], (refused,)).reason == 'pods "x" is forbidden: no'
    assert place([], (refused, made)).reason == "its StatefulSet has made 0 of 1 pods"


def test_a_leader_worker_set_is_refused_by_the_sets_that_it_makes() -> None:
    lws = SET | {"kind": "LeaderWorkerSet"}
    ours = event("FailedCreate", "Error creating: over", of="uid-workers")
    other = event("FailedCreate", "not ours", 1, of="uid-other")
    events = [ours | {"involvedObject": {"name": "qwen-r0-0"}}, other | {"involvedObject": {"name": "qwen-r01"}}]
    assert reasons.refused(lws, events) == "over"


def test_the_first_start_of_several_pods_is_queued_and_names_the_pod_that_waits() -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SHORT}
    placement = place([running(0), pod(1, None, conditions=[scheduled])], n_nodes=2)
    assert placement.state == "queued"
    assert placement.reason == "qwen-r0-1: Pending: 0/8 nodes have 4 nvidia.com/gpu free"
    both = place([pod(rank, None, conditions=[scheduled]) for rank in (0, 1)], n_nodes=2)
    assert both.reason == "2 of 2 pods: Pending: 0/8 nodes have 4 nvidia.com/gpu free"


EVICTED = {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "x"}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (None, "its StatefulSet has made 1 of 2 pods"),
        (pod(1, phase="Failed", status=EVICTED), f"qwen-r0-1: was evicted: {EVICTED['message']}"),
        (running(1, metadata={"deletionTimestamp": at(20)}), "qwen-r0-1: is being deleted"),
        (
            running(1, metadata={"deletionTimestamp": at(20)})
            | {"status": {"phase": "Running", "conditions": [DISRUPTED]}},
            "qwen-r0-1: is being deleted: preempted by a pod of higher priority",
        ),
        (
            pod(1, phase="Failed", status={"reason": "Terminated", "message": "Pod was terminated in response to ..."}),
            "qwen-r0-1: was ended: its node shuts down: Pod was terminated in response to ...",
        ),
        (pod(1, metadata={"creationTimestamp": at(-5)}), "qwen-r0-1: starts on node-1"),
    ],
)
def test_a_replica_that_lost_a_pod_is_broken_and_repaired_by_its_set(other: Object | None, reason: str) -> None:
    placement = place([running(0), *([other] if other else [])], n_nodes=2)
    assert (placement.state, placement.is_repaired_by_target, placement.reason) == ("broken", True, reason)


def test_before_the_condition_of_disruptions_an_event_tells_of_preemption() -> None:
    victim = running(1, metadata={"deletionTimestamp": at(20)})
    preempted = event("Preempted", "Preempted by ml/other on node node-1", of="uid-1")
    placement = place([running(0), victim], (preempted,), n_nodes=2)
    assert placement.reason == "qwen-r0-1: is being deleted: preempted by a pod of higher priority"


def test_a_pod_on_a_lost_node_is_deleted_by_force_only_after_its_grace() -> None:
    ending = running(0, metadata={"deletionTimestamp": at(-31)})
    assert not words.is_lost(running(0), NOW, (), frozenset({"node-1"}))
    assert not words.is_lost(ending, NOW), "its node may be busy"
    assert not words.is_lost(running(0, metadata={"deletionTimestamp": at(-10)}), NOW, (), frozenset({"node-1"}))
    assert words.is_lost(ending, NOW, (), frozenset({"node-1"}))
    assert words.is_lost(ending, NOW, (event("NodeNotReady", "Node is not ready", 300),))
    assert words.is_lost(running(0, metadata={"deletionTimestamp": at(-31)}, status={"reason": "NodeLost"}), NOW)
    placement = place([ending], lost_nodes=frozenset({"node-1"}))
    assert (placement.state, placement.is_repaired_by_target) == ("broken", False)
    assert placement.reason == "node node-1 does not answer"


def test_a_replica_on_a_node_that_is_not_ready_stays_placed_with_the_reason() -> None:
    placement = place([running(0)], lost_nodes=frozenset({"node-1"}))
    assert (placement.state, placement.reason) == ("placed", "node node-1 does not answer: it is replaced")


def test_a_replica_of_another_revision_leaves_or_is_placed_again_when_it_serves_nothing() -> None:
    serving = place([running(0)], revision="newer")
    assert (serving.state, serving.ends_at) == ("placed", NOW)
    assert serving.lead_s is not None and serving.lead_s > 1e8
    blinked = place([running(0, started=-30, is_ready=False)], revision="newer")
    assert blinked.state == "placed", "a probe may fail once"
    for pods in ([running(0, started=-500, is_ready=False)], [pod(containerStatuses=[waiting("ErrImagePull")])], []):
        placement = place(pods, revision="newer")
        assert (placement.state, placement.is_repaired_by_target) == ("broken", False)


# ---- gateway and controller ------------------------------------------------------------------------------------------


def test_a_deployment_is_placed_when_one_of_its_pods_is_ready() -> None:
    deployment_ = {"metadata": {"name": "qwen-gateway"}, "spec": {"replicas": 2}}
    pods = [running(0, "node-1"), pod(1, None)]
    placement = words.placement_of_deployment(deployment_, pods, (), NOW)
    assert (placement.state, placement.where) == ("placed", "node-1")


@pytest.mark.parametrize(
    ("replicas", "pods", "state", "reason"),
    [
        (None, [], "gone", "its Deployment is not in the cluster"),
        (0, [], "gone", "its Deployment is scaled to 0"),
        (1, [], "queued", "has no pod yet"),
        (1, [running(0, is_ready=False)], "queued", "is not ready yet"),
        (1, [pod(0, phase="Failed", status=EVICTED), pod(1)], "queued", "starts on node-1"),
    ],
)
def test_a_deployment_that_serves_nothing_says_why(
    replicas: int | None, pods: list[Object], state: str, reason: str
) -> None:
    deployment_ = None if replicas is None else {"metadata": {"name": "g"}, "spec": {"replicas": replicas}}
    placement = words.placement_of_deployment(deployment_, pods, (), NOW)
    assert (placement.state, placement.reason) == (state, reason)


def test_a_deployment_whose_pods_are_refused_says_why() -> None:
    message = 'pods "qwen-gateway-1" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    deployment_ = {"metadata": {"name": "g"}, "spec": {"replicas": 1}, "status": {"conditions": [failure]}}
    assert words.placement_of_deployment(deployment_, [], (), NOW).reason == message


@pytest.mark.parametrize(
    ("status", "events", "is_final"),
    [
        (waiting("ErrImagePull", NOT_FOUND, image="a/b:c"), (), True),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "a/b:c"', image="a/b:c"),
            (event("Failed", f'Failed to pull image "a/b:c": {NOT_FOUND}'),),
            True,
        ),
        (waiting("ErrImagePull", "toomanyrequests: rate limit", image="a/denied:404"), (), False),
        (waiting("CreateContainerConfigError", 'secret "hub" not found'), (), True),
        (waiting("CreateContainerConfigError", "failed to sync secret cache: timed out waiting"), (), False),
        (waiting("ContainerCreating"), (), False),
        (waiting("CrashLoopBackOff", restartCount=1, lastState={"terminated": {"exitCode": 1}}), (), False),
        (waiting("CrashLoopBackOff", restartCount=2, lastState={"terminated": {"exitCode": 1}}), (), True),
    ],
)  # fmt: skip
def test_a_pod_that_can_never_start_is_final(status: Object, events: tuple[Object, ...], is_final: bool) -> None:
    placement = place([pod(containerStatuses=[status])], events)
    assert (placement.state in ("queued", "broken"), placement.is_final) == (True, is_final)


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
