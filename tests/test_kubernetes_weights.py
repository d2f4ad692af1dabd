"""Where the pods of target kubernetes find the model, by `cache.weights`.

Their volumes and containers are in golden/kubernetes (test_kubernetes_render.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from samples import DEMO, LLAMA_70B, demo_plan, deployment
from test_kubernetes_checks import StubApi, named

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


def test_only_folders_are_for_other_targets() -> None:
    with pytest.raises(UserError):
        weights.storage(file("models"), plan())
    assert [Cache(text).folder for text in (None, "/a", "pods", "pod", "pvc:a")] == [None, "/a", "pods", None, None]
    wanted = deployment(MODEL, target="slurm", cache={"weights": "gs://bucket"})
    (problem,) = preflight.unsupported(wanted, load("slurm"))
    assert problem.path == "cache.weights" and "target slurm takes a folder" in problem.message


def test_claims_and_names_are_at_most_63_characters() -> None:
    names = {weights.claim_name(f"organisation/{'a-long-name-' * 10}{number}") for number in range(3)}
    assert len(names) == 3 and {len(name) for name in names} == {63}


# ---- the path --------------------------------------------------------------------------------------------------------


def test_the_plan_has_the_models_path_in_the_pods() -> None:
    paths: dict[str | None, str] = dict.fromkeys((None, "pod"), f"/models/{IN_CACHE}")
    paths |= dict.fromkeys(("pvc:models/llama", "gs://bucket/llama", "image:llama", "/mnt/llama"), "/models")
    for where, path in (paths | {"s3://bucket/llama": "s3://bucket/llama"}).items():
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


def test_the_bundled_model_needs_no_volume() -> None:
    wanted = deployment("penstock-demo", target="kubernetes")
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


def test_another_job_has_another_name_and_the_same_one_the_same() -> None:
    names = [
        weights.objects_of(file(), whole)[1]["metadata"]["name"]
        for whole in (plan(), plan(), plan(path=f"/x/{IN_CACHE.replace('main', 'c0ffee')}"))
    ]
    assert names[0] == names[1] != names[2] and all(name.startswith("llama-weights-") for name in names)


def test_a_staged_model_is_copied_where_pods_mount_it() -> None:
    def stage_of(where: str | None) -> str:
        cache = {"weights": where, "stage": "auto"}
        wanted = deployment(MODEL, name="llama", target="kubernetes", cache=cache)
        return manifests.in_pods(Launch("llama", plan(), (), ""), wanted).cache.stage

    assert {stage_of(where) for where in (None, "pvc:models/llama", "gs://bucket/llama")} == {"/stage"}
    assert {stage_of(where) for where in ("pod", "s3://bucket/llama", "/mnt/llama", "image:llama")} == {"none"}


def test_volumes_that_hold_the_model_already() -> None:
    (image,), (folder,) = (weights.storage(file(where), plan()).volumes for where in ("image:llama:1", "/mnt/llama"))
    assert image["image"] == {"reference": "llama:1", "pullPolicy": "IfNotPresent"}
    assert folder["hostPath"] == {"path": "/mnt/llama", "type": "Directory"}


# ---- in the cluster --------------------------------------------------------------------------------------------------


class Cluster(StubApi):
    """Notes what is written. `log`: of every pod."""

    def __init__(self, log: str = "", **objects: list[Object]) -> None:
        super().__init__(**objects)
        self.log, self.written = log, list[tuple[str, str]]()

    def logs(self, *_: object, **__: object) -> tuple[str, ...]:
        return (self.log,)

    def apply(self, row: Object, force: bool) -> Object:
        self.written.append(("apply", row["metadata"]["name"]))
        return row

    def delete(self, kind: str, name: str) -> bool:
        self.written.append(("delete", name))
        return True


FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}


def pod(component: str, name: str = "llama-r0-0", **more: Any) -> Object:
    return named(name, metadata={"labels": objects.labels("llama", component)}, spec={}, **more)


def test_a_claim_that_is_there_is_left_as_it_is_and_a_failed_job_is_made_again() -> None:
    claim, job = weights.objects_of(file(), plan())
    cluster: Any = Cluster(PersistentVolumeClaim=[claim], Job=[job])
    assert placing.apply(cluster, claim) is claim and cluster.written == []
    placing.apply(cluster, job)
    assert cluster.written == [("apply", job["metadata"]["name"])], "the same one: nothing changes"
    cluster = Cluster(Job=[job | FAILED])
    placing.apply(cluster, job)
    assert [verb for verb, _ in cluster.written] == ["delete", "apply"]
    assert weights.is_kept(claim) and not weights.is_kept(job)


def test_a_replica_that_waits_tells_the_progress_or_why_there_will_be_none() -> None:
    progress = "weights 17/30 files, 12.3 GB of 30.0 GB"
    waiting = pod("replica", status={"initContainerStatuses": [{"name": "weights", "state": {"running": {}}}]})
    job = weights.objects_of(file(), plan())[1]
    job["metadata"]["creationTimestamp"] = "2026-11-22T18:00:00Z"
    cluster: Any = Cluster(progress, Job=[job])
    assert pod_logs.of_weights(cluster, "llama", [waiting]) == (progress, False)
    ended = {"exitCode": 2, "message": "penstock: could not fetch model: it is gated"}
    statuses = [{"name": "fetch", "state": {"terminated": ended}}]
    failed = pod("weights", "llama-weights-x", status={"phase": "Failed", "containerStatuses": statuses})
    failed["spec"]["nodeName"] = "node-1"
    cluster = Cluster("weights: not begun", Job=[job], Pod=[failed])
    said, is_lost = pod_logs.of_weights(cluster, "llama", [waiting])
    assert not is_lost and said.startswith("weights: not begun (the last try: container fetch ended with code 2")
    cluster = Cluster(Job=[job | FAILED], Pod=[failed])
    said, is_lost = pod_logs.of_weights(cluster, "llama", [waiting])
    assert is_lost and said.startswith("the weights could not be fetched: container fetch ended with code 2")
    assert said.endswith("it is gated")


def test_weights_that_another_deployment_uses_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, _ = weights.objects_of(file(), plan())
    user = pod("replica")
    cluster: Any = Cluster(PersistentVolumeClaim=[claim], Pod=[user])
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
