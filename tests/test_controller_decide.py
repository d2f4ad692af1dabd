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


def choose(
    n_replicas: int, looked: Observation, failed: Sequence[str] = (), late: Sequence[str] = (), left: Sequence[str] = ()
) -> Decision:
    """What is decided of replicas. Those that are `late` had their time to drain; those that `left` were leaving."""
    memory = Memory(10.0, 10.0, frozenset(failed), dict.fromkeys(late, -100.0), frozenset(left))
    decision, _ = decide(Desired("up", n_replicas), looked, memory, 0.0, NOW)
    place = decision.place and tuple(unit for unit in decision.place if unit.kind == "replica")
    return msgspec.structs.replace(decision, place=place, events=())


def test_nothing_is_done_when_all_is_right() -> None:
    assert choose(2, seen("0", "1", rows=view(row("0"), row("1")))) == Decision()


def test_absent_replicas_are_placed_beside_those_that_run() -> None:
    assert choose(3, seen("0", rows=view(row("0")))) == Decision(place=units("0", "1", "2"))
    assert choose(1, seen()).place == units("0")


def test_a_free_number_is_used_again() -> None:
    assert choose(3, seen("0", "2", rows=view())).place == units("0", "1", "2")


def test_a_replica_that_is_gone_is_placed_again() -> None:
    assert choose(2, seen("0", "1", gone=["1"], rows=view())) == Decision(place=units("0", "1"), again=("1",))


def test_one_too_many_is_drained_first() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", in_flight=2)))
    assert choose(1, looked) == Decision(drain=("1",))


def test_while_requests_run_on_it_it_stays() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True, in_flight=1)))
    assert choose(1, looked) == Decision(drain=("1",))


def test_drained_and_idle_it_is_ended() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True)))
    assert choose(1, looked) == Decision(drain=("1",), place=units("0"))


def test_idle_but_not_yet_draining_it_stays_since_a_request_may_come() -> None:
    assert choose(1, seen("0", "1", rows=view(row("0"), row("1")))).place is None


def test_one_the_gateway_never_knew_is_ended_at_once() -> None:
    assert choose(1, seen("0", "1", rows=view(row("0")))).place == units("0")


def test_without_a_gateway_only_time_ends_a_drain() -> None:
    assert choose(1, seen("0", "1")).place is None
    assert choose(1, seen("0", "1"), late=["1"]).place == units("0")


def test_when_its_time_is_over_it_is_ended_with_requests_on_it() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True, in_flight=1)))
    assert choose(1, looked, late=["1"]).place == units("0")


def test_one_that_is_wanted_again_stops_draining() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True)))
    assert choose(2, looked) == Decision(undrain=("1",))


def test_scaling_to_nothing_drains_all() -> None:
    looked = seen("0", rows=view(row("0", is_draining=True)))
    assert choose(0, looked) == Decision(drain=("0",), place=units())


def test_a_failed_replica_is_not_placed_again() -> None:
    assert choose(2, seen("0", "1", gone=["1"], rows=view()), failed=["1"]) == Decision()


def test_a_failed_replica_that_left_its_target_is_not_placed_again() -> None:
    assert choose(2, seen("0", rows=view()), failed=["1"]) == Decision()
    assert choose(3, seen("0", rows=view()), failed=["1"]).place == units("0", "2")


def test_with_one_less_a_failed_replica_goes_before_a_healthy_one() -> None:
    looked = seen("0", "1", gone=["0"], rows=view(row("1")))
    assert choose(1, looked, failed=["0"]) == Decision(drain=("0",), place=units("1"))


def test_a_failed_replica_nobody_asks_for_any_more_is_forgotten() -> None:
    """Without it, `penstock scale` back to what runs waited for ever."""
    assert choose(1, seen("0", rows=view(row("0"))), failed=["1"]).forget == ("1",)
    assert choose(2, seen("0", rows=view(row("0"))), failed=["1"]).forget == ()
    assert choose(1, seen("0", "1", gone=["1"], rows=view(row("0"))), failed=["1"]).forget == ()


@pytest.mark.parametrize(
    ("current", "n_replicas", "failed", "expected"),
    [
        ([], 0, [], []),
        ([], 2, [], ["0", "1"]),
        (["0", "1", "2"], 2, [], ["0", "1"]),
        (["3"], 2, [], ["0", "3"]),
        (["2", "10"], 1, [], ["2"]),
        (["0", "1"], 1, ["0"], ["1"]),
        (["0", "1"], 2, ["0"], ["0", "1"]),
    ],
)
def test_the_lowest_numbers_are_kept(
    current: list[str], n_replicas: int, failed: list[str], expected: list[str]
) -> None:
    decision = choose(n_replicas, placed(dict.fromkeys(current, "placed"), view()), failed, late=current)
    if decision.place is None:
        assert current == expected
    else:
        assert [unit.name for unit in decision.place] == [name for name in expected if name not in failed]


def test_a_replica_that_lost_a_node_is_placed_again() -> None:
    looked = placed({"0": "broken"}, view(row("0")))
    assert choose(1, looked) == Decision(place=units("0"), again=("0",))


def test_a_replica_that_its_target_repairs_is_left_alone() -> None:
    assert choose(1, placed({"0": "broken"}, view(row("0")), is_repaired_by_target=True)) == Decision()


def test_one_that_is_leaving_gets_a_successor_and_stays_until_it_is_ready() -> None:
    assert choose(1, placed({"0": "placed"}, view(row("0")), leaving="0")) == Decision(place=units("1", "0"))
    two = {"0": "placed", "1": "placed"}
    assert choose(1, placed(two, view(row("0"), told("1", "loading")), leaving="0")) == Decision()
    assert choose(1, placed(two, view(row("0"), row("1")), leaving="0")) == Decision(drain=("0",))
    drained = view(row("0", is_draining=True), row("1"))
    assert choose(1, placed(two, drained, leaving="0")) == Decision(drain=("0",), place=units("1"))


def test_of_two_that_leave_one_is_ended_when_one_successor_is_ready() -> None:
    rows = view(row("0"), row("1"), row("2"), told("3", "loading"))
    assert choose(2, placed(dict.fromkeys("0123", "placed"), rows, leaving="01")) == Decision(drain=("1",))


def test_one_that_left_before_its_successor_was_ready_is_not_placed_again() -> None:
    looked = placed({"0": "gone", "1": "placed"}, view(told("1", "loading")))
    assert choose(1, looked, left="0") == Decision(drain=("0",), place=units("1"))


@pytest.mark.parametrize(
    ("left_s", "lead_s", "expected"),
    [(1000, None, set()), (169, None, {"0"}), (300, 200, set()), (199, 200, {"0"}), (-5, None, {"0"})],
)
def test_a_replica_leaves_so_long_before_the_end_as_a_start_takes_twice(
    left_s: float, lead_s: float | None, expected: set[str]
) -> None:
    looked = placed({"0": "placed"}, view(told("0", ready_after_s=40.0)), ends_at=NOW + left_s, lead_s=lead_s)
    assert leaving(looked, NOW, drain_s=30.0) == expected


def test_one_that_is_not_ready_is_not_leaving() -> None:
    looked = placed({"0": "placed"}, view(told("0", "loading")), ends_at=NOW + 1)
    assert leaving(looked, NOW, drain_s=30.0) == set()
