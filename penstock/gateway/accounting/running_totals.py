"""Counts that gateways add up over a store. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

# Ends the name of what is given back when a request ends, and with its gateway too. Other totals only grow.
AT_ONCE: Final = ":at_once"


class Total:
    """What this process counted, and what others on the same store did."""

    __slots__ = ("others", "own")

    def __init__(self) -> None:
        self.own = 0
        self.others = 0

    def now(self) -> int:
        return self.own + self.others


Totals = defaultdict[str, Total]  # by name; QuotaSync keeps each one's `others`


def new_totals() -> Totals:
    return defaultdict(Total)
