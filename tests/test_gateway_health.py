from __future__ import annotations

import msgspec

from penstock.gateway import retries
from penstock.gateway.accounting.running_totals import Totals, new_totals
from penstock.gateway.config import ServedModel
from penstock.gateway.routing import health
from penstock.gateway.routing.health import Health
from penstock.gateway.routing.replicas import Replica, ReplicaTable, RoutingHints
from penstock.wire.announcement import Announcement, EngineLoad, Progress

READY = Announcement(replica="a", model="demo", state="ready", lease_s=1e6, url="http://127.0.0.1:41234")


def table_of(*names: str, max_in_flight: int | None = None, totals: Totals | None = None) -> ReplicaTable:
    table = ReplicaTable((ServedModel("demo"),), max_in_flight=max_in_flight, totals=totals)
    for name in names:
        table.announce(msgspec.structs.replace(READY, replica=name), now=0)
    return table


def row(table: ReplicaTable, name: str) -> Replica:
    replica = table.find(name)
    assert replica is not None
    return replica


def ready_names(table: ReplicaTable, now: float) -> str:
    return "".join(replica.name for replica in table.ready("demo", now))


def test_failures_in_a_row_eject_and_a_success_between_does_not() -> None:
    table = table_of("a", "b")
    assert [table.note_failure(row(table, "a"), 1) for _ in range(2)] == [False, False]
    row(table, "a").health.succeed()
    assert [table.note_failure(row(table, "a"), 1) for _ in range(3)] == [False, False, True]
    assert ready_names(table, 1.5) == "b"
    table.announce(READY, now=1.6)
    assert ready_names(table, 1.7) == "b"
    assert table.view(1.7, 0, 0).replicas[0].is_ejected
    assert ready_names(table, 2) == "ab"
    assert table.n_ejections == {"a": 1}


def test_ejections_grow_and_are_bounded() -> None:
    record, now, lengths = Health(), 0.0, []
    for _ in range(9):
        while not record.fail(now):
            pass
        lengths.append(record.ejected_until - now)
        now = record.ejected_until
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_last_replica_is_never_ejected() -> None:
    table = table_of("a", "b")
    for name in "ab":
        for _ in range(3):
            table.note_failure(row(table, name), 1)
    assert ready_names(table, 1.1) == "ab"


def test_returning_replica_gets_its_share_slowly() -> None:
    record = Health()
    for _ in range(3):
        record.fail(0)
    assert [record.share(1 + back_s) for back_s in (0, 2.5, 5)] == [health.RAMP_FLOOR, 0.25, 0.5]
    assert record.fail(7) is True
    assert record.share(9 + health.RAMP_S) == 1
    assert record.n_ejections == 0


def test_returning_replica_takes_little_of_the_load() -> None:
    table = table_of("a", "b")
    for _ in range(3):
        table.note_failure(row(table, "a"), 0)
    for _ in range(110):
        table.begin("demo", 1.0)
    assert (row(table, "a").in_flight, row(table, "b").in_flight) == (10, 100)


def test_retries_are_a_share_of_requests() -> None:
    budget, n_retries = retries.RetryBudget(), 0
    for _ in range(10_000):
        budget.add_request()
        if budget.has_one(0):
            budget.take()
            n_retries += 1
    assert 2000 <= n_retries <= 2000 + retries.RETRIES_START + 1
    while budget.has_one(0):
        budget.take()
    assert budget.has_one(1.5)


# What engines count themselves.


def announce(table: ReplicaTable, name: str, load: EngineLoad, now: float) -> None:
    table.announce(msgspec.structs.replace(READY, replica=name, load=load), now)


def test_load_that_others_put_on_an_engine_counts() -> None:
    table = table_of("a", "b")
    announce(table, "a", EngineLoad(running=7), 1)
    assert {table.begin("demo", 1).name for _ in range(7)} == {"b"}  # type: ignore[union-attr]


def test_own_requests_are_not_counted_twice() -> None:
    table = table_of("a")
    replicas = [table.begin("demo", 1) for _ in range(5)]
    announce(table, "a", EngineLoad(running=5), 2)
    assert row(table, "a").load == 5
    for replica in replicas:
        assert replica is not None
        table.end(replica)
    # The engine's count is older than our last answers.
    announce(table, "a", EngineLoad(running=5), 3)
    assert row(table, "a").load == 0
    announce(table, "a", EngineLoad(running=5), 4)
    announce(table, "a", EngineLoad(running=5), 5)
    assert row(table, "a").load == 5


def test_full_kv_cache_makes_a_replica_weaker() -> None:
    table = table_of("a")
    announce(table, "a", EngineLoad(1, kv_use=0.9), 1)
    assert row(table, "a").weight == 1
    announce(table, "a", EngineLoad(1, kv_use=1.0), 2)
    assert round(row(table, "a").weight, 6) == 0.5


def test_other_workers_requests_count() -> None:
    totals = new_totals()
    table = table_of("a", max_in_flight=9, totals=totals)
    totals["replica:a:at_once"].others = 3
    announce(table, "a", EngineLoad(running=4), 1)
    assert row(table, "a").load == 4
    replica = table.begin("demo", 1)
    assert replica is not None
    assert (totals["replica:a:at_once"].own, table.drain("a"), row(table, "a").load) == (1, 1, 5)
    table.end(replica)
    assert totals["replica:a:at_once"].own == 0


def test_engine_is_idle_since_it_first_said_so() -> None:
    table = table_of("a")
    assert not table.is_idle(row(table, "a"), 100, 0)
    for now in (10, 11, 12):
        announce(table, "a", EngineLoad(0), now)
    assert table.is_idle(row(table, "a"), 40, 30)
    assert not table.is_idle(row(table, "a"), 39, 30)
    announce(table, "a", EngineLoad(1), 41)
    assert not table.is_idle(row(table, "a"), 90, 30)


def test_full_replicas_take_no_more() -> None:
    table = table_of("a", "b", max_in_flight=2)
    begun = [table.begin("demo", 1) for _ in range(5)]
    assert [replica is not None for replica in begun] == [True, True, True, True, False]


def test_what_other_workers_have_on_a_replica_fills_it_too() -> None:
    totals = new_totals()
    table = table_of("a", max_in_flight=3, totals=totals)
    totals["replica:a:at_once"].others = 2
    assert [table.begin("demo", 1) is not None for _ in range(2)] == [True, False]
    totals["replica:a:at_once"].others = 1
    assert table.begin("demo", 1) is not None


# Names.


def test_adapters_go_to_those_who_have_them() -> None:
    table = table_of("a", "b")
    assert table.resolve("demo:sql") == "demo"
    assert table.resolve("sql") is None
    table.announce(msgspec.structs.replace(READY, replica="b", adapters=("sql",)), now=0)
    assert table.resolve("sql") == "demo"
    assert {table.begin("demo", 1, RoutingHints(adapter="sql")).name for _ in range(9)} == {"b"}  # type: ignore[union-attr]
    table.forget("b")
    assert table.resolve("sql") is None


def test_wanted_replica_is_taken_if_it_is_there() -> None:
    table = table_of("a", "b")
    assert {table.begin("demo", 1, RoutingHints(replica="b")).name for _ in range(9)} == {"b"}  # type: ignore[union-attr]
    assert table.begin("demo", 1, RoutingHints(replica="b"), avoid=["b"]).name == "a"  # type: ignore[union-attr]
    assert table.begin("demo", 1, RoutingHints(replica="z")) is not None


def test_progress_is_told_in_words() -> None:
    table = ReplicaTable((ServedModel("demo"),))
    assert table.coming_words("demo", 0) == "waiting"
    progress = Progress("weights", fraction=0.45, eta_s=12.3)
    table.announce(msgspec.structs.replace(READY, state="loading", url=None, progress=progress), now=0)
    assert table.coming_words("demo", 0) == "loading 45% 12s"
