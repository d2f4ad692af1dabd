"""What goes wrong in a workbench, on the fake one: refusals, time limits, restarts, other users, proxies that cut."""

from __future__ import annotations

import json
import os
import signal

import pytest
from cloudera_rig import file_for, up
from launching import PROMPT, Place, call, now, replica_of, wait_ready, wait_until

from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import Workload

pytestmark = pytest.mark.hosts
SOON_S = 60.0


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def runs(workbench: Workbench) -> list[Workload]:
    return list(workbench.workloads.runs.values())


def gateway_of(workbench: Workbench) -> Workload:
    [found] = [row for row in workbench.workloads.applications.values() if row.record["name"].endswith("-gateway")]
    return found


def test_a_refused_job_ends_the_start_with_the_words_of_the_workbench(place: Place, workbench: Workbench) -> None:
    workbench.refuses_creation = (403, "quota exceeded: 1 GPU of 1 in use")
    done = call("up", file_for(place, workbench), "--json")
    assert done.code == 1 and "quota exceeded" in done.out, done
    assert workbench.left() == [], "nothing stays behind a start that failed"


@pytest.mark.nightly
def test_a_run_that_reaches_its_time_limit_is_placed_again(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    [first] = runs(workbench)
    first.fault = "times out"
    wait_until(lambda: len(runs(workbench)) == 2, "a second run of the job", SOON_S)
    wait_until(lambda: replica_of(run).state == "ready", "the replica is ready again", SOON_S)
    assert "reached its time limit" in call("events", "one").out


def test_an_application_that_another_user_stopped_is_named_and_up_brings_it_back(
    place: Place, workbench: Workbench
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    workbench.workloads.stop(gateway_of(workbench))
    wait_until(lambda: gateway_of(workbench).status == "STOPPED", "the application has stopped")
    wait_until(lambda: now(run).controller.state == "gone", "the controller is gone", SOON_S)
    done = call("status", "one")
    assert "was stopped in the workbench" in done.out, done
    assert call("up", file_for(place, workbench), "--json").code == 0
    wait_ready(run)
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    assert len(runs(workbench)) == 1, "the engine stayed loaded"


def test_nodes_find_a_gateway_whose_application_was_restarted(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    wait_until(lambda: now(run).controller.process is not None, "the controller has written its state", SOON_S)
    workbench.workloads.restart_application(gateway_of(workbench).record["id"])
    wait_until(lambda: now(run).controller.n_restarts == 1 and now(run).phase == "ready", "ready again", SOON_S)
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    assert len(runs(workbench)) == 1, "the engine stayed loaded"


@pytest.mark.nightly
def test_a_gateway_that_hangs_gets_a_successor_whose_name_is_noted(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    pod = gateway_of(workbench).pod
    assert pod is not None
    host = workbench.pods.host_of(pod.address)  # type: ignore[attr-defined]
    hung = [process for process in host.processes() if "penstock.gateway" in process.argv]
    assert hung
    for process in hung:
        os.kill(process.outer_pid, signal.SIGSTOP)
    note = workbench.pods.folder / ".penstock" / "runs" / "one" / "gateway" / "address.json"
    wait_until(
        lambda: note.exists() and json.loads(note.read_text())["unit"] == "1",
        "the next gateway has noted its address",
        SOON_S,
    )
    wait_until(lambda: now(run).phase == "ready", "ready again", SOON_S)
    assert expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out
    assert len(runs(workbench)) == 1 and gateway_of(workbench).pod is pod, "the application was not restarted"


@pytest.mark.nightly
def test_a_replica_without_a_machine_waits_and_says_so(place: Place, workbench: Workbench) -> None:
    workbench.workloads.next_fault = "schedules for ever"
    done = call("up", file_for(place, workbench), "--json", "--no-wait")
    assert done.code == 0, done
    run = place.run()
    wait_until(lambda: now(run).gateway.state == "running", "the gateway runs", SOON_S)
    status = call("status", "one").out
    assert "queued" in status and "waits for a machine of the workbench" in status, status


@pytest.mark.nightly
def test_a_proxy_that_cuts_streams_is_an_honest_error(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench, engine={"args": {"tokens-per-s": 2}})
    wait_ready(run)
    workbench.cut_streams_after_s = 1.0
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 40)
    assert done.code == 1 and "the connection was closed" in done.err, done
    workbench.cut_streams_after_s = None


def test_a_gateway_that_has_not_started_has_no_address_yet(place: Place, workbench: Workbench) -> None:
    workbench.pods.n_free = 0  # type: ignore[attr-defined]
    assert call("up", file_for(place, workbench), "--json", "--no-wait").code == 0
    done = call("chat", "one", "-m", PROMPT)
    assert done.code == 1 and "has no address yet" in done.err, done
    workbench.pods.n_free = None  # type: ignore[attr-defined]
