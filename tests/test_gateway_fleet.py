from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.errors import UserError
from penstock.gateway.config import ServedModel
from penstock.gateway.routing.replicas import RETRY_AFTER_S, Fleet
from penstock.wire.announcement import Announcement, Progress

MODELS = (ServedModel("demo", ("alias",)), ServedModel("other"))
READY = Announcement(replica="0", model="demo", state="ready", lease_s=10, url="http://127.0.0.1:41234")


def ready_names(fleet: Fleet, now: float) -> list[str]:
    return [replica.name for replica in fleet.ready("demo", now)]


def test_traffic_ends_with_the_lease_and_returns_with_the_next_announcement() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=100)
    assert ready_names(fleet, 110) == ["0"]
    assert ready_names(fleet, 110.1) == []
    fleet.announce(READY, now=200)
    assert ready_names(fleet, 201) == ["0"]


@pytest.mark.parametrize("state", ["queued", "starting", "loading", "warming", "stalled", "restarting", "failed"])
def test_only_ready_replicas_get_traffic(state: str) -> None:
    fleet = Fleet(MODELS)
    fleet.announce(msgspec.structs.replace(READY, state=state), now=0)
    assert ready_names(fleet, 0) == []


def test_request_in_flight_survives_lease_and_forget() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    replica = fleet.begin("demo", now=1)
    assert replica is not None
    assert fleet.begin("demo", now=99) is None
    assert fleet.view(99, 0, 1).replicas[0].in_flight == 1
    fleet.forget("0")
    assert fleet.in_flight_total == 1
    fleet.end(replica)
    assert fleet.in_flight_total == 0


def test_drain_before_the_first_announcement_holds() -> None:
    fleet = Fleet(MODELS)
    assert fleet.drain("0") == 0
    assert fleet.announce(READY, now=0) is True
    assert ready_names(fleet, 0) == []
    fleet.undrain("0")
    assert fleet.announce(READY, now=1) is False
    assert ready_names(fleet, 1) == ["0"]


def test_drain_is_idempotent_and_tells_what_is_in_flight() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    fleet.begin("demo", now=0)
    assert (fleet.drain("0"), fleet.drain("0")) == (1, 1)


def test_forgotten_replica_starts_anew() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    fleet.drain("0")
    fleet.forget("0")
    assert fleet.view(0, 0, 0).replicas == ()
    assert fleet.announce(READY, now=1) is False


STOPPING = msgspec.structs.replace(READY, state="stopping")


@pytest.mark.parametrize(
    "end",
    [
        lambda fleet: fleet.forget("0"),
        lambda fleet: fleet.undrain("0"),
        lambda fleet: fleet.take_lapsed(now=100),
        lambda fleet: (fleet.announce(STOPPING, now=1), fleet.announce(READY, now=2)),
    ],
    ids=["forgotten", "taken back", "its lease ran out", "a successor announces"],
)
def test_an_order_to_leave_holds_until_the_replica_is_gone(end: Callable[[Fleet], object]) -> None:
    fleet = Fleet(MODELS)
    assert fleet.leave("0") == 0, "before its first announcement"
    fleet.announce(READY, now=0)
    assert (fleet.must_leave("0"), ready_names(fleet, 0)) == (True, [])
    fleet.leave("0")
    end(fleet)
    assert fleet.must_leave("0") is False
    assert fleet.announce(READY, now=3) is False


def test_suspect_is_passed_over_until_it_announces() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    replica = fleet.find("0")
    assert replica is not None
    assert fleet.suspect(replica, ("127.0.0.1", 41234)) is True
    assert fleet.suspect(replica, ("127.0.0.1", 41234)) is False
    assert ready_names(fleet, 1) == []
    fleet.announce(READY, now=2)
    assert ready_names(fleet, 2) == ["0"]


def test_refusal_of_an_old_address_says_nothing_about_the_new_one() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    replica = fleet.find("0")
    assert replica is not None
    fleet.announce(msgspec.structs.replace(READY, url="http://127.0.0.1:41235"), now=1)
    assert fleet.suspect(replica, ("127.0.0.1", 41234)) is False
    assert ready_names(fleet, 1) == ["0"]


def test_in_flight_requests_are_spread() -> None:
    fleet = Fleet(MODELS)
    for name in "abc":
        fleet.announce(msgspec.structs.replace(READY, replica=name), now=0)
    chosen = [fleet.begin("demo", now=0) for _ in range(6)]
    assert sorted(replica.name for replica in chosen if replica) == ["a", "a", "b", "b", "c", "c"]


def test_names_resolve_to_declared_models() -> None:
    fleet = Fleet(MODELS)
    assert [fleet.resolve(name) for name in ("demo", "alias", "other", "nope", None)] == [
        "demo",
        "demo",
        "other",
        None,
        None,
    ]
    assert Fleet(MODELS[:1]).resolve(None) == "demo"


def test_model_state_follows_its_replicas() -> None:
    fleet = Fleet(MODELS)
    assert fleet.model_state("demo", 0) == "unavailable"
    fleet.announce(msgspec.structs.replace(READY, state="loading", url=None), now=0)
    assert fleet.model_state("demo", 1) == "loading"
    assert fleet.model_state("demo", 11) == "unavailable"
    fleet.announce(READY, now=12)
    assert fleet.model_state("demo", 12) == "ready"
    assert fleet.model_state("other", 12) == "unavailable"


def test_retry_after_is_the_shortest_estimate() -> None:
    fleet = Fleet(MODELS)
    assert fleet.retry_after_s("demo", 0) == RETRY_AFTER_S
    for name, eta_s in (("a", 42.0), ("b", 20.5)):
        progress = Progress("weights", eta_s=eta_s)
        fleet.announce(Announcement(name, "demo", "loading", 60, progress=progress), now=0)
    assert fleet.retry_after_s("demo", 10) == 11
    assert fleet.retry_after_s("demo", 50) == 1


def test_lapsed_leases_are_told_once() -> None:
    fleet = Fleet(MODELS)
    fleet.announce(READY, now=0)
    assert [fleet.take_lapsed(now) for now in (5, 11, 12)] == [[], ["0"], []]


@pytest.mark.parametrize(
    "change",
    [
        {"replica": "a b"},
        {"replica": "0\r\nx: y"},
        {"replica": ""},
        {"model": "alias"},
        {"model": "nope"},
        {"lease_s": 0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"url": None},
        {"url": "https://127.0.0.1:1"},
        {"url": "http://127.0.0.1:1/v1"},
        {"url": "http://127.0.0.1:99999"},
        {"url": "127.0.0.1:1"},
    ],
)
def test_announcements_that_cannot_be_served_are_refused(change: dict[str, object]) -> None:
    fleet = Fleet(MODELS)
    with pytest.raises(UserError):
        fleet.announce(msgspec.structs.replace(READY, **change), now=0)
    assert fleet.view(0, 0, 0).replicas == ()


def test_view_keeps_the_announcement_as_it_was() -> None:
    fleet = Fleet(MODELS)
    announcement = msgspec.structs.replace(READY, n_restarts=3, reason="why", measured={"kv_gib": 1.5})
    fleet.announce(announcement, now=0)
    view = fleet.view(0.25, 4, 17)
    assert view.replicas[0].announcement == announcement
    assert (view.replicas[0].age_s, view.replicas[0].is_alive, view.waiting, view.requests_total) == (0.25, True, 4, 17)
