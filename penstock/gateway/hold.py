"""Requests that wait for a replica of their model. Bounded in number and in bytes."""

from __future__ import annotations

import asyncio

from penstock.units import GIB

MAX_WAITING = 4096
MAX_WAITING_BYTES = GIB


class Hold:
    """Waiting requests per model. `waiting` counts exactly those inside `wait`, however they leave it."""

    def __init__(self) -> None:
        self._futures: dict[str, set[asyncio.Future[None]]] = {}
        self._n_bytes = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._futures.values()))

    def waiting_for(self, model: str) -> int:
        return len(self._futures.get(model, ()))

    def has_room(self, n_bytes: int) -> bool:
        return self.waiting < MAX_WAITING and self._n_bytes + n_bytes <= MAX_WAITING_BYTES

    async def wait(self, model: str, timeout_s: float, n_bytes: int) -> None:
        """Returns when `wake(model)` was called or the time is over; the caller looks which."""
        future = asyncio.get_running_loop().create_future()
        futures = self._futures.setdefault(model, set())
        futures.add(future)
        self._n_bytes += n_bytes
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that a leaving client causes.
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            futures.discard(future)
            self._n_bytes -= n_bytes

    def wake(self, model: str) -> None:
        """Lets every request that waits for `model` look again."""
        for future in self._futures.get(model, ()):
            if not future.done():
                future.set_result(None)
