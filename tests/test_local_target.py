"""Targets keep their contract with real processes: the shipped conformance check, over every target there is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Place, a_place, wait_until

from penstock import processes, targets
from penstock.deployment import prepare, start
from penstock.hardware.network import free_port
from penstock.run_folder import Launch, Run, replica
from penstock.spec import reading
from penstock.testing.conformance import check_target

pytestmark = pytest.mark.processes

# target -> the fields of a deployment file for it. A new target joins by a row.
FILES: dict[str, dict[str, Any]] = {"local": {}}
# Those that need machines have a test of their own.
ELSEWHERE = {"ray": "test_target_ray.py", "slurm": "test_slurm_target.py", "ssh": "test_ssh_target.py"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with a_place(tmp_path) as found:
        yield found


def written(place: Place, target: str) -> tuple[Run, Launch]:
    """A run whose folder is written and whose work is not sent yet, and what its nodes are told."""
    prepared = prepare.prepare(reading.load(place.write("one", target=target, **FILES[target])))
    run = start.write_run(prepared, free_port("127.0.0.1"), None)
    return place.note(run), Launch("one", prepared.plan, ("http://127.0.0.1:1",), str(run.admin_token_file))


def test_every_target_is_checked() -> None:
    assert FILES.keys() | ELSEWHERE.keys() == targets.TABLE.keys()
    for name in ELSEWHERE.values():
        assert "check_target(" in Path(__file__).with_name(name).read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
def test_target_keeps_its_contract(place: Place, name: str) -> None:
    run, launch = written(place, name)
    path = str(run.path)

    def leftovers() -> list[str]:
        return [found.command for found in processes.find_marked(path)]

    check_target(targets.load(name), run, launch, sys.executable, leftovers)


def test_local_sees_a_killed_node_and_ends_its_orphan_before_it_places_again(place: Place) -> None:
    run, _ = written(place, "local")
    target, unit = targets.load("local"), replica("0")
    run.write_handle(target.place(run, [unit]))
    wait_until(lambda: len(processes.find_marked(str(run.path), "0")) == 2, "the node has started its engine")
    (orphan,) = [process for process in processes.find_marked(str(run.path), "0") if process.role == "engine"]
    (node,) = [process for process in processes.find_marked(str(run.path), "0") if process.role == "node"]
    processes.end([node], 0.0)
    assert target.status(run)[unit].state == "gone"
    assert processes.is_alive(orphan)
    run.write_handle(target.place(run, [unit]))
    assert not processes.is_alive(orphan)
    assert target.status(run)[unit].state == "placed"
    target.end(run, 5.0)
    assert processes.find_marked(str(run.path)) == []


def test_what_a_failed_place_started_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = written(place, "local")
    started, n_starts = processes.start_detached, iter(range(10))

    def start_once(*words: Any) -> Any:
        if next(n_starts) > 0:
            raise OSError("no more processes")
        return started(*words)

    monkeypatch.setattr(processes, "start_detached", start_once)
    with pytest.raises(OSError, match="no more processes"):
        targets.load("local").place(run, [replica("0"), replica("1")])
    assert processes.find_marked(str(run.path)) != []
    targets.load("local").end(run, 0.0)
    assert processes.find_marked(str(run.path)) == []
