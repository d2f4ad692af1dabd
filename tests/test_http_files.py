"""Files by plain HTTP: servers on loopback that redirect, cut, lie and refuse, and a proxy in front of them."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback_server import LoopbackHandler, LoopbackServer, running

from penstock.errors import PenstockError, UserError
from penstock.models import http_files
from penstock.models.part_file import CannotContinueError, PartFile

pytestmark = pytest.mark.loopback

BODY = bytes(range(256)) * 8
HIDDEN = {"Authorization": "Bearer hidden"}


class Server(LoopbackServer):
    """Answers with `reply(handler)`. `asked`: the target, Authorization and Range of each request."""

    def __init__(self, reply: Callable[[LoopbackHandler], None]) -> None:
        super().__init__(_Handler)
        self.reply = reply
        self.asked: list[tuple[str, str | None, str | None]] = []


class _Handler(LoopbackHandler):
    protocol_version = "HTTP/1.0"
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization"), self.headers.get("Range")))
        self.server.reply(self)

    def do_CONNECT(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Proxy-Authorization"), None))
        self.send_error(407)


def reply(status: int, body: bytes = b"", **headers: str) -> Callable[[LoopbackHandler], None]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.send(status, body, named)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(running(Server(answer)))


def fetch(url: str, part: PartFile, n_bytes: int = len(BODY)) -> None:
    http_files.receive(http_files.follow(http_files.get("f", url, HIDDEN, part.n_bytes)), part, n_bytes)


def test_a_token_stays_at_its_own_scheme_host_and_port(serve: Callable[..., Server], tmp_path: Path) -> None:
    other = serve(reply(200, BODY))
    places = {"/a": "/b", "/b": f"{other.url}/x?sig=1 2"}
    first = serve(lambda handler: handler.send(302, headers={"Location": places[handler.path]}))
    part = PartFile(tmp_path / "part")
    fetch(f"{first.url}/a", part)
    assert [row[:2] for row in first.asked] == [("/a", "Bearer hidden"), ("/b", "Bearer hidden")]
    assert [row[:2] for row in other.asked] == [("/x?sig=1%202", None)] and part.n_bytes == len(BODY)
    answer = http_files.get("f", f"{first.url}/b", HIDDEN)
    secure = answer._replace(url=answer.url.replace("http:", "https:"))
    with pytest.raises(UserError, match="without encryption"):
        http_files.follow(secure)
    first.reply = reply(302, Location="/a")
    with pytest.raises(PenstockError, match="more than 10 redirects"):
        fetch(first.url, part)
    for place in ("ftp://x/y", "http://x:y/"):
        first.reply = reply(302, Location=place)
        with pytest.raises(UserError, match="is no address of a file"):
            fetch(first.url, part)


LIES: dict[str, tuple[int, bytes, dict[str, str], type[PenstockError]]] = {
    "another range": (206, BODY[4:], {"Content_Range": f"bytes 4-{len(BODY) - 1}/{len(BODY)}"}, CannotContinueError),
    "no range": (206, BODY[1000:], {}, CannotContinueError),
    "nothing there": (416, b"", {}, CannotContinueError),
    "longer": (206, BODY[1000:], {"Content_Range": f"bytes 1000-{len(BODY) - 1}/{len(BODY) + 1}"}, PenstockError),
    "shorter": (200, BODY[:-1], {}, PenstockError),
    "cut": (200, BODY[:-1], {"Content_Length": str(len(BODY))}, PenstockError),
    "not HTTP": (200, BODY, {"Transfer_Encoding": "chunked"}, PenstockError),
}


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_is_not_the_rest_may_be_tried_again(
    serve: Callable[..., Server], tmp_path: Path, name: str
) -> None:
    status, body, headers, kind = LIES[name]
    (tmp_path / "part").write_bytes(BODY[:1000])
    part = PartFile(tmp_path / "part")
    server = serve(reply(status, body, **headers))
    with pytest.raises(kind) as caught:
        fetch(server.url, part)
    assert caught.value.is_retryable
    written = (tmp_path / "part").read_bytes()
    assert part.n_bytes == len(written) and BODY.startswith(written)
    if kind is CannotContinueError:
        part.clear()
    server.reply = reply(200, BODY)  # without ranges all comes again
    fetch(server.url, part)
    assert (tmp_path / "part").read_bytes() == BODY and part.sha256 == hashlib.sha256(BODY).hexdigest()


def test_what_cannot_be_used_is_said(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(reply(503, b"too\nmany  things", Retry_After="7"))
    with pytest.raises(http_files.StatusError) as refused:
        fetch(server.url, PartFile(tmp_path / "part"))
    error = refused.value
    assert (error.status, error.words, error.headers["retry-after"]) == (503, "too many things", "7")
    server.reply = reply(200, BODY, Content_Encoding="gzip")
    with pytest.raises(UserError, match="sends it compressed"):
        fetch(server.url, PartFile(tmp_path / "part"))
    with pytest.raises(PenstockError, match=r"the connection to .*:9 failed") as lost:
        fetch("http://127.0.0.1:9/", PartFile(tmp_path / "part"))
    assert lost.value.is_retryable


def test_proxies_of_the_environment_count(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve(reply(200, BODY))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy.url.replace("//", "//me:p%40ss@"))
    fetch("http://hub.invalid/a?b=c", PartFile(tmp_path / "part"))
    assert proxy.asked[-1][0] == "http://hub.invalid/a?b=c"
    with pytest.raises(PenstockError, match="failed"):
        fetch("https://hub.invalid/a", PartFile(tmp_path / "part"))
    assert proxy.asked[-1][:2] == ("hub.invalid:443", "Basic bWU6cEBzcw==")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    direct = serve(reply(200, BODY))
    fetch(direct.url.replace("//", "//user:word@"), part := PartFile(tmp_path / "other"))
    assert part.n_bytes == len(BODY) and len(direct.asked) == 1
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(UserError, match="a socks5 proxy cannot be used"):
        fetch("http://hub.invalid/", part)


@pytest.mark.processes
def test_a_private_authority_is_trusted_when_it_is_named(
    serve: Callable[..., Server], certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, key = certificate
    server = serve(reply(200, BODY))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url, part = server.url.replace("http://127.0.0.1", "https://localhost"), PartFile(tmp_path / "part")
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    http_files._tls.cache_clear()
    with pytest.raises(PenstockError, match="failed") as caught:
        fetch(url, part)
    assert "SSL_CERT_FILE" in str(caught.value.hint) and not caught.value.is_retryable
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    http_files._tls.cache_clear()
    fetch(url, part)
    http_files._tls.cache_clear()
    assert part.n_bytes == len(BODY)
