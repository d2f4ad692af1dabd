"""Our own rules for rendered documents: what no schema says, and what every pod of ours must have. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")  # RFC 1123
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?\Z")
_LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+)?\Z")
_SECRET_NAME = re.compile(r"(^|[_-])(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)([_-]|$)", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9]{20}|postgres(ql)?://[^:@/\s\"]+:[^@\s\"]+@|PRIVATE KEY-----"
)
_SIZE = re.compile(r'"(?:storage|sizeLimit)": "([^"]*)"')
_SETS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "DaemonSet")
_PLACEHOLDER = re.compile(r"\{(replica|run|name|revision)\}")
_MOST_BYTES = 2**20
_GPU = "nvidia.com/gpu"
# Volume types that restricted Pod Security allows.
_ALLOWED = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def rule_problems(documents: Sequence[Object]) -> Iterator[str]:
    """What our rules refuse in all objects of a deployment."""
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    yield from (
        f"{kind}/{name}: is there twice" for kind, name in sorted({pair for pair in names if names.count(pair) > 1})
    )
    ranks = _ranks_of(documents)
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        problems = [*_name_problems(document), *_label_problems(document), *_content_problems(document)]
        for template in templates_of(document):
            problems += _selector_problems(document, template)
            problems += _pod_problems(template)
            if ranks is not None and template["metadata"]["labels"].get("app.kubernetes.io/component") == "replica":
                problems += _replica_problems(template["spec"], *ranks)
        yield from (f"{name}: {problem}" for problem in problems)
    yield from _reference_problems(documents)


def templates_of(document: Object) -> list[Object]:
    """The pod templates of an object."""
    if document["kind"] not in _SETS:
        return []
    spec = document["spec"]
    workers = spec.get("leaderWorkerTemplate", {})
    return [row for row in (spec.get("template"), workers.get("leaderTemplate"), workers.get("workerTemplate")) if row]


def quantity(text: object) -> float:
    """ "2Gi" -> 2147483648.0; NaN for what is none."""
    match = _QUANTITY.match(str(text))
    return float(match[1]) * _UNITS.get(match[3] or "", 1) if match else float("nan")


def _ranks_of(documents: Sequence[Object]) -> tuple[int, bool] | None:
    """Ranks of a node and whether they have GPUs, from the launch among the documents."""
    for document in documents:
        text = document.get("data", {}).get("launch.json") if document["kind"] == "ConfigMap" else None
        if text:
            plan = json.loads(text)["plan"]
            layout = plan["layout"]
            n_ranks = layout["tensor"] * layout["pipeline"] * layout["data"]
            return n_ranks // plan["n_nodes"], plan["device"] == "cuda"
    return None


def _name_problems(document: Object) -> Iterator[str]:
    name = document["metadata"]["name"]
    # The pods of a StatefulSet carry its name and a hash of ten characters as one label.
    most = 52 if document["kind"] == "StatefulSet" else 63
    if len(name) > most or not _LABEL.match(name):
        yield f"its name is no label of at most {most} characters"
    if _PLACEHOLDER.search(json.dumps([document["metadata"], document.get("spec")])):
        yield "a placeholder is left in it"


def _label_problems(document: Object) -> Iterator[str]:
    rows = [document["metadata"], *(template.get("metadata", {}) for template in templates_of(document))]
    for key, value in (pair for row in rows for pair in row.get("labels", {}).items()):
        if not _LABEL_KEY.match(key) or not _LABEL_VALUE.match(value):
            yield f"label {key}={value} is not legal"
    labels = document["metadata"].get("labels", {})
    is_kept = document["kind"] == "PersistentVolumeClaim" and labels.get("app.kubernetes.io/component") == "weights"
    if labels.get("app.kubernetes.io/managed-by") != "penstock" or is_kept is ("app.kubernetes.io/instance" in labels):
        yield "it lacks the labels by which `down` finds it, or is kept and has them"


def _content_problems(document: Object) -> Iterator[str]:
    kind = document["kind"]
    if kind == "ConfigMap":
        texts = document.get("data", {})
        n_bytes = sum(len(key) + len(text.encode()) for key, text in texts.items())
        n_bytes += sum(len(base64.b64decode(data)) for data in document.get("binaryData", {}).values())
        if n_bytes > _MOST_BYTES:
            yield f"it has {n_bytes} bytes, and a ConfigMap at most {_MOST_BYTES}"
    if kind == "Secret" and (document.get("data") or document.get("stringData")):
        yield "it shows a secret's value"
    text = json.dumps({key: value for key, value in document.items() if key != "binaryData"})
    match = _SECRET_VALUE.search(text)
    if match:
        yield f"it shows what looks like a secret: {match[0][:12]}..."
    yield from (f"{size} is no quantity" for size in _SIZE.findall(text) if not quantity(size) > 0)
    if kind == "HorizontalPodAutoscaler" and document["spec"].get("minReplicas", 1) > document["spec"]["maxReplicas"]:
        yield "minReplicas is beyond maxReplicas"


def _selector_problems(document: Object, template: Object) -> Iterator[str]:
    wanted = document["spec"].get("selector", {}).get("matchLabels", {})
    if not wanted.items() <= template["metadata"].get("labels", {}).items():
        yield "its selector does not match its pods"
    if document["kind"] in ("Deployment", "StatefulSet") and not wanted:
        yield "it has no selector"


def _true(problems: Mapping[str, object]) -> Iterator[str]:
    """The problems that are there."""
    yield from (problem for problem, is_there in problems.items() if is_there)


def _pod_problems(template: Object) -> Iterator[str]:
    spec = template["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for volume in volumes.values():
        kinds = {key for key in volume if key != "name"}
        if not kinds <= _ALLOWED:
            yield f"volume {volume['name']} is of {kinds}, which restricted Pod Security refuses"
    mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
    has_token = spec.get("automountServiceAccountToken") is not False
    yield from _true({
        "two volumes have one name": len(volumes) != len(spec.get("volumes", [])),
        "two containers have one name": len({container["name"] for container in containers}) != len(containers),
        f"volumes and mounts differ: {sorted(mounted ^ {*volumes})}": mounted != {*volumes},
        "it uses the host's namespaces": {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys(),
        "variables of Services reach it": spec.get("enableServiceLinks") is not False,
        "it has the token of the default service account": has_token and not spec.get("serviceAccountName"),
    })  # fmt: skip
    for container in containers:
        problems = _container_problems(container, spec.get("securityContext", {}))
        yield from (f"container {container['name']}: {problem}" for problem in problems)


def _container_problems(container: Object, of_pod: Object) -> Iterator[str]:
    context = of_pod | container.get("securityContext", {})
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    yield from _true({
        "it may run as root": not context.get("runAsNonRoot") or not context.get("runAsUser"),
        "its seccompProfile is not RuntimeDefault": context.get("seccompProfile") != {"type": "RuntimeDefault"},
        "it may gain privileges": context.get("allowPrivilegeEscalation") is not False or context.get("privileged"),
        "it keeps capabilities": context.get("capabilities") != {"drop": ["ALL"]},
        "its root file system can be written": context.get("readOnlyRootFilesystem") is not True,
        "it has a liveness probe, which ends an engine that loads": "livenessProbe" in container,
        "two mounts have one path": len({*paths}) != len(paths),
        "it has no request of cpu and memory": not {"cpu", "memory"} <= requests.keys(),
        "requests and limits of GPUs differ": requests.get(_GPU) != limits.get(_GPU),
    })  # fmt: skip
    names = [row["name"] for row in container.get("env", [])]
    yield from (f"variable {name} is there twice" for name in {name for name in names if names.count(name) > 1})
    literal = [row["name"] for row in container.get("env", []) if row.get("value") and _SECRET_NAME.search(row["name"])]
    yield from (f"variable {name} shows a secret" for name in literal)
    for kind, size in (*requests.items(), *limits.items()):
        if not quantity(size) > 0:
            yield f"{kind}: {size} is no quantity"
        if quantity(size) > quantity(limits.get(kind, size)):
            yield f"it requests more {kind} than its limit"


def _replica_problems(spec: Object, n_ranks: int, is_cuda: bool) -> Iterator[str]:
    """What a replica's pod must have for its ranks."""
    node = next(container for container in spec["containers"] if container["name"] == "node")
    limits = node["resources"]["limits"]
    if node["resources"]["requests"].items() - limits.items():
        yield "requests and limits of a replica differ"
    if limits.get(_GPU) != (str(n_ranks) if is_cuda else None):
        yield f"it has {limits.get(_GPU)} GPUs for {n_ranks} ranks"
    names = [mount["name"] for mount in node["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    shm: Object = next((volume.get("emptyDir", {}) for volume in spec["volumes"] if volume["name"] in names), {})
    size = quantity(shm.get("sizeLimit"))
    if shm.get("medium") != "Memory" or not 2**30 <= size < quantity(limits["memory"]):
        yield "/dev/shm is not in memory, or is too small, or is as large as the memory"
    words = node["command"]
    if float(words[words.index("--kill-after") + 1]) >= spec["terminationGracePeriodSeconds"]:
        yield "the kubelet kills it before it kills its engine"


def _reference_problems(documents: Sequence[Object]) -> Iterator[str]:
    """Names that no document has, of what a whole deployment holds."""
    templates = [template for document in documents for template in templates_of(document)]
    there = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for template in templates:
        has_token, account = (
            template["spec"]["automountServiceAccountToken"],
            template["spec"].get("serviceAccountName"),
        )
        if has_token and ("ServiceAccount", account) not in there:
            yield f"there is no ServiceAccount/{account}"
        for volume in template["spec"].get("volumes", []):
            sources = [volume, *volume.get("projected", {}).get("sources", [])]
            for name in (source["configMap"]["name"] for source in sources if "configMap" in source):
                if ("ConfigMap", name) not in there:
                    yield f"there is no ConfigMap/{name}"
    for document in documents:
        selector = document.get("spec", {}).get("selector") or {}
        if document["kind"] == "PodDisruptionBudget":
            selector = {k: v for k, v in selector["matchLabels"].items() if k != "apps.kubernetes.io/pod-index"}
        if document["kind"] in ("Service", "PodDisruptionBudget"):
            yield from _selected_problems(document, selector, templates)


def _selected_problems(document: Object, selector: Object, templates: Sequence[Object]) -> Iterator[str]:
    name = f"{document['kind']}/{document['metadata']['name']}"
    chosen = [row for row in templates if selector.items() <= row["metadata"]["labels"].items()]
    if selector and not chosen:
        yield f"{name}: it selects no pods"
    ports = {
        port.get("name") or port["containerPort"]: port["containerPort"]
        for row in chosen
        for container in row["spec"]["containers"]
        for port in container.get("ports", [])
    }
    for port in document["spec"].get("ports", []):
        aim = port.get("targetPort", port["port"])
        if chosen and aim not in {*ports, *ports.values()}:
            yield f"{name}: no container has the port {aim}"
