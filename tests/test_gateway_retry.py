"""Engines that fail: what is sent once more, what becomes an error event, and what is the client's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Gate, Rig, Seen, chunk, echo, error_of, hang_up, rig_with, say
from virtual_loop import advance, loop

from penstock.gateway import retries
from penstock.gateway.retries import Loss
from penstock.gateway.routing import replicas
from penstock.wire.http1 import RequestHead

FAILURE = b'{"error": {"message": "EngineCore encountered an issue"}}'


async def test_dead_replica_costs_one_retry_elsewhere_and_a_deadly_request_is_sent_twice_at_most() -> None:
    async with Rig() as rig:
        bad, good = await rig.engine(hang_up, "bad"), await rig.engine(echo, "good")
        client = await rig.client()
        for _ in range(4):
            head, body, _ = await client.post(CHAT).response()
            assert (head.status, body, head.get(b"x-penstock-replica")) == (200, CHAT, b"good")
        assert (len(good.seen), 0 < len(bad.seen) <= 4) == (4, True)
    async with rig_with(hang_up) as (rig, engine, client):  # a request that kills engines
        status, error = await client.post(CHAT).error()
        assert (status, error["code"], error["type"]) == (502, "upstream_failed", "server_error")
        assert len(engine.seen) == 2
        assert 'penstock_requests_total{model="demo",outcome="broken"} 1\n' in await client.metrics()
        assert (await rig.view())["in_flight_total"] == 0
        for data in (b"SSH-2.0-OpenSSH\r\n\r\n", SSE_HEAD + b"no chunk\r\n"):  # which is not HTTP
            await rig.engine(say(data))
            assert (await client.post(CHAT).error())[0] == 502


async def test_lost_keep_alive_connection_costs_a_fresh_one() -> None:
    async def once_per_connection(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        # Closes on the second request of a connection without a word, as an engine's idle timer does.
        ports.append(writer.get_extra_info("peername")[1])
        return ports.count(ports[-1]) == 1 and await echo(seen, reader, writer)

    ports: list[int] = []
    async with rig_with(once_per_connection) as (_, engine, client):
        for _ in range(2):
            assert (await client.post(CHAT).response())[1] == CHAT
        assert (len(engine.seen), engine.n_connections) == (3, 2)


async def test_replica_that_refuses_connections_is_passed_over_until_it_announces() -> None:
    async with Rig() as rig:
        engines = [await rig.engine(echo, name) for name in ("a", "b")]
        await engines[0].stop()
        client = await rig.client()

        async def replicas(n_requests: int) -> set[bytes | None]:
            found = set()
            for _ in range(n_requests):
                found.add((await client.post(CHAT).response())[0].get(b"x-penstock-replica"))
            return found

        assert await replicas(4) == {b"b"}
        await engines[0].start()
        assert await replicas(4) == {b"b"}
        await rig.announce("a", engines[0].url)
        assert await replicas(4) == {b"a", b"b"}


async def test_request_lost_by_a_dying_replica_is_not_lost_to_it_again() -> None:
    """A killed engine still accepts for a moment after its connections broke: the second send waits for that to end."""

    async def die(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        asyncio.get_running_loop().call_later(retries.AGAIN_S / 4, engine.server.close)  # type: ignore[union-attr]
        return False

    async with rig_with(die) as (rig, engine, client):
        client.post(CHAT)
        await rig.until(lambda view: view["waiting"] == 1)
        assert len(engine.seen) == 1
        revived = await rig.engine(echo, "0")
        assert (await client.response())[1] == CHAT
        assert len(revived.seen) == 1


def failing(status: int = 500, body: bytes = FAILURE) -> Callable[..., Awaitable[bool]]:
    return say(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nRetry-After: 7\r\n\r\n%s" % (status, len(body), body))


@pytest.mark.parametrize("status", sorted(retries.FAILED_STATUSES))
async def test_failed_answer_is_retried_elsewhere_and_ends_traffic_until_the_next_announcement(status: int) -> None:
    async with Rig() as rig:
        bad, good = await rig.engine(failing(status), "bad"), await rig.engine(echo, "good")
        client = await rig.client()

        async def ask(n_requests: int) -> None:
            for _ in range(n_requests):
                head, body, _ = await client.post(CHAT).response()
                assert (head.status, body, head.get(b"x-penstock-replica")) == (200, CHAT, b"good")

        await ask(6)
        assert (len(bad.seen), len(good.seen)) == (1, 6)
        await rig.announce("bad", bad.url)
        await ask(6)
        assert (len(bad.seen), len(good.seen), bad.n_connections) == (2, 12, 2)
        metrics = await client.metrics()
        assert 'penstock_retries_total{model="demo"} 2\n' in metrics
        assert 'penstock_responses_total{model="demo",replica="good",code="200"} 12\n' in metrics
        assert f'code="{status}"' not in metrics
        assert (await rig.view())["in_flight_total"] == 0


async def test_last_failed_answer_is_the_clients() -> None:
    """A request that no engine can do gets the engine's words, and costs no replica its traffic."""
    for names in ("a", "ab"):
        async with Rig() as rig:
            engines = [await rig.engine(failing(), name) for name in names]
            client = await rig.client()
            head, body, is_whole = await client.post(CHAT).response()
            assert (head.status, body, head.get(b"retry-after"), is_whole) == (500, FAILURE, b"7", True)
            assert sum(len(engine.seen) for engine in engines) == 2
            assert 'penstock_retries_total{model="demo"} 1\n' in await client.metrics()
            for engine in engines:
                engine.reply = echo
            replicas = {(await client.post(CHAT).response())[0].get(b"x-penstock-replica") for _ in names}
            assert replicas == {name.encode() for name in names}


async def test_one_clients_bad_requests_degrade_no_other() -> None:
    async def judge(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return await (failing() if b"bad" in seen.body else echo)(seen, reader, writer)

    async with Rig(hold_s=0.0) as rig:
        for name in "abc":
            await rig.engine(judge, name)
        client, other = await rig.client(), await rig.client()
        for _ in range(30):
            assert (await client.post(b'{"model":"demo","bad":1}').response())[0].status == 500
            assert (await other.post(CHAT).response())[0].status == 200
        text = await client.metrics()
        assert "penstock_ejections_total{replica=" not in text
        # Retries of failed answers have their own budget: what a replica loses is still sent again.
        assert rig.gateway._context.retries.may_retry((), Loss.LOST, loop().time())


@pytest.mark.parametrize(
    "message",
    [b"image input is not supported - hint: mmproj", b"Failed to parse tools: no array"]
    + [b"Unknown reasoning format: zzz", b"'messages' is required"],
)
@pytest.mark.parametrize("cut", [0, 20, 1000])
async def test_input_errors_of_llamacpp_are_the_requests_fault(message: bytes, cut: int) -> None:
    body = b'{"error":{"code":500,"message":"%s","type":"server_error"}}' % message

    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body[:cut]))
        await advance(0.001)
        writer.write(body[cut:])
        return True

    async with rig_with(reply) as (_, engine, client):
        head, answer, is_whole = await client.post(CHAT).response()
        assert (head.status, is_whole, len(engine.seen)) == (400, True, 1)
        assert answer == b'{"error":{"code":400,"message":"%s","type":"invalid_request_error"}}' % message


@pytest.mark.parametrize(
    ("first", "second", "status", "answer"),
    [
        (say(b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\nsome", then_close=True), echo, 200, CHAT),
        (hang_up, failing(), 500, FAILURE),
    ],
    ids=["a failed answer that breaks off", "a failed answer after a lost send"],
)
async def test_second_answer_is_the_clients(first: Any, second: Any, status: int, answer: bytes) -> None:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return bool(await (first if len(engine.seen) == 1 else second)(seen, reader, writer))

    async with rig_with(reply) as (_, engine, client):
        head, body, is_whole = await client.post(CHAT).response()
        assert (head.status, body, is_whole, len(engine.seen)) == (status, answer, True, 2)


async def test_refusal_of_an_engine_is_never_retried() -> None:
    async with Rig() as rig:
        engines = [await rig.engine(echo, name) for name in ("a", "b")]
        client = await rig.client()
        for status in (400, 404, 429, 499, 501):
            for engine in engines:
                engine.reply, engine.seen = failing(status), []
            for _ in range(4):
                head, body, _ = await client.post(CHAT).response()
                assert (head.status, body) == (status, FAILURE)
            assert [len(engine.seen) for engine in engines] == [2, 2]
        assert 'penstock_retries_total{model="demo"} 0\n' in await client.metrics()


async def test_long_failed_answer_is_not_read_to_its_end() -> None:
    gate = Gate(b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\nsome", b"")
    async with Rig() as rig:
        bad = await rig.engine(gate.reply, "bad")
        client = (await rig.client()).post(CHAT)
        await gate.peer_left.wait()
        await rig.engine(echo, "good")
        assert (await client.response())[1] == CHAT
        assert len(bad.seen) == 1


async def test_client_that_leaves_after_a_failed_answer_is_not_sent_again() -> None:
    async with rig_with(failing()) as (rig, engine, client):
        client.post(CHAT)
        while not engine.seen:
            await advance(0.001)
        client.writer.close()
        other = await rig.client()
        while 'outcome="client_gone"} 1\n' not in await other.metrics():
            await advance(0.001)
        engine.reply = echo
        await rig.announce("0", engine.url)
        assert (await other.post(CHAT).response())[1] == CHAT
        assert len(engine.seen) == 2
        assert (await rig.view())["in_flight_total"] == 0


async def test_a_client_that_hangs_up_at_the_last_event_has_its_whole_answer() -> None:
    gate = Gate(SSE_HEAD + b"".join(map(chunk, EVENTS)), b"")
    async with Rig() as rig:
        await rig.engine(gate.reply, "0")
        client = (await rig.client()).post(STREAM)
        while EVENTS[2] not in await client.reader.read(65536):
            pass
        client.writer.close()
        other = await rig.client()
        while 'outcome="complete"} 1\n' not in await other.metrics():
            await advance(0.001)
        assert (await rig.view())["in_flight_total"] == 0


async def test_time_with_a_failed_replica_is_not_the_gateways_own() -> None:
    async with rig_with(failing()) as (rig, engine, client):
        began_at = loop().time()
        client.post(CHAT)
        while not engine.seen:
            await advance(0.001)
        revived = await rig.engine(echo, "0")
        head, body, _ = await client.response()
        assert (body, len(revived.seen)) == (CHAT, 1)
        assert loop().time() - began_at == pytest.approx(retries.FAILED_AGAIN_S)
        assert head.get(b"server-timing") == b"gateway;dur=0.000"


@pytest.mark.parametrize(
    ("sent", "gap"), [(EVENTS[0], b""), (b'data: {"n"', b"\n\n"), (b"", b""), (b": ping\r\n\r\n", b"")]
)
@pytest.mark.parametrize("n_bytes", [None, 1])
async def test_engine_death_in_a_stream_becomes_an_error_event(sent: bytes, gap: bytes, n_bytes: int | None) -> None:
    loop().bytes_at_once = n_bytes
    data = SSE_HEAD + (chunk(sent) if sent else b"")
    async with rig_with(say(data, then_close=True)) as (_, engine, client):
        _, body, is_whole = await client.post(CHAT).response()
        assert is_whole
        assert (body.startswith(sent + gap), body.endswith(b"}\n\n" + EVENTS[2])) == (True, True)
        error = error_of(body[len(sent + gap) :])
        assert (error["source"], error["message"]) == ("gateway", "the engine closed the connection")
        assert len(engine.seen) == 1
        assert (await client.get("/health").response())[0].status == 200


async def test_engine_death_after_done_is_no_error_and_in_another_body_closes_the_connection() -> None:
    async with rig_with(say(SSE_HEAD + chunk(EVENTS[2]), then_close=True)) as (rig, engine, client):
        assert (await client.post(CHAT).response())[1:] == (EVENTS[2], True)
        for head, body in ((b"Content-Length: 10", b"12345"), (b"Transfer-Encoding: chunked", b"5\r\n12345\r\n")):
            engine.reply = say(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head, body), then_close=True)
            assert (await (await rig.client()).post(CHAT).response())[1:] == (b"12345", False)
            assert (await rig.view())["in_flight_total"] == 0


async def test_bug_in_a_handler_does_not_leave_the_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestHead, "keep", None)
    async with rig_with(echo) as (rig, _, client):
        status, error = await client.post(CHAT).error()
        assert (status, error["code"]) == (500, "internal_error")
        assert (await rig.view())["in_flight_total"] == 0


async def test_request_that_its_engine_forgot_is_sent_elsewhere() -> None:
    gate = Gate(b"", b"")
    async with rig_with(gate.reply) as (rig, engine, client):
        client.post(CHAT)
        await gate.reached.wait()
        await advance(2 * replicas.STALL_S)
        assert not gate.peer_left.is_set()
        await rig.announce("0", engine.url, load={"running": 0})
        idle_at = loop().time()
        good = await rig.engine(echo, "1")
        assert (await client.response())[1] == CHAT
        assert replicas.STALL_S <= loop().time() - idle_at <= replicas.STALL_S + 1
        await gate.peer_left.wait()
        assert len(good.seen) == 1


@pytest.mark.parametrize("garbage", [None, b"zz\r\n", b"5\r\nabcdefgh", b"-1\r\n", b"\x00\xff" * 400, b"fffffffff\r\n"])
async def test_half_closed_engine_or_garbage_in_a_stream_becomes_an_error_event(garbage: bytes | None) -> None:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in (SSE_HEAD, *map(chunk, EVENTS[:2])):
            writer.write(piece)
            await advance(0.001)
        if garbage is None:
            writer.write_eof()
            await reader.read()
            return False
        writer.write(garbage)
        return True

    async with rig_with(reply) as (_, _, client):
        _, body, is_whole = await client.post(STREAM).response()
        assert is_whole
        sent = EVENTS[0] + EVENTS[1]
        assert (body.startswith(sent), body.endswith(EVENTS[2])) == (True, True)
        error = error_of(body[len(sent) :])
        assert error["source"] == "gateway"
        assert error["message"].startswith("the engine broke HTTP") is (garbage is not None)


async def test_retries_end_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRIES_START", 0.0)
    async with Rig() as rig:
        engines = [await rig.engine(hang_up, name) for name in "ab"]
        client = await rig.client()
        status, error = await client.post(CHAT).error()
        assert (status, "budget" in error["message"]) == (502, True)
        for engine in engines:
            engine.reply = failing()
        assert (await client.post(CHAT).response())[:2][1] == FAILURE
        assert sum(len(engine.seen) for engine in engines) == 2
