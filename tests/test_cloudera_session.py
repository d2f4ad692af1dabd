"""`up` in a session of the project, by the AMP's own script, and a replica of two pods, on the fake workbench."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloudera_rig import file_for, left, up
from launching import PROMPT, Place, call, now, replica_of, wait_ready
from waiting import until

import penstock
from penstock.spec import reading
from penstock.targets.cloudera import amp
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import RUNTIME, Workbench

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def run_script(workbench: Workbench, script: str) -> Any:
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


VERBS = """
import subprocess, sys
with open("/home/cdsw/said", "w") as said:
    for words in VERBS:
        subprocess.run([sys.executable, "-m", "penstock", *words.split()], stdout=said, stderr=said)
"""


def run_verbs(workbench: Workbench, *verbs: str) -> Any:
    """These verbs one after another in a session; what they say is in the project's file "said"."""
    (workbench.pods.folder / "verbs.py").write_text(f"VERBS = {list(verbs)!r}\n{VERBS}")
    return run_script(workbench, "verbs.py")


def said(workbench: Workbench) -> str:
    return (workbench.pods.folder / "said").read_text()


def test_a_session_that_is_killed_during_up_leaves_the_deployment_to_others(place: Place, workbench: Workbench) -> None:
    file = file_for(place, workbench, engine={"args": {"load-s": 8}})
    block = yaml.safe_load(file.read_text())
    del block["cloudera"]["project"]
    (workbench.pods.folder / "one.yaml").write_text(yaml.safe_dump(block))
    first = run_verbs(workbench, "up one.yaml")
    address = workbench.pods.folder / ".penstock" / "runs" / "one" / "gateway" / "address.json"
    until(lambda: address.exists(), "the gateway runs")
    words = "this session ends after 60 idle minutes (IDLE_MAXIMUM_MINUTES) and after 10080 minutes in all"
    until(lambda: f"warning: {words}" in said(workbench), "`up` says what ends the session")
    assert said(workbench).count(words) == 1 and "the deployment goes on" in said(workbench)
    assert first.pod is not None and not first.is_over, "`up` still waits"
    first.pod.kill()  # all of it at once
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], done
    run = place.run()
    wait_ready(run)
    second = run_verbs(workbench, "status one", "down one")
    until(lambda: second.is_over, "another session has ended it")
    assert said(workbench).startswith("one is ready") and said(workbench).endswith("one is down\n"), said(workbench)
    assert workbench.left() == []
    assert now(run).phase == "down", "also for the laptop"
    shutil.rmtree(workbench.pods.folder / ".penstock" / "runs")  # the session's own run folder, for its logs


@pytest.mark.nightly
def test_an_amp_starts_its_deployment_from_inside_and_a_laptop_ends_it(place: Place, workbench: Workbench) -> None:
    file = file_for(place, workbench, gateway={"auth": "keys"})
    texts = amp.files(reading.load(file))
    block = yaml.safe_load(texts["amp:deployment.yaml"])
    block["cloudera"]["workbench"] = workbench.url  # a real one speaks https, by which a session finds it itself
    (workbench.pods.folder / amp.FILE).write_text(yaml.safe_dump(block))
    (workbench.pods.folder / amp.SCRIPT).write_text(texts[f"amp:{amp.SCRIPT}"])
    session = run_script(workbench, amp.SCRIPT)
    until(lambda: session.is_over, "the session has ended")
    assert session.status == "SUCCEEDED", session.pod
    done = call("up", file, "--json")
    assert done.code == 0 and done.events[0]["was_running"], done
    run = place.run()
    wait_ready(run)
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    assert call("down", "one").code == 0
    assert left(workbench) == []


@pytest.mark.nightly
def test_two_pods_make_one_replica_and_one_that_is_lost_comes_back(place: Place, workbench: Workbench) -> None:
    two = {"hardware": {"nodes": 2}, "parallel": {"pipeline": 2}, "engine": {"executor": "mp"}}
    run, _ = up(place, workbench, **two)
    wait_ready(run)
    announcement = replica_of(run).announcement
    assert announcement is not None and [node.rank for node in announcement.nodes] == [0, 1]
    assert len({node.address for node in announcement.nodes}) == 2
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    jobs = sorted(row["record"]["name"].rpartition("-r")[2] for row in workbench.workloads.jobs.values())
    assert jobs == ["0-n0", "0-n1"]
    second = next(row for row in workbench.workloads.runs.values() if row.body["name"].endswith("n1"))
    second.fault = "fails"
    until(lambda: second.status == "FAILED", "the second node is lost")
    began = time.time()
    until(lambda: len(workbench.workloads.runs) == 3, "its job runs again")
    until(lambda: _is_ready_since(run, began), "the replica has formed again")


def _is_ready_since(run: Any, began: float) -> bool:
    announcement = replica_of(run).announcement
    ready = now(run).phase == "ready" and announcement is not None
    return ready and announcement is not None and (announcement.started_at or 0.0) > began


@pytest.mark.nightly
def test_a_replacement_ends_what_ran_before(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    before = run.record().id
    done = call("up", file_for(place, workbench, engine={"max_model_len": 512}), "--replace", "--json")
    assert done.code == 0, done
    run = place.run()
    wait_ready(run)
    assert run.record().id != before and not [title for title in workbench.left() if before in title]
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
