"""GPU time of ready replicas: counted once a second by worker 0 (the others would count the same), and kept.

Gateways on one store count the same replicas: of a slot of five minutes the store keeps the longest count, so two of
them count once, and a restart loses at most what ran of the slot before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.usage_store import UsageStore
from penstock.gateway.metrics.counters import Family
from penstock.gateway.routing.replicas import Replica
from penstock.wire.announcement import SERVING

# A process that was stopped for longer than this knows nothing of that time.
STEP_S_MAX = 10.0
# The store keeps sums of so many seconds: small enough that a restart loses little, large enough that a year is small.
SLOT_S = 300
SLOTS_MAX = 1024  # while the store is away: three days of one model
KEEP_EVERY_S = 30.0
LAST_WRITE_S = 2.0


class GpuSeconds(NamedTuple):
    """GPU seconds of ready replicas, and those among them in which a request ran."""

    ready: float = 0.0
    busy: float = 0.0

    def plus(self, ready: float, busy: float) -> GpuSeconds:
        return GpuSeconds(self.ready + ready, self.busy + busy)


class GpuTime:
    """GPU seconds by model; `slots`: those that the store does not have yet, by Unix time and model.

    Times are arguments: `now` is monotonic, `wall_s` Unix time. Without a store in `ledger` nothing is kept.
    """

    def __init__(self, gpus_per_replica: int, gpu_hour_usd: float | None, ledger: Ledger | None = None) -> None:
        self.slots: defaultdict[tuple[int, str], GpuSeconds] = defaultdict(GpuSeconds)
        self._n_gpus, self._gpu_hour_usd = gpus_per_replica, gpu_hour_usd
        self._totals: defaultdict[str, GpuSeconds] = defaultdict(GpuSeconds)
        self._last: float | None = None
        self._ledger = ledger if ledger is not None and ledger.store is not None else None
        self._writing: asyncio.Task[None] | None = None
        self._due_at = 0.0

    def tick(self, replicas: Iterable[Replica], now: float, wall_s: float) -> None:
        """Counts, and from time to time begins to write. To be called once a second."""
        self.count(replicas, now, wall_s)
        is_free = self._writing is None or self._writing.done()
        if self._ledger is not None and self.slots and is_free and now >= self._due_at:
            self._due_at = now + KEEP_EVERY_S
            self._writing = asyncio.get_running_loop().create_task(self._write(self._ledger))

    async def stop(self) -> None:
        """Writes what is left, unless the store takes too long."""
        if self._ledger is not None and self.slots:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write(self._ledger)

    async def _write(self, ledger: Ledger) -> None:
        slots, gpu_hour_usd = dict(self.slots), self._gpu_hour_usd
        with contextlib.suppress(PenstockError):  # the ledger reports it; the next write has these slots too
            await ledger.call(lambda database: UsageStore(database).put_gpu_time(slots, gpu_hour_usd))
            self.forget(slots)

    def count(self, replicas: Iterable[Replica], now: float, wall_s: float) -> None:
        """Adds the time since the last call."""
        step_s = 0.0 if self._last is None else min(now - self._last, STEP_S_MAX)
        self._last = now
        if not self._n_gpus or step_s <= 0:
            return
        slot = int(wall_s) // SLOT_S * SLOT_S
        for row in replicas:
            if row.announcement.state in SERVING and row.is_alive(now):  # asleep it holds its GPUs
                model, gpu_s = row.announcement.model, step_s * self._n_gpus
                n_running = 0 if (load := row.announcement.load) is None else load.running
                busy_s = gpu_s if max(row.in_flight, row.load_of_other_workers, n_running) > 0 else 0.0
                self._totals[model] = self._totals[model].plus(gpu_s, busy_s)
                self.slots[slot, model] = self.slots[slot, model].plus(gpu_s, busy_s)
        while len(self.slots) > SLOTS_MAX:
            del self.slots[next(iter(self.slots))]

    def forget(self, written: Mapping[tuple[int, str], GpuSeconds]) -> None:
        """Drops slots that the store has, but the newest, which still grows."""
        for key in [key for key, seconds in written.items() if self.slots.get(key) == seconds]:
            if key[0] < max(at for at, _ in self.slots):
                del self.slots[key]

    def families(self) -> list[Family]:
        if not self._n_gpus:
            return []
        families: list[Family] = [
            ("gpu_seconds_total", {(("model", name),): round(t.ready, 3) for name, t in self._totals.items()}),
            ("gpu_busy_seconds_total", {(("model", name),): round(t.busy, 3) for name, t in self._totals.items()}),
        ]
        if self._gpu_hour_usd is not None:
            families.append(("gpu_hour_usd", {(): self._gpu_hour_usd}))
        return families
