"""The process of the chat page: our own routes, and gradio below them, behind one login.

health   200 once it serves                     login    the page that asks for a key, and what takes it
status   the gateway's models, as JSON          logout   ends the session
import   a file's conversations, as JSON        markdown a conversation, as Markdown
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.chat.page import export, theme
from penstock.chat.page.config import PageConfig
from penstock.chat.page.login import Ask, Login
from penstock.chat.page.routes import UsedRoutes
from penstock.chat.page.sessions import visitor
from penstock.chat.page.upstream import Upstream
from penstock.errors import PenstockError, UserError
from penstock.wire.answers import HttpError

_FRESH_S = 1.0
_END_S = 3
_STREAMS_AT_ONCE = 1000  # gradio's own is 40
_QUEUE_LOOK_S = 0.05  # gradio looks for new events each millisecond: 4 % of a core for a page that nobody uses
_UPLOAD = "10mb"
_UPLOAD_S = 3600  # how long a picture that is not sent stays on the disk
Say = Callable[[str], None]


def serve(config: PageConfig, say: Say, on_listening: Callable[[], None]) -> None:
    """Blocks until SIGTERM or SIGINT. `say` writes a line to the log. From `on_listening` on the port is ours.

    Raises UserError where the port is taken.
    """
    listening = _listen(config)
    with listening:
        on_listening()
        app = make_app(config, say)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_END_S, lifespan="on",
            server_header=False, proxy_headers=False,
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
    login, status = Login(config, say, ask), Status(ask, config.has_login)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_api_route("/health", _health, include_in_schema=False)
    app.add_api_route("/status", status.answer, include_in_schema=False)
    app.add_api_route("/login", login.page, include_in_schema=False)
    app.add_api_route("/login", login.log_in, methods=["POST"], include_in_schema=False)
    app.add_api_route("/logout", login.log_out, methods=["POST"], include_in_schema=False)
    app.add_api_route("/markdown", export.markdown, methods=["POST"], include_in_schema=False)
    app.add_api_route("/import", export.conversations, methods=["POST"], include_in_schema=False)
    remove_uploads(Path(config.folder) / "uploads", time.time() - _UPLOAD_S)
    blocks = layout.build(config)
    blocks.delete_cache = (_UPLOAD_S, _UPLOAD_S)
    blocks.queue(default_concurrency_limit=None, api_open=False)
    blocks.validate_inputs = check_number
    blocks.max_threads = blocks._queue.max_thread_count = _STREAMS_AT_ONCE
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = _QUEUE_LOOK_S
    app = gradio.mount_gradio_app(
        app, blocks, path="/", auth_dependency=_session_of, footer_links=[], run_history=False, show_error=False,
        max_file_size=_UPLOAD, ssr_mode=False, enable_monitoring=False, pwa=False, mcp_server=False,
        theme=theme.theme(), head=theme.head(),
    )  # fmt: skip
    return login.around(UsedRoutes(app))


def check_number(handler: Any, inputs: Sequence[Any]) -> None:
    """Raises ValueError for too few. Gradio's own check writes what a person sent into the log."""
    if len(inputs) < len(handler.inputs):
        raise ValueError(f"an event of the page came with {len(inputs)} of {len(handler.inputs)} inputs")


def remove_uploads(folder: Path, before: float) -> None:
    """What a page that was killed left there from before that time (Unix seconds): gradio forgets it."""
    for path in sorted(folder.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):  # a folder that is not empty
            if path.is_dir():
                path.rmdir()
            elif path.stat().st_mtime < before:
                path.unlink()


def _health() -> Response:
    return PlainTextResponse("ok\n")


def _session_of(request: Request) -> str:
    return visitor(request).session or "everyone"


class Status:
    """`GET status`: {"state": "ok" | "offline", "models": rows of /v1/models, "reason"?: why it is offline}.

    The same answer for a second; 401 where the gateway refuses the key, which ends the session.
    """

    def __init__(self, ask: Ask, has_login: bool) -> None:
        self._ask, self._has_login = ask, has_login
        self._answers: dict[str | None, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def answer(self, request: Request) -> Response:
        who, now = visitor(request), time.monotonic()
        self._answers = {key: each for key, each in self._answers.items() if now - each[0] < _FRESH_S}
        if who.key not in self._answers:
            self._answers[who.key] = now, asyncio.create_task(self._facts(who.key))
        try:
            facts = await asyncio.shield(self._answers[who.key][1])
        except HttpError:
            reason = "the gateway refuses your key now"
            who.refuse(reason)
            return JSONResponse({"state": "logged out", "reason": reason}, status_code=401)
        return JSONResponse(facts)

    async def _facts(self, key: str | None) -> dict[str, Any]:
        try:
            rows = await self._ask(key)
        except PenstockError as error:
            if self._has_login and isinstance(error, HttpError) and error.status == 401:
                raise
            return {"state": "offline", "models": [], "reason": error.message}
        return {"state": "ok", "models": msgspec.to_builtins(rows)}
