"""The replicas, as they announced themselves: who may get traffic now. Pure: the caller gives `now` (monotonic)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from penstock.errors import UserError
from penstock.gateway.accounting.running_totals import AT_ONCE, Total, Totals
from penstock.gateway.config import Address, ServedModel, parse_url
from penstock.gateway.routing.health import Health
from penstock.gateway.routing.policies import choose
from penstock.spec.gateway import PolicyName
from penstock.wire.announcement import ACTIVE, Announcement, EngineLoad, GatewayView, Progress, ReplicaView
from penstock.wire.waiting import Waiting

ModelState = Literal["ready", "loading", "sleeping", "unavailable"]
Order = Literal["sleep", "wake"]

RETRY_AFTER_S = 5
RETRY_AFTER_S_MAX = 600
# A request that got no byte for so long, from an engine that reported itself idle for as long, is lost.
STALL_S = 30.0
# The same with a machine that answered no probe for as long. More than 25 s: a network may fail for a moment.
SILENT_S = 30.0

KV_PRESSURE = 0.9
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0
MAX_ADAPTERS = 1024
MAX_KEPT = 65536  # response ids
SEARCHED_BYTES = 4096  # of a response, for its id

_NAME: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
_RESPONSE_ID: Final = re.compile(rb"\"id\"\s*:\s*\"(resp_[A-Za-z0-9_\-]{1,128})\"")
_COMING_STATES: Final = frozenset(
    ("queued", "starting", "loading", "warming", "restarting", "sleeping", "waking")  # a request wakes one that sleeps
)
_WORDS: Final = {"queue": "waiting", "waiting": "waiting", "starting": "starting"}


class RoutingHints(NamedTuple):
    """A key for the policy, an adapter, and the replica that has the request's stored response."""

    key: bytes = b""
    adapter: str | None = None
    replica: str | None = None


NO_HINTS: Final = RoutingHints()


@dataclass(slots=True, eq=False)
class Replica:
    """One row. `address` is None until the engine listens. `is_lapsed`: its lease ran out, and that was reported.

    `is_suspect`: since its last announcement it refused a connection or answered that it failed.
    `external_load`: requests that the engine counts and this gateway did not send. `effective_weight`: its announced
    weight, less when its KV cache is nearly full. `weight`: what policies see, less after an ejection.
    """

    announcement: Announcement
    address: Address | None
    announced_at: float
    in_flight: int = 0
    is_suspect: bool = False
    is_lapsed: bool = False
    effective_weight: float = 1.0
    weight: float = 1.0
    external_load: float = 0.0
    shared: Total | None = None  # what all workers and gateways have on it, where they add that up
    idle_since: float | None = None  # as the engine reports
    silent_since: float | None = None  # the first of the probes in a row that its machine did not answer
    heard_at: float = 0.0  # a byte of an answer came, to within HEARD_S
    health: Health = field(default_factory=Health)
    _peaks: tuple[int, int] = (0, 0)  # most in flight since the last announcement, and in the time before it

    @property
    def name(self) -> str:
        return self.announcement.replica

    @property
    def load(self) -> float:
        return self.in_flight + self.load_of_other_workers + self.external_load

    @property
    def load_of_other_workers(self) -> int:
        return 0 if self.shared is None else self.shared.others

    def is_alive(self, now: float) -> bool:
        return now - self.announced_at <= self.announcement.lease_s

    def note_probe(self, is_silent: bool, began_at: float) -> None:
        since = self.silent_since or began_at
        self.silent_since = since if is_silent and self.heard_at < since else None

    def why_lost(self, silent_s: float, now: float) -> str | None:
        """Why a request that got no byte for so long gets none any more: the engine reports that it works on nothing,
        or its machine is silent. None while it may get some."""
        if silent_s >= STALL_S and self.idle_since is not None and now - self.idle_since >= STALL_S:
            return f"no byte for {STALL_S:.0f} s, and the engine reports no running request"
        if silent_s >= SILENT_S and self.silent_since is not None and now - self.silent_since >= SILENT_S:
            host = self.announcement.host  # clients may know a machine's name, but not its address
            machine = f"machine {host}" if host else "the machine"
            return f"{machine} of replica {self.name} does not answer: no byte for {silent_s:.0f} s"
        return None

    def begin(self) -> None:
        self.in_flight += 1
        if self.in_flight > self._peaks[0]:
            self._peaks = (self.in_flight, self._peaks[1])

    def reconcile(self, load: EngineLoad | None, now: float) -> None:
        """Compares the engine's counts with ours.

        The engine's are up to some seconds old, so what it has beyond our most in that time is not from us. Its
        waiting requests count twice: they show that it is full. Above 90 % of its KV cache it counts as up to half
        as strong, since it will soon preempt.
        """
        peak, self._peaks = max(self._peaks), (self.in_flight, self._peaks[0])
        if load is None:
            self.external_load, self.idle_since = 0.0, None
            self.effective_weight = self.weight = self.announcement.weight
            return
        total = load.running + load.waiting
        self.external_load = max(0.0, total - peak - self.load_of_other_workers) + load.waiting
        self.idle_since = (self.idle_since or now) if total == 0 else None
        self.effective_weight = self.weight = self.announcement.weight / (
            1 + max(0.0, min(load.kv_use, 1.0) - KV_PRESSURE) * 10
        )


class ReplicaTable:
    """Announcements, leases, drains, ejections and in-flight counts."""

    def __init__(
        self,
        models: Collection[ServedModel],
        policy: PolicyName = "least-load",
        max_in_flight: int | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.models = tuple(models)
        self._policy = policy
        self._max_in_flight = max_in_flight
        self._by_name = {name: model.name for model in models for name in (model.name, *model.aliases)}
        self._adapters: dict[str, str] = {}
        self._replicas: dict[str, Replica] = {}
        self._forgotten: list[Replica] = []  # with requests in flight, which a machine that is off must not hold
        self._by_model: dict[str, list[Replica]] = {model.name: [] for model in models}
        # Names, not rows: a drain may come before the replica's first announcement.
        self._draining: set[str] = set()
        self._leaving: set[str] = set()
        self._orders: dict[str, Order] = {}
        self._turn = 0
        self.in_flight_total = 0
        # Requests in flight are added up with others where a limit counts them.
        self._totals = totals if max_in_flight is not None else None
        self.n_ejections: Counter[str] = Counter()
        self._expected_at: float | None = None
        self.failure: str | None = None

    def expect(self, ready_at: float | None, failure: str | None) -> None:
        """What the controller knows: when the next replica should be ready (monotonic seconds), and why the last start
        failed."""
        self._expected_at, self.failure = ready_at, failure

    def _expected_in_s(self, now: float) -> float | None:
        """None where nothing is expected, or is late."""
        return self._expected_at - now if self._expected_at is not None and self._expected_at > now else None

    def resolve(self, name: str | None) -> str | None:
        """The declared model behind a name, an alias or an adapter; None as name means the only model, if it is one.

        An adapter is a name that a replica announced, or "MODEL:ADAPTER" for a declared MODEL.
        """
        if name is None:
            return self.models[0].name if len(self.models) == 1 else None
        known = self._by_name.get(name)
        if known is None:
            base = name.partition(":")[0]
            known = self._adapters.get(name) or self._by_name.get(base if base != name else "")
        return known

    def has_adapter(self, name: str | None) -> bool:
        return name in self._adapters

    def announce(self, announcement: Announcement, now: float) -> bool:
        """Starts the lease anew; returns whether the replica is draining. UserError for what could not be served."""
        address = _check(announcement)
        if announcement.model not in (model.name for model in self.models):
            raise UserError(f"model {announcement.model!r} is not declared at this gateway")
        row = self._replicas.get(announcement.replica)
        had_adapters = row.announcement.adapters if row else ()
        if row is None:
            row = self._replicas[announcement.replica] = Replica(announcement, address, now)
            if self._totals is not None:
                row.shared = self._totals[f"replica:{row.name}{AT_ONCE}"]
            self._by_model[announcement.model].append(row)
        else:
            if row.announcement.model != announcement.model:
                self._by_model[row.announcement.model].remove(row)
                self._by_model[announcement.model].append(row)
            if row.announcement.state == "stopping" and announcement.state != "stopping":
                self._end_order(announcement.replica)  # another node of that name: the one that was ordered is gone
            row.announcement, row.address, row.announced_at = announcement, address, now
            row.is_suspect = row.is_lapsed = False
            row.silent_since = None
        if self._orders.get(row.name) != _OPEN_ORDERS.get(announcement.state):
            self._orders.pop(row.name, None)
        row.reconcile(announcement.load, now)
        if had_adapters != announcement.adapters:
            self._find_adapters()
        return announcement.replica in self._draining

    def _find_adapters(self) -> None:
        self._adapters = {
            name: row.announcement.model for row in self._replicas.values() for name in row.announcement.adapters
        }

    def find(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def all(self) -> list[Replica]:
        return list(self._replicas.values())

    def drain(self, name: str) -> int:
        """No new requests for this replica, now and after later announcements; returns those in flight."""
        self._draining.add(name)
        row = self._replicas.get(name)
        return row.in_flight if row else 0

    def leave(self, name: str) -> int:
        """Drains this replica and orders its nodes to leave, until it is gone; returns the requests in flight."""
        self._leaving.add(name)
        return self.drain(name)

    def must_leave(self, name: str) -> bool:
        return name in self._leaving

    def order(self, name: str, order: Order) -> None:
        """For the node of this replica: "sleep" when no request runs, "wake" at once. The newest one counts, while the
        replica is as it must be for it."""
        row = self._replicas.get(name)
        if row is not None and _OPEN_ORDERS.get(row.announcement.state) == order:
            self._orders[name] = order
        else:
            self._orders.pop(name, None)

    def order_of(self, name: str) -> Order | None:
        return self._orders.get(name)

    def sleeper(self, model: str, now: float, n_waiting: int) -> Replica | None:
        """The sleeping replica that requests need, ordered to wake or not: one that has a request, which slipped
        through, or the first one while requests wait here, or in each of the engines. One at a time."""
        rows = [row for row in self.announced(model, now) if row.name not in self._draining]
        asleep = [row for row in rows if row.announcement.state == "sleeping"]
        if not asleep:
            return None
        for row in asleep:
            if row.in_flight:
                return row
        loads = [row.announcement.load for row in self.ready(model, now)]
        is_full = bool(loads) and all(load is not None and load.waiting > 0 for load in loads)
        if not (n_waiting or is_full) or any(row.announcement.state == "waking" for row in rows):
            return None
        return min(asleep, key=lambda row: (len(row.name), row.name))

    def undrain(self, name: str) -> None:
        """Takes back a drain, and an order to leave that no node has read yet."""
        self._draining.discard(name)
        self._leaving.discard(name)

    def _end_order(self, name: str) -> None:
        if name in self._leaving:
            self.undrain(name)

    def forget(self, name: str) -> None:
        """Drops the row, the drain and the order to leave; requests in flight stay in `in_flight_total`."""
        row = self._replicas.pop(name, None)
        self._orders.pop(name, None)
        self.undrain(name)
        if row is not None:
            self._by_model[row.announcement.model].remove(row)
            self._find_adapters()
            self._forgotten = [each for each in (*self._forgotten, row) if each.in_flight]

    def suspect(self, replica: Replica, address: Address) -> bool:
        """No new requests until the next announcement. Returns False for one that was suspect, or has moved since."""
        is_news = replica.address == address and not replica.is_suspect
        replica.is_suspect = replica.is_suspect or is_news
        return is_news

    def note_failure(self, replica: Replica, now: float) -> bool:
        """Records a failure that the replica caused; returns whether that ejects it."""
        is_ejected = replica.health.fail(now)
        if is_ejected:
            self.n_ejections[replica.name] += 1
        return is_ejected

    def is_ready(self, replica: Replica, now: float) -> bool:
        announcement = replica.announcement
        return (
            announcement.state in ACTIVE
            and replica.address is not None
            and not replica.is_suspect
            and now - replica.announced_at <= announcement.lease_s
            and announcement.replica not in self._draining
        )

    def ready(self, model: str, now: float) -> list[Replica]:
        """The replicas of `model` that may get a request now. A busy or an ejected one is better than none."""
        rows = [row for row in self._by_model[model] if self.is_ready(row, now)]
        rows = [row for row in rows if now >= row.health.ejected_until] or rows
        return [row for row in rows if row.announcement.state == "ready"] or rows

    def begin(
        self, model: str, now: float, hints: RoutingHints = NO_HINTS, avoid: Collection[str] = ()
    ) -> Replica | None:
        """Chooses a replica and counts a request on it; every one begun must be ended."""
        rows = self.ready(model, now)
        if hints.replica and hints.replica not in avoid:  # only that one has what it stored
            known = (row for row in self._by_model[model] if row.name == hints.replica and row not in rows)
            rows += [row for row in known if self.is_ready(row, now)]
        if self._max_in_flight is not None:
            rows = [row for row in rows if row.in_flight + row.load_of_other_workers < self._max_in_flight]
        if not rows:
            return None
        self._turn += 1
        replica = self._choose(rows, now, hints, avoid)
        if replica is not None:
            replica.begin()
            self.in_flight_total += 1
            if replica.shared is not None:
                replica.shared.own += 1
        return replica

    def _choose(self, rows: list[Replica], now: float, hints: RoutingHints, avoid: Collection[str]) -> Replica | None:
        if hints.adapter:
            rows = [row for row in rows if hints.adapter in row.announcement.adapters] or rows
        if hints.replica and hints.replica not in avoid:
            for row in rows:
                if row.name == hints.replica:
                    return row
        if len(rows) == 1:
            return rows[0]
        for row in rows:
            if row.health.n_ejections:
                row.weight = row.effective_weight * row.health.share(now)
        return choose(self._policy, rows, self._turn, hints.key, avoid)

    def end(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self.in_flight_total -= 1
        if replica.shared is not None:
            replica.shared.own -= 1

    def coming_words(self, model: str, now: float) -> str:
        """As `waiting`, for people: "loading 45% 12s", or "waiting"."""
        facts = self.waiting(model, now, 0)
        words = [_WORDS.get(facts.stage, "loading")]
        if facts.fraction is not None:
            words.append(f"{facts.fraction:.0%}")
        if facts.eta_s is not None:
            words.append(f"{facts.eta_s:.0f}s")
        return " ".join(words)

    def waiting(self, model: str, now: float, n_ahead: int) -> Waiting:
        """Why a request that waits for `model` does, behind `n_ahead` others."""
        nearest, expected_s = self.nearest(model, now), self._expected_in_s(now)
        if self.ready(model, now):
            return Waiting("queue", n_ahead)
        if nearest is None:
            if expected_s is None:
                return Waiting("waiting", n_ahead)
            return Waiting("starting", n_ahead, eta_s=round(expected_s, 1))
        progress = nearest.announcement.progress or Progress("")
        fraction, eta_s = progress.fraction, progress.eta_s
        left_s = expected_s if eta_s is None else max(eta_s - (now - nearest.announced_at), 0.0)
        return Waiting(
            *(nearest.announcement.state, n_ahead, progress.shards_done, progress.shards_total),
            fraction=None if fraction is None else round(min(max(fraction, 0.0), 1.0), 3),
            eta_s=None if left_s is None else round(left_s, 1),
        )

    def announced(self, model: str, now: float) -> list[Replica]:
        """The replicas of `model` whose lease runs, in whatever state."""
        return [row for row in self._by_model[model] if row.is_alive(now)]

    def nearest(self, model: str, now: float) -> Replica | None:
        """The replica on its way that is nearest to ready."""
        return max(self._coming(model, now), key=_fraction, default=None)

    def model_state(self, model: str, now: float) -> ModelState:
        if self.ready(model, now):
            return "ready"
        states = {row.announcement.state for row in self._coming(model, now)}
        return "unavailable" if not states else "sleeping" if states == {"sleeping"} else "loading"

    def retry_after_s(self, model: str, now: float) -> int:
        """Seconds after which to ask again: the shortest estimate of a replica on its way, else the controller's, else
        RETRY_AFTER_S."""
        estimates = [
            row.announcement.progress.eta_s - (now - row.announced_at)
            for row in self._coming(model, now)
            if row.announcement.progress is not None and row.announcement.progress.eta_s is not None
        ]
        expected_s = self._expected_in_s(now)
        if not estimates and expected_s is not None:
            estimates = [expected_s]
        return min(max(1, math.ceil(min(estimates))), RETRY_AFTER_S_MAX) if estimates else RETRY_AFTER_S

    def _coming(self, model: str, now: float) -> list[Replica]:
        rows = (row for row in self.announced(model, now) if row.name not in self._draining)
        return [row for row in rows if row.announcement.state in _COMING_STATES]

    def take_lapsed(self, now: float) -> list[str]:
        """Replicas whose lease ended since the last call."""
        lapsed = [row for row in self._replicas.values() if not row.is_lapsed and not row.is_alive(now)]
        for row in lapsed:
            row.is_lapsed = True
            self._end_order(row.name)
        return [row.name for row in lapsed]

    def lapsed_at_work(self, now: float) -> list[Replica]:
        """Replicas with requests in flight whose lease ended, also forgotten ones."""
        rows = (*self._replicas.values(), *self._forgotten)
        return [row for row in rows if row.in_flight and not row.is_alive(now)]

    def view(self, now: float, waiting: int, requests_total: int) -> GatewayView:
        rows = tuple(
            ReplicaView(
                announcement=row.announcement,
                age_s=round(now - row.announced_at, 3),
                is_alive=row.is_alive(now),
                is_draining=row.name in self._draining,
                in_flight=row.in_flight,
                is_ejected=now < row.health.ejected_until,
            )
            for row in self._replicas.values()
        )
        return GatewayView(rows, self.in_flight_total, waiting, requests_total)


# The state of a replica that can follow an order.
_OPEN_ORDERS: Final[dict[str, Order]] = {"ready": "sleep", "busy": "sleep", "sleeping": "wake"}


def _fraction(replica: Replica) -> float:
    """How far its start has come; below 0 where it does not say."""
    progress = replica.announcement.progress
    return -1.0 if progress is None else progress.fraction or 0.0


def _check(announcement: Announcement) -> Address | None:
    if not _NAME.match(announcement.replica):
        raise UserError(f"replica name {announcement.replica!r} is not 1 to 128 of A-Z a-z 0-9 . _ : -")
    if not 0 < announcement.lease_s < math.inf:
        raise UserError(f"lease_s {announcement.lease_s} is not a positive number of seconds")
    if not WEIGHT_MIN <= announcement.weight <= WEIGHT_MAX:
        raise UserError(f"weight {announcement.weight} is not between {WEIGHT_MIN} and {WEIGHT_MAX}")
    if len(announcement.adapters) > MAX_ADAPTERS:
        raise UserError(f"more than {MAX_ADAPTERS} adapters")
    if announcement.url is None:
        if announcement.state == "ready":
            raise UserError(f"replica {announcement.replica!r} is ready without a url")
        return None
    address = parse_url(announcement.url)
    if address is None:
        raise UserError(f"url {announcement.url!r} is not http://host:port")
    return address


class ResponseOwners:
    """The last MAX_KEPT response ids with the model and replica they came from. One per gateway process."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[str, str]] = {}

    def keep(self, response_id: bytes, model: str, replica: str) -> None:
        self._places[response_id] = (model, replica)
        if len(self._places) > MAX_KEPT:
            del self._places[next(iter(self._places))]

    def find(self, response_id: bytes) -> tuple[str, str] | None:
        return self._places.get(response_id)


def find_response_id(body: bytes) -> bytes | None:
    """The id in the beginning of a /v1/responses answer, streamed or not."""
    match = _RESPONSE_ID.search(body, 0, SEARCHED_BYTES)
    return match.group(1) if match else None
