"""Requests and tokens a minute, and requests at once, over all gateways and workers that share a store.

Twice a second, in a turn of the ledger's thread, each one writes its running totals and reads those of the others;
buckets read the sum. So gateways learn of each other's requests within a second, let in too much for that long, and
then too little: an emptied bucket goes into debt. Requests at once have no debt.

Without the store each gateway counts for itself and catches up afterwards. Requests at once of a gateway that is silent
for FRESH_S are dropped: it is dead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.gateway.accounting.running_totals import AT_ONCE, Totals
from penstock.gateway.accounting.usage_store import OthersCount, UsageStore

FRESH_S = 3.0
FORGET_S = 86_400.0
MAX_COUNT = 2**62  # what a database holds
_HEARTBEAT_S = 600.0
_HEARTBEAT = ""  # a name that no total has: a gateway without requests is not a dead one


class QuotaSync:
    """Keeps `others` of each total right. Call it from the ledger's thread."""

    def __init__(self, gateway: str, totals: Totals) -> None:
        """`gateway`: a name that no other gateway or worker on the store has or had."""
        self._gateway = gateway
        self._totals = totals
        self._put: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] | None = None
        self._is_behind = True
        self._good_at = time.monotonic()
        self._heartbeat_at = 0.0

    def turn(self, store: UsageStore) -> None:
        now, totals = time.monotonic(), dict(self._totals)
        if not totals:
            return
        is_heartbeat = now >= self._heartbeat_at
        if is_heartbeat:
            store.forget_gateways(FORGET_S)
            # What was forgotten need not be known either.
            self._is_behind = True
        news = {
            name: max(-MAX_COUNT, min(total.own, MAX_COUNT))
            for name, total in totals.items()
            if total.own != self._put.get(name, 0) or (total.own and name.endswith(AT_ONCE))
        }
        if is_heartbeat:
            news[_HEARTBEAT] = 0
        if news:
            store.put_counts(self._gateway, news)
            self._put.update(news)
        self._take(store.others_counts(self._gateway, FRESH_S, are_all=self._is_behind))
        if is_heartbeat:
            self._heartbeat_at = now + _HEARTBEAT_S
        self._is_behind = False
        self._good_at = now

    def miss_turn(self) -> None:
        """The store did not work: what the others have at once is unknown."""
        self._is_behind = True
        if time.monotonic() - self._good_at > FRESH_S:
            for name, total in dict(self._totals).items():
                if name.endswith(AT_ONCE):
                    total.others = 0

    def leave(self, store: UsageStore) -> None:
        """The gateway ends: its requests at once must not hold back its successor."""
        if self._put:
            store.remove_counts(self._gateway)

    def _take(self, counts: Sequence[OthersCount]) -> None:
        totals = dict(self._totals)
        at_once = {name: 0 for name in totals if name.endswith(AT_ONCE)}
        for gateway, name, count, is_fresh in counts:
            if name not in totals:
                continue
            if name.endswith(AT_ONCE):
                at_once[name] += count if is_fresh else 0
            elif self._seen is not None:  # what was there before our first look was taken before us
                totals[name].others += count - self._seen.get((gateway, name), 0)
        for name, count in at_once.items():
            totals[name].others = count
        seen = {(gateway, name): count for gateway, name, count, _ in counts}
        self._seen = seen if self._seen is None or self._is_behind else self._seen | seen
