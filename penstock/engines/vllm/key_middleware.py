"""ASGI middleware that asks for a key on every path: other users of the machine reach loopback too.

vLLM's own key covers /v1 alone: /invocations, which generates text, and /metrics stay open. Prometheus has a key for
/metrics alone.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from penstock.engines import KEY_VARIABLE
from penstock.wire.announcement import scrape_key

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
_BODY = b'{"error":{"message":"the key of this engine is needed","type":"invalid_request_error","code":"401"}}'


class RequireKey:
    """401 without `Authorization: Bearer KEY`; the key comes from the environment."""

    def __init__(self, app: _App) -> None:
        self._app, key = app, os.environ[KEY_VARIABLE]
        self._expected = f"Bearer {key}".encode()
        self._scrape = f"Bearer {scrape_key(key)}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_known(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: _Scope) -> bool:
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(keys) != 1:
            return False
        may_scrape = scope["path"] == "/metrics" and hmac.compare_digest(keys[0], self._scrape)
        return may_scrape or hmac.compare_digest(keys[0], self._expected)
