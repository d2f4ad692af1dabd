"""The policy on single cases: metrics, limits as HPA has them, schedules, zero, and what its sentences say."""

from __future__ import annotations

import msgspec
import pytest

from penstock.deployment.autoscale import Policy, Recent, ReplicaSample, Sample, State, scale
from penstock.spec.deployment import Replicas, ScalingPolicy, ScalingRules, ScheduledMin
from penstock.testing.scaling.comparison import Follower

MONDAY_9_UTC = 1_732_525_200.0  # 2024-11-25 09:00


def sample(t: float, rate: int = 0, held: int = 0, ready: int = 0, **fields: object) -> Sample:
    """`rate` requests of 1,200 and 300 tokens: 0.3 replicas each."""
    replicas = tuple(ReplicaSample(str(n), running=rate) for n in range(ready))
    made = Sample(t, rate, rate * 1200, rate * 300, rate + held, held, rate, rate, replicas)
    return msgspec.structs.replace(made, **fields)


def numbers(policy: Policy, rows: list[Sample], state: State = State()) -> list[int]:  # noqa: B008 - frozen
    follower = Follower(policy)
    follower.state = state
    return [follower(row) for row in rows]


def bounded(least: int = 1, most: int = 12, **fields: object) -> Replicas:
    return msgspec.structs.replace(Replicas(min=least, max=most), **fields)


def test_a_load_is_divided_by_what_a_replica_can_with_a_reserve_or_by_the_rate_that_is_asked_for() -> None:
    assert numbers(Policy(bounded()), [sample(float(t), 10) for t in range(200)])[-1] == 4  # 3 + 0.3 * sqrt(3) = 3.52
    by_rate = Policy(bounded(metric="rate", target=3.0))
    assert numbers(by_rate, [sample(float(t), 10) for t in range(7000)])[-1] == 4


@pytest.mark.parametrize("every_s", [0.25, 0.5, 0.9, 2.0, 5.0, 10.0])
def test_samples_may_come_faster_or_slower_than_each_second(every_s: float) -> None:
    def asked(every: float) -> int:
        rows = [
            Sample(n * every, arrivals=round(20 * every), prompt_tokens=round(24_000 * every))
            for n in range(1, round(300 / every))
        ]
        return numbers(Policy(bounded()), rows)[-1]

    assert asked(every_s) == asked(1.0) == 3  # 2 + 0.3 * sqrt(2) = 2.42


@pytest.mark.parametrize(("held", "start_s", "most"), [(10, 20.0, 5), (10_000, 100.0, 5), (10_000, 900.0, 6)])
def test_a_queue_orders_the_reserve_of_the_load_however_long_it_is(held: int, start_s: float, most: int) -> None:
    rows = [sample(float(t), 10, held=held if t >= 200 else 0, ready=4) for t in range(230)]
    assert max(numbers(Policy(bounded(), start_s), rows)) == most  # 3 and 0.75 of the root; 1.25 from 300 s on


@pytest.mark.parametrize(
    ("metric", "target", "row", "expected"),
    [
        ("waiting", None, sample(0.0, 16, held=25, ready=4), 4),  # 64 running fill one, 25 / 10
        ("waiting", 5.0, sample(0.0, 16, held=25, ready=4), 6),
        ("in_flight", None, sample(0.0, in_flight=200), 4),
        ("in_flight", 20.0, sample(0.0, in_flight=200), 10),
        ("kv", 0.5, sample(0.0, replicas=(ReplicaSample("0", kv_use=0.9), ReplicaSample("1", kv_use=0.8))), 4),
    ],
)
def test_other_metrics_divide_the_sum_by_the_target(
    metric: str, target: float | None, row: Sample, expected: int
) -> None:
    policy = Policy(bounded(metric=metric, target=target))
    assert scale(Recent((row,)), State(replicas=1), policy, 0.0).replicas == expected


def test_up_allows_so_many_pods_or_percent_in_a_period() -> None:
    rules = ScalingRules(policies=(ScalingPolicy("Pods", 1, 60), ScalingPolicy("Percent", 100, 60)))
    rows = [sample(float(t), 30) for t in range(200)]
    found = numbers(Policy(bounded(up=rules)), rows)
    assert [found[at] for at in (30, 70, 130, 190)] == [2, 4, 8, 10]  # 1 doubles each minute, up to what is needed
    assert numbers(Policy(bounded(up=msgspec.structs.replace(rules, select_policy="Min"))), rows)[190] == 5
    assert max(numbers(Policy(bounded(up=ScalingRules(select_policy="Disabled"))), rows)) == 1
    # And waits until it was needed for the whole window.
    rules = ScalingRules(stabilization_window_seconds=60)
    rows = [sample(float(t), 30 if t >= 100 else 3) for t in range(300)]
    found = numbers(Policy(bounded(up=rules)), rows)
    assert found[150] == found[99] and found[250] > 8


def test_down_keeps_the_largest_of_the_window_and_goes_in_steps() -> None:
    rules = ScalingRules(600, (ScalingPolicy("Pods", 2, 60),))
    rows = [sample(float(t), 30 if t < 200 else 3) for t in range(1400)]
    found = numbers(Policy(bounded(down=rules)), rows)
    assert found[199] == 11 and min(found[199:790]) == 11
    assert all(before - after <= 2 for before, after in zip(found, found[59:], strict=False)) and found[-1] <= 3
    assert numbers(Policy(bounded(down=ScalingRules(select_policy="Disabled"))), rows)[-1] == 11


def test_a_schedule_is_a_minimum_that_is_ready_when_it_begins() -> None:
    floor = ScheduledMin(min=5, hours="10:00-11:00", days=("mon",), time_zone="Europe/Berlin")  # 09:00 in UTC
    policy = Policy(bounded(schedule=(floor,)), start_s=300.0)
    at = {minute: numbers(policy, [sample(MONDAY_9_UTC + 60.0 * minute)])[0] for minute in (-6, -5, 0, 59, 61)}
    assert at == {-6: 1, -5: 5, 0: 5, 59: 5, 61: 1}


def test_at_zero_a_request_orders_one_and_the_last_ends_after_idle_s() -> None:
    policy = Policy(bounded(0, 4, idle_s=120.0), start_s=20.0)
    quiet = [sample(float(t)) for t in range(100)]
    assert numbers(policy, quiet, State(t=-1.0, replicas=0)) == [0] * 100
    woken = [*quiet, sample(100.0, 1, held=1), *(sample(100.0 + t, ready=1) for t in range(1, 200))]
    found = numbers(policy, woken, State(t=-1.0, replicas=0))
    assert found[100] == 1 and found[215] == 1 and found[240] == 0


def test_a_pause_that_ended_often_is_kept_over() -> None:
    """Half a minute of load every five: what costs a start each time is kept."""
    rows = [sample(float(t), 20 if t % 300 < 30 else 1) for t in range(7200)]
    found = numbers(Policy(bounded(), start_s=100.0), rows)
    assert min(found[3600:]) >= 5 > min(found[:600])


def test_a_replica_that_starts_for_ever_holds_nothing_up() -> None:
    stuck = (ReplicaSample("1", "starting", 5000.0),)
    rows = [sample(float(t), 1, replicas=stuck) for t in range(400)]
    assert numbers(Policy(bounded()), rows, State(t=-1.0, replicas=6))[-1] == 1


@pytest.mark.parametrize(("drained", "ready", "most"), [(1, 1, 5), (0, 1, 7), (0, 9, 10)])
def test_a_queue_that_gets_no_shorter_makes_it_careful_and_orders_one(drained: int, ready: int, most: int) -> None:
    rows = [sample(float(t), 10, held=500 - t * drained, ready=ready) for t in range(300)]
    assert max(numbers(Policy(bounded()), rows)) == most  # the load is 3, or 1.5 times as much


def test_what_was_late_makes_it_keep_more_for_longer() -> None:
    """The same minute of load an hour; only the promises differ."""

    def when_dropped(n_late: int) -> int:
        rows = [sample(float(t), 20 if t < 60 else 2) for t in range(1500)]
        rows = [msgspec.structs.replace(row, ttft_good=row.ttft_total - min(row.ttft_total, n_late)) for row in rows]
        found = numbers(Policy(bounded()), rows)
        return next(t for t in range(61, 1500) if found[t] < max(found))

    kept, broken = when_dropped(0), when_dropped(1)
    assert kept < 61 + 200 and broken > 61 + 300


def test_at_zero_what_past_load_needed_starts_nothing() -> None:
    policy = Policy(bounded(0, 4), start_s=20.0)
    busy = scale(Recent(tuple(sample(float(t), 2, ready=1) for t in range(40))), State(), policy, 39.0)
    ended = msgspec.structs.replace(busy.state, replicas=0)
    gone = (ReplicaSample("0", "starting"),)
    quiet = scale(Recent((sample(41.0, replicas=gone),)), ended, policy, 41.0)
    assert (quiet.replicas, quiet.reason) == (0, "keeps 0: no request for 2 s")
    assert scale(Recent((sample(42.0, held=1),)), quiet.state, policy, 42.0).replicas == 1
