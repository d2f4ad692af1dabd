"""A claim that a Job fills from a hub on loopback, on a real control plane; replicas' pods wait for it."""

# ruff: noqa: F811 - fixture of test_kubernetes_target
from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_kubernetes_target
from hub_server import COMMIT, HubServer, serving
from kubernetes_cluster import Namespace, Pod
from launching import Place, call, now, wait_ready
from samples import LLAMA_70B, demo_plan, deployment
from test_kubernetes_target import place  # noqa: F401 - fixture
from waiting import until

from penstock.models import files
from penstock.planner import Plan
from penstock.run_folder import Run
from penstock.spec.deployment import Deployment
from penstock.targets.kubernetes import pods, weights
from penstock.targets.kubernetes.objects import Object

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("kubernetes")]

NAME = "org/tiny"


def file(name: str, hub: HubServer, **block: Any) -> Deployment:
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    block |= {"storage_class": "standard", "storage_size": "1Gi", "image": "any"}
    return deployment(NAME, name=name, target="kubernetes", kubernetes=block, engine={"env": env})


def plan() -> Plan:
    path = "/home/ann/hub/models--org--tiny/snapshots/main"
    model = msgspec.structs.replace(LLAMA_70B, path=path, form="safetensors", reference=NAME, weights_bytes=6_000_000)
    return demo_plan("vllm", device="cuda", model=model)


def reader(wanted: Deployment, name: str = "reader") -> Object:
    """A pod with the volumes and init containers of a replica; it lists the model's folder and tries to write there."""
    storage = weights.storage(wanted, plan())
    path = weights.in_pods(plan(), wanted).model.path
    code = f"import os; print(sorted(os.listdir({path!r}))); open({path!r} + '/x', 'w')"
    pod = pods.Pod(
        component="replica",
        container="node",
        image="any",
        argv=("-c", code),
        config_maps=(),
        resources={"cpu": "1"},
        grace_s=1.0,
        volumes=storage.volumes,
        mounts=storage.mounts,
        init=storage.init,
        spec={"restartPolicy": "Never"},
    )
    template = pods.pod_template(wanted, pod)
    metadata = {"name": name, **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def log_of_job(space: Namespace, job: Object) -> str:
    """What the Job's pod said, once it has ended."""
    labels = f"job-name={job['metadata']['name']}"
    space.wait(lambda: any(has_ended(pod) for pod in space.pods(labels)), f"the pod of {labels} has ended")
    return space.pods(labels)[0].log()


def waits(pod: Pod) -> bool:
    """Whether its init container has said that it waits; its log exists when it runs."""
    rows = pod.status.get("initContainerStatuses", ())
    return any("running" in row["state"] for row in rows if row["name"] == "weights") and bool(pod.log("weights"))


def has_ended(pod: Pod) -> bool:
    return pod.phase in ("Succeeded", "Failed")


@pytest.fixture
def hub(kubernetes: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that this machine and the cluster reach."""
    bodies = {path.name: path.read_bytes() for path in files.BUNDLED.iterdir() if path.is_file()}
    with serving(NAME, bodies, kubernetes.cluster.address) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def test_a_job_fills_the_claim_once_and_pods_wait_for_it(kubernetes: Namespace, hub: HubServer) -> None:
    one, other = file("one", hub), file("other", hub)
    claim, job = weights.objects_of(one, plan())
    kubernetes.apply(*(pods.code_map(wanted, pods.archive()) for wanted in (one, other)), claim, reader(one))
    waiting = kubernetes.pod("reader")
    kubernetes.wait(lambda: waits(waiting), "the reader waits")
    assert waiting.log("weights").splitlines()[0].endswith("weights: not begun")
    kubernetes.apply(job)
    assert "weights complete: weights " in log_of_job(kubernetes, job)
    kubernetes.wait(lambda: has_ended(waiting), "the reader has read")
    assert waiting.log("weights").splitlines()[-1].endswith("weights complete")
    assert "'.penstock-complete', 'MANIFEST.json', 'config.json'" in waiting.log()
    assert "Read-only file system" in waiting.log()
    n_asked = len(hub.asked)
    claim, job = weights.objects_of(other, plan())
    kubernetes.apply(claim, job)
    assert "weights complete: fetched before" in log_of_job(kubernetes, job) and len(hub.asked) == n_asked


@pytest.mark.nightly
def test_the_pod_fetches_itself_into_a_claim_for_one_node(kubernetes: Namespace, hub: HubServer) -> None:
    wanted = file("one", hub, storage_access="ReadWriteOnce")
    kubernetes.apply(pods.code_map(wanted, pods.archive()), *weights.objects_of(wanted, plan()))
    for name in ("reader", "again"):
        kubernetes.apply(reader(wanted, name))
        kubernetes.wait(functools.partial(has_ended, kubernetes.pod(name)), f"{name} has read")
        assert "'config.json'" in kubernetes.pod(name).log()
    assert "fetched before" in kubernetes.pod("again").log("weights")


def file_for(place: Place, hub: HubServer, **fields: Any) -> Path:
    block = {"expose": "none", "storage_class": "standard"}
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    return test_kubernetes_target.file_for(place, model=NAME, kubernetes=block, engine={"env": env}, **fields)


def shards(hub: HubServer) -> list[str]:
    """Those that it sent, each as often as it did."""
    return [name for name in hub.downloads if name.endswith(".safetensors")]


def reason_of(run: Run) -> str:
    return " ".join(str(row.reason) for row in now(run).replicas)


@pytest.mark.nightly
def test_a_fetch_that_the_hub_refuses_is_told_and_with_the_token_the_next_try_goes_well(
    kubernetes: Namespace, hub: HubServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_x"
    monkeypatch.setenv("HF_TOKEN", hub.token)  # this machine may read it, the cluster may not
    assert call("up", file_for(place, hub), "--no-wait").code == 0
    run = place.run("one")
    until(lambda: "Cannot access gated repo" in reason_of(run), "the reason")
    said = ("the last try: container fetch ended with code 2", "Accept the licence on its hub page, then set HF_TOKEN")
    assert all(words in reason_of(run) for words in said), reason_of(run)
    hub.token = None
    wait_ready(run)
    assert call("down", "one", "--now", "--weights").code == 0
    assert not kubernetes.objects("persistentvolumeclaims")


@pytest.mark.nightly
def test_up_of_a_hub_model_reports_the_fetch_and_a_second_up_downloads_nothing(
    kubernetes: Namespace, hub: HubServer, place: Place
) -> None:
    hub.is_open.clear()
    assert call("up", file_for(place, hub), "--no-wait").code == 0
    run = place.run("one")
    progress = re.compile(r"weights \d/\d files, 0\.0 GB of 0\.0 GB")
    until(lambda: progress.search(reason_of(run)) is not None, "the progress")
    hub.is_open.set()
    wait_ready(run)
    path = f"/models/models--org--tiny/snapshots/{COMMIT}"
    assert run.plan().model.path.endswith(COMMIT)
    assert "config.json" in kubernetes.pod("one-r0-0").run(["ls", path]).stdout.split()
    before = shards(hub)
    assert call("down", "one", "--now").code == 0
    assert [claim["metadata"]["name"] for claim in kubernetes.objects("persistentvolumeclaims")] == ["weights-org-tiny"]
    assert kubernetes.objects("jobs", "/apis/batch/v1") == []

    assert call("up", file_for(place, hub, cache={"stage": "auto"}), "--json").code == 0
    log = kubernetes.pod("one-r0-0").run(["sh", "-c", "find /stage -name MANIFEST.json; ls /stage/*/*"]).stdout
    assert "MANIFEST.json" in log and "config.json" in log, "it copies the claim to its own disk"
    assert shards(hub) == before
    assert call("down", "one", "--now", "--weights").code == 0
    kubernetes.wait(lambda: not kubernetes.objects("persistentvolumeclaims"), "the claim is gone")


@pytest.mark.nightly
def test_pods_with_own_disks_pass_the_files_on(kubernetes: Namespace, hub: HubServer, place: Place) -> None:
    wanted = file_for(place, hub, cache={"weights": "pod"}, replicas=3)
    assert call("up", wanted, "--json").code == 0
    rows = now(place.run("one")).replicas
    assert [row.state for row in rows] == ["ready"] * 3
    headers = [name for name, _ in hub.ranges]  # for the plan
    sent = shards(hub)
    assert len(sent) - len(headers) == len(set(sent)) > 0, "the hub sent each once"
    assert call("down", "one", "--now").code == 0
