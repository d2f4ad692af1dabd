"""Target cloudera against the fake workbench: applications, jobs, workers and sessions are processes in namespaces."""

from __future__ import annotations

import http.client
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloudera_rig import SUBDOMAINS, file_for, left, up
from hosts import Hosts
from hub_server import HubServer, asked_hub
from launching import PROMPT, Place, call, now, replica_of, started, wait_ready
from waiting import until

import penstock
from penstock import targets
from penstock.errors import PenstockError
from penstock.models.files import BUNDLED
from penstock.run_folder import Run
from penstock.spec import reading
from penstock.targets.cloudera import amp
from penstock.targets.cloudera.target import ClouderaAi
from penstock.testing.conformance import check_target
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import RUNTIME, Workbench
from penstock.testing.fake_workbench.workloads import Workload
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


@pytest.mark.nightly  # `make check` has it without pods
@pytest.mark.parametrize("nodes", ["jobs", "workers"])
def test_cloudera_keeps_the_contract_of_targets(place: Place, workbench: Workbench, nodes: str) -> None:
    run, launch = place.written(file_for(place, workbench, cloudera={"nodes": nodes}))
    check_target(targets.load("cloudera"), run, launch, sys.executable, lambda: left(workbench))


def shown(place: Place, workbench: Workbench) -> None:
    """What a user sees of a deployment that is ready."""
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 8)
    assert expected_text(PROMPT, 8) in done.out, done
    url = f"http://{SUBDOMAINS[0]}.{workbench.domain}"
    facts, words = call("status", "one", "--json").json, call("status", "one").out
    assert facts["url"] == url and facts["login"].startswith("the workbench's login (its API key as Authorization")
    assert f"{url}/v1 behind {facts['login']}; here: " in words and "8090" not in words, words
    assert f"{url} behind the workbench's login " in call("ls").out
    assert f"{url}/v1 behind " in call("up", file_for(place, workbench)).out


def silent(*_: object) -> None:
    raise PenstockError("the workbench does not answer", is_retryable=True)


def test_a_deployment_lives_in_the_project_and_verbs_work_from_another_machine(
    place: Place,
    workbench: Workbench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    shown(place, workbench)
    assert "penstock: ready after" in call("logs", "one", "--replica", "0").out
    file = file_for(place, workbench)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "other"))
    targets.load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(ClouderaAi, "adopt", silent)
        refused = call("up", file)
    assert (refused.code, refused.err.splitlines()[0]) == (1, "error: the workbench does not answer")
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], "it runs on, and was not started over"
    for n_replicas in (2, 1):
        assert call("scale", "one", n_replicas).code == 0
        wait_ready(place.run(), n_replicas)
    assert call("keys", "list", "--deployment", "one").code == 0
    assert "first" in capfd.readouterr().out
    words = call("status", "one").out
    assert "one is ready" in words and "idle" not in words, "a job has no idle time-out"
    assert re.search(r"its machines until .*\(JOB_MAXIMUM_MINUTES=35000\)", words), words
    assert call("status", "one", "--json").json["replicas"][0]["ends_by"] == "JOB_MAXIMUM_MINUTES=35000"
    assert "replica 1 drained and ended" in call("events", "one").out
    runs = [r.status for r in workbench.workloads.runs.values()]
    assert sorted(runs) == ["RUNNING", "SUCCEEDED"], "the second replica left by word"
    assert call("down", "one").code == 0
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    targets.load.cache_clear()
    here = left(workbench)
    assert now(run).phase == "down", here


# ---- in a session of the project -------------------------------------------------------------------------------------

VERBS = """
import subprocess, sys
with open("/home/cdsw/said", "w") as said:
    for words in VERBS:
        subprocess.run([sys.executable, "-m", "penstock", *words.split()], stdout=said, stderr=said)
"""


def run_script(workbench: Workbench, script: str) -> Workload:
    """A run of a script of the project, as a session or a task of an AMP has it."""
    loads = workbench.workloads
    body = {"name": "session", "script": script, "cpu": 1.0, "memory": 2.0, "runtime_identifier": RUNTIME}
    paths = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
    }
    job = loads.create_job({**body, "environment": paths})
    run = loads.run_job(job["id"], {})
    loads.jobs.pop(job["id"])  # it is no workload of the deployment
    return loads.runs[run["id"]]


def run_verbs(workbench: Workbench, *verbs: str) -> Workload:
    """These verbs one after another in a session; what they say is in the project's file "said"."""
    (workbench.pods.folder / "verbs.py").write_text(f"VERBS = {list(verbs)!r}\n{VERBS}")
    return run_script(workbench, "verbs.py")


@pytest.mark.nightly
def test_a_session_or_an_amp_starts_a_deployment_that_others_take_over(place: Place, workbench: Workbench) -> None:
    file, folder = file_for(place, workbench, engine={"args": {"load-s": 8}}), workbench.pods.folder
    block: dict[str, Any] = yaml.safe_load(file.read_text())
    del block["cloudera"]["project"]
    (folder / "one.yaml").write_text(yaml.safe_dump(block))
    first = run_verbs(workbench, "up one.yaml")
    until((folder / ".penstock" / "runs" / "one" / "gateway" / "address.json").exists, "the gateway runs")
    words = "this session ends after 60 idle minutes (IDLE_MAXIMUM_MINUTES) and after 10080 minutes in all"
    until(lambda: f"warning: {words}" in (folder / "said").read_text(), "`up` says what ends the session")
    said = (folder / "said").read_text()
    assert said.count(words) == 1 and "the deployment goes on" in said
    assert first.pod is not None and not first.is_over, "`up` still waits"
    first.pod.kill()  # all of it at once
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], done
    run = place.run()
    wait_ready(run)
    second = run_verbs(workbench, "status one", "down one")
    until(lambda: second.is_over, "another session has ended it")
    said = (folder / "said").read_text()
    assert said.startswith("one is ready") and said.endswith("one is down\n"), said
    assert workbench.left() == []
    assert now(run).phase == "down", "also for the laptop"
    shutil.rmtree(folder / ".penstock" / "runs")  # the session's own run folder, for its logs
    shutil.rmtree(run.path)  # so that the laptop asks the workbench

    texts = amp.files(reading.load(file))
    block = yaml.safe_load(texts["amp:deployment.yaml"])
    block["cloudera"]["workbench"] = workbench.url  # a real one speaks https, by which a session finds it itself
    (folder / amp.FILE).write_text(yaml.safe_dump(block))
    (folder / amp.SCRIPT).write_text(texts[f"amp:{amp.SCRIPT}"])
    session = run_script(workbench, amp.SCRIPT)
    until(lambda: session.is_over, "the session has ended")
    assert session.status == "SUCCEEDED", session.pod
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], done
    wait_ready(place.run())
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    assert call("down", "one").code == 0 and left(workbench) == []


# ---- pages -----------------------------------------------------------------------------------------------------------


def status_of(workbench: Workbench, subdomain: str, path: str, key: str | None) -> int:
    host, _, port = workbench.domain.partition(":")
    connection = http.client.HTTPConnection(f"{subdomain}.{host}", int(port), timeout=20.0)
    headers = {"host": f"{subdomain}.{workbench.domain}", **({"authorization": f"Bearer {key}"} if key else {})}
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.nightly
def test_the_chat_page_is_an_application_and_the_live_page_is_at_the_gateways(
    place: Place, workbench: Workbench
) -> None:
    """The live page: for a browser that is logged in to the workbench, or by `penstock dashboard` here."""
    run, _ = up(place, workbench, ui=True)
    wait_ready(run)
    (page,) = [row for row in workbench.workloads.applications.values() if row.record["name"].endswith("-ui")]
    assert page.record["subdomain"] == SUBDOMAINS[1]
    until(lambda: page.status == "RUNNING", "the workbench shows the page as running")

    def is_seen() -> bool:
        part = now(run).ui
        return part is not None and part.state == "running"

    until(is_seen, "the page's part is running")
    assert status_of(workbench, SUBDOMAINS[1], "/health", None) == 302, "without a key it asks for a login"
    assert status_of(workbench, SUBDOMAINS[1], "/health", workbench.key) == 200
    assert status_of(workbench, SUBDOMAINS[0], "/dashboard", workbench.key) == 200
    with started("dashboard", "one", "--no-open") as child:
        assert child.stdout is not None
        url, _, key = child.stdout.readline().strip().partition("#key=")
        live = Client(url.removesuffix("/dashboard"), key, timeout_s=20.0)
        assert b"<html" in live.send("GET", "/dashboard") and next(iter(live.get_events("/dashboard/live")))
    assert call("down", "one").code == 0


# ---- nodes as workers ------------------------------------------------------------------------------------------------


WORKERS: dict[str, Any] = {"cloudera": {"nodes": "workers"}}


def application_of(workbench: Workbench) -> Workload:
    [found] = workbench.workloads.applications.values()
    return found


def living(workbench: Workbench) -> list[Workload]:
    return [row for row in workbench.workloads.workers.values() if not row.is_over]


def answers() -> bool:
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 8)
    return expected_text(PROMPT, 8) in done.out


@pytest.mark.nightly
def test_a_deployment_lives_on_workers(place: Place, workbench: Workbench) -> None:
    workbench.refuses_workers = "quota exceeded: 2 CPU of 2 in use"
    assert call("up", file_for(place, workbench, **WORKERS), "--json", "--no-wait").code == 0
    run = place.run()
    until(lambda: "was not launched: quota exceeded" in call("status", "one").out, "the words of the workbench")
    workbench.refuses_workers = None
    wait_ready(run)
    assert answers() and workbench.workloads.jobs == {}
    assert "penstock: ready after" in call("logs", "one", "--replica", "0").out
    [first] = living(workbench)
    first.fault = "fails"
    until(lambda: first.is_over and len(living(workbench)) == 1, "another worker is launched")
    wait_ready(run)
    assert "its worker failed" in call("events", "one").out
    assert call("scale", "one", 2).code == 0
    wait_ready(run, 2)
    assert call("scale", "one", 1).code == 0
    until(lambda: len(living(workbench)) == 1, "the second worker has left")
    assert "replica 1 drained and ended" in call("events", "one").out
    over = [row.status for row in workbench.workloads.workers.values() if row.is_over]
    assert sorted(over) == ["FAILED", "SUCCEEDED"], "the second replica left by word"
    assert call("down", "one").code == 0
    assert living(workbench) == [] and now(run).phase == "down"
    assert workbench.workloads.workers[max(workbench.workloads.workers)].status != "RUNNING"


@pytest.mark.nightly
def test_workers_that_ended_with_their_application_are_placed_anew(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench, **WORKERS)
    wait_ready(run)
    [first] = living(workbench)
    workbench.workloads.restart_application(application_of(workbench).record["id"])
    until(lambda: first.is_over and len(living(workbench)) == 1, "another worker is launched")
    until(lambda: now(run).controller.n_restarts == 1 and now(run).phase == "ready", "ready again")
    assert answers()
    assert "ended with the application that launched it" in call("events", "one").out
    workbench.workloads.stop(application_of(workbench))
    until(lambda: application_of(workbench).status == "STOPPED", "the application has stopped")
    until(lambda: replica_of(run).state != "ready", "the replica is gone")
    assert living(workbench) == []
    assert call("up", file_for(place, workbench, **WORKERS), "--json").code == 0
    wait_ready(run)
    assert answers()


# ---- weights, from a hub on the network of the pods ------------------------------------------------------------------


MODEL = "org/tiny"
FILES = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.suffix in (".json", ".safetensors")}


@pytest.fixture
def hub(place: Place, pod_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with asked_hub(monkeypatch, MODEL, FILES, pod_hosts.own_address) as made:
        yield made


def file_of(place: Place, workbench: Workbench, hub: HubServer, name: str = "one", nodes: str = "jobs") -> Path:
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    return file_for(place, workbench, name, model=MODEL, engine={"env": env}, cloudera={"nodes": nodes})


def fetches(workbench: Workbench) -> list[Workload]:
    return [run for run in workbench.workloads.runs.values() if run.body["name"].endswith("-weights")]


def reason(place: Place) -> str:
    return call("status", "one").out


def kept(workbench: Workbench) -> Path:
    return workbench.pods.folder / ".cache" / "huggingface" / "hub" / "models--org--tiny"


def up_until_weights_come(place: Place, workbench: Workbench, hub: HubServer, nodes: str = "jobs") -> Run:
    """Weights that hang."""
    hub.is_open.clear()
    assert call("up", file_of(place, workbench, hub, nodes=nodes), "--json", "--no-wait").code == 0
    run = place.run()
    until(lambda: "waits for the weights" in reason(place) and " files, " in reason(place), "progress")
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", ["jobs", "workers"])
def test_weights_come_by_a_job_before_nodes_start(
    place: Place, workbench: Workbench, hub: HubServer, nodes: str
) -> None:
    run = up_until_weights_come(place, workbench, hub, nodes)
    assert [each.body.get("nvidia_gpu", 0) for each in workbench.workloads.runs.values()] == [0], "no node waits"
    hub.is_open.set()
    wait_ready(run)
    assert len(fetches(workbench)) == 1 and kept(workbench).is_dir()
    assert call("down", "one", "--weights").code == 0
    assert not kept(workbench).exists()


@pytest.mark.nightly
def test_weights_that_a_hub_refuses_end_the_start_with_its_reason(
    place: Place, workbench: Workbench, hub: HubServer
) -> None:
    workbench.pods.n_free = 0  # type: ignore[attr-defined]
    assert call("up", file_of(place, workbench, hub), "--json", "--no-wait").code == 0
    hub.token = "hf_of_ada"
    workbench.pods.n_free = None  # type: ignore[attr-defined]
    until(lambda: "the weights could not be fetched" in reason(place), "the reason")
    assert len(fetches(workbench)) == 1, "another run would end as this one"
    assert call("down", "one").code == 0


@pytest.mark.nightly
def test_a_killed_fetch_continues_and_other_deployments_find_what_came(
    place: Place, workbench: Workbench, hub: HubServer
) -> None:
    run = up_until_weights_come(place, workbench, hub)
    [first] = fetches(workbench)
    assert first.pod is not None
    first.pod.kill()
    until(lambda: len(fetches(workbench)) == 2, "the next run of the job")
    hub.asked.clear()
    hub.is_open.set()
    wait_ready(run)
    assert all(name.endswith(".safetensors") for name in hub.downloads), "what was there is not fetched again"
    assert call("up", file_of(place, workbench, hub, "two"), "--json").code == 0
    place.run("two")
    assert expected_text(PROMPT, 8) in call("chat", "two", "-m", PROMPT, "--max-tokens", 8).out
    assert len(fetches(workbench)) == 2, "the second deployment needs no job"
    done = call("down", "two", "--weights")
    assert done.code == 2 and 'cannot remove the weights of "two": one uses them' in done.err, done
    assert kept(workbench).is_dir() and now(run).phase == "ready"
    assert call("down", "one").code == 0
