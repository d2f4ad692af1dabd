"""All problems of a deployment before `up`, at once, and the cluster's machines.

What may not be asked is not a problem: a user of one namespace seldom may list nodes or storage classes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from penstock.errors import Problem, UserError
from penstock.hardware import Machine
from penstock.spec.deployment import Deployment, Observe, Ui
from penstock.targets.kubernetes import capacity, gpus, objects, rights, scaling, traffic, weights
from penstock.targets.kubernetes.api import Api, ApiError
from penstock.targets.kubernetes.objects import INSTANCE, MANAGED_BY, MANAGER, Object, block_of
from penstock.targets.kubernetes.pods import merged
from penstock.text import show_bytes

_OLDEST = (1, 20)
_IMAGE_VOLUMES = (1, 31)  # https://kubernetes.io/docs/tasks/configure-pod-container/image-volumes/
_SHOWN = 6
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# Provisioners of disks that one node mounts: https://kubernetes.io/docs/concepts/storage/persistent-volumes/#access-modes
_ONE_NODE = frozenset({
    "pd.csi.storage.gke.io", "ebs.csi.aws.com", "ebs.csi.eks.amazonaws.com", "disk.csi.azure.com",
    "rancher.io/local-path", "kubernetes.io/gce-pd", "kubernetes.io/aws-ebs", "kubernetes.io/azure-disk",
    "kubernetes.io/no-provisioner",
})  # fmt: skip
_ENFORCE = "pod-security.kubernetes.io/enforce"
_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
# A label of DNS that begins with a letter: Services must, before 1.34.
_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")
# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?\Z")
_TOLERATION = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
_NAMED = ("priority_class", "runtime_class", "service_account", "postgres_secret", "hub_token_secret", "tls_secret")
_NAMES = (*_NAMED, "namespace", "storage_class", "issuer", "ingress_class")


# ---- the file alone --------------------------------------------------------------------------------------------------


def file_problems(deployment: Deployment) -> list[Problem]:
    """What is wrong in the file, without asking a cluster."""
    return [
        *_block_problems(deployment),
        *_own_problems(deployment),
        *traffic.problems(deployment),
        *scaling.problems(deployment),
        *weights.problems(deployment),
        *_observe_problems(deployment),
        *_page_problems(deployment),
    ]


def _observe_problems(deployment: Deployment) -> Iterator[Problem]:
    """The cluster's own Prometheus watches: what is about one of ours means nothing there."""
    observe, block = deployment.observe, block_of(deployment)
    if observe.prometheus and block.monitoring in ("annotations", "none"):
        message = f"the cluster's Prometheus gets no rules with kubernetes.monitoring: {block.monitoring}"
        yield Problem("observe.prometheus", message, "set kubernetes.monitoring: operator, or google")
    for field in ("prometheus_binary", "port", "retention", "retention_size", "remote_write"):
        if getattr(observe, field) != getattr(Observe(), field):
            yield Problem(f"observe.{field}", "the cluster's own Prometheus watches here", "remove it")


def _page_problems(deployment: Deployment) -> Iterator[Problem]:
    page = deployment.chat_page
    if page is None:
        if block_of(deployment).ui_image is not None:
            yield Problem("kubernetes.ui_image", "there is no chat page", "set ui: true, or remove it")
        return
    if page.login == "none":
        message = "everyone who reaches the page could use the engines"
        yield Problem("ui.login", message, "remove it; people log in with a key: penstock keys create NAME")
    if page.port == 0:
        yield Problem("ui.port", "0 is not the port of a Service", "remove it, for 7860")
    if page.host != Ui().host:
        yield Problem("ui.host", "the page listens in its pod, for a Service", "remove it")
    if block_of(deployment).has_paths and not traffic.page_path(page):
        yield Problem("ui.root_path", "clients have the gateway at that path", "remove it, for /ui")


def _block_problems(deployment: Deployment) -> Iterator[Problem]:
    block = block_of(deployment)
    if not _SERVICE_NAME.match(deployment.name):
        yield Problem("name", f'"{deployment.name}" cannot name a Service: it must begin with a letter')
    for field in _NAMES:
        name = getattr(block, field)
        if name is not None and not _DNS_NAME.match(name):
            yield Problem(f"kubernetes.{field}", f'"{name}" is no name of an object', "a-z, 0-9 and -")
    if block.memory is not None and not capacity.is_quantity(block.memory):
        yield Problem("kubernetes.memory", f'"{block.memory}" is no size', "example: 64Gi")
    if block.cpus_per_node is not None and block.cpus_per_node < 1:
        yield Problem("kubernetes.cpus_per_node", f"{block.cpus_per_node} is less than 1")
    for field in ("labels", "node_selector"):
        for key, value in getattr(block, field).items():
            if not (_LABEL_KEY.match(key) and _LABEL_VALUE.match(value)):
                message = f'"{key}: {value}" is no label'
                yield Problem(f"kubernetes.{field}", message, "at most 63 characters a-zA-Z0-9_.-")
    for field in ("labels", "annotations"):
        ours = [
            key for key in getattr(block, field) if key in objects.labels("", "") or key.startswith("penstock.dev/")
        ]
        if ours:
            yield Problem(f"kubernetes.{field}", f'"{ours[0]}" is set by penstock', "remove it")
    for index, row in enumerate(block.tolerations):
        if not row.keys() <= _TOLERATION or row.get("operator", "Equal") not in ("Equal", "Exists", "Lt", "Gt"):
            hint = "example: {key: dedicated, operator: Exists, effect: NoSchedule}"
            yield Problem(f"kubernetes.tolerations[{index}]", f"{row} is no toleration", hint)
    for key in sorted(block.patch.keys() - {"metadata", "spec"}):
        words = f'"{key}" is no part of a pod template'
        yield Problem("kubernetes.patch", words, "example: patch: {spec: {schedulerName: volcano}}")
    try:
        merged({}, block.patch)
    except UserError as exc:
        yield Problem("kubernetes.patch", exc.message.partition(": ")[2], exc.hint)


def _own_problems(deployment: Deployment) -> Iterator[Problem]:
    """Fields outside the block that a cluster takes otherwise than a machine does."""
    if deployment.engine.executor == "ray" and block_of(deployment).image is None:
        hint = "remove it, or set kubernetes.image to one with Ray"
        yield Problem("engine.executor", '"ray", but the engine\'s image has no Ray', hint)


# ---- the cluster -----------------------------------------------------------------------------------------------------


def problems(api: Api, deployment: Deployment) -> list[Problem]:
    """All that this cluster lacks or forbids.  Raises ApiError when it cannot be reached."""
    version = api.version()
    if version is not None and version < _OLDEST:
        own, oldest = (".".join(map(str, pair)) for pair in (version, _OLDEST))
        return [Problem("target", f"the API server is Kubernetes {own}", f"penstock needs {oldest} or later")]
    absent = _namespace_problem(api)
    faults = [absent] if absent else []
    for check in _OF_CLUSTER if absent else (*_OF_CLUSTER, *_OF_NAMESPACE):
        faults += _allowed(check, api, deployment)
    return faults


def _allowed(check: _Check, api: Api, deployment: Deployment) -> list[Problem]:
    """What a check finds until it asks for what we may not see."""
    faults: list[Problem] = []
    try:
        faults.extend(check(api, deployment))
    except ApiError as exc:
        if exc.status != 403:
            raise
    return faults


def _namespace_problem(api: Api) -> Problem | None:
    try:
        namespace = api.find("Namespace", api.namespace)
    except ApiError as exc:
        if exc.status != 403:
            raise
        return None  # most who have only a namespace may not read it
    if namespace is None:
        hint = f"kubectl create namespace {api.namespace}"
        return Problem("kubernetes.namespace", f'there is no namespace "{api.namespace}" in {api.where}', hint)
    if namespace.get("status", {}).get("phase") == "Terminating":
        return Problem("kubernetes.namespace", f'namespace "{api.namespace}" is being deleted', "wait until it is gone")
    return None


def _right_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    lacking = rights.missing(api, rights.needed(deployment))
    if lacking:
        shown = ", ".join(map(str, lacking[:_SHOWN])) + (
            f" and {len(lacking) - _SHOWN} more" if lacking[_SHOWN:] else ""
        )
        hint = f"ask for them: kubectl auth can-i {lacking[0]} -n {api.namespace}"
        yield Problem("kubernetes.namespace", f'no right in namespace "{api.namespace}" to {shown}', hint)


def _owner_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """Objects that have our names and are not ours: apply would take them over."""
    name = deployment.name
    ours = {MANAGED_BY: MANAGER, INSTANCE: name}
    kinds = (
        ("ConfigMap", objects.anchor(name)),
        ("Service", objects.gateway(name)),
        ("Deployment", objects.gateway(name)),
        ("Deployment", objects.controller(name)),
        ("StatefulSet", objects.replica_set(name, "0")),
        *((("Service", objects.ui(name)), ("Deployment", objects.ui(name))) if deployment.chat_page else ()),
    )
    for kind, own in kinds:
        present = api.find(kind, own)
        labels = (present or {}).get("metadata", {}).get("labels") or {}
        if present is not None and not ours.items() <= labels.items():
            managers = [row.get("manager") for row in present["metadata"].get("managedFields") or ()]
            of = f": {managers[-1]} wrote it" if managers and managers[-1] else ""
            owner = f"belongs to {labels[MANAGED_BY]}" if labels.get(MANAGED_BY) else f"is not penstock's{of}"
            yield Problem("name", f'{kind} "{own}" in namespace "{api.namespace}" {owner}', "choose another name")


def _actuator_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    rows = [{"kind": kind, **row} for kind in scaling.KINDS for row in _known(api, kind)]
    yield from scaling.foreign_owners(deployment, rows)


def _known(api: Api, kind: str) -> list[Object]:
    """Objects of a kind; none where the cluster has no such kind, or we may not ask."""
    try:
        return api.list(kind)
    except ApiError as exc:
        if exc.status not in (403, 404):
            raise
        return []


def _secret_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    block = block_of(deployment)
    wanted: list[tuple[str, str | None, tuple[str, ...]]] = [
        *((f"image_pull_secrets[{index}]", name, ()) for index, name in enumerate(block.image_pull_secrets)),
        ("hub_token_secret", block.hub_token_secret, ("token",)),
        ("postgres_secret", block.postgres_secret, ("password",)),
    ]
    if block.issuer is None:  # cert-manager makes it
        wanted.append(("tls_secret", block.tls_secret, ("tls.crt", "tls.key")))
    for field, name, keys in wanted:
        if name is None:
            continue
        secret = api.find("Secret", name)
        lacking = [key for key in keys if key not in ((secret or {}).get("data") or {})]
        if secret is None:
            yield Problem(f"kubernetes.{field}", _absent("Secret", name, api), _how_to_make(field, name, api))
        elif lacking:
            message = f'Secret "{name}" has no key "{lacking[0]}"'
            yield Problem(f"kubernetes.{field}", message, _how_to_make(field, name, api))
    if block.service_account is not None and api.find("ServiceAccount", block.service_account) is None:
        yield Problem("kubernetes.service_account", _absent("ServiceAccount", block.service_account, api))


def _absent(kind: str, name: str, api: Api) -> str:
    return f'there is no {kind} "{name}" in namespace "{api.namespace}"'


def _how_to_make(field: str, name: str, api: Api) -> str:
    what = {
        "hub_token_secret": f"generic {name} --from-file=token=FILE",
        "postgres_secret": f"generic {name} --from-file=password=FILE",
        "tls_secret": f"tls {name} --cert=FILE --key=FILE",
    }.get(field, f"docker-registry {name} --docker-server=... --docker-username=... --docker-password=...")
    return f"kubectl -n {api.namespace} create secret {what}"


def _class_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """Names of what an administrator has made for the whole cluster."""
    block = block_of(deployment)
    for field, kind, name in (
        ("priority_class", "scheduling.k8s.io/v1/PriorityClass", block.priority_class),
        ("runtime_class", "node.k8s.io/v1/RuntimeClass", block.runtime_class),
        ("ingress_class", "networking.k8s.io/v1/IngressClass", block.ingress_class),
    ):
        if name is None:
            continue
        names = sorted(row["metadata"]["name"] for row in api.list(kind))
        if name not in names:
            shown = ", ".join(names[:_SHOWN]) or "none"
            message = f'there is no {kind.rpartition("/")[2]} "{name}"'
            yield Problem(f"kubernetes.{field}", message, f"there are: {shown}")


def _storage_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """Claims, and the storage class of those that do not exist yet."""
    block, source = block_of(deployment), weights.source_of(deployment)
    claims: list[tuple[str, str, str | None]] = []
    if not traffic.has_postgres(deployment):
        claims.append(("gateway.store", objects.store(deployment.name), None))
    if source is not None and source.kind == "claim":
        claims.append(("kubernetes.storage_class", source.name, block.storage_class))
    if source is not None and source.kind == "pvc" and api.find("PersistentVolumeClaim", source.name) is None:
        yield Problem("cache.weights", _absent("PersistentVolumeClaim", source.name, api))
    present = {row[1]: found for row in claims if (found := api.find("PersistentVolumeClaim", row[1])) is not None}
    claims = [row for row in claims if row[1] not in present]
    if source is not None and source.kind == "claim" and source.name in present:
        modes = present[source.name]["spec"]["accessModes"]
        if block.storage_access not in modes:
            words = f'{block.storage_access}, but claim "{source.name}" is there with {", ".join(modes)}'
            yield Problem("kubernetes.storage_access", words, f"set that, or kubectl delete pvc {source.name}")
    if source is not None and source.kind == "image" and (api.version() or _IMAGE_VOLUMES) < _IMAGE_VOLUMES:
        yield Problem("cache.weights", "an image volume, which this cluster is too old for", "Kubernetes 1.31 has them")
    classes = {row["metadata"]["name"]: row for row in api.list("StorageClass")} if claims else {}
    defaults = [name for name, row in classes.items() if _annotation(row, _DEFAULT_CLASS) == "true"]
    listed = f"there are: {', '.join(sorted(classes)) or 'none'}"
    for path, claim, name in claims:
        chosen = classes.get(name if name is not None else next(iter(defaults), ""))
        if name is not None and chosen is None:
            yield Problem(path, f'there is no StorageClass "{name}"', listed)
        elif chosen is None:
            words = f'is missing: no StorageClass is the default, so claim "{claim}" would wait for ever'
            yield Problem(path, words, listed)
        elif path.endswith("class") and block.storage_access == "ReadWriteMany" and chosen["provisioner"] in _ONE_NODE:
            words = f'StorageClass "{chosen["metadata"]["name"]}" makes disks that one node mounts, not ReadWriteMany'
            hint = "name a class of a shared file system (Filestore, EFS, Azure Files, NFS), or cache.weights: pod"
            yield Problem(path, words, hint)


def _annotation(row: Object, key: str) -> str | None:
    value: str | None = (row["metadata"].get("annotations") or {}).get(key)
    return value


def _kind_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """Kinds of objects that an operator brings."""
    block = block_of(deployment)
    readers = (("monitoring.googleapis.com/v1", "Rules"), ("monitoring.coreos.com/v1", "PrometheusRule"))
    if deployment.observe.prometheus and not any(api.knows(*reader) for reader in readers):
        hint = "install Prometheus's operator, or remove it"
        yield Problem("observe.prometheus", "nothing in this cluster reads rules of Prometheus", hint)
    for is_wanted, path, api_version, kind, install in (
        (
            deployment.replicas.actuator == "keda",
            "prometheus_url",
            scaling.SCALED_OBJECT,
            "ScaledObject",
            "KEDA, https://keda.sh",
        ),
        (block.shape == "lws", "shape", "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "https://lws.sigs.k8s.io"),
        (block.expose == "HTTPRoute", "expose", "gateway.networking.k8s.io/v1", "HTTPRoute", "the Gateway API"),
        (block.issuer is not None, "issuer", "cert-manager.io/v1", "ClusterIssuer", "cert-manager"),
        (block.inference_pool, "inference_pool", "inference.networking.k8s.io/v1", "InferencePool", "its CRDs"),
        (block.monitoring == "google", "monitoring", "monitoring.googleapis.com/v1", "PodMonitoring", "GKE has it"),
        (
            block.monitoring == "operator",
            "monitoring",
            "monitoring.coreos.com/v1",
            "PodMonitor",
            "Prometheus's operator",
        ),
    ):
        if is_wanted and not api.knows(api_version, kind):
            yield Problem(f"kubernetes.{path}", f"this cluster has no kind {kind}", f"it comes with {install}")
        elif kind == "ClusterIssuer" and block.issuer is not None:
            if api.find(f"{api_version}/{kind}", block.issuer) is None:
                yield Problem("kubernetes.issuer", f'there is no ClusterIssuer "{block.issuer}"')
        elif kind == "HTTPRoute" and is_wanted and block.route_parent is not None:
            space, _, parent = block.route_parent.partition("/")
            if api.find("Gateway", parent, space) is None:
                yield Problem("kubernetes.route_parent", f'there is no Gateway "{parent}" in namespace "{space}"')


def _security_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """https://kubernetes.io/docs/concepts/security/pod-security-admission/"""
    source, spec = weights.source_of(deployment), block_of(deployment).patch.get("spec") or {}
    labels = (api.find("Namespace", api.namespace) or {}).get("metadata", {}).get("labels") or {}
    level = labels.get(_ENFORCE, "privileged")
    if level == "privileged":
        return
    what = f'namespace "{api.namespace}" enforces Pod Security "{level}"'
    if source is not None and source.kind == "host":
        message = f"a folder of the nodes, but {what}"
        yield Problem("cache.weights", message, "use a claim: cache.weights: pvc:CLAIM/PATH")
    for field in _HOST_FIELDS:
        if spec.get(field):
            yield Problem(f"kubernetes.patch.spec.{field}", f"not allowed: {what}")


def _node_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    nodes = capacity.nodes_of(api.list("Node"), (), deployment)
    faults = list(capacity.problems(nodes, deployment))
    is_absent = len(capacity.usable(nodes, deployment)) < deployment.hardware.nodes
    if faults and has_autoscaler(api):  # it may add what is absent
        faults = [] if is_absent else [problem for problem in faults if problem.path != "replicas"]
    yield from faults


# ---- quotas and limits ----------------------------------------------------------------------------------------------


def _quota_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """What a ResourceQuota leaves, against what the replicas request; what this deployment has counts as left."""
    needs = _requested(deployment)
    quotas = api.list("ResourceQuota")
    ours = api.list("Pod", {INSTANCE: deployment.name}) if quotas else []
    alive = [pod for pod in ours if pod.get("status", {}).get("phase") != "Failed"]
    held = [capacity.pod_requests(pod) | {"pods": 1.0} for pod in alive]
    for quota in quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # for certain pods only
        status = quota.get("status") or {}
        for key, limit in (status.get("hard") or quota["spec"].get("hard") or {}).items():
            resource = key.removeprefix("requests.").removeprefix("limits.")
            need, own = needs.get(resource, 0.0), sum(row.get(resource, 0.0) for row in held)
            left = capacity.quantity(limit) - capacity.quantity((status.get("used") or {}).get(key, "0")) + own
            if need > left:
                words = f'quota "{quota["metadata"]["name"]}" leaves {_amount(resource, left)} of {limit} {key}'
                hint = "fewer replicas, another namespace, or ask for more"
                yield Problem("kubernetes.namespace", f"{words}, and {_amount(resource, need)} are needed", hint)


def _requested(deployment: Deployment) -> dict[str, float]:
    """Of all replicas together, by resource; pods with those of gateway, controller and chat page."""
    hardware, block = deployment.hardware, block_of(deployment)
    n_pods = deployment.replicas.first * hardware.nodes
    n_cpus, n_bytes = capacity.pod_needs(deployment)
    each = {gpus.RESOURCE: float(hardware.gpus_per_node or 0), "cpu": n_cpus, "memory": n_bytes}
    n_pods_more = block.gateways + (1 if deployment.chat_page is None else 2)
    return {name: n_pods * value for name, value in each.items()} | {"pods": float(n_pods + n_pods_more)}


def _amount(resource: str, value: float) -> str:
    return show_bytes(value) if resource == "memory" else f"{value:g}"


def _limit_problems(api: Api, deployment: Deployment) -> Iterator[Problem]:
    """https://kubernetes.io/docs/concepts/policy/limit-range/"""
    n_cpus, n_bytes = capacity.pod_needs(deployment)
    n_gpus = float(deployment.hardware.gpus_per_node or 0)
    fields = {"cpu": ("kubernetes.cpus_per_node", n_cpus), "memory": ("kubernetes.memory", n_bytes)}
    fields[gpus.RESOURCE] = ("hardware.gpus_per_node", n_gpus)
    for row in api.list("LimitRange"):
        for limit in row["spec"].get("limits", ()):
            for resource, most in (limit.get("max") or {}).items():
                path, need = fields.get(resource, ("", 0.0))
                if limit["type"] in ("Container", "Pod") and need > capacity.quantity(most):
                    words = f'{_amount(resource, need)} a pod, but LimitRange "{row["metadata"]["name"]}" allows {most}'
                    yield Problem(path, words)


_Check = Callable[[Api, Deployment], Iterator[Problem]]
_OF_CLUSTER: tuple[_Check, ...] = (_kind_problems, _class_problems, _node_problems)
_OF_NAMESPACE: tuple[_Check, ...] = (
    *(_right_problems, _owner_problems, _actuator_problems, _secret_problems, _storage_problems),
    *(_security_problems, _quota_problems, _limit_problems),
)


# ---- machines --------------------------------------------------------------------------------------------------------


def machines(api: Api, deployment: Deployment) -> list[Machine]:
    """What a pod of a replica may have on each node that it may get.

    As the file says where nodes may not be listed, or where none fits now and an autoscaler may add them.
    Raises ApiError when the cluster cannot be reached.
    """
    try:
        rows = api.list("Node")
    except ApiError as exc:
        if exc.status != 403:
            raise
        return capacity.of_file(deployment, "no right to list the cluster's nodes")
    try:
        others = api.list("Pod", all_namespaces=True)
    except ApiError as exc:
        if exc.status != 403:
            raise
        others = []  # then all of a node counts as free
    found = capacity.machines(capacity.nodes_of(rows, others, deployment), deployment)
    if len(found) < deployment.hardware.nodes:
        return capacity.of_file(deployment, "no node of the cluster fits now; an autoscaler may add one")
    return found


def has_autoscaler(api: Api) -> bool:
    """Whether nodes may be added: by the cluster autoscaler (GKE's, AKS's too), which reports into a ConfigMap, or by
    Karpenter.

    https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md#how-can-i-check-what-is-going-on-in-ca-
    """
    with contextlib.suppress(ApiError):
        if api.find("ConfigMap", "cluster-autoscaler-status", "kube-system") is not None:
            return True
    return any(api.knows(f"karpenter.sh/{version}", "NodePool") for version in ("v1", "v1beta1"))
