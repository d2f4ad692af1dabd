"""The pod template that replicas, gateway and controller share: code, run folder, security. Pure.

Restricted Pod Security (https://kubernetes.io/docs/concepts/security/pod-security-standards/), a root file system that
cannot be written, no token of a service account, and no variables of the namespace's Services: one named "vllm" would
set VLLM_PORT. There is no liveness probe: the node supervises its engine, and the kubelet would kill one that loads.
"""

from __future__ import annotations

import base64
import bz2
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.spec.deployment import Deployment
from penstock.targets.code_archive import code_archive
from penstock.targets.kubernetes import objects
from penstock.targets.kubernetes.objects import CODE, HOME, Object, block_of, build

# The code, compressed as a whole: each file alone would come to more than the 1 MiB that a ConfigMap may have.
# https://kubernetes.io/docs/concepts/configuration/configmap/
FILE, SCRIPT, MOST_BYTES = "penstock.zip.bz2", "prepare.py", 900_000
USER = 1000  # of all processes in the pods, and the group of their volumes
CACHE = f"{HOME}/cache"
# What libraries write: a root file system that is read-only needs every one elsewhere. torch calls getpass.getuser(),
# which fails for a user without a row in /etc/passwd unless USER or LOGNAME is set.
_ENVIRONMENT = {
    "HOME": HOME,
    "USER": "penstock",
    "LOGNAME": "penstock",
    "PENSTOCK_HOME": HOME,
    "PYTHONPATH": CODE,
    "XDG_CACHE_HOME": CACHE,
    "HF_HOME": f"{CACHE}/huggingface",
    "VLLM_CACHE_ROOT": f"{CACHE}/vllm",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE}/triton",
}
# A container that fails leaves the end of its log in its status, from where `status` tells it.
_LAST_LINES = "FallbackToLogsOnError"
_PREPARE_NEEDS = {"cpu": "500m", "memory": "512Mi"}

# The patchMergeKey of each list in a pod template; all other lists are replaced whole, tolerations too.
# https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ ("Patch strategy: merge on key")
_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "imagePullSecrets"), "name"),
    **dict.fromkeys(("resourceClaims", "schedulingGates"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


class Pod(msgspec.Struct, frozen=True):
    """What tells one pod of ours from another. `argv` follows `python3`. `config_maps`: those whose files `prepare`
    puts into the run folder. `resources`: requests and limits at once. `spec`: further fields of the pod's, such as
    affinity. `service_account`: its token is mounted only with `has_token`. `has_secrets`: it gets the admin token.
    """

    component: str
    container: str
    image: str
    argv: tuple[str, ...]
    config_maps: tuple[str, ...]
    resources: dict[str, str]
    grace_s: float
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    env: tuple[Object, ...] = ()
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    ports: dict[str, int] = {}
    readiness: Object | None = None
    init: tuple[Object, ...] = ()
    service_account: str | None = None
    has_token: bool = False
    has_secrets: bool = True
    spec: Object = {}


def pod_template(deployment: Deployment, pod: Pod) -> Object:
    """A pod's metadata and spec, for any kind of set."""
    block, name = block_of(deployment), deployment.name
    own = objects.labels(name, pod.component, **pod.labels)
    spec: Object = {
        "automountServiceAccountToken": pod.has_token,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(pod.grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # Else the kubelet would change the owner of every shard on a volume.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_prepare(deployment, pod), *pod.init],
        "containers": [_container(pod)],
        "volumes": [*_volumes(deployment, pod), *pod.volumes],
        "imagePullSecrets": [{"name": secret} for secret in block.image_pull_secrets],
        "tolerations": list(block.tolerations),
        "priorityClassName": block.priority_class,
        "serviceAccountName": pod.service_account,
        **pod.spec,
    }
    metadata = {"labels": block.labels | own, "annotations": block.annotations | pod.annotations}
    return {"metadata": _without_empty(metadata), "spec": _without_empty(spec)}


def _container(pod: Pod) -> Object:
    return _without_empty({
        "name": pod.container,
        "image": pod.image,
        "command": ["python3", *pod.argv],
        "env": _last_of_each([*plain_env(_ENVIRONMENT), *pod.env]),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in pod.ports.items()],
        "resources": {"requests": pod.resources, "limits": pod.resources},
        "readinessProbe": pod.readiness,
        "terminationMessagePolicy": _LAST_LINES,
        "securityContext": _SECURITY,
        "volumeMounts": [_mount("home", HOME), _mount("tmp", "/tmp"), *pod.mounts],
    })  # fmt: skip


def init_container(
    name: str,
    image: str,
    argv: Sequence[str],
    needs: Mapping[str, str],
    env: Sequence[Object],
    mounts: Sequence[Object],
) -> Object:
    """A container that ends before the pod's own starts. `argv` follows `python3`."""
    return {
        "name": name,
        "image": image,
        "command": ["python3", *argv],
        "env": [*plain_env(_ENVIRONMENT), *env],
        "resources": {"requests": dict(needs), "limits": dict(needs)},
        "terminationMessagePolicy": _LAST_LINES,
        "securityContext": _SECURITY,
        "volumeMounts": [_mount("home", HOME), _mount("tmp", "/tmp"), *mounts],
    }


def _prepare(deployment: Deployment, pod: Pod) -> Object:
    """The first init container: the same image, so that one without what penstock needs fails here, in seconds."""
    code, run_path = objects.ARCHIVE, objects.run_path(deployment)
    folders = {"config": objects.CONFIG_FOLDER} if pod.config_maps else {}
    folders |= {"secret": objects.SECRET_FOLDER} if pod.config_maps and pod.has_secrets else {}
    words = [f"{code}/{SCRIPT}", f"{code}/{FILE}", CODE, run_path, *folders.values()]
    mounts = [_mount(volume, path) | {"readOnly": True} for volume, path in ({"code": code} | folders).items()]
    return init_container("prepare", pod.image, words, _PREPARE_NEEDS, (), mounts)


_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def _volumes(deployment: Deployment, pod: Pod) -> list[Object]:
    code = code_map_name(deployment.name, archive())
    sources = [{"configMap": {"name": name}} for name in pod.config_maps]
    # The first key is for the gateway alone.
    keys = {"items": [{"key": "admin-token", "path": "admin-token"}]} if pod.component == "replica" else {}
    secret: list[Object] = []
    if pod.has_secrets:
        # With fsGroup the kubelet gives a secret's files to the group, so the group must be able to read them.
        content = {"secretName": objects.secrets(deployment.name), "defaultMode": 0o440} | keys
        secret.append({"name": "secret", "secret": content})
    own: list[Object] = [
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "code", "configMap": {"name": code}},
    ]
    if not sources:
        return own
    return [*own, {"name": "config", "projected": {"sources": sources}}, *secret]


def _mount(volume: str, path: str) -> Object:
    return {"name": volume, "mountPath": path}


def plain_env(values: Mapping[str, str]) -> list[Object]:
    """Variables with their values as they are: `$(NAME)` in one would be replaced by the kubelet."""
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()]


def _last_of_each(rows: Iterable[Object]) -> list[Object]:
    """One row for each name: server-side apply refuses a list with two of one key."""
    return list({row["name"]: row for row in rows}.values())


def secret_env(name: str, secret: str, key: str) -> Object:
    """A variable with the value of a Secret's key, absent where that is."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}


def _without_empty(fields: Mapping[str, object]) -> Object:
    return {key: value for key, value in fields.items() if value not in (None, [], {}, ())}


def same_hosts(selector: Mapping[str, str], topology: str) -> Object:
    """A term of pod affinity: pods with these labels, one `topology` (a label of nodes) for all."""
    return {"labelSelector": {"matchLabels": dict(selector)}, "topologyKey": topology}


def spread(selector: Mapping[str, str], topologies: Sequence[str]) -> list[Object]:
    """Pods with these labels over nodes and zones, where there is room."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": topology,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector)},
        }
        for topology in topologies
    ]


# ---- penstock's code -----------------------------------------------------------------------------------------------


class Archive(msgspec.Struct, frozen=True):
    """`hash`: of names and bytes, whatever compressed them. `data`: a zip in bzip2. `prepare`: the script's text."""

    hash: str
    data: bytes
    prepare: str


@functools.cache
def archive() -> Archive:
    code = code_archive()
    return Archive(code.hash, bz2.compress(code.data), Path(__file__).with_name(SCRIPT).read_text("utf-8"))


def code_map_name(name: str, code: Archive) -> str:
    """At most 56 characters: another version of penstock has another ConfigMap, so none is ever changed."""
    return f"{name}-code-{code.hash}"


def code_map(deployment: Deployment, code: Archive) -> Object:
    """penstock's own code: an image with the engine alone is enough for a replica. `prepare.py` unpacks it."""
    data = base64.b64encode(code.data).decode()
    parts: Object = {"immutable": True, "data": {SCRIPT: code.prepare}, "binaryData": {FILE: data}}
    return build("v1/ConfigMap", code_map_name(deployment.name, code), deployment, **parts)


# ---- the file's own fields of the template: strategic merge patches, as `kubectl patch` applies them -------------
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/


_DIRECTIVE = "$patch"  # "delete" or "replace"


def merged(original: Any, patch: Any, field: str = "") -> Any:
    """`original` with `patch` over it, both left as they are. null deletes a key, and `$patch: delete | replace` an
    element of a list or the whole of a mapping.  Raises UserError for an element without its list's key."""
    if isinstance(patch, dict):
        return _merged_mapping(original if isinstance(original, dict) else {}, patch)
    if isinstance(patch, list) and field in _KEYS:
        return _merged_list(original if isinstance(original, list) else [], patch, field)
    return patch


def _merged_mapping(original: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    rest = {key: value for key, value in patch.items() if key != _DIRECTIVE}
    kept = (
        {} if directive in ("replace", "delete") else {k: v for k, v in original.items() if rest.get(k, v) is not None}
    )
    return kept | {key: merged(kept.get(key), value, key) for key, value in rest.items() if value is not None}


def _merged_list(original: Sequence[Any], patch: Sequence[Any], field: str) -> list[Any]:
    key = _KEYS[field]
    is_replaced = any(item == {_DIRECTIVE: "replace"} for item in patch)
    items = [] if is_replaced else list(original)
    for item in patch:
        if item == {_DIRECTIVE: "replace"}:
            continue
        if not isinstance(item, dict) or key not in item:
            hint = f"Elements of {field} merge by their {key}: give it in each."
            raise UserError(f'cannot use kubernetes.patch: an element of "{field}" has no {key}', hint=hint)
        at = next((index for index, old in enumerate(items) if old.get(key) == item[key]), None)
        if item.get(_DIRECTIVE) == "delete":
            items = [old for old in items if old.get(key) != item[key]]
        elif at is None:
            items.append(merged({}, item))
        else:
            items[at] = merged(items[at], item)
    return items
