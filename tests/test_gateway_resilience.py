"""The gateway on loopback sockets: deadlines, holding, stored responses, engines that forget, killed replicas."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest
from gateway_rig import (
    CHAT,
    EVENTS,
    SSE_HEAD,
    Client,
    Gate,
    LoopFactory,
    Rig,
    Seen,
    chunk,
    echo,
    factories,
    hang_up,
    rig_with,
    run,
    say,
)

from penstock.gateway import context, forwarding
from penstock.gateway.responses import Answer, error_answer
from penstock.wire.http1 import END, Headers, ResponseHead

pytestmark = factories

STREAM = b'{"model": "demo", "stream": true}'
DONE = b"data: [DONE]\n\n"


def error_of(event: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(event.removeprefix(b"data: ").partition(b"\n\n")[0])["error"]
    return error


# Headers of every answer.


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/models", 200), ("DELETE", "/v1/completions", 405)],
)
def test_every_answer_says_who_and_how_long(loop_factory: LoopFactory, method: str, path: str, status: int) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await rig.client()
            client.get(path, "X-Request-Id: mine\r\n", method)
            head, _, _ = await client.response()
            assert (head.status, head.get(b"x-request-id"), head.get(b"x-penstock-replica")) == (
                status,
                b"mine",
                b"none",
            )
            assert (head.get(b"server-timing") or b"").startswith(b"gateway;dur=")

    run(loop_factory, test())


# Deadlines.


def test_deadline_before_the_first_byte_gives_504_and_frees_the_engine(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(b"", b"")
        async with rig_with(gate.reply) as (rig, _, client):
            client.post(CHAT, headers="X-Request-Timeout: 150ms\r\n")
            status, error = await client.error()
            assert (status, error["code"]) == (504, "deadline_exceeded")
            await gate.peer_left.wait()
            assert (await rig.view())["in_flight_total"] == 0
            assert 'penstock_requests_total{model="demo",outcome="late"} 1\n' in await (await rig.client()).metrics()

    run(loop_factory, test())


def test_deadline_in_a_stream_gives_an_error_event(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD + chunk(EVENTS[0]), b"")
        async with rig_with(gate.reply) as (_, _, client):
            client.post(STREAM, headers="X-Request-Timeout: 0.05\r\n")
            _, body, is_whole = await client.response()
            assert (is_whole, body.startswith(EVENTS[0]), body.endswith(DONE)) == (True, True, True)
            assert error_of(body[len(EVENTS[0]) :])["code"] == "deadline_exceeded"
            await gate.peer_left.wait()

    run(loop_factory, test())


def test_deadline_while_held_gives_504(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await rig.client()
            client.post(CHAT, headers="X-Request-Timeout: 5ms\r\n")
            assert (await client.error())[0] == 504
            assert (await rig.view())["waiting"] == 0
            client.post(CHAT, headers="X-Request-Timeout: soon\r\n")
            assert (await client.error())[0] == 400

    run(loop_factory, test())


def test_met_deadline_leaves_nothing(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (_, _, client):
            client.post(CHAT, headers="X-Request-Timeout: 10ms\r\n")
            assert (await client.response())[1] == CHAT
            await asyncio.sleep(0.02)
            client.post(CHAT)
            assert (await client.response())[1] == CHAT

    run(loop_factory, test())


# Holding a stream.


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "QUIET_S", 0.005)
    monkeypatch.setattr(forwarding, "COMMENT_EVERY_S", 0.005)


async def held(rig: Rig) -> Client:
    await rig.announce("0", None, "loading", progress={"stage": "weights", "fraction": 0.45, "eta_s": 12})
    client = await rig.client()
    client.post(STREAM)
    head = await client.event()
    assert (head.status, head.get(b"content-type")) == (200, b"text/event-stream")
    assert head.get(b"x-penstock-replica") == b"none"
    assert await client.event() == b": penstock loading 45% 12s\n\n"
    return client


async def rest(client: Client) -> bytes:
    body = b""
    while (event := await client.event()) is not END:
        assert event is not None
        body += event
    return body.replace(b": penstock loading 45% 12s\n\n", b"")


def test_held_stream_hears_of_progress_and_then_its_engine(loop_factory: LoopFactory, talkative: None) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await held(rig)
            engine = await rig.engine(say(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"))
            assert await rest(client) == b"".join(EVENTS)
            assert len(engine.seen) == 1
            client.get("/health")
            assert (await client.response())[0].status == 200

    run(loop_factory, test())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            b'HTTP/1.1 400 No\r\nContent-Length: 29\r\n\r\n{"error": {\n "code": "bad" }}',
            b'data: {"error":{"code":"bad"}}\n\n',
        ),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nnope", b'"the engine answered 404 without JSON"'),
    ],
)
def test_refusal_after_a_held_stream_began_is_an_event(
    loop_factory: LoopFactory, talkative: None, reply: bytes, expected: bytes
) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await held(rig)
            await rig.engine(say(reply))
            body = await rest(client)
            assert expected in body
            assert body.endswith(DONE)

    run(loop_factory, test())


@pytest.mark.parametrize("reply", [SSE_HEAD + chunk(EVENTS[0]), SSE_HEAD, b""])
def test_engine_death_after_a_held_stream_began_is_an_event(
    loop_factory: LoopFactory, talkative: None, reply: bytes
) -> None:
    async def test() -> None:
        async with Rig() as rig:
            client = await held(rig)
            await rig.engine(say(reply, then_close=True))
            body = await rest(client)
            assert body.endswith(DONE)
            assert (
                error_of(b"data: " + body.rpartition(b'data: {"error"')[2].join((b'{"error"', b"")))["source"]
                == "gateway"
            )

    run(loop_factory, test())


def test_held_stream_without_a_replica_ends_with_an_event(loop_factory: LoopFactory, talkative: None) -> None:
    async def test() -> None:
        async with Rig(hold_s=0.05) as rig:
            body = await rest(await held(rig))
            assert error_of(body)["code"] == "no_replica"
            assert body.endswith(DONE)

    run(loop_factory, test())


# The queue.


def test_requests_beyond_the_replicas_limit_wait_in_the_gateway(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(b"", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        async with rig_with(gate.reply, max_in_flight=1) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            bodies = [b'{"model":"demo","priority":%d}' % priority for priority in (1, 0, -1)]
            waiting = [await rig.client() for _ in bodies]
            for n, (other, body) in enumerate(zip(waiting, bodies, strict=True), 1):
                other.post(body)
                while (await rig.view())["waiting"] != n:
                    await asyncio.sleep(0.001)
            engine.reply = echo
            gate.opened.set()
            for other, body in zip(waiting, bodies, strict=True):
                assert (await other.response())[1] == body
            assert [seen.body for seen in engine.seen[1:]] == bodies[::-1]

    run(loop_factory, test())


def test_full_queue_gives_429(loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.routing.queue.MAX_WAITING", 0)

    async def test() -> None:
        async with Rig() as rig:
            client = await rig.client()
            client.post(CHAT)
            head, body, _ = await client.response()
            assert (head.status, json.loads(body)["error"]["code"]) == (429, "queue_full")
            assert head.get(b"retry-after") is not None

    run(loop_factory, test())


# Stored responses.


@pytest.mark.parametrize("is_stream", [False, True])
def test_stored_response_is_asked_of_the_replica_that_has_it(loop_factory: LoopFactory, is_stream: bool) -> None:
    async def test() -> None:
        async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            if seen.head.method != b"POST":
                return await echo(seen, reader, writer)
            body = b'{"id": "resp_%d", "object": "response"}' % len(engines[0].seen + engines[1].seen)
            if is_stream:
                body = b'event: response.created\ndata: {"response":' + body + b"}\n\n"
                writer.write(SSE_HEAD + chunk(body) + chunk(EVENTS[2]) + b"0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return True

        async with Rig() as rig:
            engines = [await rig.engine(reply, name) for name in "ab"]
            client = await rig.client()
            homes = []
            for _ in range(4):
                client.post(b'{"model":"demo","input":"x"}', "/v1/responses")
                homes.append((await client.response())[0].get(b"x-penstock-replica"))
            assert set(homes) == {b"a", b"b"}
            for n, home in enumerate(homes, 1):
                for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                    if method == "POST":
                        client.post(b"{}", f"/v1/responses/resp_{n}{path}")
                    else:
                        client.get(f"/v1/responses/resp_{n}{path}", method=method)
                    assert (await client.response())[0].get(b"x-penstock-replica") == home
                client.post(b'{"model":"demo","previous_response_id":"resp_%d"}' % n, "/v1/responses")
                assert (await client.response())[0].get(b"x-penstock-replica") == home

    run(loop_factory, test())


def test_client_can_name_its_replica(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(echo, name) for name in "ab"]
            client = await rig.client()
            for _ in range(4):
                client.get("/v1/responses/resp_1?model=demo", "X-Penstock-Replica: b\r\n")
                assert (await client.response())[0].get(b"x-penstock-replica") == b"b"
            assert [len(engine.seen) for engine in engines] == [0, 4]

    run(loop_factory, test())


def test_form_upload_is_routed_by_its_model_part(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--b--\r\n'
        headers = "Content-Type: multipart/form-data; boundary=b\r\n"
        async with rig_with(echo) as (_, _, client):
            client.post(form % b"alias", "/v1/audio/transcriptions", headers)
            assert (await client.response())[1] == form % b"alias"
            client.post(form % b"nope", "/v1/audio/transcriptions", headers)
            assert (await client.error())[0] == 404

    run(loop_factory, test())


# Engines that misbehave.


def test_request_that_its_engine_forgot_is_sent_elsewhere(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "STALL_S", 0.01)

    async def test() -> None:
        gate = Gate(b"", b"")
        async with rig_with(gate.reply) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            look_after = context.GatewayContext.look_after
            look_after(rig.gateway._context, time.monotonic() + 1)
            assert not gate.peer_left.is_set()
            await rig.announce("0", engine.url, load={"running": 0})
            good = await rig.engine(echo, "1")
            look_after(rig.gateway._context, time.monotonic() + 1)
            await gate.peer_left.wait()
            assert (await client.response())[1] == CHAT
            assert len(good.seen) == 1

    run(loop_factory, test())


def test_half_closed_engine_in_a_stream_becomes_an_error_event(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def half_close(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            writer.write(SSE_HEAD + chunk(EVENTS[0]))
            writer.write_eof()
            await reader.read()
            return False

        async with rig_with(half_close) as (_, _, client):
            client.post(STREAM)
            _, body, is_whole = await client.response()
            assert is_whole
            assert error_of(body[len(EVENTS[0]) :])["source"] == "gateway"

    run(loop_factory, test())


@pytest.mark.parametrize("garbage", [b"zz\r\n", b"5\r\nabcdefgh", b"-1\r\n", b"\x00\xff" * 400, b"fffffffff\r\n"])
def test_garbage_in_a_stream_becomes_an_error_event(loop_factory: LoopFactory, garbage: bytes) -> None:
    async def test() -> None:
        async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            writer.write(SSE_HEAD)
            for event in EVENTS[:2]:
                await asyncio.sleep(0.001)
                writer.write(chunk(event))
            await asyncio.sleep(0.001)
            writer.write(garbage)
            return True

        async with rig_with(reply) as (_, _, client):
            client.post(STREAM)
            _, body, is_whole = await client.response()
            assert is_whole
            assert body.startswith(EVENTS[0] + EVENTS[1])
            assert b"the engine broke HTTP" in body
            assert body.endswith(DONE)

    run(loop_factory, test())


def test_slow_reader_pauses_its_engine(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        n_sent = 0

        async def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            nonlocal n_sent
            writer.write(SSE_HEAD)
            piece = chunk(b"data: " + b"x" * 2000 + b"\n\n")
            while not writer.is_closing():
                writer.write(piece * 8)
                await writer.drain()
                n_sent += 8 * len(piece)
            return False

        async with rig_with(flood) as (rig, _, client):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post(STREAM)
            before = -1
            while n_sent != before:
                before = n_sent
                await asyncio.sleep(0.03)
            connection = next(iter(rig.gateway.public._connections))
            assert connection._transport.get_write_buffer_size() < 2 * 2**20
            client.writer.transport.abort()
            await rig.until(lambda view: view["in_flight_total"] == 0)

    run(loop_factory, test())


def test_clients_that_leave_at_any_moment_leave_nothing(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def slow(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            writer.write(SSE_HEAD)
            for _ in range(5):
                await asyncio.sleep(0.001)
                writer.write(chunk(EVENTS[0]))
            writer.write(chunk(EVENTS[2]) + b"0\r\n\r\n")
            return True

        async def come_and_go(rig: Rig, chance: random.Random) -> None:
            for _ in range(4):
                client = await rig.client()
                client.post(STREAM)
                await asyncio.sleep(chance.random() * 0.008)
                client.writer.transport.abort()

        async with rig_with(slow) as (rig, engine, _):
            await rig.announce("1", engine.url)
            await asyncio.gather(*(come_and_go(rig, random.Random(seed)) for seed in range(10)))
            context = rig.gateway._context
            while sum(context.counters.outcomes.values()) < 40:
                await asyncio.sleep(0.001)
            assert (context.under_way, context.queue.waiting, context.replicas.in_flight_total) == (set(), 0, 0)

    run(loop_factory, test())


def test_retries_end_with_their_budget(loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with Rig() as rig:
            for name in "ab":
                await rig.engine(hang_up, name)
            monkeypatch.setattr(rig.gateway._context.budget, "has_one", lambda now: False)
            client = await rig.client()
            client.post(CHAT)
            status, error = await client.error()
            assert (status, "budget" in error["message"]) == (502, True)

    run(loop_factory, test())


def test_killed_replicas_fail_no_request_and_leave_no_stream_without_an_end(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def answer(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            await asyncio.sleep(0.004)
            if b"stream" not in seen.body:
                return await echo(seen, reader, writer)
            writer.write(SSE_HEAD)
            for event in (*EVENTS[:2], *EVENTS[:2], EVENTS[2]):
                await asyncio.sleep(0.002)
                writer.write(chunk(event))
            writer.write(b"0\r\n\r\n")
            return True

        async def ask(rig: Rig, body: bytes) -> None:
            client = await rig.client()
            while not is_over.is_set():
                client.post(body)
                head, got, is_whole = await client.response()
                assert (head.status, is_whole) == (200, True)
                assert got.endswith(DONE) if body == STREAM else got == body

        is_over = asyncio.Event()
        async with Rig() as rig:
            engines = [await rig.engine(answer, name) for name in "abc"]
            asking = asyncio.gather(*(ask(rig, body) for body in (CHAT, STREAM) * 4))
            for n in range(6):
                await asyncio.sleep(0.02)
                victim = engines[n % 3]
                await victim.stop()
                for writer in victim.writers:
                    writer.transport.abort()
                await asyncio.sleep(0.005)
                await victim.start()
                await rig.announce("abc"[n % 3], victim.url)
            is_over.set()
            await asking

    run(loop_factory, test())


# The books' hooks.


class Entry:
    """Takes usage events out, as the books do: whole chunks pass unless they hold one."""

    body = b'{"stream_options": {}}'
    strips_usage = True

    def __init__(self, refusal: Answer | None = None) -> None:
        self.refusal = refusal
        self.ended: list[tuple[str, str]] = []
        self.n_raw = 0

    def start(self) -> Answer | None:
        return self.refusal

    def headers(self) -> Headers:
        return ((b"x-ratelimit-limit-requests", b"7"),)

    def begin(self, head: ResponseHead) -> None:
        assert head.status == 200

    def feed(self, data: bytes, is_end: bool) -> bytes:
        return data.replace(b'data: {"usage"}\n\n', b"")

    def feed_chunks(self, data: bytes, is_end: bool) -> bool:
        self.n_raw += 1
        return b"usage" not in data

    def add_token_chunks(self, n_chunks: int) -> None:
        self.n_raw += n_chunks

    def end(self, outcome: str, replica: str) -> None:
        self.ended.append((outcome, replica))


def keep_books(monkeypatch: pytest.MonkeyPatch, entry: Entry) -> None:
    start = forwarding.Forwarding.start
    monkeypatch.setattr(forwarding.Forwarding, "start", lambda self, hints, _: start(self, hints, entry))


def test_books_see_every_chunk_and_may_change_it(loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            assert (seen.body, seen.head.get(b"accept-encoding")) == (Entry.body, None)
            pieces = (SSE_HEAD, *map(chunk, (EVENTS[0], b'data: {"usage"}\n\n', EVENTS[2] + b'data: {"usage"}\n\n')))
            for piece in (*pieces, chunk(EVENTS[1]) + b"0\r\n\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.002)
            return True

        entry = Entry()
        keep_books(monkeypatch, entry)
        async with rig_with(reply) as (_, _, client):
            client.post(STREAM, headers="Accept-Encoding: gzip\r\n")
            head, body, is_whole = await client.response()
            assert (body, is_whole) == (EVENTS[0] + EVENTS[2] + EVENTS[1], True)
            assert head.get(b"x-ratelimit-limit-requests") == b"7"
            assert (entry.ended, entry.n_raw > 0) == ([("complete", "0")], True)

    run(loop_factory, test())


def test_books_may_refuse(loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        entry = Entry(error_answer(429, "too fast", "rate_limited"))
        keep_books(monkeypatch, entry)
        async with rig_with(echo) as (rig, engine, client):
            client.post(CHAT)
            assert (await client.error())[0] == 429
            assert (entry.ended, engine.seen) == ([("refused", "")], [])
            assert 'outcome="refused"} 1\n' in await (await rig.client()).metrics()

    run(loop_factory, test())
