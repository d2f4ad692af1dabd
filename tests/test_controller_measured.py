"""The controller keeps what an engine reported of its memory, once a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import NOW, deployment, draft, gpu_plan, told, view

from penstock import run_folder
from penstock.deployment import measured
from penstock.deployment.controller.loop import Controller
from penstock.deployment.observe import Observation
from penstock.planner import Plan
from penstock.run_folder import Part, Run

REPORTED = {"kv_cache_gib": 50.0, "consumed_gib": 20.0, "peak_gib": 2.0, "weights_gib": 15.0}


@pytest.fixture
def run() -> Run:
    return run_folder.create(msgspec.structs.replace(draft(deployment(name="d")), plan=gpu_plan()), NOW)


def look(state: str = "ready", started_at: float = 1.0, **facts: Any) -> Observation:
    return Observation({}, view(told("0", state, started_at=started_at, **facts)), Part("running"))


def kept(run: Run) -> list[tuple[str, str]]:
    return [(event.event, event.text) for event in run.events() if event.event.startswith("measured values")]


def test_values_are_kept_when_a_replica_is_ready_once_a_start(run: Run, home: Path) -> None:
    controller = Controller(run)
    for state in ("starting", "loading", "warming"):
        controller._keep_measured(look(state, measured=REPORTED))
    assert not (home / "measured").exists()
    for _ in range(3):
        controller._keep_measured(look(measured=REPORTED))
    forecast = run.plan().forecast
    assert forecast is not None
    seen, warnings = measured.read(forecast.key)
    (measurement,) = seen.values()
    assert (measurement.kv_cache_gib, measurement.planned_kv_gib) == (50.0, forecast.kv_cache_gib)
    assert warnings == ()
    assert [text for _, text in kept(run)] == [str(next((home / "measured").rglob("*.json")))]
    controller._keep_measured(look(started_at=2.0, measured=REPORTED | {"kv_cache_gib": 49.0}))
    assert len(kept(run)) == 2


def test_each_start_is_kept_and_nothing_that_was_not_planned(home: Path) -> None:
    run = run_folder.create(draft(deployment(name="d")), NOW)
    controller = Controller(run)
    controller._keep_measured(look(measured=REPORTED))
    assert kept(run) == [] and not (home / "measured").exists()
    for at in (2.0, 2.0, 3.0):
        controller._keep_measured(look(started_at=at, ready_after_s=10.0, start_s={"imports": 3.0}))
    expected = measured.expected(measured.start_key(run.plan()))
    assert expected is not None and expected.n_starts == 2


def test_values_that_cannot_be_written_are_lost_and_no_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(plan: Plan, reported: object, now: float) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(measured, "keep", deny)
    Controller(run)._keep_measured(look(measured=REPORTED))
    assert kept(run) == [("measured values lost", "[Errno 13] Permission denied")]
