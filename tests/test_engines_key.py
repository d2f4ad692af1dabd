"""Engines that listen beyond loopback ask for a key on every path, and the gateway brings it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_rig import CHAT, TOKEN, echo, rig_with

from penstock.engines import KEY_VARIABLE
from penstock.engines.vllm.key_middleware import RequireKey
from penstock.wire.announcement import engine_key


async def asked(scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What the app sends for a request with these headers; 204 from the app behind the key."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})

    async def receive() -> Any:
        raise AssertionError("nothing is read of a stranger")

    async def send(message: Any) -> None:
        sent.append(message)

    await RequireKey(app)(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"authorization", b"Bearer k1")], 204),
        ([(b"authorization", b"Bearer k2")], 401),
        ([(b"authorization", b"bearer k1")], 401),
        ([(b"authorization", b"Bearer k1"), (b"authorization", b"Bearer k1")], 401),
        ([(b"x-api-key", b"k1")], 401),
        ([], 401),
    ],
)
def test_vllm_asks_everybody_on_every_path(
    monkeypatch: pytest.MonkeyPatch, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    for path in ("/v1/completions", "/invocations", "/metrics", "/health"):
        sent = asyncio.run(asked({"type": "http", "path": path, "headers": headers}))
        assert sent[0]["status"] == status, path


def test_a_websocket_without_the_key_is_closed_and_what_is_no_request_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    sent = asyncio.run(asked({"type": "websocket", "path": "/v1/realtime", "headers": []}))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert asyncio.run(asked({"type": "lifespan"}))[0]["status"] == 204


@pytest.mark.parametrize(("needs_key", "key"), [(True, engine_key(TOKEN)), (False, "clients-own")])
def test_the_gateway_brings_the_key_in_place_of_the_clients_own(needs_key: bool, key: str) -> None:
    async def talk() -> None:
        async with rig_with(echo, engines_need_key=needs_key) as (_, engine, client):
            client.post(CHAT, headers="Authorization: Bearer clients-own\r\n")
            head, _, _ = await client.response()
            assert head.status == 200
            given = [value for name, value in engine.seen[0].head.headers if name == b"authorization"]
            assert given == [f"Bearer {key}".encode()]

    asyncio.run(asyncio.wait_for(talk(), 10))
