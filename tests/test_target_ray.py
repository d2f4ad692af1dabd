"""Target ray over a real Ray on two hosts: what it places, sees and ends, and what it leaves: nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launching
import psutil
import pytest
from hosts_ray import RayCluster
from launching import Asking, Place, a_place, ask, call, check_texts, now, replica_of, wait_ready
from waiting import left_s, until

from penstock import processes, targets
from penstock.deployment.doctor import examine
from penstock.run_folder import Run, replica
from penstock.spec import reading
from penstock.targets.ray.jobs_api import Dashboard
from penstock.testing.conformance import check_target
from penstock.wire.answers import HttpError
from penstock.wire.client import Client

pytestmark = pytest.mark.hosts

LEFTOVERS = "/tmp/penstock-* /dev/shm/*"


@pytest.fixture
def place(tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Place]:
    targets.load.cache_clear()
    with a_place(tmp_path) as found:
        yield found
    dashboard = Dashboard(ray_cluster.url)
    until(lambda: dashboard.jobs() == {}, "no job is left in Ray's list")
    for host in ray_cluster.hosts:
        if host.is_on:
            listed = host.run(["sh", "-c", f"ls -d {LEFTOVERS} 2>/dev/null"], check=False).stdout.split()
            left = [path for path in listed if "penstock-hosts-" not in path and "plasma" not in path]
            assert left == [], f"{host.name} has {left}"


def file_for(place: Place, ray_cluster: RayCluster, **fields: Any) -> Path:
    return place.write("one", target="ray", ray={"address": ray_cluster.url}, **fields)


def job_of(run: Run, replica: str = "0") -> str:
    return str(run.handle().replicas[replica]["job"])


def on_hosts(ray_cluster: RayCluster, run: Run, role: str) -> dict[str, list[int]]:
    """Pids (as numbered here) of a run's processes of that role, by host."""
    return {
        host.name: [
            found.outer_pid
            for found in host.processes()
            if found.env.get(processes.MARK_RUN_ID) == run.record().id and found.env.get(processes.MARK_ROLE) == role
        ]
        for host in ray_cluster.hosts
    }


@pytest.mark.nightly  # in `make check` on a stub
def test_ray_keeps_the_contract_of_targets(place: Place, ray_cluster: RayCluster) -> None:
    run, launch = place.written(file_for(place, ray_cluster))

    def leftovers() -> list[str]:
        roles = ("node", "engine")
        left = [f"{host}: {pids}" for role in roles for host, pids in on_hosts(ray_cluster, run, role).items() if pids]
        return left + [job for job in Dashboard(ray_cluster.url).jobs() if run.record().id in job]

    check_target(targets.load("ray"), run, launch, sys.executable, leftovers)


def test_a_deployment_lives_on_the_cluster_and_shows_its_token_to_nobody(place: Place, ray_cluster: RayCluster) -> None:
    run = place.up(file_for(place, ray_cluster, replicas=2))
    wait_ready(run, 2)
    ask(run)
    nodes = on_hosts(ray_cluster, run, "node")
    assert [len(pids) for pids in nodes.values()] == [1, 1], nodes
    assert {psutil.Process(pid).nice() for pids in nodes.values() for pid in pids} == {os.nice(0)}
    place.note(run)
    log = call("logs", "one", "--replica", "0")
    assert "penstock: ready after" in log.out, log
    followed = targets.load("ray").logs(run, replica("0"), follow=True, last=2)
    lines = [next(followed), next(followed)]
    assert set(lines) <= set(targets.load("ray").logs(run, replica("0"), follow=False))
    assert not set(lines) & set(log.out.splitlines()[:3]), "it began with the last lines"
    token = run.admin_token()
    told = [ray_cluster.fetch(path) for path in ("/api/jobs/", "/api/v0/runtime_envs", "/api/v0/actors?detail=1")]
    assert token not in json.dumps(told) + log.out
    assert token not in "".join(path.read_text("utf-8") for path in run.artifact_path.iterdir())
    done = call("scale", "one", 1)
    assert done.code == 0, done
    wait_ready(run)
    until(lambda: len(Dashboard(ray_cluster.url).jobs()) == 1, "one job is left")
    assert sorted(len(pids) for pids in on_hosts(ray_cluster, run, "node").values()) == [0, 1]
    ask(run)
    stream = Asking(run.url, 200)
    done = call("down", "one")
    assert done.code == 0, done
    stream.check_is_whole()
    assert now(run).phase == "down"


@pytest.mark.nightly
def test_down_now_does_not_wait_for_a_stream_and_forgets_surveys(place: Place, ray_cluster: RayCluster) -> None:
    file = file_for(place, ray_cluster, engine={"args": {"tokens-per-s": 1}})
    run = place.up(file)
    wait_ready(run)
    findings = examine.examine(reading.load(file), is_quick=True)
    assert [finding for finding in findings if finding.state == "bad"] == [], "doctor on a cluster that runs it"
    dashboard = Dashboard(ray_cluster.url)
    unread = dashboard.submit({"entrypoint": "true", "submission_id": "penstock-survey-of-a-killed-command"})
    until(lambda: (job := dashboard.job(unread)) is not None and job.has_ended, "it has ended")
    stream = Asking(run.url, 600)
    until(lambda: stream.text, "the stream runs")
    assert call("down", "one", "--now").code == 0
    assert dashboard.job(unread) is None
    stream.end()
    assert stream.error is not None


def test_a_replica_spans_two_nodes_and_the_next_waits_with_a_reason(place: Place, ray_cluster: RayCluster) -> None:
    run = place.up(file_for(place, ray_cluster, hardware={"nodes": 2}))
    wait_ready(run)
    ask(run)
    assert all(on_hosts(ray_cluster, run, "engine").values())
    told = replica_of(run).announcement
    assert told is not None and [node.host for node in told.nodes] == ["node1", "node2"]
    assert call("scale", "one", 2, "--no-wait").code == 0
    until(lambda: len(now(run).replicas) == 2, "the second is asked for")
    until(lambda: "CPU" in (replica_of(run, "1").reason or ""), "the second says what it waits for")
    second = replica_of(run, "1")
    assert (second.state, second.placement) == ("queued", "queued"), second
    assert replica_of(run).state == "ready"


def test_a_killed_driver_and_worker_take_their_nodes_with_them_and_come_back_and_a_stopped_job_stays_so(
    place: Place, ray_cluster: RayCluster
) -> None:
    run = place.up(file_for(place, ray_cluster))
    wait_ready(run)
    before, job = on_hosts(ray_cluster, run, "node"), job_of(run)
    drivers = [
        found.outer_pid
        for found in ray_cluster.head.processes()
        if "penstock.targets.ray.driver" in found.argv and "drive" in found.argv
    ]
    assert len(drivers) == 1
    os.kill(drivers[0], 9)
    gone = [pid for pids in before.values() for pid in pids]
    until(lambda: not any(psutil.pid_exists(pid) for pid in gone), "its node has ended")
    until(lambda: job_of(run) != job, "another job is placed")
    wait_ready(run)
    ask(run)
    before, job = on_hosts(ray_cluster, run, "node"), job_of(run)
    (actor,) = [
        process.outer_pid
        for host in ray_cluster.hosts
        for process in host.processes()
        if process.argv and process.argv[0].startswith("ray::NodeActor")
    ]
    os.kill(actor, 9)
    until(lambda: on_hosts(ray_cluster, run, "node") != before, "its node has ended")
    until(lambda: sum(map(len, on_hosts(ray_cluster, run, "node").values())) == 1, "another is there")
    wait_ready(run)
    ask(run)
    assert job_of(run) == job
    Dashboard(ray_cluster.url).stop(job)
    until(lambda: replica_of(run).state == "failed", "status tells it")
    assert replica_of(run).reason == "its job was stopped"
    assert call("status", "one").code == 0 and job_of(run) == job, "and it is not placed again"


@pytest.mark.nightly  # a minute, and Ray starts anew after it
def test_a_node_that_loses_power_is_noticed_and_replaced_when_it_comes_back(
    place: Place, ray_cluster: RayCluster
) -> None:
    run = place.up(file_for(place, ray_cluster, hardware={"nodes": 2}))
    wait_ready(run)
    ray_cluster.hosts["node2"].kill()
    until(lambda: "node2" in str(replica_of(run).restarts), "the replica knows that node2 is gone")
    until(lambda: replica_of(run).placement == "broken", "Ray knows too")
    ray_cluster.hosts["node2"].start()
    ray_cluster._started.pop("node2")
    ray_cluster.start()
    wait_ready(run)
    ask(run)
    ray_cluster.hosts["node2"].kill()
    done = call("down", "one", "--now")
    assert done.code == 0, done


@pytest.mark.vllm
@pytest.mark.nightly
def test_real_vllm_over_two_nodes_gives_the_text_of_the_uncut_model(
    place: Place, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "left_s()", left_s())
    signal.alarm(0)
    run = place.up(
        file_for(place, ray_cluster, hardware={"nodes": 2}, engine={"kind": "vllm", "args": {"enforce-eager": True}})
    )
    assert (run.plan().executor, run.plan().layout.tensor) == ("mp", 2)
    wait_ready(run)
    check_texts(Client(run.url))
    print(f"ready after {(told := replica_of(run).announcement) and told.ready_after_s} s")
    url = told.url if told else None
    assert url is not None
    for path in ("/v1/completions", "/invocations"):
        with pytest.raises(HttpError) as refused:
            Client(url).post_json(path, {"model": "one", "prompt": "1", "max_tokens": 1})
        assert refused.value.status == 401
