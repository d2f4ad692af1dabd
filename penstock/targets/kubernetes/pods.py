"""The pod template that replicas, gateway and controller share: code, run folder, security. Pure.

Restricted Pod Security (https://kubernetes.io/docs/concepts/security/pod-security-standards/), a root file system that
cannot be written, no token of a service account, and no variables of the namespace's Services: one named "vllm" would
set VLLM_PORT. There is no liveness probe: the node supervises its engine, and the kubelet would kill one that loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.errors import UserError
from penstock.planner import Plan
from penstock.spec.deployment import Deployment
from penstock.targets.images import engine_words, public_image
from penstock.targets.kubernetes import archive, objects
from penstock.targets.kubernetes.objects import CODE, HOME, Object, block_of

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
    words = [f"{code}/{archive.SCRIPT}", f"{code}/{archive.FILE}", CODE, run_path, *folders.values()]
    mounts = [_mount(volume, path) | {"readOnly": True} for volume, path in ({"code": code} | folders).items()]
    return init_container("prepare", pod.image, words, _PREPARE_NEEDS, (), mounts)


_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def _volumes(deployment: Deployment, pod: Pod) -> list[Object]:
    code = archive.config_map_name(deployment.name, archive.archive())
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


def image(deployment: Deployment, plan: Plan) -> str:
    """The image of the replicas' pods.  Raises UserError where only the user knows one.

    User and entrypoint of a public image are replaced here.
    """
    found = block_of(deployment).image or public_image(plan)
    if found is None:
        hint = "Set kubernetes.image to one with the engine, Python 3.11, msgspec, psutil and pyyaml."
        raise UserError(f"cannot choose an image for engine {engine_words(plan)}", hint=hint)
    return found


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
