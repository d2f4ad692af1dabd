"""Malformed requests against a whole gateway: none reaches the engine, none hurts the next client."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from typing import Any

import pytest
from gateway_rig import CHAT, Rig, echo, rig_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smuggling import CORPUS, read_all
from virtual_loop import loop

from penstock.gateway.connections.client import ClientConnection
from penstock.wire import http1
from penstock.wire.http1 import END, ProtocolError, Reader, parse_request


def events_of(data: bytes, n_bytes: int) -> tuple[list[Any], int | None]:
    """Events of `data` in pieces of `n_bytes` until the reader refuses; body pieces are joined."""
    events: list[Any] = []
    try:
        read_all(Reader(parse_request), (data[at : at + n_bytes] for at in range(0, len(data), n_bytes)), events)
    except ProtocolError as error:
        # Of a body that breaks in the middle, the pieces before it may or may not have come out.
        return events[:-1] if events and isinstance(events[-1], bytes) else events, error.status
    return events, None


def facts_of(event: Any) -> Any:
    if not isinstance(event, http1.RequestHead):
        return event
    return (event.method, event.target, event.headers, event.keeps_alive, event.length, event.is_chunked)


async def say(rig: Rig, data: bytes) -> bytes:
    """What the gateway answers to `data`, until it closes."""
    client = await rig.client()
    client.writer.write(data)
    with contextlib.suppress(ConnectionError):
        return await client.reader.read(-1)
    return b""


@pytest.mark.parametrize("n_bytes", [None, 1])
async def test_no_byte_of_the_corpus_reaches_the_engine(n_bytes: int | None) -> None:
    async with Rig() as rig:
        engine = await rig.engine(echo)
        for data in CORPUS:
            loop().bytes_at_once = n_bytes if len(data) < 8000 else 100
            answer = await say(rig, data + b"\r\n\r\n")
            assert answer[9:12] in (b"400", b"417", b"431", b"501", b"505"), (data, answer[:80])
            assert answer.count(b"connection: close\r\n") == 1, data
        assert (engine.n_connections, engine.seen) == (0, [])
        client = await rig.client()
        assert (await client.post(CHAT).response())[0].status == 200


@pytest.mark.parametrize(
    "name", ["a\r\nX-Evil: 1", "a\r\n\r\nGET / HTTP/1.1", "a\x00b", "a\nb", "\u560d\u560a", "x" * 9000]
)
async def test_a_models_name_never_becomes_a_header(name: str) -> None:
    async with rig_with(echo) as (_, engine, client):
        status, error = await client.post(json.dumps({"model": name}).encode()).error()
        assert (status, error["code"]) == (404, "model_not_found")
        assert engine.seen == []


# Fuzzing. The same malformed requests every time, so that a failure can be looked at.

_GOOD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_SEEDS = (
    _GOOD + b"Content-Length: 16\r\n\r\n" + b'{"model":"demo"}',
    _GOOD + b'Transfer-Encoding: chunked\r\n\r\n10;x=y\r\n{"model":"demo"}\r\n0\r\nTrailer: x\r\n\r\n',
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    *CORPUS,
)
_BITS = (b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b",", b";", b"0", b"-1", b"\xff", b"chunked", b"HTTP/1.1")
_LINES = (b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: b\r\n", b"\r\n\r\n", b"0\r\n\r\n")


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(_SEEDS))[:2000]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 8))
        data = data[:at] + draw(st.sampled_from((b"", *_BITS, *_LINES))) + data[at + gone :]
    return data


@settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mutants(), st.integers(1, 40))
def test_where_a_malformed_request_is_cut_changes_nothing(data: bytes, n_bytes: int) -> None:
    pieces, whole = events_of(data, n_bytes), events_of(data, max(1, len(data)))
    assert [*map(facts_of, pieces[0])] == [*map(facts_of, whole[0])]
    assert pieces[1] == whole[1]


@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mutants())
def test_what_is_taken_reads_the_same_when_written_again(data: bytes) -> None:
    """What we would send on is what we understood: an engine that reads strictly sees the same requests."""
    events, _ = events_of(data, len(data) or 1)
    for index, event in enumerate(events):
        if not isinstance(event, http1.RequestHead) or END not in events[index:]:
            continue
        following = events[index + 1]
        body = following if isinstance(following, bytes) else b""
        kept = event.keep(http1.HOP_BY_HOP | {b"content-length"})
        wire = b"%s %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n" % (event.method, event.target, kept, len(body))
        again, status = events_of((wire + body).replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\n", 1), len(wire + body))
        if event.is_http_10 and event.get(b"host") is None:
            continue
        assert status is None
        assert isinstance(again[0], http1.RequestHead)
        assert (again[0].method, again[0].target, again[0].length) == (event.method, event.target, len(body))


N_REQUESTS = 10_000


def mutant(random_: random.Random) -> bytes:
    data = random_.choice(_SEEDS)[:2000]
    for _ in range(random_.randint(1, 6)):
        at = random_.randint(0, len(data))
        piece = random_.choice((b"", *_BITS, *_LINES, random_.randbytes(random_.randint(1, 9))))
        data = data[:at] + piece + data[at + random_.randint(0, 12) :]
    return data


def count_connections() -> int:
    gc.collect()
    return sum(isinstance(thing, ClientConnection) for thing in gc.get_objects())


async def test_ten_thousand_malformed_requests_leave_nothing_behind() -> None:
    """No crash, hang or leak; what reaches the engine are whole requests, and the next client is served."""
    random_ = random.Random(1)
    async with rig_with(echo) as (rig, engine, good):
        for number in range(N_REQUESTS):
            client = await rig.client()
            client.writer.write(mutant(random_) + b"\r\n\r\n0\r\n\r\n")
            if number % 2:
                with contextlib.suppress(ConnectionError):
                    await client.reader.read(100)
            client.writer.transport.abort()
            if number % 100 == 0:
                rig.forget_clients()
        rig.forget_clients()
        await rig.until(lambda view: view["in_flight_total"] == 0)
        assert count_connections() < 10
        assert {seen.head.method for seen in engine.seen} <= {b"POST", b"GET"}
        assert not any(seen.body for seen in engine.seen if seen.head.method == b"GET")
        assert (await good.post(CHAT).response())[0].status == 200
