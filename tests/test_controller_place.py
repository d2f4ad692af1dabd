"""What the controller does when its target refuses: tries again, ever later, and says why."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from manual_world import ManualWorld
from samples import run_folder, told, view

from penstock.deployment.controller import loop
from penstock.deployment.controller.loop import Controller
from penstock.deployment.observe import Observation, summarise
from penstock.errors import PenstockError
from penstock.run_folder import Desired, Handle, Part, Run, Unit, replica
from penstock.targets import Placement

READY = view(told("0"))
TWO = Desired("up", 2)


class Stubborn:
    """A target with one replica that takes what is in `allows`, and keeps what is in `holds`."""

    def __init__(self) -> None:
        self.n_tries, self.allows, self.holds = 0, {"0"}, set[str]()

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        self.n_tries += 1
        wanted = {unit.name for unit in units} | self.holds
        placed: dict[str, Any] = {replica(name).key: {} for name in wanted if name in self.allows | self.holds}
        if placed == run.handle().units and wanted - self.allows:
            raise PenstockError("node3 has no room")
        return Handle("local", placed)

    def keep_up(self, run: Run) -> None:
        pass


class Ticks:
    """A controller whose ticks are made one by one, at given times."""

    def __init__(self) -> None:
        self.run, self.world, self.target = run_folder(), ManualWorld(1000.0), Stubborn()
        self.run.write_handle(Handle("local", {"replica/0": {}}))
        self.controller = Controller(self.run, world=self.world)
        self.controller.target = self.target  # type: ignore[assignment]

    def tick(self, desired: Desired) -> Any:
        placements = {replica(name): Placement("placed") for name in self.run.handle().replicas}
        gateway = {Unit("gateway", "0"): Placement("placed")}
        seen = Observation(placements | gateway, READY, Part("running", unit="0"))
        self.controller._act(desired, seen, may_place=True)
        self.controller._note_refusal()
        return summarise(desired, seen, self.controller.history, 0.0)

    def tick_of(self, seen: Observation) -> None:
        """A whole tick that sees so; what was being placed when it looked has been placed when it acts."""
        alive = [True]

        def look(*_: object) -> Observation:
            alive.clear()
            return seen

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "look", look)
            patch.setattr(self.controller, "_keep_watchdog", lambda: None)
            if self.controller._worker is not None:
                patch.setattr(self.controller._worker, "is_alive", lambda: bool(alive))
            self.controller._tick(Desired("up", 1))

    def events(self) -> list[str]:
        return [event.event for event in self.run.events()]


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


def test_one_that_is_refused_is_tried_ever_later_and_status_says_why(ticks: Ticks) -> None:
    tries = []
    for _ in range(100):  # 40 seconds of ticks
        state = ticks.tick(TWO)
        tries.append(ticks.target.n_tries)
        ticks.world.time_s += 0.4
    assert tries[0] == 1 and tries[-1] <= 6, "after 1, 3, 7, 15 seconds"
    told = [(row.replica, row.state, row.reason) for row in state.replicas]
    assert told == [("0", "ready", None), ("1", "queued", "node3 has no room")]
    assert ticks.events().count("place failed") == 1

    ticks.target.allows.add("1")
    ticks.world.time_s += 30
    assert [row.replica for row in ticks.tick(TWO).replicas] == ["0"], "as it was when it was looked at"
    assert ticks.tick(TWO).replicas[1].state == "starting"
    assert "replica placed" in ticks.events()


def test_another_wish_is_tried_at_once_and_the_old_one_forgotten(ticks: Ticks) -> None:
    ticks.tick(TWO)
    assert ticks.run.handle().ordered == ("1",), "its target may have begun"
    assert ticks.tick(Desired("up", 1)).replicas[-1].replica == "0"
    assert (ticks.target.n_tries, ticks.run.handle().ordered) == (2, ()), "nothing of it is left"
    ticks.tick(Desired("up", 1))
    assert ticks.target.n_tries == 2
    ticks.tick(TWO)
    assert ticks.target.n_tries == 3


@pytest.mark.loopback
def test_one_that_cannot_be_ended_is_not_reported_as_ended(ticks: Ticks) -> None:
    ticks.target.allows, ticks.target.holds = {"0", "1"}, set()
    ticks.tick(TWO)
    ticks.target.holds = {"1"}
    assert [row.replica for row in ticks.tick(Desired("up", 1)).replicas] == ["0", "1"]
    assert "replica ended" not in ticks.events()
    ticks.target.holds, ticks.world.time_s = set(), ticks.world.time_s + 30
    ticks.tick(Desired("up", 1))
    assert "replica ended" in ticks.events()


@pytest.mark.loopback
def test_a_death_that_was_seen_before_the_next_was_placed_is_one(ticks: Ticks) -> None:
    placements = {replica("0"): Placement("gone"), Unit("gateway", "0"): Placement("placed")}
    gone = Observation(placements, READY, Part("running", unit="0"))
    for _ in range(2):
        ticks.tick_of(gone)
        ticks.world.time_s += 30
    assert (ticks.target.n_tries, ticks.events().count("replica restarted")) == (1, 1)
