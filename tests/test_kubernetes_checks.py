"""Problems of a deployment before `up` on Kubernetes, and the cluster's machines, over a stub of the API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml

from penstock.hardware import Machine
from penstock.planner.engine_versions import NEWEST
from penstock.spec.blocks import Kubernetes
from penstock.spec.deployment import Cache, Deployment, EngineSpec, GatewaySpec, Hardware, Observe, Replicas
from penstock.targets.kubernetes import capacity, checks, rights
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import Object, labels
from penstock.text import GIB

LABEL = "cloud.google.com/gke-accelerator"


class StubApi:
    """Objects by kind. `forbidden`: kinds that may not be asked; `kinds`: those of operators that are installed."""

    namespace, where = "ml", "context lab"

    def __init__(self, **objects: list[Object]) -> None:
        self.objects: dict[str, list[Object]] = {"Namespace": [named("ml")], "StorageClass": [RWX]} | objects
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


def named(name: str, **more: Any) -> Object:
    metadata = {"name": name} | more.pop("metadata", {})
    return {"metadata": metadata} | more


RWX = named(
    "shared",
    provisioner="nfs.csi.k8s.io",
    metadata={"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
)


def node(name: str, n_gpus: int = 8, gpu: str | None = "nvidia-l4", **spec: Any) -> Object:
    allocatable = {"cpu": "95800m", "memory": "512Gi", "nvidia.com/gpu": str(n_gpus)}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    labels = ({LABEL: gpu} if gpu else {}) | spec.pop("labels", {})
    return named(name, metadata={"labels": labels}, spec=spec, status=status)


def pod_on(host: str, n_gpus: int, **labels: str) -> Object:
    needs = {"nvidia.com/gpu": str(n_gpus), "memory": "100Gi", "cpu": "500m"}
    container = {"name": "x", "resources": {"requests": needs}}
    spec = {"nodeName": host, "containers": [container]}
    return named("other", metadata={"labels": labels}, spec=spec, status={"phase": "Running"})


def deployment(gpu: str | None = "l4", n_gpus: int | None = 2, **more: Any) -> Deployment:
    hardware = Hardware(gpu=gpu, gpus_per_node=n_gpus, nodes=more.pop("nodes", 1))
    block = Kubernetes(**more.pop("block", {}))
    return Deployment(
        model="Qwen/Qwen3-8B", name="qwen", target="kubernetes", hardware=hardware, kubernetes=block, **more
    )


def found(api: StubApi, wanted: Deployment) -> list[str]:
    return list(map(str, checks.problems(cast(Api, api), wanted)))


def machines(api: StubApi, wanted: Deployment) -> list[Machine]:
    return checks.machines(cast(Api, api), wanted)


KEYS = GatewaySpec(auth="keys")


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "paths"),
    [
        ({}, []),
        ({"block": {"cpus_per_node": 0, "memory": "64GB"}}, ["kubernetes.memory", "kubernetes.cpus_per_node"]),
        ({"block": {"priority_class": "High Priority"}}, ["kubernetes.priority_class"]),
        ({"block": {"labels": {"team": "a b"}}}, ["kubernetes.labels"]),
        ({"block": {"labels": {"app.kubernetes.io/instance": "x"}}}, ["kubernetes.labels"]),
        ({"block": {"tolerations": ({"keys": "x"},)}}, ["kubernetes.tolerations[0]"]),
        ({"block": {"patch": {"template": {}}}}, ["kubernetes.patch"]),
        ({"block": {"patch": {"spec": {"volumes": [{"emptyDir": {}}]}}}}, ["kubernetes.patch"]),
        ({"engine": EngineSpec(env={"AWS_SECRET_ACCESS_KEY": "x"})}, ["engine.env.AWS_SECRET_ACCESS_KEY"]),
        ({"engine": EngineSpec(executor="ray")}, ["engine.executor"]),
        ({"block": {"gateways": 2}}, ["kubernetes.gateways"]),
    ],
)
def test_the_file_alone_is_checked_without_a_cluster(more: dict[str, Any], paths: list[str]) -> None:
    wanted = deployment(gateway=KEYS, **more)
    assert [problem.path for problem in checks.file_problems(wanted)] == paths


def test_a_name_that_begins_with_a_digit_is_no_name_of_a_service() -> None:
    wanted = msgspec.structs.replace(deployment(gateway=KEYS), name="3b")
    assert [problem.path for problem in checks.file_problems(wanted)] == ["name"]


@pytest.mark.parametrize(("text", "value"), [("500m", 0.5), ("64Gi", 64 * GIB), ("1e3", 1000), ("2k", 2000), ("8", 8)])
def test_quantities_are_read_as_the_api_reads_them(text: str, value: float) -> None:
    assert capacity.quantity(text) == value


@pytest.mark.parametrize("text", ["", "2x", "-1", "64 Gi", "64GB"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        capacity.quantity(text)


# ---- namespace, rights, objects --------------------------------------------------------------------------------------


def test_a_cluster_that_has_everything_has_no_problems() -> None:
    assert found(StubApi(Node=[node("a")]), deployment()) == []


def test_an_absent_namespace_is_told_with_the_command_and_what_the_cluster_lacks() -> None:
    api = StubApi(Namespace=[], Node=[node("a", gpu="nvidia-l4")])
    assert found(api, deployment(gpu="h100-sxm")) == [
        'kubernetes.namespace: there is no namespace "ml" in context lab (kubectl create namespace ml)',
        "hardware.gpu: no node has h100-sxm: 1 with NVIDIA L4",
    ]


def test_rights_are_read_from_the_rules_and_only_others_are_asked_one_by_one() -> None:
    api = StubApi(Node=[node("a")])
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
    wanted = [
        rights.Right("get", "", "pods/log"),
        rights.Right("create", "", "pods/exec"),
        rights.Right("list", "", "pods"),
    ]
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


def test_an_object_of_our_name_that_is_not_ours_is_a_problem() -> None:
    helm = named("qwen-gateway", metadata={"labels": {"app.kubernetes.io/managed-by": "Helm"}})
    ours = named("qwen-run", metadata={"labels": labels("qwen")})
    api = StubApi(Node=[node("a")], Service=[helm], ConfigMap=[ours])
    assert found(api, deployment()) == [
        'name: Service "qwen-gateway" in namespace "ml" belongs to Helm (choose another name)'
    ]


def test_secrets_must_be_there_with_their_keys() -> None:
    api = StubApi(Node=[node("a")], Secret=[named("hub", data={"HF_TOKEN": "eA=="})])
    wanted = deployment(block={"hub_token_secret": "hub", "image_pull_secrets": ("registry",)})
    first, second = found(api, wanted)
    assert first.startswith('kubernetes.image_pull_secrets[0]: there is no Secret "registry" in namespace "ml"')
    assert second == (
        'kubernetes.hub_token_secret: Secret "hub" has no key "token" '
        "(kubectl -n ml create secret generic hub --from-file=token=FILE)"
    )


def test_names_that_an_administrator_makes_are_looked_up() -> None:
    api = StubApi(Node=[node("a")], PriorityClass=[named("low"), named("high")])
    wanted = deployment(block={"priority_class": "hihg", "runtime_class": "nvidia", "service_account": "llm"})
    assert found(api, wanted) == [
        'kubernetes.priority_class: there is no PriorityClass "hihg" (there are: high, low)',
        'kubernetes.runtime_class: there is no RuntimeClass "nvidia" (there are: none)',
        'kubernetes.service_account: there is no ServiceAccount "llm" in namespace "ml"',
    ]


@pytest.mark.parametrize(
    ("block", "kind", "path"),
    [
        ({"shape": "lws"}, "LeaderWorkerSet", "kubernetes.shape"),
        ({"monitoring": "operator"}, "PodMonitor", "kubernetes.monitoring"),
        ({"expose": "Ingress", "host": "a.b", "issuer": "le"}, "ClusterIssuer", "kubernetes.issuer"),
        ({"expose": "HTTPRoute", "route_parent": "infra/gw"}, "HTTPRoute", "kubernetes.expose"),
        ({"inference_pool": True}, "InferencePool", "kubernetes.inference_pool"),
    ],
)
def test_kinds_of_operators_must_be_known(block: dict[str, Any], kind: str, path: str) -> None:
    api = StubApi(Node=[node("a")], ClusterIssuer=[named("le")], Gateway=[named("gw")])
    (problem,) = found(api, deployment(block=block))
    assert problem.startswith(f"{path}: this cluster has no kind {kind}")
    api.kinds = {kind}
    assert found(api, deployment(block=block)) == []


def test_rules_need_something_that_reads_them_and_a_prometheus_of_ours_nothing() -> None:
    api = StubApi(Node=[node("a")])
    (problem,) = found(api, deployment(observe=Observe(prometheus=True)))
    assert problem.startswith("observe.prometheus: nothing in this cluster reads rules of Prometheus")
    api.kinds = {"PrometheusRule"}
    assert found(api, deployment(observe=Observe(prometheus=True))) == []
    wanted = deployment(observe=Observe(prometheus=True, port=9090), block={"monitoring": "none"})
    first, second = (str(row) for row in checks.file_problems(wanted) if row.path.startswith("observe"))
    assert first.startswith(
        "observe.prometheus: the cluster's Prometheus gets no rules with kubernetes.monitoring: none"
    )
    assert second.startswith("observe.port: the cluster's own Prometheus watches here")


# ---- storage, security, quota ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "block", "expected"),
    [
        ([RWX], {}, []),
        (
            [named("standard", provisioner="pd.csi.storage.gke.io")],
            {},
            [
                'gateway.store: is missing: no StorageClass is the default, so claim "qwen-store" would wait for ever '
                "(there are: standard)",
                "kubernetes.storage_class: is missing: no StorageClass is the default, so claim "
                '"weights-qwen-qwen3-8b" would wait for ever (there are: standard)',
            ],
        ),
        (
            [RWX, named("disk", provisioner="ebs.csi.aws.com")],
            {"storage_class": "disk"},
            [
                'kubernetes.storage_class: StorageClass "disk" makes disks that one node mounts, not ReadWriteMany '
                "(name a class of a shared file system (Filestore, EFS, Azure Files, NFS), or cache.weights: pod)"
            ],
        ),
        (
            [RWX],
            {"storage_class": "efs"},
            ['kubernetes.storage_class: there is no StorageClass "efs" (there are: shared)'],
        ),
    ],
)
def test_claims_need_a_storage_class(classes: list[Object], block: dict[str, Any], expected: list[str]) -> None:
    assert found(StubApi(Node=[node("a")], StorageClass=classes), deployment(block=block)) == expected


def test_a_claim_that_exists_needs_no_storage_class() -> None:
    claims = [named("qwen-store"), named("weights-qwen-qwen3-8b", spec={"accessModes": ["ReadWriteMany"]})]
    api = StubApi(Node=[node("a")], StorageClass=[], PersistentVolumeClaim=claims)
    assert found(api, deployment()) == []
    assert found(api, deployment(block={"storage_access": "ReadWriteOnce"})) == [
        'kubernetes.storage_access: ReadWriteOnce, but claim "weights-qwen-qwen3-8b" is there with ReadWriteMany '
        "(set that, or kubectl delete pvc weights-qwen-qwen3-8b)"
    ]


def test_image_volumes_need_a_cluster_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    api, wanted = StubApi(Node=[node("a")]), deployment(cache=Cache(weights="image:org/qwen"))
    assert found(api, wanted) == []
    monkeypatch.setattr(api, "version", lambda: (1, 30))
    assert found(api, wanted) == [
        "cache.weights: an image volume, which this cluster is too old for (Kubernetes 1.31 has them)"
    ]


def test_folders_of_nodes_and_the_hosts_namespaces_break_pod_security() -> None:
    restricted = named("ml", metadata={"labels": {"pod-security.kubernetes.io/enforce": "restricted"}})
    api = StubApi(Namespace=[restricted], Node=[node("a")])
    wanted = deployment(cache=Cache(weights="/mnt/models"), block={"patch": {"spec": {"hostNetwork": True}}})
    assert [problem.partition(":")[0] for problem in found(api, wanted)] == [
        "cache.weights",
        "kubernetes.patch.spec.hostNetwork",
    ]


def test_a_quota_counts_what_this_deployment_has_as_left() -> None:
    status = {
        "hard": {"requests.nvidia.com/gpu": "8", "pods": "3"},
        "used": {"requests.nvidia.com/gpu": "6", "pods": "1"},
    }
    api = StubApi(Node=[node("a")], ResourceQuota=[named("gpus", spec={}, status=status)])
    wanted = deployment(n_gpus=2, replicas=Replicas(2, 2))
    assert found(api, wanted) == [
        'kubernetes.namespace: quota "gpus" leaves 2 of 8 requests.nvidia.com/gpu, and 4 are needed '
        "(fewer replicas, another namespace, or ask for more)",
        'kubernetes.namespace: quota "gpus" leaves 2 of 3 pods, and 4 are needed '
        "(fewer replicas, another namespace, or ask for more)",
    ]
    own = labels("qwen", "replica")
    api.objects["Pod"] = [pod_on("a", 2, **own), pod_on("a", 2, **own)]
    assert found(api, wanted) == []


def test_a_limit_range_bounds_one_pod() -> None:
    limits = [
        {"type": "Container", "max": {"memory": "32Gi"}},
        {"type": "PersistentVolumeClaim", "max": {"memory": "1"}},
    ]
    api = StubApi(Node=[node("a")], LimitRange=[named("small", spec={"limits": limits})])
    assert found(api, deployment(n_gpus=2)) == ['kubernetes.memory: 46.0 GiB a pod, but LimitRange "small" allows 32Gi']


# ---- nodes -----------------------------------------------------------------------------------------------------------

TAINT = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("nodes", "more", "expected"),
    [
        ([node("a", 4), node("b", 2)], {"n_gpus": 8}, ["hardware.gpus_per_node: 8 GPUs, but the most is 4 on a"]),
        (
            [node("a", 0), node("b", 0)],
            {},
            ["hardware.gpus_per_node: 2 GPUs, but the nodes have none (does the NVIDIA device plugin run there?)"],
        ),
        (
            [node("a"), node("b", 1)],
            {"nodes": 2},
            ["hardware.nodes: 2 nodes of 2 GPUs each, but 1 of 2 such nodes has so many: the most is 8 on a"],
        ),
        (
            [node("a", gpu="nvidia-h100-80gb"), node("b", gpu="nvidia-h100-80gb"), node("c", gpu=None)],
            {},
            [
                "hardware.gpu: no node has l4: 2 with NVIDIA H100 80GB HBM3, 1 with a GPU that no label names "
                "(GPU feature discovery labels nodes; or name a label of theirs in kubernetes.node_selector)"
            ],
        ),
        (
            [node("a", taints=[TAINT])],
            {},
            [
                "kubernetes.tolerations: 1 of 1 such nodes has the taint dedicated=ml:NoSchedule "
                "(tolerations: [{key: dedicated, operator: Exists, effect: NoSchedule}])"
            ],
        ),
        ([node("a", taints=[TAINT])], {"block": {"tolerations": ({"key": "dedicated", "operator": "Exists"},)}}, []),
        ([node("a", taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])], {}, []),
        (
            [node("a", unschedulable=True)],
            {},
            ["hardware.nodes: 1 of 1 such nodes is cordoned or not ready (kubectl get nodes)"],
        ),
        (
            [node("a")],
            {"block": {"node_selector": {"pool": "big"}}},
            ['kubernetes.node_selector: no node has the label "pool: big": 1 with NVIDIA L4'],
        ),
        (
            [node("a")],
            {"n_gpus": 4, "replicas": Replicas(3, 3)},
            ["replicas: 3 pods of 4 GPUs, but all nodes together have room for 2"],
        ),
        (
            [node("a"), node("b", gpu="nvidia-h100-80gb")],
            {"gpu": None},
            ["hardware.gpu: is missing: nodes have several kinds: NVIDIA H100 80GB HBM3, NVIDIA L4 (name one of them)"],
        ),
        (
            [node("a", gpu=None)],
            {"gpu": None},
            ["hardware.gpu: is missing: no label of the nodes says which GPU they have (example: gpu: l4)"],
        ),
        (
            [node("a")],
            {"block": {"cpus_per_node": 96, "memory": "600Gi"}},
            [
                "kubernetes.cpus_per_node: a pod requests 96 CPUs, but the most is 95.8 on a (cpus_per_node: 76)",
                "kubernetes.memory: a pod requests 600 GiB, but the most is 512 GiB on a (memory: 409Gi)",
            ],
        ),
        (
            [node("a", labels={"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}), node("b")],
            {},
            [
                "kubernetes.node_selector: 1 of 2 such nodes has GPUs that several pods share, and with them their "
                "memory (select others by a label; or these, with engine.gpu_memory_utilization for a part of one)"
            ],
        ),
        ([], {"gpu": None, "n_gpus": 0}, ["hardware.nodes: 1 needed, but the cluster has no node"]),
    ],
)
def test_what_no_node_has_is_a_problem(nodes: list[Object], more: dict[str, Any], expected: list[str]) -> None:
    assert found(StubApi(Node=nodes), deployment(**more)) == expected


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


def test_machines_have_the_free_gpus_where_the_file_does_not_say() -> None:
    busy = [pod_on("a", 6), pod_on("a", 2, **labels("qwen", "replica"))]
    api = StubApi(Node=[node("a", 8), node("b", 0, None)], Pod=busy)
    (machine,) = machines(api, deployment(n_gpus=None))
    assert (machine.host, len(machine.gpus)) == ("a", 2)
    api.objects["Pod"] = [pod_on("a", 8)]
    (machine,) = machines(api, deployment(n_gpus=None))
    assert len(machine.gpus) == 8, "it waits for all"


def test_the_version_of_the_engine_is_that_of_the_image() -> None:
    wanted = deployment(block={"image": "mirror.lab/vllm/vllm-openai:v0.27.1"})
    (machine,) = machines(StubApi(Node=[node("a")]), wanted)
    assert machine.versions["vllm"] == "0.27.1"


def test_machines_are_the_files_where_nodes_may_not_be_listed() -> None:
    api = StubApi()
    api.forbidden = {"Node"}
    (machine,) = machines(api, deployment(n_gpus=None))
    assert (machine.host, len(machine.gpus)) == ("node-1", 1)
    assert machine.assumed == "no right to list the cluster's nodes"
