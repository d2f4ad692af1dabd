"""Sweeps: the decider finds the highest load that keeps a bound, in few runs, whatever the curve; never too high."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench import sweep
from penstock.bench.sweep import Bound, Point, Search, Slo, judged, next_load, slo_of
from penstock.errors import PenstockError, UserError

SLO = slo_of(["ttft:500"])


def queue(limit: float) -> Callable[[float], dict[str, Any]]:
    """A server whose p99 TTFT grows without bound as the load nears `limit`: 100 / (1 - load / limit) ms."""

    def run(offered: float) -> dict[str, Any]:
        ttft = 100 / (1 - offered / limit) if offered < limit else 1e6
        return {"completed": 100, "failed": 0, "p99_ttft_ms": ttft, "output_throughput": 10 * offered}

    return run


@given(st.floats(0.05, 5000), st.floats(0.1, 200))
def test_the_highest_rate_is_found_to_a_twentieth(limit: float, first: float) -> None:
    found = sweep.search(queue(limit), SLO, Search("rate", first, n_runs=40))
    truth = 0.8 * limit  # 100 / (1 - 0.8) = 500
    assert found.highest is not None and found.broken is not None
    assert found.highest <= truth <= found.broken <= found.highest * 1.0500001
    assert len(found.points) <= 3 + 2 * abs(math.log2(truth / first)) + 6


@given(st.integers(2, 3000), st.integers(1, 500))
def test_the_highest_concurrency_is_found_exactly(limit: int, first: int) -> None:
    found = sweep.search(queue(limit), SLO, Search("concurrency", first, n_runs=60))
    within = [n for n in range(1, limit + 1) if n < limit and 100 / (1 - n / limit) <= 500]
    assert found.highest == (max(within) if within else None)
    assert all(point.offered == int(point.offered) >= 1 for point in found.points)


def test_what_never_breaks_and_what_is_always_broken_ends() -> None:
    found = sweep.search(queue(1e9), SLO, Search("rate", 1, most=100))
    assert found.highest == 100 and found.broken is None
    assert "or more" in sweep.answer_text("TP 1", found)
    found = sweep.search(queue(1e-9), SLO, Search("rate", 1, least=0.1))
    assert found.highest is None and found.broken == pytest.approx(0.1)
    assert sweep.answer_text("TP 1", found) == "TP 1: even 0.1 requests/s is too many"


def test_a_load_kept_above_a_broken_one_does_not_count_and_runs_are_bounded() -> None:
    history = [Point(1, True), Point(2, False), Point(4, True)]
    assert sweep.limits(history) == (1, 2)
    assert next_load(history, Search("rate")) == pytest.approx(math.sqrt(2))
    found = sweep.search(queue(1000), SLO, Search("rate", 0.001, least=0.001, n_runs=3))
    assert len(found.points) == 3 and "ended after 3 runs" in sweep.answer_text("TP 1", found)
    found = sweep.search(queue(10), SLO, Search("rate", steps=(2, 4, 9, 12)))
    assert [point.offered for point in found.points] == [2, 4, 9] and found.highest == 4
    lines = sweep.table_text("TP 1", sweep.search(queue(10), SLO, Search("rate", first=8))).splitlines()[1:]
    loads = [float(line.split()[0]) for line in lines]
    assert loads == sorted(loads) and lines[0].endswith("inside") and "is over 500" in lines[-1]


def test_two_runs_in_a_row_that_are_not_valid_end_the_search_and_one_is_made_again() -> None:
    loads: list[float] = []

    def run(offered: float) -> dict[str, Any]:
        loads.append(offered)
        is_valid = offered < 4 and len(loads) != 2
        return {**queue(1e9)(offered), "valid": is_valid, "invalid_because": ["the generator was late"]}

    found = sweep.search(run, SLO, Search("rate", 1))
    assert loads == [1, 2, 2, 4, 4] and found.highest == 2 and len(found.points) == 2
    assert "4 requests/s: that run is not valid: the generator was late" in found.note


@pytest.mark.parametrize("n_done", [0, 500])
def test_a_load_at_which_too_much_fails_has_broken_the_bound(n_done: int) -> None:
    broken = {"completed": n_done, "failed": 50, "valid": False, "invalid_because": ["too many failed"]}
    found = sweep.search(lambda load: queue(1e9)(load) if load < 4 else broken, SLO, Search("concurrency", 1))
    assert (found.highest, found.broken, found.note) == (3, 4, "")


def test_a_search_that_was_cut_off_claims_nothing_above_it() -> None:
    for failure, note in ((KeyboardInterrupt(), "interrupted at 4"), (PenstockError("it died"), "at 4 requests/s: it")):

        def run(offered: float, failure: BaseException = failure) -> dict[str, Any]:
            if offered >= 4:
                raise failure
            return queue(1e9)(offered)

        found = sweep.search(run, SLO, Search("rate", 1))
        assert found.highest == 2 and note in found.note
        assert found.was_interrupted is isinstance(failure, KeyboardInterrupt)
        assert "or more" not in sweep.answer_text("TP 1", found)
        with pytest.raises(type(failure)) if not found.was_interrupted else contextlib.nullcontext():
            sweep.search(run, SLO, Search("rate", 8))


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"completed": 99, "failed": 1, "p99_ttft_ms": 400}, ""),
        ({"completed": 90, "failed": 10, "p99_ttft_ms": 400}, "10.0% failed, over 1%"),
        ({"completed": 0, "failed": 0}, "100.0% failed, over 1%"),
        ({"completed": 9, "failed": 0, "p99_ttft_ms": 501.0}, "p99_ttft_ms 501.0 is over 500"),
        ({"completed": 9, "failed": 0, "p99_ttft_ms": None}, "p99_ttft_ms was not measured"),
        ({"completed": 9, "failed": 0, "p99_ttft_ms": math.nan}, "p99_ttft_ms was not measured"),
    ],
)
def test_a_result_keeps_the_bounds_or_says_why_not(result: dict[str, Any], reason: str) -> None:
    assert judged(3, result, SLO) == Point(3, not reason, reason)


def test_bounds_as_people_write_them() -> None:
    asked = slo_of(["ttft:2000", "p95_tpot:60", "mean_e2el:9e3"])
    assert asked.bounds == (Bound("p99_ttft_ms", 2000), Bound("p95_tpot_ms", 60), Bound("mean_e2el_ms", 9000))
    assert str(Slo(asked.bounds[:1])) == "p99_ttft at most 2000 ms, at most 1% failed"
    for word in ("", "ttft", "ttft:", "ttft:-1", "ttft:inf", "ttft:nan", "p77_ttft:5", "tftt:5", ":5"):
        with pytest.raises(UserError, match="cannot use bound"):
            slo_of([word])
