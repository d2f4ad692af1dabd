"""What goes wrong in a workbench, on the fake one: refused keys, restarts, other users, proxies that cut."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
from cloudera_rig import LIMITS_MEMORY, SUBDOMAINS, file_for, left, up
from launching import PROMPT, Place, call, check_texts, now, replica_of, started, wait_ready
from waiting import until

from penstock.run_folder import Run
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_workbench.server import Workbench
from penstock.testing.fake_workbench.workloads import READONLY_PORT, Workload
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(workbench_place: Place) -> Place:
    return workbench_place


def runs(workbench: Workbench) -> list[Workload]:
    return list(workbench.workloads.runs.values())


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


# ---- real vLLM, with mp in the 64 MB of /dev/shm that a project has at first -----------------------------------------


TWO_PODS: dict[str, Any] = {"hardware": {"nodes": 2, "gpus_per_node": 0}, "workload": {"concurrency": 4}}


def up_vllm(place: Place, workbench: Workbench, executor: str, cut_by: str) -> tuple[Run, Client]:
    args = {"enforce-eager": True} if cut_by == "tensor" else {}  # vLLM loses requests between stages with it
    engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024, "args": args}
    block = {"public": True, "memory_gb": 6, **({"shared_memory_mb": 512} if executor == "ray" else {})}
    file = file_for(place, workbench, engine=engine, cloudera=block, parallel={cut_by: 2}, **TWO_PODS)
    done = call("up", file, "--json", "--no-wait")
    assert done.code == 0, done
    run = place.run()
    until(lambda: now(run).phase == "ready", "ready")
    assert run.url == f"http://{SUBDOMAINS[0]}.{workbench.domain}", "public: clients need no login of the workbench"
    return run, Client(str(run.known_url), str(done.events[0]["key"]), 60.0)


def is_ready_since(run: Run, at: float) -> bool:
    announcement = replica_of(run).announcement
    return now(run).phase == "ready" and announcement is not None and (announcement.started_at or 0.0) > at


def ray_token() -> str:
    with started("dashboard", "one", "--ray", "0") as command:
        return str(command.communicate()[0]).strip()


def check_dashboard(run: Run, workbench: Workbench, address: str) -> str:
    """Ray's dashboard where the workbench's proxy leads all viewers of the project to: only the token opens it, and no
    file has that."""
    place, token = f"http://{address}:{READONLY_PORT}", ray_token()
    for key in (None, "wrong"):
        for path in ("/api/version", "/api/jobs/", "/nodes?view=summary"):
            with pytest.raises(HttpError) as refusal:
                Client(place, key).get_json(path)
            assert refusal.value.status == (401 if key is None else 403)
        with pytest.raises(HttpError):
            Client(place, key).post_json("/api/jobs/", {"entrypoint": "true"})
    ray = Client(place, token)
    assert "ray_version" in ray.get_json("/api/version")
    assert isinstance(ray.get_json("/api/jobs/"), list)
    first = next(row for row in workbench.workloads.runs.values() if row.body["name"].endswith("n0"))
    log = call("logs", "one").out
    assert f"Ray's dashboard: https://read-only-{first.engine}.{workbench.domain}" in log
    assert len(token) == 64 and token not in log
    files = [path for path in workbench.pods.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not any(token.encode() in path.read_bytes() for path in files)
    hosts = [host for host in workbench.pods.hosts if host.is_on]  # type: ignore[attr-defined]
    processes = [process for host in hosts for process in host.processes()]
    assert any("gcs_server" in word for process in processes for word in process.argv), "Ray runs"
    assert not any(token in word for process in processes for word in process.argv)
    return token


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.parametrize(("executor", "cut_by"), [("mp", "tensor"), ("ray", "pipeline")])
def test_vllm_over_two_pods_gives_the_reference_text_and_comes_back_when_one_is_killed(
    place: Place, workbench: Workbench, executor: str, cut_by: str
) -> None:
    run, client = up_vllm(place, workbench, executor, cut_by)
    announcement = replica_of(run).announcement
    assert announcement is not None and len({node.address for node in announcement.nodes}) == 2
    check_texts(client)
    token = check_dashboard(run, workbench, announcement.nodes[0].address) if executor == "ray" else None
    second = next(row for row in workbench.workloads.runs.values() if row.body["name"].endswith("n1"))
    assert second.pod is not None
    second.pod.kill()
    killed_at = time.time()
    until(lambda: now(run).phase == "degraded", "status says that it is lost")
    until(lambda: is_ready_since(run, killed_at), "the replica is back")
    check_texts(client)
    if executor == "ray":
        assert len(ray_token()) == 64 and ray_token() != token, "each start has its own"
    assert call("down", "one").code == 0
    assert left(workbench) == []
