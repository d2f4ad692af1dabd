from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from golden_files import table

from penstock.errors import SpecError, UserError
from penstock.gateway.__main__ import main
from penstock.gateway.config import GatewayConfig, parse_config
from penstock.gateway.origins import SiteRule, origin_headers
from penstock.paths import read_token

GOOD = {
    "listen": "127.0.0.1:8000",
    "admin": "127.0.0.1:41000",
    "admin_token_file": "/nowhere",
    "models": [{"name": "penstock-demo", "aliases": ["demo"]}],
    "auth": "none",
}


def parse(**changes: object) -> GatewayConfig:
    return parse_config(json.dumps(GOOD | changes).encode(), "x.json")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "gateway.example"])
def test_no_auth_is_refused_beyond_loopback(host: str) -> None:
    with pytest.raises(SpecError, match="1 problem") as caught:
        parse(listen=f"{host}:8000")
    assert caught.value.problems[0].path == "auth"
    parse(listen=f"{host}:8000", auth="keys", key_hashes=["0" * 64])
    for local in ("localhost", "127.8.8.8", "[::1]"):
        assert parse(listen=f"{local}:8000").models[0].aliases == ("demo",)


@pytest.mark.parametrize(("changes", "path"), table("gateway_mistakes.yaml"))
def test_wrong_values_are_refused_by_their_path(changes: dict[str, object], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(**changes)
    problem = caught.value.problems[0]
    assert problem.path == path
    assert path or problem.hint == "did you mean key_hashes?"


def test_token_file_must_be_private_and_filled(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" secret\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="read by others"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "secret"
    path.write_text("\n")
    with pytest.raises(UserError, match="empty"):
        read_token(path)


@pytest.mark.loopback
def test_taken_port_ends_the_process_with_code_2(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token, config = tmp_path / "token", tmp_path / "gateway.json"
    token.touch(0o600)
    token.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        changes = {"listen": "127.0.0.1:0", "admin": f"127.0.0.1:{port}", "admin_token_file": str(token)}
        config.write_text(json.dumps(GOOD | changes))
        assert main([str(config)]) == 2
    assert caplog.messages[-1].startswith(f"cannot listen on 127.0.0.1:{port}: the port is taken")
    assert main([str(tmp_path / "absent.json")]) == 2


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:28123:80", "[::1]evil", "[127.0.0.1]", "evil@127.0.0.1", "127.0.0.1/x", "localhost:1x", "[::1", "::1"]
    + ["localhost:65536", "127.0.0.1#evil", "localhost ", "", "[localhost]", "127.0.0.1\\evil", "evil,localhost"],
)
@pytest.mark.parametrize("allowed", [frozenset(), frozenset({b"*"})])
def test_hosts_and_origins_of_this_machine_are_known_and_malformed_ones_are_of_none(
    host: str, allowed: frozenset[bytes]
) -> None:
    rule = SiteRule("127.0.0.1", allowed)
    assert rule.refuse(b"GET", {b"host": host.encode()}) is not None
    assert origin_headers(f"http://{host}".encode(), needs_key=False) == ()
    if not allowed:
        origin = {b"host": b"localhost", b"origin": f"http://{host}".encode()}
        assert rule.refuse(b"POST", origin) is not None
    for local in ("LOCALHOST", "127.0.0.1:80", "[::1]", "[::1]:65535", "localhost:", "a.localhost"):
        this_machine = {b"host": local.encode(), b"origin": f"http://{local}".encode()}
        assert SiteRule("0.0.0.0", allowed).refuse(b"POST", this_machine) is None
