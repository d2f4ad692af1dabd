"""Requests that wait for a replica, and which replica gets them."""

from __future__ import annotations

import asyncio

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Client, Gate, Rig, Seen, chunk, echo, error_of, rig_with, say
from virtual_loop import advance, loop

from penstock.gateway.routing.replicas import SILENT_S
from penstock.gateway.routing.static_upstreams import PROBE_TIMEOUT_S
from penstock.gateway.waiting_streams import KEEP_ALIVE
from penstock.wire.http1 import END
from penstock.wire.waiting import Waiting, write_comment


async def test_request_is_held_until_a_replica_is_announced_and_comes_back() -> None:
    async with Rig() as rig:
        client = (await rig.client()).post(CHAT)
        await rig.until(lambda view: view["waiting"] == 1)
        await rig.announce("0", None, "loading")
        assert (await rig.view())["waiting"] == 1
        engine = await rig.engine(echo)
        assert (await client.response())[1] == CHAT
        assert (len(engine.seen), (await rig.view())["waiting"]) == (1, 0)
        await engine.stop()
        engine.writers[0].transport.abort()
        client.post(CHAT)
        await rig.until(lambda view: view["waiting"] == 1)
        await engine.start()
        await rig.announce("0", engine.url)
        assert (await client.response())[1] == CHAT


async def test_request_survives_the_end_of_its_replicas_lease() -> None:
    gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (rig, engine, client):
        client.post(CHAT)
        await gate.reached.wait()
        await rig.announce("0", engine.url, "stalled", lease_s=0.001)
        await rig.until(lambda view: not view["replicas"][0]["is_alive"])
        gate.opened.set()
        assert (await client.response())[1:] == (EVENTS[2], True)


async def test_a_node_hears_whether_its_engine_still_answers() -> None:
    gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (rig, engine, client):
        await advance(1.0)
        client.post(STREAM)
        assert [(await client.event()).status, await client.event()] == [200, EVENTS[0]]
        for answer in ({"draining": False, "heard": True}, {"draining": False}):
            await advance(2.0)
            assert await rig.announce("0", engine.url, "busy") == (200, answer)
        gate.opened.set()


async def test_stream_of_a_silent_machine_ends_with_its_name() -> None:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if seen.head.path == b"/health":
            return answers and await echo(seen, reader, writer)
        writer.write(SSE_HEAD + chunk(EVENTS[0]))
        return True

    def silent_since() -> float | None:
        replica = rig.gateway._context.replicas.find("0")
        assert replica is not None
        return replica.silent_since

    answers, second_s = True, 1 + PROBE_TIMEOUT_S
    async with rig_with(reply) as (rig, engine, client):
        client.post(STREAM)
        await client.event()
        assert await client.event() == EVENTS[0]
        machine = loop().listening[engine.port]
        await rig.announce("0", engine.url, lease_s=0.001, host="gpu7")
        assert silent_since() is None
        machine.is_off = True
        await advance(second_s)
        assert silent_since() is not None
        machine.is_off = False
        await advance(second_s)
        assert silent_since() is None
        answers = False
        await advance(second_s)
        assert silent_since() is None, "a busy engine is not silent"
        machine.is_off = True
        off_at = loop().time()
        body = await rest(client)
        assert SILENT_S <= loop().time() - off_at <= SILENT_S + second_s
        assert error_of(body.replace(KEEP_ALIVE, b""))["message"].startswith("machine gpu7 of replica 0 does not")


async def test_drained_replica_finishes_and_gets_nothing_new() -> None:
    gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (rig, engine, client):
        client.post(CHAT)
        await gate.reached.wait()
        assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 1})
        assert await rig.announce("0", engine.url) == (200, {"draining": True})
        other = (await rig.client()).post(CHAT)
        await rig.until(lambda view: view["waiting"] == 1)
        gate.opened.set()
        assert (await client.response())[1:] == (EVENTS[2], True)
        assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 0})
        assert len(engine.seen) == 1
        await rig.admin("/admin/undrain", {"replica": "0"})
        assert (await other.response())[1:] == (EVENTS[2], True)
        await rig.admin("/admin/forget", {"replica": "0"})
        assert (await rig.view())["replicas"] == []


async def held(rig: Rig) -> Client:
    await rig.announce("0", None, "loading", progress={"stage": "weights", "fraction": 0.45})
    client = (await rig.client()).post(STREAM)
    head = await client.event()
    assert (head.status, head.get(b"content-type")) == (200, b"text/event-stream")
    assert head.get(b"x-penstock-replica") == b"none"
    assert await client.event() == b": penstock loading 45%\n\n"
    return client


async def rest(client: Client) -> bytes:
    body = b""
    while (event := await client.event()) is not END:
        assert event is not None
        body += event
    return body.replace(b": penstock loading 45%\n\n", b"")


async def test_held_stream_hears_of_progress_and_then_its_engine_or_its_end() -> None:
    async with Rig() as rig:
        client = await held(rig)
        engine = await rig.engine(say(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"))
        assert await rest(client) == b"".join(EVENTS)
        assert len(engine.seen) == 1
        head, body, _ = await client.post(STREAM, headers="x-penstock-progress: 1\r\n").response()
        assert (head.get(b"x-penstock-replica"), body) == (b"0", b"".join(EVENTS)), "one that does not wait hears none"
    async with Rig() as rig:
        body = await rest(await held(rig))
        assert (error_of(body)["code"], body.endswith(EVENTS[2])) == ("no_replica", True)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b'HTTP/1.1 400 No\r\nContent-Length: 29\r\n\r\n{"error": {\n "code": "bad" }}', b'{"error":{"code":"bad"}}'),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nnope", b'"the engine answered 404 without JSON"'),
        *((start, b'"source":"gateway"') for start in (SSE_HEAD + chunk(EVENTS[0]), SSE_HEAD, b"")),
    ],
)
async def test_refusal_or_death_after_a_held_stream_began_is_an_event(reply: bytes, expected: bytes) -> None:
    async with Rig() as rig:
        client = await held(rig)
        await rig.engine(say(reply, then_close=True))
        body = await rest(client)
        assert expected in body
        assert body.endswith(EVENTS[2])


async def test_a_client_that_asks_for_it_hears_its_progress_its_place_and_its_replica() -> None:
    async with Rig() as rig:
        progress = {"stage": "weights", "shards_done": 17, "shards_total": 30, "fraction": 0.45}
        await rig.announce("0", None, "loading", progress=progress)
        client, first = await rig.client(), await rig.client()
        first.post(STREAM)
        await rig.until(lambda view: view["waiting"] == 1)
        client.post(STREAM, headers="x-penstock-progress: 1\r\n")
        assert (await client.event()).get(b"x-penstock-replica") == b"none"
        loading = Waiting("loading", 1, 17, 30, 0.45)
        assert [await client.event() for _ in range(2)] == [write_comment(loading)] * 2
        engine = await rig.engine(say(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"))
        body = (await rest(client)).replace(write_comment(loading), b"")
        assert body == b': penstock {"stage":"prompt","replica":"0"}\n\n' + b"".join(EVENTS)
        assert not any(seen.head.get(b"x-penstock-progress") for seen in engine.seen)


async def test_requests_beyond_the_replicas_limit_wait_in_the_gateway() -> None:
    gate = Gate(b"", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    async with rig_with(gate.reply, max_in_flight=1) as (rig, engine, client):
        client.post(CHAT)
        await gate.reached.wait()
        bodies = [b'{"model":"demo","priority":%d}' % priority for priority in (1, 0, -1)]
        waiting = []
        for body in bodies:
            waiting.append((await rig.client()).post(body))
            await rig.until(lambda view: view["waiting"] == len(waiting))
        engine.reply = echo
        gate.opened.set()
        assert [(await other.response())[1] for other in waiting] == bodies
        assert [seen.body for seen in engine.seen[1:]] == bodies[::-1]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_stored_response_is_asked_of_the_replica_that_has_it_or_of_the_one_that_is_named(is_stream: bool) -> None:
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

    async def served_by(asked: Client) -> bytes | None:
        return (await asked.response())[0].get(b"x-penstock-replica")

    async with Rig() as rig:
        engines = [await rig.engine(reply, name) for name in "ab"]
        client = await rig.client()
        asked = b'{"model":"demo","input":"x"}'
        homes = [await served_by(client.post(asked, "/v1/responses")) for _ in range(4)]
        assert set(homes) == {b"a", b"b"}
        for n, home in enumerate(homes, 1):
            path = f"/v1/responses/resp_{n}"
            assert await served_by(client.get(path)) == await served_by(client.get(path, method="DELETE")) == home
            assert await served_by(client.post(b"{}", f"{path}/cancel")) == home
            asked = b'{"model":"demo","previous_response_id":"resp_%d"}' % n
            assert await served_by(client.post(asked, "/v1/responses")) == home
            named = client.get("/v1/responses/resp_0?model=demo", "X-Penstock-Replica: b\r\n")
            assert await served_by(named) == b"b"
