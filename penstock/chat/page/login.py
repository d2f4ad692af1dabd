"""Who may open the chat page: the login with a key, and what stands before every other request."""

from __future__ import annotations

import asyncio
import hmac
import html
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from penstock.chat.page.config import PageConfig
from penstock.chat.page.proxied import Proxies, as_sent, clean_prefix, is_same_site
from penstock.chat.page.routes import whole_body
from penstock.chat.page.sessions import KEPT_S, Attempts, Sessions, Visitor, visitor
from penstock.chat.page.theme import ICON
from penstock.errors import PenstockError
from penstock.paths import read_token
from penstock.spec.gateway import is_loopback
from penstock.wire.addresses import network_of
from penstock.wire.answers import HttpError
from penstock.wire.model_list import ModelCard

_MOST_BYTES = 4096
_PUBLIC = ("/health", "/login")
_REFUSED = (401, 403)
# Gradio's page has inline scripts and styles, and makes functions of the `js` of its events.
_POLICY = "; ".join((
    "default-src 'self'", "script-src 'self' 'unsafe-inline' 'unsafe-eval'", "style-src 'self' 'unsafe-inline'",
    "img-src 'self' data: blob:", "media-src 'self' data: blob:", "font-src 'self' data:", "connect-src 'self'",
    "worker-src 'self' blob:", "object-src 'none'", "base-uri 'self'", "form-action 'self'", "frame-ancestors 'self'",
))  # fmt: skip
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, a form of ours says "Origin: null"
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
# Gradio lets pages of other names and ports read its answers with the visitor's cookie.
_CORS = ("access-control-allow-origin", "access-control-allow-credentials")
# Where a proxy does not tell its address, the page knows better where it is than gradio, which asks at `root`.
_BEFORE = b"<script>window.gradio_api_info"
_ROOT = b"<script>gradio_config.root = location.origin + location.pathname.replace(/\\/[^/]*$/, '')</script>"

Ask = Callable[[str | None], Awaitable[tuple[ModelCard, ...]]]  # `Upstream.models`
_Send = Callable[[Any], Awaitable[None]]


class Login:
    """`say` writes a line to the log; `ask` tries a key.

    With `config.key_file` that key is everyone's: with a login it alone opens the page, without one all requests use
    it. Else each brings a key that the gateway takes.
    """

    def __init__(self, config: PageConfig, say: Callable[[str], None], ask: Ask) -> None:
        self._config, self._ask = config, ask
        self._shared_key = read_token(Path(config.key_file), "key") if config.key_file else None
        self._sessions = Sessions(Path(config.folder) / "sessions.json", time.time(), say)
        self._attempts, self._proxies = Attempts(), Proxies(config.trusted_proxies)
        # Browsers give cookies of 127.0.0.1 to all its ports, also to tunnels to pages with the same port elsewhere.
        self._cookie = f"penstock-ui-{config.deployment or config.port}"
        self._page = Path(__file__).with_name("login.html").read_text("utf-8")

    # ---- the routes --------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        return self._form(self._sessions.why(request.cookies.get(self._cookie)) or "")

    async def log_in(self, request: Request) -> Response:
        body = await whole_body(request, _MOST_BYTES) or b""
        key = parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()
        network = network_of(request.client.host if request.client else "")
        async with self._attempts.turn(network) as is_its_turn:
            if await request.is_disconnected():
                return Response(status_code=400)
            reason, status = await self._refusal(key) if is_its_turn else ("Your key was not tried: try again.", 429)
        pause_s = self._attempts.failed(network, time.monotonic()) if status in _REFUSED else None
        if pause_s is not None:  # its turn is over: a right key does not wait for the answers to wrong ones
            await asyncio.sleep(pause_s)
            reason, status = f"{reason} Too many wrong keys came from your address: answers are slow.", 429
        if reason:
            return self._form(reason, status)
        answer = RedirectResponse("./", status_code=303)
        answer.raw_headers.append(self._cookie_line(request, self._sessions.open(key, time.time())))
        return answer

    def _cookie_line(self, request: Request, token: str) -> tuple[bytes, bytes]:
        is_secure, path, carrier = request.url.scheme == "https", request.scope["root_path"] or "/", Response()
        carrier.set_cookie(
            self._cookie, token, max_age=int(KEPT_S), path=path, secure=is_secure, httponly=True, samesite="lax"
        )
        return b"set-cookie", carrier.headers["set-cookie"].encode("latin-1")

    async def log_out(self, request: Request) -> Response:
        session = visitor(request).session
        if session is not None:
            self._sessions.close(session, "You logged out.")
        return RedirectResponse("login", status_code=303)

    async def _refusal(self, key: str) -> tuple[str, int]:
        """Why that key opens nothing, with the status of that answer; "" when it opens the page."""
        if self._shared_key is not None:
            is_right = hmac.compare_digest(key.encode(), self._shared_key.encode())
            return ("", 200) if is_right else ("This is not the key of this page.", 401)
        if not (key and key.isascii() and key.isprintable()):
            return "A key has letters, digits and dashes only.", 401
        try:
            await self._ask(key)
        except HttpError as error:
            if error.status == 401:
                return "The gateway does not accept this key: it may be mistyped, expired or revoked.", 401
            if error.status in _REFUSED:
                words = error.message.partition(f" answered {error.status}: ")[2]  # its own, without the address
                return f"The gateway refuses this key: {words or error.message}", error.status
            return f"The gateway does not answer as it should: {error.message}", 502
        except PenstockError as error:
            return f"The gateway could not be asked, try again: {error.message}", 503
        return "", 200

    def _form(self, reason: str, status: int = 200) -> Response:
        text = self._page.replace("{icon}", ICON).replace("{title}", html.escape(self._config.title))
        return HTMLResponse(text.replace("{reason}", html.escape(reason)), status)

    # ---- before every request ----------------------------------------------------------------------------------------

    def around(self, app: Any) -> Any:
        """That ASGI application for those who may use it."""

        async def call(scope: Any, receive: Any, send: _Send) -> None:
            if scope["type"] != "http":
                if scope["type"] == "lifespan":  # the page has no WebSockets
                    await app(scope, receive, send)
                return
            addressed_to = Headers(scope=scope).get("host", "")
            scope = as_sent(scope, self._proxies, self._config.root_path)
            send = _with_headers(send)
            refusal = self._admit(scope, addressed_to)
            if refusal is not None:
                await refusal(scope, receive, send)
            elif scope["path"] == f"{scope['root_path']}/" and scope["method"] == "GET":
                headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
                token = Request(scope).cookies.get(self._cookie)  # kept for another month, as the session is
                cookie = [self._cookie_line(Request(scope), token)] if token and self._config.has_login else []
                await app({**scope, "headers": headers}, receive, _with_root(send, cookie))
            else:
                await app(scope, receive, send)

        return call

    def _admit(self, scope: dict[str, Any], addressed_to: str) -> Response | None:
        """None: the request goes on, with its visitor in the scope; else the answer. `addressed_to`: the host before
        what a proxy says of it, which a foreign page could say too."""
        headers, prefix = Headers(scope=scope), scope["root_path"]
        path = scope["path"].removeprefix(prefix)
        if not path:
            return RedirectResponse(f"{prefix}/", status_code=307)
        if scope["method"] not in ("GET", "HEAD") and not is_same_site(headers):
            return PlainTextResponse("a page of another site may not send this\n", status_code=403)
        if not self._config.has_login:
            if not all(map(self._is_own_host, (addressed_to, headers.get("host", "")))):
                text = "without a login Host must be loopback: set ui.login: keys, or ui.root_path behind a proxy\n"
                return PlainTextResponse(text, status_code=403)
            scope.setdefault("state", {})["visitor"] = Visitor(None, self._shared_key, lambda _: None)
            return None
        token = Request(scope).cookies.get(self._cookie)
        session = self._sessions.find(token, time.time())
        if session is not None:
            name, key = session
            refuse = lambda reason: self._sessions.close(name, f"You were logged out: {reason}")  # noqa: E731
            scope.setdefault("state", {})["visitor"] = Visitor(name, key, refuse)
        if session is not None or path in _PUBLIC:
            return None
        if path == "/":
            return RedirectResponse("login", status_code=303)
        reason = self._sessions.why(token) or "You are not logged in."
        return JSONResponse({"state": "logged out", "reason": reason}, status_code=401)

    def _is_own_host(self, host: str) -> bool:
        """A name that its owner lets point here (DNS rebinding) makes a foreign page one of ours."""
        name = urlsplit(f"//{host}").hostname or ""
        is_known = is_loopback(name) or name.endswith(".localhost") or name == self._config.host
        return is_known or bool(clean_prefix(self._config.root_path))


def _with_headers(send: _Send) -> _Send:
    async def with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name in _CORS:
                del headers[name]
            for name, value in _HEADERS.items():
                headers[name] = value
            if headers.get("content-type", "").startswith("text/event-stream"):
                headers["x-accel-buffering"] = "no"  # nginx would hold an answer back until it is whole
            if not headers.get("content-type", "").startswith(("text/css", "text/javascript", "font/", "image/")):
                headers["cache-control"] = "no-store"
        await send(message)

    return with_headers


def _with_root(send: _Send, cookie: list[tuple[bytes, bytes]]) -> _Send:
    """For the page itself, a small whole answer."""
    start: list[Any] = []
    body: list[bytes] = []

    async def with_root(message: Any) -> None:
        if message["type"] == "http.response.start":
            start.append(message)
            return
        body.append(message.get("body", b""))
        if message.get("more_body"):
            return
        text = b"".join(body).replace(_BEFORE, ICON.encode() + _ROOT + _BEFORE, 1)
        MutableHeaders(raw=start[0]["headers"])["content-length"] = str(len(text))
        start[0]["headers"].extend(cookie)
        await send(start[0])
        await send({"type": "http.response.body", "body": text})

    return with_root
