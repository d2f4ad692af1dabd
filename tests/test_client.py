"""The client against the fake engine, and against servers that misbehave byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from penstock.errors import PenstockError
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import InThread, in_thread
from penstock.wire import http1
from penstock.wire.client import Chunk, Client, HttpError, NoAnswer, Reply

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


def stream_of(url: str) -> tuple[list[Chunk], Reply]:
    *chunks, reply = Client(url, timeout_s=5).stream_chat(HI)
    assert isinstance(reply, Reply)
    return [chunk for chunk in chunks if isinstance(chunk, Chunk)], reply


def test_models_are_listed_with_state_and_aliases_when_the_server_names_them(client: Client) -> None:
    assert [card.name for card in client.models()] == ["m", "alias"]
    body = b'{"data":[{"id":"a","state":"loading","aliases":["b"]}]}'
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        (card,) = Client(url).models()
    assert (card.name, card.state, card.aliases) == ("a", "loading", ("b",))


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


def test_the_key_travels_in_the_authorization_header_only(engine: InThread) -> None:
    Client(engine.url, api_key="sk-1").models()
    assert engine.seen[-1].headers["authorization"] == "Bearer sk-1"
    Client(engine.url).models()
    assert "authorization" not in engine.seen[-1].headers


def usage(n_tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":%d}}\n\n' % n_tokens


def test_times_count_from_the_request_and_speed_from_the_first_piece() -> None:
    ticks = iter([10.0, 10.5, 10.75, 11.0, 12.0])  # sent, three pieces, end
    body = chunked(delta("a"), delta("b"), delta("c", "stop"), usage(11), b"data: [DONE]\n\n")
    with answering(CHUNKED + body) as url:
        *chunks, reply = Client(url, clock=lambda: next(ticks)).stream_chat(HI)
    assert [chunk.at_s for chunk in chunks if isinstance(chunk, Chunk)] == [0.5, 0.75, 1.0]
    assert isinstance(reply, Reply)
    assert (reply.ttft_s, reply.duration_s, reply.tokens_per_s) == (0.5, 2.0, 20.0)
    assert (reply.output_tokens, reply.replica, reply.request_id) == (11, "3", "abc")


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
        _, reply = stream_of(url)
    assert (reply.text, reply.output_tokens, reply.tokens_per_s) == (text, output_tokens, None)


def test_a_stream_cut_into_single_bytes_reads_the_same() -> None:
    body = b": keep-alive\n\n" + delta("日本", None) + delta(" 🚰", "stop") + b"data: [DONE]\n\n"
    pieces = [chunked(body[i : i + 1])[:-5] for i in range(len(body))]
    with answering(CHUNKED, *pieces, b"0\r\n\r\n") as url:
        chunks, reply = stream_of(url)
    assert [chunk.text for chunk in chunks] == ["日本", " 🚰"]
    assert reply.text == "日本 🚰"


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
        stream_of(url)
    assert caught.value.is_retryable
    assert message != "ended the stream" or "after 4 characters" in str(caught.value.detail)


def test_reasoning_comes_apart_from_the_answer_and_starts_the_clock() -> None:
    thought = b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n'
    thought += b'data: {"choices":[{"delta":{"reasoning_content":"!"}}]}\n\n'
    with answering(CHUNKED + chunked(thought, delta("yes", "stop"))) as url:
        chunks, reply = stream_of(url)
    assert [(chunk.text, chunk.is_reasoning) for chunk in chunks] == [("hm", True), ("!", True), ("yes", False)]
    assert (reply.text, reply.ttft_s) == ("yes", chunks[0].at_s)


def test_closing_a_stream_early_stops_the_engine() -> None:
    with in_thread(Options(model="m", ttft_s=0.0, tokens_per_s=500.0)) as engine:
        stream = Client(engine.url, timeout_s=5).stream_chat(HI, max_tokens=1000)
        next(stream)
        assert engine.metrics.n_running == 1
        stream.close()
        for _ in range(100):
            if not engine.metrics.n_running:
                break
            threading.Event().wait(0.001)
        assert engine.metrics.finished["abort"] == 1


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


def test_an_answer_that_is_not_json_is_shown_in_the_detail() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    with answering(answer) as url, pytest.raises(PenstockError) as caught:
        Client(url).get_json("/x")
    assert caught.value.detail == "hello"


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
    with pytest.raises(HttpError, match="404"):
        client.post_json("/admin/announce", Note("hi"), {"authorization": "Bearer t"})
    assert engine.seen[-1].body == b'{"text":"hi","age_s":null}'
    headers = engine.seen[-1].headers
    assert (headers["authorization"], headers["content-type"]) == ("Bearer t", "application/json")
