"""What a node decides by itself: pauses between starts, a stalled or idle engine, its rank, what it cleans up."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from samples import demo_plan

from penstock.engines import Metrics
from penstock.errors import UserError
from penstock.node import engine_client, leftovers
from penstock.node.__main__ import rank_of
from penstock.node.engine_client import EngineClient, StandstillWatch
from penstock.node.sleep import choose_level
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
    watch = StandstillWatch()
    assert [watch.observe(running > 0, steps, now_s) for running, steps, now_s in looks] == stalled_s


@pytest.mark.loopback
def test_an_engine_whose_address_cannot_be_reached_is_not_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart loads a large model for an hour, and does not bring the address back."""
    monkeypatch.setattr(engine_client, "_TIMEOUT_S", 0.02)
    metrics = Metrics("running", "waiting", ("iterations",))

    def client(host: str, port: int) -> EngineClient:
        return EngineClient(f"http://{host}:{port}", None, metrics, demo_plan("fake"))

    lost = client("255.255.255.255", 9)
    assert lost.health_problem(0.0) is None and not lost.is_up()
    assert lost.unreachable is not None and "cannot reach its own address 255.255.255.255" in lost.unreachable
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and answers none: it hangs
        port = server.getsockname()[1]
        hung = client("127.0.0.1", port)
        looks: list[tuple[bool, bool | None]] = []
        for now_s, heard_at_s in ((1.0, 0.0), (60.0, 0.0), (61.0, 2.0), (61.9, 2.0), (62.0, 2.0)):
            hung.alive_at_s = heard_at_s or hung.alive_at_s  # a byte of a stream
            looks.append((hung.health_problem(now_s) is None and hung.is_silent, hung.is_busy(now_s)))
        assert looks == [(True, True)] * 4 + [(False, None)], "a drain waits for it as long"
        assert hung.unreachable is None
    refused = client("127.0.0.1", port)
    assert refused.health_problem(1.0) is not None and refused.is_busy(1.0) is None and refused.unreachable is None


@pytest.mark.parametrize(
    ("wanted", "possible", "weights", "free", "level"),
    [
        ("auto", (1, 2), 90, 100, 1),
        ("auto", (1, 2), 91, 100, 2),
        ("auto", (1,), 90, 100, 1),
        ("auto", (1,), 91, 100, None),
        (1, (1, 2), 91, 100, None),
        (2, (1, 2), 1, 100, 2),
        (2, (1,), 1, 100, None),
    ],
)
def test_level_1_is_taken_where_the_weights_fit_in_memory(
    wanted: Any, possible: tuple[int, ...], weights: int, free: int, level: int | None
) -> None:
    choice = choose_level(wanted, possible, weights, free)
    assert (choice if isinstance(choice, int) else None) == level, choice


def test_idleness_is_that_of_the_looks_and_a_step_between_two_ends_it() -> None:
    watch = StandstillWatch()
    looks = [(0, 5.0, 10.0), (0, 5.0, 12.0), (0, 7.0, 14.0), (0, 7.0, 16.0), (1, 7.0, 18.0), (0, 7.0, 20.0)]
    idle_s = [watch.observe(n_requests == 0, steps, now_s) for n_requests, steps, now_s in looks]
    assert idle_s == [0, 2, 0, 2, 0, 2] and watch.stands_s == 2
    watch.forget()
    assert watch.stands_s == 0


def test_the_rank_is_the_number_that_the_host_name_ends_in() -> None:
    hosts = ("chat-0", "chat-7b-12", "chat-3.chat.svc.cluster.local")
    assert [rank_of(host, n_nodes=16) for host in hosts] == [0, 12, 3]
    for host in ("chat", "chat12", "chat-2", "chat-1a"):
        with pytest.raises(UserError, match=f'host name "{host}"'):
            rank_of(host, n_nodes=2)


def test_a_node_removes_folders_of_engines_that_died_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lost, fresh, locked, guards = (tmp_path / f"penstock-0badcafe-{part}" for part in ("0", "1", "2", "0j"))
    users = tmp_path / "penstock-notes"
    for path in (lost, fresh, locked, guards, users):
        path.mkdir()
        os.utime(path, (0.0, time.time() if path == fresh else 0.0))
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    leftovers.remove_lost_folders()
    os.close(lock)
    assert {*tmp_path.iterdir()} == {fresh, locked, guards, users}
