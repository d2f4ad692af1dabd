"""What holds for every load: bounds, no overshoot, more load never fewer, nothing ends without data, states survive."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployment.autoscale import STALE_S, Decision, Policy, Recent, ReplicaSample, Sample, State, scale
from penstock.spec.deployment import Replicas, ScalingPolicy, ScalingRules
from penstock.testing.scaling import traces
from penstock.testing.scaling.comparison import Follower, run

pytestmark = pytest.mark.simulation

METRICS = st.sampled_from(("slo", "waiting", "in_flight", "kv"))
STATES: st.SearchStrategy[Literal["starting", "ready", "draining"]] = st.sampled_from(("starting", "ready", "draining"))
COUNTS, STARTS = st.integers(0, 200), st.sampled_from((5.0, 20.0, 100.0, 300.0, 900.0))


@st.composite
def policies(draw: st.DrawFn, metric: str | None = None) -> Policy:
    least = draw(st.integers(0, 3))
    rules = ScalingRules(
        draw(st.sampled_from((None, 0, 120))), (ScalingPolicy("Pods", 2), ScalingPolicy("Percent", 50, 30))
    )
    replicas = Replicas(
        min=least,
        max=draw(st.integers(max(1, least), 12)),
        metric=draw(METRICS) if metric is None else metric,  # type: ignore[arg-type]
        up=draw(st.sampled_from((None, rules))),
        down=draw(st.sampled_from((None, rules))),
        idle_s=draw(st.sampled_from((10.0, 900.0))),
    )
    return Policy(replicas, start_s=draw(STARTS))


@st.composite
def samples(draw: st.DrawFn, t: float) -> Sample:
    arrivals = draw(COUNTS)
    replicas = tuple(
        ReplicaSample(
            str(n), draw(STATES), draw(st.floats(0, 500)), draw(st.integers(0, 64)), draw(st.integers(0, 9)), 0.3
        )
        for n in range(draw(st.integers(0, 5)))
    )
    return Sample(
        t, arrivals, prompt_tokens=arrivals * draw(st.integers(1, 3000)), output_tokens=draw(st.integers(0, 20_000)),
        in_flight=draw(COUNTS), held=draw(st.sampled_from((0, 0, 3, 100))), ttft_good=draw(st.integers(0, 5)),
        ttft_total=draw(st.integers(5, 9)), replicas=replicas,
    )  # fmt: skip


@st.composite
def histories(draw: st.DrawFn, most: int = 40) -> list[Sample]:
    t, rows = draw(st.floats(0, 2e9)), []
    for step in draw(st.lists(st.sampled_from((1.0, 1.0, 1.0, 2.0, 14.0, 40.0, 3600.0)), min_size=1, max_size=most)):
        t += step
        rows.append(draw(samples(t)))
    return rows


def followed(rows: list[Sample], policy: Policy, state: State = State()) -> list[Decision]:  # noqa: B008 - frozen
    decisions = []
    for sample in rows:
        decision = scale(Recent((sample,)), state, policy, sample.t)
        decisions.append(decision)
        state = decision.state
    return decisions


@settings(max_examples=150)
@given(histories(25), policies(), st.data())
def test_more_load_never_gives_fewer_replicas(rows: list[Sample], policy: Policy, data: st.DataObject) -> None:
    *past, last = rows
    state = followed(past, policy)[-1].state if past else State()
    few = st.integers(0, 9)
    busier = tuple(
        msgspec.structs.replace(
            each, running=each.running + data.draw(few), waiting=each.waiting + data.draw(few), kv_use=0.9
        )
        for each in last.replicas
    )
    added = {"arrivals": 200, "prompt_tokens": 99_999, "output_tokens": 9_999, "in_flight": 200, "held": 200}
    counts = {name: getattr(last, name) + data.draw(st.integers(0, most)) for name, most in added.items()}
    more = msgspec.structs.replace(last, replicas=busier, **counts)
    fewer = scale(Recent((last,)), state, policy, last.t)
    assert scale(Recent((more,)), state, policy, more.t).replicas >= fewer.replicas, fewer.reason


@settings(max_examples=60)
@given(histories(), policies(), st.floats(STALE_S + 1, 1e6))
def test_nothing_ends_without_fresh_samples(rows: list[Sample], policy: Policy, later_s: float) -> None:
    before = followed(rows, policy)[-1]
    for recent in (Recent(tuple(rows)), Recent()):
        later = scale(recent, before.state, policy, rows[-1].t + later_s)
        assert later.replicas >= before.replicas and "no sample for 15 s" in later.reason


@settings(max_examples=60)
@given(histories(), policies())
def test_a_decision_is_within_min_and_max_and_follows_from_its_inputs(rows: list[Sample], policy: Policy) -> None:
    before = State()
    for row, decision in zip(rows, followed(rows, policy), strict=True):
        assert policy.replicas.min <= decision.replicas <= policy.replicas.max
        assert decision.state.replicas == decision.replicas and decision.reason and "\n" not in decision.reason
        loaded = msgspec.json.decode(msgspec.json.encode(before), type=State)
        assert loaded == before and scale(Recent((row,)), loaded, policy, row.t) == decision
        before = decision.state
    # Samples that were counted already change nothing.
    assert scale(Recent(tuple(rows)), loaded, policy, row.t) == decision


@settings(max_examples=30)
@given(st.integers(0, 60), st.sampled_from((20.0, 100.0, 300.0)), METRICS, st.integers(0, 8))
def test_a_constant_load_reaches_a_number_in_ten_minutes_and_stays(
    arrivals: int, start_s: float, metric: str, first: int
) -> None:
    policy = Policy(Replicas(min=0, max=12, metric=metric, idle_s=60.0), start_s=start_s)  # type: ignore[arg-type]
    replicas = tuple(ReplicaSample(str(n), running=10) for n in range(first))
    rows = [
        Sample(float(t), arrivals, arrivals * 1000, arrivals * 200, 10 * first, replicas=replicas) for t in range(3600)
    ]
    numbers = [decision.replicas for decision in followed(rows, policy)]
    settled = 599 if start_s < 200 else 999  # three start times pass before the last one ends
    assert len(set(numbers[settled:])) == 1


SHAPES: dict[str, Callable[[float, float], float]] = {
    "square": lambda t, period_s: float(t % period_s >= period_s / 2),
    "ramp": lambda t, period_s: min(1.0, t / period_s),
    "spike": lambda t, period_s: float(t % period_s < 60),
    "noise": lambda _, __: 0.5,
}


def busiest(state: State) -> float:
    """The load of the busiest span that ends now, in replicas."""
    read, written = state.prefill, state.decode
    spans = [span for span in (2, 4, 8, 15, 30, 60) if span <= len(read)]
    loads = [sum(read[-span:]) / (span + 1) + statistics.fmean(written[-max(span, 30) :]) for span in spans]
    return max([*loads, (sum(read) + sum(written)) / max(20, len(read))])


@settings(max_examples=40)
@given(st.sampled_from(sorted(SHAPES)), st.floats(120, 1200), st.floats(1, 8), STARTS, st.integers(0, 99))
def test_no_order_exceeds_the_highest_load_of_two_minutes_and_its_reserve(
    shape: str, period_s: float, height: float, start_s: float, seed: int
) -> None:
    trace = traces.poisson(shape, 1500.0, lambda t: 0.5 + height * SHAPES[shape](t, period_s), seed, 6000.0, 750.0)
    policy, loads = Policy(Replicas(min=1, max=64), start_s), list[float]()
    follower, roots = Follower(policy), 0.75 if start_s <= 100 else 1.25

    def scaler(sample: Sample) -> int:
        before, number = follower.state.replicas or len(sample.replicas), follower(sample)
        loads.append(busiest(follower.state))
        highest = max(loads[-120:])
        assert number <= max(before, math.ceil(highest + roots * math.sqrt(highest))), follower.decisions
        return number

    run(trace, scaler, policy)


@settings(max_examples=60)
@given(histories(20), policies("slo"), st.sampled_from((-1e6, -3600.0, -20.0, 3600.0, 1e6)))
def test_a_jump_of_the_clock_ends_nothing_at_once(rows: list[Sample], policy: Policy, jump_s: float) -> None:
    policy = msgspec.structs.replace(policy, replicas=msgspec.structs.replace(policy.replicas, up=None, down=None))
    state = followed(rows[:-1], policy)[-1].state if rows[1:] else State(replicas=None)
    last = msgspec.structs.replace(rows[-1], t=(rows[-2].t if len(rows) > 1 else rows[-1].t) + 1.0)
    moved = msgspec.structs.replace(last, t=last.t + jump_s)
    here, there = scale(Recent((last,)), state, policy, last.t), scale(Recent((moved,)), state, policy, moved.t)
    # What is kept and why does not depend on what the clock says; only the newest seconds are forgotten with a gap.
    if (state.replicas or 0) > here.replicas:
        assert there.replicas >= min(state.replicas or 0, here.replicas)
    assert followed([msgspec.structs.replace(moved, t=moved.t + n) for n in range(5)], policy, there.state)


@settings(max_examples=80)
@given(histories(30), policies("slo"), st.booleans())
def test_nothing_ends_while_a_replica_starts_or_a_request_is_held(
    rows: list[Sample], policy: Policy, is_held: bool
) -> None:
    before = followed(rows, policy)[-1]
    starting = ReplicaSample("9", "starting", 3.0)
    quiet = Sample(rows[-1].t + 2.0, held=1, in_flight=1) if is_held else Sample(rows[-1].t + 2.0, replicas=(starting,))
    for later_s in (2.0, 10.0, 16.0):
        sample = msgspec.structs.replace(quiet, t=rows[-1].t + later_s)
        decision = scale(Recent((sample,)), before.state, policy, sample.t)
        assert decision.replicas >= before.replicas, decision.reason
