"""What this gateway tells of itself, all workers together: `/metrics` and the view of the admin address.

Every worker posts its numbers on a board, once a second and whenever it is asked; who is asked adds up what stands
there. Nothing that was told is ever untold: one asks posts first, so that the next one who is asked elsewhere knows at
least as much; and a worker that takes a dead one's place counts on from what that one posted last. What a killed worker
counted in its last second was told by nobody, and is lost.
"""

from __future__ import annotations

import logging
import time

import msgspec

from penstock.gateway import metrics as exposition
from penstock.gateway.accounting.entry import Books
from penstock.gateway.context import GatewayContext
from penstock.gateway.metrics import Distribution, Family, Gauges
from penstock.gateway.workers.shared_memory import Board
from penstock.wire.announcement import GatewayView

log = logging.getLogger(__name__)


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """Of one worker, or of several. `n_requests` is since the start, `n_in_flight` and `n_waiting` are now."""

    families: list[Family]
    distributions: list[Distribution]
    n_requests: int = 0
    n_in_flight: int = 0
    n_waiting: int = 0


class Tally:
    """This worker's numbers and, with a board, those of the others; a slot of it is this worker's."""

    def __init__(self, context: GatewayContext, books: Books, board: Board | None = None, slot: int = 0) -> None:
        self._context = context
        self._books = books
        self._board = board
        self._slot = slot
        self._is_told = False
        # What the workers before this one in its slot have counted.
        before = self._read(slot) if board is not None else None
        self._before = [_without_gauges(before)] if before is not None else []

    def post(self) -> None:
        """Lets the other workers know."""
        self._post(self._own())

    def metrics(self) -> bytes:
        """The text of GET /metrics."""
        numbers = self._all()
        return exposition.write_metrics(numbers.families, numbers.distributions)

    def view(self) -> GatewayView:
        """The answer of GET /admin/replicas."""
        numbers = self._all()
        view = self._context.replicas.view(time.monotonic(), numbers.n_waiting, numbers.n_requests)
        return msgspec.structs.replace(view, in_flight_total=numbers.n_in_flight)

    def _own(self) -> Numbers:
        context = self._context
        replicas, counters, now = context.replicas, context.counters, time.monotonic()
        view = replicas.view(now, context.queue.waiting, counters.n_requests)
        waiting = {model.name: context.queue.waiting_for(model.name) for model in replicas.models}
        ready = {model.name: len(replicas.ready(model.name, now)) for model in replicas.models}
        families = exposition.families(counters, Gauges(view, waiting, ready, replicas.n_ejections))
        numbers = Numbers(
            families + self._books.families(),
            exposition.distributions(counters),
            view.requests_total,
            view.in_flight_total,
            view.waiting,
        )
        return _add([numbers, *self._before]) if self._before else numbers

    def _all(self) -> Numbers:
        own = self._own()
        board = self._board
        if board is None:
            return own
        self._post(own)
        others = [(slot, self._read(slot)) for slot in range(board.n_slots) if slot != self._slot]
        known = [(slot, numbers) for slot, numbers in others if numbers is not None]
        # A worker that is gone has nothing waiting; what it counted was counted.
        return _add([own, *(part if board.is_live(slot) else _without_gauges(part) for slot, part in known)])

    def _post(self, numbers: Numbers) -> None:
        board = self._board
        if board is None or board.post(self._slot, msgspec.msgpack.encode(numbers)) or self._is_told:
            return
        self._is_told = True
        log.warning("this worker has too many metrics to share with the other workers")

    def _read(self, slot: int) -> Numbers | None:
        assert self._board is not None
        posted = self._board.read(slot)
        return None if posted is None else msgspec.msgpack.decode(posted, type=Numbers)


def _without_gauges(numbers: Numbers) -> Numbers:
    return Numbers(exposition.only_counters(numbers.families), numbers.distributions, numbers.n_requests)


def _add(parts: list[Numbers]) -> Numbers:
    return Numbers(
        exposition.add_families(part.families for part in parts),
        exposition.add_distributions(part.distributions for part in parts),
        sum(part.n_requests for part in parts),
        sum(part.n_in_flight for part in parts),
        sum(part.n_waiting for part in parts),
    )
