"""The process of the chat page: our own routes, and gradio below them, behind one login.

health   200 once it serves                     login    the page that asks for a key, and what takes it
status   the gateway's models, as JSON          logout   ends the session
import   a file's conversations, as JSON        markdown a conversation, as Markdown
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.chat.page import theme
from penstock.chat.page.config import PageConfig
from penstock.chat.page.connections import Connection, Connections
from penstock.chat.page.export import Converter
from penstock.chat.page.login import Ask, Login
from penstock.chat.page.proxied import Proxies
from penstock.chat.page.routes import UsedRoutes
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.errors import PenstockError, UserError
from penstock.processes import raise_file_limit
from penstock.wire.answers import HttpError

_END_S = 3
_STREAMS_AT_ONCE = 1000  # gradio's own is 40
_QUEUE_LOOK_S = 0.05  # gradio looks for new events each millisecond: 4 % of a core for a page that nobody uses
Say = Callable[[str], None]


def serve(config: PageConfig, say: Say, on_listening: Callable[[], None]) -> None:
    """Blocks until SIGTERM or SIGINT. `say` writes a line to the log. From `on_listening` on the port is ours.

    Raises UserError where the port is taken.
    """
    listening = _listen(config)
    with listening:
        on_listening()
        app = make_app(config, say)
        connections = Connections(raise_file_limit(), Proxies(config.trusted_proxies))
        settings = uvicorn.Config(
            app, log_level="error", access_log=False, timeout_graceful_shutdown=_END_S, lifespan="on",
            server_header=False, proxy_headers=False, ws="none", http=partial(Connection, connections),  # type: ignore[arg-type]
        )  # fmt: skip
        say(f"serves {config.gateway} on {config.host}:{config.port}")
        uvicorn.Server(settings).run(sockets=[listening])


def _listen(config: PageConfig) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(1024)
    except OSError as exc:
        listening.close()
        hint = "Choose another port (ui.port in the file, `penstock ui --port`), or end what listens there."
        message = f"cannot serve the chat page on {config.host}:{config.port}: {exc.strerror}"
        raise UserError(message, hint=hint) from exc
    return listening


def make_app(config: PageConfig, say: Say) -> Any:
    """The whole page as an ASGI application. Reads and writes below `config.folder`."""
    import gradio

    from penstock.chat.page import layout

    ask = Upstream(config.gateway, config.certificate).models
    login, status, converter = Login(config, say, ask), Status(ask, config.has_login), Converter()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_api_route("/health", lambda: PlainTextResponse("ok\n"))
    app.add_api_route("/status", status.answer)
    app.add_api_route("/login", login.page)
    app.add_api_route("/login", login.log_in, methods=["POST"])
    app.add_api_route("/logout", login.log_out, methods=["POST"])
    app.add_api_route("/markdown", converter.markdown, methods=["POST"])
    app.add_api_route("/import", converter.conversations, methods=["POST"])
    blocks = layout.build(config)
    blocks.queue(default_concurrency_limit=None, api_open=False)
    blocks.validate_inputs = check_number
    blocks.max_threads = blocks._queue.max_thread_count = _STREAMS_AT_ONCE
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = _QUEUE_LOOK_S
    app = gradio.mount_gradio_app(
        app, blocks, path="/", auth_dependency=_session_of, footer_links=[], run_history=False, show_error=False,
        ssr_mode=False, enable_monitoring=False, pwa=False, mcp_server=False,
        theme=theme.theme(), head=theme.head(),
    )  # fmt: skip
    return login.around(UsedRoutes(app))


def check_number(handler: Any, inputs: Sequence[Any]) -> None:
    """Raises ValueError for too few. Gradio's own check writes what a person sent into the log."""
    if len(inputs) < len(handler.inputs):
        raise ValueError(f"an event of the page came with {len(inputs)} of {len(handler.inputs)} inputs")


def _session_of(request: Request) -> str:
    return visitor(request).session or "everyone"


class Status:
    """`GET status`: {"state": "ok" | "offline", "models": rows of /v1/models, "reason"?: why it is offline}.

    401 where the gateway refuses the key, which ends the session.
    """

    def __init__(self, ask: Ask, has_login: bool) -> None:
        self._ask, self._has_login = ask, has_login

    async def answer(self, request: Request) -> Response:
        who = visitor(request)
        try:
            return JSONResponse({"state": "ok", "models": msgspec.to_builtins(await self._ask(who.key))})
        except PenstockError as error:
            if not (self._has_login and isinstance(error, HttpError) and error.status == 401):
                return JSONResponse({"state": "offline", "models": [], "reason": error.message})
        reason = "the gateway refuses your key now"
        who.refuse(reason)
        return JSONResponse({"state": "logged out", "reason": reason}, status_code=401)
