"""Engines that penstock did not start: probed for their health, and announced like any other replica."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.gateway.config import Address, host_header, parse_url
from penstock.gateway.connections.engine import OWN_ERRORS, Pool, UpstreamError, call
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import Replica, ReplicaTable
from penstock.spec.gateway import Upstream
from penstock.wire.announcement import Announcement, ReplicaState
from penstock.wire.answers import decode_json
from penstock.wire.http1 import write_request_head
from penstock.wire.model_list import read_models
from penstock.world import REAL, World

PROBE_S = 1.0
PROBE_TIMEOUT_S = 2.0
# Three probes: an engine whose event loop is busy with one long prompt answers them slowly.
LEASE_S = 3 * (PROBE_S + PROBE_TIMEOUT_S)
# An engine has failed after this many probes in a row without an answer; one that refuses has failed at once.
MAX_SILENT = 2

_UNREACHABLE = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))

log = logging.getLogger(__name__)


class SilentMachineError(TimeoutError):
    """Nothing came back to the first packet."""


async def probe(pool: Pool, address: Address) -> Exception | None:
    """The engine's problem, if any. A status below 500 is healthy: not every engine has /health."""
    status, is_connected = 0, False
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            connection = await pool.connect(address)
            is_connected = True
            try:
                headers = [(b"host", host_header(address)), (b"connection", b"close")]
                status, _ = await call(connection, write_request_head(b"GET", b"/health", headers))
            finally:
                connection.discard()
    except TimeoutError:
        if is_connected:
            return TimeoutError(f"no answer to GET /health in {PROBE_TIMEOUT_S:g} s")
        return SilentMachineError(f"no connection in {PROBE_TIMEOUT_S:g} s")
    except (OSError, UpstreamError) as error:
        return error
    if status >= 500:
        return UpstreamError(f"GET /health answered {status}")
    return None


async def ask_max_model_len(pool: Pool, address: Address, model: str | None) -> int | None:
    """The longest request of `model`, or of the engine's first one; None where its /v1/models does not say."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            connection = await pool.connect(address)
            try:
                request = b"GET /v1/models HTTP/1.1\r\n%sconnection: close\r\n\r\n" % connection.origin_lines
                _, body = await call(connection, request)
            finally:
                connection.discard()
        cards = read_models(decode_json(body, "models"), "upstream")
    except (OSError, UpstreamError, PenstockError):  # a TimeoutError is an OSError
        return None
    named = [card for card in cards if card.name == model] or list(cards)
    return named[0].max_model_len if named else None


def is_silent(problem: Exception | None) -> bool:
    """Whether the machine may be off, or its network; one that is busy still takes connections."""
    return isinstance(problem, SilentMachineError) or (isinstance(problem, OSError) and problem.errno in _UNREACHABLE)


class LapsedProbes:
    """Probes replicas whose lease ended while they work, so that a machine that is off ends its requests."""

    def __init__(self, replicas: ReplicaTable, pool: Pool, world: World = REAL) -> None:
        self._world = world
        self._replicas, self._pool = replicas, pool
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def start_due(self, now: float) -> None:
        for replica in self._replicas.lapsed_at_work(now):
            if replica not in self._tasks and replica.address is not None:
                self._tasks[replica] = asyncio.create_task(self._probe(replica, replica.address, now))

    async def _probe(self, replica: Replica, address: Address, began_at: float) -> None:
        try:
            problem = await probe(self._pool, address)
            if not replica.is_alive(self._world.now()):
                replica.note_probe(is_silent(problem), began_at)
        finally:
            del self._tasks[replica]

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()


class StaticUpstreams:
    def __init__(
        self,
        upstreams: Sequence[Upstream],
        replicas: ReplicaTable,
        queue: WaitingQueue,
        pool: Pool,
        world: World = REAL,
    ) -> None:
        self._world = world
        # Clients see these names, and an engine's address is none of their business.
        self._upstreams = {f"upstream-{number}": upstream for number, upstream in enumerate(upstreams, 1)}
        self._replicas, self._queue, self._pool = replicas, queue, pool
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch(name, upstream)) for name, upstream in self._upstreams.items()]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self, name: str, upstream: Upstream) -> None:
        address = parse_url(upstream.url)
        assert address is not None
        n_silent = 0
        state: ReplicaState = "starting"
        was_ready = False
        silent_since: float | None = None
        max_model_len: int | None = None
        while True:
            began_at = self._world.now()
            problem = await probe(self._pool, address)
            if isinstance(problem, OSError) and problem.errno in OWN_ERRORS:
                log.error("%s at %s could not be probed: %s", name, upstream.url, problem)
                await self._world.pause(PROBE_S)
                continue
            n_silent = n_silent + 1 if isinstance(problem, TimeoutError) else 0
            is_doubted = was_ready and 0 < n_silent < MAX_SILENT
            before = state
            if problem is None:
                state, was_ready = "ready", True
            elif not is_doubted:
                state = "stalled" if was_ready else "starting"
            if state != before:
                reason = f": {problem}" if problem else ""
                log.info("%s at %s: %s -> %s%s", name, upstream.url, before, state, reason)
            silent_since = (silent_since or began_at) if is_silent(problem) else None
            self._announce(name, upstream, state, problem, max_model_len)
            if state == "ready" and state != before:
                max_model_len = await ask_max_model_len(self._pool, address, upstream.model)
                self._announce(name, upstream, state, problem, max_model_len)
            replica = self._replicas.find(name)
            assert replica is not None
            replica.silent_since = silent_since
            await self._world.pause(PROBE_S)

    def _announce(
        self, name: str, upstream: Upstream, state: ReplicaState, problem: Exception | None, max_model_len: int | None
    ) -> None:
        reason = str(problem) if problem else None
        model = self._replicas.resolve(upstream.model)
        assert model is not None
        now = self._world.now()
        facts = Announcement(
            *(name, model, state, LEASE_S), url=upstream.url, reason=reason, max_model_len=max_model_len
        )
        self._replicas.announce(facts, now)
        if state == "ready":
            self._queue.wake(model)
