"""The replicas, as they announced themselves: who may get traffic now. Pure: the caller gives `now` (monotonic)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from penstock.announce import Announcement, GatewayView, ReplicaView
from penstock.errors import UserError
from penstock.gateway.config import Address, ServedModel
from penstock.gateway.route import choose

ModelState = Literal["ready", "loading", "unavailable"]

RETRY_AFTER_S = 5
RETRY_AFTER_S_MAX = 600

_NAME = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
_COMING_STATES = frozenset(("queued", "starting", "loading", "warming", "restarting"))


@dataclass
class Replica:
    """One row. `address` is None until the engine listens. `is_suspect`: it refused a connection or answered
    that it failed since the last announcement. `is_lapsed`: its lease ran out, and that was told."""

    announcement: Announcement
    address: Address | None
    announced_at: float
    in_flight: int = 0
    is_suspect: bool = False
    is_lapsed: bool = False

    @property
    def name(self) -> str:
        return self.announcement.replica

    def is_alive(self, now: float) -> bool:
        return now - self.announced_at <= self.announcement.lease_s


class Fleet:
    """Announcements, leases, drains and in-flight counts."""

    def __init__(self, models: Collection[ServedModel]) -> None:
        self.models = tuple(models)
        self._by_name = {name: model.name for model in models for name in (model.name, *model.aliases)}
        self._replicas: dict[str, Replica] = {}
        # Names, not rows: a drain may come before the replica's first announcement.
        self._draining: set[str] = set()
        self._turn = 0
        self.in_flight_total = 0

    def resolve(self, name: str | None) -> str | None:
        """The declared model behind a name or alias. None as name means the only model, if there is only one."""
        if name is None:
            return self.models[0].name if len(self.models) == 1 else None
        return self._by_name.get(name)

    def announce(self, announcement: Announcement, now: float) -> bool:
        """Keeps the announcement and starts its lease anew; returns whether the replica is draining.

        Raises UserError for an announcement that could not be served.
        """
        address = _check(announcement)
        if announcement.model not in (model.name for model in self.models):
            raise UserError(f"model {announcement.model!r} is not declared at this gateway")
        row = self._replicas.get(announcement.replica)
        if row is None:
            self._replicas[announcement.replica] = Replica(announcement, address, now)
        else:
            row.announcement, row.address, row.announced_at = announcement, address, now
            row.is_suspect = row.is_lapsed = False
        return announcement.replica in self._draining

    def find(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def drain(self, name: str) -> int:
        """No new requests for this replica, now and after later announcements; returns those in flight."""
        self._draining.add(name)
        row = self._replicas.get(name)
        return row.in_flight if row else 0

    def undrain(self, name: str) -> None:
        self._draining.discard(name)

    def forget(self, name: str) -> None:
        """Drops the row and the drain; requests in flight finish and stay in `in_flight_total`."""
        self._replicas.pop(name, None)
        self._draining.discard(name)

    def suspect(self, replica: Replica, address: Address) -> bool:
        """No new requests until the next announcement, after a refused connection or a failed answer.

        Returns whether that is news.

        None of it when the replica has announced another address in the meantime.
        """
        is_news = replica.address == address and not replica.is_suspect
        replica.is_suspect = replica.is_suspect or is_news
        return is_news

    def is_ready(self, replica: Replica, now: float) -> bool:
        return (
            replica.announcement.state == "ready"
            and replica.address is not None
            and not replica.is_suspect
            and replica.is_alive(now)
            and replica.name not in self._draining
        )

    def ready(self, model: str, now: float) -> list[Replica]:
        """The replicas of `model` that may get a request now."""
        return [row for row in self._replicas.values() if row.announcement.model == model and self.is_ready(row, now)]

    def begin(self, model: str, now: float, avoid: Collection[str] = ()) -> Replica | None:
        """Chooses a replica and counts a request on it; every one begun must be ended."""
        self._turn += 1
        replica = choose(self.ready(model, now), self._turn, avoid)
        if replica is not None:
            replica.in_flight += 1
            self.in_flight_total += 1
        return replica

    def end(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self.in_flight_total -= 1

    def model_state(self, model: str, now: float) -> ModelState:
        if self.ready(model, now):
            return "ready"
        return "loading" if self._coming(model, now) else "unavailable"

    def retry_after_s(self, model: str, now: float) -> int:
        """Seconds after which to ask again: the shortest estimate of a replica on its way, else RETRY_AFTER_S."""
        estimates = [
            row.announcement.progress.eta_s - (now - row.announced_at)
            for row in self._coming(model, now)
            if row.announcement.progress is not None and row.announcement.progress.eta_s is not None
        ]
        return min(max(1, math.ceil(min(estimates))), RETRY_AFTER_S_MAX) if estimates else RETRY_AFTER_S

    def _coming(self, model: str, now: float) -> list[Replica]:
        return [
            row
            for row in self._replicas.values()
            if row.announcement.model == model
            and row.announcement.state in _COMING_STATES
            and row.is_alive(now)
            and row.name not in self._draining
        ]

    def take_lapsed(self, now: float) -> list[str]:
        """Replicas whose lease ran out since the last call, each told once."""
        lapsed = [row for row in self._replicas.values() if not row.is_lapsed and not row.is_alive(now)]
        for row in lapsed:
            row.is_lapsed = True
        return [row.name for row in lapsed]

    def view(self, now: float, waiting: int, requests_total: int) -> GatewayView:
        """The answer of GET /admin/replicas; the gateway's own counts come from the caller."""
        rows = tuple(
            ReplicaView(
                announcement=row.announcement,
                age_s=round(now - row.announced_at, 3),
                is_alive=row.is_alive(now),
                is_draining=row.name in self._draining,
                in_flight=row.in_flight,
            )
            for row in self._replicas.values()
        )
        return GatewayView(rows, self.in_flight_total, waiting, requests_total)


def _check(announcement: Announcement) -> Address | None:
    if not _NAME.match(announcement.replica):
        raise UserError(f"replica name {announcement.replica!r} is not 1 to 128 of A-Z a-z 0-9 . _ : -")
    if not 0 < announcement.lease_s < math.inf:
        raise UserError(f"lease_s {announcement.lease_s} is not a positive number of seconds")
    if announcement.url is None:
        if announcement.state == "ready":
            raise UserError(f"replica {announcement.replica!r} is ready without a url")
        return None
    return _parse_url(announcement.url)


def _parse_url(url: str) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query or "@" in parts.netloc:
        raise UserError(f"url {url!r} is not http://host:port")
    return host, port or 80
