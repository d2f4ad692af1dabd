"""What the admin address serves: announcements of replicas, and the controller's hand on traffic."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.gateway import admin_keys
from penstock.gateway.accounting.entry import Books
from penstock.gateway.accounting.keys import has_token
from penstock.gateway.board import RankBoard
from penstock.gateway.connections.client import ClientConnection
from penstock.gateway.context import GatewayContext
from penstock.gateway.request import Request
from penstock.gateway.responses import Answer, error_answer, json_answer
from penstock.gateway.workers.totals import Tally
from penstock.wire.announcement import AnnounceAnswer, Announcement, Post
from penstock.wire.http1 import Headers, RequestHead

_METHODS = {
    b"/admin/health": (b"GET",),
    b"/admin/replicas": (b"GET",),
    b"/admin/announce": (b"POST",),
    b"/admin/board": (b"POST",),
    b"/admin/drain": (b"POST",),
    b"/admin/undrain": (b"POST",),
    b"/admin/leave": (b"POST",),
    b"/admin/forget": (b"POST",),
}

log = logging.getLogger(__name__)


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    replica: str


class Admin:
    """The handler of the admin listener. Every call needs the token, health too."""

    def __init__(self, context: GatewayContext, books: Books, tally: Tally, token: str) -> None:
        self._context = context
        self._tally = tally
        self._books = books
        self._replicas = context.replicas
        self._token = token
        self._board = RankBoard(time.monotonic())

    def refuse(self, head: RequestHead, *, is_whole: bool) -> Answer | None:
        """Calls without the token, unknown paths and wrong methods."""
        if not has_token(head.get(b"authorization"), self._token):
            return error_answer(401, "the admin token is needed", "invalid_admin_token")
        methods = admin_keys.METHODS if admin_keys.is_path(head.path) else _METHODS.get(head.path)
        if methods is None:
            return error_answer(404, "there is no such admin call", "not_found")
        if head.method not in methods:
            allowed = b", ".join(methods)
            return error_answer(405, f"only {allowed.decode()}", "method_not_allowed", headers=((b"allow", allowed),))
        return None

    def handle(self, request: Request, client: ClientConnection) -> Answer | None:
        try:
            if admin_keys.is_path(request.head.path):
                return admin_keys.begin(request, client, self._books.ledger)
            return json_answer(self._do(request.head.path, request.body))
        except (msgspec.DecodeError, UserError) as error:
            return error_answer(400, str(error), "bad_request")

    def origin_headers(self, head: RequestHead) -> Headers:
        return ()

    def _do(self, path: bytes, body: bytes) -> Any:
        if path == b"/admin/health":
            return {"ok": True}
        if path == b"/admin/replicas":
            return self._tally.view()
        if path == b"/admin/announce":
            return self._announce(msgspec.json.decode(body, type=Announcement))
        if path == b"/admin/board":
            post = msgspec.json.decode(body, type=Post)
            return self._board.post(post, time.monotonic(), must_leave=self._replicas.must_leave(post.replica))
        name = msgspec.json.decode(body, type=_Named).replica
        log.info("replica %r: %s", name, path.decode().removeprefix("/admin/"))
        if path == b"/admin/drain":
            return {"in_flight": self._replicas.drain(name)}
        if path == b"/admin/leave":
            return {"in_flight": self._replicas.leave(name)}
        if path == b"/admin/undrain":
            self._replicas.undrain(name)
            self._wake(name)
        else:
            self._replicas.forget(name)
        return {"ok": True}

    def _announce(self, announcement: Announcement) -> AnnounceAnswer:
        before = self._replicas.find(announcement.replica)
        state_before = before.announcement.state if before and not before.is_lapsed else "absent"
        is_draining = self._replicas.announce(announcement, time.monotonic())
        if announcement.state != state_before:
            log.info("replica %s: %s -> %s", announcement.replica, state_before, announcement.state)
        self._wake(announcement.replica)
        return AnnounceAnswer(is_draining, self._replicas.must_leave(announcement.replica))

    def _wake(self, name: str) -> None:
        replica = self._replicas.find(name)
        if replica is not None and self._replicas.is_ready(replica, time.monotonic()):
            self._context.queue.wake(replica.announcement.model)
