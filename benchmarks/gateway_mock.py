"""A cheap engine for benchmarks: `python benchmarks/gateway_mock.py PORT`. One raw protocol, no framework.

A body that asks for a stream gets N_CHUNKS events, one a tick, each in a write of its own; any other gets one answer
at once. GET gets what a health check wants.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

N_CHUNKS = 50
TICK_S = 0.01

_ANSWER = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"' + b"word " * 16 + b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":12,'
    b'"completion_tokens":16,"total_tokens":28}}'
)
_PLAIN = (
    b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
    b"content-type: application/json\r\n\r\n%s" % (len(_ANSWER), _ANSWER)
)
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
_GET = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"cmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_USAGE = b'data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":50,"total_tokens":62}}\n\n'
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_LAST = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in (_USAGE, b"data: [DONE]\n\n")) + b"0\r\n\r\n"


class MockConnection(asyncio.Protocol):
    """One connection from a gateway. Trusts its peer's HTTP."""

    def __init__(self, streams: set[MockConnection]) -> None:
        self._streams = streams
        self._buffer = b""
        self._n_left = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        head, gap, rest = self._buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        lower = head.lower()
        at = lower.find(b"content-length:")
        length = int(lower[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
        if b"transfer-encoding: chunked" in lower:
            if not rest.endswith(b"0\r\n\r\n"):
                return
        elif len(rest) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET"):
            self.transport.write(_GET)
        elif b'"stream": true' in rest or b'"stream":true' in rest:
            self.transport.write(_STREAM_HEAD)
            self._n_left = N_CHUNKS
            self._streams.add(self)
        else:
            self.transport.write(_PLAIN)

    def tick(self) -> None:
        if self._n_left:
            self._n_left -= 1
            self.transport.write(_CHUNK)
        else:
            self._streams.discard(self)
            self.transport.write(_LAST)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)


async def serve(port: int) -> None:
    """Serves until it is ended."""
    loop = asyncio.get_running_loop()
    streams: set[MockConnection] = set()
    await loop.create_server(lambda: MockConnection(streams), "127.0.0.1", port, backlog=4096)
    while True:
        await asyncio.sleep(TICK_S)
        for stream in tuple(streams):
            stream.tick()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
