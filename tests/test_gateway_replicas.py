from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.errors import UserError
from penstock.gateway.config import ServedModel
from penstock.gateway.routing.replicas import RETRY_AFTER_S, ReplicaTable
from penstock.wire.announcement import Announcement, Progress

MODELS = (ServedModel("demo", ("alias",)), ServedModel("other"))
READY = Announcement(replica="0", model="demo", state="ready", lease_s=10, url="http://127.0.0.1:41234")


def ready_names(table: ReplicaTable, now: float) -> list[str]:
    return [replica.name for replica in table.ready("demo", now)]


def test_traffic_ends_with_the_lease_and_returns_with_the_next_announcement() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=100)
    assert ready_names(table, 110) == ["0"]
    assert ready_names(table, 110.1) == []
    table.announce(READY, now=200)
    assert ready_names(table, 201) == ["0"]


@pytest.mark.parametrize("state", ["queued", "starting", "loading", "warming", "stalled", "restarting", "failed"])
def test_only_ready_replicas_get_traffic(state: str) -> None:
    table = ReplicaTable(MODELS)
    table.announce(msgspec.structs.replace(READY, state=state), now=0)
    assert ready_names(table, 0) == []


def test_request_in_flight_survives_lease_and_forget() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    replica = table.begin("demo", now=1)
    assert replica is not None
    assert table.begin("demo", now=99) is None
    assert table.view(99, 0, 1).replicas[0].in_flight == 1
    table.forget("0")
    assert table.in_flight_total == 1
    table.end(replica)
    assert table.in_flight_total == 0


def test_drain_before_the_first_announcement_holds() -> None:
    table = ReplicaTable(MODELS)
    assert table.drain("0") == 0
    assert table.announce(READY, now=0) is True
    assert ready_names(table, 0) == []
    table.undrain("0")
    assert table.announce(READY, now=1) is False
    assert ready_names(table, 1) == ["0"]


def test_drain_is_idempotent_and_tells_what_is_in_flight() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    table.begin("demo", now=0)
    assert (table.drain("0"), table.drain("0")) == (1, 1)


def test_forgotten_replica_starts_anew() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    table.drain("0")
    table.forget("0")
    assert table.view(0, 0, 0).replicas == ()
    assert table.announce(READY, now=1) is False


STOPPING = msgspec.structs.replace(READY, state="stopping")


@pytest.mark.parametrize(
    "end",
    [
        lambda table: table.forget("0"),
        lambda table: table.undrain("0"),
        lambda table: table.take_lapsed(now=100),
        lambda table: (table.announce(STOPPING, now=1), table.announce(READY, now=2)),
    ],
    ids=["forgotten", "taken back", "its lease ran out", "a successor announces"],
)
def test_an_order_to_leave_holds_until_the_replica_is_gone(end: Callable[[ReplicaTable], object]) -> None:
    table = ReplicaTable(MODELS)
    assert table.leave("0") == 0, "before its first announcement"
    table.announce(READY, now=0)
    assert (table.must_leave("0"), ready_names(table, 0)) == (True, [])
    table.leave("0")
    end(table)
    assert table.must_leave("0") is False
    assert table.announce(READY, now=3) is False


def test_suspect_is_passed_over_until_it_announces() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    replica = table.find("0")
    assert replica is not None
    assert table.suspect(replica, ("127.0.0.1", 41234)) is True
    assert table.suspect(replica, ("127.0.0.1", 41234)) is False
    assert ready_names(table, 1) == []
    table.announce(READY, now=2)
    assert ready_names(table, 2) == ["0"]


def test_refusal_of_an_old_address_says_nothing_about_the_new_one() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    replica = table.find("0")
    assert replica is not None
    table.announce(msgspec.structs.replace(READY, url="http://127.0.0.1:41235"), now=1)
    assert table.suspect(replica, ("127.0.0.1", 41234)) is False
    assert ready_names(table, 1) == ["0"]


def test_in_flight_requests_are_spread() -> None:
    table = ReplicaTable(MODELS)
    for name in "abc":
        table.announce(msgspec.structs.replace(READY, replica=name), now=0)
    chosen = [table.begin("demo", now=0) for _ in range(6)]
    assert sorted(replica.name for replica in chosen if replica) == ["a", "a", "b", "b", "c", "c"]


def test_names_resolve_to_declared_models() -> None:
    table = ReplicaTable(MODELS)
    assert [table.resolve(name) for name in ("demo", "alias", "other", "nope", None)] == [
        "demo",
        "demo",
        "other",
        None,
        None,
    ]
    assert ReplicaTable(MODELS[:1]).resolve(None) == "demo"


def test_model_state_follows_its_replicas() -> None:
    table = ReplicaTable(MODELS)
    assert table.model_state("demo", 0) == "unavailable"
    table.announce(msgspec.structs.replace(READY, state="loading", url=None), now=0)
    assert table.model_state("demo", 1) == "loading"
    assert table.model_state("demo", 11) == "unavailable"
    table.announce(READY, now=12)
    assert table.model_state("demo", 12) == "ready"
    assert table.model_state("other", 12) == "unavailable"


def test_retry_after_is_the_shortest_estimate() -> None:
    table = ReplicaTable(MODELS)
    assert table.retry_after_s("demo", 0) == RETRY_AFTER_S
    for name, eta_s in (("a", 42.0), ("b", 20.5)):
        progress = Progress("weights", eta_s=eta_s)
        table.announce(Announcement(name, "demo", "loading", 60, progress=progress), now=0)
    assert table.retry_after_s("demo", 10) == 11
    assert table.retry_after_s("demo", 50) == 1


def test_lapsed_leases_are_told_once() -> None:
    table = ReplicaTable(MODELS)
    table.announce(READY, now=0)
    assert [table.take_lapsed(now) for now in (5, 11, 12)] == [[], ["0"], []]


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
    table = ReplicaTable(MODELS)
    with pytest.raises(UserError):
        table.announce(msgspec.structs.replace(READY, **change), now=0)
    assert table.view(0, 0, 0).replicas == ()


def test_view_keeps_the_announcement_as_it_was() -> None:
    table = ReplicaTable(MODELS)
    announcement = msgspec.structs.replace(READY, n_restarts=3, reason="why", measured={"kv_gib": 1.5})
    table.announce(announcement, now=0)
    view = table.view(0.25, 4, 17)
    assert view.replicas[0].announcement == announcement
    assert (view.replicas[0].age_s, view.replicas[0].is_alive, view.waiting, view.requests_total) == (0.25, True, 4, 17)
