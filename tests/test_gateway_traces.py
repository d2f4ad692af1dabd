"""Trace contexts of requests: continued, made, and passed on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Rig, chunk, echo, rig_with, say
from store_rig import record
from virtual_loop import advance

from penstock.gateway.slow_requests import KEPT_S, MAX_KEPT, SlowRequests
from penstock.gateway.trace_context import TraceContext, Tracer
from penstock.spec.gateway import Traces
from penstock.wire.http1 import parse_request

TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
VALID = f"00-{TRACE_ID}-{PARENT}-01"


def begin(*values: str, sample: float = 1.0) -> TraceContext:
    lines = "".join(f"\r\nTraceparent: {value}" for value in values)
    return Tracer(sample, os.urandom).begin(parse_request(f"GET / HTTP/1.1\r\nhost: a{lines}".encode()))


@pytest.mark.parametrize(
    "value", [VALID, VALID[:-2] + "00", VALID[:-2] + "ff", "01" + VALID[2:], "cc" + VALID[2:] + "-what-will-come"]
)
def test_a_valid_trace_goes_on_with_its_own_decision(value: str) -> None:
    context = begin(value, sample=0.0)
    assert (context.trace_id.decode(), context.parent_id.decode()) == (TRACE_ID, PARENT)
    assert (context.is_sampled, context.is_ours) == (value[53:55] in ("01", "ff"), False)
    assert context.span_id.decode() not in (PARENT, "0" * 16)
    flags = "01" if context.is_sampled else "00"
    assert context.line.decode() == f"traceparent: 00-{TRACE_ID}-{context.span_id.decode()}-{flags}\r\n"


@pytest.mark.parametrize(
    "values",
    [
        ("",), ("ff" + VALID[2:],), (VALID + "-x",), (VALID.upper(),), (VALID[:-1],), (f"00-{'0' * 32}-{PARENT}-01",),
        (f"00-{TRACE_ID}-{'0' * 16}-01",), (VALID, VALID), (VALID + "x",), ("x" * 20_000,),
    ],
)  # fmt: skip
def test_an_invalid_trace_is_started_anew(values: tuple[str, ...]) -> None:
    context = begin(*values)
    assert (context.parent_id, context.is_ours, context.is_sampled) == (b"", True, True)
    assert context.trace_id.decode() != TRACE_ID
    assert len(context.line) == len(f"traceparent: {VALID}\r\n")


def test_ids_differ_and_their_share_is_sampled() -> None:
    tracer, head = Tracer(0.25, os.urandom), parse_request(b"GET / HTTP/1.1\r\nhost: a")
    contexts = [tracer.begin(head) for _ in range(2000)]
    assert len({context.trace_id for context in contexts} | {context.span_id for context in contexts}) == 4000
    assert 350 < sum(context.is_sampled for context in contexts) < 650
    assert not any(Tracer(0.0, os.urandom).begin(head).is_sampled for _ in range(100))


async def test_without_traces_the_headers_pass_as_they_are() -> None:
    async with rig_with(echo) as (_, engine, client):
        for lines in (f"traceparent: {VALID}\r\ntracestate: a=1\r\n", "traceparent: broken\r\ntracestate: a=1\r\n", ""):
            await client.post(CHAT, headers=lines).response()
        heads = [seen.head for seen in engine.seen]
        assert [head.get(b"traceparent") for head in heads] == [VALID.encode(), b"broken", None]
        assert [head.get(b"tracestate") for head in heads] == [b"a=1", b"a=1", None]


@pytest.mark.loopback
async def test_requests_go_on_without_collector_and_disk(tmp_path: Path) -> None:
    log = tmp_path / "gone" / "access.log"
    log.parent.mkdir()
    async with rig_with(echo, traces=Traces("http://127.0.0.1:9"), access_log=str(log)) as (rig, _, client):
        log.unlink()
        log.parent.rmdir()
        for _ in range(3):
            assert (await client.post(CHAT).response())[0].status == 200
        while "penstock_access_log_lost_total 3\n" not in await client.metrics():
            await advance(0.1)
        await rig.stop()
        (family,) = [row for row in rig.gateway.accounting.families() if row[0] == "spans_lost_total"]
        assert family[1] == {(): 3}


def test_the_slowest_are_kept_for_an_hour() -> None:
    kept = SlowRequests()
    for number in range(200):  # each came at 10 s
        kept.add(record(ended_at=10.0 + number))
    assert len(kept.worst(200.0, 200)) == MAX_KEPT
    assert [request.duration_s for request in kept.worst(200.0, 3)] == [199, 198, 197]
    assert [request.duration_s for request in kept.worst(KEPT_S + 208.5, 20)] == [199]
    assert kept.worst(3 * KEPT_S, 20) == []


async def test_a_slow_request_says_where_its_time_went() -> None:
    async with Rig(hold_s=2.0) as rig:
        client = await rig.client()
        assert (await client.post(CHAT, headers="x-request-id: held\r\n").response())[0].status == 503
        await rig.engine(say(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"))
        assert (await client.post(STREAM).response())[0].status == 200
        first, second = rig.gateway._context.slow.worst(1002.0, 10)
        assert (first.request_id, first.outcome, first.status, first.first_byte_s) == ("held", "no_replica", 503, None)
        assert first.hold_s == first.duration_s == 2.0
        assert (second.outcome, second.status, second.hold_s) == ("complete", 200, 0.0)
        assert second.first_byte_s is not None and second.stream_s is not None
        parts = second.own_s + second.first_byte_s + second.stream_s
        assert parts == pytest.approx(second.duration_s)
