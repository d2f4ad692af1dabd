"""Limits, pipelined requests, engines that nobody announces; sockets and certificates that cannot be used."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Client, Gate, Rig, Seen, chunk, echo, rig_with, started
from virtual_loop import advance, loop
from virtual_network import VirtualSocket

from penstock.errors import UserError
from penstock.gateway.connections import listener
from penstock.gateway.connections.client import FREE_BODY_BYTES
from penstock.gateway.connections.engine import UpstreamError
from penstock.gateway.connections.listener import open_socket, open_tls
from penstock.gateway.routing.static_upstreams import SilentMachineError, next_state
from penstock.processes import raise_file_limit
from penstock.spec.gateway import Limits, Upstream
from penstock.text import KIB
from penstock.wire.announcement import ReplicaState

CHUNKED = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.loopback
def test_a_unix_socket_left_behind_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    open_socket((f"unix:{path}", 0)).close()
    assert path.exists()
    with open_socket((f"unix:{path}", 0)), pytest.raises(UserError, match="the file is taken"):
        open_socket((f"unix:{path}", 0))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError):
        open_socket((f"unix:{tmp_path}/file", 0))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_certificate_that_does_not_serve_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    for name in ("bad.pem", "absent.pem"):
        with pytest.raises(UserError, match="cannot use certificate"):
            open_tls(str(tmp_path / name), str(tmp_path / name))


@pytest.mark.parametrize(
    ("limits", "data", "status"),
    [
        (Limits(), b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n", 404),
        (Limits(head_bytes=200), b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 300 + b"\r\n\r\n", 431),
        (Limits(n_headers=2), b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\r\nZ: z\r\n\r\n", 431),
        (Limits(body_bytes=10), b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 11\r\n\r\n", 413),
        (Limits(body_bytes=10), CHUNKED + b"b\r\n" + b"x" * 11, 413),
    ],
)
async def test_what_is_over_a_limit_or_not_read_is_answered_once_and_closed(
    limits: Limits, data: bytes, status: int
) -> None:
    async with rig_with(echo, limits=limits) as (_, engine, client):
        client.writer.write(data)
        assert (await client.error())[0] == status
        assert await client.is_closed()
        assert engine.seen == []


async def test_bodies_that_are_arriving_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ARRIVING_BYTES", 0)
    size, rest = 100 * KIB, b" " * 10 * KIB
    start = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{}" % size
    start += b" " * (size - len(rest) - 2)
    async with rig_with(echo, limits=Limits(body_bytes=size)) as (rig, _, small):  # so the budget is twice that
        public = rig.gateway.public

        async def begin(n_bodies: int) -> Client:
            client = await rig.client()
            client.writer.write(start)
            while public._n_body_bytes < n_bodies * (size - len(rest) - FREE_BODY_BYTES):
                await advance(0.001)
            return client

        first, second, third = [await begin(n + 1) for n in range(3)]
        fourth = await begin(3)
        head, body, _ = await fourth.response()
        assert (head.status, head.get(b"retry-after")) == (503, b"1")
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert (await small.post(CHAT).response())[1] == CHAT
        first.writer.write(rest)
        assert (await first.response())[0].status == 200
        second.writer.transport.abort()
        fifth, sixth = await begin(2), await begin(3)
        monkeypatch.setattr(listener, "SLOW_BODY_S", -1.0)
        seventh = await begin(3)
        answers = [asyncio.create_task(client.response()) for client in (third, fifth, sixth, seventh)]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0].status for task in done] == [408]
        assert not answers[3].done()
        for client in (third, fifth, sixth, seventh):
            client.writer.write(rest)
        assert sorted([(await answer)[0].status for answer in answers]) == [200, 200, 200, 408]
        assert public._n_body_bytes == 0


async def test_connections_over_the_limit_take_the_place_of_the_longest_idle_or_are_refused() -> None:
    gate = Gate(b"", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    async with Rig(limits=Limits(n_connections=3)) as rig:
        await rig.engine(gate.reply)
        busy, silent, used = [await rig.client() for _ in range(3)]
        busy.post(CHAT)
        await gate.reached.wait()
        for client in (silent, used):
            await advance(1.0)
            assert (await client.get("/health").response())[0].status == 200
        for closed in (silent, used):
            fresh = await rig.client()
            assert await closed.is_closed()
            fresh.post(CHAT)
            await advance(0.1)
        status, error = await (await rig.client()).error()
        assert (status, error["code"]) == (503, "overloaded")
        gate.opened.set()
        assert (await busy.response())[0].status == 200


@pytest.mark.parametrize(
    ("addresses", "n_open"),
    [
        (("192.0.2.1",) * 9, 2),  # half of the limit
        (("192.0.2.1", "192.0.2.2") * 2, 4),
        ([f"2001:db8::{number}" for number in range(9)], 2),  # one client has a network of 64 bits
        ([f"2001:db8:0:{number}::1" for number in range(4)], 4),
        (("::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.1"), 2),
        *(((address,) * 9, 4) for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1")),  # a proxy on this machine
    ],
)
async def test_no_address_takes_the_places_of_others(
    addresses: Sequence[str], n_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(limits=Limits(n_connections=4)) as rig:
        clients = []
        for address in addresses:
            monkeypatch.setattr(VirtualSocket, "getpeername", lambda _, address=address: (address, 1))
            clients.append(await rig.client())
            await advance(0.1)
        assert len(rig.gateway.public._connections) == n_open
        for client in clients[:-n_open]:
            assert await client.is_closed()
        for client in clients[-n_open:]:
            assert (await client.get("/health").response())[0].status == 200
            client.writer.write(b"GET")  # it is not idle
        await advance(0.1)
        assert (await (await rig.client()).error())[0] == 503


async def test_a_full_table_of_files_is_not_the_replicas_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Any:
        errors.append(OSError(errno.EMFILE, "Too many open files"))
        raise errors[-1]

    errors: list[OSError] = []
    async with rig_with(echo) as (rig, _, client):
        with monkeypatch.context() as patch:
            patch.setattr(rig.gateway._context.pool, "connect", full)
            head, body, _ = await client.post(CHAT).response()
            assert (head.status, head.get(b"retry-after")) == (503, b"1")
            assert json.loads(body)["error"]["code"] == "overloaded"
        assert (await client.post(CHAT).response())[1] == CHAT
        with monkeypatch.context() as patch:
            server = rig.gateway.public._server
            assert server is not None
            patch.setattr(server, "_sock", SimpleNamespace(accept=full, fileno=server._sock.fileno))
            waiting = await rig.client()
            while len(errors) < 2:
                await advance(0.001)
        assert (await waiting.get("/health").response())[0].status == 200


def test_connections_fit_into_the_files_that_are_allowed() -> None:
    n_files = raise_file_limit()
    assert n_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert listener.fit_connections(Limits(), 1_000_000).n_connections == Limits().n_connections
    assert listener.fit_connections(Limits(), 1024).n_connections == 384
    assert listener.fit_connections(Limits(n_connections=10), 1024).n_connections == 10


async def test_times_that_ran_out_end_a_request() -> None:
    async with Rig(limits=Limits(head_s=5, body_s=5, total_s=50)) as rig:
        client, began_at = await rig.client(), loop().time()
        client.writer.write(b"POST /v1/x HTTP/1.1\r\n")
        assert (await client.error())[0] == 408
        assert loop().time() - began_at == 2 * listener.SWEEP_S
        slow, began_at = await rig.client(), loop().time()
        slow.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        # A body that drips a byte in time would go on for ever without a limit of the whole.
        while not slow.reader._buffer:  # type: ignore[attr-defined]
            slow.writer.write(b" ")
            await advance(4.0)
        assert 50 < loop().time() - began_at <= 50 + listener.SWEEP_S + 4
        assert (await slow.error())[0] == 408


SILENT, OFF = TimeoutError("no answer"), SilentMachineError("no connection")


@pytest.mark.parametrize(
    ("before", "problem", "silent_s", "state"),
    [
        pytest.param("busy", None, 0, "ready", id="it answers"),
        pytest.param("busy", UpstreamError("503"), 0, "stalled", id="a proxy's 503: dead at once, whatever it streams"),
        pytest.param("ready", SILENT, 3, "busy", id="silent"),
        pytest.param("busy", SILENT, 119, "busy", id="silent, and not yet for hung_s"),
        pytest.param("busy", SILENT, 120, "stalled", id="hung: its kernel takes connections"),
        pytest.param("stalled", SILENT, 1, "busy", id="given up, and a byte came"),
        pytest.param("starting", SILENT, 2, "busy", id="busy with others' requests when the gateway starts"),
        pytest.param("ready", OFF, 3, "busy", id="a lost packet"),
        pytest.param("busy", OFF, 6, "stalled", id="a machine that is off, or its network"),
        pytest.param("busy", OFF, 1, "busy", id="a full backlog, and its streams go on"),
        pytest.param("starting", OFF, 3, "starting", id="a machine that has not started"),
    ],
)
def test_what_a_probe_says_of_an_upstream(
    before: ReplicaState, problem: Exception | None, silent_s: float, state: str
) -> None:
    assert next_state(before, problem, silent_s, Upstream("http://gpu7:8000")) == state


async def test_an_upstream_is_busy_while_it_streams_and_hung_some_time_after_its_last_byte() -> None:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if seen.head.path == b"/health":
            probes.append(loop().time())
            await is_idle.wait()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
            return True
        is_idle.clear()
        writer.write(SSE_HEAD)
        for _ in range(20 if seen.body == STREAM else 0):
            await advance(7.0)
            writer.write(chunk(EVENTS[0]))
        writer.write(chunk(EVENTS[2]) + b"0\r\n\r\n")
        return True

    async def changes_to(state: str) -> float:
        """The seconds until all workers say so."""
        began_at = loop().time()
        for rig in (own, other):
            await rig.until(lambda view: [row["announcement"]["state"] for row in view["replicas"]] == [state])
        return loop().time() - began_at

    probes: list[float] = []
    is_idle, status = asyncio.Event(), 503
    is_idle.set()
    async with started(reply) as engine:
        upstreams = (Upstream(engine.url, hung_s=30.0),)
        async with Rig(upstreams=upstreams) as own, Rig(upstreams=upstreams) as other:
            own.gateway._context.tell_workers = other.gateway._api.apply  # as of one gateway
            await changes_to("starting")
            stream = (await own.client()).post(STREAM)  # held until the engine is well
            status = 200
            assert await changes_to("busy") < 6.5
            for rig in (own, other):
                asked = (await rig.client()).post(CHAT)
                assert (await asked.response())[1] == EVENTS[2], "it is the only one"
            n_probes, now = len(probes), loop().time()
            assert 100 < await changes_to("stalled") < 190
            assert (await stream.response())[1] == EVENTS[0] * 20 + EVENTS[2]
            n_requests = sum(seen.head.method == b"POST" for seen in engine.seen)
            assert n_requests == 3, "none is sent twice"
            assert len(probes) - n_probes < 2 * (loop().time() - now) / 30 + 2, "they would fill its backlog"
            is_idle.set()
            assert await changes_to("ready") < 4.5
            await engine.stop()
            assert await changes_to("stalled") < 2.5


@pytest.mark.parametrize("pieces", [1, 0])
async def test_a_hundred_pipelined_requests_are_answered_in_order(pieces: int) -> None:
    async with rig_with(echo) as (rig, engine, client):
        bodies = [b'{"model":"demo","n":%d}' % number for number in range(100)]
        for body in bodies:
            client.post(body)
            if pieces:
                await asyncio.sleep(0)
        client.get("/health")
        assert [(await client.response())[1] for _ in bodies] == bodies == [seen.body for seen in engine.seen]
        assert (await client.response())[1] == b'{"status":"ok","ready_replicas":1}'
        # The next request may begin before the connection of the one before it is given back.
        assert engine.n_connections <= 2
        assert (await rig.view())["in_flight_total"] == 0
