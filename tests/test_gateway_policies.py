from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.routing.policies import LOAD_BOUND, choose
from penstock.spec.gateway import PolicyName

POLICIES: tuple[PolicyName, ...] = ("least-load", "prefix", "round-robin", "sticky")


@dataclass
class Row:
    name: str
    load: float
    weight: float = 1.0


def names(rows: list[Row], n_turns: int, avoid: tuple[str, ...] = (), policy: PolicyName = "least-load") -> str:
    chosen = [choose(policy, rows, turn, b"", avoid) for turn in range(n_turns)]
    return "".join(row.name if row else "-" for row in chosen)


def place(rows: list[Row], key: bytes, policy: PolicyName = "sticky") -> str:
    row = choose(policy, rows, 0, key)
    assert row is not None
    return row.name


def test_least_load_wins_and_equals_take_turns() -> None:
    assert names([Row("a", 2), Row("b", 1), Row("c", 3)], 3) == "bbb"
    assert names([Row("a", 1), Row("b", 1), Row("c", 2), Row("d", 1)], 7) == "abdabda"
    for affinity in POLICIES[1::2]:  # without a key
        assert names([Row("a", 2), Row("b", 1)], 2, policy=affinity) == "bb"


def test_heavier_replica_takes_more() -> None:
    assert names([Row("a", 3, 4.0), Row("b", 1)], 1) == "a"
    rows = [Row("a", 0, 2.0), Row("b", 0)]
    for _ in range(300):
        chosen = choose("least-load", rows, 0)
        assert chosen is not None
        chosen.load += 1
    assert [row.load for row in rows] == [200, 100]
    counts = Counter(place([Row("a", 0, 3.0), Row("b", 0)], b"%d" % n) for n in range(2000))
    assert 1400 < counts["a"] < 1600


@pytest.mark.parametrize("policy", POLICIES)
def test_replica_that_lost_the_request_is_avoided(policy: PolicyName) -> None:
    assert names([Row("a", 0), Row("b", 9)], 2, avoid=("a",), policy=policy) == "bb"
    assert names([Row("a", 0)], 1, avoid=("a",), policy=policy) == "a"
    assert choose(policy, [], 0) is None


def test_round_robin_looks_at_weights_and_not_at_load() -> None:
    assert names([Row("a", 9), Row("b", 0), Row("c", 0)], 6, policy="round-robin") == "abcabc"
    counts = Counter(names([Row("a", 0, 2.0), Row("b", 0)], 3000, policy="round-robin"))
    assert abs(counts["a"] - 2000) <= 3


def test_sticky_keeps_a_session_while_its_replica_lives() -> None:
    rows = [Row(name, 0) for name in "abcd"]
    homes = {n: place(rows, b"session %d" % n) for n in range(400)}
    assert set(homes.values()) == set("abcd")
    rows[0].load = 1000
    assert all(place(rows, b"session %d" % n) == home for n, home in homes.items())
    moved = [n for n, home in homes.items() if place(rows[1:], b"session %d" % n) != home]
    assert moved == [n for n, home in homes.items() if home == "a"]


@settings(max_examples=200)
@given(n_replicas=st.integers(2, 12), steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=80))
def test_prefix_bounds_the_load_of_every_replica(n_replicas: int, steps: list[tuple[int, bool]]) -> None:
    """However few the keys: nobody gets more than ceil(1.25 * (m + 1) / n) of m + 1 requests."""
    rows = [Row(str(index), 0) for index in range(n_replicas)]
    for key, is_end in steps:
        busy = [row for row in rows if row.load]
        if is_end and busy:
            busy[key % len(busy)].load -= 1
            continue
        n_in_flight = sum(row.load for row in rows)
        row = choose("prefix", rows, 0, b"key %d" % key)
        assert row is not None
        row.load += 1
        assert row.load <= math.ceil(LOAD_BOUND * (n_in_flight + 1) / n_replicas)
