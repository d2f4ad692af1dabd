"""The contract of targets, checked on the fake VESSL, and what the target does when VESSL answers late or wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vessl_rig import Rented, rented

from penstock import targets
from penstock.run_folder import Launch
from penstock.testing.conformance import check_target

pytestmark = [pytest.mark.processes, pytest.mark.nightly]  # in `make check` on containers in memory


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Rented]:
    with rented(tmp_path) as ours:
        yield ours


def test_vessl_keeps_the_contract_of_targets(place: Rented) -> None:
    run, launch = place.place.written(place.write())
    launch = Launch("one", launch.plan, launch.announce_urls, launch.token_file)
    check_target(targets.load("vessl"), run, launch, sys.executable, place.leftovers)
