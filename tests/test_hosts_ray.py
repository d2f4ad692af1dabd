"""The Ray that other tests run on (hosts_ray.py) spans the hosts, takes jobs, and ends without a trace."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import pytest
from hosts import Hosts
from hosts_fixtures import require_hosts
from hosts_ray import RayCluster, missing_ray

pytestmark = pytest.mark.hosts

# One task a GPU, so one a node: the names of the hosts they ran on.
SPREAD = """
import ray, socket
ray.init(log_to_driver=False, logging_level="error")

@ray.remote(num_gpus=1, num_cpus=0)
def where():
    import time
    time.sleep(1)
    return socket.gethostname()

print(sorted(ray.get([where.remote(), where.remote()])))
"""


def call(url: str, body: object = None) -> Any:
    """An answer of the Jobs API to this process."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_ray_has_both_nodes_and_runs_tasks_on_them(ray_cluster: RayCluster) -> None:
    assert sorted(node["node_ip"] for node in ray_cluster.nodes()) == [host.address for host in ray_cluster.hosts]
    assert [node["resources_total"]["GPU"] for node in ray_cluster.nodes()] == [1.0, 1.0]
    assert ray_cluster.run([sys.executable, "-c", SPREAD]).strip() == "['node1', 'node2']"


def test_a_job_is_submitted_through_the_jobs_api_from_this_process(ray_cluster: RayCluster) -> None:
    job = call(f"{ray_cluster.url}/api/jobs/", {"entrypoint": "hostname"})["submission_id"]
    deadline = time.monotonic() + 30
    while (status := call(f"{ray_cluster.url}/api/jobs/{job}")["status"]) != "SUCCEEDED":
        assert time.monotonic() < deadline and status in ("PENDING", "RUNNING"), status
        time.sleep(0.2)
    assert "node" in call(f"{ray_cluster.url}/api/jobs/{job}/logs")["logs"]


@pytest.mark.nightly
def test_a_node_that_loses_power_leaves_the_cluster_which_is_whole_for_the_next_test(ray_cluster: RayCluster) -> None:
    ray_cluster.hosts["node2"].kill()
    deadline = time.monotonic() + 60
    while len(ray_cluster.nodes()) != 1:
        assert time.monotonic() < deadline, "Ray still believes in node2"
        time.sleep(0.5)
    ray_cluster.clear()
    assert len(ray_cluster.nodes()) == 2


@pytest.mark.nightly
def test_ray_ends_on_every_host_and_leaves_none_of_its_processes() -> None:
    require_hosts()
    reason = missing_ray()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(1) as hosts:
        with RayCluster(hosts) as cluster:
            assert len(cluster.nodes()) == 1
        left = [process.argv[0] for process in hosts[0].processes()]
        assert sorted(words.split(":")[0] for words in left) == ["bash", "sshd"]
