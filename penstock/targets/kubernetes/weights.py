"""Where the pods find the model, by `cache.weights`: volumes, and the claim and Job that bring a hub model. Pure.

A model is fetched once, by a Job, into a claim that all deployments of it share; replicas mount it read-only, and an
init container waits until it is whole. A claim that one pod at a time can mount, and a pod's own disk, are filled by
the init container itself. Everything else holds the model's folder already.

Claims are made once and never changed: their size follows from the first plan, and they outlive deployments.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from penstock.engines.vllm import images
from penstock.errors import Problem, UserError
from penstock.models import hub
from penstock.planner import Plan
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets.kubernetes import objects, pods
from penstock.targets.kubernetes.objects import MODELS_FOLDER, Object, block_of
from penstock.targets.kubernetes.replicas import Storage
from penstock.text import GIB, bare_flag

COMPONENT = "weights"
MODEL = "penstock.dev/model"  # annotation of a claim
_FORMS = "pvc:CLAIM[/PATH], gs://BUCKET[/PATH], s3://BUCKET/PATH, image:REFERENCE, /FOLDER of the nodes, or pod"
_FOLDER_HINT = "Say where the pods find it: cache.weights: pvc:CLAIM/PATH, gs://BUCKET/PATH, or give its hub id."
# A hub that gives less than this, in bytes a second, is taken for broken: 140 GB have 2 hours.
_SLOWEST_FETCH, _START_S = 25_000_000, 1800
_JOB_KEPT_S = 86_400
_N_RETRIES = 2
_FETCH_NEEDS = {"cpu": "2", "memory": "8Gi"}  # eight files at once, and their dirty pages
_WAIT_NEEDS = {"cpu": "100m", "memory": "256Mi"}
# https://cloud.google.com/kubernetes-engine/docs/how-to/cloud-storage-fuse-csi-driver-perf: files are cached whole on
# the node, fetched in parallel, and their metadata never ends. Pods that are not root need uid and gid.
_GCS_OPTIONS = (
    "implicit-dirs",
    f"uid={pods.USER}",
    f"gid={pods.USER}",
    "metadata-cache:ttl-secs:-1",
    "metadata-cache:stat-cache-max-size-mb:-1",
    "metadata-cache:type-cache-max-size-mb:-1",
    "file-cache:max-size-mb:-1",
    "file-cache:cache-file-for-range-read:true",
    "file-cache:enable-parallel-downloads:true",
)
_GCS_ANNOTATIONS = {
    "gke-gcsfuse/volumes": "true",
    # Of its side container: no limit, or the cache of a large model ends the pod.
    "gke-gcsfuse/cpu-limit": "0",
    "gke-gcsfuse/memory-limit": "0",
    "gke-gcsfuse/ephemeral-storage-limit": "0",
}
STAGE_FOLDER = "/stage"  # the pod's own disk, for cache.stage
_STREAMER = "runai_streamer"  # https://docs.vllm.ai/en/stable/models/extensions/runai_model_streamer/
_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z")
_QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTP]i?|k)?\Z")
_FETCH_VARIABLES = re.compile(r"HF_|(https?|no)_proxy\Z", re.IGNORECASE)

Kind = Literal["bundled", "claim", "pvc", "gs", "s3", "image", "host", "pod"]
_STAGED: tuple[Kind, ...] = ("claim", "pvc", "gs")  # weights that pods read over the network


class Source(msgspec.Struct, frozen=True):
    """`cache.weights`, read. `name`: of a claim, bucket or image; `path`: in it, or on the nodes."""

    kind: Kind
    name: str = ""
    path: str = ""


def source_of(deployment: Deployment) -> Source | None:
    """Where the file says that the weights are; None for a text of no known form."""
    text = deployment.cache.weights
    if deployment.model == DEMO_MODEL:
        return Source("bundled")
    if text is None:
        return Source("claim", claim_name(deployment.model))
    if text == "pod":
        return Source("pod")
    if text.startswith("/"):
        return Source("host", path=text)
    kind, _, rest = text.partition(":")
    if kind == "image" and rest:
        return Source("image", rest)
    name, _, path = rest.removeprefix("//").partition("/")
    path = path.strip("/")
    if ".." in path.split("/"):
        return None
    if kind == "pvc" and _CLAIM_NAME.match(name):
        return Source("pvc", name, path)
    is_bucket = rest.startswith("//") and bool(name)
    if kind == "gs" and is_bucket:
        return Source("gs", name, path)
    return Source("s3", name, path) if kind == "s3" and is_bucket and path else None


def claim_name(model: str) -> str:
    """Of a hub model's claim, at most 63 characters: "Qwen/Qwen3-0.6B" -> "weights-qwen-qwen3-0-6b"."""
    name = "weights-" + re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return name if len(name) <= 63 else f"{name[:54]}-{_hash(model)[:8]}"


def is_kept(row: Object) -> bool:
    """Whether an object outlives deployments: a claim with weights, or with keys and usage. It is made once."""
    labels = row["metadata"].get("labels") or {}
    return row.get("kind") == "PersistentVolumeClaim" and labels.get(objects.COMPONENT) in (COMPONENT, "gateway")


def has_failed(job: Object) -> bool:
    """Whether a Job will not try again; another one of its name can be made when it is deleted."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Failed" and each["status"] == "True" for each in conditions)


def mounts(pod: Object, claim: str) -> bool:
    volumes = pod.get("spec", {}).get("volumes") or []
    return any((volume.get("persistentVolumeClaim") or {}).get("claimName") == claim for volume in volumes)


def problems(deployment: Deployment) -> list[Problem]:
    """What is wrong with `cache.weights` and the block's fields of storage."""
    block, source = block_of(deployment), source_of(deployment)
    if source is None:
        return [Problem("cache.weights", f'cannot use "{deployment.cache.weights}"', f"legal: {_FORMS}")]
    faults = []
    if source.kind == "bundled" and deployment.engine.kind in ("auto", "vllm", "llamacpp"):
        faults.append(Problem("model", f"{DEMO_MODEL} stays on this machine", "give a hub id: Qwen/Qwen3-0.6B"))
    if source.kind in ("claim", "pod") and not hub.is_id(deployment.model):
        faults.append(Problem("model", f'no pod has the folder "{deployment.model}"', _FOLDER_HINT))
    n_pods = deployment.replicas.max * deployment.hardware.nodes
    if source.kind == "claim" and block.storage_access == "ReadWriteOnce" and n_pods > 1:
        message = f"ReadWriteOnce is for one node, and {n_pods} pods mount the weights"
        hint = "use ReadWriteMany with a storage class that has it, or cache.weights: pod, gs://..., s3://..."
        faults.append(Problem("kubernetes.storage_access", message, hint))
    if block.storage_size is not None and not _QUANTITY.match(block.storage_size):
        message = f'"{block.storage_size}" is no size'
        faults.append(Problem("kubernetes.storage_size", message, "such as 200Gi"))
    if deployment.cache.stage not in ("none", "auto"):
        message, hint = f'no pod has the folder "{deployment.cache.stage}"', "stage: auto copies to the pod's own disk"
        faults.append(Problem("cache.stage", message, hint))
    if source.kind == "s3" and deployment.engine.kind in ("llamacpp", "fake"):
        message = f"engine {deployment.engine.kind} reads no bucket"
        faults.append(Problem("cache.weights", message, "use engine vllm, or cache.weights: pvc:CLAIM"))
    return faults


def warnings(deployment: Deployment) -> tuple[str, ...]:
    """What is legal in `cache.weights` and may still surprise."""
    source = source_of(deployment)
    if source is not None and source.kind == "host":
        return (
            f"cache.weights {source.path} is a folder of the nodes (hostPath), which Pod Security's baseline and "
            "restricted levels refuse: the namespace must allow it",
        )
    if source is not None and source.kind == "image":
        return ("cache.weights is an image volume: on by default since Kubernetes 1.35, a feature gate since 1.31",)
    return ()


def in_pods(plan: Plan, deployment: Deployment) -> Plan:
    """The plan with the model's path in the pods, and the flags that read it there. Applied twice it changes nothing.
    Raises UserError for a folder of this machine that no volume holds."""
    source = _source(deployment)
    if source.kind == "bundled":
        return plan
    model, args = plan.model, plan.args
    place = hub.in_cache(model.path)
    inside = ""
    if model.form == "gguf":
        inside = place.inside if place is not None else PurePosixPath(model.path).name
    if source.kind in ("claim", "pod"):
        if place is None:
            message = f'cannot bring model "{model.reference}" to the pods: it is a folder of this machine'
            raise UserError(message, hint=_FOLDER_HINT)
        path = str(PurePosixPath(MODELS_FOLDER, place.folder, "snapshots", place.revision, inside))
    elif source.kind == "s3":
        path = f"s3://{source.name}/{source.path}"
        if not any(bare_flag(key) == "load-format" for key in args):
            args = {**args, "load-format": _STREAMER}
    else:
        path = str(PurePosixPath(MODELS_FOLDER, inside))
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path), args=args)


def storage(deployment: Deployment, plan: Plan) -> Storage:
    """What the replicas' pod template needs.  Raises UserError as `in_pods` and `images.image` do."""
    source = _source(deployment)
    if source.kind in ("bundled", "s3"):
        return Storage()
    mount: Object = {"name": "weights", "mountPath": MODELS_FOLDER}
    if source.kind == "pod":  # the node fetches, together with the other pods
        env = (*_fetch_env(deployment), *pods.plain_env({"HF_HUB_CACHE": MODELS_FOLDER}))
    else:
        mount["readOnly"], env = True, tuple(pods.plain_env({"HF_HUB_OFFLINE": "1"}))
    if source.kind == "pvc" and source.path:
        mount["subPath"] = source.path
    volumes, mounts = [{"name": "weights", **_volume(source, plan)}], [mount]
    if is_staged(deployment):
        volumes.append({"name": "stage", **_own_disk(plan)})
        mounts.append({"name": "stage", "mountPath": STAGE_FOLDER})
    return Storage(
        volumes=tuple(volumes),
        mounts=tuple(mounts),
        env=env,
        annotations=_GCS_ANNOTATIONS if source.kind == "gs" else {},
        init=(_init(deployment, source, in_pods(plan, deployment)),) if source.kind == "claim" else (),
        disk_bytes=_volume_bytes(plan) if source.kind == "pod" or is_staged(deployment) else 0,
    )


def come_to_replicas(deployment: Deployment) -> bool:
    """Return whether the replicas' own pods read a hub or a bucket."""
    source = _source(deployment)
    return source.kind in ("gs", "s3", "pod") or (source.kind == "claim" and not _has_job(deployment, source))


def is_staged(deployment: Deployment) -> bool:
    """Whether each pod copies the weights to its own disk."""
    return deployment.cache.stage == "auto" and _source(deployment).kind in _STAGED


def objects_of(deployment: Deployment, plan: Plan) -> list[Object]:
    """The claim, and where several pods mount it the Job that fills it; none for weights that are there already."""
    source = _source(deployment)
    if source.kind != "claim":
        return []
    claim = _claim(deployment, source, plan)
    return [claim, _job(deployment, source, in_pods(plan, deployment))] if _has_job(deployment, source) else [claim]


def _source(deployment: Deployment) -> Source:
    source = source_of(deployment)
    if source is None:  # `problems` says so before, with the field
        raise UserError(f'cannot use cache.weights "{deployment.cache.weights}"', hint=f"Legal: {_FORMS}.")
    return source


def _has_job(deployment: Deployment, source: Source) -> bool:
    """A volume that one node at a time can mount is filled where it is used: a Job would take it elsewhere."""
    return source.kind == "claim" and block_of(deployment).storage_access != "ReadWriteOnce"


def _volume(source: Source, plan: Plan) -> Object:
    match source.kind:
        case "claim":
            return {"persistentVolumeClaim": {"claimName": source.name}}
        case "pvc":
            return {"persistentVolumeClaim": {"claimName": source.name, "readOnly": True}}
        case "image":
            return {"image": {"reference": source.name, "pullPolicy": "IfNotPresent"}}
        case "host":
            return {"hostPath": {"path": source.path, "type": "Directory"}}
        case "gs":
            options = [*_GCS_OPTIONS, *([f"only-dir:{source.path}"] if source.path else [])]
            attributes = {"bucketName": source.name, "mountOptions": ",".join(options)}
            return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}}
        case _:
            return _own_disk(plan)


def _own_disk(plan: Plan) -> Object:
    return {"emptyDir": {"sizeLimit": f"{_volume_bytes(plan) // GIB}Gi"}}


def _init(deployment: Deployment, source: Source, plan: Plan) -> Object:
    """The init container that fetches, or waits for the Job."""
    waits = _has_job(deployment, source)
    mount: Object = {"name": "weights", "mountPath": MODELS_FOLDER} | ({"readOnly": True} if waits else {})
    words = (*_program(plan), *(["--wait"] if waits else []))
    env = () if waits else _fetch_env(deployment)
    needs = _WAIT_NEEDS if waits else _FETCH_NEEDS
    return pods.init_container("weights", images.image(deployment, plan), words, needs, env, (mount,))


def _claim(deployment: Deployment, source: Source, plan: Plan) -> Object:
    """Without the label of a deployment, so that no `down` takes it along."""
    block = block_of(deployment)
    labels = objects.labels(deployment.name, COMPONENT)
    del labels[objects.INSTANCE]
    spec: Object = {
        "accessModes": [block.storage_access],
        "resources": {"requests": {"storage": _size(deployment, plan)}},
    }
    if block.storage_class is not None:
        spec["storageClassName"] = block.storage_class
    metadata = {"name": source.name, "labels": labels, "annotations": {MODEL: deployment.model}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _job(deployment: Deployment, source: Source, plan: Plan) -> Object:
    """Its name has a hash of all that it does, since a Job's template cannot be changed."""
    pod = pods.Pod(
        component=COMPONENT,
        container="fetch",
        image=images.image(deployment, plan),
        argv=_program(plan),
        config_maps=(),
        resources=_FETCH_NEEDS,
        grace_s=10.0,
        env=_fetch_env(deployment),
        volumes=({"name": "weights", "persistentVolumeClaim": {"claimName": source.name}},),
        mounts=({"name": "weights", "mountPath": MODELS_FOLDER},),
        spec={"restartPolicy": "Never"},
    )
    spec = {
        "backoffLimit": _N_RETRIES,
        "activeDeadlineSeconds": _START_S + _weights_bytes(plan) // _SLOWEST_FETCH,
        "ttlSecondsAfterFinished": _JOB_KEPT_S,
        "template": pods.pod_template(deployment, pod),
    }
    name = f"{deployment.name}-weights-{_hash(json.dumps(spec, sort_keys=True))[:10]}"
    metadata = {"name": name, "labels": objects.labels(deployment.name, COMPONENT)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _program(plan: Plan) -> tuple[str, ...]:
    return ("-m", "penstock.models.fetch", plan.model.reference, plan.model.path, plan.model.form)


def _fetch_env(deployment: Deployment) -> tuple[Object, ...]:
    """The hub's variables and proxies of the file (a mirror: HF_ENDPOINT), and the token by reference."""
    given = {name: value for name, value in deployment.engine.variables.items() if _FETCH_VARIABLES.match(name)}
    # Chunks of large files would be kept a second time, on the node's disk.
    own = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0", **given}
    secret = block_of(deployment).hub_token_secret
    token = [pods.secret_env("HF_TOKEN", secret, "token")] if secret is not None else []
    return (*pods.plain_env(own), *token)


def _weights_bytes(plan: Plan) -> int:
    return max(plan.model.weights_bytes, plan.need.weights_bytes)


def _volume_bytes(plan: Plan) -> int:
    """Of a volume: the weights, 15 % and 5 GiB for another revision's files and what is being fetched."""
    return math.ceil(_weights_bytes(plan) * 1.15 / GIB + 5) * GIB


def _size(deployment: Deployment, plan: Plan) -> str:
    return block_of(deployment).storage_size or f"{_volume_bytes(plan) // GIB}Gi"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
