"""Histograms of promised latencies: their bounds, where they begin and end, and what is not counted."""

from __future__ import annotations

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Gate, Rig, chunk, echo, rig_with, say

from penstock.gateway.config import Slo
from penstock.gateway.metrics.counters import GAP_S, LATENCY_S, Counters, add_distributions, distributions, with_bound
from penstock.wire import prometheus
from penstock.wire.http1 import END

WHOLE = SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
SERVED = 'model="demo",replica="0"'


def count(text: str, name: str, labels: str = SERVED) -> float | None:
    lines = [line for line in text.splitlines() if line.startswith(f"penstock_{name}_count{{{labels}}}")]
    return float(lines[0].rpartition(" ")[2]) if lines else None


def test_promises_are_bounds_once() -> None:
    assert with_bound(LATENCY_S, None) == LATENCY_S
    assert with_bound(LATENCY_S, 250.0) == LATENCY_S
    assert [bound for bound in with_bound(GAP_S, 12.5) if bound not in GAP_S] == [0.0125]
    counters = Counters(["m"], 300.0, 12.5)
    counters.series("m", "0").first_token_s.observe(0.3)  # just kept
    (bounds, samples), *_ = [
        row[1:] for row in add_distributions([distributions(counters)] * 2) if row[0] == "time_to_first_token_seconds"
    ]
    assert [samples[labels][0][bounds.index(0.3)] for labels in samples] == [2]


async def test_streams_are_measured_and_other_answers_are_not() -> None:
    async with rig_with(say(WHOLE), slo=Slo(700.0, 33.0)) as (rig, _, client):
        for _ in range(2):
            assert (await client.post(STREAM).response())[2]
        text = await client.metrics()
        assert 'time_to_first_token_seconds_bucket{model="demo",replica="0",le="0.7"} 2\n' in text
        assert 'time_per_output_token_seconds_bucket{model="demo",replica="0",le="0.033"}' in text
        assert count(text, "time_to_first_token_seconds") == 2
        assert count(text, "request_hold_seconds", 'model="demo"') is None
        assert prometheus.parse(text)
        await rig.engine(echo)
        await client.post(CHAT).response()
        assert count(await client.metrics(), "time_to_first_token_seconds") == 2


async def test_time_per_output_token_goes_by_the_tokens_of_the_usage(tmp_path: object) -> None:
    gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(USAGE + EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply, store=f"{tmp_path}/keys.db") as (_, _, client):
        client.post(STREAM)
        await gate.reached.wait()
        gate.opened.set()
        assert (await client.response())[2]
        text = await client.metrics()
        assert count(text, "time_per_output_token_seconds") == 1
        (per_token,) = [line for line in text.splitlines() if "output_token_seconds_sum" in line]
        (gap,) = [line for line in text.splitlines() if "chunk_gap_seconds_sum" in line]
        assert float(per_token.rpartition(" ")[2]) == pytest.approx(float(gap.rpartition(" ")[2]) / 4)


async def test_comments_of_a_held_stream_are_not_its_first_token() -> None:
    async with Rig(hold_s=60.0) as rig:
        client = (await rig.client()).post(STREAM)
        for _ in range(3):
            await client.event()
        other = await rig.client()
        assert count(await other.metrics(), "time_to_first_token_seconds") is None
        await rig.engine(say(WHOLE))
        while await client.event() is not END:
            pass
        text = await other.metrics()
        assert (count(text, "time_to_first_token_seconds"), count(text, "time_to_first_byte_seconds")) == (1, 1)
        assert count(text, "request_hold_seconds", 'model="demo"') == 1
