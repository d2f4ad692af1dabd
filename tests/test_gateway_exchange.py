"""Quotas over several gateways: what each lets in while they tell each other by a store, and while they cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from gateway_rig import CHAT, Rig, echo, rig_with, run
from test_store import postgres

from penstock.errors import PenstockError
from penstock.gateway.accounting import quota_sync
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.quota import Quota
from penstock.gateway.accounting.quota_sync import Exchange
from penstock.gateway.accounting.store import Limits, Store
from penstock.gateway.workers.shared_memory import SharedCounters

__all__ = ["postgres"]  # the fixture


class Shelf:
    """A store of counts with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_away = False
        self.rows: dict[tuple[str, str], tuple[int, float]] = {}

    def put_counts(self, gateway: str, counts: Mapping[str, int]) -> None:
        if self.is_away:
            raise PenstockError("away")
        self.rows |= {(gateway, name): (count, self.now) for name, count in counts.items()}

    def others_counts(self, gateway: str, fresh_s: float, *, are_all: bool) -> list[tuple[str, str, int, bool]]:
        if self.is_away:
            raise PenstockError("away")
        found = [(*key, count, at > self.now - fresh_s) for key, (count, at) in self.rows.items() if key[0] != gateway]
        return [row for row in found if are_all or row[3]]

    def forget_gateways(self, silent_s: float) -> None:
        if self.is_away:
            raise PenstockError("away")
        heard = {gateway for (gateway, _), (_, at) in self.rows.items() if at > self.now - silent_s}
        self.rows = {key: row for key, row in self.rows.items() if key[0] in heard}


class Side:
    """A gateway of one process."""

    def __init__(self, shelf: Shelf, name: str, limits: Limits) -> None:
        self._shelf = cast(Store, shelf)
        self.exchange = Exchange(name, SharedCounters(1, 64, passing=(":at_once",)))
        self.quota = Quota("k", limits, self.exchange, 0.0)

    def turn(self) -> None:
        try:
            self.exchange.turn(self._shelf)
        except PenstockError:
            self.exchange.miss_turn()

    def let_in(self, now: float, n_requests: int, n_tokens: int = 0) -> int:
        return sum(self.quota.take(now, n_tokens) is None for _ in range(n_requests))


def sides(limits: Limits, names: str = "ab") -> tuple[Shelf, list[Side]]:
    shelf = Shelf()
    found = [Side(shelf, name, limits) for name in names]
    for _ in range(2):
        for side in found:
            side.turn()
    return shelf, found


def test_gateways_know_of_each_other_after_a_turn_and_make_up_for_what_was_too_much() -> None:
    _, (a, b) = sides(Limits(rpm=60))
    assert (a.let_in(0.0, 100), b.let_in(0.0, 100)) == (60, 60)
    for side in (a, b, a):
        side.turn()
    # 60 too many were let in: for a minute there is none, and after that as many as for one gateway.
    assert (a.let_in(59.0, 10), b.let_in(59.0, 10)) == (0, 0)
    n_passed = 0
    for second in range(61, 361):
        for side in (a, b):
            n_passed += side.let_in(float(second), 5)
            side.turn()
    assert 295 <= n_passed <= 310


def test_tokens_are_settled_everywhere() -> None:
    _, (a, b) = sides(Limits(tpm=600))
    assert a.let_in(0.0, 1, 500) == 1
    a.turn()
    b.turn()
    assert b.let_in(0.0, 1, 200) == 0
    a.quota.give_back(500, 50)
    a.turn()
    b.turn()
    assert b.let_in(0.0, 1, 200) == 1


def test_requests_at_once_are_given_back_also_by_a_gateway_that_died() -> None:
    shelf, (a, b, c) = sides(Limits(concurrency=4), "abc")
    assert a.let_in(0.0, 3) == 3
    a.turn()
    b.turn()
    assert b.let_in(0.0, 3) == 1
    b.turn()
    c.turn()
    assert c.let_in(0.0, 1) == 0
    b.quota.give_back(0, 0)
    b.turn()
    c.turn()
    assert c.let_in(0.0, 2) == 1
    # A request that lasts is told again and again; a silent gateway's are forgotten.
    for _ in range(3):
        shelf.now += 2.0
        a.turn()
        b.turn()
    assert b.let_in(0.0, 5) == 1
    shelf.now += quota_sync.FRESH_S
    b.turn()
    c.turn()
    assert c.let_in(0.0, 5) == 2


def test_without_the_store_each_counts_for_itself_and_tells_it_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, (a, b) = sides(Limits(rpm=60, concurrency=100))
    assert b.let_in(0.0, 20) == 20
    b.turn()
    a.turn()
    shelf.is_away = True
    monkeypatch.setattr(quota_sync, "FRESH_S", -1.0)
    for side in (a, b):
        side.turn()
    monkeypatch.undo()
    # What the others have at once nobody knows; what they took is not forgotten.
    assert a.exchange.total(a.exchange.column("key:k:at_once") or 0) == 0
    assert a.exchange.total(a.exchange.column("key:k:requests") or 0) == 20
    assert a.let_in(0.0, 100) == 40
    shelf.is_away = False
    shelf.now += 60
    for side in (a, b):
        side.turn()
    assert b.exchange.total(b.exchange.column("key:k:requests") or 0) == 60


def test_a_gateway_that_starts_later_or_again_counts_nothing_twice() -> None:
    shelf, (a,) = sides(Limits(rpm=60), "a")
    assert a.let_in(0.0, 30) == 30
    a.turn()
    late = Side(shelf, "late", Limits(rpm=60))
    late.turn()
    assert late.exchange.total(late.exchange.column("key:k:requests") or 0) == 0
    assert late.let_in(0.0, 10) == 10
    late.turn()
    a.turn()
    column = a.exchange.column("key:k:requests") or 0
    assert a.exchange.total(column) == 40
    # Worker 0 of it is started again: the counts are in memory that outlives it.
    again = Exchange("late", late.exchange._counters)
    again.column("key:k:requests")
    for _ in range(2):
        again.turn(cast(Store, shelf))
        a.turn()
    assert a.exchange.total(column) == 40


def test_gateways_that_are_silent_for_a_day_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_sync, "_HEARTBEAT_S", 0.0)
    shelf, (a, b) = sides(Limits(rpm=60))
    b.let_in(0.0, 5)
    b.turn()
    shelf.now += quota_sync.FORGET_S + 1
    a.turn()
    a.turn()
    assert {gateway for gateway, _ in shelf.rows} == {"a"}
    # It was not dead, and all it ever counted is told again: five of a minute's sixty.
    b.turn()
    a.turn()
    assert a.let_in(0.0, 100) >= 50


def test_a_table_without_room_is_one_gateways() -> None:
    exchange_ = Exchange("a", SharedCounters(1, 1))
    column = exchange_.column("key:k:requests")
    assert column is not None
    exchange_.add(column, 2)
    assert (exchange_.total(column), exchange_.column("key:l:requests")) == (2, None)


@pytest.mark.postgres
def test_two_ledgers_exchange_counts_by_postgres(postgres: str) -> None:
    ledgers = [Ledger(postgres) for _ in range(2)]
    quotas = []
    for number, ledger in enumerate(ledgers):
        ledger.exchange = Exchange(f"g{number}", SharedCounters(1, 64, passing=(":at_once",)))
        quotas.append(Quota("k", Limits(rpm=60, concurrency=1000), ledger.exchange, time.monotonic()))
    for ledger in (*ledgers, *ledgers):
        ledger._turn()
        assert not ledger.is_failing
    now = time.monotonic()
    assert sum(quotas[0].take(now, 0) is None for _ in range(70)) in (60, 61)
    for ledger in ledgers:
        ledger._turn()
    assert sum(quotas[1].take(now, 0) is None for _ in range(70)) <= 1
    # It goes away and comes back.
    store = ledgers[1]._store
    pid = store._all("SELECT pg_backend_pid()", ())[0][0]
    ledgers[0]._store._all("SELECT pg_terminate_backend(%s)", (pid,))
    found = []
    for _ in range(2):
        ledgers[1]._turn()
        found.append(ledgers[1].is_failing)
    assert found == [True, False]
    store.forget_gateways(86400.0)
    assert {row[0] for row in store.others_counts("", 60.0, are_all=False)} == {"g0", "g1"}
    store.forget_gateways(-1.0)
    assert store.others_counts("", 60.0, are_all=True) == []
    for ledger in ledgers:
        ledger.close()


@pytest.mark.postgres
def test_two_gateways_on_one_postgres_keep_a_limit_together(postgres: str) -> None:
    store = Store(postgres)
    _, secret = store.create_key("both", Limits(rpm=6), time.time())

    async def test() -> None:
        changes = {"store": postgres, "auth": "keys"}
        async with rig_with(echo, **changes) as (_, _, first), rig_with(echo, **changes) as (_, _, second):
            await asyncio.sleep(1.2)  # two turns of both
            for _ in range(6):
                first.post(CHAT, headers=f"Authorization: Bearer {secret}\r\n")
                assert (await first.response())[0].status == 200
            await asyncio.sleep(1.2)
            second.post(CHAT, headers=f"Authorization: Bearer {secret}\r\n")
            assert (await second.error())[0] == 429

    run(asyncio.new_event_loop, test())
    store.close()


def test_a_file_is_one_gateways_store(tmp_path: Path) -> None:
    async def test() -> None:
        async with Rig(store=str(tmp_path / "store.sqlite")) as rig:
            assert rig.gateway.books.ledger is not None
            assert rig.gateway.books.ledger.exchange is None

    run(asyncio.new_event_loop, test())
