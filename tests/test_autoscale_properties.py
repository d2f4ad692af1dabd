"""What holds for every load: bounds, more load never fewer replicas, nothing ends without data, states survive."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployment.autoscale import STALE_S, Decision, Policy, Recent, ReplicaSample, Sample, State, scale
from penstock.spec.deployment import Replicas, ScalingPolicy, ScalingRules

pytestmark = pytest.mark.simulation

METRICS = st.sampled_from(("slo", "waiting", "in_flight", "kv"))
STATES: st.SearchStrategy[Literal["starting", "ready", "draining"]] = st.sampled_from(("starting", "ready", "draining"))
COUNTS = st.integers(0, 200)


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
    return Policy(replicas, start_s=draw(st.sampled_from((5.0, 20.0, 100.0, 900.0))))


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


@settings(max_examples=60)
@given(histories(), policies())
def test_a_decision_is_within_min_and_max_and_one_sentence(rows: list[Sample], policy: Policy) -> None:
    for decision in followed(rows, policy):
        assert policy.replicas.min <= decision.replicas <= policy.replicas.max
        assert decision.reason and "\n" not in decision.reason
        assert decision.state.replicas == decision.replicas


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
        assert scale(recent, before.state, policy, rows[-1].t + later_s).replicas >= before.replicas


@settings(max_examples=60)
@given(histories(), policies())
def test_equal_inputs_give_equal_decisions_and_the_state_survives_json(rows: list[Sample], policy: Policy) -> None:
    *past, last = rows
    state = followed(past, policy)[-1].state if past else State()
    loaded = msgspec.json.decode(msgspec.json.encode(state), type=State)
    assert loaded == state
    first = scale(Recent((last,)), state, policy, last.t)
    assert scale(Recent((last,)), loaded, policy, last.t) == first
    # Samples that were counted already change nothing.
    assert scale(Recent((*past, last)), state, policy, last.t) == first


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
