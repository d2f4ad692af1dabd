"""What the admin address serves: announcements of replicas, the controller's orders, API keys, and monitoring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.gateway.accounting.entry import Accounting
from penstock.gateway.accounting.key_store import ApiKey, KeyStore, Limits, check_new_key
from penstock.gateway.accounting.keys import has_token
from penstock.gateway.accounting.ledger import Ledger
from penstock.gateway.board import RankBoard
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.context import HEARD, WAKE, GatewayContext
from penstock.gateway.live.news import DatedNews, dated
from penstock.gateway.metrics.monitoring import MONITORING_METHODS, MONITORING_PATHS, Monitoring
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer, json_answer
from penstock.gateway.routing.replicas import ReplicaTable
from penstock.gateway.workers.reports import Reporter, WorkerReport
from penstock.wire.announcement import AnnounceAnswer, Announcement, Post
from penstock.wire.http1 import Headers, RequestHead

_ANNOUNCE, _BOARD, _NEWS, _UNDRAIN = b"/admin/announce", b"/admin/board", b"/admin/news", b"/admin/undrain"
# Calls about one replica, and what each does with its name.
_ORDERS: Final[dict[bytes, Callable[[ReplicaTable, str], object]]] = {
    b"/admin/drain": ReplicaTable.drain,
    b"/admin/leave": ReplicaTable.leave,
    _UNDRAIN: ReplicaTable.undrain,
    b"/admin/forget": ReplicaTable.forget,
    b"/admin/sleep": lambda table, name: table.order(name, "sleep"),
    WAKE: lambda table, name: table.order(name, "wake"),
}
_DRAINS = (b"/admin/drain", b"/admin/leave")
# Sent again within seconds, by nodes and by the controller: nobody waits for the other workers.
_REPEATED = (_ANNOUNCE, _BOARD, _NEWS)
_METHODS: dict[bytes, tuple[bytes, ...]] = {
    **dict.fromkeys((b"/admin/health", b"/admin/replicas"), (b"GET",)),
    **dict.fromkeys((*_REPEATED, *_ORDERS), (b"POST",)),
    _BOARD: (b"GET", b"POST"),
    **dict.fromkeys(MONITORING_PATHS, MONITORING_METHODS),
}
_KEYS = b"/admin/keys"

log = logging.getLogger(__name__)


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    replica: str


class _NewKey(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    models: tuple[str, ...] = ()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_usd: float | None = None
    expires_s: float | None = None


class _Rotation(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    grace_s: float = 0.0


class AdminApi:
    """The handler of the admin listener. Every call needs the token, health too; MONITORING_PATHS have their own rule.

    Any worker may get a call; what it changes of the replicas is relayed to the other workers.
    """

    def __init__(
        self, context: GatewayContext, accounting: Accounting, reporter: Reporter, monitoring: Monitoring, token: str
    ) -> None:
        self._context = context
        self._accounting, self._reporter, self._monitoring = accounting, reporter, monitoring
        self._replicas = context.replicas
        self._token = token
        self._board = RankBoard(context.now())

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        is_monitoring = head.path in MONITORING_PATHS
        if is_monitoring and (refusal := self._monitoring.refuse(head)) is not None:
            return refusal
        if not is_monitoring and not has_token(head.get(b"authorization"), self._token):
            return error_answer(401, "the admin token is needed", "invalid_admin_token")
        methods = (b"GET", b"POST", b"DELETE") if _is_of_keys(head.path) else _METHODS.get(head.path)
        if methods is None:
            return error_answer(404, "there is no such admin call", "not_found")
        if head.method not in methods:
            allowed = b", ".join(methods)
            return error_answer(405, f"only {allowed.decode()}", "method_not_allowed", headers=((b"allow", allowed),))
        return None

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        path, body = request.head.path, request.body
        if path in MONITORING_PATHS:
            return self._monitoring.handle(request, client)
        try:
            if _is_of_keys(path):
                return _call_store(request, client, self._accounting.ledger, self._context.unix())
            if path == b"/admin/health":
                return json_answer({"ok": True})
            if path == b"/admin/replicas":
                return self._reporter.respond(client, lambda report: json_answer(self._reporter.view(report)))
            if path == _BOARD and request.head.method == b"GET":
                return json_answer(self._board.rows(self._context.now()))
            if path == _NEWS:
                body = dated(body, self._context.now())
            answer = self.apply(path, body)
        except (msgspec.DecodeError, UserError) as error:
            return error_answer(400, str(error), "bad_request")
        if path in _REPEATED:
            self._reporter.relay(path, body)
            return json_answer(answer)
        name = msgspec.json.decode(body, type=_Named).replica

        def write(report: WorkerReport) -> Answer:
            return json_answer({"in_flight": report.in_flight.get(name, 0)} if path in _DRAINS else answer)

        return self._reporter.respond(client, write, path, body)

    def body_owner(self, head: RequestHead) -> None:
        return None

    def origin_headers(self, head: RequestHead) -> Headers:
        return ()

    def apply(self, path: bytes, body: bytes) -> Any:
        """Does a call in this worker alone. Raises msgspec.DecodeError and UserError."""
        if path == _ANNOUNCE:
            return self._announce(msgspec.json.decode(body, type=Announcement))
        if path == _BOARD:
            post = msgspec.json.decode(body, type=Post)
            return self._board.post(post, self._context.now(), must_leave=self._replicas.must_leave(post.replica))
        if path == _NEWS:
            dated_news = msgspec.json.decode(body, type=DatedNews)
            self._reporter.news.take(dated_news)
            ready_in_s = dated_news.news.ready_in_s
            self._replicas.expect(None if ready_in_s is None else dated_news.at + ready_in_s, dated_news.news.failure)
            return {"ok": True}
        name = msgspec.json.decode(body, type=_Named).replica
        if path == HEARD:
            if (row := self._replicas.find(name)) is not None:
                row.heard_at = self._context.now()
            return {"ok": True}
        log.info("replica %r: %s", name, path.decode().removeprefix("/admin/"))
        _ORDERS[path](self._replicas, name)
        if path == _UNDRAIN:
            self._wake(name)
        return {"ok": True}

    def _announce(self, announcement: Announcement) -> AnnounceAnswer:
        before = self._replicas.find(announcement.replica)
        state_before = before.announcement.state if before and not before.is_lapsed else "absent"
        is_heard = before is not None and before.heard_at > before.announced_at
        is_draining = self._replicas.announce(announcement, self._context.now())
        if announcement.state != state_before:
            log.info("replica %s: %s -> %s", announcement.replica, state_before, announcement.state)
        self._wake(announcement.replica)
        if announcement.state == "sleeping":
            self._context.wake_sleeper(announcement.model, self._context.now())
        must_leave, order = (ask(announcement.replica) for ask in (self._replicas.must_leave, self._replicas.order_of))
        return AnnounceAnswer(is_draining, bool(must_leave), order == "sleep", order == "wake", is_heard)

    def _wake(self, name: str) -> None:
        replica = self._replicas.find(name)
        if replica is not None and self._replicas.is_ready(replica, self._context.now()):
            self._context.queue.wake(replica.announcement.model)


# API keys: created, listed, rotated, revoked while the gateway runs.


def _is_of_keys(path: bytes) -> bool:
    return path == _KEYS or path.startswith(_KEYS + b"/")


def key_facts(key: ApiKey, secret: str | None = None) -> dict[str, Any]:
    """A key as shown: never its hash; `secret` only when it is new."""
    facts: dict[str, Any] = {"id": key.id, "name": key.name}
    if secret is not None:
        facts["key"] = secret
    facts["endings"] = [f"sk-...{kept.ending}" for kept in key.secrets]
    facts |= msgspec.structs.asdict(key.limits)
    return facts | {"created_at": key.created_at, "revoked_at": key.revoked_at}


def _call_store(request: Request, client: ClientConnection, ledger: Ledger | None, now: float) -> Answer | None:
    """Answers when the store has. Raises msgspec.DecodeError and UserError."""
    if ledger is None or ledger.store is None:
        return error_answer(409, "this gateway has no store: its keys are those of its config", "no_store")
    job = _job(request, now)

    async def work() -> None:
        try:
            answer = json_answer(await ledger.call(lambda database: job(KeyStore(database))))
        except UserError as error:
            answer = error_answer(400, error.message, "bad_request")
        except PenstockError as error:
            answer = error_answer(503, error.message, "store_unavailable", headers=((b"retry-after", b"1"),))
        client.respond(answer)

    client.work = asyncio.get_running_loop().create_task(work())
    return None


def _job(request: Request, now: float) -> Callable[[KeyStore], Any]:
    head = request.head
    name = unquote(head.path[len(_KEYS) + 1 :].decode("latin-1"))
    if head.method == b"GET" and not name:
        return lambda store: [key_facts(key) for key in store.all()]
    if head.method == b"DELETE" and name:
        return lambda store: key_facts(store.revoke(name, now))
    if head.method == b"POST" and name == "rotate":
        rotation = msgspec.json.decode(request.body, type=_Rotation)
        return lambda store: key_facts(*store.rotate(rotation.key, rotation.grace_s, now))
    if head.method == b"POST" and not name:
        new = msgspec.json.decode(request.body, type=_NewKey)
        expires_at = None if new.expires_s is None else now + new.expires_s
        limits = Limits(new.models, new.rpm, new.tpm, new.concurrency, new.budget_usd, expires_at)
        check_new_key(new.name, limits, now)
        return lambda store: key_facts(*store.create(new.name, limits, now))
    raise UserError("there is no such call: GET or POST /admin/keys, POST /admin/keys/rotate, DELETE /admin/keys/NAME")
