"""Counts that worker processes share."""

from __future__ import annotations

import os
import signal
import time

from penstock.gateway.workers.shared_memory import Board, SharedCounters, SharedInFlight


def test_every_worker_writes_its_row_and_reads_the_sum() -> None:
    counters = SharedCounters(n_slots=2)
    column = counters.column("key:abc")
    assert column is not None
    counters.add(column, 3)
    counters.bind(1)
    counters.add(column, 4)
    assert (counters.total(column), counters.others(column), counters.values(column)) == (7, 3, [3, 4])
    assert (counters.own(column), counters.slot) == (4, 1)
    counters.set(column, -(2**62))
    assert counters.total(column) == 3 - 2**62


def test_counts_and_columns_cross_a_fork() -> None:
    counters = SharedCounters(n_slots=2)
    pid = os.fork()
    if pid == 0:
        counters.bind(1)
        SharedInFlight(counters).add("a", 2)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    in_flight = SharedInFlight(counters)
    in_flight.add("a", 1)
    assert in_flight.others("a") == 2
    assert in_flight.others("b") == 0
    counters.clear(1)
    assert in_flight.others("a") == 0
    in_flight.add("a", -1)


def test_what_a_dead_worker_counted_stays_and_what_it_had_under_way_does_not() -> None:
    counters = SharedCounters(n_slots=2, passing=("in_flight:", ":at_once"))
    names = ("in_flight:0", "key:k:at_once", "key:k:requests", "key:in_flight:requests")
    columns = [counters.column(name) or 0 for name in names]
    counters.bind(1)
    for column in columns:
        counters.add(column, 5)
    counters.clear(1)
    assert [counters.total(column) for column in columns] == [0, 0, 5, 5]
    counters.bind(0)
    counters.add(columns[2], 1)
    assert (counters.first(columns[2]), counters.total(columns[2])) == (1, 6)


def test_a_full_table_counts_no_new_name_and_keeps_the_old_ones() -> None:
    counters = SharedCounters(n_slots=1, n_columns=4)
    columns = [counters.column(str(number)) for number in range(6)]
    assert sorted(column for column in columns if column is not None) == [0, 1, 2, 3]
    assert columns[4:] == [None, None]
    assert counters.column("0") == columns[0]
    in_flight = SharedInFlight(counters)
    in_flight.add("unknown", 1)
    assert in_flight.others("unknown") == 0


def test_a_board_has_a_text_of_every_worker_and_keeps_that_of_a_dead_one() -> None:
    board = Board(n_slots=2, n_bytes_max=8)
    assert (board.read(0), board.is_live(0)) == (None, False)
    pid = os.fork()
    if pid == 0:
        board.post(1, b"")
        board.post(1, b"one")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.post(0, b"12345678")
    assert (board.read(0), board.read(1), board.is_live(1)) == (b"12345678", b"one", True)
    board.retire(1)
    assert (board.read(1), board.is_live(1), board.is_live(0)) == (b"one", False, True)
    assert board.post(1, b"two")
    assert (board.read(1), board.is_live(1)) == (b"two", True)


def test_a_text_that_is_too_long_leaves_the_one_before() -> None:
    board = Board(n_slots=1, n_bytes_max=3)
    assert board.post(0, b"one")
    assert not board.post(0, b"four")
    assert board.read(0) == b"one"


def test_a_text_is_read_whole_while_it_is_written_and_after_its_writer_was_killed() -> None:
    board = Board(n_slots=1, n_bytes_max=1 << 16)
    board.post(0, b"begin")
    pid = os.fork()
    if pid == 0:
        number = 0
        while True:
            number += 1
            board.post(0, b"%d," % number * (number % 500))
    found = []
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        found.append(board.read(0))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found.append(board.read(0))
    # One that is written all the time may not be read; a whole one never has two numbers.
    whole = [text for text in found if text is not None]
    assert found[-1] is not None
    assert whole
    assert all(len(set(text.split(b",")) - {b""}) <= 1 for text in whole)
