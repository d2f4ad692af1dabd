"""A deployment's life under load, on any target: a burst starts a second replica, silence ends both, a request wakes.

Judged by counts of requests and by the decision log, not by seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launching import Asking, ask, call, now
from waiting import until

from penstock.run_folder import Run

# 0 to 2 replicas, each for one request at a time, that may end at once.
FIELDS: dict[str, Any] = {
    "replicas": {
        "min": 0,
        "max": 2,
        "metric": "waiting",
        "target": 1,
        "idle_s": 1,
        "down": {"stabilization_window_seconds": 0},
    },
    "gateway": {"max_in_flight": 1, "hold_s": 100},
}
SLOW = {"load-s": 0.5, "tokens-per-s": 20}
N_TOKENS = 160


def number_of(run: Run) -> tuple[int, int]:
    """Replicas that are wanted, and that are there."""
    state = now(run)
    return state.desired_replicas, len(state.replicas)


def live(run: Run, key: str | None = None, timeout_s: float = 60.0, at_two: Callable[[], None] = lambda: None) -> None:
    """From one ready replica to two, to none, and back to one; the log has each change with numbers in its reason.

    `at_two` is called while the second one is placed.
    """
    streams = [Asking(run.url, N_TOKENS, key=key) for _ in range(4)]
    until(lambda: number_of(run) == (2, 2), "requests wait: another replica is placed")
    at_two()
    for stream in streams:
        stream.check_is_whole()
    until(lambda: number_of(run) == (0, 0), "nobody asks: all replicas end", lambda: f"{now(run)}, {decisions_of(run)}")
    ask(run, key=key)
    # What a controller in a cluster noted reaches this machine a moment later.
    until(lambda: any(row["from"] == 0 for row in decisions_of(run)), "the log has the wake")
    changes = [row for row in decisions_of(run) if row["from"] != row["to"]]
    numbers = [row["to"] for row in changes]
    # Where the burst came late, the first replica had ended for want of requests.
    assert 2 in numbers and numbers[-2:] == [0, 1], changes
    assert all(row["from"] == before for row, before in zip(changes[1:], numbers, strict=False)), changes
    assert all(any(letter.isdigit() for letter in row["reason"]) for row in changes), changes


def decisions_of(run: Run) -> list[dict[str, Any]]:
    told = call("autoscale", "explain", run.name, "--since", "1h", "--json")
    assert told.code == 0, told
    return told.events
