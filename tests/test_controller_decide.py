"""What the controller does next: a pure decision from what is desired and what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from samples import NOW, told, view

from penstock.deployment.controller.decide import Decision, Memory, decide, leaving
from penstock.deployment.observe import Observation
from penstock.run_folder import Desired, Part, Unit, replica
from penstock.targets import Placement
from penstock.wire.announcement import GatewayView, ReplicaView

GATEWAY = Unit("gateway", "0")
SERVING = Part("running", unit="0")


def placed(
    states: dict[str, Any], rows: GatewayView | None = None, leaving: Sequence[str] = (), **facts: Any
) -> Observation:
    """Replicas in these states, the machines of some about to be taken away, and a gateway that serves."""
    ends = {name: {"ends_at": NOW + 1} for name in leaving}
    placements = {replica(name): Placement(state, **ends.get(name, facts)) for name, state in states.items()}
    return Observation(placements | {GATEWAY: Placement("placed")}, rows, SERVING)


def seen(*names: str, gone: Sequence[str] = (), rows: GatewayView | None = None) -> Observation:
    return placed({name: "gone" if name in gone else "placed" for name in names}, rows)


def units(*names: str) -> tuple[Any, ...]:
    return tuple(map(replica, names))


def row(name: str, is_draining: bool = False, in_flight: int = 0) -> ReplicaView:
    return ReplicaView(told(name), 0.1, True, is_draining, in_flight)


def silent(name: str, in_flight: int = 1) -> ReplicaView:
    return ReplicaView(told(name), 9.0, False, False, in_flight)


def choose(n_replicas: int, looked: Observation, **remembered: Any) -> Decision:
    """What is decided of replicas. Those that are `late` had their time to drain; those that `left` were leaving."""
    failed, late, left = (remembered.pop(name, ()) for name in ("failed", "late", "left"))
    memory = Memory(10.0, 10.0, frozenset(failed), dict.fromkeys(late, -100.0), frozenset(left), **remembered)
    decision, _ = decide(Desired("up", n_replicas), looked, memory, 0.0, NOW)
    place = decision.place and tuple(unit for unit in decision.place if unit.kind == "replica")
    return msgspec.structs.replace(decision, place=place, events=())


ONE, BOTH = view(row("0")), view(row("0"), row("1"))
DRAINED = view(row("0"), row("1", is_draining=True))
DRAINING = view(row("0"), row("1", is_draining=True, in_flight=1))
LEAVING = {"0": "placed", "1": "placed"}
DECISIONS: dict[str, tuple[int, Observation, dict[str, Any], Decision]] = {
    "nothing is done when all is right": (2, seen("0", "1", rows=BOTH), {}, Decision()),
    "absent replicas are placed next to those that run": (3, seen("0", rows=ONE), {}, Decision(units("0", "1", "2"))),
    "the first is placed": (1, seen(), {}, Decision(units("0"))),
    "a free number is used again": (3, seen("0", "2", rows=view()), {}, Decision(units("0", "1", "2"))),
    "a replica that is gone is placed again, and its lease forgotten":
        (2, seen("0", "1", gone=["1"], rows=view()), {}, Decision(units("0", "1"), again=("1",), evict=("1",))),
    "but not before its pause is over":
        (2, seen("0", "1", gone=["1"], rows=view()), {"due_at": {"1": 1.0}}, Decision(units("0", "1"))),
    "one that lost a node is placed again, and keeps its lease":
        (1, placed({"0": "broken"}, ONE), {}, Decision(units("0"), again=("0",))),
    "one that its target repairs is left alone":
        (1, placed({"0": "broken"}, ONE, is_repaired_by_target=True), {}, Decision()),
    "a lost one goes before one that serves":
        (1, placed({"0": "broken", "1": "placed"}, view(row("1"))), {}, Decision(units("1"), drain=("0",))),
    "one too many is drained first":
        (1, seen("0", "1", rows=view(row("0"), row("1", in_flight=2))), {}, Decision(drain=("1",))),
    "idle but not yet draining it stays, since a request may come":
        (1, seen("0", "1", rows=BOTH), {}, Decision(drain=("1",))),
    "while requests run on it it stays": (1, seen("0", "1", rows=DRAINING), {}, Decision(drain=("1",))),
    "drained and idle it is ended": (1, seen("0", "1", rows=DRAINED), {}, Decision(units("0"), drain=("1",))),
    "one that the gateway never knew is ended at once":
        (1, seen("0", "1", rows=ONE), {}, Decision(units("0"), drain=("1",))),
    "without a gateway it may drain": (1, seen("0", "1"), {}, Decision(drain=("1",))),
    "without a gateway time ends a drain": (1, seen("0", "1"), {"late": "1"}, Decision(units("0"), drain=("1",))),
    "when its time is over it is ended with requests on it":
        (1, seen("0", "1", rows=DRAINING), {"late": "1"}, Decision(units("0"), drain=("1",))),
    "one that is wanted again stops draining": (2, seen("0", "1", rows=DRAINED), {}, Decision(undrain=("1",))),
    "the lowest numbers are kept, as numbers":
        (1, seen("2", "10", rows=view()), {"late": ["10"]}, Decision(units("2"), drain=("10",))),
    "scaling to nothing drains all":
        (0, seen("0", rows=view(row("0", is_draining=True))), {}, Decision(units(), drain=("0",))),
    "a failed replica is not placed again":
        (2, seen("0", "1", gone=["1"], rows=view()), {"failed": "1"}, Decision()),
    "a failed replica that left its target is not placed again": (2, seen("0", rows=ONE), {"failed": "1"}, Decision()),
    "the next after a failed one has another number":
        (3, seen("0", rows=view()), {"failed": "1"}, Decision(units("0", "2"))),
    "a failed replica is ended before a healthy one":
        (1, seen("0", "1", gone=["0"], rows=view(row("1"))), {"failed": "0"}, Decision(units("1"), drain=("0",))),
    # Without it, `penstock scale` back to what runs waited for ever.
    "a failed replica that is not wanted any more is forgotten":
        (1, seen("0", rows=ONE), {"failed": "1"}, Decision(forget=("1",))),
    "one that is leaving gets a successor":
        (1, placed({"0": "placed"}, ONE, leaving="0"), {}, Decision(units("1", "0"))),
    "it stays until its successor is ready":
        (1, placed(LEAVING, view(row("0"), told("1", "loading")), leaving="0"), {}, Decision()),
    "then it drains": (1, placed(LEAVING, BOTH, leaving="0"), {}, Decision(drain=("0",))),
    "and is ended": (
        1, placed(LEAVING, view(row("0", is_draining=True), row("1")), leaving="0"), {},
        Decision(units("1"), drain=("0",)),
    ),
    # A target that stops without grace lets it leave by word, and it says so while it ends its engine.
    "one that says that it stops is not kept in place of its successor": (
        1, placed(LEAVING, view(told("0", "stopping"), row("1")), leaving="0"), {"left": "0"},
        Decision(drain=("0",)),
    ),
    "of two that leave one is ended when one successor is ready": (
        2,
        placed(dict.fromkeys("0123", "placed"), view(*map(row, "012"), told("3", "loading")), leaving="01"),
        {},
        Decision(drain=("1",)),
    ),
    "one that went silent waits for the next look":
        (1, placed({"0": "placed"}, view(silent("0")), placed_at=NOW - 60), {}, Decision()),
    "then it gets a successor": (
        1, placed({"0": "placed"}, view(silent("0")), placed_at=NOW - 60), {"silent": frozenset("0")},
        Decision(units("1", "0")),
    ),
    "but not where it was started since":
        (1, placed({"0": "placed"}, view(silent("0")), placed_at=NOW - 5), {}, Decision()),
    "nor where its target says at once that a machine is lost": (1, seen("0", rows=view(silent("0"))), {}, Decision()),
    "its successor ready, it is ended": (
        1, placed(LEAVING, view(silent("0", in_flight=0), row("1")), placed_at=NOW - 60), {"left": "0"},
        Decision(units("1"), drain=("0",)),
    ),
    "but not while a request runs on it":
        (1, placed(LEAVING, view(silent("0"), row("1")), placed_at=NOW - 60), {"left": "0"}, Decision(drain=("0",))),
    "requeued, it is ended although its successor still loads": (
        1, placed({"0": "queued", "1": "placed"}, view(silent("0"), told("1", "loading")), placed_at=NOW - 60),
        {"left": "0"}, Decision(units("1"), drain=("0",)),
    ),
    "back again, it is kept and its successor ended": (
        1, placed(LEAVING, view(row("0"), told("1", "loading")), placed_at=NOW - 60), {"left": "0"},
        Decision(drain=("1",)),
    ),
    "a gateway that does not answer ends no successor":
        (1, placed({"0": "queued", "1": "placed"}), {"left": "0"}, Decision(units("1"), drain=("0",))),
    "one that left before its successor was ready is not placed again": (
        1, placed({"0": "gone", "1": "placed"}, view(told("1", "loading"))), {"left": "0"},
        Decision(units("1"), drain=("0",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS)
def test_replicas(case: str) -> None:
    n_replicas, looked, remembered, expected = DECISIONS[case]
    assert choose(n_replicas, looked, **remembered) == expected


@pytest.mark.parametrize(
    ("left_s", "lead_s", "expected"),
    [(1000, None, set()), (169, None, {"0"}), (300, 200, set()), (199, 200, {"0"}), (-5, None, {"0"})],
)
def test_a_replica_leaves_so_long_before_the_end_as_a_start_takes_twice(
    left_s: float, lead_s: float | None, expected: set[str]
) -> None:
    looked = placed({"0": "placed"}, view(told("0", ready_after_s=40.0)), ends_at=NOW + left_s, lead_s=lead_s)
    assert leaving(looked, NOW, drain_s=30.0) == expected
    loading = placed({"0": "placed"}, view(told("0", "loading")), ends_at=NOW + 1)
    assert leaving(loading, NOW, drain_s=30.0) == set()
