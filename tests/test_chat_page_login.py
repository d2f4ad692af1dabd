"""Who may open the chat page: keys, sessions, sites, and proxies in front of it."""

from __future__ import annotations

import asyncio
import ssl
import stat
import types
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.chat.page import sessions
from penstock.chat.page.config import PageConfig
from penstock.chat.page.login import Login
from penstock.chat.page.proxied import Proxies, as_sent, clean_prefix
from penstock.chat.page.server import Status, check_number
from penstock.chat.page.sessions import Attempts, Sessions, name_of, visitor
from penstock.chat.page.upstream import Upstream
from penstock.errors import PenstockError, UserError
from penstock.spec.gateway import LOOPBACK
from penstock.wire.answers import HttpError
from penstock.wire.model_list import ModelCard


class Gateway:
    """Takes `keys`; `is_away` and it does not answer."""

    keys = frozenset({"sk-alice", "sk-bob"})
    is_away = False

    async def models(self, key: str | None) -> tuple[ModelCard, ...]:
        if self.is_away:
            raise PenstockError("could not connect to http://g: connection refused")
        if key not in self.keys:
            raise HttpError("http://g/v1/models answered 401: invalid API key", 401)
        return (ModelCard("m"),)


def page(folder: Path, gateway: Gateway, **fields: Any) -> TestClient:
    settings = {"has_login": True, "host": "127.0.0.1", "port": 7860, "title": "A <b>", **fields}
    config = PageConfig(gateway="http://g", folder=str(folder), **settings)
    entrance = Login(config, print, gateway.models)

    async def home(request: Request) -> Response:
        cors = {"access-control-allow-origin": "http://127.0.0.1:1", "access-control-allow-credentials": "true"}
        return HTMLResponse("<script>window.gradio_api_info = {}</script>", headers=cors)

    async def who(request: Request) -> Response:
        return PlainTextResponse(f"{visitor(request).key} {request.url}")

    routes = [
        Route("/", home),
        Route("/who", who, methods=["GET", "POST"]),
        Route("/status", Status(gateway.models, config.has_login).answer),
        Route("/login", entrance.page),
        Route("/login", entrance.log_in, methods=["POST"]),
        Route("/logout", entrance.log_out, methods=["POST"]),
    ]
    app = entrance.around(Starlette(routes=routes))
    return TestClient(app, "http://127.0.0.1:7860", follow_redirects=False, client=("127.0.0.1", 50000))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def chat(tmp_path: Path, gateway: Gateway) -> TestClient:
    return page(tmp_path, gateway)


def test_a_good_key_opens_the_page_and_is_the_key_of_its_session(chat: TestClient, tmp_path: Path) -> None:
    assert (chat.get("/").status_code, chat.get("/").headers["location"]) == (303, "login")
    assert chat.get("/who").status_code == 401
    answer = chat.post("/login", data={"key": " sk-alice "})
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("penstock-ui-7860=") and "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert "Secure" not in cookie
    assert chat.get("/who").text.startswith("sk-alice ")
    assert chat.get("/").headers["set-cookie"] == cookie  # with use it lasts as long as the session
    file = tmp_path / "sessions.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert chat.cookies["penstock-ui-7860"] not in file.read_text()


def test_a_wrong_key_is_refused_in_words(chat: TestClient) -> None:
    answer = chat.post("/login", data={"key": "sk-<x>"})
    assert answer.status_code == 401 and "it may be mistyped, expired or revoked" in answer.text
    for key in ("sk-\u00e9", "a\nb", "", "k" * 5000):  # can be no keys, and are not sent
        answer = chat.post("/login", data={"key": key})
        assert answer.status_code == 401 and "letters, digits and dashes only" in answer.text


@pytest.mark.parametrize("proxies", [(), ("127.0.0.1",)])
def test_a_right_key_enters_after_any_number_of_wrong_ones(
    tmp_path: Path, gateway: Gateway, proxies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_PAUSE_S", 0.0)
    chat = page(tmp_path, gateway, trusted_proxies=proxies)
    for index in range(100):  # an address that a client names is no address of another, that of a proxy is
        headers = {"x-forwarded-for": f"10.0.0.{index}"}
        answer = chat.post("/login", data={"key": f"sk-{index}"}, headers=headers)
        assert answer.status_code == (401 if index < 10 or proxies else 429), index
    assert bool(proxies) != ("Too many wrong keys" in answer.text)
    assert chat.post("/login", data={"key": "sk-alice"}).status_code == 303


def test_keys_of_one_address_wait_for_each_other_and_for_no_other_address(
    tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_PAUSE_S", 0.0)
    asked = list[str | None]()

    async def models(key: str | None) -> tuple[ModelCard, ...]:
        asked.append(key)
        if key == "sk-slow":
            has_begun.set()
            await is_open.wait()
        return await gateway.models(key)

    async def post(key: str, address: str, *, has_left: bool = False) -> int:
        events = [{"type": "http.request", "body": f"key={key}".encode(), "more_body": False}]
        events += [{"type": "http.disconnect"}] * has_left

        async def receive() -> Any:
            return events.pop(0) if events else await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/login", "root_path": "",
                 "query_string": b"", "headers": [(b"host", b"h")], "client": (address, 1)}  # fmt: skip
        return (await page.log_in(Request(scope, receive))).status_code

    async def run() -> None:
        one, same, other = "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"
        slow = asyncio.create_task(post("sk-slow", one))
        left = asyncio.create_task(post("sk-guess", same, has_left=True))
        waiting = asyncio.create_task(post("sk-alice", same))
        await has_begun.wait()
        assert await post("sk-bob", other) == 303
        assert asked == ["sk-slow", "sk-bob"] and not waiting.done()
        is_open.set()
        assert (await slow, await left, await waiting) == (401, 400, 303)
        assert asked == ["sk-slow", "sk-bob", "sk-alice"]
        is_open.clear()
        flood = [asyncio.create_task(post("sk-slow" if index == 0 else f"sk-{index}", one)) for index in range(500)]
        right = asyncio.create_task(post("sk-alice", same))
        is_open.set()
        assert await right == 303 and set(await asyncio.gather(*flood)) == {401, 429}
        assert len(asked) == 3 + sessions._MOST_WAITING, "the others were not checked"
        assert page._attempts._lines == {}

    has_begun, is_open = asyncio.Event(), asyncio.Event()
    config = PageConfig("http://g", "127.0.0.1", 7860, str(tmp_path), True)
    page = Login(config, print, models)
    asyncio.run(run())


def test_a_gateway_that_is_away_is_no_wrong_key(chat: TestClient, gateway: Gateway) -> None:
    gateway.is_away = True
    for _ in range(12):
        answer = chat.post("/login", data={"key": "sk-alice"})
        assert answer.status_code == 503 and "connection refused" in answer.text


def test_status_ends_the_session_of_a_refused_key_and_keeps_it_while_the_gateway_is_away(
    chat: TestClient, tmp_path: Path, gateway: Gateway
) -> None:
    chat.post("/login", data={"key": "sk-alice"})
    gateway.is_away, restarted = True, page(tmp_path, gateway)
    restarted.cookies = chat.cookies
    assert restarted.get("/status").json()["state"] == "offline"
    assert restarted.get("/").status_code == 200
    gateway.is_away = False
    gateway.keys = frozenset()
    answer = chat.get("/status")
    assert (answer.status_code, answer.json()["state"]) == (401, "logged out")
    assert chat.get("/").status_code == 303
    assert "You were logged out: the gateway refuses your key now" in chat.get("/login").text
    assert chat.get("/who").json()["reason"].startswith("You were logged out")


def test_a_restart_logs_nobody_out(chat: TestClient, tmp_path: Path, gateway: Gateway) -> None:
    chat.post("/login", data={"key": "sk-bob"})
    again = page(tmp_path, gateway)
    again.cookies = chat.cookies
    assert again.get("/who").text.startswith("sk-bob ")
    again.post("/logout")
    assert again.get("/who").status_code == 401


def test_the_key_of_the_page_alone_opens_it(tmp_path: Path, gateway: Gateway) -> None:
    file = tmp_path / "key"
    file.write_text("sk-page\n")
    with pytest.raises(UserError, match="can be read by others"):
        page(tmp_path, gateway, key_file=str(file))
    file.chmod(0o600)
    chat = page(tmp_path, gateway, key_file=str(file))
    assert chat.post("/login", data={"key": "sk-alice"}).status_code == 401
    assert chat.post("/login", data={"key": "sk-page"}).status_code == 303


def test_without_a_login_only_this_machine_may_ask(tmp_path: Path, gateway: Gateway) -> None:
    chat = page(tmp_path, gateway, has_login=False)
    assert chat.get("/who").text.startswith("None ")
    assert "set-cookie" not in chat.get("/").headers
    assert chat.get("/who", headers={"host": "chat.localhost:7860"}).status_code == 200
    refusal = chat.get("/who", headers={"host": "evil.example"})
    assert refusal.status_code == 403 and "ui.login: keys" in refusal.text
    # A name that was made to point here is the same site as its page, which may set any header.
    for host, forwarded in (("evil.example:7860", "127.0.0.1:7860"), ("127.0.0.1:7860", "evil.example")):
        assert chat.get("/who", headers={"host": host, "x-forwarded-host": forwarded}).status_code == 403
    behind = page(tmp_path, gateway, has_login=False, root_path="/x")
    assert behind.get("/who", headers={"host": "proxy.example"}).status_code == 200


FOREIGN = [{"origin": origin} for origin in ("https://evil.example", "null")]
FOREIGN += [{"sec-fetch-site": site} for site in ("cross-site", "same-site")]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_site_may_not_send(chat: TestClient, headers: dict[str, str]) -> None:
    chat.post("/login", data={"key": "sk-alice"})
    assert chat.post("/who", headers=headers).status_code == 403
    assert chat.post("/who", headers={"origin": "http://127.0.0.1:7860"}).status_code == 200


def test_every_answer_forbids_other_hosts(chat: TestClient) -> None:
    for answer in (chat.get("/"), chat.get("/login"), chat.get("/who"), chat.post("/login", data={"key": "x"})):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "img-src 'self' data: blob:;" in policy and "http" not in policy
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    assert "A &lt;b&gt;" in chat.get("/login").text


def test_behind_a_proxy_the_page_is_where_the_browser_sees_it(tmp_path: Path, gateway: Gateway) -> None:
    chat = page(tmp_path, gateway, root_path="/ui/")
    assert chat.get("/ui").headers["location"] == "/ui/"
    headers = {"x-forwarded-proto": "https", "x-forwarded-host": "llm.example"}
    answer = chat.post("/login", data={"key": "sk-alice"}, headers=headers)
    assert "Path=/ui" in answer.headers["set-cookie"] and "Secure" in answer.headers["set-cookie"]
    cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    for path in ("/who", "/ui/who"):  # a proxy that takes the prefix off, and one that leaves it
        assert chat.get(path, headers=headers | cookie).text == "sk-alice https://llm.example/ui/who"
    assert "gradio_config.root = location.origin" in chat.get("/ui/", headers=cookie).text
    stranger = page(tmp_path, gateway, root_path="/ui/", trusted_proxies=("10.0.0.0/8",))
    forged = headers | {"x-forwarded-prefix": "/evil"}
    assert stranger.get("/who", headers=forged | cookie).text == "sk-alice http://127.0.0.1:7860/ui/who"
    assert "Secure" not in stranger.get("/", headers=forged | cookie).headers["set-cookie"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [("9.9.9.9", "1.1.1.1", "9.9.9.9"), ("127.0.0.1", "1.1.1.1", "1.1.1.1"), ("::ffff:127.0.0.1", "::1", "::1"),
     ("127.0.0.1", "6.6.6.6, 1.1.1.1", "1.1.1.1"), ("127.0.0.1", "6.6.6.6, 127.0.0.2", "6.6.6.6"),
     ("127.0.0.1", "", "127.0.0.1"), ("127.0.0.1", "unknown", "unknown")],
)  # fmt: skip
def test_a_client_has_the_address_before_the_last_trusted_proxy(peer: str, forwarded: str, client: str) -> None:
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded.split(", ")]
    scope = {"type": "http", "scheme": "http", "path": "/", "headers": headers, "client": (peer, 1)}
    sent = as_sent(scope, Proxies(LOOPBACK))
    assert (sent["client"][0], sent["headers"]) == (client, [])


@pytest.mark.parametrize(
    ("prefix", "clean"),
    [("", ""), ("/", ""), ("x/y/", "/x/y"), ("https://h/a", "/a"), ("//evil.example", "/evil.example")]
    + [(evil, "") for evil in ("/a//b", "/\\evil.example", "/a;b")],
)
def test_a_prefix_is_a_path(prefix: str, clean: str) -> None:
    assert clean_prefix(prefix) == clean
    headers = [(b"x-forwarded-prefix", prefix.encode())]
    scope = {"type": "http", "scheme": "http", "path": "/p", "headers": headers, "client": ("127.0.0.1", 1)}
    sent = as_sent(scope, Proxies(LOOPBACK))
    assert (sent["root_path"], sent["path"], sent["headers"]) == (clean, f"{clean}/p", [])


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_sessions_end_after_a_month_without_use(tmp_path: Path) -> None:
    file, day = tmp_path / "s.json", 86400.0
    sessions = Sessions(file, 0.0)
    token = sessions.open("k", 0.0)
    assert sessions.find(token, 29 * day) == (name_of(token), "k")
    assert Sessions(file, 58 * day).find(token, 58 * day) is not None
    assert Sessions(file, 100 * day).find(token, 100 * day) is None


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [('{"a": {"key"', 0o600, "could not read"), (None, 0o644, "could be read by others")],
)
def test_sessions_that_cannot_be_trusted_end(tmp_path: Path, text: str | None, mode: int, words: str) -> None:
    file, lines = tmp_path / "s.json", list[str]()
    token = Sessions(file, 0.0).open("k", 0.0)
    file.write_text(text or file.read_text())
    file.chmod(mode)
    sessions = Sessions(file, 0.0, lines.append)
    assert sessions.find(token, 0.0) is None and words in lines[0]
    again = sessions.open("k", 0.0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Sessions(file, 0.0).find(again, 0.0) is not None


def test_a_key_with_too_many_sessions_ends_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.chat.page.sessions._MOST", 3)
    sessions = Sessions(tmp_path / "s.json", 0.0)
    quiet, first, *_, last = [sessions.open(key, float(at)) for at, key in enumerate("ammmm")]
    assert sessions.find(quiet, 5.0) and sessions.find(last, 5.0) and not sessions.find(first, 5.0)


def test_sessions_without_space_live_in_memory(tmp_path: Path) -> None:
    lines = list[str]()
    sessions = Sessions(tmp_path / "gone" / "s.json", 0.0, lines.append)
    token = sessions.open("k", 0.0)
    assert sessions.find(token, 0.0) is not None and "a restart ends the sessions" in lines[0]


def test_wrong_keys_are_counted_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.chat.page.sessions._MOST", 3)
    attempts = Attempts(most=2, period_s=60.0)
    assert [attempts.failed("a", at) for at in (0.0, 10.0, 20.0, 65.0, 126.0)] == [None, None, 0.1, 0.1, None]
    assert [attempts.failed("b", 126.0) for _ in range(3)] == [None, None, 0.1]
    assert attempts.failed("b", 126.0) == pytest.approx(0.2), "one answer each 0.1 s"
    assert max(attempts.failed("b", 126.0) or 0 for _ in range(200)) == 10.0
    assert not any(attempts.failed(address, 126.0) for address in "cdef")
    assert len(attempts._failures) == 3


# ---- a gateway that speaks TLS ---------------------------------------------------------------------------------------


@pytest.mark.loopback
def test_the_gateways_own_certificate_is_taken_at_its_address(certificate: tuple[Path, Path]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"data": [{"id": "m"}]}')

    async def ask() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await Upstream(url, str(certificate[0])).models("k") == (ModelCard("m"),)
        with pytest.raises(PenstockError, match="certificate"):
            await Upstream(url).models("k")
        server.close()

    asyncio.run(ask())


def test_an_event_with_too_few_inputs_is_refused_without_its_text() -> None:
    handler = types.SimpleNamespace(inputs=[1, 2])
    check_number(handler, ["a", "b"])
    with pytest.raises(ValueError, match=r"^an event of the page came with 1 of 2 inputs$"):
        check_number(handler, ["what a person wrote"])
