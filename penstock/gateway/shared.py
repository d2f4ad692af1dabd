"""Counts that the worker processes of one gateway share: a table of 64-bit numbers in memory that a fork inherits.

Every worker has a row (its slot) that it alone writes, so that no add needs a lock: a reader sums a column over the
rows and sees each number whole, because an aligned 8-byte store is one instruction on the machines we run on. Columns
have names; a name is given its column under a lock, once, and every worker finds the same one. Nothing is ever moved,
so a column's index may be kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import tempfile

N_COLUMNS = 4096
_CELL_BYTES = 8


class SharedCounters:
    """`n_slots` rows of `n_columns` signed 64-bit numbers, all 0 at first. Create it before the fork, then `bind`.

    >>> counters = SharedCounters(n_slots=2)
    >>> column = counters.column("key:abc")
    >>> counters.add(column, 3); counters.bind(1); counters.add(column, 4)
    >>> counters.total(column), counters.others(column), counters.values(column)
    (7, 3, [3, 4])
    """

    def __init__(self, n_slots: int, n_columns: int = N_COLUMNS) -> None:
        assert n_slots > 0
        assert n_columns > 0
        self.n_slots = n_slots
        self._n_columns = n_columns
        # Anonymous and shared: it lives as long as a process that inherited it, and leaves no file behind.
        self._map = mmap.mmap(-1, _CELL_BYTES * n_columns * (n_slots + 1))
        self._cells = memoryview(self._map).cast("q")
        # The row behind the last slot holds each column's name as a number; 0 is free.
        self._names_at = n_slots * n_columns
        self._first = 0  # of our own row
        self._columns: dict[str, int] = {}
        # POSIX locks belong to the process, not to the open file that a fork shares.
        self._lock_file = tempfile.TemporaryFile(prefix="penstock-shared-")  # noqa: SIM115 - as long as we live

    def bind(self, slot: int) -> None:
        """From now on this process writes row `slot`."""
        assert 0 <= slot < self.n_slots
        self._first = slot * self._n_columns

    @property
    def slot(self) -> int:
        return self._first // self._n_columns

    def column(self, name: str) -> int | None:
        """The index of the column called `name`, the same in every process; None when the table is full.

        Blocks for microseconds when the name is new to this process. Names are never given up.
        """
        known = self._columns.get(name)
        if known is not None:
            return known
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True) or 1
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        try:
            found = self._find(number)
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)
        if found is not None:
            self._columns[name] = found
        return found

    def _find(self, number: int) -> int | None:
        for step in range(self._n_columns):
            index = (number + step) % self._n_columns
            there = self._cells[self._names_at + index]
            if there == 0:
                self._cells[self._names_at + index] = number
                return index
            if there == number:
                return index
        return None

    def add(self, column: int, amount: int) -> None:
        """Adds to this worker's own number."""
        self._cells[self._first + column] += amount

    def set(self, column: int, value: int) -> None:
        """Replaces this worker's own number: for one that packs a window and a count, say."""
        self._cells[self._first + column] = value

    def own(self, column: int) -> int:
        return self._cells[self._first + column]

    def values(self, column: int) -> list[int]:
        """The number of every worker, by slot."""
        return [self._cells[slot * self._n_columns + column] for slot in range(self.n_slots)]

    def total(self, column: int) -> int:
        return sum(self.values(column))

    def others(self, column: int) -> int:
        """The sum over the other workers."""
        return self.total(column) - self.own(column)

    def clear(self, slot: int) -> None:
        """Forgets what worker `slot` counted, after its death: what it had in flight has ended with it."""
        first = slot * self._n_columns
        for index in range(first, first + self._n_columns):
            self._cells[index] = 0


class SharedInFlight:
    """Requests in flight per replica over all workers."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters

    def add(self, replica: str, amount: int) -> None:
        """Counts `amount` (1 or -1) on `replica` for this worker."""
        column = self._counters.column(f"in_flight:{replica}")
        if column is not None:
            self._counters.add(column, amount)

    def others(self, replica: str) -> int:
        """What the other workers have in flight on `replica`; 0 when the table had no room for it."""
        column = self._counters.column(f"in_flight:{replica}")
        return 0 if column is None else self._counters.others(column)
