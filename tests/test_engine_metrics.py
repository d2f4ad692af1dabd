"""GET /metrics/engines through a running gateway: who is asked, with which key, and what a bad engine costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import CHAT, TOKEN, Client, Engine, Rig, Seen, chunk, echo, hang_up, rig_with, say
from prometheus_client.parser import text_string_to_metric_families
from virtual_loop import advance

from penstock.gateway.metrics import counters, engine_metrics
from penstock.spec.gateway import Upstream
from penstock.wire.announcement import engine_key

PAGE = (Path(__file__).parent / "golden/vllm-0.32.0/metrics.txt").read_bytes()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
FAMILIES = {"engine_families": ("vllm:",), "deployment": "demo"}


def page(text: bytes) -> bytes:
    return HEAD % len(text) + text


async def series(client: Client, headers: str = "") -> dict[str, dict[str, float]]:
    """Values by name, then by replica; the sum over other labels."""
    head, body, is_whole = await client.get("/metrics/engines", headers).response()
    assert (head.status, is_whole, head.get(b"content-type")) == (200, True, counters.CONTENT_TYPE)
    sums: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            by_replica = sums.setdefault(sample.name, {})
            replica = sample.labels["replica"]
            by_replica[replica] = by_replica.get(replica, 0.0) + sample.value
    return sums


async def test_every_replica_is_in_the_page_with_its_labels() -> None:
    async with Rig(**FAMILIES) as rig:
        client = await rig.client()
        assert await series(client) == {}
        for name in ("a", "b"):
            engine = await rig.engine(say(page(PAGE)), name)
            await rig.announce(name, engine.url, "loading", host=f'n"{name}')
        await advance(60)
        got = await series(client)
        assert got["vllm:generation_tokens_total"] == {"a": 105.0, "b": 105.0}
        assert got["penstock_engine_scrape_up"] == {"a": 1.0, "b": 1.0}
        _, body, _ = await client.get("/metrics/engines").response()
        assert b'vllm:num_requests_running{replica="a",node="n\\"a",deployment="demo",engine="0",' in body
        assert (await series(client)).keys() == got.keys()  # the connection goes on
        client.get("/metrics/engines", "Connection: close\r\n", "HEAD")
        head = await client.reader.read()
        assert head.endswith(b"\r\nconnection: close\r\n\r\n") and b"\r\ncontent-length: 3" in head


async def bad(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    await reader.read(1)
    return False


async def endless(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(chunk(b"vllm:x 1\n" * 1000))
        await writer.drain()


BAD = {
    "hangs": bad,
    "hangs up": hang_up,
    "endless": endless,
    "501": say(b"HTTP/1.1 501 No\r\nContent-Length: 2\r\n\r\nno"),
    "torn": say(HEAD % 9 + b"vllm:", then_close=True),
    "no HTTP": say(b"nonsense\r\n\r\n"),
    "100 MB": say(HEAD % (2**40) + PAGE),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
async def test_a_bad_engine_is_left_out_and_reported(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "PAGE_BYTES_MAX", 100_000)
    async with Rig(**FAMILIES) as rig:
        await rig.engine(reply, "bad")
        await rig.engine(say(page(PAGE)), "good")
        await rig.announce("starting", None, "starting")
        got = await series(await rig.client())
        assert got["penstock_engine_scrape_up"] == {"bad": 0.0, "good": 1.0, "starting": 0.0}
        assert got["vllm:num_requests_running"].keys() == {"good"}
        assert got["penstock_engine_scrape_seconds"]["bad"] in (0.0, engine_metrics.DEADLINE_S)


async def test_pages_that_are_too_large_together_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "PAGES_BYTES_MAX", len(PAGE) + 5)
    async with Rig(**FAMILIES) as rig:
        for name in ("a", "b"):
            await rig.engine(say(page(PAGE)), name)
        up = (await series(await rig.client()))["penstock_engine_scrape_up"]
        assert sorted(up.values()) == [0.0, 1.0]


async def test_those_who_ask_at_once_share_one_scrape() -> None:
    async with Rig(**FAMILIES) as rig:
        engine = await rig.engine(say(page(PAGE)))
        clients = [await rig.client() for _ in range(10)]
        results = await asyncio.gather(*(series(client) for client in clients))
        assert all(result == results[0] for result in results)
        assert await series(clients[0]) == results[0]  # and those who ask a moment later
        assert len(engine.seen) == 1


async def test_a_client_that_leaves_does_not_end_the_scrape_of_others() -> None:
    opened = asyncio.Event()

    async def late(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await opened.wait()
        writer.write(page(PAGE))
        return True

    async with Rig(**FAMILIES) as rig:
        engine = await rig.engine(late)
        first, second = await rig.client(), await rig.client()
        first.get("/metrics/engines")
        while not engine.seen:
            await asyncio.sleep(0)
        first.writer.transport.abort()
        answer = asyncio.ensure_future(series(second))
        await advance(0.001)
        opened.set()
        assert (await answer)["penstock_engine_scrape_up"] == {"0": 1.0}


@pytest.mark.parametrize(("needs_key", "brought"), [(True, [b"Bearer " + engine_key(TOKEN).encode()]), (False, [])])
async def test_engines_are_asked_with_their_key(needs_key: bool, brought: list[bytes], tmp_path: Path) -> None:
    """For their metrics, and in place of the client's own with its requests."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("foreign")
    foreign = Engine(say(page(PAGE)))
    await foreign.start()
    upstreams = (Upstream(foreign.url, key_file=str(key)),)
    async with Rig(**FAMILIES, engines_need_key=needs_key, upstreams=upstreams) as rig:
        own = await rig.engine(say(page(PAGE)), "own")
        await rig.until(lambda view: len(view["replicas"]) == 2)
        got = await series(await rig.client())
        assert got["penstock_engine_scrape_up"] == {"own": 1.0, "upstream-1": 1.0}
        asked = [seen for engine in (own, foreign) for seen in engine.seen if seen.head.path == b"/metrics"]
        assert (asked[0].head.get(b"authorization") is not None) == needs_key
        assert asked[1].head.get(b"authorization") == b"Bearer foreign"
    await foreign.stop()
    async with rig_with(echo, engines_need_key=needs_key) as (_, engine, client):
        client.post(CHAT, headers="Authorization: Bearer clients-own\r\n")
        assert (await client.response())[0].status == 200
        given = [value for name, value in engine.seen[0].head.headers if name == b"authorization"]
        assert given == brought


async def test_a_slow_client_gets_the_whole_page_and_holds_up_nobody() -> None:
    lines = b"".join(b'vllm:g{a="%d"} %d\n' % (number, number) for number in range(100_000))
    async with Rig(**FAMILIES) as rig:
        await rig.engine(say(page(b"# TYPE vllm:g gauge\n" + lines)))
        slow, other = await rig.client(), await rig.client()
        slow.get("/metrics/engines", "Connection: close\r\n")
        assert (await slow.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await other.get("/health").response())[0].status == 200
        assert (await slow.reader.read()).count(b"vllm:g{") == 100_000
