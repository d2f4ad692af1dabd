"""The number of replicas follows the load on real places: hosts over ssh, Ray, Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import autoscale_story
import launching
import pytest
from autoscale_story import FIELDS, SLOW
from hosts import Hosts
from hosts_ray import RayCluster
from launching import Place, a_place, measured
from slurm_cluster import ENV, Desk
from ssh_rig import left_on, ours, until, write

from penstock import targets

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(launching, "DEADLINE_S", 120.0)
    targets.load.cache_clear()
    with a_place(tmp_path) as ours:
        yield ours


def test_on_hosts_over_ssh(place: Place, hosts: Hosts) -> None:
    run = place.up(write(place, hosts, args=SLOW, **FIELDS))
    nodes: list[int] = []

    def count() -> None:
        until(lambda: all(map(ours, hosts)), "the second is on the host that was spare")
        nodes.extend(len([one for one in ours(host) if one.env.get("PENSTOCK_ROLE") == "node"]) for host in hosts)

    autoscale_story.live(run, at_two=count)
    assert nodes == [1, 1]
    assert launching.call("down", "one").code == 0
    until(lambda: left_on(hosts) == [], "nothing is left")


def test_on_a_ray_cluster(place: Place, ray_cluster: RayCluster) -> None:
    file = place.write("one", args=SLOW, target="ray", ray={"address": ray_cluster.url}, **FIELDS)
    run, jobs = place.up(file), list[str]()
    autoscale_story.live(run, at_two=lambda: jobs.extend(str(entry["job"]) for entry in run.handle().replicas.values()))
    assert len({*jobs}) == 2, "a job of Ray's for each"


def test_on_slurm(desk: Desk) -> None:
    """Two jobs, at least 30 s one after the other; what waits in the queue is cancelled first."""
    desk.up(desk.write(args=SLOW, **FIELDS))
    first = desk.job()
    words = ["one", "--requests", "6", "--concurrency", "4", "--max-tokens", "300", "--json"]
    argv = [sys.executable, "-m", "penstock", "bench", "serve", *words]
    bench = desk.slurm.login.popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    desk.wait(lambda: len(desk.status()["replicas"]) == 2, "requests wait: another job is submitted", 60)
    second = desk.job("1")
    assert second != first
    out, err = bench.communicate(timeout=200)
    assert measured(bench.returncode, out)["failed"] == 0, err
    desk.wait(lambda: desk.status()["replicas"] == [], "nobody asks: all jobs end", 120)
    assert desk.slurm.run(["squeue", "-h"]) == ""
    assert desk.call("chat", "one", "-m", "tell me a story", "--max-tokens", 8).strip().startswith("1:tell 2:me")
    told = desk.call("autoscale", "explain", "one", "--json")
    autoscale_story.check_log(autoscale_story.decisions_in(told))
    desk.down()
