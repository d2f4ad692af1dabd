"""Requests and tokens a minute, and requests at once, over all gateways that share a PostgreSQL store.

Each gateway puts its running totals into the store and reads those of the others, in the turn that its ledger's thread
takes twice a second anyway. What the others took since the last look is added to a column beside our own, which the
buckets read with it: nothing waits for the store. So gateways know each other's requests after a second at most, let in
too much for that long, and then too little: a bucket that others emptied goes into debt. Requests at once have no debt.

While the store is away each gateway counts for itself; what was taken meanwhile is made up for afterwards. Requests at
once of a gateway that is silent for FRESH_S are those of a dead one.
"""

from __future__ import annotations

import time

from penstock.gateway.accounting.quota import AT_ONCE
from penstock.gateway.accounting.store import Store
from penstock.gateway.workers.shared_memory import SharedCounters

FRESH_S = 3.0
FORGET_S = 86_400.0
_HEARTBEAT_S = 600.0
_HEARTBEAT = ""  # a name that no total has: a gateway without requests is not a dead one


class Exchange:
    """The counts (`quota.Counts`) of a gateway among others. One worker of each gateway has the turns."""

    def __init__(self, gateway: str, counters: SharedCounters) -> None:
        self._gateway = gateway
        self._counters = counters
        self._names: dict[str, tuple[int, int]] = {}  # our column, and that of the others' sum
        self._elsewhere: dict[int, int] = {}
        self._put: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] | None = None
        self._is_behind = True
        self._good_at = time.monotonic()
        self._heartbeat_at = 0.0

    # The loop's side.

    def column(self, name: str) -> int | None:
        own, others = self._counters.column(name), self._counters.column(f"elsewhere:{name}")
        if own is not None and others is not None:
            self._elsewhere[own] = others
            self._names[name] = (own, others)
        return own

    def add(self, column: int, amount: int) -> None:
        self._counters.add(column, amount)

    def total(self, column: int) -> int:
        others = self._elsewhere.get(column)
        total = self._counters.total(column)
        return total if others is None else total + self._counters.first(others)

    # The side of the ledger's thread, which alone writes the others' columns.

    def turn(self, store: Store) -> None:
        """Tells the others and hears from them."""
        now = time.monotonic()
        if not self._names:
            return
        if now >= self._heartbeat_at:
            store.forget_gateways(FORGET_S)
            # What was forgotten need not be known either.
            self._is_behind = True
        names = dict(self._names)
        counts = {name: self._counters.total(own) for name, (own, _) in names.items()}
        news = {
            name: count
            for name, count in counts.items()
            if count != self._put.get(name, 0) or (count and name.endswith(AT_ONCE))
        }
        if now >= self._heartbeat_at:
            news[_HEARTBEAT] = 0
        if news:
            store.put_counts(self._gateway, news)
            self._put.update(news)
        self._take(names, store.others_counts(self._gateway, FRESH_S, are_all=self._is_behind))
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + _HEARTBEAT_S
        self._is_behind = False
        self._good_at = now

    def miss_turn(self) -> None:
        """The store did not work: nobody knows what the others have at once."""
        self._is_behind = True
        if time.monotonic() - self._good_at > FRESH_S:
            for name, (_, others) in dict(self._names).items():
                if name.endswith(AT_ONCE):
                    self._counters.set(others, 0)

    def _take(self, names: dict[str, tuple[int, int]], rows: list[tuple[str, str, int, bool]]) -> None:
        at_once = dict.fromkeys((name for name in names if name.endswith(AT_ONCE)), 0)
        taken: dict[str, int] = {}
        seen = self._seen
        for gateway, name, count, is_fresh in rows:
            if name.endswith(AT_ONCE):
                at_once[name] = at_once.get(name, 0) + (count if is_fresh else 0)
            elif seen is not None:  # what was there before our first look was taken before us
                taken[name] = taken.get(name, 0) + count - seen.get((gateway, name), 0)
        found = {(gateway, name): count for gateway, name, count, _ in rows}
        self._seen = found if seen is None or self._is_behind else seen | found
        for name, amount in taken.items():
            if amount and name in names:
                self._counters.add(names[name][1], amount)
        for name, count in at_once.items():
            if name in names and count != self._counters.own(names[name][1]):
                self._counters.set(names[name][1], count)
