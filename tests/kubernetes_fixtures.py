"""Fixtures over kubernetes_cluster.py: one cluster as long as the session, and a namespace of its own for every test.

def test_x(kubernetes: Namespace) -> None:     # kubernetes.cluster has the nodes; everything is healed after the test
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kubernetes_cluster import Cluster, Namespace


@pytest.fixture(scope="session")
def kubernetes_cluster() -> Iterator[Cluster]:
    """Use `kubernetes`."""
    from kubernetes_cluster import Cluster, missing  # 0.4 s, which tests without a cluster need not wait

    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def kubernetes(kubernetes_cluster: Cluster) -> Iterator[Namespace]:
    with kubernetes_cluster.namespace() as space:
        yield space
