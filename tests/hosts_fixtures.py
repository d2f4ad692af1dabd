"""Fixtures over hosts.py: sets of hosts that live as long as the session, and are as new for every test.

def test_x(hosts: Hosts) -> None:              # node1, node2; this process is on their network
def test_x(slurm: Slurm) -> None:              # Slurm on login, node1, node2: slurm.hosts
def test_x(ray_cluster: RayCluster) -> None:   # Ray on node1, node2: ray_cluster.hosts

@pytest.mark.parametrize("slurm", PROCTRACKS, indirect=True)  # once on each kind of cluster
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hosts import Hosts, missing
from hosts_ray import RayCluster, missing_ray
from hosts_slurm import Slurm, missing_slurm
from slurm_cluster import Desk

from penstock import targets


def require_hosts(reason: str | None = None) -> None:
    """Skip the test where no hosts can be made, or for another reason."""
    reason = reason or missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[Hosts]:
    """Use `hosts`."""
    require_hosts()
    with Hosts(2) as made:
        yield made


@pytest.fixture
def hosts(two_hosts: Hosts) -> Iterator[Hosts]:
    yield two_hosts
    two_hosts.reset()
    targets.load.cache_clear()  # its connections were to the hosts before


@pytest.fixture(scope="session")
def slurm_on() -> Iterator[Callable[[str], Slurm]]:
    """Use `slurm`. One cluster a kind, started by the first test that asks."""
    made: dict[str, Slurm] = {}
    with contextlib.ExitStack() as stack:

        def find(proctrack: str) -> Slurm:
            if proctrack not in made:
                hosts = stack.enter_context(Hosts(2, login=True, shared_home=True))
                made[proctrack] = Slurm(hosts, proctrack)
            return made[proctrack]

        yield find


@pytest.fixture
def slurm(request: pytest.FixtureRequest, slurm_on: Callable[[str], Slurm]) -> Iterator[Slurm]:
    proctrack = getattr(request, "param", "linuxproc")
    require_hosts(missing_slurm(proctrack))
    found = slurm_on(proctrack)
    yield found
    found.clear()


@pytest.fixture(scope="session")
def ray_on_two_hosts() -> Iterator[RayCluster]:
    """Use `ray_cluster`."""
    require_hosts(missing_ray())
    with Hosts(2) as made, contextlib.closing(RayCluster(made)) as cluster:
        yield cluster


@pytest.fixture
def ray_cluster(ray_on_two_hosts: RayCluster) -> Iterator[RayCluster]:
    yield ray_on_two_hosts
    ray_on_two_hosts.clear()


@pytest.fixture
def desk(slurm: Slurm) -> Iterator[Desk]:
    """Who types `penstock` on login; what the test started is ended after it."""
    found = Desk(slurm)
    yield found
    for name in found.names:
        found.ask("down", name, "--now")
