"""Counts that worker processes share."""

from __future__ import annotations

import os

from penstock.gateway.shared import SharedCounters, SharedInFlight


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


def test_a_full_table_counts_no_new_name_and_keeps_the_old_ones() -> None:
    counters = SharedCounters(n_slots=1, n_columns=4)
    columns = [counters.column(str(number)) for number in range(6)]
    assert sorted(column for column in columns if column is not None) == [0, 1, 2, 3]
    assert columns[4:] == [None, None]
    assert counters.column("0") == columns[0]
    in_flight = SharedInFlight(counters)
    in_flight.add("unknown", 1)
    assert in_flight.others("unknown") == 0
