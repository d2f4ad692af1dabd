"""How many people: the response time law, and the first limit they hit."""

from __future__ import annotations

import plan_shapes as shapes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hardware import catalog
from penstock.planner import users
from penstock.planner.ranges import Range
from penstock.planner.speed import estimate, work
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Speed
from penstock.planner.users import Capacity, Person
from penstock.spec.deployment import Parallel, Workload

LLAMA_8B = work.step_costs(shapes.LLAMA_8B)
H100 = Fabric(catalog.gpu("h100-sxm"), 1)


def steady(ttft_ms: float, tpot_ms: float) -> Speed:
    def around(value: float) -> Range:
        return Range(value / 2, value, value * 2)

    return Speed(around(ttft_ms), around(tpot_ms), around(1), around(1))


def test_people_follow_the_response_time_law() -> None:
    # 16 at once; 100 ms + 59 x 100 ms = 6 s an answer, 30 s to think: 16 x 36 / 6 = 96.
    person = Person(context_tokens=4000, reply_tokens=60, think_time_s=30)
    found = users.users(person, Capacity(65_536, 256), Workload(), lambda load: steady(100, 100))
    assert found.n_users == Range(56, 96, 176) and found.n_at_once == 16
    assert found.response_s.likely == pytest.approx(6)
    assert found.first_limit == "KV cache: 65,536 tokens / 4,000 a person = 16 at once"
    assert found.assumed == "4,000 tokens of context, 60 a reply, 30 s to think"


def test_a_target_or_the_engines_own_limit_can_be_the_first() -> None:
    def slower(load: Workload) -> Speed:
        return steady(10.0 * load.concurrency, 5.0 * load.concurrency)

    by_tpot = users.users(Person(), Capacity(10**9, 1000), Workload(tpot_ms=50), slower)
    assert by_tpot.n_at_once == 10 and by_tpot.first_limit == "time per token: 55 ms, at most 50"
    by_ttft = users.users(Person(), Capacity(10**9, 1000), Workload(ttft_ms=50, tpot_ms=50), slower)
    at_once = users.users(Person(), Capacity(10**9, 8), Workload(), slower)
    assert at_once.n_at_once == 8 and at_once.first_limit == "max_num_seqs 8 at once"
    assert by_ttft.n_at_once == 5 and by_ttft.first_limit == "time to first token: 60 ms, at most 50"
    # Nobody, when one context does not fit or one request is too slow.
    none = users.users(Person(context_tokens=8000), Capacity(7999, 256), Workload(), lambda load: steady(1, 1))
    assert none.n_users == Range(0, 0, 0) and none.first_limit.startswith("KV cache: 7,999 tokens / 8,000")
    slow = users.users(Person(), Capacity(10**6, 256), Workload(tpot_ms=1), lambda load: steady(1, 2))
    assert slow.n_at_once == 0 and slow.first_limit == "time per token: 2 ms, at most 1"


@settings(max_examples=30)
@given(st.integers(500, 100_000), st.integers(1, 400), st.integers(1000, 2_000_000), st.integers(1, 512))
def test_more_cache_never_serves_fewer_people(context: int, reply: int, kv_tokens: int, seqs: int) -> None:
    person = Person(context, reply, 20)
    asked: list[int] = []

    def at_h100(load: Workload) -> Speed:
        asked.append(load.concurrency)
        return estimate.estimate(LLAMA_8B, Parallel(), H100, load)

    few, many = (
        users.users(person, Capacity(tokens, seqs), Workload(tpot_ms=80), at_h100)
        for tokens in (kv_tokens, 2 * kv_tokens)
    )
    assert few.n_at_once <= many.n_at_once
    assert many.n_users.low <= many.n_users.likely <= many.n_users.high
    assert len(asked) < 40, "few estimates are enough"
