"""The routes of export and import: a conversation as Markdown, and the conversations of a file.

Both take JSON as a browser has it and read it as untrusted: what they refuse is 422 with {"message", "detail", "hint"}.
A large file is read by another process, since a thread that reads it would keep Python's lock from all answers.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from subprocess import DEVNULL, PIPE

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.chat.files import from_file, from_json, to_markdown
from penstock.chat.page.routes import whole_body
from penstock.chat.page.sessions import visitor
from penstock.errors import UserError
from penstock.text import GIB, KIB, MIB

_MOST_BYTES = 64 * MIB
_SMALL_BYTES = 256 * KIB  # 10 ms
_AT_ONCE = 4  # of all people
_BOUNDS = {resource.RLIMIT_CPU: 60, resource.RLIMIT_AS: 4 * GIB}  # of the process
_FEWER = "Export fewer chats at a time."
_JSON, _MARKDOWN = "application/json", "text/markdown"


class Converter:
    """Reads one file of each person at a time."""

    def __init__(self) -> None:
        self._readers = set[str | None]()

    async def markdown(self, request: Request) -> Response:
        return await self._answer(request, _MARKDOWN)

    async def conversations(self, request: Request) -> Response:
        """As a list, whatever of `from_file` the file is."""
        return await self._answer(request, _JSON)

    async def _answer(self, request: Request, kind: str) -> Response:
        key = visitor(request).key
        if key in self._readers or len(self._readers) >= _AT_ONCE:
            busy = UserError("cannot read a file while others are read", hint="Try again in a moment.")
            return Response(_refusal(busy), 429, media_type=_JSON)
        self._readers.add(key)
        try:
            body = await whole_body(request, _MOST_BYTES)
            answer, is_read = await _converted(body, kind)
        finally:
            self._readers.remove(key)
        return Response(answer, media_type=kind) if is_read else Response(answer, 422, media_type=_JSON)


async def _converted(body: bytes | None, kind: str) -> tuple[bytes, bool]:
    """As `convert`; None: a body that was too large."""
    if body is None:
        return _refusal(UserError("cannot read files of more than 64 MiB", hint=_FEWER)), False
    if len(body) <= _SMALL_BYTES:
        return await asyncio.to_thread(convert, body, kind)
    argv = (sys.executable, "-m", "penstock.chat.page.export", kind)
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    answer, _ = await process.communicate(body)
    if process.returncode not in (0, 2):
        return _refusal(UserError("cannot read the file: it takes too long, or too much memory", hint=_FEWER)), False
    return answer, process.returncode == 0


def convert(body: bytes, kind: str) -> tuple[bytes, bool]:
    """Conversations as a file of that media type; or why they cannot be read, and false."""
    try:
        if kind == _MARKDOWN:
            return "\n".join(map(to_markdown, from_json(body))).encode(), True
        return msgspec.json.encode(from_file(body, time.time())), True
    except UserError as error:
        return _refusal(error), False


def _refusal(error: UserError) -> bytes:
    return msgspec.json.encode({"message": error.message, "detail": error.detail, "hint": error.hint})


if __name__ == "__main__":
    os.nice(10)
    for number, most in _BOUNDS.items():
        resource.setrlimit(number, (most, most))
    text, is_good = convert(sys.stdin.buffer.read(), sys.argv[1])
    sys.stdout.buffer.write(text)
    sys.exit(0 if is_good else 2)
