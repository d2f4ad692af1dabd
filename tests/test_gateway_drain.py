"""How requests end early: clients that leave, deadlines, and a gateway that stops."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings

import pytest
from gateway_rig import CHAT, DONE, EVENTS, SSE_HEAD, STREAM, Gate, Rig, Seen, chunk, echo, error_of, rig_with
from virtual_loop import advance

from penstock.wire.http1 import END


async def test_leaving_client_closes_the_engine_connection_or_waits_no_more() -> None:
    for before in (b"", SSE_HEAD + chunk(EVENTS[0])):
        gate = Gate(before, b"")
        async with rig_with(gate.reply) as (rig, _, client):
            client.post(CHAT)
            await gate.reached.wait()
            assert (await rig.view())["in_flight_total"] == 1
            client.writer.close()
            await gate.peer_left.wait()
            await rig.until(lambda view: view["in_flight_total"] == 0)
    async with Rig() as rig:  # one that waits
        clients = [(await rig.client()).post(CHAT) for _ in range(3)]
        await rig.until(lambda view: view["waiting"] == 3)
        clients[0].writer.close()
        clients[1].writer.transport.abort()
        await rig.until(lambda view: view["waiting"] == 1)
        engine = await rig.engine(echo)
        assert (await clients[2].response())[1] == CHAT
        assert len(engine.seen) == 1


async def test_clients_that_leave_at_any_moment_leave_nothing() -> None:
    async def slow(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(SSE_HEAD)
        for _ in range(5):
            await advance(0.001)
            writer.write(chunk(EVENTS[0]))
        writer.write(chunk(EVENTS[2]) + b"0\r\n\r\n")
        return True

    async def come_and_go(rig: Rig, chance: random.Random) -> None:
        for _ in range(4):
            client = (await rig.client()).post(STREAM)
            await advance(chance.random() * 0.008)
            client.writer.transport.abort()

    gc.collect()  # what other tests left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with rig_with(slow) as (rig, engine, at_once):
            at_once.post(CHAT)
            at_once.writer.close()
            await rig.announce("1", engine.url)
            await asyncio.gather(*(come_and_go(rig, random.Random(seed)) for seed in range(10)))
            context = rig.gateway._context
            while sum(context.counters.outcomes.values()) < 40:
                await advance(0.001)
            await rig.until(lambda view: view["in_flight_total"] == 0)
            assert (context.under_way, context.queue.waiting) == (set(), 0)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def test_stopping_gateway_finishes_requests_and_takes_no_connections() -> None:
    gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply, drain_s=5.0) as (rig, _, client):
        idle, late, held = await rig.client(), await rig.client(), await rig.client()
        await idle.get("/health").response()
        client.post(CHAT)
        await gate.reached.wait()
        await rig.admin("/admin/drain", {"replica": "0"})
        held.post(CHAT)
        await rig.until(lambda view: view["waiting"] == 1)
        port = rig.gateway.public.port
        stopping = asyncio.ensure_future(rig.stop())
        await advance(0.001)
        assert (await late.get("/health").response())[0].get(b"connection") == b"close"
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


async def test_request_that_outlasts_the_drain_is_told_so() -> None:
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


async def test_deadline_before_the_first_byte_gives_504_and_frees_the_engine() -> None:
    async with Rig() as rig:
        client = await rig.client()
        for value, status in (("5ms", 504), ("soon", 400)):
            assert (await client.post(CHAT, headers=f"X-Request-Timeout: {value}\r\n").error())[0] == status
            assert (await rig.view())["waiting"] == 0
    gate = Gate(b"", b"")
    async with rig_with(gate.reply) as (rig, engine, client):
        status, error = await client.post(CHAT, headers="X-Request-Timeout: 150ms\r\n").error()
        assert (status, error["code"]) == (504, "deadline_exceeded")
        await gate.peer_left.wait()
        assert (await rig.view())["in_flight_total"] == 0
        client = await rig.client()
        assert 'penstock_requests_total{model="demo",outcome="late"} 1\n' in await client.metrics()
        engine.reply = echo
        for headers in ("X-Request-Timeout: 10ms\r\n", ""):  # one that was met leaves nothing
            assert (await client.post(CHAT, headers=headers).response())[1] == CHAT
            await advance(0.02)


async def test_deadline_in_a_stream_gives_an_error_event() -> None:
    gate = Gate(SSE_HEAD + chunk(EVENTS[0]), b"")
    async with rig_with(gate.reply) as (_, _, client):
        _, body, is_whole = await client.post(STREAM, headers="X-Request-Timeout: 0.05\r\n").response()
        assert (is_whole, body.startswith(EVENTS[0]), body.endswith(DONE)) == (True, True, True)
        assert error_of(body[len(EVENTS[0]) :])["code"] == "deadline_exceeded"
        await gate.peer_left.wait()
