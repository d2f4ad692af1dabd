"""The gateway put together: two listeners over one table of replicas, and the order in which they stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.gateway import compiled
from penstock.gateway.accounting.entry import Books
from penstock.gateway.accounting.quota_sync import Exchange
from penstock.gateway.accounting.store import is_postgres
from penstock.gateway.admin import Admin
from penstock.gateway.config import GatewayConfig, parse_address, upstream_keys
from penstock.gateway.connections.client import Handler
from penstock.gateway.connections.engine import Pool
from penstock.gateway.connections.listener import Listener, open_socket, open_tls
from penstock.gateway.context import GatewayContext
from penstock.gateway.metrics import Counters
from penstock.gateway.public import Public
from penstock.gateway.routing.queue import WaitingQueue
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.routing.static_upstreams import StaticUpstreams
from penstock.gateway.workers.broadcast import Relay, RelayingAdmin
from penstock.gateway.workers.shared_memory import Board, SharedCounters, SharedInFlight
from penstock.gateway.workers.totals import Tally
from penstock.wire.announcement import engine_key

LEASE_CHECK_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sockets:
    """What a gateway listens on: one public socket per worker, and the admin's."""

    public: tuple[socket.socket, ...]
    admin: socket.socket
    tls: ssl.SSLContext | None

    def close(self) -> None:
        for sock in (*self.public, self.admin):
            sock.close()


def open_sockets(config: GatewayConfig) -> Sockets:
    """All of them bound and listening, or none. Raises UserError."""
    listen, admin = parse_address(config.listen), parse_address(config.admin)
    assert listen is not None
    assert admin is not None
    tls = open_tls(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    # Without keys only our own user may come in by a Unix socket; with them, a front end of another user may.
    mode = 0o600 if config.auth == "none" else 0o666
    opened: list[socket.socket] = []
    try:
        shares_port = config.workers > 1
        opened.append(open_socket(listen, shares_port=False, mode=mode))
        if shares_port:
            # Bound alone first: it tells whether somebody else has the port. And 0 becomes the port that all share.
            listen = (listen[0], opened[0].getsockname()[1])
            opened.pop().close()
            opened += [open_socket(listen, shares_port=True) for _ in range(config.workers)]
        opened.append(open_socket(admin, mode=0o600))
    except BaseException:
        for sock in opened:
            sock.close()
        raise
    return Sockets(tuple(opened[:-1]), opened[-1], tls)


@dataclass(frozen=True)
class Seat:
    """A worker's place among the others: its row of the shared counts, the folder of their admin sockets, the board
    with the numbers of each, the one that worker 0 keeps the drains on, and what other gateways call this one.
    """

    slot: int
    n_workers: int
    counters: SharedCounters
    folder: Path
    numbers: Board
    drains: Board
    name: str

    def drained(self) -> list[str]:
        """What was drained before this worker was started: it must not send a single request there."""
        posted = self.drains.read(0)
        return [] if posted is None else msgspec.json.decode(posted, type=list[str])

    def keep_drained(self, names: list[str]) -> None:
        if not self.drains.post(0, msgspec.json.encode(names)):
            log.warning("%d drains are too many: a worker that is started again will not know them", len(names))

    def admin_address(self, slot: int) -> str:
        return f"unix:{self.folder}/worker-{slot}.sock"


class Gateway:
    """A running gateway, or one worker of it. Both addresses are bound when the constructor returns."""

    def __init__(
        self, config: GatewayConfig, token: str, sockets: Sockets | None = None, seat: Seat | None = None
    ) -> None:
        # Each worker has its own connection to the store: it is opened after the fork.
        exchange = _exchange(config, seat)
        self.books = Books(config, exchange or (seat.counters if seat else None))
        try:
            sockets = sockets or open_sockets(config)
        except BaseException:
            self.books.close()
            raise
        self._config = config
        self._seat = seat
        replicas = ReplicaTable(config.models, config.policy, config.max_in_flight)
        counters = Counters(model.name for model in config.models)
        keys = upstream_keys(config)
        pool = Pool(engine_key(token) if config.engines_need_key else None, keys)
        needs_key = config.auth == "keys"
        hides_key = needs_key or config.engines_need_key or bool(keys)
        self._context = GatewayContext(
            *(replicas, WaitingQueue(config.queue), pool, counters, config.hold_s),
            needs_key=needs_key,
            hides_key=hides_key,
            allowed_origins=config.allowed_origins,
        )
        self._static_upstreams = StaticUpstreams(config.upstreams, replicas, self._context.queue, self._context.pool)
        # Without an admin address of their own, workers trust each other by their folder, which is ours alone.
        slot = seat.slot if seat else 0
        if slot == 0 and self.books.ledger is not None:
            self.books.ledger.keep_days = config.ledger_days
            self.books.ledger.exchange = exchange
        self._tally = Tally(self._context, self.books, seat.numbers if seat else None, slot)
        admin: Handler = Admin(self._context, self.books, self._tally, token or secrets.token_hex(16))
        self._relay: Relay | None = None
        admin_socket = sockets.admin
        if seat is not None:
            replicas.shared = SharedInFlight(seat.counters)
            for name in seat.drained():
                replicas.drain(name)
            if slot == 0:
                admin = self._relaying(admin, replicas, seat, token)
            else:
                address = parse_address(seat.admin_address(slot))
                assert address is not None
                admin_socket = open_socket(address, mode=0o600)
        public = Public(config, self.books, self._context, self._tally)
        self.public = Listener(
            *(public, sockets.public[slot], config.limits, sockets.tls), path_prefix=config.path_prefix
        )
        self.admin = Listener(admin, admin_socket)
        self._lease_timer: asyncio.TimerHandle | None = None

    def _relaying(self, admin: Handler, replicas: ReplicaTable, seat: Seat, token: str) -> Handler:
        """Worker 0's admin: what it hears goes to the others, and drains outlive it."""
        peers = [seat.admin_address(slot) for slot in range(1, seat.n_workers)]
        self._relay = Relay(peers, token)
        return RelayingAdmin(admin, self._relay, lambda: seat.keep_drained(replicas.draining))

    async def start(self) -> None:
        """Begins to serve, admin first: a replica may announce before the first request comes."""
        self.books.start()
        await self.admin.start()
        self._static_upstreams.start()
        if self._relay is not None:
            self._relay.start()
        await self.public.start()
        self._check_leases()
        worker = f" as worker {self._seat.slot}" if self._seat else ""
        form = "compiled" if compiled.is_active() else "as Python; `python -m penstock.gateway.compiled` compiles it"
        log.info("serving on %s, admin on %s%s (%s)", self._config.listen, self._config.admin, worker, form)

    async def stop(self) -> int:
        """Drains and closes everything; returns how many requests did not finish within `drain_s`.

        The admin address stays until the last request is done: a held request may still get its replica.
        """
        log.info(
            "draining: %d in flight, %d waiting", self._context.replicas.in_flight_total, self._context.queue.waiting
        )
        n_cut = await self.public.drain(self._config.drain_s)
        await self.admin.drain(0.0)
        self._static_upstreams.stop()
        if self._relay is not None:
            self._relay.stop()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._context.pool.close()
        await self.books.stop()
        log.info("stopped, %d requests cut", n_cut)
        return n_cut

    def _check_leases(self) -> None:
        """Tells of lapsed leases, which end traffic with or without this, and looks after requests."""
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        for name in self._context.replicas.take_lapsed(now):
            log.warning("replica %s: its lease ran out", name)
        self._context.look_after(now)
        if self._seat is not None:
            self._tally.post()
        self._lease_timer = loop.call_later(LEASE_CHECK_S, self._check_leases)


def _exchange(config: GatewayConfig, seat: Seat | None) -> Exchange | None:
    """A PostgreSQL store may be that of other gateways too; an SQLite file is one gateway's."""
    if config.store is None or not is_postgres(config.store):
        return None
    if seat is not None:
        return Exchange(seat.name, seat.counters)
    return Exchange(secrets.token_hex(8), SharedCounters(n_slots=1))
