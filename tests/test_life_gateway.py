"""What the deployment file says of the gateway reaches it: one deployment with all of it, asked as a client would."""

from __future__ import annotations

import http.client
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PROMPT, Place, call

from penstock import run_folder

pytestmark = pytest.mark.processes


class Upstream(http.server.BaseHTTPRequestHandler):
    """An engine that penstock did not start; it keeps the keys that it was sent."""

    keys: list[str | None]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"ok")

    def do_POST(self) -> None:
        self.keys.append(self.headers["authorization"])
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[tuple[str, list[str | None]]]:
    """(URL, the Authorization headers it got)."""
    Upstream.keys = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", Upstream.keys
        server.shutdown()


def test_the_file_reaches_what_the_gateway_can_do(
    place: Place,
    certificate: tuple[Path, Path],
    upstream: tuple[str, list[str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cert, cert_key = certificate
    (tmp_path / "engine.key").write_text("sk-upstream")
    (tmp_path / "engine.key").chmod(0o600)
    url, upstream_keys = upstream
    settings = {
        "policy": "round-robin",
        "max_in_flight": 3,
        "queue": {"n_requests": 5, "key_share": 1.0},
        "limits": {"body_bytes": 2000},
        "allowed_origins": ["https://chat.example"],
        "path_prefix": "/penstock",
    }
    tls = {"host": "localhost", "auth": "keys", "tls_cert": str(cert), "tls_key": str(cert_key)}
    upstreams = [{"url": url, "key_file": str(tmp_path / "engine.key")}]
    file = place.write(gateway={**tls, **settings, "upstreams": upstreams})
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    started = call("up", file, "--json")
    assert started.code == 0, started
    run = place.note(run_folder.find("one"))
    key = started.events[0]["key"]
    port = int(run.listen.rpartition(":")[2])
    assert run.url == f"https://localhost:{port}/penstock"
    assert f"{run.url}/v1" in call("status", "one").out
    kept = json.loads(run.gateway_config.read_text("utf-8"))
    assert {name: kept[name] for name in ("policy", "max_in_flight")} == {"policy": "round-robin", "max_in_flight": 3}
    assert kept["queue"] == {"n_requests": 5, "body_bytes": 2**30, "key_share": 1.0}
    assert "sk-upstream" not in json.dumps(kept)

    def request(method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("localhost", port, context=ssl.create_default_context(), timeout=20)
        headers = {"x-api-key": key, "origin": "https://chat.example", "content-type": "application/json"}
        connection.request(method, path, body, headers)
        return connection.getresponse()

    assert request("GET", "/penstock/v1/models").getheader("access-control-allow-origin") == "https://chat.example"
    assert request("POST", "/penstock/v1/completions", b"x" * 2001).status == 413
    body = b'{"model": "one", "prompt": "a", "max_tokens": 1}'
    answers = [request("POST", "/penstock/v1/completions", body) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    replicas = [answer.getheader("x-penstock-replica") for answer in answers]
    assert sorted(map(str, replicas)) == ["0", "0", "upstream-1", "upstream-1"]
    assert upstream_keys == ["Bearer sk-upstream"] * 2

    monkeypatch.setenv("OPENAI_API_KEY", key)
    replies = [call("chat", "one", "--message", PROMPT, "--json") for _ in range(2)]
    assert 0 in [reply.code for reply in replies], replies  # the other went to the upstream, which knows no chat
    assert call("down", "one").code == 0
    place.assert_nothing_left()
