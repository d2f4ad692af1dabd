from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.route import choose


@dataclass(frozen=True)
class Row:
    name: str
    in_flight: int


def names(rows: list[Row], n_turns: int, avoid: tuple[str, ...] = ()) -> str:
    chosen = [choose(rows, turn, avoid) for turn in range(n_turns)]
    return "".join(row.name if row else "-" for row in chosen)


def test_fewest_in_flight_wins() -> None:
    assert names([Row("a", 2), Row("b", 1), Row("c", 3)], 3) == "bbb"


def test_equals_take_turns() -> None:
    assert names([Row("a", 1), Row("b", 1), Row("c", 2), Row("d", 1)], 7) == "abdabda"


def test_replica_that_lost_the_request_is_avoided() -> None:
    assert names([Row("a", 0), Row("b", 9)], 2, avoid=("a",)) == "bb"


def test_avoided_replica_is_better_than_none() -> None:
    assert names([Row("a", 0)], 1, avoid=("a",)) == "a"


def test_no_candidate_gives_none() -> None:
    assert choose([], 0) is None
