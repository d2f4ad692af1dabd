"""Targets keep their contract with real processes: the shipped conformance check, over every target there is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Place, a_place, wait_until

from penstock import processes, run_folder, targets
from penstock.deployment import prepare
from penstock.run_folder import Draft, Launch, Run
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
    settings = {"listen": "127.0.0.1:1", "admin": "127.0.0.1:1"}
    run = run_folder.create(
        Draft(prepared.deployment, prepared.plan, prepared.artifact, settings, "token"), time.time()
    )
    return place.note(run), Launch("one", prepared.plan, ("http://127.0.0.1:1",), str(run.admin_token_file))


def test_every_target_is_checked() -> None:
    assert FILES.keys() | ELSEWHERE.keys() == targets.TABLE.keys()
    for name in ELSEWHERE.values():
        assert "check_target(" in Path(__file__).with_name(name).read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
def test_target_keeps_its_contract(place: Place, name: str) -> None:
    run, launch = written(place, name)
    check_target(targets.load(name), run, launch, sys.executable)


def test_local_sees_a_killed_node_and_ends_its_orphan_before_it_places_again(place: Place) -> None:
    run, _ = written(place, "local")
    target = targets.load("local")
    handle = target.submit(run, ["0"])
    wait_until(lambda: len(processes.find_marked(str(run.path), "0")) == 2, "the node has started its engine")
    (orphan,) = [process for process in processes.find_marked(str(run.path), "0") if process.role == "engine"]
    (node,) = [process for process in processes.find_marked(str(run.path), "0") if process.role == "node"]
    processes.end([node], 0.0)
    assert target.status(run, handle)["0"].state == "gone"
    assert processes.is_alive(orphan)
    handle = target.resize(run, handle, ["0"])
    assert not processes.is_alive(orphan)
    assert target.status(run, handle)["0"].state == "placed"
    target.cancel(run, handle, 5.0)
    assert processes.find_marked(str(run.path)) == []


def test_local_ends_what_it_placed_when_a_submit_fails(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = written(place, "local")
    start = processes.start_detached
    n_starts = iter(range(10))

    def start_once(*given: Any) -> Any:
        if next(n_starts) > 0:
            raise OSError("no more processes")
        return start(*given)

    monkeypatch.setattr(processes, "start_detached", start_once)
    with pytest.raises(OSError, match="no more processes"):
        targets.load("local").submit(run, ["0", "1"])
    assert processes.find_marked(str(run.path)) == []
