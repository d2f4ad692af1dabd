"""The gateway of a real deployment: what the file says of it, keys and usage; asked as a client would."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path

import pytest
from launching import PROMPT, Place, ask, call, kill, now, pid_of
from waiting import until

from penstock import paths
from penstock.hardware.network import free_port
from penstock.wire.answers import HttpError

pytestmark = pytest.mark.processes


def test_the_file_reaches_what_the_gateway_can_do(
    place: Place, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, cert_key = certificate
    upstream_key = tmp_path / "engine.key"
    upstream_key.write_text("sk-upstream")
    upstream_key.chmod(0o600)
    upstreams = [{"url": f"http://127.0.0.1:{free_port('127.0.0.1')}", "key_file": str(upstream_key)}]
    settings = {"policy": "round-robin", "max_in_flight": 3, "allowed_origins": ["https://chat.example"]}
    bounds = {"queue": {"n_requests": 5, "key_share": 1.0}, "limits": {"body_bytes": 2000}}
    tls = {"host": "localhost", "auth": "keys", "tls_cert": str(cert), "tls_key": str(cert_key)}
    file = place.write(gateway={**tls, **settings, **bounds, "path_prefix": "/penstock", "upstreams": upstreams})
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    started = call("up", file, "--json")
    assert started.code == 0, started
    run, key = place.run(), started.events[0]["key"]
    port = int(run.listen.rpartition(":")[2])
    assert run.url == f"https://localhost:{port}/penstock"
    assert f"{run.url}/v1" in call("status", "one").out
    kept = json.loads(run.gateway_config.read_text("utf-8"))
    assert {name: kept[name] for name in settings} == settings
    assert kept["queue"] == {"n_requests": 5, "body_bytes": 2**30, "key_share": 1.0}
    assert kept["upstreams"][0]["url"] == upstreams[0]["url"] and "sk-upstream" not in json.dumps(kept)

    def request(method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("localhost", port, context=ssl.create_default_context(), timeout=20)
        headers = {"x-api-key": key, "origin": "https://chat.example", "content-type": "application/json"}
        connection.request(method, f"/penstock/v1/{path}", body, headers)
        return connection.getresponse()

    assert request("GET", "models").getheader("access-control-allow-origin") == "https://chat.example"
    assert request("POST", "completions", b"x" * 2001).status == 413
    answer = request("POST", "completions", b'{"model": "one", "prompt": "a", "max_tokens": 1}')
    assert (answer.status, answer.getheader("x-penstock-replica")) == (200, "0"), "the upstream does not answer"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert call("chat", "one", "--message", PROMPT, "--json").code == 0


def n_requests(key: str) -> int:
    lines = call("usage", "--by", "key", "--json").json
    return sum(line["requests"] for line in lines if line["key"] == key)


def is_answered(place: Place, key: str | None) -> bool:
    try:
        ask(place.run(), key=key)
    except HttpError as error:
        assert error.status == 401
        return False
    return True


def test_keys_are_made_for_a_running_deployment_and_outlive_it(place: Place) -> None:
    gateway = {"auth": "keys", "price": {"input": 1.0, "output": 1000.0}}
    file = place.write("one", gateway=gateway)
    first = call("up", file, "--json").events[-1]["key"]
    assert first.startswith("sk-")
    assert call("up", file, "--json").events[-1]["key"] is None, "it is shown once"
    kept = [path for path in paths.home().rglob("*") if path.is_file() and first.encode() in path.read_bytes()]
    assert kept == [], "its hash is kept, and no more"
    assert not is_answered(place, None) and not is_answered(place, "sk-wrong")
    assert [key["name"] for key in call("keys", "list", "--json").json] == ["first"]
    key = call("keys", "create", "--name", "alice", "--budget", "100").out.strip()
    until(lambda: is_answered(place, key), "the gateway sees the new key")
    ask(place.run(), key=first)
    assert call("chat", "one", "--message", PROMPT).code == 0  # by the owner, without a key
    until(lambda: n_requests("alice") == 1 and n_requests("first") == 1, "both requests are in the ledger")
    (line,) = (line for line in call("usage", "--by", "key,model", "--json").json if line["key"] == "alice")
    assert (line["model"], line["output_tokens"], line["estimates"]) == ("one", 8, 0)
    assert line["cost_usd"] == pytest.approx((line["prompt_tokens"] + 8000) / 1e6)

    kill(pid_of(place.run(), "gateway"))
    until(lambda: now(place.run()).gateway.n_restarts == 1 and now(place.run()).phase == "ready", "it is back")
    assert is_answered(place, key)
    revoked = call("keys", "revoke", "alice", "--deployment", "one")
    assert revoked.code == 0, revoked
    until(lambda: not is_answered(place, key), "the gateway sees that the key is revoked")

    second = call("keys", "create", "bob").out.strip()
    assert call("down", "one").code == 0
    again = call("up", file, "--json").events[-1]["key"]
    assert [is_answered(place, key) for key in (second, again, first)] == [True, True, False]
    assert n_requests("alice") >= 2
    assert call("keys", "revoke", "first").code == 0
    until(lambda: not is_answered(place, again), "the key that `up` printed is revoked")
