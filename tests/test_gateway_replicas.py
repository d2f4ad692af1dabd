"""The table of replicas: leases, drains, orders to leave, failures, and what engines count themselves."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.errors import UserError
from penstock.gateway import retries
from penstock.gateway.accounting.running_totals import Totals, new_totals
from penstock.gateway.config import ServedModel
from penstock.gateway.routing import health
from penstock.gateway.routing.health import Health
from penstock.gateway.routing.replicas import RETRY_AFTER_S, Replica, ReplicaTable, RoutingHints
from penstock.wire.announcement import Announcement, EngineLoad, Progress
from penstock.wire.waiting import Waiting

MODELS = (ServedModel("demo", ("alias",)), ServedModel("other"))
READY = Announcement(replica="a", model="demo", state="ready", lease_s=10, url="http://127.0.0.1:41234")
OLD_ADDRESS, STOPPING = ("127.0.0.1", 41234), msgspec.structs.replace(READY, state="stopping")


def announce(table: ReplicaTable, now: float, name: str = "a", **changes: object) -> bool:
    return table.announce(msgspec.structs.replace(READY, replica=name, **changes), now)


def table_of(
    names: str, lease_s: float = 1e6, max_in_flight: int | None = None, totals: Totals | None = None
) -> ReplicaTable:
    table = ReplicaTable(MODELS, max_in_flight=max_in_flight, totals=totals)
    for name in names:
        announce(table, 0, name, lease_s=lease_s)
    return table


def row(table: ReplicaTable, name: str = "a") -> Replica:
    replica = table.find(name)
    assert replica is not None
    return replica


def begin(table: ReplicaTable, n_requests: int, hints: RoutingHints | None = None, now: float = 1.0) -> str:
    """The replicas that get the next requests; "-" where none takes one."""
    begun = [table.begin("demo", now, hints or RoutingHints()) for _ in range(n_requests)]
    return "".join(replica.name if replica else "-" for replica in begun)


def ready_names(table: ReplicaTable, now: float) -> str:
    return "".join(replica.name for replica in table.ready("demo", now))


def test_traffic_ends_with_the_lease_which_is_reported_once_and_returns_with_an_announcement() -> None:
    table = table_of("a", lease_s=10)
    assert (ready_names(table, 10), ready_names(table, 10.1)) == ("a", "")
    assert [table.take_lapsed(now) for now in (5, 11, 12)] == [[], ["a"], []]
    announce(table, 200)
    assert ready_names(table, 201) == "a"
    for state in ("queued", "starting", "loading", "warming", "stalled", "restarting", "failed"):
        announce(table, 201, state=state)
        assert ready_names(table, 201) == "", state


def test_a_sleeping_replica_is_woken_for_requests_and_by_order_one_at_a_time() -> None:
    table = table_of("ab")
    table.order("a", "sleep")
    assert (table.order_of("a"), table.order_of("b")) == ("sleep", None)
    announce(table, 1, "a", state="sleeping")
    assert table.order_of("a") is None, "it obeyed"
    assert table.sleeper("demo", 1, 0) is None
    assert table.sleeper("demo", 1, 1) is row(table, "a"), "requests wait although b is ready"
    announce(table, 1, "b", load=EngineLoad(8, 2))
    assert table.sleeper("demo", 1, 0) is row(table, "a"), "they wait in the engine"
    announce(table, 1, "b", state="sleeping")
    assert (table.model_state("demo", 1), ready_names(table, 1)) == ("sleeping", "")
    table.order("b", "sleep")
    assert table.order_of("b") is None, "it sleeps already"
    table.order("a", "wake")
    assert table.order_of("a") == "wake"
    announce(table, 2, "a", state="waking")
    assert table.order_of("a") is None
    assert (table.sleeper("demo", 2, 5), table.model_state("demo", 2)) == (None, "loading")
    announce(table, 3, "a")
    assert table.sleeper("demo", 3, 0) is None
    announce(table, 4, "a", state="sleeping")
    table.drain("a")
    assert table.sleeper("demo", 4, 1) is row(table, "b")
    table = table_of("ab")
    slipped = table.begin("demo", 1, RoutingHints(replica="b"))  # it wakes the replica that has it
    for name in "ab":
        announce(table, 2, name, state="sleeping")
    assert slipped is table.sleeper("demo", 2, 0)


def test_a_busy_replica_is_better_than_none_and_alone_has_what_it_stored() -> None:
    table = table_of("ab")
    announce(table, 0, state="busy", lease_s=1e6)
    stored = RoutingHints(replica="a")
    assert (ready_names(table, 1), begin(table, 3), begin(table, 1, stored)) == ("b", "bbb", "a")
    assert table.begin("demo", 1, stored, avoid=["a"]) is row(table, "b")
    for _ in range(3):
        table.note_failure(row(table, "b"), 1)
    assert (ready_names(table, 1), table.model_state("demo", 1)) == ("a", "ready"), "and better than an ejected one"
    table.order("a", "sleep")
    assert table.order_of("a") == "sleep", "when it is done"
    busy = row(table)
    for heard_at, since in ((0.0, 5.0), (4.0, 5.0), (6.0, None)):
        busy.silent_since, busy.heard_at = None, heard_at
        busy.note_probe(True, 5.0)
        assert busy.silent_since == since, "a machine whose streams go on is not off, whatever its backlog"


def test_request_in_flight_survives_lease_and_forget() -> None:
    table = table_of("a", lease_s=10)
    replica = table.begin("demo", now=1)
    assert replica is not None
    assert table.begin("demo", now=99) is None
    assert table.view(99, 0, 1).replicas[0].in_flight == 1
    table.forget("a")
    assert table.in_flight_total == 1
    assert table.lapsed_at_work(99) == [replica], "its machine may be off: it is probed until the requests end"
    table.end(replica)
    assert table.in_flight_total == 0 and table.lapsed_at_work(99) == []


def test_drain_holds_over_announcements_until_it_is_taken_back_or_the_replica_forgotten() -> None:
    table = table_of("")
    assert table.drain("a") == 0, "before its first announcement"
    assert (announce(table, 0), ready_names(table, 0)) == (True, "")
    table.undrain("a")
    assert (announce(table, 1), ready_names(table, 1)) == (False, "a")
    begin(table, 1)
    assert (table.drain("a"), table.drain("a")) == (1, 1)
    table.forget("a")
    assert (table.view(0, 0, 0).replicas, announce(table, 1)) == ((), False)


@pytest.mark.parametrize(
    "end",
    [
        lambda table: table.forget("a"),
        lambda table: table.undrain("a"),
        lambda table: table.take_lapsed(now=100),
        lambda table: (table.announce(STOPPING, now=1), table.announce(READY, now=2)),
    ],
    ids=["forgotten", "taken back", "its lease ended", "a successor announces"],
)
def test_an_order_to_leave_holds_until_the_replica_is_gone(end: Callable[[ReplicaTable], object]) -> None:
    table = table_of("")
    assert table.leave("a") == 0, "before its first announcement"
    announce(table, 0)
    assert (table.must_leave("a"), ready_names(table, 0)) == (True, "")
    table.leave("a")
    end(table)
    assert table.must_leave("a") is False
    assert announce(table, 3) is False


def test_suspect_is_passed_over_until_it_announces() -> None:
    table = table_of("a")
    assert [table.suspect(row(table), OLD_ADDRESS) for _ in range(2)] == [True, False]
    assert ready_names(table, 1) == ""
    announce(table, 2, url="http://127.0.0.1:41235")
    assert ready_names(table, 2) == "a"
    assert table.suspect(row(table), OLD_ADDRESS) is False, "an old address says nothing about the new one"
    assert ready_names(table, 2) == "a"


def test_names_resolve_to_declared_models_and_adapters_and_wanted_replicas_are_taken_if_they_are_there() -> None:
    table = table_of("ab")
    names = ("demo", "alias", "other", "nope", None, "demo:sql", "sql")
    assert [table.resolve(name) for name in names] == ["demo", "demo", "other", None, None, "demo", None]
    assert ReplicaTable(MODELS[:1]).resolve(None) == "demo"
    announce(table, 0, "b", adapters=("sql",))
    assert table.resolve("sql") == "demo"
    assert begin(table, 9, RoutingHints(adapter="sql")) == begin(table, 9, RoutingHints(replica="b")) == "b" * 9
    assert table.begin("demo", 1, RoutingHints(replica="b"), avoid=["b"]) is row(table, "a")
    assert table.begin("demo", 1, RoutingHints(replica="z")) is not None
    table.forget("b")
    assert table.resolve("sql") is None


def test_model_state_and_what_a_request_waits_for_follow_what_replicas_announce() -> None:
    table = ReplicaTable(MODELS, max_in_flight=1)
    assert (table.model_state("demo", 0), table.retry_after_s("demo", 0)) == ("unavailable", RETRY_AFTER_S)
    assert (table.coming_words("demo", 0), table.waiting("demo", 0, 3)) == ("waiting", Waiting("waiting", 3))
    announce(table, 0, "a", state="queued", url=None, lease_s=60)
    assert table.waiting("demo", 0, 0) == Waiting("queued", 0)
    progress = Progress("weights", 17, 30, fraction=0.45678, eta_s=42.0)
    announce(table, 0, "b", state="loading", url=None, lease_s=60, progress=progress)
    assert table.waiting("demo", 2.5, 3) == Waiting("loading", 3, 17, 30, 0.457, 39.5), "the one nearest to ready"
    assert (table.coming_words("demo", 0), table.retry_after_s("demo", 10)) == ("loading 46% 42s", 32)
    announce(table, 0, "a", state="loading", url=None, lease_s=60, progress=Progress("weights", eta_s=20.5))
    assert (table.retry_after_s("demo", 10), table.retry_after_s("demo", 50)) == (11, 1)
    assert [table.model_state("demo", now) for now in (1, 61)] == ["loading", "unavailable"]
    announce(table, 62)
    assert [table.model_state(name, 62) for name in ("demo", "other")] == ["ready", "unavailable"]
    assert [table.waiting(name, 62, n) for name, n in (("demo", 3), ("other", 0))] == [
        *(Waiting("queue", 3), Waiting("waiting", 0))
    ]


@pytest.mark.parametrize(
    "change",
    [
        *({"replica": name} for name in ("a b", "0\r\nx: y", "")),
        *({"model": name} for name in ("alias", "nope")),
        *({"lease_s": lease_s} for lease_s in (0, float("nan"), float("inf"))),
        *({"url": url} for url in (None, "https://127.0.0.1:1", "http://127.0.0.1:1/v1", "http://127.0.0.1:99999")),
        {"url": "127.0.0.1:1"},
    ],
)
def test_announcements_that_cannot_be_served_are_refused(change: dict[str, object]) -> None:
    table = ReplicaTable(MODELS)
    with pytest.raises(UserError):
        table.announce(msgspec.structs.replace(READY, **change), now=0)
    assert table.view(0, 0, 0).replicas == ()


# Failures.


def test_failures_in_a_row_eject_and_a_success_between_does_not() -> None:
    table = table_of("ab")
    assert [table.note_failure(row(table), 1) for _ in range(2)] == [False, False]
    row(table).health.succeed()
    assert [table.note_failure(row(table), 1) for _ in range(3)] == [False, False, True]
    assert ready_names(table, 1.5) == "b"
    announce(table, 1.6, lease_s=1e6)
    assert ready_names(table, 1.7) == "b"
    assert table.view(1.7, 0, 0).replicas[0].is_ejected
    assert ready_names(table, 2) == "ab"
    assert table.n_ejections == {"a": 1}
    for name in "ab":
        for _ in range(3):
            table.note_failure(row(table, name), 100)
    assert ready_names(table, 100.1) == "ab", "the last one is never ejected"


def test_ejections_grow_and_are_bounded() -> None:
    record, now, lengths = Health(), 0.0, []
    for _ in range(9):
        while not record.fail(now):
            pass
        lengths.append(record.ejected_until - now)
        now = record.ejected_until
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    failures = [record.fail_for(client) for client in (b"a", b"a", b"b")]  # answers that several clients got in a row
    record.succeed()
    assert [*failures, record.fail_for(b"b")] == [False, False, True, False]


def test_returning_replica_gets_its_share_slowly() -> None:
    record, table = Health(), table_of("ab")
    for _ in range(3):
        record.fail(0)
        table.note_failure(row(table), 0)
    assert [record.share(1 + back_s) for back_s in (0, 2.5, 5)] == [health.RAMP_FLOOR, 0.25, 0.5]
    assert record.fail(7) is True
    assert record.share(9 + health.RAMP_S) == 1
    assert record.n_ejections == 0
    begin(table, 110)
    assert (row(table, "a").in_flight, row(table, "b").in_flight) == (10, 100)


def test_retries_are_a_share_of_requests() -> None:
    budget, n_retries = retries.RetryBudget(), 0
    for n_requests in range(10_000):
        if budget.has_one(0, n_requests):
            budget.take()
            n_retries += 1
    assert 2000 <= n_retries <= 2000 + retries.RETRIES_START + 1
    while budget.has_one(0, 10_000):
        budget.take()
    assert budget.has_one(1.5, 10_000)


# Load.


def test_in_flight_requests_are_spread_and_load_that_others_put_on_an_engine_counts() -> None:
    assert sorted(begin(table_of("abc"), 6)) == list("aabbcc")
    table = table_of("ab")
    announce(table, 1, "a", load=EngineLoad(running=7))
    assert begin(table, 7) == "b" * 7
    for kv_use, weight in ((0.9, 1), (1.0, 0.5)):  # a full cache makes a replica weaker
        announce(table, 2, load=EngineLoad(1, kv_use=kv_use))
        assert round(row(table).weight, 6) == weight


def test_own_requests_are_not_counted_twice() -> None:
    table = table_of("a")
    replicas = [table.begin("demo", 1) for _ in range(5)]
    announce(table, 2, load=EngineLoad(running=5))
    assert row(table).load == 5
    for replica in replicas:
        assert replica is not None
        table.end(replica)
    # The engine's count is older than our last answers.
    announce(table, 3, load=EngineLoad(running=5))
    assert row(table).load == 0
    for now in (4, 5):
        announce(table, now, load=EngineLoad(running=5))
    assert row(table).load == 5


def test_a_request_is_lost_to_an_engine_that_has_reported_none_for_as_long_as_it_is_silent() -> None:
    table = table_of("a")
    assert row(table).why_lost(100, 100) is None
    for now in (10, 11, 12):
        announce(table, now, load=EngineLoad(0))
    assert "reports no running request" in (row(table).why_lost(30, 40) or "")
    assert row(table).why_lost(30, 39) is None and row(table).why_lost(29, 40) is None
    announce(table, 41, load=EngineLoad(1))
    assert row(table).why_lost(90, 90) is None


def test_other_workers_requests_count_and_fill_a_replica() -> None:
    assert begin(table_of("ab", max_in_flight=2), 5).endswith("-")
    totals = new_totals()
    table = table_of("a", max_in_flight=4, totals=totals)
    shared = totals["replica:a:at_once"]
    shared.others = 3
    announce(table, 1, load=EngineLoad(running=4), lease_s=1e6)
    assert row(table).load == 4
    assert begin(table, 2) == "a-"
    assert (shared.own, table.drain("a"), row(table).load) == (1, 1, 5)
    table.undrain("a")
    shared.others = 2
    assert begin(table, 2) == "a-"
    table.end(row(table))
    assert shared.own == 1
