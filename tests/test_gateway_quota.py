"""Quotas: what may pass in any stretch of time, what is given back, and what several gateways let in together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rig import Store, ledger_at, writer_of

from penstock.errors import PenstockError
from penstock.gateway.accounting import quota_sync
from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.quota import Quota, Refusal
from penstock.gateway.accounting.quota_sync import QuotaSync
from penstock.gateway.accounting.running_totals import new_totals
from penstock.gateway.accounting.usage_store import UsageStore

Steps = list[tuple[float, int, int]]
steps = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400), st.integers(0, 500)), max_size=60)


@given(steps, st.integers(1, 60))
def test_no_stretch_of_time_lets_in_more_than_a_minute_and_its_length(steps: Steps, rpm: int) -> None:
    quota, now, passed = Quota("k", Limits(rpm=rpm), new_totals(), 0.0), 0.0, []
    for wait_s, _, _ in steps:
        now += wait_s / 20
        if quota.take(now, 0) is None:
            passed.append(now)
            quota.give_back(0, 0)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= rpm + (passed[last] - passed[first]) * rpm / 60 + 1e-6


@given(steps, st.integers(50, 1000))
def test_used_tokens_stay_within_the_rate_and_one_overdraft(steps: Steps, tpm: int) -> None:
    quota, now, used = Quota("k", Limits(tpm=tpm), new_totals(), 0.0), 0.0, 0
    for wait_s, reserved, actual in steps:
        now += wait_s
        if quota.take(now, reserved) is None:
            quota.give_back(reserved, actual)
            used += actual
    assert used <= tpm + now * tpm / 60 + 500


@given(steps)
def test_who_waits_as_long_as_told_is_let_in(steps: Steps) -> None:
    quota, now = Quota("k", Limits(rpm=7, tpm=300), new_totals(), 0.0), 0.0
    for wait_s, reserved, actual in steps:
        now += wait_s
        refusal = quota.take(now, reserved)
        for _ in range(2):  # a second limit may hold back who has waited for the first
            if refusal is not None:
                assert 0 < refusal.retry_after_s < 240
                now += refusal.retry_after_s + 1e-6
                refusal = quota.take(now, reserved)
        assert refusal is None
        quota.give_back(reserved, actual)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=80))
def test_quotas_over_one_total_share_concurrency_and_give_all_of_it_back(steps: list[tuple[int, bool]]) -> None:
    totals = new_totals()
    quotas = [Quota("k", Limits(concurrency=4), totals, 0.0) for _ in range(3)]
    running: list[int] = []
    for worker, begins in steps:
        if begins:
            if quotas[worker].take(0.0, 0) is None:
                running.append(worker)
            else:
                assert len(running) == 4
        elif worker in running:
            running.remove(worker)
            quotas[worker].give_back(0, 0)
        assert len(running) <= 4
    for worker in running:
        quotas[worker].give_back(0, 0)
    assert all(quota.take(0.0, 0) is None for quota in (quotas[0], *quotas))


def test_quotas_over_one_total_share_requests_a_minute() -> None:
    totals = new_totals()
    quotas = [Quota("k", Limits(rpm=10), totals, 0.0) for _ in range(2)]
    assert sum(quotas[turn % 2].take(0.0, 0) is None for turn in range(40)) == 10
    assert sum(quotas[turn % 2].take(6.0, 0) is None for turn in range(40)) == 1
    # A total that loses what others counted gives no more than a full bucket.
    totals["key:k:requests"].others = 100
    quota = Quota("k", Limits(rpm=10), totals, 0.0)
    totals["key:k:requests"].others = 0
    assert sum(quota.take(0.0, 0) is None for _ in range(40)) == 10


def test_request_above_a_minutes_tokens_waits_for_a_full_bucket_and_a_budget_ends_at_its_last_dollar() -> None:
    quota = Quota("k", Limits(tpm=60), new_totals(), 0.0)
    assert quota.take(0.0, 600) is None
    assert dict(quota.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"0"
    quota.give_back(600, 30)
    assert quota.take(0.0, 600) == Refusal("tokens", 60, 30.0)
    assert quota.take(30.1, 600) is None
    budget = Quota("k", Limits(budget_usd=1.0), new_totals(), 0.0)
    for spent_usd, refusal in ((0.99, None), (1.0, Refusal("budget", 1.0, 0.0))):
        budget.spent_usd = spent_usd
        assert budget.take(0.0, 5) == refusal


def test_headers_tell_only_of_limits_that_there_are() -> None:
    quota = Quota("k", Limits(rpm=60), new_totals(), 0.0)
    quota.take(0.0, 5)
    assert dict(quota.headers(0.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.000s",
    }
    assert Quota("k", Limits(), new_totals(), 0.0).headers(0.0) == ()


# Several gateways, which tell each other by a store, while they can.


class Shelf:
    """A store of counts with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_away = False
        self.rows: dict[tuple[str, str], tuple[int, float]] = {}

    def put_counts(self, gateway: str, counts: Mapping[str, int]) -> None:
        self.rows |= {(gateway, name): (count, self.now) for name, count in counts.items()}

    def others_counts(self, gateway: str, fresh_s: float, *, are_all: bool) -> list[tuple[str, str, int, bool]]:
        if self.is_away:
            raise PenstockError("away")
        counts = [(*key, count, at > self.now - fresh_s) for key, (count, at) in self.rows.items() if key[0] != gateway]
        return [row for row in counts if are_all or row[3]]

    def remove_counts(self, gateway: str) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key[0] != gateway}

    def forget_gateways(self, silent_s: float) -> None:
        heard = {gateway for (gateway, _), (_, at) in self.rows.items() if at > self.now - silent_s}
        self.rows = {key: row for key, row in self.rows.items() if key[0] in heard}


class Side:
    """A gateway of one process."""

    def __init__(self, shelf: Shelf, name: str, limits: Limits) -> None:
        self._shelf = cast(UsageStore, shelf)
        self.totals = new_totals()
        self.sync = QuotaSync(name, self.totals)
        self.quota = Quota("k", limits, self.totals, 0.0)

    def leave(self) -> None:
        self.sync.leave(self._shelf)

    def total(self, kind: str) -> int:
        return self.totals[f"key:k:{kind}"].now()

    def let_in(self, now: float, n_requests: int, n_tokens: int = 0) -> int:
        return sum(self.quota.take(now, n_tokens) is None for _ in range(n_requests))


def turn(*sides: Side) -> None:
    for side in sides:
        try:
            side.sync.turn(side._shelf)
        except PenstockError:
            side.sync.miss_turn()


def sides(limits: Limits, names: str = "ab") -> tuple[Shelf, list[Side]]:
    shelf = Shelf()
    gateways = [Side(shelf, name, limits) for name in names]
    turn(*gateways, *gateways)
    return shelf, gateways


def test_gateways_know_of_each_other_after_a_turn_and_make_up_for_what_was_too_much() -> None:
    _, (a, b) = sides(Limits(rpm=60))
    assert (a.let_in(0.0, 100), b.let_in(0.0, 100)) == (60, 60)
    turn(a, b, a)
    # 60 too many were let in: for a minute there is none, and after that as many as for one gateway.
    assert (a.let_in(59.0, 10), b.let_in(59.0, 10)) == (0, 0)
    n_passed = 0
    for second in range(61, 361):
        for side in (a, b):
            n_passed += side.let_in(float(second), 5)
            turn(side)
    assert 295 <= n_passed <= 310


def test_requests_at_once_are_given_back_also_by_a_gateway_that_died_or_ended() -> None:
    shelf, (a, b, c) = sides(Limits(concurrency=4), "abc")
    assert a.let_in(0.0, 3) == 3
    turn(a, b)
    assert b.let_in(0.0, 3) == 1
    turn(b, c)
    assert c.let_in(0.0, 1) == 0
    b.quota.give_back(0, 0)
    turn(b, c)
    assert c.let_in(0.0, 2) == 1
    # A request that lasts is counted again and again; a silent gateway's are forgotten.
    for _ in range(3):
        shelf.now += 2.0
        turn(a, b)
    assert b.let_in(0.0, 5) == 1
    shelf.now += quota_sync.FRESH_S
    turn(b, c)
    assert c.let_in(0.0, 5) == 2
    turn(c, a)
    a.quota.give_back(0, 0)
    assert a.let_in(0.0, 1) == 0
    c.leave()
    turn(a)
    assert a.let_in(0.0, 5) == 1


def refusals(side: Side, now: float, n_tokens: int = 0) -> bool | None:
    """Whether a refusal is uncertain; None where there is none."""
    refusal = side.quota.take(now, n_tokens)
    return None if refusal is None else refusal.is_unsure


def catch_up(*sides: Side) -> None:
    for side in sides:
        side.sync.catch_up(side._shelf)


def test_refusals_for_what_others_have_now_are_uncertain_until_they_catch_up() -> None:
    _, (a, b) = sides(Limits(concurrency=1))
    assert a.let_in(0.0, 1) == 1
    turn(a, b)
    assert (refusals(b, 0.0), refusals(a, 0.0)) == (True, False)
    # One waits already: this one would not be next.
    b.quota.n_held = 1
    assert refusals(b, 0.0) is False
    b.quota.n_held = 0
    assert b.quota.refuse_body() is None
    assert a.quota.give_back(0, 0)
    catch_up(a, b)
    assert refusals(b, 0.0) is None
    assert a.sync.has_others
    shelf, (alone,) = sides(Limits(concurrency=1), "a")
    assert (alone.let_in(0.0, 1), refusals(alone, 0.0), alone.sync.has_others) == (1, False, False)
    alone.sync.miss_turn()  # one that is behind waits for its turn
    catch_up(alone)
    assert ("a", "key:k:at_once") not in shelf.rows


def test_tokens_that_others_have_reserved_may_come_back() -> None:
    _, (a, b) = sides(Limits(tpm=600))
    assert a.let_in(0.0, 1, 500) == 1
    turn(a, b)
    assert (refusals(b, 0.0, 200), refusals(a, 0.0, 200)) == (True, False)
    assert a.quota.give_back(500, 50)
    catch_up(a, b)
    assert refusals(b, 0.0, 200) is None
    # What was used stays used.
    assert a.let_in(0.0, 1, 350) == 1
    a.quota.give_back(350, 350)
    catch_up(a, b)
    assert refusals(b, 0.0, 200) is False


def test_without_the_store_each_counts_for_itself_and_reports_it_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, (a, b) = sides(Limits(rpm=60, concurrency=100))
    assert b.let_in(0.0, 20) == 20
    turn(b, a)
    shelf.is_away = True
    monkeypatch.setattr(quota_sync, "FRESH_S", -1.0)
    turn(a, b)
    monkeypatch.undo()
    # What the others have at once is unknown; what they took is not forgotten.
    assert (a.total("at_once"), a.total("requests")) == (0, 20)
    assert a.let_in(0.0, 100) == 40
    shelf.is_away = False
    shelf.now += 60
    turn(a, b)
    assert b.total("requests") == 60


def test_a_gateway_that_starts_later_or_again_counts_nothing_twice() -> None:
    shelf, (a,) = sides(Limits(rpm=60), "a")
    assert a.let_in(0.0, 30) == 30
    turn(a)
    late = Side(shelf, "late", Limits(rpm=60))
    turn(late)
    assert (late.total("requests"), late.let_in(0.0, 10)) == (0, 10)
    turn(late, a)
    assert a.total("requests") == 40
    # One that ends takes its counts along, and its successor begins anew.
    late.leave()
    turn(a)
    again = Side(shelf, "again", Limits(rpm=60))
    turn(again, a, again)
    assert (a.total("requests"), again.total("requests")) == (40, 0)


def test_gateways_that_are_silent_for_a_day_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_sync, "_HEARTBEAT_S", 0.0)
    shelf, (a, b) = sides(Limits(rpm=60))
    b.let_in(0.0, 5)
    turn(b)
    shelf.now += quota_sync.FORGET_S + 1
    turn(a, a)
    assert {gateway for gateway, _ in shelf.rows} == {"a"}
    # It was not dead, and all it ever counted is reported again: five of a minute's sixty.
    turn(b, a)
    assert a.let_in(0.0, 100) >= 50


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


def test_two_ledgers_sync_totals_by_their_store(place: str) -> None:
    everybodys = [new_totals() for _ in range(2)]
    ledgers = [ledger_at(place, totals) for totals in everybodys]
    first, second = (Quota("k", Limits(rpm=60, concurrency=1000), totals, time.monotonic()) for totals in everybodys)
    for ledger in (*ledgers, *ledgers):
        ledger._turn()
        assert not writer_of(ledger).is_failing
    now = time.monotonic()
    assert sum(first.take(now, 0) is None for _ in range(70)) in (60, 61)
    for ledger in ledgers:
        ledger._turn()
    assert sum(second.take(now, 0) is None for _ in range(70)) <= 1
    with Store(place) as store:
        names = {row[1] for row in store.usage.others_counts("", 60.0, are_all=False)}
        assert names == {"", "key:k:requests", "key:k:at_once"}
        for silent_s, n_gateways in ((86400.0, 2), (-1.0, 0)):
            store.usage.forget_gateways(silent_s)
            assert len({row[0] for row in store.usage.others_counts("", 60.0, are_all=True)}) == n_gateways
    for ledger in ledgers:
        ledger.close()
