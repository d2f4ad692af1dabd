"""What of Gradio's routes the page uses, for whom, and with how large a body: the rest is not there.

Gradio serves any file that it made, fetches URLs that it is given, takes uploads, and gives a stream to whoever knows
the name that a tab chose for it. The page needs none of the first three, and a stream belongs to one person.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from penstock.chat.page.sessions import visitor
from penstock.text import MIB

_API = "/gradio_api/"
_USED = re.compile(
    r"/|/(health|status|login|logout|import|markdown|config|theme\.css|favicon\.ico)|/(assets|static)/.*"
    rf"|{_API}(queue/(join|data)|run/predict|cancel|reset|info|app_id|heartbeat/\w+)/?"
)
_MOST_BYTES = 64 * MIB  # a conversation with its images; our own routes have limits of their own
_MOST_TABS = 20_000
_HEARTBEAT = f"{_API}heartbeat/"
_Receive = Callable[[], Awaitable[Any]]


class _Body(msgspec.Struct):
    session_hash: str | None = None


class UsedRoutes:
    """That ASGI application with the routes that the page uses. The visitor is in the scope, see `sessions.visitor`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._owners: dict[str, str | None] = {}  # the key of who used a tab's name first

    async def __call__(self, scope: Any, receive: _Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if not _USED.fullmatch(path):
                raise HTTPException(404, "not found")
            if path == "/logout" and scope["method"] != "POST":  # a link or an image of any page could send a GET
                raise HTTPException(405, "a session is ended by POST", {"allow": "POST"})
            if path.startswith(_API):
                receive = await self._own(Request(scope, receive), path)
        except HTTPException as refusal:
            answer = PlainTextResponse(f"{refusal.detail}\n", refusal.status_code, refusal.headers)
            await answer(scope, receive, send)
        except ClientDisconnect:
            pass
        else:
            await self._app(scope, receive, send)

    async def _own(self, request: Request, path: str) -> _Receive:
        """What gives the body again. Raises HTTPException."""
        body: bytes | None = None
        if request.method == "POST":
            if (body := await whole_body(request, _MOST_BYTES)) is None:
                raise HTTPException(413, "more than 64 MiB")
            try:
                tab = msgspec.json.decode(body, type=_Body).session_hash
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
                raise HTTPException(400, "the body is no JSON object") from exc
            tabs = [tab] if tab is not None else []
        elif path.startswith(_HEARTBEAT):
            tabs = [path.removeprefix(_HEARTBEAT).rstrip("/")]
        else:
            tabs = parse_qs(request.url.query, keep_blank_values=True).get("session_hash", [])
        key = visitor(request).key
        if any(self._owners.setdefault(tab, key) != key for tab in tabs):
            raise HTTPException(404, "this tab is another's: load the page again")
        while len(self._owners) > _MOST_TABS:
            del self._owners[next(iter(self._owners))]
        return request.receive if body is None else _again(body, request.receive)


async def whole_body(request: Request, n_bytes_max: int) -> bytes | None:
    """The body; None where it has more bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > n_bytes_max:
            return None
    return bytes(body)


def _again(body: bytes, receive: _Receive) -> _Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again
