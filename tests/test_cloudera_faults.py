"""What goes wrong in a workbench, on the fake one: refused keys, restarts, other users, proxies that cut."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from cloudera_rig import LIMITS_MEMORY, file_for, left, up
from hosts import Host
from launching import PROMPT, Place, call, now, wait_ready
from waiting import until

from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import Workload

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def runs(workbench: Workbench) -> list[Workload]:
    return list(workbench.workloads.runs.values())


def host_of(workbench: Workbench, workload: Workload) -> Host:
    assert workload.pod is not None
    host: Host = workbench.pods.host_of(workload.pod.address)  # type: ignore[attr-defined]
    return host


def answers() -> bool:
    return expected_text(PROMPT, 8) in call("chat", "one", "-m", PROMPT, "--max-tokens", 8).out


def gateway_of(workbench: Workbench) -> Workload:
    [found] = [row for row in workbench.workloads.applications.values() if row.record["name"].endswith("-gateway")]
    return found


def test_an_application_that_another_user_stopped_is_named_and_up_brings_it_back(
    place: Place, workbench: Workbench, capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    workbench.workloads.stop(gateway_of(workbench))
    until(lambda: gateway_of(workbench).status == "STOPPED", "the application has stopped")
    until(lambda: now(run).controller.state == "gone", "the controller is gone")
    done = call("status", "one")
    assert "the controller is gone (the application of the gateway was stopped in the workbench)" in done.out, done
    assert re.search(r"nothing is restarted until `\S+ up` starts it again", done.out), done
    done = call("chat", "one", "-m", PROMPT)
    why = 'cannot reach the gateway of "one": the application of the gateway was stopped in the workbench'
    assert done.code == 1 and f"{why}\n  hint: `penstock up FILE` starts it again." in done.err, done
    assert call("keys", "list", "--deployment", "one").code == 1
    assert why in capfd.readouterr().err
    assert call("up", file_for(place, workbench), "--json").code == 0
    wait_ready(run)
    assert answers()
    assert len(runs(workbench)) == 1, "the engine stayed loaded"
    workbench.workloads.stop(gateway_of(workbench))
    until(lambda: gateway_of(workbench).status == "STOPPED", "the application has stopped")
    assert call("down", "one").code == 0, "also in that state"
    assert left(workbench) == []


def test_a_run_that_another_user_stopped_stays_so_until_it_is_asked_for(place: Place, workbench: Workbench) -> None:
    run, _ = up(place, workbench, replicas=2)
    wait_ready(run, 2)
    first, second = runs(workbench)
    workbench.workloads.stop(second)
    until(lambda: "failed" in [row.state for row in now(run).replicas], "status says so")
    done = call("status", "one")
    assert now(run).phase == "degraded" and "its job was stopped in the workbench" in done.out, done
    assert "was ended from outside, and not by penstock: `" in done.out, done
    assert "scale one 1`, then `" in done.out and "scale one 2`, brings it back" in done.out, done
    assert answers() and len(runs(workbench)) == 2, "it is not started against the will of who stopped it"
    assert call("scale", "one", 1).code == 0
    assert call("scale", "one", 2).code == 0
    wait_ready(run, 2)
    assert first.status == "RUNNING" and len(runs(workbench)) == 3
    for each in runs(workbench):
        workbench.workloads.stop(each)
    until(lambda: now(run).phase == "failed", "nothing is left that serves")
    assert re.search(r"ended from outside.*: `\S+ up` starts the dep", call("status", "one").out)
    done = call("up", file_for(place, workbench, replicas=2), "--json")
    assert done.code == 0, done
    wait_ready(place.run(), 2)
    os.environ.pop("OPENAI_API_KEY", None)
    assert answers()


@pytest.mark.nightly
def test_nodes_find_a_gateway_that_was_restarted_and_the_successor_of_one_that_hangs(
    place: Place, workbench: Workbench
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    until(lambda: now(run).controller.process is not None, "the controller has written its state")
    workbench.workloads.restart_application(gateway_of(workbench).record["id"])
    until(lambda: now(run).controller.n_restarts == 1 and now(run).phase == "ready", "ready again")
    assert answers()
    pod = gateway_of(workbench).pod
    hung = [p for p in host_of(workbench, gateway_of(workbench)).processes() if "penstock.gateway" in p.argv]
    assert hung
    for process in hung:
        os.kill(process.outer_pid, signal.SIGSTOP)
    note = workbench.pods.folder / ".penstock" / "runs" / "one" / "gateway" / "address.json"
    before = json.loads(note.read_text())["unit"]
    until(lambda: json.loads(note.read_text())["unit"] != before, "the next gateway has noted its address")
    until(lambda: now(run).phase == "ready", "ready again")
    assert answers()
    assert len(runs(workbench)) == 1 and gateway_of(workbench).pod is pod, "engine and application stayed"


@pytest.mark.nightly
def test_a_proxy_that_cuts_streams_is_an_honest_error_and_a_slow_first_token_is_not_cut_as_silent(
    place: Place, workbench: Workbench
) -> None:
    run, _ = up(place, workbench, engine={"args": {"ttft-s": 25}})
    wait_ready(run)
    workbench.cut_silence_after_s = 15.0
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 4)
    assert done.code == 0 and "4:" in done.out, done
    workbench.cut_streams_after_s = 1.0
    done = call("chat", "one", "-m", PROMPT, "--max-tokens", 4)
    assert done.code == 1 and "the connection was closed" in done.err, done


@pytest.mark.nightly
@pytest.mark.skipif(not LIMITS_MEMORY, reason="this machine has no cgroups of memory to end a pod with")
def test_a_pod_that_took_more_memory_than_it_has_is_placed_again_with_that_reason(
    place: Place, workbench: Workbench
) -> None:
    """Really killed by the kernel."""
    run, _ = up(place, workbench)
    wait_ready(run)
    [first] = runs(workbench)
    first.pod.take_memory()  # type: ignore[union-attr]
    until(lambda: first.status == "FAILED", "the pod has ended")
    until(lambda: len(runs(workbench)) == 2, "a second run of the job")
    until(lambda: now(run).phase == "ready" and now(run).replicas[0].n_restarts == 1, "ready again")
    said = "failed without a word: most often its pod needed more memory than 1 GB; raise cloudera.memory_gb"
    assert said in call("events", "one").out


@pytest.mark.nightly
def test_a_key_that_expires_during_a_life_is_named_and_a_new_one_goes_on(
    place: Place, workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = up(place, workbench)
    wait_ready(run)
    workbench.key = "key-of-next-year"
    said = "refuses the API key: it is wrong, has expired, or is of another one"
    until(lambda: f"{said}; this is what was seen at" in call("status", "one").out, "status says so")
    for words in (("chat", "one", "-m", PROMPT), ("scale", "one", 2), ("down", "one")):
        done = call(*words)
        assert done.code != 0 and said in done.err and "User Settings > API Keys" in done.err, done
    assert len(workbench.left()) == 2, "nothing was ended"
    monkeypatch.setenv("CDSW_APIV2_KEY", workbench.key)
    assert now(run).phase == "ready"
    assert answers()
    assert call("down", "one").code == 0
