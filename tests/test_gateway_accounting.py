"""Keys, quotas and the ledger through a running gateway: what a client sees, and what is written."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import CHAT, KEY, KEY_HASH, SSE_HEAD, Gate, Rig, Seen, chunk, hang_up, rig_with, say
from gateway_rig import TOKEN as ADMIN
from store_rig import NOW, Store, ledger_at, record, row, writer_of
from virtual_loop import advance, loop

from penstock.gateway.accounting import ledger, store_writer
from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.accounting.store_writer import StoreWriter
from penstock.gateway.accounting.usage_store import FOLD_ROWS, UsageStore, month_of
from penstock.gateway.config import ServedModel
from penstock.spec.gateway import Limits as ClientLimits
from penstock.spec.gateway import Price
from penstock.wire.announcement import engine_key, scrape_key

STREAM = b'{"model":"demo","stream":true,"messages":[{"role":"user","content":"hello"}]}'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,"total_tokens":43}}\n\n'
DONE = b"data: [DONE]\n\n"
BODY = b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
MODELS = (ServedModel("demo", ("alias",)), ServedModel("other"))
PRICES = {"demo": Price(1000.0, 2000.0)}


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


def make_key(place: str, name: str = "alice", **limits: Any) -> str:
    with Store(place) as store:
        return store.keys.create(name, Limits(**limits), NOW)[1]


def bearer(secret: str) -> str:
    return f"Authorization: Bearer {secret}\r\n"


def revoke_elsewhere(place: str, name: str) -> None:
    """In the store, as another process does."""
    with Store(place) as store:
        store.keys.revoke(name, NOW)


def ledger_of(rig: Rig) -> ledger.Ledger:
    assert rig.gateway.accounting.ledger is not None
    return rig.gateway.accounting.ledger


async def rows(rig: Rig, n_rows: int = 0) -> list[dict[str, Any]]:
    """The ledger on the disk, once it has so many rows and all that happened so far."""
    with sqlite3.connect(writer_of(ledger_of(rig))._database.place) as connection:
        connection.row_factory = sqlite3.Row
        while True:
            await ledger_of(rig).call(lambda store: None)
            kept = [dict(line) for line in connection.execute("SELECT * FROM requests ORDER BY number")]
            if len(kept) >= n_rows:
                return kept
            await advance(0.001)


async def until_failing(rig: Rig, is_failing: bool) -> None:
    while writer_of(ledger_of(rig)).is_failing != is_failing:
        await advance(0.002)


async def statuses(rig: Rig, secret: str, n_requests: int, body: bytes = CHAT) -> list[int]:
    """A connection each: a refused body closes its own."""
    answers = []
    for _ in range(n_requests):
        client = await rig.client()
        answers.append((await client.post(body, headers=bearer(secret)).response())[0].status)
    return answers


async def revoke(rig: Rig, name: str) -> None:
    admin = await rig.client(rig.gateway.admin.port)
    assert (await admin.get(f"/admin/keys/{name}", bearer("admin-token"), method="DELETE").response())[0].status == 200


@pytest.mark.parametrize("n_bytes", [None, 1])
async def test_stream_is_counted_and_the_client_gets_what_it_asked_for(place: str, n_bytes: int | None) -> None:
    loop().bytes_at_once = n_bytes
    events = [ROLE, TOKEN, TOKEN, TOKEN, USAGE, DONE]
    reply = say(SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")
    async with rig_with(reply, store=place, prices=PRICES) as (rig, engine, client):
        client.post(STREAM, headers="Accept-Encoding: gzip\r\nX-Request-Id: mine\r\n")
        _, body, is_whole = await client.response()
        assert (body, is_whole) == (b"".join(events).replace(USAGE, b""), True)
        assert json.loads(engine.seen[0].body)["stream_options"] == {"include_usage": True}
        assert engine.seen[0].head.get(b"accept-encoding") is None
        (line,) = await rows(rig, 1)
        assert (line["prompt_tokens"], line["output_tokens"], line["is_estimate"]) == (40, 3, 0)
        assert (line["state"], line["status"], line["request_id"]) == ("complete", 200, "mine")
        assert (line["model"], line["replica"], line["key_id"]) == ("demo", "0", "")
        assert line["cost_usd"] == pytest.approx(0.046)
        assert 0 <= line["ttft_ms"] <= line["duration_ms"]
        # One that asks for its usage gets it, and its bytes are not touched.
        asked = STREAM.replace(b'"stream":true', b'"stream":true,"stream_options":{"include_usage":true}')
        assert (await client.post(asked).response())[1] == b"".join(events)
        assert engine.seen[1].body == asked
        assert [line["output_tokens"] for line in await rows(rig, 2)] == [3, 3]


async def test_a_stream_that_could_only_be_estimated_is_refused(place: str) -> None:
    async with rig_with(say(ANSWER), store=place) as (rig, engine, client):
        options = (b'{"include_usage":1}', b'{"x":"%s"}' % (b"y" * 2000), b'{},"stream\\u005foptions":null')
        streams = (b"1", b'"true"', b'false,"str\\u0065am":true', b'true,"stream\\u005foptions":null')
        for fields in (*streams, *(b'true,"stream_options":' + text for text in options)):
            for path in ("/v1/chat/completions", "/v1/completions"):
                status, error = await client.post(b'{"model":"demo","stream":%s}' % fields, path).error()
                assert (status, error["code"]) == (400, "invalid_body"), fields
        assert engine.seen == []
        assert await rows(rig) == []


async def test_tokens_are_counted_however_their_chunks_come(place: str) -> None:
    async def reply(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(SSE_HEAD + chunk(ROLE))
        for n_tokens in (1, 1, 1, 3, 1, 1):  # those that come alone pass by a shorter way
            await advance(0.002)
            writer.write(chunk(TOKEN) * n_tokens)
        await advance(0.002)
        writer.write(chunk(DONE) + b"0\r\n\r\n")
        return True

    async with rig_with(reply, store=place) as (rig, _, client):
        assert (await client.post(STREAM).response())[1] == ROLE + TOKEN * 8 + DONE
        (line,) = await rows(rig, 1)
        assert (line["output_tokens"], line["is_estimate"]) == (8, 1)


async def test_answer_in_one_piece_is_counted_and_written_when_the_gateway_stops(place: str) -> None:
    async with rig_with(say(ANSWER), store=place) as (rig, engine, client):
        assert (await client.post(CHAT).response())[1] == BODY
        assert engine.seen[0].body == CHAT
        await rig.stop()
    with Store(place) as store:
        sql = "SELECT prompt_tokens, cached_tokens, output_tokens, ttft_ms, cost_usd, state FROM requests"
        assert store.database.all(sql) == [(40, 8, 3, None, None, "complete")]


@pytest.mark.parametrize("n_tokens", [0, 1, 7])
async def test_client_that_hangs_up_pays_for_what_was_generated(place: str, n_tokens: int) -> None:
    gate = Gate(SSE_HEAD + chunk(ROLE) + chunk(TOKEN) * n_tokens, b"")
    async with rig_with(gate.reply, store=place) as (rig, _, client):
        client.post(STREAM)
        await client.event()
        received = b""
        while len(received) < len(ROLE) + n_tokens * len(TOKEN):
            received += await client.event()
        client.writer.transport.abort()
        await gate.peer_left.wait()
        (line,) = await rows(rig, 1)
        assert (line["state"], line["output_tokens"], line["is_estimate"]) == ("client-cancelled", n_tokens, 1)
        assert line["prompt_tokens"] > 0


@pytest.mark.parametrize("way", ["client", "deadline", "lost", "lost twice", "shutdown", "failed", "queue"])
async def test_request_that_ends_before_its_answer_pays_for_what_engines_read(place: str, way: str) -> None:
    secret = make_key(place, tpm=20_000)
    headers = bearer(secret) + ("X-Request-Timeout: 1\r\n" if way == "deadline" else "")
    failure, gate = b"HTTP/1.1 503 Down\r\nContent-Length: 2\r\n\r\n{}", Gate(b"", b"")
    charged = (0, 0, 0, 0.0) if way in ("failed", "queue") else (5000, 0, 1, 5.0)
    async with Rig(store=place, auth="keys", prices=PRICES) as rig:
        if way in ("lost", "lost twice", "failed"):
            await rig.engine(say(failure) if way == "failed" else hang_up, "a")
        if way not in ("failed", "queue"):
            await rig.engine(hang_up if way == "lost twice" else gate.reply, "b")
        client = (await rig.client()).post(STREAM.ljust(20_000), headers=headers)
        if way in ("deadline", "lost twice"):
            assert (await client.response())[0].status == (504 if way == "deadline" else 502)
        else:
            await (gate.reached.wait() if charged[0] else advance(0.01))
        if way == "shutdown":
            await rig.stop()
        else:
            client.writer.transport.abort()
            await rows(rig, 1)
            text = await (await rig.client()).metrics(bearer(ADMIN))
            assert f'key_tokens_total{{key="alice",model="demo",kind="prompt"}} {charged[0]}' in text
            (quota,) = rig.gateway.accounting.keyring.quotas().values()
            assert (b"x-ratelimit-remaining-tokens", b"%d" % (20_000 - charged[0])) in quota.headers(0.0)
    with Store(place) as store:
        sql = "SELECT prompt_tokens, output_tokens, is_estimate, cost_usd FROM requests"
        assert store.database.all(sql) == [charged]


async def test_every_end_has_its_state(place: str) -> None:
    broken = say(SSE_HEAD + chunk(ROLE) + chunk(TOKEN), then_close=True)
    refused = say(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
    error = say(SSE_HEAD + chunk(b'data: {"error": {"message": "oom"}}\n\n' + DONE) + b"0\r\n\r\n")
    replies = [
        *((broken, "engine-failed", 200, 1), (refused, "refused", 400, 0), (error, "engine-failed", 200, 0)),
        (hang_up, "engine-failed", 502, 0),
    ]
    async with Rig(store=place, hold_s=0.0) as rig:
        client = await rig.client()
        for number, (reply, *expected) in enumerate(replies, 1):
            await rig.engine(reply)
            await client.post(STREAM).response()
            line = (await rows(rig, number))[-1]
            assert [line["state"], line["status"], line["output_tokens"]] == expected
        await rig.admin("/admin/forget", {"replica": "0"})
        assert (await client.post(STREAM).error())[0] == 503
        line = (await rows(rig, 5))[-1]
        assert (line["state"], line["status"], line["prompt_tokens"], line["replica"]) == ("refused", 503, 0, "")


async def test_key_sees_its_models_only(place: str) -> None:
    secret, other = make_key(place, models=("alias",)), make_key(place, "bob")
    settings: dict[str, Any] = {"auth": "keys", "models": MODELS, "access_log": f"{place}.log"}
    async with rig_with(say(ANSWER), store=place, **settings) as (rig, _, client):
        for model, status in (("demo", 200), ("alias", 200), ("other", 403), ("absent", 404)):
            assert await statuses(rig, secret, 1, b'{"model":"%s"}' % model.encode()) == [status]
        assert await statuses(rig, "sk-wrong", 1) == [401]
        for key, names in ((secret, ["demo"]), (other, ["demo", "other"])):
            _, body, _ = await client.get("/v1/models", bearer(key)).response()
            assert [model["id"] for model in json.loads(body)["data"]] == names
        assert (await client.get("/v1/models/other", bearer(secret)).error())[1]["code"] == "model_not_allowed"
        kept = await rows(rig, 3)
        assert (kept[2]["status"], kept[2]["state"]) == (403, "refused")
        assert len({line["key_id"] for line in kept}) == 1
        logged = [json.loads(line) for line in Path(f"{place}.log").read_text().splitlines()]
        assert [(line["status"], line["key"]) for line in logged] == [(200, "alice"), (200, "alice"), (403, "alice")]


@pytest.mark.parametrize(
    ("limits", "code", "header"),
    [
        ({"rpm": 2}, "rate_limit_exceeded", b"x-ratelimit-limit-requests"),
        ({"tpm": 600}, "rate_limit_exceeded", b"x-ratelimit-limit-tokens"),
        ({"budget_usd": 0.09}, "insufficient_quota", None),
    ],
)
async def test_limits_answer_429(place: str, limits: dict[str, Any], code: str, header: bytes | None) -> None:
    secret = make_key(place, **limits)
    async with rig_with(say(ANSWER), store=place, auth="keys", prices=PRICES) as (rig, _, client):
        body = b'{"model":"demo","max_tokens":510}'
        assert await statuses(rig, secret, 2, body) == [200, 200]
        head, answer, _ = await client.post(body, headers=bearer(secret)).response()
        assert (head.status, json.loads(answer)["error"]["code"]) == (429, code)
        assert 1 <= int(head.get(b"retry-after") or b"") <= (60 if header else 31 * 86400)
        assert header is None or int(head.get(header) or b"") > 0
        assert (await rows(rig, 3))[-1]["status"] == 429
        assert "penstock_quota_refusals_total{limit=" in await client.metrics(bearer(ADMIN))


async def test_metrics_are_open_to_admin_token_and_scrape_key_which_opens_nothing_else(place: str) -> None:
    make_key(place)
    scrape_secret = scrape_key(engine_key(ADMIN))
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, engine, client):
        for listener in (rig.gateway.public, rig.gateway.admin):
            for key in (ADMIN, scrape_secret):
                for header in (bearer(key), f"x-api-key: {key}\r\n"):
                    assert "penstock_replicas_ready" in await (await rig.client(listener.port)).metrics(header)
        head, _, _ = await client.get("/metrics", bearer(ADMIN), "POST").response()
        assert (head.status, head.get(b"allow")) == (405, b"GET, HEAD")
        for path in ("/v1/models", "/load", "/metrics/", "/v1/metrics"):
            assert (await client.get(path, bearer(scrape_secret)).error())[0] == 401, path
        assert (await client.post(CHAT, headers=bearer(scrape_secret)).error())[0] == 401
        assert engine.seen == []
    async with rig_with(say(ANSWER)) as (rig, _, client):  # without keys: on the public address alone
        assert "penstock_replicas_ready" in await client.metrics()
        assert (await (await rig.client(rig.gateway.admin.port)).get("/metrics").error())[0] == 401


@pytest.mark.parametrize("path", ["/metrics", "/metrics/engines", "/dashboard/live"])
@pytest.mark.parametrize("address", ["public", "admin"])
async def test_a_clients_key_does_not_show_the_use_of_others(place: str, path: str, address: str) -> None:
    secret = make_key(place)
    cases = ((bearer(secret), 403, "monitoring_not_allowed"), (bearer("x"), 401, "invalid_api_key"))
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, _, _):
        for headers, *refusal in (*cases, ("", 401, "invalid_api_key")):
            for length in ("", "Content-Length: 2\r\n"):  # whole, and with a body that is still to come
                client = await rig.client(getattr(rig.gateway, address).port)
                status, error = await client.get(path, headers + length).error()
                assert [status, error["code"]] == refusal and "scrape key" in error["message"]
        assert rig.gateway.accounting.n_unknown_keys == 4


async def test_refused_requests_count_towards_rpm_but_for_those_that_a_limit_refused(place: str) -> None:
    secret, post = make_key(place, rpm=10, models=("demo",)), "POST /v1/completions"
    refused = [
        *((408, post, b"", 1), (400, post, b"{", 0), (400, post, b"[1,2]", 0), (413, post, b"", 9999)),
        *((403, post, b'{"model":"other"}', 0), (404, post, b'{"model":"none"}', 0), (404, "GET /nothing", b"", 0)),
        *((405, "DELETE /v1/completions", b"", 0), (403, "GET /metrics", b"", 0), (404, "GET /v1/models/x", b"", 0)),
        (400, post, b"}", 0),
    ]
    async with Rig(auth="keys", store=place, models=MODELS, limits=ClientLimits(body_bytes=1000, body_s=1.0)) as rig:
        await rig.engine(say(ANSWER))
        (quota,) = rig.gateway.accounting.keyring.quotas().values()
        for number, (status, start, body, n_missing) in enumerate(refused, 1):
            client = await rig.client()
            head = f"{start} HTTP/1.1\r\nHost: x\r\n{bearer(secret)}Content-Length: {len(body) + n_missing}\r\n\r\n"
            client.writer.write(head.encode() + body)
            assert (await client.response())[0].status == status
            assert quota.headers(0.0)[1][1] == b"%d" % max(0, 10 - number)
        assert await statuses(rig, secret, 20) == [429] * 20
        await advance(6.0)
        assert await statuses(rig, secret, 2) == [200, 429]


async def test_concurrency_is_given_back_however_a_request_ends(place: str) -> None:
    secret = make_key(place, concurrency=1)
    gate = Gate(SSE_HEAD + chunk(ROLE), b"0\r\n\r\n")
    async with rig_with(gate.reply, store=place, auth="keys") as (rig, _, client):
        client.post(STREAM, headers=bearer(secret))
        await client.event()
        assert await statuses(rig, secret, 1) == [429]
        client.writer.transport.abort()
        await rows(rig, 2)
        gate.opened.set()
        assert await statuses(rig, secret, 1, STREAM) == [200]
        # One that leaves before its request was begun leaves nothing behind.
        for _ in range(5):
            gone = (await rig.client()).post(STREAM, headers=bearer(secret))
            gone.writer.close()
        await rig.until(lambda view: not any(row["in_flight"] for row in view["replicas"]))
        await advance(0.01)
        assert await statuses(rig, secret, 1, STREAM) == [200]


async def test_concurrency_counts_bodies_that_are_arriving(place: str) -> None:
    secret = make_key(place, concurrency=1)
    async with rig_with(say(ANSWER), auth="keys", store=place) as (rig, _, client):
        start = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: 2\r\n\r\n" % bearer(secret).encode()
        quota = next(iter(rig.gateway.accounting.keyring.quotas().values()))
        client.writer.write(start)
        while not quota.n_bodies:
            await advance(0.001)
        other = await rig.client()
        other.writer.write(start)
        status, error = await other.error()
        assert (status, error["code"]) == (429, "concurrency_exceeded")
        client.writer.write(b"{}")
        assert (await client.response())[0].status == 200
        assert quota.n_bodies == 0


async def test_keys_are_made_seen_rotated_and_revoked_by_the_admin_address(place: str) -> None:
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, _, _):
        status, key = await rig.admin("/admin/keys", {"name": "carol", "rpm": 100})
        assert (status, key["name"], key["rpm"], key["revoked_at"]) == (200, "carol", 100, None)
        assert key["endings"] == [f"sk-...{key['key'][-4:]}"]
        assert await statuses(rig, key["key"], 1) == [200]
        shown = json.dumps((await rig.admin("/admin/keys"))[1])
        assert "carol" in shown
        assert key["key"] not in shown
        assert hashlib.sha256(key["key"].encode()).hexdigest() not in shown
        _, rotated = await rig.admin("/admin/keys/rotate", {"key": "carol", "grace_s": 60})
        assert [await statuses(rig, secret["key"], 1) for secret in (key, rotated)] == [[200], [200]]
        _, last = await rig.admin("/admin/keys/rotate", {"key": "carol"})
        assert [(await statuses(rig, secret["key"], 1))[0] for secret in (key, rotated, last)] == [401, 401, 200]
        await revoke(rig, "carol")
        assert await statuses(rig, last["key"], 1) == [401]
        for wrong in ({"name": ""}, {"name": "x", "rpm": 0}, {"name": "x", "expires_s": -1}, {"nam": "x"}):
            assert (await rig.admin("/admin/keys", wrong))[0] == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/other"])
async def test_key_that_ends_while_the_body_comes_is_refused(place: str, path: str) -> None:
    secret = make_key(place, models=("demo",), rpm=100)
    async with rig_with(say(ANSWER), store=place, auth="keys", models=MODELS) as (rig, engine, client):
        assert await statuses(rig, secret, 1) == [200]
        method = "POST" if "completions" in path else "GET"
        headers = f"Content-Length: {len(CHAT)}\r\nExpect: 100-continue\r\n"
        client.get(path, headers + bearer(secret), method)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await revoke(rig, "alice")
        client.writer.write(CHAT)
        status, error = await client.error()
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert rig.gateway.accounting.n_unknown_keys == 1
        assert [line["status"] for line in await rows(rig, 1)] == [200]
        assert len(engine.seen) == 1


async def test_key_expires_and_the_configs_own_key_stays_valid(place: str) -> None:
    secret = make_key(place, expires_at=NOW + 60)
    async with rig_with(say(ANSWER), store=place, auth="keys", key_hashes=(KEY_HASH,)) as (rig, _, _):
        assert await statuses(rig, secret, 1) == [200]
        await advance(60)
        assert await statuses(rig, secret, 1) == [401]
        assert await statuses(rig, KEY, 1) == [200]
        assert (await rows(rig, 2))[-1]["key_id"] == "first"


async def test_keys_and_spending_of_another_process_are_seen(place: str) -> None:
    facts: dict[str, Any] = {"store": place, "auth": "keys", "prices": PRICES}
    async with rig_with(say(ANSWER), **facts) as (rig, _, _), rig_with(say(ANSWER), **facts) as (other, _, _):
        secret = make_key(place, budget_usd=0.05)
        while await statuses(other, secret, 1) != [200]:
            await advance(0.005)
        assert await statuses(other, secret, 1) == [200]
        while await statuses(rig, secret, 1) != [429]:
            await advance(0.005)


def fail(*_: object) -> None:
    raise sqlite3.OperationalError("broken")


FAULTS: dict[str, Callable[[StoreWriter], tuple[object, str, Any]]] = {
    "the store is away": lambda writer: (writer._database, "refresh", fail),
    "keys cannot be read": lambda writer: (writer._keys, "all", fail),
    "the revision cannot be read": lambda writer: (writer._keys, "revision", fail),
    "the thread does nothing": lambda writer: (writer, "turn", lambda *_: None),
    "the loop gets no message": lambda writer: (writer, "tell", lambda _: None),
    "the loop cannot take it": lambda writer: (writer, "tell", partial(loop().call_soon_threadsafe, fail)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_revoked_key_ends_whatever_fails(
    place: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = make_key(place)
    facts: dict[str, Any] = {"store": place, "auth": "keys", "key_hashes": (KEY_HASH,), "keys_stale_s": 30.0}
    async with rig_with(say(ANSWER), **facts) as (rig, _, _):
        assert await statuses(rig, secret, 1) == [200]
        with monkeypatch.context() as patch:
            patch.setattr(*FAULTS[fault](writer_of(ledger_of(rig))))
            revoke_elsewhere(place, "alice")
            await advance(12)
            assert await statuses(rig, secret, 1) == [200]
            assert "store: its keys are 1" in caplog.text and rig.gateway.accounting.keys_age_s > 10
            await advance(20)
            assert await statuses(rig, secret, 1) + await statuses(rig, KEY, 1) == [503, 200], (
                "those of the config stay"
            )
        await advance(2)
        assert await statuses(rig, secret, 1) == [401], "what was lost comes again"
        assert "store: its keys are read again" in caplog.text and rig.gateway.accounting.keys_age_s < 2


async def test_locked_store_stops_no_request_and_loses_no_row(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.accounting.store_writer.BUSY_S", 0.01)
    async with rig_with(say(ANSWER), store=place) as (rig, _, client):
        other = sqlite3.connect(place, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(5):
            assert (await client.post(CHAT).response())[0].status == 200
        await until_failing(rig, True)
        text = await client.metrics()
        assert "penstock_store_up 0\n" in text
        assert "penstock_ledger_rows_waiting 5\n" in text
        assert (await rig.admin("/admin/keys", {"name": "x"}))[0] == 503
        other.close()
        assert len(await rows(rig, 5)) == 5
        assert not writer_of(ledger_of(rig)).is_failing


async def test_full_disk_stops_no_request_and_no_revocation(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "MAX_WAITING", 150)
    secret, revoked = make_key(place), make_key(place, "bob")
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, _, client):
        kept, writer, n_sent = ledger_of(rig), writer_of(ledger_of(rig)), 0
        # SQLite's own way to a full disk: the file may not grow.
        n_pages = await kept.call(lambda database: database.all("PRAGMA page_count")[0][0])
        await kept.call(lambda database: database.all(f"PRAGMA max_page_count = {n_pages}"))
        while not (writer.is_failing and writer.n_lost > 0):
            client.post(CHAT, headers=f"X-Request-Id: {'z' * 128}\r\n{bearer(secret)}")
            assert (await client.response())[0].status == 200
            await advance(0.1)
            n_sent += 1
        revoke_elsewhere(place, "bob")
        while await statuses(rig, revoked, 1) != [401]:
            await advance(0.002)
            n_sent += 1
        assert writer.is_failing
        await kept.call(lambda database: database.all("PRAGMA max_page_count = 100000"))
        while kept.n_waiting:
            await advance(0.002)
        assert writer.n_written + writer.n_lost == n_sent
        assert len(await rows(rig)) == writer.n_written


@pytest.mark.parametrize("count", ["9" * 30, "-5", "9" * 4000, "1e400"])
async def test_absurd_usage_and_limits_stop_neither_the_ledger_nor_keys(place: str, count: str) -> None:
    secret, small = make_key(place, tpm=10**5, budget_usd=1e3), make_key(place, "small", tpm=1000)
    usage = b'{"usage":{"prompt_tokens":1,"completion_tokens":%s}}' % count.encode()
    deep = b'{"choices":[%s],"usage":{"prompt_tokens":1}}' % (b"[" * 3000 + b"]" * 3000)
    events = chunk(b"data: %s\n\n" % deep) + chunk(b"data: %s\n\n" % usage) + chunk(DONE) + b"0\r\n\r\n"
    async with rig_with(say(SSE_HEAD + events), store=place, auth="keys", prices=PRICES) as (rig, engine, client):
        assert (await client.post(STREAM, headers=bearer(secret)).response())[2]
        (line,) = await rows(rig, 1)
        assert 0 <= line["output_tokens"] < 1000
        assert await statuses(rig, secret, 1, STREAM) == [200], "it cost neither its budget nor its tokens"
        engine.reply = say(ANSWER)
        asked = b'{"model":"demo","n":%d,"max_tokens":%s}' % (1 if count == "-5" else 1024, b"9" * 400)
        assert await statuses(rig, small, 2, asked) == [200, 429]
        await rows(rig, 4)
        assert not writer_of(ledger_of(rig)).is_failing
        revoke_elsewhere(place, "alice")
        while await statuses(rig, secret, 1) != [401]:
            await advance(0.002)


async def test_store_that_is_replaced_is_opened_again(place: str, tmp_path: Path) -> None:
    secret, new = make_key(place), make_key(str(tmp_path / "new.sqlite"), "bob")
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, _, _):
        assert await statuses(rig, secret, 2) == [200, 200]
        await rows(rig, 2)
        for file in tmp_path.glob("store.sqlite*"):
            file.rename(tmp_path / f"old-{file.name}")
        await until_failing(rig, True)
        assert await statuses(rig, secret, 1) == [200]  # the keys are the last known ones
        assert (await rig.admin("/admin/keys", {"name": "x"}))[0] == 503
        assert not Path(place).exists()
        (tmp_path / "new.sqlite").rename(place)
        await until_failing(rig, False)
        assert [await statuses(rig, key, 1) for key in (secret, new)] == [[401], [200]]
        assert len(await rows(rig, 2)) == 2  # one waited


@pytest.mark.parametrize("part", [0.0, 0.5])
async def test_store_that_is_cut_short_is_noticed(place: str, tmp_path: Path, part: float) -> None:
    secret = make_key(place)
    async with rig_with(say(ANSWER), store=place, auth="keys") as (rig, _, client):
        assert await statuses(rig, secret, 1) == [200]
        await rows(rig, 1)
        await ledger_of(rig).call(lambda database: database.compact())  # which makes the file smaller too
        await advance(0.03)
        assert not writer_of(ledger_of(rig)).is_failing
        os.truncate(place, int(Path(place).stat().st_size * part))
        await until_failing(rig, True)
        assert await statuses(rig, secret, 1) == [200]
        assert "penstock_store_up 0\n" in await client.metrics(bearer(ADMIN))


async def test_busy_turn_is_folded_and_a_calm_one_unfolds_it(place: str) -> None:
    kept = ledger_at(place)
    for _ in range(2 * FOLD_ROWS):
        kept.add(record())
    kept._turn()
    other = sqlite3.connect(place)
    counts = "SELECT (SELECT count(*) FROM requests), (SELECT count(*) FROM folded_requests)"
    assert other.execute(counts).fetchone() == (0, 1)
    kept.start(lambda news: None)
    while other.execute(counts).fetchone() != (2 * FOLD_ROWS, 0):
        await advance(0.002)
    other.close()
    await kept.stop()


async def test_gateway_prunes_old_rows_and_a_budget_stays_spent(place: str) -> None:
    secret = make_key(place, budget_usd=0.0005)
    with Store(place) as store:
        # Requests of this month that cost too much, so old that they are pruned.
        key_id = store.keys.find("alice").id
        old = [row(number, at=86400.0 * 3, key_id=key_id, model="demo", cost_usd=1.0) for number in (1, 2)]
        store.usage.add_rows("old", old)
        store.database.execute("UPDATE spend SET month = ?", (month_of(NOW),))
    async with rig_with(say(ANSWER), store=place, auth="keys", ledger_days=30) as (rig, _, client):
        assert (await client.post(CHAT, headers=bearer(secret)).error())[1]["code"] == "insufficient_quota"
        while len(await rows(rig)) != 1:
            await advance(0.002)
        usage = await ledger_of(rig).call(lambda database: UsageStore(database).usage(("day", "state")))
        assert [(line.group[1], line.n_requests) for line in usage] == [("complete", 2), ("refused", 1)]
        assert usage[0].group[0] == "1970-01-04"
        assert (await client.post(CHAT, headers=bearer(secret)).error())[1]["code"] == "insufficient_quota"
