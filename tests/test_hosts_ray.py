"""The Ray that other tests run on (hosts_ray.py) ends without a trace."""

from __future__ import annotations

import pytest
from hosts import Hosts
from hosts_fixtures import require_hosts
from hosts_ray import RayCluster, missing_ray

pytestmark = pytest.mark.hosts


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
