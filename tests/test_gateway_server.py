"""The gateway on loopback sockets, with a scripted engine behind it, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from penstock.errors import UserError
from penstock.gateway import forward, upstream
from penstock.gateway.assembly import Gateway
from penstock.gateway.config import GatewayConfig, ServedModel
from penstock.gateway.http1 import END, Reader, ResponseHead, parse_request, parse_response
from penstock.gateway.listener import open_socket
from penstock.gateway.server import MAX_BODY_BYTES

TOKEN = "admin-token"
KEY = "sk-test"
CHAT = b'{"model": "demo", "messages": []}'
EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ENGINE_DOWN = "the engine closed the connection"

factories = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
pytestmark = factories


def run(loop_factory: LoopFactory, test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.tasks.add(asyncio.current_task())
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

    def post(self, body: bytes, path: str = "/v1/chat/completions", headers: str = "") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    def get(self, path: str, headers: str = "", method: str = "GET") -> None:
        self.writer.write(f"{method} {path} HTTP/1.1\r\nHost: a\r\n{headers}\r\n".encode())

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
        body = b""
        while (event := await self.event()) not in (END, None):
            body += event
        return head, body, event is END

    async def error(self) -> tuple[int, dict[str, Any]]:
        head, body, _ = await self.response()
        error: dict[str, Any] = json.loads(body)["error"]
        assert error["source"] == "gateway"
        assert set(error) == {"message", "type", "param", "code", "source"}
        return head.status, error

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
        self.gateway = Gateway(GatewayConfig(**(facts | changes)), TOKEN)
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
        body = {"replica": name, "model": "demo", "state": state, "lease_s": 30, "url": url} | more
        return await self.admin("/admin/announce", body)

    async def view(self) -> Any:
        return (await self.admin("/admin/replicas"))[1]

    async def until(self, condition: Callable[[Any], bool]) -> None:
        """Asks /admin/replicas until it shows what is waited for."""
        while not condition(await self.view()):
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def rig_with(reply: Any, **changes: Any) -> AsyncIterator[tuple[Rig, Engine, Client]]:
    async with Rig(**changes) as rig:
        yield rig, await rig.engine(reply), await rig.client()


# Passing through.


def test_stream_passes_unchanged_and_unheld(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1]) + chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply) as (_, _, client):
            client.post(CHAT)
            head = await client.event()
            assert head.get(b"content-type") == b"text/event-stream"
            assert head.get(b"x-penstock-replica") == b"0"
            assert head.get(b"server-timing").startswith(b"gateway;dur=")
            # The engine has not sent the rest yet: this is here because nothing is held back.
            assert await client.event() == EVENTS[0]
            assert not gate.opened.is_set()
            gate.opened.set()
            body = b""
            while (event := await client.event()) is not END:
                body += event
            assert body == EVENTS[1] + EVENTS[2]

    run(loop_factory, test())


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"demo","tools":[{"type":"function","function":{"name":"f","parameters":{}}}], "tool_choice":"auto"}',
        b'{ "model" : "alias",\n "response_format":{"type":"json_schema","json_schema":{"name":"a"}}, "x": 1.10e3 }',
        '{"messages":[{"role":"user","content":"größe \\u00e9 \U0001f600"}],"stream":null,"model":null}'.encode(),
        b'{"model":"demo","x":"' + b"y" * 300_000 + b'"}',
    ],
)
def test_request_and_response_bodies_pass_byte_for_byte(loop_factory: LoopFactory, body: bytes) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, engine, client):
            client.post(
                body, "/v1/chat/completions?a=b", "X-Custom: 1\r\nX-Request-Id: mine\r\nConnection: x-custom\r\n"
            )
            head, got, is_whole = await client.response()
            assert (head.status, got, is_whole) == (200, body, True)
            assert (head.get(b"x-engine"), head.get(b"x-request-id")) == (b"fake", b"mine")
            (seen,) = engine.seen
            assert (seen.head.target, seen.body) == (b"/v1/chat/completions?a=b", body)
            assert seen.head.get(b"x-request-id") == b"mine"
            assert seen.head.get(b"host") == f"127.0.0.1:{engine.port}".encode()
            assert seen.head.get(b"x-custom") is None

    run(loop_factory, test())


def test_engine_refusal_passes_unchanged(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        refusal = b'{"error":{"message":"The model does not support Embeddings API","code":400}}'
        data = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        async with rig_with(say(data % (len(refusal), refusal))) as (_, engine, client):
            client.post(b'{"model":"demo","input":"x"}', "/v1/embeddings")
            head, body, _ = await client.response()
            assert (head.status, body) == (400, refusal)
            assert engine.seen[0].head.path == b"/v1/embeddings"

    run(loop_factory, test())


def test_chunked_request_reaches_the_engine_whole(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, engine, client):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            for byte in head + chunk(CHAT[:7]) + chunk(CHAT[7:]) + b"0\r\n\r\n":
                client.writer.write(bytes((byte,)))
            assert (await client.response())[1] == CHAT
            assert engine.seen[0].head.get(b"content-length") == b"%d" % len(CHAT)
            assert engine.seen[0].head.get(b"transfer-encoding") is None

    run(loop_factory, test())


def test_pipelined_requests_are_answered_in_order(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, engine, client):
            bodies = [b'{"n": %d}' % n for n in range(5)]
            for body in bodies:
                client.post(body)
            client.get("/health")
            assert [(await client.response())[1] for _ in bodies] == bodies
            assert (await client.response())[1] == b'{"status":"ok","ready_replicas":1}'
            assert [seen.body for seen in engine.seen] == bodies
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


def test_upstream_connection_is_used_again(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, engine, client):
            for _ in range(3):
                client.post(CHAT)
                await client.response()
            assert (len(engine.seen), engine.n_connections) == (3, 1)

    run(loop_factory, test())


def test_body_until_the_end_of_the_connection_is_made_whole(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(say(b"HTTP/1.0 200 OK\r\n\r\nabc", then_close=True)) as (_, _, client):
            client.post(CHAT)
            assert (await client.response())[1:] == (b"abc", True)

    run(loop_factory, test())


def test_http_10_client_gets_a_plain_body_and_the_end(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(say(SSE_HEAD + chunk(EVENTS[0]) + b"0\r\n\r\n")) as (_, _, client):
            client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            data = await client.reader.read()
            assert b"transfer-encoding" not in data
            assert data.partition(b"\r\n\r\n")[2] == EVENTS[0]

    run(loop_factory, test())


def test_http_10_client_sees_a_reset_when_its_body_is_cut(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"
        async with rig_with(say(data, then_close=True)) as (_, _, client):
            client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            with pytest.raises(ConnectionResetError):
                await client.reader.read()

    run(loop_factory, test())


def test_slow_reader_stops_the_engine_instead_of_filling_memory(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        n_pieces, piece, n_written = 512, b"x" * 65536, 0

        async def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            nonlocal n_written
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (n_pieces * len(piece)))
            for _ in range(n_pieces):
                writer.write(piece)
                await writer.drain()
                n_written += 1
            return True

        async with rig_with(flood) as (rig, _, _):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            raw.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, ("127.0.0.1", rig.gateway.public.port))
            await loop.sock_sendall(raw, b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
            n_before = -1
            while n_written != n_before or not n_written:
                n_before = n_written
                await asyncio.sleep(0.005)
            # What is left of it sits in the kernel's buffers of two connections, at most a few MiB each.
            assert n_written < n_pieces * 3 // 4
            n_received = 0
            while n_received < n_pieces * len(piece):
                n_received += len(await loop.sock_recv(raw, 1 << 20))
            raw.close()
            assert n_written == n_pieces

    run(loop_factory, test())


# When an engine fails.


def test_dead_replica_costs_one_retry_elsewhere(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            bad, good = await rig.engine(hang_up, "bad"), await rig.engine(echo, "good")
            client = await rig.client()
            for _ in range(4):
                client.post(CHAT)
                head, body, _ = await client.response()
                assert (head.status, body, head.get(b"x-penstock-replica")) == (200, CHAT, b"good")
            assert (len(good.seen), 0 < len(bad.seen) <= 4) == (4, True)

    run(loop_factory, test())


def test_lost_keep_alive_connection_costs_a_fresh_one(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def once_per_connection(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            # Closes on the second request of a connection without a word, as an engine's idle timer does.
            ports.append(writer.get_extra_info("peername")[1])
            return ports.count(ports[-1]) == 1 and await echo(seen, reader, writer)

        ports: list[int] = []
        async with rig_with(once_per_connection) as (_, engine, client):
            for _ in range(2):
                client.post(CHAT)
                assert (await client.response())[1] == CHAT
            assert (len(engine.seen), engine.n_connections) == (3, 2)

    run(loop_factory, test())


def test_request_that_kills_engines_is_sent_twice_at_most(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(hang_up) as (rig, engine, client):
            client.post(CHAT)
            status, error = await client.error()
            assert (status, error["code"], error["type"]) == (502, "upstream_failed", "server_error")
            assert len(engine.seen) == 2
            client.get("/metrics")
            assert b'penstock_requests_total{model="demo",outcome="broken"} 1\n' in (await client.response())[1]
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


def test_replica_that_refuses_connections_is_passed_over_until_it_announces(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(echo, name) for name in ("a", "b")]
            await engines[0].stop()
            client = await rig.client()

            async def replicas(n_requests: int) -> set[bytes | None]:
                found = set()
                for _ in range(n_requests):
                    client.post(CHAT)
                    found.add((await client.response())[0].get(b"x-penstock-replica"))
                return found

            assert await replicas(4) == {b"b"}
            await engines[0].start()
            assert await replicas(4) == {b"b"}
            await rig.announce("a", engines[0].url)
            assert await replicas(4) == {b"a", b"b"}

    run(loop_factory, test())


def test_request_waits_for_its_only_replica_to_come_back(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, engine, client):
            await engine.stop()
            client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            await engine.start()
            await rig.announce("0", engine.url)
            assert (await client.response())[1] == CHAT

    run(loop_factory, test())


@pytest.mark.parametrize(
    ("sent", "gap"),
    [(EVENTS[0], b""), (b'data: {"n"', b"\n\n"), (b"", b""), (b": ping\r\n\r\n", b"")],
)
def test_engine_death_in_a_stream_becomes_an_error_event(loop_factory: LoopFactory, sent: bytes, gap: bytes) -> None:
    async def test() -> None:
        data = SSE_HEAD + (chunk(sent) if sent else b"")
        async with rig_with(say(data, then_close=True)) as (_, engine, client):
            client.post(CHAT)
            _, body, is_whole = await client.response()
            assert is_whole
            assert body.startswith(sent + gap + b"data: ")
            event, done, rest = body[len(sent + gap) :].split(b"\n\n")
            error = json.loads(event.removeprefix(b"data: "))["error"]
            assert (error["source"], error["message"]) == ("gateway", ENGINE_DOWN)
            assert (done, rest) == (b"data: [DONE]", b"")
            assert len(engine.seen) == 1
            client.get("/health")
            assert (await client.response())[0].status == 200

    run(loop_factory, test())


def test_engine_death_after_done_is_no_error(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(say(SSE_HEAD + chunk(EVENTS[2]), then_close=True)) as (_, _, client):
            client.post(CHAT)
            assert (await client.response())[1:] == (EVENTS[2], True)

    run(loop_factory, test())


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
    ],
)
def test_engine_death_in_another_body_closes_the_connection(loop_factory: LoopFactory, data: bytes) -> None:
    async def test() -> None:
        async with rig_with(say(data, then_close=True)) as (rig, _, client):
            client.post(CHAT)
            _, body, is_whole = await client.response()
            assert (body, is_whole) == (b"12345", False)
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", SSE_HEAD + b"no chunk\r\n"])
def test_engine_that_does_not_speak_http_gives_502(loop_factory: LoopFactory, data: bytes) -> None:
    async def test() -> None:
        async with rig_with(say(data)) as (_, _, client):
            client.post(CHAT)
            assert (await client.error())[0] == 502

    run(loop_factory, test())


# When a client leaves.


def test_leaving_client_closes_the_engine_connection(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        for before in (b"", SSE_HEAD + chunk(EVENTS[0])):
            gate = Gate(before, b"")
            async with rig_with(gate.reply) as (rig, _, client):
                client.post(CHAT)
                await gate.reached.wait()
                assert (await rig.view())["in_flight_total"] == 1
                client.writer.close()
                await gate.peer_left.wait()
                await rig.until(lambda view: view["in_flight_total"] == 0)

    run(loop_factory, test())


def test_leaving_client_is_not_waiting_any_more(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            clients = [await rig.client() for _ in range(3)]
            for client in clients:
                client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 3)
            clients[0].writer.close()
            clients[1].writer.transport.abort()
            await rig.until(lambda view: view["waiting"] == 1)
            engine = await rig.engine(echo)
            assert (await clients[2].response())[1] == CHAT
            assert len(engine.seen) == 1

    run(loop_factory, test())


def test_client_that_leaves_at_once_leaves_nothing_behind(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, _, client):
            client.post(CHAT)
            client.writer.close()
            await rig.until(lambda view: view["in_flight_total"] == 0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(loop_factory, test())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


# Holding and refusing.


def test_request_is_held_until_a_replica_is_announced(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await rig.client()
            client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            await rig.announce("0", None, "loading")
            assert (await rig.view())["waiting"] == 1
            engine = await rig.engine(echo)
            assert (await client.response())[1] == CHAT
            assert (len(engine.seen), (await rig.view())["waiting"]) == (1, 0)

    run(loop_factory, test())


def test_request_without_a_replica_gets_503_with_retry_after(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig(hold_s=0.002) as rig:
            progress = {"stage": "weights", "eta_s": 40}
            await rig.announce("0", None, "loading", progress=progress)
            client = await rig.client()
            client.post(CHAT)
            head, body, _ = await client.response()
            assert (head.status, head.get(b"retry-after")) == (503, b"40")
            assert json.loads(body)["error"]["code"] == "no_replica"
            assert (await rig.view())["waiting"] == 0

    run(loop_factory, test())


def test_unroutable_requests_get_openai_errors(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        models = (ServedModel("demo"), ServedModel("other"))
        async with Rig(models=models) as rig:
            client = await rig.client()
            for body, expected in (
                (b'{"model":"nope"}', (404, "model_not_found", "model")),
                (b"{}", (400, "model_missing", "model")),
                (b'{"model":', (400, "invalid_body", None)),
                (b'{"model":1}', (400, "invalid_body", None)),
                (b"[]", (400, "invalid_body", None)),
            ):
                client.post(body)
                status, error = await client.error()
                assert (status, error["code"], error["param"]) == expected
            for path in ("/", "/v1", "/v1/../sleep", "/sleep", "/admin/replicas", "/v1//x", "/v1/%2e%2e/sleep"):
                client.get(path)
                assert (await client.error())[0] == 404
            client.get("/v1/chat/completions")
            head, _, _ = await client.response()
            assert (head.status, head.get(b"allow")) == (405, b"POST")

    run(loop_factory, test())


def test_key_is_asked_for_and_not_passed_on(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo, auth="keys", key_hashes=(hashlib.sha256(KEY.encode()).hexdigest(),)) as (
            rig,
            engine,
            _,
        ):
            for path in ("/v1/models", "/metrics", "/nothing"):
                client = await rig.client()
                client.get(path, "Authorization: Bearer wrong\r\n")
                status, error = await client.error()
                assert (status, error["code"]) == (401, "invalid_api_key")
            client.get("/health")
            assert (await client.response())[0].status == 200
            client.post(CHAT)
            assert (await client.error())[0] == 401
            assert await client.is_closed()
            assert engine.seen == []
            client = await rig.client()
            client.post(CHAT, headers=f"Authorization: Bearer {KEY}\r\n")
            assert (await client.response())[0].status == 200
            assert engine.seen[0].head.get(b"authorization") is None

    run(loop_factory, test())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (b"GET http://a/health HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnope\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40000, 431),
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n{" % (MAX_BODY_BYTES + 1), 413),
        (b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n", 404),
    ],
)
def test_refused_request_is_answered_once_and_closed(loop_factory: LoopFactory, data: bytes, status: int) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, engine, client):
            client.writer.write(data)
            assert (await client.error())[0] == status
            assert await client.is_closed()
            assert engine.seen == []

    run(loop_factory, test())


def test_client_is_told_to_continue_only_when_it_waits_for_it(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, _, client):
            head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            client.writer.write(head)
            assert (await client.event()).status == 100
            assert await client.event() is END
            client.writer.write(b"{}")
            assert (await client.response())[:2][1] == b"{}"
            client.writer.write(head + b"{}")
            assert (await client.response())[0].status == 200

    run(loop_factory, test())


# What the gateway answers itself.


def test_health_models_and_metrics(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, _, client):
            client.post(CHAT)
            await client.response()
            client.get("/health")
            assert json.loads((await client.response())[1]) == {"status": "ok", "ready_replicas": 1}
            client.get("/v1/models")
            listing = json.loads((await client.response())[1])
            client.get("/v1/models/alias")
            assert json.loads((await client.response())[1]) == listing["data"][0]
            (model,) = listing["data"]
            assert isinstance(model.pop("created"), int)
            assert model == {
                "id": "demo",
                "object": "model",
                "owned_by": "penstock",
                "aliases": ["alias"],
                "state": "ready",
            }
            client.get("/metrics")
            head, text, _ = await client.response()
            assert head.get(b"content-type") == b"text/plain; version=0.0.4; charset=utf-8"
            for line in (
                b'penstock_requests_total{model="demo",outcome="complete"} 1',
                b'penstock_responses_total{model="demo",code="200"} 1',
                b'penstock_requests_in_flight{model="demo",replica="0"} 0',
                b'penstock_replicas_ready{model="demo"} 1',
            ):
                assert line in text.splitlines()
            client.get("/v1/models/nope")
            assert (await client.error())[0] == 404

    run(loop_factory, test())


def test_head_has_a_length_and_no_body(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await rig.client()
            client.get("/health", method="HEAD")
            client.get("/health", "Connection: close\r\n")
            heads = (await client.reader.read()).split(b"\r\n\r\n")
            assert [head.partition(b"\r\n")[0] for head in heads] == [b"HTTP/1.1 200 OK"] * 2 + [heads[2]]
            assert b"content-length: 34" in heads[0]
            assert heads[2] == b'{"status":"ok","ready_replicas":0}'

    run(loop_factory, test())


def test_preflight_and_origin(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(say(SSE_HEAD + b"0\r\n\r\n")) as (_, _, client):
            client.get("/v1/chat/completions", "Origin: http://localhost:3000\r\n", method="OPTIONS")
            head, _, _ = await client.response()
            assert (head.status, head.get(b"access-control-allow-methods")) == (204, b"GET, HEAD, POST, OPTIONS")
            for origin, allowed in (("http://localhost:3000", b"http://localhost:3000"), ("http://evil.example", None)):
                client.post(CHAT, headers=f"Origin: {origin}\r\n")
                head, _, _ = await client.response()
                assert head.get(b"access-control-allow-origin") == allowed

    run(loop_factory, test())


def test_admin_calls_need_the_token(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            assert await rig.admin("/admin/health") == (200, {"ok": True})
            for path in ("/admin/health", "/admin/replicas", "/nothing"):
                assert (await rig.admin(path, token="wrong"))[0] == 401
            assert (await rig.admin("/nothing"))[0] == 404
            assert (await rig.admin("/admin/drain"))[0] == 405
            assert (await rig.admin("/admin/drain", {"name": "0"}))[0] == 400
            status, answer = await rig.announce("0", "http://127.0.0.1:1", model="nope")
            assert (status, answer["error"]["code"]) == (400, "bad_request")
            assert (await rig.announce("0", None, "no such state"))[0] == 400

    run(loop_factory, test())


# Draining.


def test_drained_replica_finishes_and_gets_nothing_new(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 1})
            assert await rig.announce("0", engine.url) == (200, {"draining": True})
            other = await rig.client()
            other.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            gate.opened.set()
            assert (await client.response())[1:] == (EVENTS[2], True)
            assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 0})
            assert len(engine.seen) == 1
            await rig.admin("/admin/undrain", {"replica": "0"})
            assert (await other.response())[1:] == (EVENTS[2], True)
            await rig.admin("/admin/forget", {"replica": "0"})
            assert (await rig.view())["replicas"] == []

    run(loop_factory, test())


def test_request_survives_the_end_of_its_replicas_lease(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            await rig.announce("0", engine.url, "stalled", lease_s=0.001)
            await rig.until(lambda view: not view["replicas"][0]["is_alive"])
            gate.opened.set()
            assert (await client.response())[1:] == (EVENTS[2], True)

    run(loop_factory, test())


def test_stopping_gateway_finishes_requests_and_takes_no_connections(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply, drain_s=5.0) as (rig, _, client):
            idle, held = await rig.client(), await rig.client()
            idle.get("/health")
            await idle.response()
            client.post(CHAT)
            await gate.reached.wait()
            await rig.admin("/admin/drain", {"replica": "0"})
            held.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            port = rig.gateway.public.port
            stopping = asyncio.ensure_future(rig.stop())
            assert await idle.is_closed()
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
            # The admin address is still there: the held request may still get its replica.
            await rig.engine(echo, "1")
            head, body, _ = await held.response()
            assert (body, head.get(b"connection")) == (CHAT, b"close")
            assert not stopping.done()
            gate.opened.set()
            assert (await client.response())[1:] == (EVENTS[2], True)
            assert await client.is_closed()
            await stopping

    run(loop_factory, test())


def test_request_that_outlasts_the_drain_is_told_so(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD + chunk(EVENTS[0]), b"")
        async with rig_with(gate.reply) as (rig, _, client):
            client.post(CHAT)
            await gate.reached.wait()
            await client.event()
            assert await client.event() == EVENTS[0]
            assert await rig.gateway.public.drain(0.0) == 1
            assert b"the gateway is shutting down" in await client.event()
            assert await client.event() is END
            await gate.peer_left.wait()

    run(loop_factory, test())


# Sockets.


def test_taken_port_is_an_error_and_a_left_one_is_free_at_once(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            port = rig.gateway.public.port
            client = await rig.client()
            client.get("/health", "Connection: close\r\n")
            await client.response()
            with pytest.raises(UserError, match="the port is taken"):
                open_socket(("127.0.0.1", port))
            await rig.stop()
        # The gateway closed first, so its end of that connection is in TIME_WAIT now.
        open_socket(("127.0.0.1", port)).close()

    run(loop_factory, test())


def test_old_idle_connections_are_not_trusted(loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, engine, client):
            for _ in range(2):
                client.post(CHAT)
                await client.response()
            assert (len(engine.seen), engine.n_connections) == (2, 2)

    monkeypatch.setattr(upstream, "IDLE_S", -1.0)
    run(loop_factory, test())


def test_bug_in_a_handler_does_not_leave_the_client_waiting(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, _, client):
            client.post(CHAT)
            status, error = await client.error()
            assert (status, error["code"]) == (500, "internal_error")
            assert (await rig.view())["in_flight_total"] == 0

    monkeypatch.setattr(forward, "write_request_head", None)
    run(loop_factory, test())
