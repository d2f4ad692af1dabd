"""The gateway put together: two listeners over one table of replicas, and the order in which they stop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway import compiled
from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.admin import AdminApi
from penstock.gateway.config import GatewayConfig, parse_address, upstream_keys
from penstock.gateway.connections.engine import Pool
from penstock.gateway.connections.listener import (
    BACKLOG,
    HANDSHAKES_S,
    Listener,
    fit_connections,
    open_socket,
    open_tls,
)
from penstock.gateway.context import GatewayContext
from penstock.gateway.live.news import NewsBoard
from penstock.gateway.live.stream import LiveFeed
from penstock.gateway.metrics.counters import Counters
from penstock.gateway.metrics.engine_metrics import EngineMetrics
from penstock.gateway.metrics.gpu_time import GpuTime
from penstock.gateway.metrics.monitoring import Monitoring
from penstock.gateway.public import Public
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.routing.static_upstreams import LapsedProbes, StaticUpstreams
from penstock.gateway.workers.link import ParentLink, WorkerSlot
from penstock.gateway.workers.reports import Reporter
from penstock.log_lines import bound_output
from penstock.processes import raise_file_limit
from penstock.wire.announcement import engine_key
from penstock.world import REAL, World

LEASE_CHECK_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sockets:
    """The sockets of a gateway. Its workers share both: each accepts from the same queues."""

    public: socket.socket
    admin: socket.socket
    tls: ssl.SSLContext | None

    def close(self) -> None:
        for sock in (self.public, self.admin):
            sock.close()


def open_sockets(config: GatewayConfig, inherited: Sequence[int] = ()) -> Sockets:
    """Both of them bound and listening, or none; `inherited` ones are bound already. Raises UserError."""
    listen, admin = parse_address(config.listen), parse_address(config.admin)
    assert listen is not None and admin is not None
    tls = open_tls(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    if inherited:
        public, own_admin = (socket.socket(fileno=number) for number in inherited)
        own_admin.listen(BACKLOG)
        for sock in (public, own_admin):
            sock.setblocking(False)
        return Sockets(public, own_admin, tls)
    # Without keys only our own user may come in by a Unix socket; with them, a front end of another user may.
    public = open_socket(listen, mode=0o600 if config.auth == "none" else 0o666)
    try:
        return Sockets(public, open_socket(admin, mode=0o600), tls)
    except BaseException:
        public.close()
        raise


class Gateway:
    """A running gateway, or one worker of it."""

    def __init__(
        self, config: GatewayConfig, token: str, sockets: Sockets, slot: WorkerSlot | None = None, world: World = REAL
    ) -> None:
        # Each worker has its own connection to the store: it is opened after the fork.
        self.accounting = Accounting(config, world)
        self._config, self._slot = config, slot
        self._is_first = slot is None or slot.index == 0
        most, totals = config.max_in_flight, None if config.store is None else self.accounting.running_totals
        if most is not None and totals is None:  # nothing adds up what other workers have
            most = math.ceil(most / config.workers)
        replicas = ReplicaTable(config.models, config.policy, most, totals)
        counters = Counters([model.name for model in config.models], config.slo.ttft_ms, config.slo.tpot_ms)
        # The same in all workers, and in no other gateway.
        facts = f"{socket.gethostname()} {token} {config}"
        via = b"penstock-" + hashlib.sha256(facts.encode()).hexdigest()[:16].encode()
        pool = Pool(engine_key(token) if config.engines_need_key else None, upstream_keys(config), via, world)
        self._context = GatewayContext(config, replicas, WaitingQueue(config.queue), pool, counters, world)
        self._static_upstreams = StaticUpstreams(config.upstreams, self._context)
        self._lapsed_probes = LapsedProbes(self._context)
        store = self.accounting.ledger.store if self.accounting.ledger is not None else None
        if store is not None and self._is_first:
            store.keep_days = config.ledger_days
        before = slot.before if slot else None
        self._reporter = Reporter(self._context, self.accounting, NewsBoard(config), before)
        self._reporter.began_at = slot.began_at if slot is not None else world.now()
        self._context.tell_workers = self._reporter.relay
        if self._is_first:
            self._reporter.gpu_time = GpuTime(config.gpus_per_replica, config.gpu_hour_usd, self.accounting.ledger)
        self._live = LiveFeed(config, self._reporter, world)
        self._engine_metrics = EngineMetrics(config, replicas, pool, world)
        monitoring = Monitoring(self.accounting, self._reporter, self._engine_metrics, self._live, token)
        self._api = AdminApi(self._context, self.accounting, self._reporter, monitoring, token)
        if slot is not None:
            for path, body in slot.calls:
                self._api.apply(path, body)
            self._reporter.link = ParentLink(self._reporter.encode, self._api.apply, self._end_without_parent)
        public = Public(config, self.accounting, self._context, monitoring)
        self.public = Listener(
            *(public, sockets.public, fit_connections(config.limits, raise_file_limit()), sockets.tls),
            share=slot.public if slot else None,
            path_prefix=config.path_prefix or "",
            world=world,
        )
        self.admin = Listener(self._api, sockets.admin, share=slot.admin if slot else None, world=world)
        self._lease_timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[int] | None = None

    def _end_without_parent(self) -> None:
        """The parent died: whoever takes its place needs both addresses, also before the last request is done."""
        log.error("the parent process has died")
        self._ending = asyncio.get_running_loop().create_task(self.admin.drain(0.0))
        os.kill(os.getpid(), signal.SIGTERM)

    async def start(self) -> None:
        """Begins to serve, admin first: a replica may announce before the first request comes."""
        self.accounting.start()
        await self.admin.start()
        self._static_upstreams.start()
        if self._slot is not None and self._reporter.link is not None:
            await self._reporter.link.start(self._slot.socket)
        await self.public.start()
        self._live.start()
        self._check_leases()
        worker = f" as worker {self._slot.index}" if self._slot else ""
        form = "compiled" if compiled.is_active() else "as Python; `python -m penstock.gateway.compiled` compiles it"
        log.info("serving on %s, admin on %s%s (%s)", self._config.listen, self._config.admin, worker, form)

    async def stop(self) -> int:
        """Drains; returns how many requests did not finish. The admin address stays until then: replicas may come."""
        log.info(
            "draining: %d in flight, %d waiting", self._context.replicas.in_flight_total, self._context.queue.waiting
        )
        self._live.stop()
        is_vain = self._context.holds_while_loading  # what waits here can never be served
        n_cut = await self.public.drain(2 * HANDSHAKES_S if is_vain else self._config.drain_s)
        await self.admin.drain(0.0)
        self._static_upstreams.stop()
        self._lapsed_probes.stop()
        self._engine_metrics.stop()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._context.pool.close()
        if self._reporter.gpu_time is not None:
            await self._reporter.gpu_time.stop()
        await self.accounting.stop()
        if self._reporter.link is not None:
            self._reporter.link.report()
            self._reporter.link.close()
        log.info("stopped, %d requests cut", n_cut)
        return n_cut

    def _check_leases(self) -> None:
        """Logs leases that ended (which end traffic in any case) and looks after requests."""
        now = self._context.now()
        for name in self._context.replicas.take_lapsed(now):
            log.warning("replica %s: its lease ran out", name)
        self._lapsed_probes.start_due(now)
        self._context.look_after(now)
        self.accounting.watch_keys()
        if self._is_first:
            bound_output()
        if self._reporter.gpu_time is not None:
            self._reporter.gpu_time.tick(self._context.replicas.all(), now, self._context.unix())
        if self._reporter.link is not None:
            self._reporter.link.report()
        self._lease_timer = asyncio.get_running_loop().call_later(LEASE_CHECK_S, self._check_leases)
