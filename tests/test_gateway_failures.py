"""Every way in which the gateway, and an engine behind it, fail a chat: their real bytes, and what a person is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import CHAT, SSE_HEAD, STREAM, Client, Gate, Rig, chunk, hang_up, rig_with, say
from golden_files import table
from store_rig import NOW, Store
from virtual_loop import advance

from penstock.chat.failures import Failure, failure_of
from penstock.errors import PenstockError
from penstock.gateway.accounting.key_store import Limits
from penstock.gateway.config import ServedModel
from penstock.spec.gateway import QueueBounds
from penstock.wire.answers import HttpError, StreamReader, http_error
from penstock.wire.http1 import END

VLLM = json.loads((Path(__file__).parent / "golden" / "vllm-0.32.0" / "errors.json").read_text("utf-8"))
TOO_LONG = json.dumps(VLLM["chat too long"]["body"]).encode()
# vllm/v1/engine/exceptions.py, as `engine_died.sse` has it.
DIED = b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
DIED += b'"type": "InternalServerError", "param": null, "code": 500}}'
HALF = b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n'


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def failure(client: Client, head: Any = None) -> Failure:
    """What a person is told about the answer that this client gets, read as both chat clients read it."""
    head = head or await client.event()
    name, request_id = (head.get(b"x-penstock-replica") or b"none").decode(), head.get(b"x-request-id").decode()
    body, reader = b"", StreamReader(name, request_id)
    try:
        while (event := await client.event()) not in (END, None):
            body += event
            if head.status < 400:
                list(reader.feed(event, 1.0))
        if head.status < 400:
            list(reader.feed(b"", 1.0))
            reader.reply(1.0)
        after = (head.get(b"retry-after") or b"").decode()
        raise http_error("http://gateway", head.status, "No", body, after, request_id)
    except PenstockError as error:
        if isinstance(error, HttpError):
            assert error.request_id == request_id
        return failure_of(error, has_text=bool(reader.answer.text))


def key(place: str, **limits: Any) -> str:
    with Store(place) as store:
        return f"Authorization: Bearer {store.keys.create('ann', Limits(**limits), NOW)[1]}\r\n"


async def test_what_a_key_may_not(tmp_path: Path) -> None:
    place, models = f"{tmp_path}/keys.db", (ServedModel("demo"), ServedModel("other"))
    header = key(place, rpm=3, models=("demo",))
    async with rig_with(say(answer(400, TOO_LONG)), store=place, auth="keys", models=models) as (rig, _, client):
        told = await failure(client.post(STREAM, headers="Authorization: Bearer sk-wrong\r\n"))
        assert (told.kind, "Use another key" in told.text) == ("key", True)
        told = await failure((await rig.client()).post(STREAM.replace(b"demo", b"other"), headers=header))
        assert (told.kind, told.text) == ("model", "This key may not use the model 'other'. Choose another model.")
        told = await failure((await rig.client()).post(STREAM.replace(b"demo", b"nope"), headers=header))
        assert (told.kind, told.text) == ("model", "The model 'nope' does not exist. Choose another model.")
        assert (await failure((await rig.client()).post(STREAM, headers=header))).kind == "too_long"
        told = await failure((await rig.client()).post(STREAM, headers=header))
        assert (told.kind, told.retry_after_s) == ("overload", 20.0)
        assert told.text.startswith("Key 'ann' has used its 3 requests a minute")


async def test_a_full_queue_and_a_model_without_replicas() -> None:
    async with Rig(queue=QueueBounds(body_bytes=len(STREAM) - 1)) as rig:
        told = await failure((await rig.client()).post(STREAM))
        assert (told.kind, told.retry_after_s) == ("overload", 5.0)
        assert told.text == "Too many requests wait for model 'demo' already. Try again in 5 s."
    async with Rig(hold_s=0.0) as rig:
        await rig.announce("0", None, "loading", progress={"stage": "weights", "eta_s": 40})
        told = await failure((await rig.client()).post(STREAM))
        assert (told.kind, told.retry_after_s) == ("overload", 40.0)
        status, error = await (await rig.client()).post(STREAM).error()
        assert (status, error["code"], (await rig.view())["waiting"]) == (503, "no_replica", 0)
    async with Rig(hold_s=1.0) as rig:
        told = await failure((await rig.client()).post(STREAM, headers="x-penstock-progress: 1\r\n"))
        assert told.kind == "overload"
        assert told.text == "Model 'demo' has no replica that takes requests now. Try again in a moment."


async def test_a_gateway_that_took_anothers_place_holds_requests_until_its_first_replica_is_ready_or_it_ends() -> None:
    changes: dict[str, Any] = {"hold_s": 1.0, "holds_while_loading": True}
    async with Rig(**changes) as rig:
        await rig.announce("0", None, "loading")
        client = (await rig.client()).post(CHAT)
        await advance(90.0)
        await rig.engine(say(answer(200, b"{}")))
        assert (await client.response())[0].status == 200
        await advance(2.0)
        await rig.announce("0", None, "loading")
        assert (await (await rig.client()).post(CHAT).error())[0] == 503
    async with Rig(**changes) as rig:
        await rig.announce("0", None, "failed")
        client = (await rig.client()).post(CHAT)
        await advance(90.0)
        await rig.stop()
        assert (await client.error())[1]["code"] == "no_replica"


ENGINE = [
    (answer(400, TOO_LONG), "too_long", "This is too long for the model, which takes 512 tokens together with its"),
    *((answer(status, body.encode()), *told) for status, body, *told in table("chat/engine_refusals.yaml")),
    (SSE_HEAD + chunk(HALF) + chunk(b"data: %s\n\ndata: [DONE]\n\n" % DIED) + b"0\r\n\r\n", "lost", "The answer broke"),
    (SSE_HEAD + chunk(HALF), "lost", "The answer broke off (the engine closed the connection). What was said stays"),
    (SSE_HEAD + chunk(HALF) + b"0\r\n\r\n", "lost", "The answer broke off. What was said stays"),
]


@pytest.mark.parametrize(("reply", "kind", "text"), ENGINE)
async def test_what_an_engine_refuses_or_breaks_off(reply: bytes, kind: str, text: str) -> None:
    async with rig_with(say(reply, then_close=True)) as (_, _, client):
        told = await failure(client.post(STREAM))
    assert (told.kind, told.text[: len(text)]) == (kind, text)
    async with Rig() as rig:  # after the client heard comments
        client = (await rig.client()).post(STREAM, headers="x-penstock-progress: 1\r\n")
        head = await client.event()
        assert head.status == 200
        await rig.engine(say(reply, then_close=True))
        told = await failure(client, head)
    assert (told.kind, told.text[: len(text)]) == (kind, text)


async def test_a_lost_engine_before_the_first_byte_and_a_lost_gateway() -> None:
    async with rig_with(hang_up) as (_, _, client):
        assert (await failure(client.post(STREAM))).kind == "lost"
    gate = Gate(SSE_HEAD + chunk(HALF), b"")
    async with rig_with(gate.reply) as (rig, _, client):
        client.post(STREAM)
        await gate.reached.wait()
        told, _ = await asyncio.gather(failure(client), rig.stop())
        assert (told.kind, told.text[:20]) == ("lost", "The answer broke off")
