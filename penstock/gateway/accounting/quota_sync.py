"""Requests and tokens a minute, and requests at once, over all gateways and workers that share a store.

Twice a second, in a turn of the ledger's thread, each one writes its running totals and reads those of the others;
buckets read the sum. So gateways learn of each other's requests within a second, let in too much for that long, and
then too little: an emptied bucket goes into debt. Requests at once have no debt.

What was given back must be known before another gateway refuses for want of it. So there are turns in between
(`catch_up`): after a request of a key at its limit, and while one waits that is refused for what others have now.

Without the store each gateway counts for itself and catches up afterwards. Requests at once of a gateway that is silent
for FRESH_S are dropped: it is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.accounting.running_totals import AT_ONCE, Totals
from penstock.gateway.accounting.usage_store import OthersCount, UsageStore
from penstock.world import REAL, World

FRESH_S = 3.0
FORGET_S = 86_400.0
MAX_COUNT = 2**62  # what a database holds
_HEARTBEAT_S = 600.0
_HEARTBEAT = ""  # a name that no total has: a gateway without requests is not a dead one


class QuotaSync:
    """Keeps `others` of each total right. Call it from the ledger's thread."""

    def __init__(self, gateway: str, totals: Totals, world: World = REAL) -> None:
        """`gateway`: a name that no other gateway or worker on the store has or had."""
        self._now = world.now
        self._gateway = gateway
        self._totals = totals
        self._put: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] | None = None
        self._is_behind = True
        self._good_at = self._now()
        self._heartbeat_at = 0.0

    def turn(self, store: UsageStore) -> None:
        now, totals = self._now(), dict(self._totals)
        if not totals:
            return
        is_heartbeat = now >= self._heartbeat_at
        if is_heartbeat:
            store.forget_gateways(FORGET_S)
            # What was forgotten need not be known either.
            self._is_behind = True
        living = [name for name, total in totals.items() if total.own and name.endswith(AT_ONCE)]
        self._exchange(store, [*living, _HEARTBEAT] if is_heartbeat else living)
        if is_heartbeat:
            self._heartbeat_at = now + _HEARTBEAT_S
        self._is_behind = False
        self._good_at = now

    @property
    def has_others(self) -> bool:
        """Whether another gateway or worker has written to the store."""
        return bool(self._seen)

    def catch_up(self, store: UsageStore) -> None:
        """Writes what changed here and reads what the others have, between two turns."""
        if not self._is_behind:
            self._exchange(store, ())

    def miss_turn(self) -> None:
        """The store did not work: what the others have at once is unknown."""
        self._is_behind = True
        if self._now() - self._good_at > FRESH_S:
            for name, total in dict(self._totals).items():
                if name.endswith(AT_ONCE):
                    total.others = 0

    def leave(self, store: UsageStore) -> None:
        """The gateway ends: its requests at once must not hold back its successor."""
        if self._put:
            store.remove_counts(self._gateway)

    def _exchange(self, store: UsageStore, also: Sequence[str]) -> None:
        """Writes what changed, and the totals named in `also`; reads those of the others."""
        own = {name: total.own for name, total in dict(self._totals).items()}
        changed = [name for name, count in own.items() if count != self._put.get(name, 0)]
        news = {name: max(-MAX_COUNT, min(own.get(name, 0), MAX_COUNT)) for name in (*changed, *also)}
        if news:
            store.put_counts(self._gateway, news)
            self._put.update(news)
        self._take(store.others_counts(self._gateway, FRESH_S, are_all=self._is_behind))

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
