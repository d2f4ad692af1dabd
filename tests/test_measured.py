"""What starts measured is kept once a start, shown by `status`, and is the estimate of the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from samples import NOW, demo_plan, deployment, draft, gpu_plan, run_folder, told, view

from penstock import run_folder as runs
from penstock.cli import status_text
from penstock.deployment import measured
from penstock.deployment.controller.loop import Controller
from penstock.deployment.observe import Observation
from penstock.planner import Plan
from penstock.planner.request import StartTime
from penstock.run_folder import Part, Run, State
from penstock.spec.deployment import Parallel
from penstock.wire.announcement import Announcement
from penstock.wire.live import Event

REPORTED = {"kv_cache_gib": 50.0, "consumed_gib": 20.0, "peak_gib": 2.0, "weights_gib": 15.0}


@pytest.fixture
def run() -> Run:
    return runs.create(msgspec.structs.replace(draft(deployment(name="d")), plan=gpu_plan()), NOW)


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
    run = runs.create(draft(deployment(name="d")), NOW)
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


STAGES = {"imports": 23.0, "weights": 10.0}


def ready(after_s: float, at: float, replica: str = "0") -> Announcement:
    return told(replica, started_at=at, ready_after_s=after_s, start_s=STAGES)


def test_the_estimate_is_the_median_and_the_range_of_what_was_measured_of_the_newest_twenty(home: Path) -> None:
    key = measured.start_key(demo_plan())

    def expected(*starts: tuple[float, float]) -> StartTime:
        """After starts that took so long, at these times."""
        for after_s, at in starts:
            measured.keep_start(demo_plan(), ready(after_s, at))
        found = measured.expected(key)
        assert found is not None
        return found

    assert measured.expected(key) is None
    assert measured.show_start(expected((146.0, 0.0))) == "starts in about 2m26s, as measured once"
    four = expected((86.0, 1.0), (84.0, 2.0), (80.0, 3.0), (80.0, 3.0))  # a new controller sees the same start
    assert (four.seconds.low, four.seconds.likely, four.seconds.high, four.n_starts) == (80, 85, 146, 4)
    assert measured.show_start(four) == "starts in about 1m25s (1m20s to 2m26s), as measured 4 times"
    (kept,) = (home / "measured" / "starts").iterdir()
    assert b'"imports": 23.0' in kept.read_bytes()
    newest = expected(*((10.0, float(number)) for number in range(4, 24)))
    assert (newest.seconds.high, newest.n_starts) == (10.0, 20)


def test_another_version_layout_or_gpu_has_its_own_and_a_gpu_plan_the_one_of_its_measurements(home: Path) -> None:
    measured.keep_start(demo_plan(), ready(10.0, 1.0))
    others: list[dict[str, Any]] = [{"engine_version": "0.1"}, {"layout": Parallel(tensor=2)}, {"device": "cuda"}]
    for changed in others:
        assert measured.expected(measured.start_key(demo_plan(**changed))) is None
    plan = gpu_plan()
    assert plan.forecast is not None
    assert measured.start_key(plan) == measured.planned_key(plan.forecast.key, plan.layout)


def test_a_damaged_file_is_no_start_and_is_written_again(home: Path) -> None:
    measured.keep_start(demo_plan(), ready(10.0, 1.0))
    (kept,) = (home / "measured" / "starts").iterdir()
    kept.write_text("{")
    assert measured.expected(measured.start_key(demo_plan())) is None
    measured.keep_start(demo_plan(), ready(10.0, 2.0))
    assert measured.expected(measured.start_key(demo_plan())) is not None


def test_status_has_a_line_for_each_start_of_this_launch(home: Path) -> None:
    run = run_folder()
    events = (
        Event(NOW - 9, "replica ready", "of an earlier launch", "0"),
        Event(NOW + 1, "replica ready", "ready after 2m26s: imports 30.0 s, compile 39.0 s", "0"),
        Event(NOW + 2, "replica draining", "it gets no more", "0"),
        Event(NOW + 3, "replica ready", "ready after 1m26s: imports 23.0 s\x1b[2J", "1"),
    )
    run.events_file.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    state = State(NOW, "ready", desired_replicas=1)
    shown = status_text.status_text(run, state, NOW + 60).split("starts, newest first:\n")[1]
    assert "earlier" not in shown
    first, second = (line.split(" ago  ")[1].rstrip() for line in shown.splitlines()[:2])
    assert first == "replica 1 ready after 1m26s: imports 23.0 s [2J"
    assert second == "replica 0 ready after 2m26s: imports 30.0 s, compile 39.0 s"
