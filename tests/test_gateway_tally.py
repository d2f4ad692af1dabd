"""What several workers tell as one: metrics and the admin view."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.gateway.accounting.entry import Books
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.connections.engine import Pool
from penstock.gateway.context import GatewayContext
from penstock.gateway.metrics import Counters
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.workers.shared_memory import Board
from penstock.gateway.workers.totals import Tally
from penstock.wire import prometheus


class Worker:
    """One in a slot, as it is after its start."""

    def __init__(self, board: Board | None, slot: int = 0, store: Path | None = None) -> None:
        config = GatewayConfig(
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            admin_token_file="",
            models=(ServedModel("m"),),
            auth="none",
            store=str(store) if store else None,
        )
        self.counters = Counters(["m"])
        self.queue = WaitingQueue()
        context = GatewayContext(
            ReplicaTable(config.models), self.queue, Pool(), self.counters, 1.0, needs_key=False, hides_key=False
        )
        self.books = Books(config)
        self.tally = Tally(context, self.books, board, slot)
        self.tally.post()

    def count(self, n_requests: int, seconds: float = 0.25) -> None:
        for _ in range(n_requests):
            self.counters.n_requests += 1
            self.counters.outcomes["m", "complete"] += 1
            series = self.counters.series("m", "0")
            series.codes[200] += 1
            series.duration_s.observe(seconds)

    def value(self, name: str) -> float:
        """Of the line that begins with this."""
        lines = [line for line in self.tally.metrics().decode().splitlines() if line.startswith(f"penstock_{name}")]
        assert len(lines) == 1, lines
        return float(lines[0].rpartition(" ")[2])


COMPLETE = 'requests_total{model="m",outcome="complete"}'
N_OK = 'responses_total{model="m",replica="0",code="200"}'
BELOW_1_S = 'request_seconds_bucket{model="m",replica="0",le="1.0"}'
ALL = 'request_seconds_bucket{model="m",replica="0",le="+Inf"}'
SECONDS = 'request_seconds_sum{model="m",replica="0"}'


def test_whoever_is_asked_tells_the_sum_of_all_workers() -> None:
    board = Board(n_slots=3)
    first, second, third = (Worker(board, slot) for slot in range(3))
    first.count(2)
    second.count(3, seconds=2.0)
    second.tally.post()
    assert [first.value(name) for name in (COMPLETE, N_OK, BELOW_1_S, ALL, SECONDS)] == [5, 5, 2, 5, 6.5]
    # What the first one told, the third one knows.
    assert [third.value(name) for name in (COMPLETE, N_OK, BELOW_1_S, ALL, SECONDS)] == [5, 5, 2, 5, 6.5]
    assert third.tally.view().requests_total == 5


def test_one_worker_alone_needs_no_board() -> None:
    worker = Worker(None)
    worker.count(2)
    assert worker.value(COMPLETE) == 2
    assert worker.tally.view().requests_total == 2


def test_counts_of_a_killed_worker_stay_and_its_waiting_requests_do_not() -> None:
    board = Board(n_slots=2)
    first, second = Worker(board, 0), Worker(board, 1)
    second.count(4)
    assert second.queue.enter("m", b"", 0, 10) is not None
    second.tally.post()
    assert (first.value(COMPLETE), first.value('requests_waiting{model="m"}')) == (4, 1)
    assert (first.tally.view().waiting, first.tally.view().requests_total) == (1, 4)
    board.retire(1)
    assert (first.value(COMPLETE), first.value('requests_waiting{model="m"}')) == (4, 0)
    assert (first.tally.view().waiting, first.tally.view().requests_total) == (0, 4)
    for round_number in range(1, 4):
        again = Worker(board, 1)
        again.count(1)
        assert again.value(COMPLETE) == first.value(COMPLETE) == 4 + round_number
        assert first.value('requests_waiting{model="m"}') == 0
        assert first.tally.view().requests_total == 4 + round_number


def test_gauges_that_each_worker_knows_are_not_added() -> None:
    board = Board(n_slots=2)
    first, second = Worker(board, 0), Worker(board, 1)
    second.tally.post()
    assert first.value('replicas_ready{model="m"}') == 0
    text = first.tally.metrics().decode()
    assert text.count("# TYPE penstock_requests_total counter") == 1
    assert prometheus.parse(text)


def test_a_store_that_fails_for_one_worker_is_not_up(tmp_path: Path) -> None:
    board = Board(n_slots=2)
    first, second = (Worker(board, slot, tmp_path / "store.sqlite") for slot in range(2))
    assert first.value("store_up") == 1
    assert second.books.ledger is not None
    second.books.ledger.is_failing = True
    second.books.ledger.n_failures = 3
    second.tally.post()
    assert (first.value("store_up"), first.value("store_failures_total")) == (0, 3)
    for worker in (first, second):
        worker.books.close()


def test_numbers_without_room_are_said_once_and_the_last_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    board = Board(n_slots=2, n_bytes_max=4096)
    first, second = Worker(board, 0), Worker(board, 1)
    second.count(1)
    second.tally.post()
    for number in range(50):
        second.counters.series("m", f"replica-{number}").codes[200] += 1
    second.count(1)
    for _ in range(2):
        second.tally.post()
    words = "this worker has too many metrics to share with the other workers"
    assert [record.message for record in caplog.records] == [words]
    assert (first.value(COMPLETE), second.value(COMPLETE)) == (1, 2)
