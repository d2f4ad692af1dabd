"""What the controller does next: a pure decision from what is desired and what is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from samples import NOW, told, view

from penstock.deployment.controller.decide import Decision, _wanted, decide, leaving
from penstock.deployment.observe import Observation
from penstock.run_folder import Desired
from penstock.targets import Placement
from penstock.wire.announcement import GatewayView, ReplicaView


def seen(*names: str, gone: Sequence[str] = (), rows: GatewayView | None = None, gateway: bool = True) -> Observation:
    placements = {name: Placement("gone" if name in gone else "placed") for name in names}
    return Observation(placements, rows, gateway)


def row(name: str, is_draining: bool = False, in_flight: int = 0) -> ReplicaView:
    return ReplicaView(told(name), 0.1, True, is_draining, in_flight)


def choose(
    n_replicas: int,
    looked: Observation,
    failed: Sequence[str] = (),
    drain_over: Callable[[str], bool] = lambda name: False,
) -> Decision:
    return decide(Desired("up", n_replicas), looked, frozenset(failed), drain_over)


def test_nothing_is_done_when_all_is_right() -> None:
    assert choose(2, seen("0", "1", rows=view(row("0"), row("1")))) == Decision()


def test_a_gateway_that_is_gone_is_started() -> None:
    assert choose(1, seen("0", gateway=False)) == Decision(start_gateway=True)


def test_absent_replicas_are_placed_beside_those_that_run() -> None:
    assert choose(3, seen("0", rows=view(row("0")))) == Decision(place=("0", "1", "2"))
    assert choose(1, seen()).place == ("0",)


def test_a_free_number_is_used_again() -> None:
    assert choose(3, seen("0", "2", rows=view())).place == ("0", "1", "2")


def test_a_replica_that_is_gone_is_placed_again() -> None:
    assert choose(2, seen("0", "1", gone=["1"], rows=view())) == Decision(place=("0", "1"), again=("1",))


def test_one_too_many_is_drained_first() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", in_flight=2)))
    assert choose(1, looked) == Decision(drain=("1",))


def test_while_requests_run_on_it_it_stays() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True, in_flight=1)))
    assert choose(1, looked) == Decision(drain=("1",))


def test_drained_and_idle_it_is_ended() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True)))
    assert choose(1, looked) == Decision(drain=("1",), place=("0",))


def test_idle_but_not_yet_draining_it_stays_since_a_request_may_come() -> None:
    assert choose(1, seen("0", "1", rows=view(row("0"), row("1")))).place is None


def test_one_the_gateway_never_knew_is_ended_at_once() -> None:
    assert choose(1, seen("0", "1", rows=view(row("0")))).place == ("0",)


def test_without_a_gateway_only_time_ends_a_drain() -> None:
    assert choose(1, seen("0", "1", gateway=False)).place is None
    assert choose(1, seen("0", "1", gateway=False), drain_over=lambda name: name == "1").place == ("0",)


def test_when_its_time_is_over_it_is_ended_with_requests_on_it() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True, in_flight=1)))
    assert choose(1, looked, drain_over=lambda name: True).place == ("0",)


def test_one_that_is_wanted_again_stops_draining() -> None:
    looked = seen("0", "1", rows=view(row("0"), row("1", is_draining=True)))
    assert choose(2, looked) == Decision(undrain=("1",))


def test_scaling_to_nothing_drains_all() -> None:
    looked = seen("0", rows=view(row("0", is_draining=True)))
    assert choose(0, looked) == Decision(drain=("0",), place=())


def test_a_failed_replica_is_not_placed_again() -> None:
    assert choose(2, seen("0", "1", gone=["1"], rows=view()), failed=["1"]) == Decision()


def test_a_failed_replica_that_left_its_target_is_not_placed_again() -> None:
    assert choose(2, seen("0", rows=view()), failed=["1"]) == Decision()
    assert choose(3, seen("0", rows=view()), failed=["1"]).place == ("0", "2")


def test_with_one_less_a_failed_replica_goes_before_a_healthy_one() -> None:
    looked = seen("0", "1", gone=["0"], rows=view(row("1")))
    assert choose(1, looked, failed=["0"]) == Decision(drain=("0",), place=("1",))


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
    assert _wanted(current, n_replicas, frozenset(failed)) == expected


def placed(states: dict[str, str], rows: GatewayView | None = None, **facts: Any) -> Observation:
    return Observation({name: Placement(state, **facts) for name, state in states.items()}, rows, True)  # type: ignore[arg-type]


def test_a_replica_that_lost_a_node_is_mended() -> None:
    looked = placed({"0": "broken"}, view(row("0")))
    assert choose(1, looked) == Decision(place=("0",), again=("0",))


def leave(n_replicas: int, looked: Observation, *names: str) -> Decision:
    return decide(Desired("up", n_replicas), looked, frozenset(), lambda name: False, frozenset(names))


def test_one_that_is_leaving_gets_a_successor_and_stays_until_it_is_ready() -> None:
    assert leave(1, placed({"0": "placed"}, view(row("0"))), "0") == Decision(place=("1", "0"))
    loading = view(row("0"), told("1", "loading"))
    assert leave(1, placed({"0": "placed", "1": "placed"}, loading), "0") == Decision()
    both = view(row("0"), row("1"))
    assert leave(1, placed({"0": "placed", "1": "placed"}, both), "0") == Decision(drain=("0",))
    drained = view(row("0", is_draining=True), row("1"))
    looked = placed({"0": "placed", "1": "placed"}, drained)
    assert leave(1, looked, "0") == Decision(drain=("0",), place=("1",))


def test_of_two_that_leave_one_is_ended_when_one_successor_is_ready() -> None:
    states = dict.fromkeys("0123", "placed")
    rows = view(row("0"), row("1"), row("2"), told("3", "loading"))
    assert leave(2, placed(states, rows), "0", "1") == Decision(drain=("1",))


def test_one_that_left_before_its_successor_was_ready_is_not_placed_again() -> None:
    looked = placed({"0": "gone", "1": "placed"}, view(told("1", "loading")))
    assert leave(1, looked, "0") == Decision(drain=("0",), place=("1",))


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
