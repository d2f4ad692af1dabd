"""What the gateway's tests share: a gateway, scripted engines and clients in one event loop.

On a virtual loop (conftest) their connections are in memory; on a real one they are loopback sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import waiting
from virtual_loop import VirtualLoop, advance

from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.service import Gateway, Sockets, open_sockets
from penstock.wire.http1 import END, Reader, ResponseHead, parse_request, parse_response

TOKEN = "admin-token"
KEY = "sk-test"
KEY_HASH = hashlib.sha256(KEY.encode()).hexdigest()
CHAT = b'{"model": "demo", "messages": []}'
EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = b'{"model": "demo", "stream": true}'
DONE = EVENTS[2]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(loop_factory: LoopFactory, test: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a real loop."""

    async def bounded() -> None:
        async with asyncio.timeout(waiting.left_s()):
            await test

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


@dataclass
class Seen:
    """A request as the engine got it."""

    head: Any
    body: bytes


@dataclass
class Engine:
    """`reply` writes what it likes; the connection is closed after it when it returns False."""

    reply: Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
    seen: list[Seen] = field(default_factory=list)
    n_connections: int = 0
    server: asyncio.Server | None = None
    port: int = 0
    tasks: set[asyncio.Task[None] | None] = field(default_factory=set)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.tasks.add(asyncio.current_task())
        self.writers.append(writer)
        parser = Reader(parse_request)
        head, body = None, b""
        with contextlib.suppress(ConnectionError):
            while True:
                event = parser.next_event()
                if event is None:
                    data = await reader.read(65536)
                    if not data:
                        break
                    parser.feed(data)
                elif event is END:
                    seen, body = Seen(head, body), b""
                    self.seen.append(seen)
                    if not await self.reply(seen, reader, writer):
                        break
                elif isinstance(event, bytes):
                    body += event
                else:
                    head = event
        writer.close()


@contextlib.asynccontextmanager
async def started(reply: Any) -> AsyncIterator[Engine]:
    """An engine that nobody announces."""
    engine = Engine(reply)
    await engine.start()
    yield engine
    await engine.stop()
    for task in engine.tasks:
        if task:
            task.cancel()


def error_of(event: bytes) -> dict[str, Any]:
    """The error in an error event."""
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: ").partition(b"\n\n")[0])["error"]
    return error


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def echo(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Engine: fake\r\n\r\n%s" % (len(seen.body), seen.body))
    return True


async def hang_up(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    return False


def say(data: bytes, *, then_close: bool = False) -> Callable[..., Awaitable[bool]]:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        return not then_close

    return reply


@dataclass
class Gate:
    """An engine's reply that waits in the middle until the test opens it, and knows whether its peer left."""

    before: bytes
    after: bytes
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    peer_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def reply(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(self.before)
        self.reached.set()
        left = asyncio.ensure_future(reader.read(1))
        opened = asyncio.ensure_future(self.opened.wait())
        await asyncio.wait((left, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if left.done():
            self.peer_left.set()
            return False
        left.cancel()
        writer.write(self.after)
        return False


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: Reader[ResponseHead] = field(default_factory=lambda: Reader(parse_response))

    def post(self, body: bytes, path: str = "/v1/chat/completions", headers: str = "") -> Client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        return self

    def get(self, path: str, headers: str = "", method: str = "GET") -> Client:
        self.writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        return self

    async def event(self) -> Any:
        while (event := self.parser.next_event()) is None:
            data = await self.reader.read(65536)
            if not data:
                return None
            self.parser.feed(data)
        return event

    async def response(self) -> tuple[ResponseHead, bytes, bool]:
        """Head, body, and whether the body was whole."""
        head = await self.event()
        assert isinstance(head, ResponseHead)
        pieces = []
        while (event := await self.event()) not in (END, None):
            pieces.append(event)
        return head, b"".join(pieces), event is END

    async def error(self) -> tuple[int, dict[str, Any]]:
        head, body, _ = await self.response()
        error: dict[str, Any] = json.loads(body)["error"]
        assert error["source"] == "gateway"
        assert set(error) == {"message", "type", "param", "code", "source"}
        return head.status, error

    async def metrics(self, headers: str = "") -> str:
        self.get("/metrics", headers)
        head, text, _ = await self.response()
        assert (head.status, head.get(b"content-type")) == (200, b"text/plain; version=0.0.4; charset=utf-8")
        return text.decode()

    async def is_closed(self) -> bool:
        return await self.reader.read(1) == b""


class Rig:
    """A gateway with its clients and engines; all of it ends with the context."""

    def __init__(self, **changes: Any) -> None:
        facts: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "admin_token_file": "",
            "models": (ServedModel("demo", ("alias",)),),
            "auth": "none",
            "hold_s": 5.0,
            "drain_s": 0.0,
        }
        config, loop = GatewayConfig(**(facts | changes)), asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            sockets = Sockets(loop.listen(), loop.listen(), None)
            self.gateway = Gateway(config, TOKEN, sockets, world=loop.world)
        else:
            self.gateway = Gateway(config, TOKEN, open_sockets(config))
        self._engines: list[Engine] = []
        self._clients: list[Client] = []
        self._is_stopped = False

    async def __aenter__(self) -> Rig:
        await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            client.writer.transport.abort()
        await self.stop()
        for engine in self._engines:
            await engine.stop()
            await asyncio.gather(*(task for task in engine.tasks if task), return_exceptions=True)

    async def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            await self.gateway.stop()

    async def engine(self, reply: Any, name: str = "0") -> Engine:
        engine = Engine(reply)
        await engine.start()
        self._engines.append(engine)
        await self.announce(name, engine.url)
        return engine

    async def client(self, port: int | None = None) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", port or self.gateway.public.port))
        self._clients.append(client)
        return client

    def forget_clients(self) -> None:
        """Clients that are gone; a test with thousands must not keep them."""
        self._clients = [client for client in self._clients if not client.writer.transport.is_closing()]

    async def admin(self, path: str, body: object = None, token: str = TOKEN) -> tuple[int, Any]:
        client = await self.client(self.gateway.admin.port)
        headers = f"Authorization: Bearer {token}\r\n"
        if body is None:
            client.get(path, headers)
        else:
            client.post(json.dumps(body).encode(), path, headers)
        head, data, _ = await client.response()
        client.writer.close()
        return head.status, json.loads(data)

    async def announce(self, name: str, url: str | None, state: str = "ready", **more: Any) -> Any:
        body = {"replica": name, "model": "demo", "state": state, "lease_s": 3600, "url": url} | more
        return await self.admin("/admin/announce", body)

    async def view(self) -> Any:
        return (await self.admin("/admin/replicas"))[1]

    async def until(self, condition: Callable[[Any], bool]) -> None:
        """Asks /admin/replicas until it shows what is waited for."""
        pause_s = 0.001
        while not condition(await self.view()):
            await advance(pause_s)
            pause_s = min(2 * pause_s, 0.1)


@contextlib.asynccontextmanager
async def rig_with(reply: Any, **changes: Any) -> AsyncIterator[tuple[Rig, Engine, Client]]:
    async with Rig(**changes) as rig:
        yield rig, await rig.engine(reply), await rig.client()
