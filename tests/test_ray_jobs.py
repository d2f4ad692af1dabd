"""Target ray without a Ray: what it sends, and what it makes of a dashboard's answers."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
from place_stubs import Clock, RayStub, client_of
from samples import cpu_machine, demo_plan, run_folder

from penstock.deployment import prepare, stop
from penstock.errors import PenstockError, Problem, SpecError, UserError
from penstock.hardware import Gpu
from penstock.models.files import BUNDLED
from penstock.planner import Plan
from penstock.planner.engine_versions import NEWEST
from penstock.run_folder import Desired, Handle, Launch, Left, Run, every_left, note_left, replica
from penstock.spec import reading
from penstock.spec.deployment import Deployment, Parallel
from penstock.targets import Placement
from penstock.targets.ray import driver, jobs_api
from penstock.targets.ray import target as target_ray
from penstock.targets.ray.jobs_api import Dashboard, Job, RayNode, _free, package
from penstock.targets.ray.placement import as_ray_gives, gpu_kind
from penstock.targets.ray.target import RayJobs, _mark
from penstock.wire.answers import HttpError, NoAnswer

T = TypeVar("T")
NODES = [RayNode("a", "10.0.0.1", {"CPU": 8.0, "GPU": 4.0}), RayNode("b", "10.0.0.2", {"CPU": 4.0, "GPU": 4.0})]


def deployment(**fields: Any) -> Deployment:
    return reading.from_mapping({"model": "penstock-demo", "name": "one", "target": "ray", **fields})


@contextlib.contextmanager
def answering(status: int, text: str) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer to everything: its address, and the `Authorization` of each request."""
    seen: list[str] = []

    def ask(method: str, path: str, data: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        seen.append(headers["authorization"])
        return status, text.encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs_api, "Client", client_of(ask))
        yield "http://ray:8265", seen


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (404, "not here", "is no dashboard of Ray: it answered 404"),
        (200, '{"version": "1.0"}', "is no dashboard of Ray: its /api/version is another's"),
        (200, "<html>", "JSON"),
        (401, "Unauthorized", "does not let us in: 401"),
    ],
)
def test_what_answers_in_place_of_a_dashboard_is_told(status: int, text: str, said: str) -> None:
    with answering(status, text) as (address, _):
        (problem,) = RayJobs().check(deployment(ray={"address": address}))
    assert problem.path == "ray.address" and said in problem.message and problem.hint


def test_the_clusters_token_is_sent_and_a_log_is_all_text_and_nothing_when_its_job_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "word")
    facts = {"version": "4", "ray_version": "2.60.0", "logs": "10%\r20%\rdone\nnext\nbegu"}
    with answering(200, json.dumps(facts)) as (address, seen):
        assert Dashboard(address).log("j") == "10%\r20%\rdone\nnext\nbegu"
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        (tmp_path / "token").write_text("filed\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        assert Dashboard(address).ray_version() == "2.60.0"
    assert seen == ["Bearer word", "Bearer filed"]
    with answering(404, "no such job") as (address, _):
        assert Dashboard(address).log("j") == ""
    with answering(403, "Forbidden") as (address, _), pytest.raises(HttpError):
        Dashboard(address).log("j")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="token of Ray"):
        Dashboard(address)


class Cluster(RayStub):
    """A cluster whose jobs, groups and logs are told; `fails` makes it silent."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs_now, self.groups_now = dict[str, Job](), dict[str, str]()
        self.logs_now, self.deleted, self.fails = list[str](), list[str](), False

    def _answer(self, value: T) -> T:
        if self.fails:
            raise NoAnswer("no answer from it within 10 s")
        return value

    def ray_version(self) -> str:
        return self._answer("2.60.0")

    def jobs(self) -> dict[str, Job]:
        return self._answer(self.jobs_now)

    def groups(self) -> dict[str, str]:
        return self._answer(self.groups_now)

    def nodes(self) -> list[RayNode]:
        return self._answer(NODES)

    def free(self) -> dict[str, dict[str, float]]:
        return self._answer({"a": {"CPU": 8.0, "GPU": 4.0}, "b": {"CPU": 4.0, "GPU": 1.0}})

    def log(self, name: str) -> str:
        return self._answer(self.logs_now.pop(0))

    def delete(self, name: str) -> None:
        self.deleted.append(self.jobs_now.pop(name).id)

    def stop(self, name: str) -> None:
        self.jobs_now[name] = msgspec.structs.replace(self.jobs_now[name], state="SUCCEEDED")


class FakeRun:
    """As much of a run folder as `status` reads."""

    def __init__(self, state: str = "up") -> None:
        self._state = state

    def desired(self) -> Desired:
        return Desired(self._state, 1)  # type: ignore[arg-type]

    def is_ended(self) -> bool:
        return self._state == "down"

    def handle(self) -> Handle:
        return Handle("ray", {"replica/0": {"job": "j", "address": "http://head:8265"}})

    def artifact(self) -> Any:
        return RayJobs().render(launch(n_gpus=4, n_nodes=2), "python", deployment())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(target_ray, "Dashboard", made)
    for name in ("_FRESH_S", "_AGAIN_S", "_MONITORED_S"):
        monkeypatch.setattr(target_ray, name, 0.0)
    return made


def launch(n_gpus: int = 0, n_nodes: int = 1) -> Launch:
    changes: dict[str, Any] = {"n_nodes": n_nodes}
    if n_gpus:
        changes |= {"device": "cuda", "layout": Parallel(tensor=n_gpus * n_nodes)}
    plan: Plan = demo_plan("vllm", **changes)
    return Launch("one", plan, ("http://10.0.0.9:1",), "/home-of/secrets/admin-token", listen="network")


def placed(target: RayJobs, state: str = "up") -> Placement:
    return target.status(cast(Run, FakeRun(state)))[replica("0")]


def test_a_job_and_its_placement_group_become_a_placement(cluster: Cluster) -> None:
    text = "2.0/8.0 CPU (1.0 used of 2.0 reserved in placement groups)\n0.0/4.0 GPU\n0B/19.82GiB memory"
    assert _free(text) == {"CPU": 6.0, "GPU": 4.0}
    target = RayJobs()
    assert placed(target) == Placement("gone", "Ray does not know its job j")
    cluster.jobs_now = {"j": Job("j", "PENDING")}
    assert placed(target).state == "queued"
    cluster.jobs_now = {"j": Job("j", "RUNNING")}
    assert placed(target) == Placement("queued", "its driver starts")
    cluster.groups_now = {"j": "PENDING", "other": "CREATED"}
    why = "needs 2 node(s) with 4 GPU and 5 CPU free, 1 of 2 have it: 10.0.0.2 has 1 of 4"
    assert placed(target) == Placement("queued", why)
    cluster.groups_now = {"j": "CREATED"}
    assert placed(target) == Placement("placed")
    cluster.groups_now = {"j": "RESCHEDULING"}
    why = "needs a node with 4 GPU and 5 CPU free, 1 of 2 have it: 10.0.0.2 has 1 of 4"
    lost = f"Ray lost a node of it, and waits for another: it {why}"
    assert placed(target) == Placement("broken", lost, is_repaired_by_target=True), "the controller leaves it to Ray"
    cluster.jobs_now = {"j": Job("j", "FAILED", "Job failed, last logs:\npenstock: its first node ended with 1\n")}
    assert placed(target) == Placement("gone", "its job has ended: penstock: its first node ended with 1")
    cluster.jobs_now = {"j": Job("j", "STOPPED")}
    assert placed(target) == Placement("gone", "its job was stopped", is_final=True)
    assert not placed(target, "down").is_final, "who ends a deployment stops it"
    target._ending.add("j")
    assert not placed(target).is_final


def test_a_dashboard_that_is_away_leaves_its_last_word(cluster: Cluster) -> None:
    target = RayJobs()
    cluster.jobs_now, cluster.groups_now = {"j": Job("j", "RUNNING")}, {"j": "CREATED"}
    assert placed(target) == Placement("placed")
    cluster.fails = True
    assert placed(target).state == "placed" and "does not answer" in str(placed(target).reason)
    assert placed(RayJobs()).state == "placed", "who never heard of the cluster does not say that a job is gone"
    cluster.fails, cluster.jobs_now = False, {}
    assert placed(target).state == "gone"


def test_a_cluster_that_is_too_small_is_told_with_all_else_that_is_wrong(cluster: Cluster) -> None:
    wanted = deployment(
        hardware={"nodes": 3, "gpus_per_node": 4},
        engine={"executor": "ray"},
        ray={"runtime_env": {"working_dir": "./here", "py_modules": ["s3://bucket/a.zip"]}},
    )
    found = {problem.path: problem for problem in RayJobs().check(wanted)}
    assert set(found) == {"hardware.nodes", "engine.executor", "ray.runtime_env.working_dir"}
    assert found["hardware.nodes"].message == "3 nodes with 4 GPUs, but the cluster has 2 alive"
    (problem,) = RayJobs().check(deployment(hardware={"gpus_per_node": 8}))
    assert problem == Problem(
        "hardware.gpus_per_node", "8, but the largest of 2 nodes has 4 GPUs for Ray", "start Ray there with --num-gpus"
    )
    assert RayJobs().check(deployment(hardware={"nodes": 2, "gpus_per_node": 4})) == []


KIND = "accelerator_type:"


def test_a_cluster_of_several_kinds_of_gpu_is_asked_for_the_one_of_the_file(cluster: Cluster) -> None:
    mixed = [
        RayNode(str(n), f"10.0.0.{n}", {"GPU": 4.0, f"accelerator_type:{kind}": 1.0}) for n, kind in enumerate("AB")
    ]
    named = [RayNode("7", "10.0.0.7", {"GPU": 8.0, "accelerator_type:H100": 1.0}), *mixed]
    wanted = deployment(hardware={"gpu": "h100-sxm"})
    assert gpu_kind(wanted, named) == {"accelerator_type:H100": 0.001}
    assert gpu_kind(wanted, named[:1]) == {} == gpu_kind(wanted, mixed) == gpu_kind(deployment(), named)
    for card, kind in (
        ("rtx-a6000", "RTX-A6000"),
        ("rtx-5090", "GeForce-RTX-5090"),
        ("h200", "H200"),
        ("l40s", "L40S"),
    ):
        others = [RayNode(f"{n}", "", {f"{KIND}{name}": 1.0}) for n, name in enumerate(("H20", "L40", kind))]
        assert gpu_kind(deployment(hardware={"gpu": card}), others) == {f"{KIND}{kind}": 0.001}
        assert gpu_kind(deployment(hardware={"gpu": card}), others[:2]) == {}, "no other card stands in"
    machine = cpu_machine()
    gpus = tuple(Gpu(n, "H100", 80, 3) for n in range(8))
    given = as_ray_gives(msgspec.structs.replace(machine, gpus=gpus), 2)
    assert [(gpu.index, gpu.memory_free_bytes) for gpu in given.gpus] == [(0, 80), (1, 80)]


@pytest.mark.loopback
def test_a_rehearsal_without_the_cluster_says_that_it_was_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = {"gpu": "h100-sxm", "gpus_per_node": 4}
    fields: dict[str, Any] = {"hardware": hardware, "engine": {"kind": "vllm"}, "gateway": {"port": 0}}
    wanted = deployment(ray={"address": "http://ray:9"}, **fields)

    def refused(*_: object) -> tuple[int, bytes]:
        raise PenstockError("could not connect to http://ray:9: connection refused", is_retryable=True)

    monkeypatch.setattr(jobs_api, "Client", client_of(refused))
    prepared = prepare.rehearse(wanted)
    why = "not asked: could not connect to http://ray:9: connection refused; this is for 1 machine as the file"
    assert prepared.plan.warnings[-1].startswith(why)
    assert (prepared.plan.engine_version, prepared.machine.gpus[0].name) == (NEWEST, "NVIDIA H100 80GB HBM3")
    with pytest.raises(SpecError, match="1 problem"):
        prepare.prepare(wanted)


def test_what_is_sent_keeps_the_users_environment_and_holds_no_secret() -> None:
    block = {"python": "/opt/my env/python", "runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]}}
    artifact = RayJobs().render(launch(n_gpus=4, n_nodes=2), "python", deployment(ray=block))
    job, nodes = json.loads(artifact.files["job.json"]), json.loads(artifact.files["nodes.json"])
    assert job["entrypoint"] == "exec python -m penstock.targets.ray.driver drive {replica_args}", (
        "the driver needs Ray, not an engine"
    )
    assert job["runtime_env"]["pip"] == ["x"] and job["runtime_env"]["py_modules"] == ["gcs://{package}"]
    assert job["runtime_env"]["env_vars"]["A"] == "1"
    assert int(job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > launch().plan.drain_s
    assert nodes == {"n_nodes": 2, "bundle": {"GPU": 4.0, "CPU": 5.0}, "python": "/opt/my env/python"}
    assert json.loads(artifact.files["launch.json"])["token_file"] == ""


def test_the_package_is_named_by_its_content_and_nodes_find_what_is_in_it() -> None:
    name, data = package(with_model=False)
    assert package(with_model=False) == (name, data) and name.startswith("_ray_pkg_") and name.endswith(".zip")
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    assert "penstock/node/supervisor.py" in names and "penstock/__init__.py" in names
    assert not [name for name in names if "demo_model" in name or "__pycache__" in name or name.endswith(".so")]
    wanted = launch()
    model = msgspec.structs.replace(wanted.plan.model, path=str(BUNDLED))
    wanted = msgspec.structs.replace(wanted, plan=msgspec.structs.replace(wanted.plan, model=model))
    rendered = RayJobs().render(wanted, "python", deployment())
    assert json.loads(rendered.files["launch.json"])["plan"]["model"]["path"] == "{penstock}/models/demo_model"
    mine, other = run_folder().record(), run_folder().record()
    assert _mark(mine) != _mark(other), "on a shared cluster two people's runs may have the same folder"
    assert not Path(_mark(mine)).is_absolute()


def test_a_followed_log_goes_on_where_it_was_to_the_next_job_and_ends_with_the_deployment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while Ray's agent does not answer (an empty log), and past a line that is only begun."""
    monkeypatch.setattr(target_ray, "time", Clock())
    cluster.logs_now = ["a\nb\nc", "", "a\nb\ncc\nd", "a\nb\ncc\nd\ne", "A\n"]
    entries = iter(["j", "k"])

    class Following(FakeRun):
        def handle(self) -> Handle:
            return Handle("ray", {"replica/0": {"job": next(entries), "address": "http://head:8265"}})

    cluster.jobs_now = {"j": Job("j", "RUNNING"), "k": Job("k", "RUNNING")}
    lines = RayJobs().logs(cast(Run, Following()), replica("0"), follow=True)
    assert [next(lines) for _ in range(3)] == ["a", "b", "cc"]
    cluster.jobs_now["j"] = Job("j", "SUCCEEDED")
    assert [next(lines) for _ in range(3)] == ["d", "e", "A"], "the last words, then the next job's"
    cluster.fails = True
    with pytest.raises(NoAnswer):
        next(lines)
    cluster.fails, ended = False, cast(Run, FakeRun("down"))
    cluster.logs_now = ["a\nb\nc", "its first\nits last words"]
    assert list(RayJobs().logs(ended, replica("0"), follow=False, last=2)) == ["b", "c"]
    cluster.jobs_now = {}
    assert list(RayJobs().logs(ended, replica("0"), follow=True, last=1)) == ["its last words"]


def test_a_job_that_a_killed_controller_submitted_is_taken_over_or_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = run_folder(deployment()), list[str]()
    monkeypatch.setattr(
        RayJobs, "_end", lambda _self, _dashboard, _run, jobs, _grace_s: ended.extend(job.id for job in jobs)
    )
    facts = {"penstock_run_id": run.record().id, "penstock_replica": "0"}
    cluster.jobs_now = {"j": Job("j", "PENDING", "", facts), "k": Job("k", "FAILED", "", facts)}
    run.write_handle(Handle("ray", {}, ("0",)))
    handle = RayJobs().place(run, [replica("0")])
    assert (handle.replicas["0"]["job"], handle.ordered, ended) == ("j", (), [])
    assert (RayJobs().place(run, []), ended) == (Handle("ray"), ["j"])


@pytest.mark.parametrize(
    ("log", "is_swept"),
    [(driver.ENDED, False), (f"penstock: node 1{driver.LOST}x\n{driver.ENDED}", True), ("killed", True)],
)
def test_an_end_removes_what_lost_nodes_and_killed_drivers_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, log: str, is_swept: bool
) -> None:
    run, questions = run_folder(deployment()), list[Any]()
    monkeypatch.setattr(target_ray, "_ask_nodes", lambda *words: questions.append(words[2]))
    facts = {"penstock_run_id": run.record().id, "penstock_replica": "0"}
    cluster.jobs_now, cluster.logs_now = {"j": Job("j", "RUNNING", "", facts)}, [log]
    RayJobs().end(run, 0.0)
    assert cluster.deleted == ["j"]
    assert [words[1:4] for words in questions] == [
        ["penstock.targets.ray.guard", "sweep", _mark(run.record())]
    ] * is_swept


def test_down_forgets_a_cluster_that_is_gone_for_good(cluster: Cluster) -> None:
    run = run_folder(deployment())
    run.write_handle(Handle("ray", {"replica/0": {"job": "j", "address": "http://head:8265"}}))
    cluster.fails = True
    note_left(Left("ray", run.record().id, "node2", "one on node2", {}))
    with pytest.raises(PenstockError, match='could not end the jobs of "one"') as caught:
        stop.down(run)
    assert caught.value.hint == "When the cluster is gone for good: penstock down one --forget"
    assert not run.is_ended()
    steps = list[str]()
    stop.down(run, on_step=steps.append, forget=True)
    assert run.is_ended() and every_left() == []
    assert "no answer from it" in steps[-1] and "It is forgotten." in steps[-1]


def test_the_job_on_the_cluster_needs_nothing_of_ours() -> None:
    tree = ast.parse(Path(driver.__file__).read_text("utf-8"))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert names - sys.stdlib_module_names == {"ray"}
