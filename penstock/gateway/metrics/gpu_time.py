"""Keeps the GPU time of a gateway in its store, so that `penstock usage` knows it over restarts.

Gateways on one store count the same replicas: of a slot of five minutes the store keeps the longest count, so two of
them count once, and a restart loses at most what ran of the slot before it.
"""

from __future__ import annotations

import asyncio
import contextlib

from penstock.errors import PenstockError
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.accounting.usage_store import UsageStore
from penstock.gateway.config import GatewayConfig
from penstock.gateway.metrics.cost import GpuTime
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.world import REAL, World

KEEP_EVERY_S = 30.0
LAST_WRITE_S = 2.0


class GpuTimeKeeper:
    def __init__(
        self, config: GatewayConfig, replicas: ReplicaTable, ledger: Ledger | None, world: World = REAL
    ) -> None:
        self._world = world
        self.counted = GpuTime(config.gpus_per_replica, config.gpu_hour_usd)
        self._replicas = replicas
        self._ledger = ledger if ledger is not None and ledger.store is not None else None
        self._writing: asyncio.Task[None] | None = None
        self._due_at = 0.0

    def tick(self, now: float) -> None:
        """Once a second. `now` is monotonic."""
        self.counted.count(self._replicas.all(), now, self._world.unix())
        is_free = self._writing is None or self._writing.done()
        if self._ledger is not None and self.counted.slots and is_free and now >= self._due_at:
            self._due_at = now + KEEP_EVERY_S
            self._writing = asyncio.get_running_loop().create_task(self._write(self._ledger))

    async def stop(self) -> None:
        """Writes what is left, unless the store takes too long."""
        if self._ledger is not None and self.counted.slots:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write(self._ledger)

    async def _write(self, ledger: Ledger) -> None:
        slots, gpu_hour_usd = dict(self.counted.slots), self.counted.gpu_hour_usd
        with contextlib.suppress(PenstockError):  # the ledger reports it; the next write has these slots too
            await ledger.call(lambda database: UsageStore(database).put_gpu_time(slots, gpu_hour_usd))
            self.counted.forget(slots)
