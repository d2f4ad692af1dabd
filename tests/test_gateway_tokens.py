"""The short way of a stream's token chunks, from connection to connection: what takes it, and what it must not lose."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway_rig import DONE, SSE_HEAD, STREAM, Seen, chunk, rig_with
from virtual_loop import advance

from penstock.gateway.accounting.token_usage import is_token_chunk
from penstock.gateway.connections.engine import UpstreamConnection
from penstock.gateway.metrics import GAP_S, Histogram

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
TOKEN_SGLANG = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"matched_stop":null}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'


@pytest.mark.parametrize(
    "read",
    [
        chunk(USAGE),
        chunk(DONE),
        chunk(TOKEN + TOKEN),
        chunk(TOKEN) * 2,
        chunk(TOKEN)[:-1],
        chunk(TOKEN)[1:],
        chunk(b": quiet\n\n"),
        chunk(b'data: {"error":{"message":"x"}}\n\n'),
        chunk(b'data: {"usage":{"prompt_tokens":7},"choices":[{}]}\n\n'),
        chunk(b'data: {"usage":{"prompt_tokens":7},"choices":[{}],"usage":null}\n\n'),
        chunk(b'data: {"choices":[],"usage":null}\n\n'),
        chunk(b'data: {"error":{"message":"x"},"usage":null}\n\n'),
        chunk(TOKEN_SGLANG) * 2,
        chunk(b'data: {"a":1}\ndata: {"choices":[{}]}\n\n'),
        b"%X\r\n%s\r\n" % (len(TOKEN) + 0x1000, TOKEN),
        b"3c" + chunk(TOKEN)[2:],
        chunk(TOKEN) + b"0\r\n\r\n",
    ],
)
def test_only_one_chunk_with_one_tokens_event_takes_the_short_way(read: bytes) -> None:
    assert is_token_chunk(chunk(TOKEN))
    assert is_token_chunk(chunk(TOKEN_SGLANG))
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

    wire = chunk(TOKEN)
    pieces = [SSE_HEAD, wire, wire, wire, wire[:9], wire[9:], wire, wire]

    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces + ([chunk(DONE) + b"0\r\n\r\n"] if is_whole else []):
            writer.write(piece)
            await advance(0.002)
        return is_whole

    monkeypatch.setattr(UpstreamConnection, "pass_tokens", count)
    async with rig_with(reply) as (rig, _, client):
        _, body, has_end = await client.post(STREAM).response()
        assert (body.startswith(TOKEN * 6), body.endswith(DONE), has_end) == (True, True, True)
        assert body == TOKEN * 6 + DONE if is_whole else body[len(TOKEN) * 6 :].startswith(b'data: {"error"')
        (series,) = [row for _, row in rig.gateway._context.counters.all_series()]
        # On a slow machine two pieces may come as one read.
        assert 1 <= sum(series.gap_s.counts) <= (7 if is_whole else 6)
        assert 1 <= n_short <= 2
        client.post(STREAM)  # the connection, and what it remembers, is used again
        assert (await client.response())[1].startswith(TOKEN * 6)
