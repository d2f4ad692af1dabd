"""Problems of a deployment before `up` on Kubernetes, and the cluster's machines, over a stub of the API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from golden_files import cases
from kubernetes_goldens import kept, sections

from penstock.hardware import Machine
from penstock.planner.engine_versions import NEWEST
from penstock.spec import reading
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Cache, Deployment, Hardware, Observe, Replicas
from penstock.targets.kubernetes import capacity, checks, rights, scaling
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object, labels
from penstock.text import GIB


def named(name: str, **more: Any) -> Object:
    metadata = {"name": name} | more.pop("metadata", {})
    return {"metadata": metadata} | more


def node(name: str = "a", n_gpus: int = 8, gpu: str | None = "nvidia-l4", **spec: Any) -> Object:
    allocatable = {"cpu": "95800m", "memory": "512Gi", "nvidia.com/gpu": str(n_gpus)}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    labels = ({"cloud.google.com/gke-accelerator": gpu} if gpu else {}) | spec.pop("labels", {})
    return named(name, metadata={"labels": labels}, spec=spec, status=status)


DEFAULT = {"storageclass.kubernetes.io/is-default-class": "true"}
RWX = named("shared", provisioner="nfs.csi.k8s.io", metadata={"annotations": DEFAULT})


class StubApi:
    """Objects by kind: one node with 8 GPUs and what else a deployment needs, or those that are given. `forbidden`:
    kinds that may not be asked; `kinds`: those of operators that are installed."""

    namespace, where = "ml", "context lab"

    def __init__(self, **objects: list[Object]) -> None:
        self.objects = {"Namespace": [named("ml")], "StorageClass": [RWX], "Node": [node()]} | objects
        self.forbidden: set[str] = set()
        self.kinds: set[str] = set()
        self.rules: list[Object] = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
        self.allowed: set[str] = set()
        self.reviews: list[Object] = []

    def version(self) -> tuple[int, int]:
        return (1, 34)

    def knows(self, api_version: str, kind: str) -> bool:
        return kind in self.kinds

    def list(self, kind: str, labels: Mapping[str, str] | None = None, **_: Any) -> list[Object]:
        word = kind.rpartition("/")[2]
        if word in self.forbidden:
            raise ApiError(f"no right to list {word}", 403, "Forbidden")
        wanted = (labels or {}).items()
        return [row for row in self.objects.get(word, []) if wanted <= row["metadata"].get("labels", {}).items()]

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        return next((row for row in self.list(kind) if row["metadata"]["name"] == name), None)

    def create(self, row: Object) -> Object:
        self.reviews.append(row)
        if row["kind"] == "SelfSubjectRulesReview":
            return {"status": {"resourceRules": self.rules, "incomplete": True}}
        asked = row["spec"]["resourceAttributes"]
        return {"status": {"allowed": f"{asked['verb']} {asked['resource']}" in self.allowed}}


def pod_on(host: str, n_gpus: int, **labels: str) -> Object:
    needs = {"nvidia.com/gpu": str(n_gpus), "memory": "100Gi", "cpu": "500m"}
    container = {"name": "x", "resources": {"requests": needs}}
    spec = {"nodeName": host, "containers": [container]}
    return named("other", metadata={"labels": labels}, spec=spec, status={"phase": "Running"})


def scaler(name: str, target: str, **metadata: Any) -> Object:
    return named(name, metadata=metadata, spec={"scaleTargetRef": {"name": target}})


def deployment(gpu: str | None = "l4", n_gpus: int | None = 2, **more: Any) -> Deployment:
    hardware = Hardware(gpu=gpu, gpus_per_node=n_gpus, nodes=more.pop("nodes", 1))
    block = Kubernetes(**more.pop("block", {}))
    whole = more | {"name": "qwen", "target": "kubernetes", "hardware": hardware, "kubernetes": block}
    return Deployment(model="Qwen/Qwen3-8B", **whole)


def found(api: StubApi, wanted: Deployment) -> list[str]:
    return list(map(str, checks.problems(cast(Api, api), wanted)))


def machines(api: StubApi, wanted: Deployment) -> list[Machine]:
    return checks.machines(cast(Api, api), wanted)


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "told"), cases("kubernetes/mistakes.txt"))
def test_the_file_alone_is_checked_without_a_cluster(fields: str, told: str) -> None:
    whole = {"model": "Qwen/Qwen3-8B", "name": "qwen", "target": "kubernetes"} | yaml.safe_load(fields)
    problems = checks.file_problems(reading.from_mapping(whole))
    assert ("\n   ".join(map(str, problems)) or "no problem") == told


def test_quantities_are_read_as_the_api_reads_them() -> None:
    for text, value in (("500m", 0.5), ("64Gi", 64 * GIB), ("1e3", 1000), ("2k", 2000), ("8", 8)):
        assert capacity.quantity(text) == value
    for text in ("", "2x", "-1", "64 Gi", "64GB"):
        with pytest.raises(ValueError, match="no quantity"):
            capacity.quantity(text)


# ---- rights and kinds ------------------------------------------------------------------------------------------------


def test_rights_are_read_from_the_rules_and_only_others_are_asked_one_by_one() -> None:
    api = StubApi()
    api.rules = [
        {"verbs": ["*"], "apiGroups": ["", "apps", "batch", "policy"], "resources": ["*"]},
        {"verbs": ["get", "list"], "apiGroups": ["*"], "resources": ["*"]},
        {"verbs": ["*"], "apiGroups": ["networking.k8s.io"], "resources": ["*"], "resourceNames": ["one"]},
    ]
    api.allowed = {f"{verb} networkpolicies" for verb in ("create", "patch", "delete")}
    assert found(api, deployment()) == [
        'kubernetes.namespace: no right in namespace "ml" to create roles.rbac.authorization.k8s.io, '
        "patch roles.rbac.authorization.k8s.io, delete roles.rbac.authorization.k8s.io, "
        "create rolebindings.rbac.authorization.k8s.io, patch rolebindings.rbac.authorization.k8s.io, "
        "delete rolebindings.rbac.authorization.k8s.io "
        "(ask for them: kubectl auth can-i create roles.rbac.authorization.k8s.io -n ml)"
    ]
    assert len(api.reviews) == 1 + 3 + 6


def test_rights_of_subresources_need_their_own_rule() -> None:
    api = StubApi()
    api.rules = [{"verbs": ["*"], "apiGroups": [""], "resources": ["pods", "*/log"]}]
    pairs = (("get", "pods/log"), ("create", "pods/exec"), ("list", "pods"))
    wanted = [rights.Right(verb, "", resource) for verb, resource in pairs]
    assert list(map(str, rights.missing(cast(Api, api), wanted))) == ["create pods/exec"]


def test_the_role_of_the_docs_gives_what_the_check_asks() -> None:
    page = (Path(__file__).parent.parent / "docs/how-to/kubernetes.md").read_text("utf-8")
    role = next(text for text in page.split("```") if "kind: Role\n" in text)
    assert yaml.safe_load(role.removeprefix("yaml"))["rules"] == rights.policy_rules(deployment())


def test_rules_of_a_role_name_what_the_check_asks() -> None:
    wanted = deployment(block={"expose": "Ingress", "host": "a.b"})
    rules = rights.policy_rules(wanted)
    assert {"apiGroups": ["networking.k8s.io"], "resources": ["ingresses"], "verbs": rights._ALL.split()} in rules
    n_rights = sum(len(rule["resources"]) * len(rule["verbs"]) for rule in rules)
    assert n_rights == len(rights.needed(wanted))


def test_what_may_not_be_asked_is_no_problem() -> None:
    api = StubApi(Namespace=[])
    api.forbidden = {"Namespace", "Node", "StorageClass", "PriorityClass", "ResourceQuota", "LimitRange", "Secret"}
    assert found(api, deployment(block={"priority_class": "high", "hub_token_secret": "hub"})) == []


@pytest.mark.parametrize(
    ("more", "kind", "path"),
    [
        ({"block": {"shape": "lws"}}, "LeaderWorkerSet", "kubernetes.shape"),
        ({"block": {"monitoring": "operator"}}, "PodMonitor", "kubernetes.monitoring"),
        ({"block": {"expose": "Ingress", "host": "a.b", "issuer": "le"}}, "ClusterIssuer", "kubernetes.issuer"),
        ({"block": {"expose": "HTTPRoute", "route_parent": "infra/gw"}}, "HTTPRoute", "kubernetes.expose"),
        ({"block": {"inference_pool": True}}, "InferencePool", "kubernetes.inference_pool"),
        ({"replicas": Replicas(0, 4, actuator="keda")}, "ScaledObject", "kubernetes.prometheus_url"),
        ({"observe": Observe(prometheus=True)}, "PrometheusRule", "observe.prometheus"),
    ],
)
def test_kinds_of_operators_must_be_known(more: dict[str, Any], kind: str, path: str) -> None:
    api = StubApi(ClusterIssuer=[named("le")], Gateway=[named("gw")])
    (problem,) = found(api, deployment(**more))
    is_rule = kind == "PrometheusRule"
    words = "nothing in this cluster reads rules of Prometheus" if is_rule else f"this cluster has no kind {kind}"
    assert problem.startswith(f"{path}: {words}")
    api.kinds = {kind}
    assert found(api, deployment(**more)) == []


def test_image_volumes_need_a_cluster_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    api, wanted = StubApi(), deployment(cache=Cache(weights="image:org/qwen"))
    assert found(api, wanted) == []
    monkeypatch.setattr(api, "version", lambda: (1, 30))
    assert found(api, wanted) == [
        "cache.weights: an image volume, which this cluster is too old for (Kubernetes 1.31 has them)"
    ]


# ---- what the cluster has --------------------------------------------------------------------------------------------

OURS = named("qwen-run", metadata={"labels": labels("qwen")})
HELM = named("qwen-gateway", metadata={"labels": {"app.kubernetes.io/managed-by": "Helm"}})
CLAIM = named("weights-qwen-qwen3-8b", spec={"accessModes": ["ReadWriteMany"]})
LIMITS = [{"type": "Container", "max": {"memory": "32Gi"}}, {"type": "PersistentVolumeClaim", "max": {"memory": "1"}}]
H100 = "nvidia-h100-80gb"
GPUS = "requests.nvidia.com/gpu"
QUOTA = named("gpus", spec={}, status={"hard": {GPUS: "8", "pods": "3"}, "used": {GPUS: "6", "pods": "1"}})
OF_OURS = [pod_on("a", 2, **labels("qwen", "replica"))] * 2
RESTRICTED = named("ml", metadata={"labels": {"pod-security.kubernetes.io/enforce": "restricted"}})
OF_HOST = {"cache": Cache(weights="/mnt/models"), "block": {"patch": {"spec": {"hostNetwork": True}}}}
OTHERS = [scaler("one", "qwen-scale"), scaler("two", "qwen-r0"), scaler("three", "qwen-r12")]
BY_KEDA = scaler("keda-hpa", "qwen-scale", ownerReferences=[{"kind": "ScaledObject", "name": "qwen-scale"}])
MINE = scaler("qwen-scale", "qwen-scale", labels=labels("qwen", scaling.COMPONENT))
DISK = named("disk", provisioner="ebs.csi.aws.com")
PULLS = {"hub_token_secret": "hub", "image_pull_secrets": ("registry",)}
NAMES = {"priority_class": "hihg", "runtime_class": "nvidia", "service_account": "llm"}
TAINT = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TOLERATES = {"tolerations": ({"key": "dedicated", "operator": "Exists"},)}
SHARED = node("a", labels={"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"})
FAR = [scaler("a", "qwen-gateway"), scaler("b", "qwen-rx"), scaler("c", "two-r0")]
# What a cluster has, and what a file asks for: golden/kubernetes/lacks.txt has the problems.
LACKS: dict[str, tuple[dict[str, list[Object]], dict[str, Any]]] = {
    "it has everything": ({}, {}),
    "no namespace": ({"Namespace": []}, {"gpu": "h100-sxm"}),
    "an object of our name": ({"Service": [HELM], "ConfigMap": [OURS]}, {}),
    "secrets and keys": ({"Secret": [named("hub", data={"HF_TOKEN": "eA=="})]}, {"block": PULLS}),
    "names of an administrator": ({"PriorityClass": [named("low"), named("high")]}, {"block": NAMES}),
    "no default class": ({"StorageClass": [named("standard", provisioner="pd.csi.storage.gke.io")]}, {}),
    "a class for one node": ({"StorageClass": [RWX, DISK]}, {"block": {"storage_class": "disk"}}),
    "another class": ({}, {"block": {"storage_class": "efs"}}),
    "no class, but the claims": ({"StorageClass": [], "PersistentVolumeClaim": [named("qwen-store"), CLAIM]}, {}),
    "a claim of other access": ({"PersistentVolumeClaim": [CLAIM]}, {"block": {"storage_access": "ReadWriteOnce"}}),
    "autoscalers of the same replicas": ({"HorizontalPodAutoscaler": OTHERS}, {}),
    "our autoscaler, and others": ({"HorizontalPodAutoscaler": [MINE, BY_KEDA, *FAR]}, {}),
    "a namespace that is restricted": ({"Namespace": [RESTRICTED]}, OF_HOST),
    "a quota": ({"ResourceQuota": [QUOTA]}, {"replicas": Replicas(2, 2)}),
    "what we use of a quota is left": ({"ResourceQuota": [QUOTA], "Pod": OF_OURS}, {"replicas": Replicas(2, 2)}),
    "a limit range": ({"LimitRange": [named("small", spec={"limits": LIMITS})]}, {}),
    "too few GPUs": ({"Node": [node("a", 4), node("b", 2)]}, {"n_gpus": 8}),
    "no GPUs": ({"Node": [node("a", 0), node("b", 0)]}, {}),
    "too few nodes": ({"Node": [node("a"), node("b", 1)]}, {"nodes": 2}),
    "other cards": ({"Node": [node("a", gpu=H100), node("b", gpu=H100), node("c", gpu=None)]}, {}),
    "a taint": ({"Node": [node(taints=[TAINT])]}, {}),
    "a taint that is tolerated": ({"Node": [node(taints=[TAINT])]}, {"block": TOLERATES}),
    "the taint of GPUs": ({"Node": [node(taints=[GPU_TAINT])]}, {}),
    "a cordoned node": ({"Node": [node(unschedulable=True)]}, {}),
    "a label that no node has": ({}, {"block": {"node_selector": {"pool": "big"}}}),
    "too many replicas": ({}, {"n_gpus": 4, "replicas": Replicas(3, 3)}),
    "several kinds of cards": ({"Node": [node("a"), node("b", gpu=H100)]}, {"gpu": None}),
    "no label of a card": ({"Node": [node(gpu=None)]}, {"gpu": None}),
    "too little CPU and memory": ({}, {"block": {"cpus_per_node": 96, "memory": "600Gi"}}),
    "GPUs that pods share": ({"Node": [SHARED, node("b")]}, {}),
    "no node": ({"Node": []}, {"gpu": None, "n_gpus": 0}),
}


def test_what_a_cluster_lacks_is_told() -> None:
    rows = {name: found(StubApi(**objects), deployment(**fields)) for name, (objects, fields) in LACKS.items()}
    told = sections({name: problems or ["no problem"] for name, problems in rows.items()})
    assert told == kept("lacks.txt", told)


@pytest.mark.parametrize("is_karpenter", [True, False])
def test_an_autoscaler_may_add_the_nodes_so_the_file_says_what_they_have(is_karpenter: bool) -> None:
    status = named("cluster-autoscaler-status")
    api = StubApi(Node=[node("a", 0, None)], ConfigMap=[] if is_karpenter else [status])
    api.kinds = {"NodePool"} if is_karpenter else set()
    assert found(api, deployment(nodes=2)) == []
    api.objects["Node"].append(node("b"))
    assert found(api, deployment(n_gpus=8, replicas=Replicas(3, 3))) == []
    first, second = machines(api, deployment(nodes=2))
    assert (first.host, second.host, len(first.gpus), first.gpus[0].name) == ("node-1", "node-2", 2, "NVIDIA L4")
    assert first.assumed == "no node of the cluster fits now; an autoscaler may add one"


def test_machines_have_the_gpus_that_the_file_asks_for() -> None:
    api = StubApi(Node=[node("a", 8), node("b", 1), node("c", 8, unschedulable=True)], Pod=[pod_on("a", 7)])
    (machine,) = machines(api, deployment(n_gpus=2))
    assert (machine.host, len(machine.gpus), machine.gpus[0].name) == ("a", 2, "NVIDIA L4")
    assert machine.memory_free_bytes == 512 * GIB, "its pod waits until the other has left"
    (machine,) = machines(api, deployment(n_gpus=1))[:1]
    assert machine.memory_free_bytes == 412 * GIB
    assert (machine.n_cpus, machine.assumed, machine.versions["vllm"]) == (95, None, NEWEST)
    machine = machines(api, deployment(block={"image": "mirror.lab/vllm/vllm-openai:v0.27.1"}))[0]
    assert machine.versions["vllm"] == "0.27.1", "that of the image"


def test_machines_have_the_free_gpus_where_the_file_does_not_say() -> None:
    busy = [pod_on("a", 6), pod_on("a", 2, **labels("qwen", "replica"))]
    api = StubApi(Node=[node("a", 8), node("b", 0, None)], Pod=busy)
    (machine,) = machines(api, deployment(n_gpus=None))
    assert (machine.host, len(machine.gpus)) == ("a", 2)
    api.objects["Pod"] = [pod_on("a", 8)]
    (machine,) = machines(api, deployment(n_gpus=None))
    assert len(machine.gpus) == 8, "it waits for all"


def test_machines_are_the_files_where_nodes_may_not_be_listed() -> None:
    api = StubApi()
    api.forbidden = {"Node"}
    (machine,) = machines(api, deployment(n_gpus=None))
    assert (machine.host, len(machine.gpus)) == ("node-1", 1)
    assert machine.assumed == "no right to list the cluster's nodes"
