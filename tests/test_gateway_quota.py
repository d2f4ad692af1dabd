"""Quotas: what may pass in any stretch of time, and what is given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.quota import Quota, Refusal
from penstock.gateway.accounting.running_totals import new_totals

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
