"""What the worker processes of one gateway share: counts and texts in memory that a fork inherits.

Counts are a table of 64-bit numbers.

Every worker has a row (its slot) that it alone writes, so that no add needs a lock: a reader sums a column over the
rows and sees each number whole, because an aligned 8-byte store is one instruction on the machines we run on. Columns
have names; a name is given its column under a lock, once, and every worker finds the same one. Nothing is ever moved,
so a column's index may be kept.

A board has a text per worker, which it alone writes and all may read. It outlives its writer: who comes after a worker
that was killed begins with what that one told last.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import tempfile
import zlib

from penstock.text import MIB

N_COLUMNS = 65_536  # of memory that is only taken when it is written
IN_FLIGHT = "in_flight:"
_CELL_BYTES = 8
TEXT_BYTES_MAX = 4 * MIB  # of memory that is only taken when it is written
_READS = 100  # of a text that is written anew, twice, while it is read: about once a second each


class SharedCounters:
    """`n_slots` rows of `n_columns` signed 64-bit numbers, all 0 at first. Create it before the fork, then `bind`.

    >>> counters = SharedCounters(n_slots=2)
    >>> column = counters.column("key:abc")
    >>> counters.add(column, 3); counters.bind(1); counters.add(column, 4)
    >>> counters.total(column), counters.others(column), counters.values(column)
    (7, 3, [3, 4])
    """

    def __init__(self, n_slots: int, n_columns: int = N_COLUMNS, *, passing: tuple[str, ...] = (IN_FLIGHT,)) -> None:
        """`passing`: how names begin or end of what is under way. It ends with its worker; other counts stay."""
        assert n_slots > 0
        self._passing = passing
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
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        # The last bit tells the parent, which knows no names, whether the count is of what is under way.
        is_passing = name.startswith(self._passing) or name.endswith(self._passing)
        number = number | 1 if is_passing else (number & ~1) or 2
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

    def first(self, column: int) -> int:
        """Worker 0's number: the sum, of columns that it alone writes."""
        return self._cells[column]

    def values(self, column: int) -> list[int]:
        """The number of every worker, by slot."""
        return [self._cells[slot * self._n_columns + column] for slot in range(self.n_slots)]

    def total(self, column: int) -> int:
        return sum(self.values(column))

    def others(self, column: int) -> int:
        """The sum over the other workers."""
        return self.total(column) - self.own(column)

    def clear(self, slot: int) -> None:
        """Forgets what worker `slot` had under way, after its death. What it counted was counted."""
        first = slot * self._n_columns
        for index in range(self._n_columns):
            if self._cells[self._names_at + index] & 1:
                self._cells[first + index] = 0


class SharedInFlight:
    """Requests in flight per replica over all workers."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters

    def add(self, replica: str, amount: int) -> None:
        """Counts `amount` (1 or -1) on `replica` for this worker."""
        column = self._counters.column(f"{IN_FLIGHT}{replica}")
        if column is not None:
            self._counters.add(column, amount)

    def others(self, replica: str) -> int:
        """What the other workers have in flight on `replica`; 0 when the table had no room for it."""
        column = self._counters.column(f"{IN_FLIGHT}{replica}")
        return 0 if column is None else self._counters.others(column)


class Board:
    """A text per slot. Create it before the fork.

    Each slot has two halves: a text goes into the one that nobody reads, and then one number says which is which. So a
    writer that is killed in the middle leaves the text before, and a reader takes no lock.

    >>> board = Board(n_slots=2)
    >>> board.read(1), board.post(1, b"a"), board.read(1), board.is_live(1)
    (None, True, b'a', True)
    """

    _CELLS = 6  # how many were posted, whether its writer lives, and length and checksum of each half

    def __init__(self, n_slots: int, n_bytes_max: int = TEXT_BYTES_MAX) -> None:
        self.n_slots = n_slots
        self._n_bytes_max = n_bytes_max
        self._head = mmap.mmap(-1, _CELL_BYTES * self._CELLS * n_slots)
        self._cells = memoryview(self._head).cast("q")
        self._texts = mmap.mmap(-1, n_bytes_max * 2 * n_slots)

    def post(self, slot: int, text: bytes) -> bool:
        """Replaces the slot's text; False, and the one before stays, when it is too long."""
        if len(text) > self._n_bytes_max:
            return False
        first = slot * self._CELLS
        n_posts = self._cells[first] + 1
        half = n_posts & 1
        begin = (slot * 2 + half) * self._n_bytes_max
        self._texts[begin : begin + len(text)] = text
        self._cells[first + 2 + half * 2] = len(text)
        self._cells[first + 3 + half * 2] = zlib.crc32(text)
        self._cells[first] = n_posts
        self._cells[first + 1] = 1
        return True

    def read(self, slot: int) -> bytes | None:
        """The slot's text; None before the first one."""
        first = slot * self._CELLS
        for _ in range(_READS):
            n_posts = self._cells[first]
            if n_posts == 0:
                return None
            half = n_posts & 1
            begin = (slot * 2 + half) * self._n_bytes_max
            text = self._texts[begin : begin + self._cells[first + 2 + half * 2]]
            # The checksum is for machines on which another core may see the number before the text.
            if self._cells[first] == n_posts and zlib.crc32(text) == self._cells[first + 3 + half * 2]:
                return text
        return None

    def is_live(self, slot: int) -> bool:
        """Whether a living worker posted it."""
        return self._cells[slot * self._CELLS + 1] == 1

    def retire(self, slot: int) -> None:
        """Its worker died: the text stays, as its last word."""
        self._cells[slot * self._CELLS + 1] = 0
