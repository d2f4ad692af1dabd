"""The routes of the chat page: those of Gradio that it uses and no others, and its own for export and import."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from virtual_loop import advance

from penstock.chat.page import export, routes
from penstock.chat.page.export import Converter
from penstock.chat.page.routes import UsedRoutes
from penstock.chat.page.sessions import Visitor

JOIN = "/gradio_api/queue/join"


@pytest.fixture
def chat() -> TestClient:
    """Everyone's key is in the header "key"; what gets through is answered with the length of its body."""

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        body = await Request(scope, receive).body()
        await PlainTextResponse(str(len(body)))(scope, receive, send)

    used = UsedRoutes(gradio)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        key = Request(scope).headers.get("key")
        await used({**scope, "state": {"visitor": Visitor(key, key, lambda _: None)}}, receive, send)

    return TestClient(app)


@pytest.mark.parametrize("path", ["/", "/config", "/assets/a/b.js", "/gradio_api/heartbeat/abc", "/gradio_api/info/"])
def test_what_the_page_uses_is_there(chat: TestClient, path: str) -> None:
    assert chat.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["file=/etc/passwd", "file=https://h/x", "upload", "proxy=https://h.hf.space/", "component_server", "call/x",
     "stream/x", "deep_link", "dev/reload", "vibe-code", "upload_progress", "process_recording", "queue/status"],
)  # fmt: skip
def test_what_the_page_does_not_use_is_not(chat: TestClient, path: str) -> None:
    assert chat.get(f"/gradio_api/{path}").status_code == chat.post(f"/gradio_api/{path}").status_code == 404
    for method in ("GET", "HEAD", "PUT"):  # gradio has a route for GET; any page could send one
        answer = chat.request(method, "/logout")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    for other in ("/monitoring", "/login/", "/manifest.json", "/config%0A", "/x/assets/y"):
        assert chat.get(other).status_code == 404


def test_a_tab_belongs_to_who_used_it_first(chat: TestClient) -> None:
    body = {"session_hash": "s", "data": [["x"]], "fn_index": 1}
    ann, bob = {"key": "ann"}, {"key": "bob"}
    first = chat.post(JOIN, json=body, headers=ann)
    assert (first.status_code, first.text) == (200, str(len(first.request.content)))
    twice = '{"session_hash": "other", "session_hash": "s"}'  # Python's reader takes the last, too
    assert chat.post(JOIN, content=twice, headers=bob).status_code == 404
    for path in (JOIN, "/gradio_api/cancel", "/gradio_api/run/predict"):
        assert chat.post(path, json=body, headers=bob).status_code == 404
    data = "queue/data?session_hash=s", "queue/data?session_hash=b&session_hash=s"
    for path in (*data, "heartbeat/s", "heartbeat/s/"):
        assert chat.get(f"/gradio_api/{path}", headers=bob).status_code == 404
        assert chat.get(f"/gradio_api/{path.replace('=b', '=s')}", headers=ann).status_code == 200


def test_tabs_that_are_remembered_are_not_without_end(chat: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_MOST_TABS", 2)
    for tab in "abc":
        assert chat.post(JOIN, json={"session_hash": tab}, headers={"key": "ann"}).status_code == 200
    assert chat.post(JOIN, json={"session_hash": "c"}, headers={"key": "bob"}).status_code == 404
    assert chat.post(JOIN, json={"session_hash": "a"}, headers={"key": "bob"}).status_code == 200


def test_a_body_has_an_end_and_is_json(chat: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_MOST_BYTES", 1000)
    assert chat.post(JOIN, content=json.dumps({"data": ["x" * 1000]})).status_code == 413
    for body in (b"", b"[]", b"{", b'{"data":' + b"[" * 400, b'{"session_hash": 1}', '{"a": 1}'.encode("utf-16")):
        assert chat.post(JOIN, content=body).status_code == 400, body


# ---- export and import ---------------------------------------------------------------------------------------------

EXCHANGE = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}


@pytest.fixture
def files() -> TestClient:
    converter = Converter()
    both = (converter.conversations, converter.markdown)
    app = Starlette(routes=[Route(f"/{each.__name__}", each, methods=["POST"]) for each in both])

    async def as_ann(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {"visitor": Visitor("a", "ann", lambda _: None)}}, receive, send)

    return TestClient(as_ann)


def test_a_file_becomes_conversations_and_each_of_them_markdown(files: TestClient) -> None:
    answer = files.post("/conversations", json=EXCHANGE)
    (conversation,) = answer.json()
    assert (answer.status_code, conversation["title"], len(conversation["turns"])) == (200, "why?", 2)
    assert files.post("/markdown", json=conversation).text == "## user\n\nwhy?\n\n## assistant\n\nso\n"
    assert files.post("/markdown", json=[]).text == ""


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"id": 3}', b"\xff"])
def test_a_bad_file_is_refused_in_words(files: TestClient, body: bytes) -> None:
    answer = files.post("/conversations", content=body)
    assert answer.status_code == 422 and answer.json()["message"].startswith("cannot ")


def test_a_large_file_is_refused(files: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_MOST_BYTES", 10)
    answer = files.post("/conversations", content=iter([b"123456", b"78901"]))
    assert answer.status_code == 422 and "64 MiB" in answer.json()["message"]


@pytest.mark.processes
@pytest.mark.parametrize("path", ["conversations", "markdown"])
def test_a_large_file_is_read_by_another_process(files: TestClient, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = files.post(f"/{path}", json=EXCHANGE)
    monkeypatch.setattr(export, "_SMALL_BYTES", 10)
    monkeypatch.setattr(export, "convert", None)
    large = files.post(f"/{path}", json=EXCHANGE)
    assert (large.status_code, large.text[:60]) == (200, small.text[:60])
    refused = files.post(f"/{path}", content=b"<html> is no chat")
    assert refused.status_code == 422 and refused.json()["message"].startswith("cannot ")


async def test_each_person_has_one_file_read_at_a_time() -> None:
    async def receive() -> Any:
        return await asyncio.Event().wait()

    def request(key: str) -> Request:
        return Request({"type": "http", "state": {"visitor": Visitor(key, key, lambda _: None)}}, receive)

    converter = Converter()
    reading = [asyncio.create_task(converter.conversations(request(key))) for key in "abcd"]
    await advance(0)
    assert [(await converter.markdown(request(key))).status_code for key in "ae"] == [429, 429]
    reading.pop().cancel()
    await advance(0)
    assert len(converter._readers) == 3
