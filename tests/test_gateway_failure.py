"""The gateway on loopback sockets: engines that die, clients that leave, drains."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import warnings
from collections.abc import Awaitable, Callable

import pytest
from gateway_rig import (
    CHAT,
    ENGINE_DOWN,
    EVENTS,
    SSE_HEAD,
    Gate,
    LoopFactory,
    Rig,
    Seen,
    chunk,
    echo,
    factories,
    hang_up,
    rig_with,
    run,
    say,
)

from penstock.gateway import forwarding
from penstock.gateway.connections import listener
from penstock.wire.http1 import END, RequestHead

pytestmark = factories

FAILURE = b'{"error": {"message": "EngineCore encountered an issue"}}'


# When an engine fails.


def test_dead_replica_costs_one_retry_elsewhere(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            bad, good = await rig.engine(hang_up, "bad"), await rig.engine(echo, "good")
            client = await rig.client()
            for _ in range(4):
                client.post(CHAT)
                head, body, _ = await client.response()
                assert (head.status, body, head.get(b"x-penstock-replica")) == (200, CHAT, b"good")
            assert (len(good.seen), 0 < len(bad.seen) <= 4) == (4, True)

    run(loop_factory, test())


def test_lost_keep_alive_connection_costs_a_fresh_one(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def once_per_connection(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            # Closes on the second request of a connection without a word, as an engine's idle timer does.
            ports.append(writer.get_extra_info("peername")[1])
            return ports.count(ports[-1]) == 1 and await echo(seen, reader, writer)

        ports: list[int] = []
        async with rig_with(once_per_connection) as (_, engine, client):
            for _ in range(2):
                client.post(CHAT)
                assert (await client.response())[1] == CHAT
            assert (len(engine.seen), engine.n_connections) == (3, 2)

    run(loop_factory, test())


def test_request_that_kills_engines_is_sent_twice_at_most(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(hang_up) as (rig, engine, client):
            client.post(CHAT)
            status, error = await client.error()
            assert (status, error["code"], error["type"]) == (502, "upstream_failed", "server_error")
            assert len(engine.seen) == 2
            assert 'penstock_requests_total{model="demo",outcome="broken"} 1\n' in await client.metrics()
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


def test_replica_that_refuses_connections_is_passed_over_until_it_announces(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(echo, name) for name in ("a", "b")]
            await engines[0].stop()
            client = await rig.client()

            async def replicas(n_requests: int) -> set[bytes | None]:
                found = set()
                for _ in range(n_requests):
                    client.post(CHAT)
                    found.add((await client.response())[0].get(b"x-penstock-replica"))
                return found

            assert await replicas(4) == {b"b"}
            await engines[0].start()
            assert await replicas(4) == {b"b"}
            await rig.announce("a", engines[0].url)
            assert await replicas(4) == {b"a", b"b"}

    run(loop_factory, test())


def test_request_waits_for_its_only_replica_to_come_back(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, engine, client):
            await engine.stop()
            client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            await engine.start()
            await rig.announce("0", engine.url)
            assert (await client.response())[1] == CHAT

    run(loop_factory, test())


def test_request_lost_by_a_dying_replica_is_not_lost_to_it_again(loop_factory: LoopFactory) -> None:
    """A killed engine still accepts for a moment after its connections broke: the second send waits for that to end."""

    async def test() -> None:
        async def die(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            asyncio.get_running_loop().call_later(forwarding.AGAIN_S / 4, engine.server.close)  # type: ignore[union-attr]
            return False

        async with rig_with(die) as (rig, engine, client):
            client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            assert len(engine.seen) == 1
            revived = await rig.engine(echo, "0")
            assert (await client.response())[1] == CHAT
            assert len(revived.seen) == 1

    run(loop_factory, test())


# When an engine answers that it failed: its inner process may be gone, or the request may be what it cannot do.


def failing(status: int = 500, body: bytes = FAILURE) -> Callable[..., Awaitable[bool]]:
    return say(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nRetry-After: 7\r\n\r\n%s" % (status, len(body), body))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "FAILED_AGAIN_S", 0.0)


@pytest.mark.parametrize("status", sorted(forwarding.FAILED_STATUSES))
def test_failed_answer_is_retried_elsewhere_and_ends_traffic_until_the_next_announcement(
    loop_factory: LoopFactory, status: int
) -> None:
    async def test() -> None:
        async with Rig() as rig:
            bad, good = await rig.engine(failing(status), "bad"), await rig.engine(echo, "good")
            client = await rig.client()

            async def ask(n_requests: int) -> None:
                for _ in range(n_requests):
                    client.post(CHAT)
                    head, body, _ = await client.response()
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

    run(loop_factory, test())


@pytest.mark.parametrize("status", sorted(forwarding.FAILED_STATUSES))
def test_last_failed_answer_is_the_clients(loop_factory: LoopFactory, impatient: None, status: int) -> None:
    """A request that no engine can do is told so in the engine's words, and its last replica keeps its traffic."""

    async def test() -> None:
        async with rig_with(failing(status)) as (rig, engine, client):
            client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            assert len(engine.seen) == 1
            await rig.announce("0", engine.url)
            head, body, is_whole = await client.response()
            assert (head.status, body, head.get(b"retry-after"), is_whole) == (status, FAILURE, b"7", True)
            engine.reply = echo
            client.post(CHAT)
            assert (await client.response())[1] == CHAT
            assert len(engine.seen) == 3
            assert 'penstock_retries_total{model="demo"} 1\n' in await client.metrics()

    run(loop_factory, test())


def test_request_that_fails_everywhere_leaves_a_replica_with_traffic(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(failing(), name) for name in ("a", "b")]
            client = await rig.client()
            client.post(CHAT)
            assert (await client.response())[1] == FAILURE
            assert [len(engine.seen) for engine in engines] == [1, 1]
            for engine in engines:
                engine.reply = echo
            client.post(CHAT)
            assert (await client.response())[1] == CHAT

    run(loop_factory, test())


def test_failed_answer_after_a_lost_send_is_the_clients(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async def lose_the_first(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            return len(engine.seen) > 1 and await failing()(seen, reader, writer)

        async with rig_with(lose_the_first) as (_, engine, client):
            client.post(CHAT)
            head, body, _ = await client.response()
            assert (head.status, body, len(engine.seen)) == (500, FAILURE, 2)

    run(loop_factory, test())


@pytest.mark.parametrize("status", [400, 404, 429, 499, 501])
def test_refusal_of_an_engine_is_never_retried(loop_factory: LoopFactory, status: int) -> None:
    async def test() -> None:
        async with Rig() as rig:
            engines = [await rig.engine(failing(status), name) for name in ("a", "b")]
            client = await rig.client()
            for _ in range(4):
                client.post(CHAT)
                head, body, _ = await client.response()
                assert (head.status, body) == (status, FAILURE)
            assert [len(engine.seen) for engine in engines] == [2, 2]
            assert 'penstock_retries_total{model="demo"} 0\n' in await client.metrics()

    run(loop_factory, test())


def test_long_failed_answer_is_not_read_to_its_end(loop_factory: LoopFactory, impatient: None) -> None:
    async def test() -> None:
        gate = Gate(b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\nsome", b"")
        async with Rig() as rig:
            bad = await rig.engine(gate.reply, "bad")
            client = await rig.client()
            client.post(CHAT)
            await gate.peer_left.wait()
            await rig.engine(echo, "good")
            assert (await client.response())[1] == CHAT
            assert len(bad.seen) == 1

    run(loop_factory, test())


def test_client_that_leaves_after_a_failed_answer_is_not_sent_again(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(failing()) as (rig, engine, client):
            client.post(CHAT)
            while not engine.seen:
                await asyncio.sleep(0.001)
            client.writer.close()
            other = await rig.client()
            while 'outcome="client_gone"} 1\n' not in await other.metrics():
                await asyncio.sleep(0.001)
            engine.reply = echo
            await rig.announce("0", engine.url)
            other.post(CHAT)
            assert (await other.response())[1] == CHAT
            assert len(engine.seen) == 2
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


def test_time_with_a_failed_replica_is_not_the_gateways_own(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "FAILED_AGAIN_S", 0.05)

    async def test() -> None:
        async with rig_with(failing()) as (rig, engine, client):
            began = time.monotonic()
            client.post(CHAT)
            while not engine.seen:
                await asyncio.sleep(0.001)
            revived = await rig.engine(echo, "0")
            head, body, _ = await client.response()
            assert (body, len(revived.seen)) == (CHAT, 1)
            timing = head.get(b"server-timing")
            assert timing is not None
            # However slow this machine is: what the gateway calls its own and what it waited fit into the whole.
            assert float(timing.partition(b"dur=")[2]) <= (time.monotonic() - began - 0.045) * 1000

    run(loop_factory, test())


@pytest.mark.parametrize(
    ("sent", "gap"),
    [(EVENTS[0], b""), (b'data: {"n"', b"\n\n"), (b"", b""), (b": ping\r\n\r\n", b"")],
)
def test_engine_death_in_a_stream_becomes_an_error_event(loop_factory: LoopFactory, sent: bytes, gap: bytes) -> None:
    async def test() -> None:
        data = SSE_HEAD + (chunk(sent) if sent else b"")
        async with rig_with(say(data, then_close=True)) as (_, engine, client):
            client.post(CHAT)
            _, body, is_whole = await client.response()
            assert is_whole
            assert body.startswith(sent + gap + b"data: ")
            event, done, rest = body[len(sent + gap) :].split(b"\n\n")
            error = json.loads(event.removeprefix(b"data: "))["error"]
            assert (error["source"], error["message"]) == ("gateway", ENGINE_DOWN)
            assert (done, rest) == (b"data: [DONE]", b"")
            assert len(engine.seen) == 1
            client.get("/health")
            assert (await client.response())[0].status == 200

    run(loop_factory, test())


def test_engine_death_after_done_is_no_error(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(say(SSE_HEAD + chunk(EVENTS[2]), then_close=True)) as (_, _, client):
            client.post(CHAT)
            assert (await client.response())[1:] == (EVENTS[2], True)

    run(loop_factory, test())


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
    ],
)
def test_engine_death_in_another_body_closes_the_connection(loop_factory: LoopFactory, data: bytes) -> None:
    async def test() -> None:
        async with rig_with(say(data, then_close=True)) as (rig, _, client):
            client.post(CHAT)
            _, body, is_whole = await client.response()
            assert (body, is_whole) == (b"12345", False)
            assert (await rig.view())["in_flight_total"] == 0

    run(loop_factory, test())


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", SSE_HEAD + b"no chunk\r\n"])
def test_engine_that_does_not_speak_http_gives_502(loop_factory: LoopFactory, data: bytes) -> None:
    async def test() -> None:
        async with rig_with(say(data)) as (_, _, client):
            client.post(CHAT)
            assert (await client.error())[0] == 502

    run(loop_factory, test())


def test_bug_in_a_handler_does_not_leave_the_client_waiting(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, _, client):
            client.post(CHAT)
            status, error = await client.error()
            assert (status, error["code"]) == (500, "internal_error")
            assert (await rig.view())["in_flight_total"] == 0

    monkeypatch.setattr(RequestHead, "keep", None)
    run(loop_factory, test())


# When a client leaves.


def test_leaving_client_closes_the_engine_connection(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        for before in (b"", SSE_HEAD + chunk(EVENTS[0])):
            gate = Gate(before, b"")
            async with rig_with(gate.reply) as (rig, _, client):
                client.post(CHAT)
                await gate.reached.wait()
                assert (await rig.view())["in_flight_total"] == 1
                client.writer.close()
                await gate.peer_left.wait()
                await rig.until(lambda view: view["in_flight_total"] == 0)

    run(loop_factory, test())


def test_leaving_client_is_not_waiting_any_more(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with Rig() as rig:
            clients = [await rig.client() for _ in range(3)]
            for client in clients:
                client.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 3)
            clients[0].writer.close()
            clients[1].writer.transport.abort()
            await rig.until(lambda view: view["waiting"] == 1)
            engine = await rig.engine(echo)
            assert (await clients[2].response())[1] == CHAT
            assert len(engine.seen) == 1

    run(loop_factory, test())


def test_client_that_leaves_at_once_leaves_nothing_behind(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        async with rig_with(echo) as (rig, _, client):
            client.post(CHAT)
            client.writer.close()
            await rig.until(lambda view: view["in_flight_total"] == 0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(loop_factory, test())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


# Draining.


def test_drained_replica_finishes_and_gets_nothing_new(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 1})
            assert await rig.announce("0", engine.url) == (200, {"draining": True})
            other = await rig.client()
            other.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            gate.opened.set()
            assert (await client.response())[1:] == (EVENTS[2], True)
            assert await rig.admin("/admin/drain", {"replica": "0"}) == (200, {"in_flight": 0})
            assert len(engine.seen) == 1
            await rig.admin("/admin/undrain", {"replica": "0"})
            assert (await other.response())[1:] == (EVENTS[2], True)
            await rig.admin("/admin/forget", {"replica": "0"})
            assert (await rig.view())["replicas"] == []

    run(loop_factory, test())


def test_request_survives_the_end_of_its_replicas_lease(loop_factory: LoopFactory) -> None:
    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply) as (rig, engine, client):
            client.post(CHAT)
            await gate.reached.wait()
            await rig.announce("0", engine.url, "stalled", lease_s=0.001)
            await rig.until(lambda view: not view["replicas"][0]["is_alive"])
            gate.opened.set()
            assert (await client.response())[1:] == (EVENTS[2], True)

    run(loop_factory, test())


def test_stopping_gateway_finishes_requests_and_takes_no_connections(
    loop_factory: LoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "DOOR_S", 0.005)
    monkeypatch.setattr(listener, "GRACE_S", 0.01)

    async def test() -> None:
        gate = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        async with rig_with(gate.reply, drain_s=5.0) as (rig, _, client):
            idle, late, held = await rig.client(), await rig.client(), await rig.client()
            idle.get("/health")
            await idle.response()
            client.post(CHAT)
            await gate.reached.wait()
            await rig.admin("/admin/drain", {"replica": "0"})
            held.post(CHAT)
            await rig.until(lambda view: view["waiting"] == 1)
            port = rig.gateway.public.port
            stopping = asyncio.ensure_future(rig.stop())
            await asyncio.sleep(0.001)
            late.get("/health")
            assert (await late.response())[0].get(b"connection") == b"close"
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

    run(loop_factory, test())


def test_request_that_outlasts_the_drain_is_told_so(loop_factory: LoopFactory) -> None:
    async def test() -> None:
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

    run(loop_factory, test())
