"""A stream whose engine sends nothing: its client hears that it goes on, between events and never inside one."""

from __future__ import annotations

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Client, Gate, chunk, error_of, rig_with, say
from virtual_loop import advance, loop

from penstock.gateway.routing.replicas import STALL_S
from penstock.gateway.waiting_streams import KEEP_ALIVE, KEEP_ALIVE_S
from penstock.wire.http1 import END, ResponseHead

TOKEN_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


async def begun(client: Client) -> ResponseHead:
    head = await client.event()
    assert isinstance(head, ResponseHead)
    assert (head.status, head.get(b"content-type")) == (200, b"text/event-stream")
    assert head.get(b"x-accel-buffering") == b"no"
    return head


async def hears(client: Client, *pieces: bytes, is_end: bool = False) -> None:
    expected, heard = b"".join(pieces), b""
    while len(heard) < len(expected):
        heard += await client.event()
    assert heard == expected
    assert not is_end or await client.event() is END


@pytest.mark.parametrize("events", [EVENTS, (TOKEN_EVENT, TOKEN_EVENT, EVENTS[2])])
async def test_a_client_hears_of_a_silence_between_events(events: tuple[bytes, ...]) -> None:
    gate = Gate(SSE_HEAD + chunk(events[0]) + chunk(events[1]), chunk(events[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (_, _, client):
        client.post(STREAM)
        await begun(client)
        await hears(client, *events[:2])
        for _ in range(2):
            began_at = loop().time()
            await hears(client, KEEP_ALIVE)
            assert loop().time() - began_at == KEEP_ALIVE_S
        gate.opened.set()
        await hears(client, events[2], is_end=True)


@pytest.mark.parametrize("is_refused", [True, False])
async def test_what_began_with_our_word_is_still_sent_elsewhere_and_a_refusal_becomes_an_event(
    is_refused: bool,
) -> None:
    refusal = b'{"error":{"message":"too long"}}'
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
    gate = Gate(b"", answer if is_refused else b"")
    async with rig_with(gate.reply) as (rig, engine, client):
        client.post(STREAM, headers="Accept-Encoding: gzip\r\n")
        await gate.reached.wait()
        assert engine.seen[0].head.get(b"accept-encoding") is None, "what is added to must not be compressed"
        await advance(KEEP_ALIVE_S)
        assert (await begun(client)).get(b"x-penstock-replica") == b"none"
        await hears(client, KEEP_ALIVE)
        await rig.engine(say(SSE_HEAD + chunk(EVENTS[2]) + b"0\r\n\r\n"), "1")
        gate.opened.set()
        if is_refused:
            event = await client.event()
            assert (error_of(event)["message"], event.endswith(EVENTS[2])) == ("too long", True)
        else:
            await hears(client, EVENTS[2], is_end=True)


async def test_nothing_is_put_into_half_an_event_or_into_another_answer() -> None:
    gate = Gate(SSE_HEAD + chunk(EVENTS[0][:5]), chunk(EVENTS[0][5:] + EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (_, _, client):
        client.post(STREAM)
        await begun(client)
        await hears(client, EVENTS[0][:5])
        await advance(KEEP_ALIVE_S)
        gate.opened.set()
        await hears(client, EVENTS[0][5:] + EVENTS[2], is_end=True)
    length = len(EVENTS[0] + EVENTS[2])
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length
    for body, before in ((CHAT, b""), (STREAM, whole + EVENTS[0])):
        gate = Gate(before, EVENTS[2] if before else whole + EVENTS[0] + EVENTS[2])
        async with rig_with(gate.reply) as (_, _, client):
            client.post(body)
            await gate.reached.wait()
            if before:
                await begun(client)
                await hears(client, EVENTS[0])
            await advance(KEEP_ALIVE_S)
            gate.opened.set()
            if before:
                await hears(client, EVENTS[2], is_end=True)
            else:
                assert (await client.response())[1:] == (EVENTS[0] + EVENTS[2], True)


async def test_an_http_10_client_hears_it_without_framing() -> None:
    gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (rig, engine, client):
        client.writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        await begun(client)
        await hears(client, EVENTS[0])
        await advance(KEEP_ALIVE_S)
        await hears(client, KEEP_ALIVE)
        await rig.announce("0", engine.url, load={"running": 0})
        await hears(client, *[KEEP_ALIVE] * int((STALL_S - 1) / KEEP_ALIVE_S))
        assert error_of(await client.event())["message"].startswith("no byte for ")
