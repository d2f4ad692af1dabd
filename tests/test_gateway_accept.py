"""What the gateway takes and refuses, what passes through it, and what it answers itself."""

from __future__ import annotations

import asyncio
import json
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from gateway_rig import (
    CHAT,
    EVENTS,
    KEY,
    KEY_HASH,
    SSE_HEAD,
    TOKEN,
    Client,
    Gate,
    Rig,
    Seen,
    chunk,
    echo,
    rig_with,
    say,
    started,
)
from virtual_loop import advance, loop

from penstock import __version__
from penstock.errors import UserError
from penstock.gateway.config import ServedModel
from penstock.gateway.connections.engine import IDLE_S
from penstock.spec.gateway import Upstream
from penstock.wire.announcement import Progress, engine_key, scrape_key
from penstock.wire.http1 import END
from penstock.wire.model_list import ModelCard, ReplicaCount, read_models


async def _again(client: Client) -> Client:
    """A new connection to the same gateway."""
    return Client(*await asyncio.open_connection(*client.writer.get_extra_info("peername")))


@pytest.mark.parametrize("n_bytes", [None, 1])
async def test_stream_passes_unchanged_and_unheld(n_bytes: int | None) -> None:
    loop().bytes_at_once = n_bytes
    gate = Gate(SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1]) + chunk(EVENTS[2]) + b"0\r\n\r\n")
    async with rig_with(gate.reply) as (_, _, client):
        client.post(CHAT)
        head = await client.event()
        assert head.get(b"content-type") == b"text/event-stream"
        assert head.get(b"x-penstock-replica") == b"0"
        assert head.get(b"server-timing").startswith(b"gateway;dur=")
        # The engine has not sent the rest yet: this is here because nothing is held back.
        body = b""
        while len(body) < len(EVENTS[0]):
            body += await client.event()
        assert (body, gate.opened.is_set()) == (EVENTS[0], False)
        gate.opened.set()
        while (event := await client.event()) is not END:
            body += event
        assert body == b"".join(EVENTS)


async def test_request_and_response_bodies_pass_byte_for_byte() -> None:
    headers = "X-Custom: 1\r\nX-Request-Id: mine\r\nConnection: x-custom\r\n"
    async with rig_with(echo) as (_, engine, client):
        for body in (
            b'{"model":"demo","tools":[{"type":"function","function":{"name":"f","parameters":{}}}], "n":1}',
            b'{ "model" : "alias",\n "response_format":{"type":"json_schema","json_schema":{"a":"b"}}, "x": 1.10e3 }',
            '{"messages":[{"role":"user","content":"größe \\u00e9 \U0001f600"}],"stream":null,"model":null}'.encode(),
            b'{"model":"demo","x":"' + b"y" * 300_000 + b'"}',
        ):
            head, got, is_whole = await client.post(body, "/v1/chat/completions?a=b", headers).response()
            assert (head.status, got, is_whole) == (200, body, True)
            assert (head.get(b"x-engine"), head.get(b"x-request-id")) == (b"fake", b"mine")
            seen = engine.seen[-1]
            assert (seen.head.target, seen.body) == (b"/v1/chat/completions?a=b", body)
            assert (seen.head.get(b"x-request-id"), seen.head.get(b"x-custom")) == (b"mine", None)
            assert seen.head.get(b"host") == f"127.0.0.1:{engine.port}".encode()


async def test_bodies_of_unknown_length_are_made_whole() -> None:
    async with rig_with(say(b"HTTP/1.0 200 OK\r\n\r\nabc", then_close=True)) as (_, _, client):
        assert (await client.post(CHAT).response())[1:] == (b"abc", True)
    async with rig_with(echo) as (_, engine, client):
        loop().bytes_at_once = 1
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.writer.write(head + chunk(CHAT[:7]) + chunk(CHAT[7:]) + b"0\r\n\r\n")
        assert (await client.response())[1] == CHAT
        assert engine.seen[0].head.get(b"content-length") == b"%d" % len(CHAT)
        assert engine.seen[0].head.get(b"transfer-encoding") is None


async def test_connections_are_used_again_and_100_continue_goes_to_clients_that_wait_for_it() -> None:
    async with rig_with(echo) as (_, engine, client):
        for idle_s, n_connections in ((0.0, 1), (IDLE_S, 1), (IDLE_S + 0.001, 2), (0.0, 2)):
            await advance(idle_s)
            await client.post(CHAT).response()
            assert engine.n_connections == n_connections
        head = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        client.writer.write(head)
        assert [(await client.event()).status, await client.event()] == [100, END]
        client.writer.write(b"{}")
        assert (await client.response())[1] == b"{}"
        client.writer.write(head + b"{}")
        assert (await client.response())[0].status == 200


async def test_http_10_client_gets_a_plain_body_and_the_end_or_a_reset_when_it_is_cut() -> None:
    request = b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"
    async with rig_with(say(SSE_HEAD + chunk(EVENTS[0]) + b"0\r\n\r\n")) as (rig, engine, client):
        client.writer.write(request)
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert (b"transfer-encoding" in head, body) == (False, EVENTS[0])
        data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n"
        engine.reply, other = say(data, then_close=True), await rig.client()
        other.writer.write(request)
        with pytest.raises(ConnectionResetError):
            await other.reader.read()


async def test_slow_reader_stops_the_engine_instead_of_filling_memory() -> None:
    n_pieces, piece, n_written = 512, b"x" * 65536, 0

    async def flood(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonlocal n_written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (n_pieces * len(piece)))
        for _ in range(n_pieces):
            writer.write(piece)
            await writer.drain()
            n_written += 1
        return True

    async with rig_with(flood) as (_, _, client):
        client.post(b"{}", "/v1/x")
        await advance(20.0)
        # Each connection keeps 64 KiB in the kernel, and so much, or twice, with the one who writes or reads.
        assert n_written == 9
        assert len((await client.response())[1]) == n_pieces * len(piece)
        assert n_written == n_pieces


async def test_unroutable_requests_get_openai_errors() -> None:
    models = (ServedModel("demo"), ServedModel("other"))
    async with Rig(models=models) as rig:
        client = await rig.client()
        for body, *expected in (
            (b'{"model":"nope"}', 404, "model_not_found", "model"),
            (b"{}", 400, "model_missing", "model"),
            *((body, 400, "invalid_body", None) for body in (b'{"model":', b'{"model":1}', b"[]")),
        ):
            status, error = await client.post(body).error()
            assert [status, error["code"], error["param"]] == expected
        for path in ("/v1", "/v1/../sleep", "/sleep", "/admin/replicas", "/admin/board", "/v1//x", "/v1/%2e%2e/sleep"):
            assert (await client.get(path).error())[0] == 404
        head, _, _ = await client.get("/v1/chat/completions").response()
        assert (head.status, head.get(b"allow")) == (405, b"POST")


@pytest.mark.parametrize(
    "header", [f"Authorization: Bearer {KEY}", f"authorization: bearer {KEY}", f"x-api-key: {KEY}"]
)
async def test_key_is_asked_for_and_not_passed_on(header: str) -> None:
    async with rig_with(echo, auth="keys", key_hashes=(KEY_HASH,)) as (_, engine, client):
        wrongs = ("", f"{header}x\r\n", f"Authorization: Basic {KEY}\r\n", f"Authorization: {KEY}\r\n")
        for path in ("/v1/models", "/metrics", "/nothing"):
            for wrong in (*wrongs, f"Authorization: Bearer {KEY_HASH}\r\n", "Authorization: Bearer \r\n"):
                status, error = await client.get(path, wrong).error()
                assert (status, error["code"]) == (401, "invalid_api_key")
        assert (await client.get("/health").response())[0].status == 200
        assert (await client.post(CHAT).error())[0] == 401
        assert engine.seen == []
        assert (await client.post(CHAT, headers=f"{header}\r\n").response())[0].status == 200
        assert (engine.seen[0].head.get(b"authorization"), engine.seen[0].head.get(b"x-api-key")) == (None, None)


async def test_every_route_answers_below_the_path_prefix_too() -> None:
    async with rig_with(echo, path_prefix="/penstock/a") as (_, engine, client):
        for prefix in ("/penstock/a", ""):
            assert json.loads((await client.get(f"{prefix}/health?x").response())[1])["status"] == "ok"
            assert json.loads((await client.get(f"{prefix}/v1/models/demo").response())[1])["id"] == "demo"
            assert (await client.post(CHAT, f"{prefix}/v1/chat/completions?a=b").response())[1] == CHAT
            assert engine.seen[-1].head.target == b"/v1/chat/completions?a=b"
        for path in ("/penstock/a", "/penstock/a?x"):
            assert (await client.get(path).response())[0].get(b"content-type") == b"text/html; charset=utf-8"
        for path in ("/penstock/ab/health", "/penstock/a/../health", "/penstock/a//v1/x"):
            assert (await client.get(path).error())[0] == 404


async def test_upstream_gets_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text("sk-file\n")
    monkeypatch.setenv("ENGINE_KEY", "sk-env")
    async with started(echo) as first, started(echo) as second:
        upstreams = (Upstream(first.url, key_file=str(key_file)), Upstream(second.url, key_env="ENGINE_KEY"))
        async with Rig(upstreams=upstreams) as rig:
            await rig.until(lambda view: [row["announcement"]["state"] for row in view["replicas"]] == ["ready"] * 2)
            client = await rig.client()
            for _ in range(4):
                assert (await client.post(CHAT, headers="Authorization: Bearer sk-client\r\n").response())[1] == CHAT
            for engine, key in ((first, b"Bearer sk-file"), (second, b"Bearer sk-env")):
                asked = [seen.head for seen in engine.seen if seen.head.method == b"POST"]
                assert {head.get(b"authorization") for head in asked} == {key}
    monkeypatch.delenv("ENGINE_KEY")
    with pytest.raises(UserError, match="variable ENGINE_KEY is not set"):
        Rig(upstreams=upstreams)


async def test_health_models_and_metrics() -> None:
    async with rig_with(echo) as (_, _, client):
        await client.post(CHAT).response()
        assert (await client.get("/health").response())[1] == b'{"status":"ok","ready_replicas":1}'
        (model,) = json.loads((await client.get("/v1/models").response())[1])["data"]
        assert json.loads((await client.get("/v1/models/alias").response())[1]) == model
        assert isinstance(model.pop("created"), int)
        facts = {"id": "demo", "object": "model", "owned_by": "penstock", "aliases": ["alias"], "state": "ready"}
        assert model == facts | {"replicas": {"ready": 1, "total": 1}}
        lines = set((await client.metrics()).splitlines())
        assert 'penstock_requests_total{model="demo",outcome="complete"} 1' in lines
        assert 'penstock_responses_total{model="demo",replica="0",code="200"} 1' in lines
        assert 'penstock_requests_in_flight{model="demo",replica="0"} 0' in lines
        assert 'penstock_replicas_ready{model="demo"} 1' in lines
        assert (await client.get("/v1/models/nope").error())[0] == 404


async def test_a_model_row_tells_length_replicas_and_how_its_first_replica_loads() -> None:
    async with Rig() as rig:
        progress = {"stage": "weights", "shards_done": 17, "shards_total": 30, "fraction": 0.5}
        more = {"max_model_len": 8192, "input_modalities": ["text", "image"]}
        await rig.announce("0", None, "loading", progress=progress, **more)
        await rig.announce("1", None, "queued", max_model_len=4096)
        client = await rig.client()
        body = json.loads((await client.get("/v1/models").response())[1])
        (card,) = read_models(body, "the gateway")
        assert card == ModelCard(
            *("demo", "loading", ("alias",), 4096, ReplicaCount(0, 2), Progress("weights", 17, 30, fraction=0.5)),
            input_modalities=("text", "image"),
        )
        await rig.engine(echo, "1")
        (row,) = json.loads((await client.get("/v1/models").response())[1])["data"]
        assert (row["state"], row["replicas"], "progress" in row) == ("ready", {"ready": 1, "total": 2}, False)


async def test_preflight_and_origin() -> None:
    local, named, foreign = "http://localhost:3000", "https://chat.example", "https://evil.example"
    for named_origins, allowed in (((), [local]), ((named,), [local, named])):
        async with rig_with(say(SSE_HEAD + b"0\r\n\r\n"), allowed_origins=named_origins) as (_, _, client):
            for origin in (local, named, foreign):
                header, expected = f"Origin: {origin}\r\n", origin.encode() if origin in allowed else None
                head, _, _ = await client.get("/v1/chat/completions", header, "OPTIONS").response()
                assert (head.status, head.get(b"access-control-allow-origin")) == (204, expected)
                assert head.get(b"access-control-allow-methods") == b"GET, HEAD, POST, DELETE, OPTIONS"
                head, _, _ = await client.post(CHAT, headers=header).response()
                assert (head.status, head.get(b"access-control-allow-origin")) == (200 if expected else 403, expected)


async def test_without_keys_no_other_sites_page_may_use_the_engines() -> None:
    other_site = "Content-Type: text/plain\r\nSec-Fetch-Site: cross-site\r\n"
    cases = {
        "Origin: https://evil.example\r\n": 403,
        "Origin: null\r\n": 403,
        other_site: 403,
        other_site + "Origin: https://chat.example\r\n": 200,
        "Content-Type: text/plain\r\nSec-Fetch-Site: same-site\r\nOrigin: http://localhost:3000\r\n": 200,
        "Content-Type: text/plain\r\n": 200,  # no browser
    }
    hosts = {"evil.example": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example:80": 403, "10.0.0.1": 403}
    hosts |= dict.fromkeys(("localhost:1", "127.0.0.1:80", "[::1]:80", "app.localhost", "chat.example:9300"), 200)
    async with rig_with(echo, allowed_origins=("https://chat.example",)) as (rig, engine, client):
        for headers, status in cases.items():
            assert (await client.post(CHAT, headers=headers).response())[0].status == status, headers
        n_served = len(engine.seen)
        for host, status in hosts.items():
            for request in (b"GET /v1/models HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n"):
                client = await rig.client()
                client.writer.write(request + f"Host: {host}\r\n\r\n".encode() + b"{}" * (request[:1] == b"P"))
                head, body, _ = await client.response()
                assert head.status == status, host
                assert status == 200 or json.loads(body)["error"]["code"] == "site_not_allowed"
        assert len(engine.seen) == n_served + 5
    async with rig_with(echo, auth="keys", key_hashes=(KEY_HASH,)) as (_, _, client):
        headers = f"Authorization: Bearer {KEY}\r\nOrigin: https://evil.example\r\n"
        head, _, _ = await client.post(CHAT, headers=headers).response()
        assert (head.status, head.get(b"access-control-allow-origin")) == (200, b"*")


async def test_a_gateway_that_is_its_own_upstream_is_noticed() -> None:
    async with Rig() as rig, Rig(hold_s=4.0) as other:
        await rig.announce("0", f"http://127.0.0.1:{other.gateway.public.port}")
        await other.announce("0", f"http://127.0.0.1:{rig.gateway.public.port}")
        client = await rig.client()
        status, error = await client.post(CHAT).error()
        assert (status, error["code"]) == (508, "loop_detected")
        assert rig.gateway._context.counters.n_requests + other.gateway._context.counters.n_requests == 2


async def test_engines_hear_nothing_of_proxies_and_secrets_and_clients_nothing_of_engines() -> None:
    async def redirect(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        host = seen.head.get(b"host") or b""
        lines = (
            b"Set-Cookie: a=b\r\nX-Penstock-Key: k\r\nProxy-Authenticate: Basic\r\nLocation: http://%s/v1/x\r\n" % host
        )
        writer.write(b"HTTP/1.1 307 X\r\nContent-Length: 0\r\n%s\r\n" % lines)
        return True

    names = ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Whatever", "Forwarded", "X-Real-IP", "X-Private"]
    names += ["Cookie", "COOKIE", "Authorization", "Proxy-Authorization", "X-Api-Key", "Api-Key", "X-Penstock-Whatever"]
    lines = "".join(f"{name}: 1\r\n" for name in names) + "Connection: keep-alive\r\nConnection: X-Private\r\n"
    async with rig_with(echo) as (_, engine, client):
        assert (await client.post(CHAT, headers=lines).response())[0].status == 200
        passed = {name for name, _ in engine.seen[0].head.headers}
        assert passed == {b"host", b"via", b"x-request-id", b"content-length"}
        engine.reply = redirect
        head, _, _ = await client.post(b"{}", "/v1/x/").response()
        assert (head.status, head.get(b"location")) == (307, b"/v1/x")
        own = {b"date", b"x-request-id", b"x-penstock-replica", b"server-timing", b"content-length"}
        assert {name for name, _ in head.headers} == own | {b"location"}
    async with Rig(upstreams=(Upstream(engine.url),)) as rig:
        await rig.until(lambda view: bool(view["replicas"]))
        client = await rig.client()
        assert str(engine.port) not in await client.metrics()


async def test_routes_that_administer_engines_are_closed_unless_the_file_opens_them() -> None:
    async with rig_with(echo, engine_routes=("/v1/load_lora_adapter", "/sleep")) as (_, engine, client):
        for path in ("/v1/unload_lora_adapter", "/v1/reset_prefix_cache", "/v1/sleep", "/v1/start_profile"):
            status, error = await client.post(b"{}", path).error()
            assert (status, error["code"]) == (403, "route_closed")
            client = await _again(client)
        assert (await client.get("/wake_up").error())[0] == 404
        for path, body in (("/v1/load_lora_adapter", b'{"lora_name":"a"}'), ("/sleep?level=1", b"")):
            assert (await client.post(body, path).response())[0].status == 200
            assert (engine.seen[-1].head.target, engine.seen[-1].body) == (path.encode(), body)


async def test_every_answer_has_a_date_an_id_and_a_time_and_head_has_no_body() -> None:
    async with rig_with(say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as (_, engine, client):
        own = [("GET", "/health", 200), ("GET", "/nope", 404), ("GET", "/v1/models", 200), ("OPTIONS", "/v1/x", 204)]
        for method, path, status in (("GET", "/v1/x", 200), *own, ("DELETE", "/v1/completions", 405)):
            head, _, _ = await client.get(path, "X-Request-Id: mine\r\n", method).response()
            assert head.status == status
            assert parsedate_to_datetime((head.get(b"date") or b"").decode()).timestamp() == loop().world.unix()
            if method != "OPTIONS" and path != "/health":
                assert (head.get(b"server-timing") or b"").startswith(b"gateway;dur=")
                assert head.get(b"x-request-id") == b"mine"
                assert head.get(b"x-penstock-replica") == (b"0" if path == "/v1/x" else b"none")
        engine.reply = dated = say(b"HTTP/1.1 200 OK\r\nDate: mine\r\nContent-Length: 2\r\n\r\nok")
        head, _, _ = await client.get("/v1/x").response()
        assert [value for name, value in head.headers if name == b"date"] == [b"mine"]
        stream = say(SSE_HEAD + chunk(b"ok") + b"0\r\n\r\n")
        for path, reply in (("/v1/x", dated), ("/v1/x", stream), ("/health", stream)):
            engine.reply = reply
            client.get(path, method="HEAD").get("/health", "Connection: close\r\n")
            first, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
            assert first.startswith(b"HTTP/1.1 200 OK") and rest.startswith(b"HTTP/1.1 200 OK")
            assert path != "/health" or b"content-length: 34" in first
            client = await _again(client)


async def test_people_and_probes_find_what_they_look_for() -> None:
    async with rig_with(echo, auth="keys", key_hashes=(KEY_HASH,)) as (_, _, client):
        head, body, _ = await client.get("/").response()
        assert (head.status, head.get(b"content-type"), b"/v1" in body) == (200, b"text/html; charset=utf-8", True)
        for method in ("GET", "POST"):
            assert (await client.get("/ping", method=method).response())[0].status == 200
        assert json.loads((await client.get("/version").response())[1]) == {"version": __version__}
        assert (await client.get("/load").error())[0] == 401
        assert (await client.get("/load", f"x-api-key: {KEY}\r\n").response())[1] == b'{"server_load":0}'


async def test_alias_of_an_upstream_reaches_the_engine_as_the_models_name() -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--b--\r\n'
    upload = ("/v1/audio/transcriptions", "Content-Type: multipart/form-data; boundary=b\r\n")
    async with started(echo) as engine, Rig(upstreams=(Upstream(engine.url),)) as rig:
        await rig.until(lambda view: [row["announcement"]["state"] for row in view["replicas"]] == ["ready"])
        client = await rig.client()
        body = b'{"model":"alias","stream":false,"x":[1.10e3,{"model":"alias"}]}'
        assert (await client.post(body).response())[1] == body.replace(b"alias", b"demo", 1)
        assert (await client.post(form % b"alias", *upload).response())[1] == form % b"demo"
        assert (await (await rig.client()).post(form % b"nope", *upload).error())[0] == 404
        assert (await client.post(CHAT).response())[1] == CHAT


@pytest.mark.parametrize(
    ("models", "max_model_len"),
    [
        (b'{"data":[{"id":"lora","max_model_len":5},{"id":"m","max_model_len":8192}]}', 8192),
        (b'{"data":[{"id":"other","max_model_len":512}]}', 512),
        (b'{"data":[]}', None),
        (b"<html>", None),
    ],
)
async def test_an_upstream_is_asked_for_its_longest_request(models: bytes, max_model_len: int | None) -> None:
    answer = say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
    async with (
        started(answer) as engine,
        Rig(upstreams=(Upstream(engine.url, "m"),), models=(ServedModel("m"),)) as rig,
    ):
        while not any(seen.head.target == b"/v1/models" for seen in engine.seen):
            await advance(0.001)
        await rig.until(lambda view: view["replicas"][0]["announcement"].get("max_model_len") == max_model_len)
        body = json.loads((await (await rig.client()).get("/v1/models").response())[1])
        assert body["data"][0].get("max_model_len") == max_model_len


async def test_admin_calls_need_the_token() -> None:
    async with Rig() as rig:
        assert await rig.admin("/admin/health") == (200, {"ok": True})
        for path in ("/admin/health", "/admin/replicas", "/admin/board", "/nothing"):
            for wrong in ("wrong", engine_key(TOKEN), scrape_key(engine_key(TOKEN))):
                assert (await rig.admin(path, token=wrong))[0] == 401
        assert (await rig.admin("/nothing"))[0] == 404
        assert (await rig.admin("/admin/drain"))[0] == 405
        assert (await rig.admin("/admin/drain", {"name": "0"}))[0] == 400
        status, answer = await rig.announce("0", "http://127.0.0.1:1", model="nope")
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert (await rig.announce("0", None, "no such state"))[0] == 400
