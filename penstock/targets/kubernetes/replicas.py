"""The objects of replicas: a StatefulSet or a LeaderWorkerSet for each, and what all of a deployment share. Pure.

One set for each replica, so that resizing, draining and replacing act on exactly the replicas that are named. In a
rendered set "{replica}" stands for its number. A pod's rank is the number at the end of its name, in both kinds of set.
Nothing is changed in place: another revision is another set of pods, which the controller places before it drains the
old ones; a StatefulSet would restart the ranks of a replica one by one.
"""

from __future__ import annotations

import hashlib

import msgspec

from penstock.engines.vllm import images
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import gpus, objects, pods
from penstock.targets.kubernetes.objects import COMPONENT, INSTANCE, REPLICA, REVISION, Object, block_of, build
from penstock.targets.kubernetes.pods import merged
from penstock.text import GIB, MIB

NUMBER = "{replica}"
CONTAINER = "node"
_HOST, _ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
# Set on the pods of StatefulSets, so on the leaders of LeaderWorkerSets too, since Kubernetes 1.28:
# https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#pod-index-label
_INDEX = "apps.kubernetes.io/pod-index"

# A rank of vLLM on a GPU: 4 CPUs, 16 GiB for libraries, CUDA's context and pinned buffers (5 to 10 GiB); a node once:
# 8 GiB. Files that are loaded go through the page cache, which a limit only shrinks.
_CPUS_PER_RANK = 4
_RANK_BYTES, _NODE_BYTES = 16 * GIB, 8 * GIB
_CPU_SPARE_BYTES = GIB  # of a node without GPUs, besides a quarter more than the plan's need
# /dev/shm has 64 MiB otherwise, and NCCL and vLLM's message queues end with a bus error. A queue has 160 MiB a rank
# (VLLM_MQ_MAX_CHUNK_BYTES_MB x 10), NCCL less, the cache for images 4 GiB once (--mm-processor-cache-gb).
_SHM_NODE_BYTES, _SHM_RANK_BYTES = 4 * GIB, GIB
_SPARE_DISK_BYTES = 10 * GIB  # compiled kernels and logs, next to weights on the node's disk
# The node needs its own; it gives the file's to the engine.
_OF_THE_NODE = {"PENSTOCK_HOME", "PYTHONPATH"}
# The node is done before the kubelet kills it: drain_s, then what ending an engine takes (node/supervisor.py).
_END_S, _KILL_MARGIN_S = 20.0, 10.0


class Storage(msgspec.Struct, frozen=True):
    """Where a replica's pods have the weights. `init`: containers that fetch them, or wait for them. `disk_bytes`: what
    is downloaded into an emptyDir."""

    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    env: tuple[Object, ...] = ()
    annotations: dict[str, str] = {}
    init: tuple[Object, ...] = ()
    disk_bytes: int = 0


NO_STORAGE = Storage()


def in_pods(launch: Launch, deployment: Deployment) -> Launch:
    """A launch with the paths and addresses that hold in the pods."""
    return msgspec.structs.replace(
        launch,
        announce_urls=(f"http://{objects.gateway_pods(deployment.name)}:{objects.ADMIN_PORT}",),
        announce_file=None,
        token_file=f"{objects.run_path(deployment)}/secrets/admin-token",
    )


def replica(launch: Launch, deployment: Deployment, storage: Storage = NO_STORAGE) -> list[Object]:
    """The set of pods of one replica."""
    revision_name = revision(launch, deployment, storage)
    template = _template(launch, deployment, storage, revision_name)
    if block_of(deployment).shape == "lws":
        kind, spec = "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", _leader_worker_set(launch.plan.n_nodes, template)
    else:
        kind, spec = "apps/v1/StatefulSet", _stateful_set(deployment, launch.plan.n_nodes, template)
    entry = build(kind, objects.replica_set(deployment.name, NUMBER), deployment, "replica", spec=spec)
    entry["metadata"]["labels"] |= {REPLICA: NUMBER, REVISION: revision_name}
    return [entry]


def _stateful_set(deployment: Deployment, n_nodes: int, template: Object) -> Object:
    return {
        "replicas": n_nodes,
        "serviceName": objects.nodes(deployment.name),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": _selector(deployment)},
        "template": template,
    }


def _leader_worker_set(n_nodes: int, template: Object) -> Object:
    """https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/. The nodes form a new group by themselves when one
    comes back, so no pod is restarted because of another."""
    return {
        "replicas": 1,
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {"size": n_nodes, "restartPolicy": "None", "workerTemplate": template},
    }


def shared_objects(launch: Launch, deployment: Deployment, storage: Storage = NO_STORAGE) -> list[Object]:
    """What all replicas share: the ConfigMap of their launch, the headless Service, the disruption budget."""
    revision_name = revision(launch, deployment, storage)
    parts: Object = {"immutable": True, "data": {"launch.json": _launch_json(launch, deployment)}}
    config_map = build("v1/ConfigMap", launch_map(deployment.name, revision_name), deployment, "replica", **parts)
    config_map["metadata"]["labels"][REVISION] = revision_name
    spec: Object = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: deployment.name, COMPONENT: "replica"},
        "ports": [{"name": "http", "port": objects.ENGINE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    service = build("v1/Service", objects.nodes(deployment.name), deployment, "replica", spec=spec)
    budget = _disruption_budget(deployment, launch.plan.n_nodes)
    return [config_map, service, *([budget] if budget else [])]


def _disruption_budget(deployment: Deployment, n_nodes: int) -> Object | None:
    """One replica at a time is drained. It counts first pods: losing any pod of a replica loses the replica.

    With one replica it would block every drain. A `maxUnavailable` is taken of the size of whole sets, so it would
    allow nothing where their other pods are not counted; there `minAvailable` is a number of first pods.
    https://kubernetes.io/docs/tasks/run-application/configure-pdb/#arbitrary-controllers-and-selectors
    """
    n_least = deployment.replicas.min
    if n_least < 2:
        return None
    counts_sets = n_nodes > 1 and block_of(deployment).shape == "statefulset"
    spec: Object = {
        **({"minAvailable": n_least - 1} if counts_sets else {"maxUnavailable": 1}),
        "selector": {"matchLabels": {INSTANCE: deployment.name, COMPONENT: "replica", _INDEX: "0"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return build("policy/v1/PodDisruptionBudget", f"{deployment.name}-replicas", deployment, "replica", spec=spec)


def revision(launch: Launch, deployment: Deployment, storage: Storage = NO_STORAGE) -> str:
    """Names what the pods of a replica run: a hash of their template and of launch.json."""
    template = _template(launch, deployment, storage, "")
    whole = msgspec.json.encode([template, _launch_json(launch, deployment)], order="sorted")
    return hashlib.sha256(whole).hexdigest()[:10]


def launch_map(name: str, revision_name: str) -> str:
    """The ConfigMap with launch.json: at most 58 characters."""
    return f"{name}-launch-{revision_name}"


def _launch_json(launch: Launch, deployment: Deployment) -> str:
    text = msgspec.json.encode(in_pods(launch, deployment))
    return msgspec.json.format(text, indent=2).decode() + "\n"


def _selector(deployment: Deployment) -> dict[str, str]:
    return {INSTANCE: deployment.name, COMPONENT: "replica", REPLICA: NUMBER}


def grace_s(plan: Plan) -> float:
    """How long the kubelet waits before it kills a pod."""
    return plan.drain_s + _END_S + _KILL_MARGIN_S


def _template(launch: Launch, deployment: Deployment, storage: Storage, revision_name: str) -> Object:
    block, plan = block_of(deployment), launch.plan
    mounts = (*storage.mounts, {"name": "shm", "mountPath": "/dev/shm"})
    size = f"{_shm_bytes(plan) // MIB}Mi"
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    token = block.hub_token_secret
    pod = pods.Pod(
        component="replica",
        container=CONTAINER,
        image=images.image(deployment, plan),
        argv=_argv(deployment, plan),
        config_maps=(launch_map(deployment.name, revision_name),),
        resources=resources(deployment, plan, storage),
        grace_s=grace_s(plan),
        labels={REPLICA: NUMBER, REVISION: revision_name},
        annotations=storage.annotations,
        env=(
            *pods.plain_env(
                {name: text for name, text in deployment.engine.variables.items() if name not in _OF_THE_NODE}
            ),
            *storage.env,
            *([pods.secret_env("HF_TOKEN", token, "token")] if token else []),
        ),
        volumes=(*storage.volumes, shm),
        mounts=mounts,
        ports={"http": objects.ENGINE_PORT},
        # Ranks behind the first listen nowhere, so the probe reads the file that every node writes.
        readiness={"exec": {"command": ["test", "-e", objects.READY_FILE]}, "periodSeconds": 2},
        init=storage.init,
        service_account=block.service_account,
        spec=_scheduling(deployment, plan),
    )
    template = pods.pod_template(deployment, pod)
    whole = merged(template, block.patch)
    assert isinstance(whole, dict)
    return whole


def _argv(deployment: Deployment, plan: Plan) -> tuple[str, ...]:
    launch_file = f"{objects.run_path(deployment)}/artifact/launch.json"
    words = ["-m", "penstock.node", launch_file, "--replica", NUMBER, "--rank-from-hostname"]
    words += ["--port", str(objects.ENGINE_PORT), "--ready-file", objects.READY_FILE]
    return (*words, "--kill-after", f"{plan.drain_s + _END_S:g}")


def resources(deployment: Deployment, plan: Plan, storage: Storage = NO_STORAGE) -> dict[str, str]:
    """Requests and limits of one pod of a replica: `ranks_each` ranks. Memory covers /dev/shm, which counts to it."""
    block, n_ranks = block_of(deployment), plan.ranks_each
    is_cuda = plan.device == "cuda"
    if is_cuda:
        n_cpus, n_bytes = gpu_needs(n_ranks)
    else:
        n_cpus = plan.n_threads
        n_bytes = -(-plan.need.total_bytes * 5 // 4 // plan.n_nodes) + _CPU_SPARE_BYTES + _shm_bytes(plan)
    memory = f"{-(-n_bytes // MIB)}Mi"
    return {
        "cpu": str(block.cpus_per_node or n_cpus),
        "memory": block.memory or memory,
        **(
            {"ephemeral-storage": f"{-(-(storage.disk_bytes + _SPARE_DISK_BYTES) // GIB)}Gi"}
            if storage.disk_bytes
            else {}
        ),
        **({gpus.RESOURCE: str(n_ranks)} if is_cuda else {}),
    }


def gpu_needs(n_ranks: int) -> tuple[int, int]:
    """CPUs and bytes of memory that a pod with so many GPUs requests, where the file does not say."""
    return _CPUS_PER_RANK * n_ranks, _NODE_BYTES + _SHM_NODE_BYTES + (_RANK_BYTES + _SHM_RANK_BYTES) * n_ranks


def _shm_bytes(plan: Plan) -> int:
    return _SHM_NODE_BYTES + _SHM_RANK_BYTES * plan.ranks_each if plan.device == "cuda" else GIB


def _scheduling(deployment: Deployment, plan: Plan) -> Object:
    """Fields of the pod's spec that say where it may run."""
    block = block_of(deployment)
    is_cuda = plan.device == "cuda"
    own = _selector(deployment)
    tolerations = [{"key": gpus.RESOURCE, "operator": "Exists"}] if is_cuda else []
    affinity = _affinity(deployment, plan, block)
    return {
        "tolerations": [*tolerations, *block.tolerations],
        "runtimeClassName": block.runtime_class,
        "nodeSelector": block.node_selector,
        "affinity": affinity,
        "topologySpreadConstraints": pods.spread({k: v for k, v in own.items() if k != REPLICA}, [_HOST]),
    }


def _affinity(deployment: Deployment, plan: Plan, block: Kubernetes) -> Object:
    """The GPU's nodes; and the nodes of one replica in one zone, on hosts of their own where they take whole ones."""
    hardware, affinity = deployment.hardware, Object()
    is_cuda = plan.device == "cuda"
    if is_cuda and hardware.gpu is not None and not block.node_selector:
        affinity["nodeAffinity"] = gpus.node_affinity(hardware.gpu)
    if plan.n_nodes > 1:
        near = {"weight": 100, "podAffinityTerm": pods.same_hosts(_selector(deployment), _ZONE)}
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [near]}
        if is_cuda and plan.ranks_each >= (hardware.gpus_per_node or plan.ranks_each):
            apart = [pods.same_hosts(_selector(deployment), _HOST)]
            affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    return affinity
