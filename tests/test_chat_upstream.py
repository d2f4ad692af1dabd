"""The gateway as the chat page asks it: bytes of an answer in, pieces out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from penstock.chat.page.upstream import Piece, Upstream
from penstock.errors import PenstockError
from penstock.wire.answers import BrokenAnswer, Chunk, HttpError, Reply
from penstock.wire.waiting import Waiting, write_comment

WORD = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
HELD = write_comment(Waiting("loading", shards_done=17, shards_total=30))


class Server(httpx.AsyncByteStream):
    """Gives one answer, whose body this is, and keeps what it was asked."""

    def __init__(self, *pieces: bytes | Exception, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.pieces, self.status, self.headers, self.is_closed = pieces, status, headers or {}, False
        self.asked: list[httpx.Request] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self.is_closed = True

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        return httpx.Response(self.status, headers=self.headers, stream=self)

    def upstream(self) -> Upstream:
        return Upstream("http://gateway/v1/", transport=httpx.MockTransport(self.answer))


HI = [{"role": "user", "content": "hi"}]


def read(server: Server, seen: list[Piece]) -> None:
    async def stream() -> None:
        async for piece in server.upstream().stream_chat("sk-1", [*HI], {"seed": 1}):
            seen.append(piece)

    asyncio.run(stream())


def test_stream_gives_what_it_waits_for_then_pieces_then_the_reply() -> None:
    server = Server(HELD, WORD[:20], WORD[20:], END, headers={"x-request-id": "r-1", "x-penstock-replica": "none"})
    seen: list[Piece] = []
    read(server, seen)
    waiting, chunk, reply = seen
    assert isinstance(waiting, Waiting) and waiting.shards_done == 17
    assert isinstance(chunk, Chunk) and chunk.text == "hello"
    assert isinstance(reply, Reply) and (reply.text, reply.finish_reason, reply.request_id) == ("hello", "stop", "r-1")
    (asked,) = server.asked
    assert str(asked.url) == "http://gateway/v1/chat/completions"
    assert (asked.headers["authorization"], asked.headers["x-penstock-progress"]) == ("Bearer sk-1", "1")
    more = {"seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    assert msgspec.json.decode(asked.content) == {"messages": HI, **more}
    assert server.is_closed


def test_refusal_has_the_words_of_the_server_and_its_retry_after() -> None:
    body = b'{"error": {"message": "the queue is full", "code": "queue_full"}}'
    with pytest.raises(HttpError, match="429: the queue is full") as raised:
        read(Server(body, status=429, headers={"retry-after": "7"}), [])
    assert (raised.value.retry_after_s, raised.value.words.code) == (7.0, "queue_full")


@pytest.mark.parametrize(
    "last", [httpx.ReadError("reset"), b'data: {"error": {"message": "the engine died"}}\n\n', b""]
)
def test_answer_that_breaks_off_gives_what_came_before_it(last: bytes | Exception) -> None:
    seen: list[Piece] = []
    with pytest.raises(BrokenAnswer):
        read(Server(WORD, last), seen)
    assert isinstance(seen[-1], Reply) and (seen[-1].text, seen[-1].finish_reason) == ("hello", None)


def test_server_that_is_away_can_be_asked_again() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("All connection attempts failed")

    async def ask() -> None:
        await Upstream("http://gateway", transport=httpx.MockTransport(refuse)).models(None)

    with pytest.raises(PenstockError, match="could not connect to http://gateway") as raised:
        asyncio.run(ask())
    assert raised.value.is_retryable


def test_closing_the_stream_closes_the_connection() -> None:
    server = Server(WORD, WORD, END)

    async def read_one() -> None:
        stream = server.upstream().stream_chat(None, [], {})
        await anext(stream)
        await stream.aclose()

    asyncio.run(read_one())
    assert server.is_closed
    assert "authorization" not in server.asked[0].headers
