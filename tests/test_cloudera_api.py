"""The workbench's API, its own description of it, and `check`, against the fake workbench without pods."""

from __future__ import annotations

import io
import os
import ssl
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cloudera_rig import NoPods
from samples import demo_plan, deployment, run_folder

from penstock import paths, targets
from penstock.errors import PenstockError, Problem, UserError
from penstock.models import sources
from penstock.models.sources import Listing, RemoteFile, Source
from penstock.spec.blocks import Cloudera
from penstock.spec.deployment import Deployment
from penstock.targets import waiting
from penstock.targets.cloudera import checks, folder, inside, names, session, weights, words
from penstock.targets.cloudera.api import Workbench
from penstock.targets.cloudera.bodies import Judge
from penstock.targets.code_archive import code_archive
from penstock.testing.fake_workbench import description
from penstock.testing.fake_workbench import server as fake
from penstock.text import GIB
from penstock.wire.answers import HttpError

L4 = {"id": "3", "label_key": "nvidia.com/gpu.product", "label_value": "NVIDIA-L4", "availability": True,
      "max_gpu_count": "4", "current_gpu_count": "0", "max_gpu_per_workload": "1", "gpu_memory": 24.0}  # fmt: skip
A100 = {**L4, "id": "4", "label_value": "NVIDIA-A100-SXM4-80GB"}
JOBS = f"/projects/{fake.PROJECT_ID}/jobs"


@pytest.fixture
def there(podless: fake.Workbench) -> fake.Workbench:
    return podless


def file(there: fake.Workbench, block: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    whole = {"workbench": there.url, "project": fake.PROJECT, **(block or {})}
    return deployment(target="cloudera", cloudera=whole, **{"name": "one", **fields})


def connected(there: fake.Workbench, **block: Any) -> Workbench:
    whole = Cloudera(workbench=there.url, project=fake.PROJECT, **block)
    workbench = session.connect(whole)
    session.find_project(workbench, whole)
    return workbench


def problems(there: fake.Workbench, block: dict[str, Any] | None = None, **fields: Any) -> list[Problem]:
    targets.load.cache_clear()
    return targets.load("cloudera").check(file(there, block, **fields))


def body_of_job(**more: Any) -> dict[str, Any]:
    return {"name": "one", "script": "a.py", "cpu": 1.0, "memory": 1.0, "runtime_identifier": fake.RUNTIME, **more}


# ---- the API ---------------------------------------------------------------------------------------------------------


def test_every_page_of_a_list_is_read_though_the_workbench_gives_two_rows_each(there: fake.Workbench) -> None:
    there.labels = [{**L4, "id": str(number)} for number in range(5)]
    assert [row["id"] for row in connected(there).gpu_labels()] == ["0", "1", "2", "3", "4"]
    assert sum(call.endswith("/nodelabels") for call in there.calls) == 3


def test_a_busy_workbench_is_asked_again_and_a_broken_one_or_another_server_is_not(there: fake.Workbench) -> None:
    workbench = connected(there)
    there.refusals = [(429, "slow down"), (503, "upgrading")]
    assert workbench.project()["name"] == fake.PROJECT
    for refusals, said in ([(500, "panic")], "panic"), ([(429, "slow down")] * 4, "slow down"):
        there.refusals = refusals
        with pytest.raises(HttpError, match=said):
            workbench.project()
    workbench._client = type(workbench._client)(there.url, there.key)
    with pytest.raises(PenstockError, match="not JSON") as refused:
        workbench._ask("GET", "/x")
    assert "the workbench's own URL" in (refused.value.hint or "")


def test_a_key_comes_from_a_file_or_the_environment_and_one_that_is_refused_says_what_may_be_wrong_with_it(
    there: fake.Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{there.key}\n")
    monkeypatch.delenv("CDSW_APIV2_KEY")
    assert connected(there, key_file=str(key_file)).project_id == fake.PROJECT_ID
    for file_of_key, text, said in (
        (None, "", "CDSW_APIV2_KEY is not set"),
        (str(key_file), "\n", "the file is empty"),
        (str(tmp_path / "no"), "", "cannot read the API key"),
        (str(key_file), "of-last-year", "refuses the API key: it is wrong, has expired"),
    ):
        key_file.write_text(text)
        with pytest.raises(UserError, match=said) as refused:
            connected(there, key_file=file_of_key)
    assert "User Settings > API Keys" in (refused.value.hint or "")
    [problem] = problems(there, {"key_file": str(key_file)})
    assert "refuses the API key" in problem.message


@pytest.mark.parametrize("upload", ["PUT", "POST"])
def test_files_go_up_by_either_method_and_come_down_whole(there: fake.Workbench, upload: str) -> None:
    there.upload = upload
    workbench, data = connected(there), bytes(range(256)) * 9 + b"\r\n--penstock"
    workbench.upload(".penstock/a b/c.bin", data)
    assert workbench.download(".penstock/a b/c.bin") == data
    assert workbench.download(".penstock/no") is None
    assert [row["path"] for row in workbench.files(".penstock")] == [".penstock/a b"]
    with pytest.raises(HttpError, match="not empty"):
        workbench.delete_file(".penstock/a b")
    workbench.delete_file(".penstock/a b/c.bin")
    workbench.delete_file(".penstock/a b/c.bin")
    assert workbench.files(".penstock/a b") == []


def test_the_code_is_sent_once_for_each_version(there: fake.Workbench) -> None:
    workbench = connected(there)
    for _ in range(2):
        folder.send_code(workbench, code_archive())
    assert there.calls.count(f"PUT /api/v2/projects/{fake.PROJECT_ID}/files") == 1
    data = (there.pods.folder / ".penstock" / "code" / f"{code_archive().hash}.zip").read_bytes()
    assert "penstock/node/__main__.py" in zipfile.ZipFile(io.BytesIO(data)).namelist()


@pytest.mark.processes
@pytest.mark.nightly
def test_a_workbench_with_a_certificate_of_its_own_needs_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1", "-nodes"]
    pair = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *words, *pair]
    subprocess.run(argv, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with fake.Workbench(NoPods(tmp_path), "127.0.0.1", tls=tls, host="127.0.0.1") as made:
        monkeypatch.setenv("CDSW_APIV2_KEY", made.key)
        with pytest.raises(PenstockError, match="secure connection"):
            connected(made)
        assert connected(made, ca_file=str(tmp_path / "cert.pem")).project_id == fake.PROJECT_ID
        with pytest.raises(UserError, match="cannot read certificates"):
            connected(made, ca_file=str(tmp_path / "no.pem"))


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vintage", ["cloud", "on-prem"])
def test_a_body_is_judged_by_the_workbenchs_own_description(vintage: description.Vintage) -> None:
    judge = Judge.read(description.swagger(vintage))
    good = body_of_job(environment={"A": "b"}, accelerator_label_id="3")
    assert judge.problems("POST", JOBS, good) == []
    bad = body_of_job(environment="{}", accelerator_label_id=3, cpu="1", nvidia_gpu=1.5, gpus=1)
    assert judge.problems("POST", JOBS, bad) == [
        "cpu: '1' is no double",
        "environment: '{}' is no object",
        "accelerator_label_id: 3 is no int64",
        "nvidia_gpu: 1.5 is no int32",
        "gpus: this version has no such field",
    ]
    assert judge.takes("POST", JOBS, "resource_group_id") == (vintage == "cloud")
    assert judge.knows("GET", "/workloads/executions") == (vintage == "cloud")
    assert judge.knows("POST", f"{JOBS}/ab-1/runs/cd-2:stop") and not judge.knows("POST", f"{JOBS}/ab-1:stop")


def test_what_a_version_lacks_is_left_out_where_nothing_depends_on_it_and_refused_otherwise() -> None:
    document = description.swagger("on-prem")
    del document["definitions"]["CreateJobRequest"]["properties"]["description"]
    judge = Judge.read(document)
    assert "description" not in judge.sent("POST", JOBS, body_of_job(description="words"))
    with pytest.raises(PenstockError, match="takes it otherwise") as refused:
        judge.sent("POST", JOBS, body_of_job(resource_group_id=1))
    assert refused.value.detail == "resource_group_id: this version has no such field"
    with pytest.raises(PenstockError, match="lists no paths"):
        Judge.read([])


def test_the_fake_refuses_what_its_description_does_not_have(there: fake.Workbench) -> None:
    workbench = connected(there)
    for path, body, said in (
        (JOBS, body_of_job(environment_variables={}), 'unknown field "environment_variables"'),
        ("/nowhere", {}, "Not Found"),
        (JOBS, body_of_job(), r"script a\.py does not exist"),
    ):
        with pytest.raises(HttpError, match=said):
            workbench._ask("POST", path, body)
    (there.pods.folder / "a.py").touch()
    job = workbench.create_job(body_of_job())
    workbench.run_job(job["id"])
    with pytest.raises(HttpError, match="has an active run"):
        workbench.run_job(job["id"])


def test_a_job_that_another_command_starts_first_keeps_that_run(
    there: fake.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there.pods.folder / "a.py").touch()
    workbench, loads = connected(there), there.workloads
    job, runs = workbench.create_job(body_of_job())["id"], workbench.runs

    def runs_before_that(job: str) -> list[Any]:
        monkeypatch.setattr(workbench, "runs", runs)
        rows = runs(job)
        loads.run_job(job, {})
        return rows

    monkeypatch.setattr(workbench, "runs", runs_before_that)
    row = weights.active_run(workbench, job)
    assert [row["id"]] == list(loads.runs)
    skipped = {"status": "ENGINE_SKIPPED", "scheduling_at": "2099-01-01T00:00:00Z"}
    assert words.active([row, skipped]) == row and words.active([skipped]) is None


# ---- what is left ----------------------------------------------------------------------------------------------------


def test_workloads_without_a_run_folder_are_found_and_ended_and_those_of_others_stay(
    there: fake.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)
    (there.pods.folder / "a.py").touch()
    (there.pods.folder / ".penstock" / "runs" / "two").mkdir(parents=True)
    (there.pods.folder / ".penstock" / "runs" / "two" / "run.json").touch()
    workbench = connected(there)
    for title in (names.workload("lost", "0" * 12, "r0-n0"), names.workload("two", "0" * 12, "r0-n0"), "penstock-own"):
        workbench.create_job(body_of_job(name=title))
    workbench.create_application(
        body_of_job(name=names.workload("lost", "0" * 12, "gateway"), subdomain="penstock-lost")
    )
    run_folder(file(there))
    targets.load.cache_clear()
    [left] = targets.load("cloudera").leftovers()
    assert (left.run_id, left.what) == ("lost", '2 workloads of "lost"')
    assert left.place == f'project "{fake.PROJECT}" of {there.url}'
    there.workloads.applications.popitem()[1].status = "STOPPED"
    targets.finish(left)
    assert there.left() == ["penstock-own", names.workload("two", "0" * 12, "r0-n0")]
    there.pods.folder.joinpath(".penstock", "runs", "lost").mkdir()
    there.pods.folder.joinpath(".penstock", "runs", "lost", "run.json").touch()
    with pytest.raises(PenstockError, match="it was started again"):
        targets.finish(left)


# ---- check -----------------------------------------------------------------------------------------------------------


def shown(found: list[Problem]) -> str:
    return "\n".join(map(str, found))


def test_a_deployment_that_fits_has_no_problems_in_either_vintage(there: fake.Workbench) -> None:
    there.labels = [L4]
    for vintage in ("cloud", "on-prem"):
        there.vintage = vintage
        assert problems(there) == problems(there, hardware={"gpus_per_node": 1, "nodes": 2}) == []


def test_vllm_on_ray_needs_more_shared_memory_than_a_project_has_at_first_which_up_raises(
    there: fake.Workbench,
) -> None:
    there.labels = [L4]
    two: dict[str, Any] = {"hardware": {"gpus_per_node": 1, "nodes": 2}}
    on_ray = {**two, "engine": {"kind": "vllm", "executor": "ray"}}
    assert shown(problems(there, **on_ray)) == (
        "cloudera.shared_memory_mb: pods have 64 MB of /dev/shm, and vLLM on Ray needs 512 MB "
        "(set it to 512, and `up` raises the project's limit, or use engine.executor: mp)"
    )
    assert problems(there, {"shared_memory_mb": 512}, **on_ray) == []
    assert problems(there, engine={"kind": "vllm"}, **two) == [], "mp, which is the default here, needs no more"
    for block, raised_to in (({}, 64), ({"shared_memory_mb": 4096}, 4096), ({"shared_memory_mb": 2048}, 4096)):
        checks.raise_shared_memory(connected(there), file(there, block))
        assert there.project["shared_memory_limit"] == raised_to


def test_all_that_is_wrong_in_the_workbench_is_said_at_once(there: fake.Workbench) -> None:
    there.labels = [{**L4, "availability": False}, A100]
    there.quotas = [{"accelerator_id": "3", "gpu_quota": "1"}]
    block = {"gpu_type": "NVIDIA-L4", "runtime": fake.RUNTIME.replace("3.11", "3.10")}
    for page in ("", "-ui"):
        there.workloads.create_application(body_of_job(name=f"theirs{page}", subdomain=f"penstock-one{page}"))
    text = shown(problems(there, block, hardware={"gpus_per_node": 2, "nodes": 3}, ui=True))
    assert text.splitlines() == [
        'cloudera.gpu_type: GPUs of label "NVIDIA-L4" are not available in the workbench now',
        "hardware.gpus_per_node: 2, but a workload gets at most 1 of NVIDIA-L4 (gpus_per_node: 1, and more nodes)",
        "hardware.nodes: needs 6 GPUs of NVIDIA-L4, the workbench has 4",
        "hardware.nodes: needs 6 GPUs of NVIDIA-L4, your quota is 1 "
        "(ask an administrator: Site Administration > Quotas)",
        f'cloudera.runtime: "{fake.RUNTIME.replace("3.11", "3.10")}" has Python 3.10 (one with Python 3.11 or later)',
        "cloudera.shared_memory_mb: the project's pods have 64 MB of /dev/shm, and several GPUs of a pod need 2048 MB "
        "(set it to 2048, and `up` raises the project's limit, or do so under Project Settings > Advanced)",
        'name: the application "theirs" has the subdomain penstock-one (give another name)',
        'name: the application "theirs-ui" has the subdomain penstock-one-ui (give another name)',
    ]


def test_what_the_api_does_not_tell_is_said_as_unknown(there: fake.Workbench) -> None:
    there.labels = [{**L4, "max_gpu_per_workload": "2"}]
    del there.project["shared_memory_limit"]
    wanted = file(there, hardware={"gpus_per_node": 2}, model="org/model")
    assert checks.examine(connected(there), wanted)[0] == []
    targets.load.cache_clear()
    target = targets.load("cloudera")
    assert target.check(wanted) == []
    notes = [note for note in target.warnings(wanted, demo_plan("vllm")) if note.startswith("not known: ")]
    assert [note.split("; ")[0] for note in notes] == [
        "not known: /dev/shm of the project's pods",
        "not known: free space of the project's files for the weights, which the API does not tell",
    ]
    assert all(note.endswith("`penstock doctor FILE` measures it") for note in notes)


def test_in_a_session_the_weights_must_fit_into_the_project(
    there: fake.Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDSW_PROJECT_ID", fake.PROJECT_ID)
    listing = Listing(Source("hub", "org/model"), "0" * 40, {"model.safetensors": RemoteFile(10 * GIB)})
    monkeypatch.setattr(sources, "resolve", lambda *_: listing)
    monkeypatch.setattr(paths, "free_bytes", lambda _: 4 * GIB)
    wanted = file(there, hardware={"gpus_per_node": 0}, model="org/model", cache={"weights": str(tmp_path / "hub")})
    [problem] = checks.examine(connected(there), wanted)[0]
    assert problem.path == "model" and problem.message.endswith("and 4.0 GiB are free."), problem
    monkeypatch.setattr(paths, "free_bytes", lambda _: 40 * GIB)
    assert checks.examine(connected(there), wanted)[0] == []


ONE_GPU = {"hardware": {"gpus_per_node": 1}}
TWO_KINDS = "NVIDIA-A100-SXM4-80GB, NVIDIA-L4"


@pytest.mark.parametrize(
    ("labels", "block", "fields", "said"),
    [
        ([L4], {"gpu_type": "NVIDIA-L40"}, {}, 'has no GPU label "NVIDIA-L40" (did you mean "NVIDIA-L4"?)'),
        ([L4], {"runtime": "own:1"}, {}, f'has no runtime "own:1" (it has: {fake.RUNTIME})'),
        ([], {"project": "llms"}, {}, 'cannot use project "llms" of http://cml.test: this key sees no such project'),
        ([], {}, ONE_GPU, "has no GPUs"),
        ([L4, A100], {}, ONE_GPU, f"has 2 kinds of GPU (one of: {TWO_KINDS})"),
        ([L4, A100], {}, {"hardware": {"gpu": "h100-sxm"}}, f'has no GPU label for "h100-sxm" (it has: {TWO_KINDS})'),
        ([{**L4, "label_value": "NVIDIA-H20"}], {}, {"hardware": {"gpu": "h200"}}, 'has no GPU label for "h200"'),
        ([L4], {}, {"hardware": {"gpu": "h20"}}, 'no GPU "h20" in the catalogue (The nearest names are h200-sxm.'),
        ([{**L4, "max_gpu_per_workload": "0"}], {}, ONE_GPU, "the site lets no workload have a GPU"),
    ],
)
def test_what_the_workbench_does_not_have_is_named_with_what_it_has(
    there: fake.Workbench, labels: list[dict[str, Any]], block: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    there.labels = labels
    assert said in shown(problems(there, block, **fields))


def test_without_the_right_to_see_jobs_nothing_is_placed(
    there: fake.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    workbench = connected(there)
    workbench.judge()

    def refused() -> None:
        raise HttpError("403: no right", 403)

    monkeypatch.setattr(workbench, "jobs", refused)
    assert [str(problem) for problem in checks.examine(workbench, file(there))[0]] == [
        "target: 403: no right (ask an administrator of the workbench, or the project's owner)"
    ]


def test_the_newest_fitting_runtime_is_taken_with_cuda_for_gpus(there: fake.Workbench) -> None:
    cuda = fake.RUNTIME.replace("standard", "cuda")
    there.labels = [L4]
    there.runtimes[2]["status"] = "ENABLED"
    there.runtimes.append(fake.runtime("new", "Python 3.11", "Standard", version="2026.08.1-b5"))
    there.runtimes.append(fake.runtime("newest", "Python 3.14", "Standard", version="2026.09.1-b1"))
    workbench = connected(there)
    assert checks.examine(workbench, file(there, hardware={"gpu": "l4"}))[1].runtime == cuda
    assert checks.examine(workbench, file(there))[1].runtime == "new"
    there.runtimes = there.runtimes[:1]
    assert "no enabled runtime with Python 3.11" in shown(problems(there))


def test_a_file_with_mistakes_is_refused_without_asking_anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CDSW_PROJECT_ID", raising=False)
    block = {"workbench": "ml.example", "public": True, "cpu": 0, "gateway_memory_gb": -1}
    wanted = deployment(target="cloudera", cloudera=block, gateway={"auth": "none", "tls_cert": "a", "tls_key": "b"})
    text = shown(targets.load("cloudera").check(wanted, is_rehearsal=True))
    assert text.splitlines() == [
        'cloudera.workbench: "ml.example" is no URL of a workbench (https://HOST, no path)',
        "cloudera.project: is not set (the name of a project in which you may run jobs)",
        'gateway.auth: "none", and with cloudera.public everyone could use the engines '
        "(remove it; clients then need a key of the gateway)",
        "cloudera.cpu: 0 is not above 0",
        "cloudera.gateway_memory_gb: -1 is not above 0",
        "gateway.tls_cert: the workbench ends TLS in front of applications (remove it)",
    ]


def test_an_answer_that_nobody_fetched_does_not_stay() -> None:
    run = run_folder()
    old, new = (run.path / "asked" / f"{name}.answer" for name in ("old", "new"))
    old.parent.mkdir()
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    inside.answer_all(run)
    assert list(old.parent.iterdir()) == [new]
