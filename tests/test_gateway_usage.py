"""Usage and tokens out of the bytes that pass: whole, torn anywhere, one byte at a time, and by the short way."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
from gateway_rig import SSE_HEAD, STREAM, Seen, chunk, rig_with
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import advance

from penstock.gateway.accounting.token_usage import (
    MAX_HELD_BYTES,
    BodyWatch,
    StreamStrip,
    StreamWatch,
    ask_for_usage,
    is_token_chunk,
)
from penstock.gateway.body_fields import Usage
from penstock.gateway.connections.engine import UpstreamConnection
from penstock.gateway.metrics.counters import GAP_S, Histogram

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" a \\"usage\\": {\\n\\n"}}]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}'
DONE = b"data: [DONE]"
TOLD = Usage(7, 0, 3)


def stream(*events: bytes, gap: bytes = b"\n\n") -> bytes:
    return b"".join(event + gap for event in events)


def strip(*pieces: bytes) -> tuple[bytes, StreamStrip]:
    watch = StreamStrip()
    return b"".join([*(watch.feed(piece, False) for piece in pieces), watch.feed(b"", True)]), watch


@pytest.mark.parametrize("gap", [b"\n\n", b"\r\n\r\n"])
def test_usage_event_is_taken_out_wherever_the_stream_is_torn(gap: bytes) -> None:
    whole = stream(ROLE, TOKEN, TOKEN, TOKEN, USAGE, DONE, gap=gap)
    wanted = stream(ROLE, TOKEN, TOKEN, TOKEN, DONE, gap=gap)
    for cut in range(len(whole) + 1):
        got, watch = strip(whole[:cut], whole[cut:])
        assert (got, watch.usage(), watch.n_events) == (wanted, TOLD, 6)
    got, watch = strip(*(bytes((byte,)) for byte in whole))
    assert (got, watch.usage(), watch.n_events) == (wanted, TOLD, 6)
    watch = StreamStrip()  # whole events are not held back
    assert watch.feed(stream(ROLE), False) == stream(ROLE)
    assert watch.feed(stream(TOKEN)[:-1], False) == b""
    assert watch.feed(b"\n" + TOKEN[:5], False) == stream(TOKEN)
    last = stream(b'data: {"choices":[{"text":""}],"usage":{"prompt_tokens":1,"completion_tokens":2}}', DONE)
    got, watch = strip(last)
    assert (got, watch.usage()) == (last, Usage(1, 0, 2)), "next to choices it is read and stays"


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([ROLE, TOKEN, b": ping", b"data: x" + b"y" * (MAX_HELD_BYTES + 9)]), max_size=6),
    st.lists(st.integers(0, 80_000), max_size=8),
)
def test_all_but_the_usage_event_passes_byte_for_byte(events: list[bytes], cuts: list[int]) -> None:
    whole, wanted = stream(*events, USAGE, DONE), stream(*events, DONE)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    got, watch = strip(*(whole[a:b] for a, b in itertools.pairwise(edges)))
    assert got == wanted
    assert watch.usage() == TOLD


def test_stream_that_asked_itself_is_only_watched() -> None:
    watch = StreamWatch(None)
    for event in (ROLE, TOKEN, USAGE, DONE):
        assert watch.feed(stream(event), False) == stream(event)
    assert (watch.usage(), watch.n_events, watch.has_error) == (TOLD, 4, False)
    torn = StreamWatch(None)
    for piece in (stream(ROLE, TOKEN), stream(USAGE)[:50], stream(USAGE)[50:] + stream(DONE)):
        torn.feed(piece, False)
    assert torn.usage() == TOLD
    watch = StreamWatch(b".delta\n")  # events of responses are counted by their deltas
    watch.feed(b"event: response.created\ndata: {}\n\n", False)
    watch.feed(b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n', False)
    end = b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":5,"output_tokens":1,'
    watch.feed(end + b'"input_tokens_details":{"cached_tokens":4}}}}\n\n', False)
    assert (watch.n_events, watch.usage()) == (1, Usage(5, 4, 1))


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3},"x":null}', TOLD),
        (b'{"usage" : {"total_tokens": 9}, "results":[' + b"0," * 9000 + b"0]}", Usage(9, 0, 0)),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}', None),
        (b'{"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":9}}}', Usage(4, 4, 0)),
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":"7"}}', None),
        (b'{"usage":{"prompt_tokens":7', None),
        (b"", None),
    ],
)
def test_usage_of_a_body_in_one_piece(body: bytes, usage: Usage | None) -> None:
    for size in (1 << 20, 1000, 7):
        watch = BodyWatch()
        for begin in range(0, len(body), size):
            watch.feed(body[begin : begin + size], False)
        assert watch.usage() == (usage if size > 10 or len(body) < 100 else watch.usage())


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"m","stream":true}',
        ' \n{ "stream":true, "stream_options":null}',
        '{"stream":true,"stream_options":{"continuous_usage_stats":false}}',
        '{"stream":true,"messages":[{"content":"{ \\"stream_options\\" größe"}], "temperature":1.10e0}',
        '{"stream":true,"tools":[{"stream_options":null}]}',
        '{"stream_options": {},"x":{"stream_options":{}, "y":{"stream_options" :{}}},"stream":true}',
    ],
)
def test_request_is_made_to_ask_for_its_usage(body: str) -> None:
    before = json.loads(body)
    given = (before.pop("stream_options") or {}) if "stream_options" in before else None
    asked = json.loads(ask_for_usage(body.encode(), has_options=given is not None))
    assert asked.pop("stream_options") == {**(given or {}), "include_usage": True}
    assert asked == before


# The short way of a stream's token chunks, from connection to connection: what takes it, and what it must not lose.


WORD = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
WORD_SGLANG = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"matched_stop":null}],"usage":null}\n\n'


@pytest.mark.parametrize(
    "read",
    [
        *(chunk(stream(USAGE)), chunk(stream(DONE)), chunk(b": quiet\n\n"), chunk(WORD + WORD), chunk(WORD) * 2),
        *(
            chunk(WORD)[:-1],
            chunk(WORD)[1:],
            chunk(WORD_SGLANG) * 2,
            b"3c" + chunk(WORD)[2:],
            chunk(WORD) + b"0\r\n\r\n",
        ),
        chunk(b'data: {"error":{"message":"x"}}\n\n'),
        chunk(b'data: {"usage":{"prompt_tokens":7},"choices":[{}]}\n\n'),
        chunk(b'data: {"usage":{"prompt_tokens":7},"choices":[{}],"usage":null}\n\n'),
        chunk(b'data: {"choices":[],"usage":null}\n\n'),
        chunk(b'data: {"error":{"message":"x"},"usage":null}\n\n'),
        chunk(b'data: {"a":1}\ndata: {"choices":[{}]}\n\n'),
        b"%X\r\n%s\r\n" % (len(WORD) + 0x1000, WORD),
    ],
)
def test_only_one_chunk_with_one_tokens_event_takes_the_short_way(read: bytes) -> None:
    assert is_token_chunk(chunk(WORD))
    assert is_token_chunk(chunk(WORD_SGLANG))
    assert not is_token_chunk(read)


@pytest.mark.parametrize("n_values", [0, 1, 7, 500])
def test_histogram_counts_many_values_as_it_counts_one(n_values: int) -> None:
    rng = random.Random(1)
    values = [rng.choice((*GAP_S, rng.expovariate(10), 7.0)) for _ in range(n_values)]
    one, many = Histogram(GAP_S), Histogram(GAP_S)
    for value in values:
        one.observe(value)
    many.observe_all(iter(values))
    assert many.counts == one.counts
    assert many.sum == pytest.approx(one.sum)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_stream_keeps_its_bytes_its_count_and_its_end(monkeypatch: pytest.MonkeyPatch, is_whole: bool) -> None:
    n_short = 0
    pass_tokens = UpstreamConnection.pass_tokens

    def count(connection: UpstreamConnection, write: object, times: list[float]) -> None:
        nonlocal n_short
        n_short += 1
        pass_tokens(connection, write, times)  # type: ignore[arg-type]

    wire = chunk(WORD)
    pieces = [SSE_HEAD, wire, wire, wire, wire[:9], wire[9:], wire, wire]

    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces + ([chunk(stream(DONE)) + b"0\r\n\r\n"] if is_whole else []):
            writer.write(piece)
            await advance(0.002)
        return is_whole

    monkeypatch.setattr(UpstreamConnection, "pass_tokens", count)
    async with rig_with(reply) as (rig, _, client):
        _, body, has_end = await client.post(STREAM).response()
        assert (body.startswith(WORD * 6), body.endswith(stream(DONE)), has_end) == (True, True, True)
        assert body == WORD * 6 + stream(DONE) if is_whole else body[len(WORD) * 6 :].startswith(b'data: {"error"')
        (series,) = [row for _, row in rig.gateway._context.counters.all_series()]
        # On a slow machine two pieces may come as one read.
        assert 1 <= sum(series.gap_s.counts) <= (7 if is_whole else 6)
        assert 1 <= n_short <= 2
        client.post(STREAM)  # the connection, and what it remembers, is used again
        assert (await client.response())[1].startswith(WORD * 6)
