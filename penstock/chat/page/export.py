"""The routes of export and import: a conversation as Markdown, and the conversations of a file.

Both take JSON as a browser has it and read it as untrusted: what they refuse is 422 with {"message", "detail", "hint"}.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.chat.files import from_file, from_json, to_markdown
from penstock.chat.page.routes import whole_body
from penstock.errors import UserError
from penstock.text import MIB

_MOST_BYTES = 64 * MIB


async def markdown(request: Request) -> Response:
    return await _answer(request, lambda body: "\n".join(map(to_markdown, from_json(body))).encode(), "text/markdown")


async def conversations(request: Request) -> Response:
    """As a list, whatever of `from_file` the file is."""
    return await _answer(request, lambda body: msgspec.json.encode(from_file(body, time.time())), "application/json")


async def _answer(request: Request, write: Callable[[bytes], bytes], kind: str) -> Response:
    try:
        if (body := await whole_body(request, _MOST_BYTES)) is None:
            raise UserError("cannot read files of more than 64 MiB", hint="Export fewer chats at a time.")
        return Response(await asyncio.to_thread(write, body), media_type=kind)
    except UserError as error:
        return JSONResponse({"message": error.message, "detail": error.detail, "hint": error.hint}, status_code=422)
