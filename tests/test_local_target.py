"""Target local with real processes: its contract, by the shipped conformance check, and faults."""

from __future__ import annotations

import sys

import pytest
from launching import Place
from waiting import until

from penstock import processes, targets
from penstock.run_folder import replica
from penstock.testing.conformance import check_target

pytestmark = pytest.mark.processes


def test_local_keeps_the_contract_of_targets(place: Place) -> None:
    run, launch = place.written(place.write())

    def leftovers() -> list[str]:
        return [process.command for process in processes.find_marked(str(run.path))]

    check_target(targets.load("local"), run, launch, sys.executable, leftovers)


def test_local_sees_a_killed_node_and_ends_its_orphan_before_it_places_again(place: Place) -> None:
    run, _ = place.written(place.write())
    target, unit = targets.load("local"), replica("0")
    run.write_handle(target.place(run, [unit]))
    until(lambda: len(processes.find_marked(str(run.path), "0")) == 2, "the node has started its engine")
    node, orphan = sorted(processes.find_marked(str(run.path), "0"), key=lambda process: process.role != "node")
    processes.end([node], 0.0)
    assert target.status(run)[unit].state == "gone" and processes.is_alive(orphan)
    run.write_handle(target.place(run, [unit]))
    assert target.status(run)[unit].state == "placed" and not processes.is_alive(orphan)
    target.end(run, 5.0)
    assert processes.find_marked(str(run.path)) == []
