"""The controller's Prometheus, turn by turn: no process, no sleep."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from launching import a_place

from penstock.deployment import metrics
from penstock.deployment.controller.child import Child
from penstock.deployment.controller.prometheus import Prometheus
from penstock.errors import PenstockError
from penstock.observe import prometheus
from penstock.run_folder import Desired, Part, Run, State
from penstock.wire.announcement import MachineReading, Process

pytestmark = pytest.mark.loopback

PROGRAM = "/usr/bin/prometheus"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with a_place(tmp_path) as place:
        run, _ = place.written(place.write("one", observe={"prometheus": True}))
        place.addresses.clear()
        yield run
        run.write_desired(Desired("down", 0))


class Watched(Child):
    """With processes that live and answer as the test says."""

    def __init__(self, run: Run, last: Part | None = None, is_placed: bool = False) -> None:
        self.prometheus = Prometheus(run)
        super().__init__(run, self.prometheus, last, is_placed)
        self.lives, self.answers, self.started = True, True, list[list[str]]()

    def state(self, now: float) -> tuple[str, int]:
        """After a turn: what it is, and how often it was started."""
        self.turn(now)
        assert (self.part.process is None) == (self.part.state == "gone")
        return self.part.state, len(self.started)

    def _start(self, argv: list[str]) -> Process:
        self.started.append(argv)
        return Process(4_000_000 + len(self.started), 1.0, "prometheus")

    def _answers(self) -> bool:
        return self.answers


@pytest.fixture
def watched(run: Run, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(run)
    monkeypatch.setattr("shutil.which", lambda name: PROGRAM)
    monkeypatch.setattr("penstock.processes.is_alive", lambda process: watched.lives)
    monkeypatch.setattr("penstock.processes.signal_process", lambda process, number: None)
    return watched


def test_it_starts_and_runs_and_its_address_stays_over_a_restart(watched: Watched) -> None:
    assert watched.state(0.0) == ("starting", 1) and watched.started[0][0] == PROGRAM
    assert watched.state(1.0) == ("running", 1)
    url, watched.lives = watched.part.url, False
    assert watched.state(2.0) == ("gone", 1)
    watched.lives = True
    assert watched.state(2.5) == ("gone", 1), "the pause is not over"
    assert watched.state(3.0) == ("starting", 2)
    assert watched.part.url == url and watched.part.n_restarts == 1


def test_one_that_hangs_is_killed_after_a_while(watched: Watched) -> None:
    watched.turn(0.0)
    watched.turn(1.0)
    watched.answers = False
    assert watched.state(20.0)[0] != "gone"
    assert watched.state(22.0)[0] == "gone"
    assert watched.part.restarts[-1].reason == "it did not answer for 20 s"


def test_an_absent_program_is_told_once_and_found_when_it_is_installed(
    watched: Watched, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for now in (0.0, 2.0, 6.0):
        watched.turn(now)
    assert "apt-get install prometheus" in str(watched.part.note)
    assert [event.event for event in run.events()].count("prometheus absent") == 1
    monkeypatch.setattr("shutil.which", lambda name: PROGRAM)
    assert watched.state(200.0) == ("starting", 1) and watched.part.note is None


def test_a_full_disk_is_no_end(watched: Watched, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.deployment.controller.prometheus.write_settings", full)
        assert not watched.try_turn(0.0) and not watched.started
        assert "No space left" in str(watched.part.note)
    assert watched.try_turn(1.0) and len(watched.started) == 1


def test_targets_follow_the_gateway_and_exporters_the_nodes(watched: Watched, run: Run) -> None:
    own = socket.gethostname()
    watched.prometheus.machines = (MachineReading(own, dcgm_port=9400), MachineReading("gpu7", dcgm_port=9401))
    watched.try_turn(0.0)
    (gateway,) = json.loads((run.prometheus_folder / prometheus.TARGETS).read_text())
    assert gateway["targets"] == [run.admin_url.removeprefix("http://")]
    exporters = json.loads((run.prometheus_folder / prometheus.DCGM_TARGETS).read_text())
    assert [row["targets"] for row in exporters] == [["127.0.0.1:9400"], ["gpu7:9401"]]
    assert (run.prometheus_folder / prometheus.SCRAPE_KEY).stat().st_mode & 0o077 == 0
    assert run.admin_token() not in (run.prometheus_folder / prometheus.CONFIG).read_text()


def test_a_placed_controller_starts_its_own_and_says_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(0.0, "ready", 1)
    monkeypatch.setattr("penstock.deployment.observe.now_state", lambda run, now: state)
    with pytest.raises(PenstockError, match="has not started yet"):
        metrics.prometheus_url(run)
    monkeypatch.setattr("shutil.which", lambda name: PROGRAM)
    last = Part("running", Process(1, 1.0), url="http://127.0.0.1:9090", note="another-node")
    placed = Watched(run, last, is_placed=True)
    assert placed.part.process is None, "that one was on another machine"
    placed.turn(0.0)
    assert placed.part.note == socket.gethostname()
    state = State(0.0, "ready", 1, prometheus=msgspec.structs.replace(placed.part, note="another-node"))
    with pytest.raises(PenstockError, match="answers on loopback of another-node alone"):
        metrics.prometheus_url(run)
