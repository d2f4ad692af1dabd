"""Bounds of the chat page's connections: strangers' ones end and give way, a visitor's answer never does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import h11_impl
from uvicorn.server import ServerState
from virtual_loop import advance, loop

from penstock.chat.page import connections
from penstock.chat.page.connections import Connection, Connections
from penstock.chat.page.proxied import Proxies

GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
STREAM, HALF = GET.replace(b"/ ", b"/stream "), b"GET /"
LOGIN = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nkey="
SEND = LOGIN.replace(b"/ ", b"/mine ")


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


class Page:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_files: int = 1_000_000, proxies: str = "127.0.0.0/8") -> None:
        monkeypatch.setattr(h11_impl, "get_remote_addr", lambda _: (self._address, 1))
        loop().limit_s = 10_000.0
        self.all = Connections(n_files, Proxies([proxies]))
        self.writers: list[asyncio.StreamWriter] = []
        self._config, self._server = uvicorn.Config(app, ws="none", log_level="critical"), None  # type: Any, Any

    def _make(self) -> Connection:
        self._newest = Connection(self.all, config=self._config, server_state=ServerState(), app_state={})
        return self._newest

    async def peer(self, text: bytes, address: str = "127.0.0.1") -> Connection:
        """The page's end of a new connection that has sent this."""
        self._server, self._address = self._server or await loop().create_server(self._make), address
        self.writers.append((await asyncio.open_connection(*self._server.sockets[0].getsockname()))[1])
        self.writers[-1].write(text)
        await advance(0.001)
        return self._newest

    def has(self, *peers: Connection) -> list[bool]:
        return [peer in self.all.open and not peer.transport.is_closing() for peer in peers]


@pytest.mark.parametrize(
    ("text", "most_s"),
    [(b"", 20), (b"GE", 20), (GET[:-2], 20), (GET, 5), (GET + HALF, 20), (LOGIN, 20), (SEND, 300)],
)
async def test_what_is_not_whole_in_time_ends(text: bytes, most_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch)
    silent, slow = await page.peer(text), await page.peer(text)
    for _ in range(most_s):
        assert page.has(silent)[0] or page.has(slow)[0]
        await advance(1)
        if text != GET:
            page.writers[1].write(b"x")  # a byte a second gives it no more time
    await advance(1)
    assert page.has(silent, slow) == [False, False]


async def test_a_visitors_answer_goes_on_however_many_strangers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST", 50)
    page = Page(monkeypatch)
    stream = await page.peer(STREAM)
    half = [await page.peer(HALF) for _ in range(45)]
    idle = [await page.peer(GET) for _ in range(4)]
    half += [await page.peer(HALF)]
    assert page.has(stream, *idle, half[0]) == [True, *[False] * 4, True], "idle ones go first"
    half += [await page.peer(HALF) for _ in range(4)]
    assert page.has(stream, half[0], half[-1]) == [True, False, True], "then the oldest"
    for _ in range(300):
        await page.peer(HALF)
    late = await page.peer(STREAM)
    assert len(page.all.open) <= 50
    await advance(1000)
    assert page.has(stream, late) == [True, True] and len(page.all.open) == 2


async def test_an_address_has_so_many_strangers_and_a_proxy_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch, proxies="10.0.0.1")
    for index in range(100):
        await page.peer(HALF, f"2001:db8::{index:x}")  # a /64 is one machine's
        await page.peer(HALF, "10.0.0.1")
    assert 60 + 100 <= len(page.all.open) <= 64 + 100
    assert page.has(await page.peer(HALF, "2001:db8:0:1::1")) == [True]
    streams = [await page.peer(STREAM, "10.0.0.2") for _ in range(100)]
    assert all(page.has(*streams)), "people behind one address"


async def test_connections_fit_into_the_files_and_visitors_may_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(monkeypatch, n_files=64 + 3 * 4)
    streams = [await page.peer(STREAM) for _ in range(4)]
    assert page.has(*streams, await page.peer(STREAM)) == [True] * 4 + [False]
