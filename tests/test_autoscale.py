"""The policy on single cases: metrics, limits as HPA has them, schedules, zero, and what its sentences say."""

from __future__ import annotations

import msgspec
import pytest

from penstock.deployment.autoscale import Policy, Recent, ReplicaSample, Sample, State, scale
from penstock.spec.deployment import Replicas, ScalingPolicy, ScalingRules, ScheduledMin

MONDAY_9_UTC = 1_732_525_200.0  # 2024-11-25 09:00


def sample(t: float, rate: int = 0, held: int = 0, ready: int = 0, **fields: object) -> Sample:
    """`rate` requests of 1,200 and 300 tokens: 0.3 replicas each."""
    replicas = tuple(ReplicaSample(str(n), running=rate) for n in range(ready))
    made = Sample(t, rate, rate * 1200, rate * 300, rate + held, held, rate, rate, replicas)
    return msgspec.structs.replace(made, **fields)


def numbers(policy: Policy, rows: list[Sample], state: State = State()) -> list[int]:  # noqa: B008 - frozen
    found = []
    for row in rows:
        decision = scale(Recent((row,)), state, policy, row.t)
        state = decision.state
        found.append(decision.replicas)
    return found


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


def test_a_ramp_is_answered_before_it_arrives() -> None:
    rows = [sample(float(t), t // 40) for t in range(600)]
    slow, quick = (numbers(Policy(bounded(), start_s=start_s), rows)[-1] for start_s in (300.0, 1.0))
    assert quick == 5 and slow >= 7  # the load of the last two minutes is 3.8 replicas, and 2.3 more in five


def test_a_queue_orders_what_empties_it_within_a_start() -> None:
    rows = [sample(float(t), 10, ready=4) for t in range(200)]
    decision = scale(Recent(tuple(rows)), State(), Policy(bounded()), 199.0)
    full = sample(200.0, 10, held=1000, ready=4)
    later = scale(Recent((full,)), decision.state, Policy(bounded()), 200.0)
    assert decision.replicas == 4 and later.replicas >= 6
    assert "1000 requests wait" in later.reason


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
    least = msgspec.structs.replace(rules, select_policy="Min")
    assert numbers(Policy(bounded(up=least)), rows)[190] == 5
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
    disabled = ScalingRules(select_policy="Disabled")
    assert numbers(Policy(bounded(down=disabled)), rows)[-1] == 11


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


def test_promises_broken_while_requests_queue_make_it_careful() -> None:
    rows = [
        msgspec.structs.replace(sample(float(t), 10, ready=4, ttft_good=2), replicas=(ReplicaSample("0", waiting=1),))
        for t in range(400)
    ]
    assert numbers(Policy(bounded()), rows)[-1] >= 5


def test_a_pause_that_ended_often_is_kept_over() -> None:
    """Half a minute of load every five: what costs a start each time is kept."""
    rows = [sample(float(t), 20 if t % 300 < 30 else 1) for t in range(7200)]
    found = numbers(Policy(bounded(), start_s=100.0), rows)
    assert min(found[3600:]) >= 5 > min(found[:600])


def test_no_sample_keeps_the_number_and_says_so() -> None:
    decision = scale(Recent((sample(0.0, 10),)), State(t=0.0, replicas=7), Policy(bounded()), 16.0)
    assert decision.replicas == 7 and "no sample for 15 s" in decision.reason


def test_a_replica_that_starts_for_ever_holds_nothing_up() -> None:
    stuck = (ReplicaSample("1", "starting", 5000.0),)
    rows = [sample(float(t), 1, replicas=stuck) for t in range(400)]
    assert numbers(Policy(bounded()), rows, State(t=-1.0, replicas=6))[-1] == 1


def test_a_queue_that_stands_orders_one_whatever_the_rates_promise() -> None:
    """Five requests of a few tokens wait for seconds: the replica can do less than was assumed."""
    rows = [sample(float(t), held=5, ready=1, arrivals=1) for t in range(20)]
    found = numbers(Policy(bounded()), rows)
    assert found[2] == 1 and found[8:] == [2] * 12


def test_what_was_late_makes_it_keep_more_for_longer() -> None:
    """The same minute of load an hour; only the promises differ."""

    def when_dropped(n_late: int) -> int:
        rows = [sample(float(t), 20 if t < 60 else 2) for t in range(1500)]
        rows = [msgspec.structs.replace(row, ttft_good=row.ttft_total - min(row.ttft_total, n_late)) for row in rows]
        found = numbers(Policy(bounded()), rows)
        return next(t for t in range(61, 1500) if found[t] < max(found))

    kept, broken = when_dropped(0), when_dropped(1)
    assert kept < 61 + 200 and broken > 61 + 300


def test_a_queue_orders_what_will_have_come_when_a_replica_is_ready() -> None:
    """Six replicas' load on two: the sooner the end of the queue, the more while it grows."""
    rows = [sample(float(t), 20, held=10 * t, ready=2) for t in range(40)]
    assert numbers(Policy(bounded(most=40), start_s=100.0), rows)[-1] > 12


def test_at_zero_what_past_load_needed_starts_nothing() -> None:
    policy = Policy(bounded(0, 4), start_s=20.0)
    busy = scale(Recent(tuple(sample(float(t), 2, ready=1) for t in range(40))), State(), policy, 39.0)
    ended = msgspec.structs.replace(busy.state, replicas=0)
    gone = (ReplicaSample("0", "starting"),)
    quiet = scale(Recent((sample(41.0, replicas=gone),)), ended, policy, 41.0)
    assert (quiet.replicas, quiet.reason) == (0, "keeps 0: no request for 2 s")
    assert scale(Recent((sample(42.0, held=1),)), quiet.state, policy, 42.0).replicas == 1
