"""The client against the fake engine, and against servers that misbehave byte by byte."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.errors import PenstockError, UserError
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import InThread, in_thread
from penstock.wire import http1
from penstock.wire.announcement import Progress
from penstock.wire.answers import BrokenAnswer, Chunk, HttpError, NoAnswer, Reply, StreamReader, ToolCall
from penstock.wire.client import Client, tls_context
from penstock.wire.model_list import ModelCard, ReplicaCount, read_models
from penstock.wire.waiting import Waiting, read_comment, write_comment

pytestmark = pytest.mark.loopback

FAST = Options(model="m", served_model_name=("m", "alias"), ttft_s=0.0, tokens_per_s=float("inf"))
HI = [{"role": "user", "content": "tell me a story"}]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-penstock-replica: 3\r\nx-request-id: abc\r\n"
CHUNKED = STREAM + b"transfer-encoding: chunked\r\n\r\n"
ODD = b'data: {"choices":null,"usage":null}\n\ndata: {"choices":[{"delta":null}]}\n\ndata: {}\n\n'


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    with in_thread(FAST) as running:
        yield running


@pytest.fixture
def client(engine: InThread) -> Client:
    return Client(engine.url, timeout_s=5)


@contextlib.contextmanager
def answering(*pieces: bytes, closes: bool = True) -> Iterator[str]:
    """A server that reads one request and sends `pieces`, each as its own packet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                reader = http1.Reader(http1.parse_request)
                while (event := reader.next_event()) is not http1.END:  # bytes left unread would reset the connection
                    if event is None:
                        reader.feed(peer.recv(65536))
                for piece in pieces:
                    peer.sendall(piece)
                if not closes:
                    done.wait(5)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(5)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def delta(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"model": "m", "choices": [choice]}) + b"\n\n"


def reply_of(url: str) -> Reply:
    *_, reply = Client(url, timeout_s=5).stream_chat(HI)
    assert isinstance(reply, Reply)
    return reply


def test_models_are_listed_with_all_that_the_server_says_of_them(client: Client) -> None:
    assert [card.name for card in client.models()] == ["m", "alias"]
    row = {"id": "a", "state": "loading", "aliases": ["b"], "max_model_len": 8192, "replicas": {"ready": 0, "total": 2}}
    (card,) = read_models({"data": [row | {"progress": {"stage": "loading", "shards_done": 17}}]}, "here")
    assert (card.name, card.state, card.aliases) == ("a", "loading", ("b",))
    assert (card.max_model_len, card.replicas, card.progress) == (8192, ReplicaCount(0, 2), Progress("loading", 17))
    assert read_models({"data": [{"id": "a", "max_model_len": "long"}, 5]}, "here") == (ModelCard("a"),)
    with pytest.raises(PenstockError, match="cannot read the models of here"):
        read_models({"data": None}, "here")


def test_whole_and_streamed_answers_have_the_same_text_and_counts(engine: InThread, client: Client) -> None:
    whole = client.chat(HI, max_tokens=40)
    *chunks, streamed = client.stream_chat(HI, max_tokens=40, model="alias")
    assert isinstance(streamed, Reply)
    texts = [chunk.text for chunk in chunks if isinstance(chunk, Chunk)]
    assert "".join(texts) == streamed.text == whole.text == expected_text("tell me a story", 40)
    assert len(texts) == streamed.output_tokens == 40
    assert (whole.finish_reason, whole.prompt_tokens, whole.output_tokens) == ("length", 8, 40)
    assert (whole.ttft_s, whole.model) == (None, "m")
    assert client.complete("Singapore is a", max_tokens=2).text == "1:Singapore 2:is"
    *_, streamed = client.stream_complete("Singapore is a", max_tokens=2)
    assert isinstance(streamed, Reply)
    assert streamed.text == "1:Singapore 2:is"
    client.chat(HI, ignore_eos=True, max_tokens=1, temperature=None)
    assert msgspec.json.decode(engine.seen[-1].body) == {"messages": HI, "ignore_eos": True, "max_tokens": 1}


def usage(n_tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":%d}}\n\n' % n_tokens


def test_times_count_from_the_request_and_speed_from_the_first_piece() -> None:
    reader = StreamReader("3", "abc")
    for at_s, event in ((0.5, delta("a")), (0.75, delta("b")), (1.0, delta("c", "stop") + usage(11))):
        assert [getattr(piece, "at_s", None) for piece in reader.feed(event, at_s)] == [at_s]
    assert ([*reader.feed(b"data: [DONE]\n\n", 1.5)], reader.is_done) == ([], True)
    reply = reader.reply(2.0)
    assert (reply.ttft_s, reply.duration_s, reply.tokens_per_s) == (0.5, 2.0, 20.0)
    assert (reply.output_tokens, reply.replica, reply.request_id) == (11, "3", "abc")
    burst = StreamReader("3", "abc")  # after a stall: it has no speed
    for at_s, event in ((0.5, delta("a")), (0.501, delta("b" * 400) + delta("c", "stop") + usage(110))):
        assert [*burst.feed(event, at_s)]
    assert burst.reply(0.6).tokens_per_s is None


@pytest.mark.parametrize(
    ("answer", "text", "output_tokens"),
    [
        (CHUNKED + chunked(delta("all", "stop"), usage(64)), "all", 64),  # one piece has no speed
        (CHUNKED + chunked(delta("a"), delta("b", "stop")), "ab", None),  # counts are not guessed
        (STREAM + b"\r\n" + delta("a", "stop"), "a", None),  # ends with the connection, without [DONE]
        (CHUNKED + chunked(ODD, delta("a", "stop")), "a", None),  # parts that are missing or null
    ],
)
def test_a_stream_that_gave_its_reason_is_whole(answer: bytes, text: str, output_tokens: int | None) -> None:
    with answering(answer) as url:
        reply = reply_of(url)
    assert (reply.text, reply.output_tokens, reply.tokens_per_s) == (text, output_tokens, None)


ERROR_EVENT = b'data: {"error":{"message":"EngineCore encountered an issue.","code":500,"source":"gateway"}}\n\n'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chunked(delta("half")), "ended the stream"),
        (chunked(delta("half"))[:-5], "was closed"),
        (chunked(delta("half"), ERROR_EVENT, b"data: [DONE]\n\n"), "broke off: EngineCore encountered an issue"),
    ],
)
def test_a_broken_stream_is_a_failure_that_may_be_retried(body: bytes, message: str) -> None:
    with answering(CHUNKED + body) as url, pytest.raises(PenstockError, match=message) as caught:
        reply_of(url)
    assert caught.value.is_retryable
    assert message != "ended the stream" or "after 4 characters" in str(caught.value.detail)


def test_reasoning_comes_apart_from_the_answer_and_its_time_ends_there() -> None:
    reader = StreamReader("0", None)
    for at_s, field in ((1.0, b"reasoning"), (2.0, b"reasoning_content")):
        thought = b'data: {"choices":[{"delta":{"%s":"hm"}}]}\n\n' % field
        assert [*reader.feed(thought, at_s)] == [Chunk("hm", at_s, is_reasoning=True)]
    assert (reader.answer.reply(2.5).reasoning, reader.answer.reply(2.5).reasoning_s) == ("hmhm", 1.0)
    assert [*reader.feed(delta("a"), 4.0)] == [Chunk("a", 4.0)]
    assert [*reader.feed(delta("b", "stop"), 9.0)]
    reply = reader.reply(9.0)
    assert (reply.ttft_s, reply.reasoning_s, reply.text) == (1.0, 3.0, "ab")


def test_cached_tokens_are_read() -> None:
    for facts in (
        {"usage": {"prompt_tokens": 18, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 12}}},
        {"usage": {"prompt_tokens": 18, "prompt_tokens_details": None}, "timings": {"cache_n": 12}},  # llama.cpp's
    ):
        reader = StreamReader("0", None)
        assert not [*reader.feed(b"data: " + msgspec.json.encode({"choices": []} | facts) + b"\n\n", 1.0)]
        assert (reader.answer.reply(1.0).prompt_tokens, reader.answer.reply(1.0).cached_tokens) == (18, 12)


CALLS = [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"city": '}},
    {"index": 1, "id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    {"index": 0, "function": {"arguments": '"Rome"}'}},
]


def test_tool_calls_grow_piece_by_piece_and_come_whole_in_the_reply() -> None:
    reader = StreamReader("0", None)
    shown = []
    for call in CALLS:
        event = {"choices": [{"delta": {"tool_calls": [call]}}]}
        (piece,) = reader.feed(b"data: " + msgspec.json.encode(event) + b"\n\n", 1.0)
        assert isinstance(piece, Chunk)
        shown.append(piece.tool_calls)
    assert shown[1] == (ToolCall("weather", '{"city": '),)
    whole = (ToolCall("weather", '{"city": "Rome"}'), ToolCall("time", "{}"))
    assert shown[3] == whole == reader.answer.tool_calls
    calls = [{"id": "c", "function": {"name": call.name, "arguments": call.arguments}} for call in whole]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body = msgspec.json.encode({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        reply = Client(url).chat(HI)
    assert (reply.tool_calls, reply.text, reply.finish_reason, reply.ttft_s) == (whole, "", "tool_calls", None)


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"delta": {"content": 5, "reasoning": [1], "tool_calls": {"a": 1}}, "finish_reason": 3}]},
        {"choices": {"0": 1}, "usage": {"prompt_tokens": "many", "prompt_tokens_details": 3}, "timings": []},
        {"choices": [{"delta": {"tool_calls": []}}], "model": 7, "usage": {"completion_tokens": -1}},
    ],
)
def test_odd_types_in_an_answer_are_passed_over(odd: dict[str, object]) -> None:
    reader = StreamReader("0", None)
    assert not [*reader.feed(b"data: " + msgspec.json.encode(odd) + b"\n\n", 1.0)]
    reply = reader.answer.reply(1.0)
    assert (reply.text, reply.prompt_tokens, reply.model, reply.finish_reason) == ("", None, None, None)
    half_a_pair = b'data: {"choices":[{"delta":{"content":"a\\ud83d \\ud83d\\ude00"}}]}\n\n'
    assert [*reader.feed(half_a_pair, 1.5)] == [Chunk("a\ufffd \U0001f600", 1.5)]


def test_a_waiting_stream_tells_what_it_waits_for_and_then_who_has_it() -> None:
    loading = Waiting("loading", ahead=3, shards_done=17, shards_total=30, fraction=0.45, eta_s=40.0)
    prompt = Waiting("prompt", replica="1")
    comments = write_comment(loading) + b": penstock loading 45% 12s\n\n" + write_comment(prompt)
    held = CHUNKED.replace(b"replica: 3", b"replica: none")
    heard: list[Waiting] = []
    with answering(held + chunked(comments, delta("a", "stop"))) as url:
        *_, reply = Client(url).stream_chat(HI, on_wait=heard.append)
    assert heard == [loading, prompt]
    assert isinstance(reply, Reply)
    assert reply.replica == "1"
    heard.clear()
    with answering(CHUNKED + chunked(delta("a", "stop"))) as url:
        list(Client(url).stream_chat(HI, on_wait=heard.append))
    assert heard == [Waiting("prompt", replica="3")]
    for comment in ("", "ping", "penstock loading", "penstock {", 'penstock {"stage":1}', "penstock []"):
        assert read_comment(comment) is None


def test_an_error_event_comes_after_the_text_before_it_and_keeps_the_words_of_the_server() -> None:
    reader = StreamReader("0", None)
    stream = reader.feed(delta("half") + ERROR_EVENT, 0.5)
    assert next(stream) == Chunk("half", 0.5)
    with pytest.raises(BrokenAnswer, match="EngineCore encountered an issue") as caught:
        next(stream)
    assert caught.value.words is not None
    assert (caught.value.words.code, caught.value.words.source) == ("500", "gateway")
    assert reader.answer.text == "half"
    with pytest.raises(BrokenAnswer) as ended:
        reader.reply(3.0)
    assert ended.value.words is None


def test_a_server_that_does_not_answer_is_a_failure_that_may_be_retried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PenstockError, match="connection refused") as caught:
        Client(f"http://127.0.0.1:{port}").models()
    assert (caught.value.is_retryable, bool(caught.value.hint)) == (True, True)
    with answering(closes=False) as url, pytest.raises(NoAnswer, match="within 20 ms") as caught:
        Client(url, timeout_s=0.02).models()
    assert caught.value.is_retryable
    with answering() as url, pytest.raises(PenstockError, match="lost the connection") as caught:
        Client(url).models()
    assert caught.value.is_retryable
    with answering(CHUNKED + chunked(delta("a"))[:-5]) as url:
        stream = Client(url).stream_chat(HI)
        next(stream)
        with pytest.raises(PenstockError, match=r"was closed .* after the answer began") as caught:
            next(stream)
    assert "a proxy in between" in (caught.value.hint or "")
    with answering(CHUNKED + chunked(delta("a"))[:-5], closes=False) as url:
        stream = Client(url, timeout_s=0.02).stream_chat(HI)
        next(stream)
        with pytest.raises(NoAnswer, match="no answer"):
            next(stream)


@pytest.mark.parametrize(
    ("status", "body", "message", "is_retryable"),
    [
        (404, b'{"error":{"message":"The model `x` does not exist.","code":404}}', "404: The model `x`", False),
        (401, b'{"error":"Unauthorized"}', "answered 401: Unauthorized", False),
        (404, b'{"detail":"Not Found"}', "answered 404: Not Found", False),
        (502, b"<html>Bad\n gateway</html>", "answered 502: <html>Bad gateway</html>", True),
        (500, b"", "answered 500: Because", False),
        (429, b'{"error":{"message":"slow down"}}', "answered 429: slow down", True),
        (503, b'{"error":{"message":"no replica"}}', "answered 503: no replica", True),
    ],
)
def test_an_error_status_carries_the_words_of_the_server(
    status: int, body: bytes, message: str, is_retryable: bool
) -> None:
    head = b"HTTP/1.1 %d Because\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    with answering(head + body) as url, pytest.raises(HttpError) as caught:
        list(Client(url).stream_chat(HI))
    assert message in caught.value.message
    assert (caught.value.status, caught.value.is_retryable, caught.value.retry_after_s) == (status, is_retryable, 7.0)


def test_a_base_url_works_with_and_without_v1_a_path_and_a_scheme(engine: InThread) -> None:
    for end in ("", "/", "/v1", "/v1/"):
        client = Client(engine.url + end)
        assert (client.base_url, client.models()[0].name) == (engine.url, "m")
    assert Client("gpu1:8000/team/v1").base_url == "http://gpu1:8000/team"
    assert Client("https://user:secret@api.example.org/v1").base_url == "https://api.example.org"
    for url in ("", "ftp://x", "http://", "http://h:port", "http://h:99999"):
        with pytest.raises(PenstockError, match="cannot use base URL"):
            Client(url)


class Note(msgspec.Struct):
    text: str
    age_s: float | None = None


def test_text_can_be_fetched_and_our_own_structs_posted_with_headers(engine: InThread, client: Client) -> None:
    assert client.get_text("/health") == ""
    assert "vllm:num_requests_running" in client.get_text("/metrics")
    assert "authorization" not in engine.seen[-1].headers
    Client(engine.url, api_key="sk-1").models()
    assert engine.seen[-1].headers["authorization"] == "Bearer sk-1"
    with pytest.raises(HttpError, match="404"):
        client.post_json("/admin/announce", Note("hi"), {"authorization": "Bearer t"})
    assert engine.seen[-1].body == b'{"text":"hi","age_s":null}'
    headers = engine.seen[-1].headers
    assert (headers["authorization"], headers["content-type"]) == ("Bearer t", "application/json")
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello") as url, pytest.raises(PenstockError) as caught:
        Client(url).get_json("/x")
    assert caught.value.detail == "hello", "an answer that is not JSON is shown"


def shakes_hands(certificate: tuple[Path, Path], pinned: Path) -> bool:
    """Whether a client with that pinned certificate takes a server with the other, in memory."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls_context(pinned=str(pinned))
    server.load_cert_chain(*certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    other = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (one, other, one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError:
        return False
    return bool(one.getpeercert())


@pytest.mark.processes
def test_a_pinned_certificate_is_taken_by_any_name_and_no_other_is(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    assert shakes_hands(certificate, certificate[0]), "its name is localhost, and 127.0.0.1 was asked for"
    other = tmp_path / "other.pem"
    name, curve = ["-subj", "/CN=other", "-keyout", str(tmp_path / "key")], ["-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", *curve, "-nodes", *name, "-out", str(other)],
        check=True, capture_output=True,
    )  # fmt: skip
    assert not shakes_hands(certificate, other)
    other.write_bytes(other.read_bytes() + certificate[0].read_bytes())
    assert not shakes_hands(certificate, other), "only the first of a file"
    with pytest.raises(UserError, match="cannot read certificate"):
        tls_context(pinned=str(tmp_path / "key"))
