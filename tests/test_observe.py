"""The state of a deployment from one look."""

from __future__ import annotations

import os

import msgspec
import pytest
from samples import NOW, demo_plan, gpu_plan, run_folder, told, view

from penstock import processes
from penstock.deployment import observe
from penstock.deployment.controller.changes import Noted, changes
from penstock.deployment.observe import History, Observation, summarise
from penstock.run_folder import Desired, Part, ReplicaStatus, State, replica
from penstock.targets import Placement
from penstock.wire.announcement import GatewayView, Process, ReplicaView, Restart

PLACED, GONE, QUEUED = Placement("placed"), Placement("gone", "its node process 7 is gone"), Placement("queued")
READY = told("0", ready_after_s=2.0)
UP = Desired("up", 1)
FAILED = ReplicaStatus("0", "failed", "gone", reason="out of memory | Use less.")


def look(rows: GatewayView | None, gateway: bool = True, **placements: Placement) -> Observation:
    units = {replica(name.removeprefix("r")): place for name, place in placements.items()}
    return Observation(units, rows, Part("running" if gateway else "gone"))


DOWN = Desired("down", 0)


@pytest.mark.parametrize(
    ("desired", "seen", "phase"),
    [
        *((UP, look(view(READY), r0=PLACED), "ready"), (UP, look(view(told("0", "loading")), r0=PLACED), "starting")),
        *((UP, look(view(), r0=PLACED), "starting"), (UP, look(None, gateway=False, r0=QUEUED), "starting")),
        *((UP, look(None, gateway=False, r0=PLACED), "starting"), (UP, look(view(READY), r0=GONE), "degraded")),
        (UP, look(view(told("0", "restarting", n_restarts=1)), r0=PLACED), "degraded"),
        (Desired("up", 2), look(view(READY, told("1", "loading")), r0=PLACED, r1=PLACED), "degraded"),
        *((Desired("up", 0), look(view()), "ready"), (DOWN, look(view(READY), r0=PLACED), "stopping")),
        *((DOWN, look(None, gateway=True), "stopping"), (DOWN, look(None, gateway=False), "down")),
    ],
)
def test_the_phase_says_what_matters(desired: Desired, seen: Observation, phase: str) -> None:
    assert summarise(desired, seen, History(), NOW).phase == phase


def test_the_engines_kv_cache_is_compared_with_the_plans() -> None:
    made = gpu_plan()
    assert made.forecast is not None
    planned = made.forecast.kv_cache_gib
    rows = [told(name, measured={"kv_cache_gib": planned * share}) for name, share in (("0", 0.94), ("1", 1.0))]
    seen = look(view(*rows, told("2")), r0=PLACED, r1=PLACED, r2=PLACED)
    found = observe.kv_cache_differences(made, summarise(Desired("up", 3), seen, History(), NOW))
    assert sorted(found) == ["0", "1"]
    assert found["0"].share == pytest.approx(-0.06, abs=0.001)
    assert [found[name].is_worth_saying for name in ("0", "1")] == [True, False]
    assert observe.kv_cache_differences(demo_plan(), summarise(UP, seen, History(), NOW)) == {}


def test_a_failed_replica_fails_the_deployment_or_degrades_it() -> None:
    history = History(failed={"0": FAILED})
    alone = summarise(UP, look(view()), history, NOW)
    assert (alone.phase, alone.reason, alone.replicas) == ("failed", "out of memory | Use less.", (FAILED,))
    assert summarise(Desired("up", 2), look(view(told("1")), r1=PLACED), history, NOW).phase == "degraded"
    state = summarise(UP, look(None, gateway=False, r0=PLACED), History(gateway=Part("running")), NOW)
    assert (state.phase, state.gateway.state) == ("starting", "gone"), "a lost gateway is not ready"


def silent(age_s: float, is_leased: bool = False) -> GatewayView:
    return view(ReplicaView(READY, age_s, is_leased, False, 0))


NOT_YET, LOST = "its node has not reported yet", "has not reported for 5 s: the machine or the network may be down"
ON_SLURM = Placement("placed", placed_at=NOW - 60, where="job 7 on n1")
AGAIN = History(replicas={"0": (Restart(NOW - 2, "node 0 was lost"),)})


@pytest.mark.parametrize(
    ("seen", "history", "state", "reason"),
    [
        (look(silent(9.0), r0=PLACED), History(), "silent", f"its node {LOST}"),
        (look(silent(9.0), r0=ON_SLURM), History(), "silent", f"job 7 on n1 {LOST}"),
        (look(silent(9.0), r0=Placement("placed", placed_at=NOW - 5)), History(), "starting", NOT_YET),
        (look(view(), r0=PLACED), History(), "starting", NOT_YET),
        (look(silent(3.0, True), r0=PLACED), AGAIN, "starting", NOT_YET),  # the lease is of the lost node
        (look(silent(1.0, True), r0=PLACED), AGAIN, "ready", None),
        (look(None, gateway=False, r0=PLACED), History(), "starting", None),
        (look(view(READY), r0=GONE), History(), "gone", "its node process 7 is gone"),
    ],
)
def test_a_replica_without_a_lease_is_not_called_ready_and_one_whose_node_is_gone_says_so(
    seen: Observation, history: History, state: str, reason: str | None
) -> None:
    (found,) = summarise(UP, seen, history, NOW).replicas
    assert (found.state, found.reason) == (state, reason)


def test_a_draining_replica_is_shown_with_its_requests_and_replicas_in_the_order_of_their_numbers() -> None:
    row = ReplicaView(READY, 0.1, True, True, 3)
    state = summarise(UP, look(view(row, requests_total=9), r10=PLACED, r0=PLACED), History(), NOW)
    assert [replica.replica for replica in state.replicas] == ["0", "10"]
    draining = state.replicas[0]
    assert (draining.state, draining.in_flight, draining.is_draining) == ("draining", 3, True)
    assert state.requests_total == 9


def test_upstreams_are_shown_next_to_the_replicas_and_make_no_deployment_ready() -> None:
    reason = "no answer to GET /health in 2 s"
    busy = msgspec.structs.replace(READY, state="busy", reason=reason)
    named = [msgspec.structs.replace(busy, replica=f"upstream-{n}") for n in (2, 1)]
    rows = [ReplicaView(row, 0.1, row.replica == "upstream-1", False, 7) for row in named]
    state = summarise(UP, look(view(*rows), r0=PLACED), History(), NOW)
    assert (state.phase, [replica.replica for replica in state.replicas]) == ("starting", ["0"])
    assert [(row.replica, row.state, row.in_flight, row.reason) for row in state.upstreams] == [
        *(("upstream-1", "busy", 7, reason), ("upstream-2", "silent", 7, reason))
    ]
    (event,), noted = changes(state, Noted(state.phase))
    assert (event.kind, event.text, event.replica) == ("replica busy", reason, "upstream-1")
    assert changes(state, noted)[0] == ()


def restarted(n_of_engine: int, engine: list[Restart], by_controller: list[Restart]) -> ReplicaStatus:
    node = told("0", n_restarts=n_of_engine, restarts=tuple(engine))
    history = History(replicas={"0": tuple(by_controller)})
    (replica,) = summarise(UP, look(view(node), r0=PLACED), history, NOW).replicas
    return replica


def test_restarts_of_node_and_engine_are_joined_newest_last_and_counted_once() -> None:
    """A node placed again is remembered with its engine's restarts, which the gateway still shows for a moment."""
    gone, stalled = Restart(10.0, "its node was gone"), Restart(20.0, "stalled")
    joined = restarted(7, [stalled], [gone])
    assert ([restart.reason for restart in joined.restarts], joined.n_restarts) == (["its node was gone", "stalled"], 8)
    joined = restarted(1, [stalled], [stalled, gone])
    assert (joined.n_restarts, sorted(restart.at for restart in joined.restarts)) == (2, [10.0, 20.0])
    many = restarted(4, [Restart(100.0 + at, "y") for at in range(4)], [Restart(float(at), "x") for at in range(9)])
    assert (len(many.restarts), many.n_restarts, many.restarts[-1].at) == (10, 13, 103.0)


def me() -> Process:
    return processes.identify(os.getpid(), "controller")


def test_a_fresh_word_of_a_living_controller_is_taken_and_an_old_one_looked_at_again() -> None:
    run = run_folder()
    assert observe.now_state(run, NOW).phase == "starting", "nobody has looked at it yet"
    last = State(NOW, "ready", 1, controller=Part("running", me()), gateway=Part("running"), requests_total=4)
    run.write_state(last)
    assert observe.now_state(run, NOW + 1) == last
    state = observe.now_state(run, NOW + 60)
    assert (state.phase, state.controller.state, state.gateway.state) == ("degraded", "running", "gone")
    dead = Process(me().pid, 1.0, "controller")
    run.write_state(State(NOW, "ready", 1, replicas=(FAILED,), controller=Part("running", dead)))
    state = observe.now_state(run, NOW)
    assert (state.phase, state.controller.state, state.replicas) == ("failed", "gone", (FAILED,))
    run.write_desired(Desired("down", 0))
    run.write_state(State(NOW, "failed", 0, replicas=(FAILED,), reason="out of memory"))
    assert observe.now_state(run, NOW + 10_000).reason == "out of memory", "it stays as it ended"
