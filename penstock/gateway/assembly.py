"""The gateway put together: two listeners over one fleet, and the order in which they stop."""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.gateway.admin import Admin
from penstock.gateway.config import GatewayConfig, parse_address
from penstock.gateway.exposition import Counters
from penstock.gateway.fleet import Fleet
from penstock.gateway.forward import Desk
from penstock.gateway.hold import Hold
from penstock.gateway.listener import Listener, open_socket
from penstock.gateway.public import Public
from penstock.gateway.upstream import Pool

LEASE_CHECK_S = 1.0

log = logging.getLogger(__name__)


class Gateway:
    """A running gateway. Both addresses are bound when the constructor returns; UserError when one cannot be."""

    def __init__(self, config: GatewayConfig, token: str) -> None:
        listen, admin = parse_address(config.listen), parse_address(config.admin)
        assert listen is not None
        assert admin is not None
        fleet = Fleet(config.models)
        self._config = config
        self._desk = Desk(fleet, Hold(), Pool(), Counters(), config.hold_s, config.auth == "keys")
        public_socket = open_socket(listen)
        try:
            admin_socket = open_socket(admin)
        except BaseException:
            public_socket.close()
            raise
        self.public = Listener(Public(config, self._desk), public_socket)
        self.admin = Listener(Admin(self._desk, token), admin_socket)
        self._lease_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begins to serve, admin first: a replica may announce before the first request comes."""
        await self.admin.start()
        await self.public.start()
        self._check_leases()
        log.info("serving on %s, admin on %s", self._config.listen, self._config.admin)

    async def stop(self) -> int:
        """Drains and closes everything; returns how many requests did not finish within `drain_s`.

        The admin address stays until the last request is done: a held request may still get its replica.
        """
        log.info("draining: %d in flight, %d waiting", self._desk.fleet.in_flight_total, self._desk.hold.waiting)
        n_cut = await self.public.drain(self._config.drain_s)
        await self.admin.drain(0.0)
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._desk.pool.close()
        log.info("stopped, %d requests cut", n_cut)
        return n_cut

    def _check_leases(self) -> None:
        """Only tells: a lapsed replica gets no traffic with or without this."""
        loop = asyncio.get_running_loop()
        for name in self._desk.fleet.take_lapsed(time.monotonic()):
            log.warning("replica %s: its lease ran out", name)
        self._lease_timer = loop.call_later(LEASE_CHECK_S, self._check_leases)
