"""The node's arithmetic: pauses between starts, and when an engine has stalled."""

from __future__ import annotations

from penstock.node.engine_client import StallWatch
from penstock.processes import Backoff


def test_restarts_wait_twice_as_long_each_time_up_to_the_most() -> None:
    backoff = Backoff(1.0, 60.0, 600.0)
    assert [backoff.next(100.0 * n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_restart_after_a_calm_time_waits_as_at_first() -> None:
    backoff = Backoff(0.5, 4.0, 30.0)
    assert [backoff.next(now) for now in (0.0, 0.5, 31.5, 63.5, 97.5, 131.6)] == [0.5, 1, 2, 4, 4, 0.5]


def watch(*looks: tuple[float, float, float]) -> list[float]:
    """What a watch says to (running, iterations, now)."""
    stall = StallWatch()
    return [stall.observe(*look) for look in looks]


def test_an_engine_that_steps_is_never_stalled() -> None:
    assert watch((1, 5, 0.0), (1, 6, 10.0), (1, 9, 100.0)) == [0, 0, 0]


def test_an_idle_engine_is_never_stalled() -> None:
    assert watch((0, 5, 0.0), (0, 5, 100.0), (0, 5, 1000.0)) == [0, 0, 0]


def test_running_without_a_step_counts_from_the_last_one() -> None:
    assert watch((1, 5, 10.0), (2, 5, 40.0), (2, 5, 70.0), (2, 6, 71.0), (2, 6, 73.0)) == [0, 30, 60, 0, 2]


def test_a_request_after_a_long_idle_time_starts_the_count_anew() -> None:
    assert watch((0, 5, 0.0), (0, 5, 100.0), (1, 5, 102.0), (1, 5, 104.0)) == [0, 0, 2, 4]


def test_a_restarted_engine_whose_counters_fell_is_not_stalled() -> None:
    assert watch((1, 500, 0.0), (1, 0, 60.0), (1, 0, 61.0)) == [0, 0, 1]
