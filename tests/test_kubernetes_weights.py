"""Where the pods of target kubernetes find the model, by `cache.weights`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, demo_plan, deployment

from penstock.deployment import preflight
from penstock.errors import UserError
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.spec.deployment import Cache, Deployment
from penstock.targets import load
from penstock.targets.kubernetes import ending, manifests, objects, placing, pod_logs, replicas, target, weights
from penstock.targets.kubernetes.objects import Object
from penstock.targets.kubernetes.weights import Source

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
IN_CACHE = "models--meta-llama--Llama-3.1-70B-Instruct/snapshots/main"


def file(where: str | None = None, model: str = MODEL, **fields: Any) -> Deployment:
    return deployment(model, name="llama", target="kubernetes", cache={"weights": where}, **fields)


def plan(path: str = f"/home/ann/hub/{IN_CACHE}", form: str = "safetensors", **changes: Any) -> Plan:
    model = msgspec.structs.replace(LLAMA_70B, path=path, form=form)
    return demo_plan("vllm", device="cuda", model=model, engine_version="0.33.0", **changes)


def template(wanted: Deployment) -> Object:
    whole = weights.in_pods(plan(), wanted)
    launch = Launch("llama", whole, (), "/tmp/token")
    (only,) = replicas.replica(launch, wanted, weights.storage(wanted, whole))
    return only["spec"]["template"]  # type: ignore[no-any-return]


def of(things: list[Object], name: str) -> Object:
    return next(thing for thing in things if thing["name"] == name)


# ---- cache.weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (None, Source("claim", "weights-meta-llama-llama-3-1-70b-instruct")),
        ("pod", Source("pod")),
        ("pvc:models", Source("pvc", "models")),
        ("pvc:models/llama/70b/", Source("pvc", "models", "llama/70b")),
        ("gs://bucket", Source("gs", "bucket")),
        ("gs://bucket/llama", Source("gs", "bucket", "llama")),
        ("s3://bucket/llama/70b", Source("s3", "bucket", "llama/70b")),
        ("image:ghcr.io/org/llama:70b", Source("image", "ghcr.io/org/llama:70b")),
        ("/mnt/models/llama", Source("host", path="/mnt/models/llama")),
    ],
)
def test_the_forms_of_cache_weights(text: str | None, source: Source) -> None:
    assert weights.source_of(file(text)) == source
    assert weights.problems(file(text)) == []


@pytest.mark.parametrize(
    "text", ["models", "pvc:", "pvc:Models", "pvc:a/../b", "gs:bucket", "s3://bucket", "image:", "az://b/c"]
)
def test_other_texts_are_refused_with_the_legal_ones(text: str) -> None:
    (problem,) = weights.problems(file(text))
    assert problem.path == "cache.weights" and "pvc:CLAIM[/PATH]" in str(problem.hint)
    with pytest.raises(UserError):
        weights.storage(file(text), plan())


def test_only_folders_are_for_other_targets() -> None:
    assert [Cache(text).folder for text in (None, "/a", "pods", "pod", "pvc:a")] == [None, "/a", "pods", None, None]
    wanted = deployment(MODEL, target="slurm", cache={"weights": "gs://bucket"})
    (problem,) = preflight.unsupported(wanted, load("slurm"))
    assert problem.path == "cache.weights" and "target slurm takes a folder" in problem.message


def test_claims_and_names_are_at_most_63_characters() -> None:
    names = {weights.claim_name(f"organisation/{'a-long-name-' * 10}{number}") for number in range(3)}
    assert len(names) == 3 and {len(name) for name in names} == {63}


def test_problems_of_storage_are_found_together() -> None:
    block = {"storage_access": "ReadWriteOnce", "storage_size": "2x"}
    problems = weights.problems(file(kubernetes=block, replicas={"min": 2, "max": 2}))
    assert [problem.path for problem in problems] == ["kubernetes.storage_access", "kubernetes.storage_size"]
    assert "2 pods mount the weights" in problems[0].message
    assert weights.problems(file(kubernetes={"storage_access": "ReadWriteOnce", "storage_size": "200Gi"})) == []
    (problem,) = weights.problems(file(model="/data/llama"))
    assert (problem.path, problem.message) == ("model", 'no pod has the folder "/data/llama"')
    (problem,) = weights.problems(file("s3://bucket/llama", engine={"kind": "llamacpp"}))
    assert problem.path == "cache.weights"


# ---- the path --------------------------------------------------------------------------------------------------------


def test_the_plan_has_the_models_path_in_the_pods() -> None:
    for where, path in (
        (None, f"/models/{IN_CACHE}"),
        ("pod", f"/models/{IN_CACHE}"),
        ("pvc:models/llama", "/models"),
        ("gs://bucket/llama", "/models"),
        ("image:llama", "/models"),
        ("/mnt/llama", "/models"),
        ("s3://bucket/llama", "s3://bucket/llama"),
    ):
        once = weights.in_pods(plan(), file(where))
        assert once.model.path == path
        assert weights.in_pods(once, file(where)) == once


def test_a_gguf_keeps_the_path_of_its_file() -> None:
    path = f"/home/ann/hub/{IN_CACHE}/q4/m-00001-of-00002.gguf"
    assert weights.in_pods(plan(path, "gguf"), file()).model.path == f"/models/{IN_CACHE}/q4/m-00001-of-00002.gguf"
    assert weights.in_pods(plan("/data/m.gguf", "gguf"), file("pvc:models")).model.path == "/models/m.gguf"


def test_the_engine_streams_from_a_bucket_unless_the_file_says_how() -> None:
    assert weights.in_pods(plan(), file("s3://bucket/llama")).args == {"load-format": "runai_streamer"}
    own = weights.in_pods(plan(args={"load_format": "tensorizer"}), file("s3://bucket/llama"))
    assert own.args == {"load_format": "tensorizer"}
    assert weights.storage(file("s3://bucket/llama"), plan()) == replicas.NO_STORAGE


def test_the_bundled_model_needs_no_volume_and_is_not_in_the_cluster() -> None:
    wanted = deployment("penstock-demo", target="kubernetes")
    assert [problem.path for problem in weights.problems(wanted)] == ["model"]
    whole = demo_plan("vllm", model=DEMO)
    assert weights.in_pods(whole, wanted) is whole
    assert weights.storage(wanted, whole) == replicas.NO_STORAGE and weights.objects_of(wanted, whole) == []


def test_a_folder_of_this_machine_needs_a_volume_that_has_it() -> None:
    with pytest.raises(UserError, match="cannot bring model") as caught:
        weights.in_pods(plan("/data/llama"), file())
    assert "cache.weights: pvc:CLAIM/PATH" in str(caught.value.hint)
    assert weights.in_pods(plan("/data/llama"), file("pvc:models")).model.path == "/models"


def test_what_may_surprise_is_a_warning() -> None:
    assert "hostPath" in weights.warnings(file("/mnt/llama"))[0]
    assert "Kubernetes 1.35" in weights.warnings(file("image:llama"))[0]
    assert weights.warnings(file()) == ()


# ---- objects ---------------------------------------------------------------------------------------------------------


def test_a_claim_for_all_deployments_of_a_model_is_filled_by_a_job() -> None:
    block = {"storage_class": "filestore", "hub_token_secret": "hub"}
    env = {"HF_ENDPOINT": "https://hub.example", "VLLM_LOGGING_LEVEL": "DEBUG", "https_proxy": "http://proxy:3128"}
    claim, job = weights.objects_of(file(kubernetes=block, engine={"env": env}), plan())
    assert claim["metadata"]["name"] == "weights-meta-llama-llama-3-1-70b-instruct"
    assert claim["metadata"]["labels"] == {
        "app.kubernetes.io/name": "penstock",
        "app.kubernetes.io/managed-by": "penstock",
        "app.kubernetes.io/component": "weights",
    }, "and not of one deployment"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "157Gi"}},  # 131.4 GiB * 1.15 + 5
        "storageClassName": "filestore",
    }
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (2, 1800 + 141_107_412_992 // 25_000_000)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["securityContext"]["runAsNonRoot"]
    assert [volume["name"] for volume in pod["volumes"]] == ["home", "tmp", "code", "weights"], "and no secret"
    (container,) = pod["containers"]
    path = f"/models/{IN_CACHE}"
    assert container["command"] == ["python3", "-m", "penstock.models.fetch", MODEL, path, "safetensors"]
    assert of(container["volumeMounts"], "weights") == {"name": "weights", "mountPath": "/models"}
    assert of(container["env"], "HF_ENDPOINT")["value"] == "https://hub.example"
    assert of(container["env"], "https_proxy") and of(container["env"], "HF_TOKEN")["valueFrom"]["secretKeyRef"]
    assert "VLLM_LOGGING_LEVEL" not in {row["name"] for row in container["env"]}


def test_another_job_has_another_name_and_the_same_one_the_same() -> None:
    names = [
        weights.objects_of(file(), whole)[1]["metadata"]["name"]
        for whole in (plan(), plan(), plan(path=f"/x/{IN_CACHE.replace('main', 'c0ffee')}"))
    ]
    assert names[0] == names[1] != names[2] and all(name.startswith("llama-weights-") for name in names)


def test_replicas_wait_for_the_job_and_mount_the_claim_read_only() -> None:
    pod = template(file())["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["prepare", "weights"]
    waits = of(pod["initContainers"], "weights")
    assert waits["command"][-1] == "--wait" and of(waits["volumeMounts"], "weights")["readOnly"]
    (node,) = pod["containers"]
    assert of(node["volumeMounts"], "weights") == {"name": "weights", "mountPath": "/models", "readOnly": True}
    assert of(node["env"], "HF_HUB_OFFLINE")["value"] == "1"


def test_a_claim_for_one_node_and_a_pods_own_disk_are_filled_where_they_are_used() -> None:
    once = file(kubernetes={"storage_access": "ReadWriteOnce", "storage_size": "300Gi", "hub_token_secret": "hub"})
    (claim,) = weights.objects_of(once, plan())
    assert claim["spec"]["resources"]["requests"]["storage"] == "300Gi"
    assert weights.objects_of(file("pod"), plan()) == []
    pod = template(once)["spec"]
    fetches = of(pod["initContainers"], "weights")
    assert fetches["command"][-1] == "safetensors" and of(fetches["env"], "HF_TOKEN")
    assert of(fetches["volumeMounts"], "weights") == {"name": "weights", "mountPath": "/models"}
    assert of(pod["containers"][0]["volumeMounts"], "weights")["readOnly"]


def test_a_pods_own_disk_is_filled_by_its_node_which_asks_the_others_first() -> None:
    pod = template(file("pod", kubernetes={"hub_token_secret": "hub"}))["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["prepare"]
    (node,) = pod["containers"]
    assert of(node["volumeMounts"], "weights") == {"name": "weights", "mountPath": "/models"}
    assert of(node["env"], "HF_HUB_CACHE")["value"] == "/models" and of(node["env"], "HF_TOKEN")
    assert "HF_HUB_OFFLINE" not in {row["name"] for row in node["env"]}
    assert node["resources"]["requests"]["ephemeral-storage"] == "167Gi", "the weights, and 10 GiB for the rest"


def test_a_staged_claim_is_copied_to_the_pods_own_disk() -> None:
    def staged(where: str | None, stage: str = "auto") -> Deployment:
        return deployment(MODEL, name="llama", target="kubernetes", cache={"weights": where, "stage": stage})

    for where in (None, "pvc:models/llama", "gs://bucket/llama"):
        pod = template(staged(where))["spec"]
        (node,) = pod["containers"]
        assert of(pod["volumes"], "stage")["emptyDir"]["sizeLimit"] == "157Gi"
        assert of(node["volumeMounts"], "stage") == {"name": "stage", "mountPath": "/stage"}
        assert node["resources"]["requests"]["ephemeral-storage"] == "167Gi"
        assert manifests.in_pods(Launch("llama", plan(), (), ""), staged(where)).cache.stage == "/stage"
    for where in ("pod", "s3://bucket/llama", "/mnt/llama", "image:llama"):
        assert "stage" not in {volume["name"] for volume in template(staged(where))["spec"]["volumes"]}
        assert manifests.in_pods(Launch("llama", plan(), (), ""), staged(where)).cache.stage == "none"
    (problem,) = weights.problems(staged(None, "/fast"))
    assert (problem.path, problem.message) == ("cache.stage", 'no pod has the folder "/fast"')


def test_volumes_that_hold_the_model_already() -> None:
    def volume_of(where: str) -> tuple[Object, Object]:
        pod = template(file(where))["spec"]
        assert [container["name"] for container in pod["initContainers"]] == ["prepare"]
        return of(pod["volumes"], "weights"), of(pod["containers"][0]["volumeMounts"], "weights")

    volume, mount = volume_of("pvc:models/llama")
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mount == {"name": "weights", "mountPath": "/models", "readOnly": True, "subPath": "llama"}
    assert volume_of("image:llama:1")[0]["image"] == {"reference": "llama:1", "pullPolicy": "IfNotPresent"}
    assert volume_of("/mnt/llama")[0]["hostPath"] == {"path": "/mnt/llama", "type": "Directory"}
    csi = volume_of("gs://bucket/llama/70b")[0]["csi"]
    assert (csi["driver"], csi["readOnly"]) == ("gcsfuse.csi.storage.gke.io", True)
    assert csi["volumeAttributes"]["bucketName"] == "bucket"
    options = csi["volumeAttributes"]["mountOptions"].split(",")
    assert {"implicit-dirs", "uid=1000", "only-dir:llama/70b", "file-cache:enable-parallel-downloads:true"} <= {
        *options
    }
    annotations = template(file("gs://bucket"))["metadata"]["annotations"]
    assert annotations["gke-gcsfuse/volumes"] == "true"


# ---- in the cluster --------------------------------------------------------------------------------------------------


class Cluster:
    """An API that holds objects by kind and name, and notes what was written."""

    namespace = "ml"

    def __init__(self, *rows: Object, log: tuple[str, ...] = ()) -> None:
        self.rows, self.log, self.written = list(rows), log, list[tuple[str, str]]()

    def find(self, kind: str, name: str) -> Object | None:
        return next((row for row in self.rows if row["kind"] == kind and row["metadata"]["name"] == name), None)

    def list(self, kind: str, labels: dict[str, str]) -> list[Object]:
        return [row for row in self.rows if row["kind"] == kind and labels.items() <= row["metadata"]["labels"].items()]

    def logs(self, *_: object, **__: object) -> tuple[str, ...]:
        return self.log

    def apply(self, row: Object, force: bool) -> Object:
        self.written.append(("apply", row["metadata"]["name"]))
        return row

    def delete(self, kind: str, name: str) -> bool:
        self.written.append(("delete", name))
        return True


FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}


def pod(component: str, name: str = "llama-r0-0", **more: Any) -> Object:
    labels = objects.labels("llama", component)
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": {}, **more}


def test_a_claim_that_is_there_is_left_as_it_is_and_a_failed_job_is_made_again() -> None:
    claim, job = weights.objects_of(file(), plan())
    cluster: Any = Cluster(claim, job)
    assert placing.apply(cluster, claim) is claim and cluster.written == []
    placing.apply(cluster, job)
    assert cluster.written == [("apply", job["metadata"]["name"])], "the same one: nothing changes"
    cluster = Cluster(job | FAILED)
    placing.apply(cluster, job)
    assert [verb for verb, _ in cluster.written] == ["delete", "apply"]
    assert weights.is_kept(claim) and not weights.is_kept(job)


def test_a_replica_that_waits_tells_the_progress_or_why_there_will_be_none() -> None:
    progress = "weights 17/30 files, 12.3 GB of 30.0 GB"
    waiting = pod("replica", status={"initContainerStatuses": [{"name": "weights", "state": {"running": {}}}]})
    job = weights.objects_of(file(), plan())[1]
    job["metadata"]["creationTimestamp"] = "2026-11-22T18:00:00Z"
    cluster: Any = Cluster(job, waiting, log=(progress,))
    assert pod_logs.of_weights(cluster, "llama", [waiting]) == (progress, False)
    ended = {"exitCode": 2, "message": "penstock: could not fetch model: it is gated"}
    failed = pod("weights", "llama-weights-x", status={"phase": "Failed", "containerStatuses": []})
    failed["spec"]["nodeName"] = "node-1"
    failed["status"]["containerStatuses"] = [{"name": "fetch", "state": {"terminated": ended}}]
    cluster = Cluster(job, waiting, failed, log=("weights: not begun",))
    said, is_lost = pod_logs.of_weights(cluster, "llama", [waiting])
    assert not is_lost and said.startswith("weights: not begun (the last try: container fetch ended with code 2")
    cluster = Cluster(job | FAILED, waiting, failed)
    said, is_lost = pod_logs.of_weights(cluster, "llama", [waiting])
    assert is_lost and said.startswith("the weights could not be fetched: container fetch ended with code 2")
    assert said.endswith("it is gated")


def test_weights_that_another_deployment_uses_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, _ = weights.objects_of(file(), plan())
    user = pod("replica")
    cluster: Any = Cluster(claim, user)
    ours = target.Kubernetes()
    monkeypatch.setattr(ours, "_api_of", lambda _: cluster)
    monkeypatch.setattr(ending, "SPARE_S", 0.0)  # this cluster keeps what is deleted
    run: Any = SimpleNamespace(deployment=file)
    user["spec"]["volumes"] = [{"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}]
    with pytest.raises(UserError, match="llama uses them"):
        ours.end_weights(run)
    user["spec"]["volumes"] = []
    ours.end_weights(run)
    assert cluster.written == [("delete", claim["metadata"]["name"])]
