"""The routes by which the chat page exports and imports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.chat.page import export

EXCHANGE = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}


def post(route: Callable[[Request], Coroutine[Any, Any, Response]], *pieces: bytes) -> tuple[int, bytes]:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    response = asyncio.run(route(Request({"type": "http", "method": "POST", "headers": []}, receive)))
    return response.status_code, bytes(response.body)


def test_a_file_becomes_conversations_and_each_of_them_markdown() -> None:
    whole = json.dumps(EXCHANGE).encode()
    status, body = post(export.conversations, whole[:9], whole[9:])
    (conversation,) = json.loads(body)
    assert (status, conversation["title"], len(conversation["turns"])) == (200, "why?", 2)
    assert post(export.markdown, json.dumps(conversation).encode()) == (200, b"## user\n\nwhy?\n\n## assistant\n\nso\n")
    assert post(export.markdown, b"[]") == (200, b"")


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"id": 3}', b"\xff"])
def test_a_bad_file_is_refused_in_words(body: bytes) -> None:
    status, answer = post(export.conversations, body)
    assert status == 422 and json.loads(answer)["message"].startswith("cannot ")


def test_a_large_file_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_MOST_BYTES", 10)
    status, answer = post(export.conversations, b"123456", b"78901", b"never read")
    assert status == 422 and "64 MiB" in json.loads(answer)["message"]
