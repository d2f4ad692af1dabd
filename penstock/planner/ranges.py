"""A number that is estimated: low, likely and high."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.text import GIB


class Range(msgspec.Struct, frozen=True):
    """low <= likely <= high; the unit is in the name of the field. Sums add the ends."""

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.likely <= self.high:
            raise ValueError(f"a range must rise: {self.low}, {self.likely}, {self.high}")

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def __mul__(self, factor: float) -> Range:
        """`factor` is not negative."""
        return Range(self.low * factor, self.likely * factor, self.high * factor)

    def left_of(self, whole: float) -> Range:
        """What remains of `whole`: the low end is what the high end leaves. 100 less (1, 2, 5) is (95, 98, 99)."""
        return Range(whole - self.high, whole - self.likely, whole - self.low)


ZERO = Range(0, 0, 0)


def exact(value: float) -> Range:
    return Range(value, value, value)


def gib(low: float, likely: float, high: float) -> Range:
    """A range in bytes from GiB."""
    return Range(low * GIB, likely * GIB, high * GIB)


def highest(ranges: Iterable[Range]) -> Range:
    """The largest low, likely and high: for uses of memory that follow one another."""
    known = list(ranges) or [ZERO]
    return Range(max(r.low for r in known), max(r.likely for r in known), max(r.high for r in known))


def total(ranges: Iterable[Range]) -> Range:
    return sum(ranges, start=ZERO)
