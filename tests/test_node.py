"""The node's arithmetic: pauses between starts, and when an engine has stalled."""

from __future__ import annotations

import socket

import pytest
from samples import demo_plan

from penstock.engines import Metrics
from penstock.node import engine_client
from penstock.node.engine_client import EngineClient, StallWatch
from penstock.processes import Backoff


def test_restarts_wait_twice_as_long_each_time_and_as_at_first_after_a_calm_time() -> None:
    backoff = Backoff(1.0, 60.0, 600.0)
    assert [backoff.next(100.0 * n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff = Backoff(0.5, 4.0, 30.0)
    assert [backoff.next(now) for now in (0.0, 0.5, 31.5, 63.5, 97.5, 131.6)] == [0.5, 1, 2, 4, 4, 0.5]


@pytest.mark.parametrize(
    ("looks", "stalled_s"),
    [
        pytest.param([(1, 5, 0), (1, 6, 10), (1, 9, 100)], [0, 0, 0], id="it steps"),
        pytest.param([(0, 5, 0), (0, 5, 100), (0, 5, 1000)], [0, 0, 0], id="it is idle"),
        pytest.param([(1, 5, 10), (2, 5, 40), (2, 5, 70), (2, 6, 71), (2, 6, 73)], [0, 30, 60, 0, 2], id="no step"),
        pytest.param([(0, 5, 0), (0, 5, 100), (1, 5, 102), (1, 5, 104)], [0, 0, 2, 4], id="after a long idle time"),
        pytest.param([(1, 500, 0), (1, 0, 60), (1, 0, 61)], [0, 0, 1], id="a restarted engine's counters fell"),
    ],
)
def test_an_engine_is_stalled_while_requests_run_and_it_makes_no_step(
    looks: list[tuple[float, float, float]], stalled_s: list[float]
) -> None:
    """`looks`: requests that run, steps, and the time."""
    watch = StallWatch()
    assert [watch.observe(*look) for look in looks] == stalled_s


def test_an_engine_whose_address_cannot_be_reached_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart loads a large model for an hour, and does not bring the address back."""
    monkeypatch.setattr(engine_client, "_TIMEOUT_S", 0.02)
    metrics = Metrics("running", "waiting", ("iterations",))

    def client(host: str, port: int) -> EngineClient:
        return EngineClient(f"http://{host}:{port}", None, metrics, demo_plan("fake"))

    lost = client("255.255.255.255", 9)
    assert lost.health_problem() is None and not lost.is_up()
    assert lost.unreachable is not None and "cannot reach its own address 255.255.255.255" in lost.unreachable
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and answers none: it hangs
        port = server.getsockname()[1]
        hung = client("127.0.0.1", port)
        assert [bool(hung.health_problem()) for _ in range(3)] == [False, False, True]
        assert hung.unreachable is None
    refused = client("127.0.0.1", port)
    assert refused.health_problem() is not None and refused.unreachable is None
