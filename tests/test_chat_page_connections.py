"""Bounds of the chat page's connections: strangers' ones end and give way, a visitor's answer never does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import uvicorn
from uvicorn.protocols.http import h11_impl
from uvicorn.server import ServerState
from virtual_loop import advance, loop

from penstock.chat.page import connections
from penstock.chat.page.connections import Connection, Connections
from penstock.chat.page.proxied import Proxies

GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
STREAM, SEND, WRONG = GET.replace(b"/ ", b"/stream "), b"POST /mine HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n"
HALF_BODY = b"host: h\r\ncontent-length: 100\r\n\r\nkey="


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Strangers ask for "/"; "/stream" is a visitor's, and has a piece each second."""
    if scope["path"] != "/":
        scope["state"]["visitor"] = "ann"
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/stream":
        await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        await advance(1)
    await send({"type": "http.response.body", "body": b"end"})


class Peer(NamedTuple):
    """`ours`: the page's end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ours: Connection


class Page:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_files: int = 1_000_000, proxies: str = "127.0.0.0/8") -> None:
        self.addresses = itertools.repeat("127.0.0.1")
        monkeypatch.setattr(h11_impl, "get_remote_addr", lambda _: (next(self.addresses), 1))
        self.connections = Connections(n_files, Proxies([proxies]))
        loop().limit_s = 10_000.0
        self._peers: list[Peer] = []

    async def listen(self) -> None:
        config, state = uvicorn.Config(app, ws="none", log_level="critical"), ServerState()

        def make() -> Connection:
            self._newest = Connection(self.connections, config=config, server_state=state, app_state={})
            return self._newest

        self.server = await loop().create_server(make, "127.0.0.1", 0)

    async def peer(self, text: bytes = b"", address: str = "127.0.0.1") -> Peer:
        self.addresses = itertools.repeat(address)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.sockets[0].getsockname()[1])
        writer.write(text)
        await advance(0.001)
        self._peers.append(Peer(reader, writer, self._newest))
        return self._peers[-1]

    def has(self, *peers: Peer) -> list[bool]:
        return [peer.ours in self.connections.open and not peer.ours.transport.is_closing() for peer in peers]


@contextlib.asynccontextmanager
async def page(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> AsyncIterator[Page]:
    page = Page(monkeypatch, **facts)
    await page.listen()
    yield page
    page.server.close()


@pytest.mark.parametrize(
    ("text", "most_s"),
    [(b"", 20), (b"GE", 20), (GET[:-2], 20), (GET, 5), (GET + GET[:5], 20), (WRONG + HALF_BODY, 20),
     (SEND + HALF_BODY, 300)],
)  # fmt: skip
async def test_what_is_not_whole_in_time_ends(text: bytes, most_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with page(monkeypatch) as rig:
        peer, slow = await rig.peer(text), await rig.peer(text)
        for _ in range(most_s):
            assert any(rig.has(peer, slow))
            await advance(1)
            if text[-4:] != b"\r\n\r\n":
                slow.writer.write(b"x")  # a byte a second gives it no more time
        await advance(1)
        assert rig.has(peer, slow) == [False, False]


async def test_a_visitors_answer_goes_on_however_many_strangers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST", 50)
    async with page(monkeypatch) as rig:
        stream = await rig.peer(STREAM)
        half = [await rig.peer(b"GET /") for _ in range(45)]
        idle = [await rig.peer(GET) for _ in range(4)]
        half += [await rig.peer(b"GET /")]
        assert rig.has(stream, *idle, half[0]) == [True, *[False] * 4, True], "idle ones go first"
        half += [await rig.peer(b"GET /") for _ in range(4)]
        assert rig.has(stream, half[0], half[-1]) == [True, False, True], "then the oldest"
        half += [await rig.peer(b"GET /") for _ in range(1500)]
        late = await rig.peer(STREAM)
        assert len(rig.connections.open) <= 50
        await advance(1000)
        assert rig.has(stream, late) == [True, True] and len(rig.connections.open) == 2


async def test_an_address_has_so_many_strangers_and_a_proxy_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page(monkeypatch, proxies="10.0.0.1") as rig:
        for index in range(200):
            await rig.peer(b"GET /", f"2001:db8::{index:x}")  # a /64 is one machine's
            await rig.peer(b"GET /", "10.0.0.1")
        assert 60 + 200 <= len(rig.connections.open) <= 64 + 200
        assert rig.has(await rig.peer(b"GET /", "2001:db8:0:1::1")) == [True]
        streams = [await rig.peer(STREAM, "10.0.0.2") for _ in range(100)]
        assert all(rig.has(*streams)), "people behind one address"


async def test_connections_fit_into_the_files_and_visitors_may_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page(monkeypatch, n_files=64 + 3 * 4) as rig:
        streams = [await rig.peer(STREAM) for _ in range(4)]
        assert rig.has(*streams, await rig.peer(STREAM)) == [True] * 4 + [False]
