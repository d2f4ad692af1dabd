"""Requests that wait for a replica of their model: a bounded queue, fair between keys.

Start-time fair queueing, https://doi.org/10.1145/248156.248171: each request moves its flow's clock (a key's) on by 1,
and the flow with the earliest clock goes first. A new flow starts at the queue's present time: it neither waits behind
others' backlog nor has credit. Priorities order the requests of one flow only.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from penstock.spec.gateway import QueueBounds

_CLOCKS_KEPT = 4096


@dataclass(eq=False, slots=True)
class QueueEntry:
    model: str
    flow: bytes
    order: tuple[int, int]  # priority, arrival
    n_bytes: int
    future: asyncio.Future[None] | None = None


@dataclass(slots=True)
class _Flow:
    """Requests of one key for one model; `clock` is when its next one is due."""

    clock: float
    heap: list[tuple[tuple[int, int], QueueEntry]] = field(default_factory=list)
    entries: set[QueueEntry] = field(default_factory=set)


class FairQueue:
    """Entries in the order in which they should go. Pure: no clock, no socket."""

    def __init__(self) -> None:
        self._flows: dict[bytes, _Flow] = {}
        # Of flows that have no entry now: without it, a client that asks again at once would always be first.
        self._clocks: dict[bytes, float] = {}
        self._now = 0.0  # the clock of the flow that was served last
        self.n_waiting = 0

    def push(self, entry: QueueEntry) -> None:
        flow = self._flows.get(entry.flow)
        if flow is None:
            flow = self._flows[entry.flow] = _Flow(max(self._now, self._clocks.pop(entry.flow, 0.0)))
        heapq.heappush(flow.heap, (entry.order, entry))
        flow.entries.add(entry)
        self.n_waiting += 1

    def waiting_of(self, flow: bytes) -> int:
        row = self._flows.get(flow)
        return len(row.entries) if row else 0

    def n_ahead(self, entry: QueueEntry) -> int:
        """How many go before this one if nobody else comes; 0 when it is not in the queue.

        Costs a step for each flow and each entry of its own.
        """
        own = self._flows.get(entry.flow)
        if own is None or entry not in own.entries:
            return 0
        n_own = sum(other.order < entry.order for other in own.entries)
        due, is_before, n_others = own.clock + n_own, True, 0
        for flow in self._flows.values():
            if flow is own:
                is_before = False  # of flows with the same clock the first goes first
            else:
                n_others += min(max(0, int(due - flow.clock) + is_before), len(flow.entries))
        return n_own + n_others

    def remove(self, entry: QueueEntry) -> bool:
        """Whether the entry was in the queue."""
        flow = self._flows.get(entry.flow)
        if flow is None or entry not in flow.entries:
            return False
        flow.entries.discard(entry)
        self.n_waiting -= 1
        if not self.n_waiting:
            self._flows, self._clocks, self._now = {}, {}, 0.0
        elif not flow.entries:
            del self._flows[entry.flow]
            self._clocks[entry.flow] = flow.clock
            if len(self._clocks) > _CLOCKS_KEPT:
                self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}
        elif len(flow.heap) > 2 * len(flow.entries) + 8:
            # Removed entries stay in the heap until they come up; here they would outnumber the rest.
            flow.heap = [item for item in flow.heap if item[1] in flow.entries]
            heapq.heapify(flow.heap)
        return True

    def pop(self) -> QueueEntry | None:
        """The next one to go: of the flow whose clock is earliest, its most urgent and then oldest."""
        if not self._flows:
            return None
        flow = min(self._flows.values(), key=lambda flow: flow.clock)
        while (entry := heapq.heappop(flow.heap)[1]) not in flow.entries:
            pass
        self._now = flow.clock
        flow.clock += 1
        self.remove(entry)
        return entry


class WaitingQueue:
    """Waiting requests per model. `waiting` counts those between `enter` and `leave` that were not let go."""

    def __init__(self, bounds: QueueBounds | None = None) -> None:
        self._bounds = bounds or QueueBounds()
        self._queues: dict[str, FairQueue] = {}
        self._n_bytes = 0
        self._n_arrived = 0
        self.waiting = 0

    def waiting_for(self, model: str) -> int:
        queue = self._queues.get(model)
        return queue.n_waiting if queue else 0

    def n_ahead(self, entry: QueueEntry) -> int:
        return self._queues[entry.model].n_ahead(entry)

    def enter(self, model: str, flow: bytes, priority: int, n_bytes: int) -> QueueEntry | None:
        """A place in the queue, to be given back with `leave`; None when the queue or the flow's part of it is full."""
        queue = self._queues.setdefault(model, FairQueue())
        bounds = self._bounds
        is_crowd = queue.waiting_of(flow) >= bounds.n_requests * bounds.key_share and flow != b""
        if is_crowd or self.waiting >= bounds.n_requests or self._n_bytes + n_bytes > bounds.body_bytes:
            return None
        self._n_arrived += 1
        entry = QueueEntry(model, flow, (priority, self._n_arrived), n_bytes)
        queue.push(entry)
        self.waiting += 1
        self._n_bytes += n_bytes
        return entry

    async def wait(self, entry: QueueEntry, timeout_s: float) -> bool:
        """Whether the entry was let go within the time. Called again after a False, it keeps its place."""
        if entry.future is None:
            entry.future = asyncio.get_running_loop().create_future()
        try:
            # Not wait_for: in Python 3.11 it can swallow the cancellation that a leaving client causes. And a timeout
            # cancels what it awaits, which must not be the future itself: it is waited for again.
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(entry.future)
        except TimeoutError:
            return entry.future.done()
        return True

    def return_to_queue(self, entry: QueueEntry) -> None:
        """Restores the position of an entry that was woken but found no replica."""
        entry.future = None
        self._queues[entry.model].push(entry)
        self.waiting += 1

    def leave(self, entry: QueueEntry) -> None:
        self._n_bytes -= entry.n_bytes
        if self._queues[entry.model].remove(entry):
            self.waiting -= 1

    def wake(self, model: str, n_requests: int | None = None) -> None:
        """Lets the next `n_requests` of those that wait for `model` look again; None means all."""
        queue = self._queues.get(model)
        n_left = self.waiting if n_requests is None else n_requests
        while queue is not None and n_left and (entry := queue.pop()) is not None:
            n_left -= 1
            self.waiting -= 1
            if entry.future is None:
                entry.future = asyncio.get_running_loop().create_future()
            entry.future.set_result(None)
