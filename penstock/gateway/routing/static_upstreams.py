"""Engines that penstock did not start: probed for their health, and announced like any other replica."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.gateway.config import Address, host_header, parse_url
from penstock.gateway.connections.engine import CONNECT_S, OWN_ERRORS, Pool, UpstreamConnection, UpstreamError, call
from penstock.gateway.context import GatewayContext
from penstock.gateway.routing.replicas import Replica
from penstock.spec.gateway import Upstream
from penstock.wire.announcement import ACTIVE, UPSTREAM, Announcement, ReplicaState
from penstock.wire.answers import decode_json
from penstock.wire.model_list import read_models

PROBE_S = 1.0  # between two probes
PROBE_TIMEOUT_S = 2.0
N_PROBES = 3  # that a lease lasts

_UNREACHABLE = frozenset((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))

log = logging.getLogger(__name__)


class SilentMachineError(TimeoutError):
    """Nothing came back to the first packet."""


class HealthProbe:
    """GET /health of an engine. A silent one is waited for, and asked again after `patience_s`: backlogs are finite."""

    def __init__(self, pool: Pool, address: Address, patience_s: float = PROBE_TIMEOUT_S) -> None:
        self._pool, self._address, self._patience_s = pool, address, patience_s
        self._connection: UpstreamConnection | None = None

    async def ask(self, timeout_s: float = PROBE_TIMEOUT_S) -> Exception | None:
        """The engine's problem, if any. A status below 500 is healthy: not every engine has /health."""
        problem: Exception | None = None
        try:
            async with asyncio.timeout(timeout_s):
                if self._connection is None:
                    self._connection = await self._pool.connect(self._address)
                    self._until = self._pool.now() + self._patience_s
                    request = b"GET /health HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n"
                    self._answer = call(self._connection, request % host_header(self._address))
                status, _ = await asyncio.shield(self._answer)
            if status >= 500:  # of a proxy, 504 says that its engine is silent
                problem = (TimeoutError if status == 504 else UpstreamError)(f"GET /health answered {status}")
        except TimeoutError:
            if self._connection is None:
                return SilentMachineError(f"no connection in {min(timeout_s, CONNECT_S):g} s")
            problem = TimeoutError(f"no answer to GET /health in {timeout_s:g} s")
            if self._pool.now() < self._until:
                return problem
        except (OSError, UpstreamError) as error:
            problem = error
        self.close()
        return problem

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.discard()


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
        cards = read_models(decode_json(body or b"", "models"), "upstream")
    except (OSError, UpstreamError, PenstockError):  # a TimeoutError is an OSError
        return None
    named = [card for card in cards if card.name == model] or list(cards)
    return named[0].max_model_len if named else None


def is_silent(problem: Exception | None) -> bool:
    """Whether the machine may be off, or its network; one that is busy still takes connections."""
    return isinstance(problem, SilentMachineError) or (isinstance(problem, OSError) and problem.errno in _UNREACHABLE)


def next_state(before: ReplicaState, problem: Exception | None, silent_s: float, upstream: Upstream) -> ReplicaState:
    """The state after a probe; `silent_s`: since an answer to a probe, or a byte of a request's answer. Pure.

    An engine that refuses, or answers that it failed, is dead at once. One that takes the connection and is silent is
    busy until `hung_s`; a machine that takes none, until the second probe.
    """
    if problem is None:
        return "ready"
    has_served, is_machine_silent = before != "starting", isinstance(problem, SilentMachineError)
    limit_s = 2 * upstream.health_s + PROBE_S if is_machine_silent else upstream.hung_s
    if isinstance(problem, TimeoutError) and silent_s < limit_s and (has_served or not is_machine_silent):
        return "busy"
    return "stalled" if has_served else "starting"


class LapsedProbes:
    """Probes replicas whose lease ended while they work, so that a machine that is off ends its requests."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def start_due(self, now: float) -> None:
        for replica in self._context.replicas.lapsed_at_work(now):
            if replica not in self._tasks and replica.address is not None:
                self._tasks[replica] = asyncio.create_task(self._probe(replica, replica.address, now))

    async def _probe(self, replica: Replica, address: Address, began_at: float) -> None:
        try:
            with contextlib.closing(HealthProbe(self._context.pool, address)) as health:
                problem = await health.ask()
            if not replica.is_alive(self._context.now()):
                replica.note_probe(is_silent(problem), began_at)
        finally:
            del self._tasks[replica]

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()


class StaticUpstreams:
    """Clients see the names upstream-1, upstream-2 ...: an engine's address is none of their business."""

    def __init__(self, upstreams: Sequence[Upstream], context: GatewayContext) -> None:
        self._upstreams, self._context = upstreams, context
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        named = ((f"{UPSTREAM}{number}", upstream) for number, upstream in enumerate(self._upstreams, 1))
        self._tasks = [asyncio.create_task(self._watch(name, upstream)) for name, upstream in named]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self, name: str, upstream: Upstream) -> None:
        replicas, now, pause = self._context.replicas, self._context.now, self._context.world.pause
        address, model = parse_url(upstream.url), replicas.resolve(upstream.model)
        assert address is not None
        assert model is not None
        state: ReplicaState = "starting"
        answered_at = now()
        max_model_len: int | None = None
        with contextlib.closing(HealthProbe(self._context.pool, address, upstream.hung_s)) as health:
            while True:
                began_at, before = now(), state
                problem = await health.ask(upstream.health_s)
                if isinstance(problem, OSError) and problem.errno in OWN_ERRORS:
                    log.error("%s at %s could not be probed: %s", name, upstream.url, problem)
                    await pause(PROBE_S)
                    continue
                if not isinstance(problem, TimeoutError):
                    answered_at = now()
                row = replicas.find(name)
                heard_at, silent_since = (0.0, None) if row is None else (row.heard_at, row.silent_since)
                state = next_state(before, problem, now() - max(answered_at, heard_at), upstream)
                if state != before:
                    reason = f": {problem}" if problem else ""
                    log.info("%s at %s: %s -> %s%s", name, upstream.url, before, state, reason)
                facts = Announcement(
                    *(name, model, state, N_PROBES * (PROBE_S + upstream.health_s), upstream.url),
                    reason=str(problem) if problem else None, max_model_len=max_model_len,
                )  # fmt: skip
                replicas.announce(facts, now())
                if (row := replicas.find(name)) is not None:
                    row.note_probe(is_silent(problem), silent_since or began_at)
                if state in ACTIVE:
                    self._context.queue.wake(model)
                if state == "ready" and state != before:  # the next announcement has it
                    max_model_len = await ask_max_model_len(self._context.pool, address, upstream.model)
                await pause(PROBE_S)
