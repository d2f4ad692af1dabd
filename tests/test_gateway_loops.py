"""The gateway's main paths on real loopback sockets, on both event loops; all else is tested on a virtual one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from pathlib import Path

import pytest
import uvloop
from gateway_rig import CHAT, EVENTS, SSE_HEAD, STREAM, Client, Engine, Gate, Rig, chunk, echo, rig_with, say, started

from penstock.errors import UserError
from penstock.gateway.connections.listener import open_socket
from penstock.spec.gateway import Traces
from penstock.wire.http1 import END

pytestmark = pytest.mark.processes
on_uvloop = pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop], ids=["uvloop"])
TRACE_ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE_ID}-{PARENT}-01"


async def test_bodies_streams_and_ends_pass_on_real_sockets(loop_factory: object) -> None:
    large = b'{"model":"demo","x":"' + b"y" * 3_000_000 + b'"}'
    async with rig_with(echo, drain_s=5.0) as (rig, engine, client):
        assert (await client.post(large).response())[1] == large
        gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1]) + chunk(EVENTS[2]) + b"0\r\n\r\n")
        engine.reply = gate.reply
        client.post(STREAM)
        assert [(await client.event()).status, await client.event()] == [200, EVENTS[0]]
        gate.opened.set()
        body = b""
        while (event := await client.event()) is not END:
            body += event
        assert body == EVENTS[1] + EVENTS[2]
        leaving = Gate(SSE_HEAD, b"")
        engine.reply = leaving.reply
        other = (await rig.client()).post(STREAM)
        await leaving.reached.wait()
        other.writer.transport.abort()
        await leaving.peer_left.wait()
        engine.reply = say(SSE_HEAD + chunk(EVENTS[0]), then_close=True)
        _, body, is_whole = await client.post(STREAM).response()
        assert (is_whole, body.endswith(EVENTS[2])) == (True, True)
        assert b'"source":"gateway"' in body[len(EVENTS[0]) :]
        cut = await rig.client()
        engine.reply = say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", then_close=True)
        cut.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        with pytest.raises(ConnectionResetError):
            await cut.reader.read()
        slow = Gate(SSE_HEAD, chunk(EVENTS[2]) + b"0\r\n\r\n")
        engine.reply = slow.reply
        client.post(STREAM)
        await slow.reached.wait()
        port = rig.gateway.public.port
        with pytest.raises(UserError, match="the port is taken"):
            open_socket(("127.0.0.1", port))
        stopping = asyncio.ensure_future(rig.stop())
        slow.opened.set()
        assert (await client.response())[1:] == (EVENTS[2], True)
        await stopping
    # The gateway closed first, so its ends of connections are in TIME_WAIT now.
    open_socket(("127.0.0.1", port)).close()


@on_uvloop
async def test_clients_and_engines_on_unix_sockets(loop_factory: object, tmp_path: Path) -> None:
    listen, behind = tmp_path / "gateway.sock", tmp_path / "engine.sock"
    engine = Engine(echo)
    engine.server = await asyncio.start_unix_server(engine._serve, behind)
    async with Rig(listen=f"unix:{listen}", admin=f"unix:{tmp_path}/admin.sock") as rig:
        assert listen.stat().st_mode & 0o777 == 0o600
        admin = Client(*await asyncio.open_unix_connection(tmp_path / "admin.sock"))
        body = b'{"replica":"0","model":"demo","state":"ready","lease_s":30,"url":"unix:%s"}' % bytes(behind)
        admin.post(body, "/admin/announce", "Authorization: Bearer admin-token\r\n")
        assert (await admin.response())[0].status == 200
        client = Client(*await asyncio.open_unix_connection(listen))
        head, got, _ = await client.post(CHAT).response()
        assert (head.status, got) == (200, CHAT)
        assert engine.seen[0].head.get(b"host") == b"localhost"
        for each in (client, admin):
            each.writer.close()
        assert rig.gateway.public.port == 0
    await engine.stop()


@on_uvloop
async def test_tls_clients_speak_http_11_and_others_are_let_go(
    loop_factory: object, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    trusts = ssl.create_default_context(cafile=str(cert))
    trusts.set_alpn_protocols(["h2", "http/1.1"])
    async with Rig(tls_cert=str(cert), tls_key=str(key)) as rig:
        await rig.engine(echo)
        streams = await asyncio.open_connection(
            "127.0.0.1", rig.gateway.public.port, ssl=trusts, server_hostname="localhost"
        )
        client = Client(*streams)
        assert streams[1].get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        for _ in range(2):
            assert (await client.post(CHAT).response())[1] == CHAT
        client.writer.write(b"GET / HTTP/1.1\nHost: a\n\n")
        assert (await client.response())[0].status == 400
        client.writer.transport.abort()
        plain = (await rig.client()).get("/health")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await plain.reader.read(100)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", rig.gateway.public.port, ssl=old)


@on_uvloop
async def test_the_engine_gets_our_span_as_its_parent(loop_factory: object, tmp_path: Path) -> None:
    log, reply = tmp_path / "access.log", say(SSE_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n")
    async with (
        started(say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) as collector,
        rig_with(reply, traces=Traces(collector.url), access_log=str(log)) as (rig, engine, client),
    ):
        state = "tracestate: a=1\r\n"
        for more in (f"{VALID}\r\n{state}user-agent: me\r\n", f"broken\r\n{state}", f"{VALID[:-1]}0\r\n"):
            await client.post(STREAM, headers=f"traceparent: {more}").response()
        await rig.stop()
        bodies = [json.loads(seen.body) for seen in collector.seen]
        spans = [span for body in bodies for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]
        got = [seen.head.get(b"traceparent").decode() for seen in engine.seen]
        assert [seen.head.get(b"tracestate") for seen in engine.seen] == [b"a=1", None, None]
        assert [sum(name == b"traceparent" for name, _ in seen.head.headers) for seen in engine.seen] == [1, 1, 1]
        assert [value.split("-")[1] == TRACE_ID for value in got] == [True, False, True]
        assert got[0].split("-")[2] != PARENT
        assert got[2].endswith("-00")
        assert [f"00-{span['traceId']}-{span['spanId']}-01" for span in spans] == got[:2]
        assert [span["parentSpanId"] for span in spans] == [PARENT, ""]
        assert collector.seen[0].head.path == b"/v1/traces"
        lines = [json.loads(line) for line in log.open()]
        assert [line["trace_id"] for line in lines] == [value.split("-")[1] for value in got]
        assert (lines[0]["user_agent"], lines[0]["client"], lines[0]["outcome"]) == ("me", "127.0.0.1", "complete")
