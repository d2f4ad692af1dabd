"""The fake engine against recordings of the real one, and its faults. No process, no model, no sleep."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import waiting

from penstock.errors import PenstockError
from penstock.testing.fake_engine import replies, requests, startup_log
from penstock.testing.fake_engine.metrics import Metrics
from penstock.testing.fake_engine.options import Options, parse
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import InThread, in_thread
from penstock.wire.answers import Chunk, HttpError, Reply, ToolCall
from penstock.wire.client import Client, Message
from penstock.wire.sse import Parser

pytestmark = pytest.mark.loopback

GOLDEN = Path(__file__).parent / "golden" / "vllm-0.32.0"
JSON = {"content-type": "application/json"}
INSTANT = Options(model="/models/demo", ttft_s=0.0, tokens_per_s=float("inf"), max_model_len=512)
HI = [{"role": "user", "content": "tell me a story"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    with in_thread(replace(INSTANT, served_model_name=("demo", "d2"))) as running:
        yield running


def exchange(engine: InThread, method: str, path: str, body: str | bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=waiting.left_s())
    connection.request(method, path, body, JSON if body is not None else {})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def raw(engine: InThread, request: bytes) -> bytes:
    """What comes back on a bare socket, up to its end."""
    received = b""
    with socket.create_connection(("127.0.0.1", int(engine.url.rpartition(":")[2])), timeout=waiting.left_s()) as peer:
        peer.sendall(request)
        while piece := peer.recv(65536):
            received += piece
    return received


def post(path: str, body: object, header: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"{head}{header or 'x-a: b'}\r\n\r\n".encode() + data


def shape(value: Any) -> Any:
    """Keys in their order and the kinds of their values."""
    if isinstance(value, dict):
        return [(key, shape(part)) for key, part in value.items()]
    if isinstance(value, list):
        return [shape(part) for part in value]
    return type(value).__name__


def shapes_of(stream: bytes) -> list[Any]:
    """The shape of each event; the same several times in a row is one, for a chunk holds any number of tokens."""
    events = [event.data for event in Parser().feed(stream)]
    shapes = [data if data == "[DONE]" else shape(json.loads(data)) for data in events]
    return [each for each, _ in groupby(shapes)]


USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}_stream{name}.sse": (path, {"stream": True, "max_tokens": 4, **options})
    for kind, path in (("chat", "/v1/chat/completions"), ("completion", "/v1/completions"))
    for name, options in (("", {}), ("_usage", USAGE), ("_continuous", CONTINUOUS))
}


def prompt_of(path: str) -> dict[str, object]:
    return {"messages": HI} if "chat" in path else {"prompt": "Singapore is a"}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_chunks_of_recorded_vllm_key_by_key(engine: InThread, name: str) -> None:
    path, options = STREAMS[name]
    status, body = exchange(engine, "POST", path, json.dumps(prompt_of(path) | options))
    assert (status, shapes_of(body)) == (200, shapes_of((GOLDEN / name).read_bytes()))


@pytest.mark.parametrize(
    ("name", "path", "options"),
    [
        ("chat.json", "/v1/chat/completions", {}),
        ("chat_length.json", "/v1/chat/completions", {"max_tokens": 3}),
        ("completion.json", "/v1/completions", {"max_tokens": 4}),
        ("tokenize.json", "/tokenize", {}),
    ],
)
def test_a_whole_answer_has_the_keys_of_recorded_vllm(
    engine: InThread, name: str, path: str, options: dict[str, object]
) -> None:
    recorded = json.loads((GOLDEN / name).read_bytes())
    status, body = exchange(engine, "POST", path, json.dumps(prompt_of(path) | options))
    answer = json.loads(body)
    assert status == 200
    if "tokens" in answer:
        assert len(answer["tokens"]) == answer["count"] == 3
        answer["tokens"] = recorded["tokens"]
    assert shape(answer) == shape(recorded)


def test_the_end_of_a_stream_models_and_version_are_those_of_recorded_vllm(engine: InThread) -> None:
    _, body = exchange(engine, "POST", "/v1/chat/completions", json.dumps({"messages": HI, "stream": True}))
    assert shapes_of(body)[-2:] == shapes_of((GOLDEN / "chat_stream_stop.sse").read_bytes())[-2:]
    last = json.loads(Parser().feed(body)[-2].data)["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({"content": ""}, "stop")
    models = json.loads(exchange(engine, "GET", "/v1/models")[1])
    assert shape(models) == shape(json.loads((GOLDEN / "models.json").read_bytes()))
    assert [card["id"] for card in models["data"]] == ["demo", "d2"]
    assert exchange(engine, "GET", "/version") == (200, (GOLDEN / "version.json").read_bytes())
    assert exchange(engine, "GET", "/health") == exchange(engine, "POST", "/ping", b"") == (200, b"")
    assert replies.error_event(replies.ENGINE_DIED) + replies.DONE == (GOLDEN / "engine_died.sse").read_bytes()


ERRORS: dict[str, Any] = json.loads((GOLDEN / "errors.json").read_bytes())


@pytest.mark.parametrize("name", ERRORS)
def test_a_refusal_has_the_status_and_words_of_recorded_vllm(engine: InThread, name: str) -> None:
    method, path, body, text = ERRORS[name]["request"]
    status, answer = exchange(engine, method, path, text or (json.dumps(body) if body is not None else None))
    assert (status, json.loads(answer)) == (ERRORS[name]["status"], ERRORS[name]["body"])


def test_an_answer_echoes_its_prompt_and_has_vllms_lengths(engine: InThread) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"text": "a b"}, {"text": "日本"}]},
    ]
    client = Client(engine.url)
    reply = client.chat(messages, max_tokens=3)
    assert (reply.text, reply.prompt_tokens) == ("1:a 2:b 3:日本", 2 + 3 + 2 * requests.TOKENS_PER_MESSAGE)
    reply = client.chat(HI, ignore_eos=True)
    assert (reply.prompt_tokens, reply.output_tokens) == (8, 512 - 8)  # the context is full
    reply = client.complete("a " * 510, max_tokens=512)
    assert (reply.output_tokens, reply.finish_reason) == (2, "length")
    chat, completion = client.chat(HI), client.complete("a b")  # without max_tokens
    assert (chat.text, chat.finish_reason, chat.output_tokens) == (expected_text("tell me a story", 32), "stop", 33)
    assert (completion.finish_reason, completion.output_tokens) == ("length", 16)
    for extra in ({"n": 2}, {"prompt": ["a", "b"]}, {"stream_options": {"include_usage": True}}):
        with pytest.raises(HttpError, match="answered 400"):
            client.post_json("/v1/completions", {"prompt": "a"} | extra)


def test_echo_body_answers_with_the_hash_of_the_bytes_that_arrived() -> None:
    with in_thread(replace(INSTANT, echo_body=True)) as engine:
        body = '{"messages": [ {"role":"user","content":"caf\\u00e9"} ],   "stream": true}'
        _, answer = exchange(engine, "POST", "/v1/chat/completions", body)
    events = [json.loads(event.data) for event in Parser().feed(answer)[:-1]]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == hashlib.sha256(body.encode()).hexdigest()


def test_one_connection_carries_many_requests_until_one_asks_to_close(engine: InThread) -> None:
    named = post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "model": "d2"}, "x-request-id: mine")
    last = post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    answers = raw(engine, (named + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") * 3 + last)
    assert answers.count(b"HTTP/1.1 200 OK") == 7
    assert answers.count(b'"id":"cmpl-mine"') == answers.count(b'"text":"1:#5 2:#6"') == 3
    assert b"chunked" not in answers and answers.endswith(b"data: [DONE]\n\n")
    assert raw(engine, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")


# --- Metrics ------------------------------------------------------------------------------------------------------


def series(page: str) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def family(name: str) -> str:
    return re.sub(r"_(bucket|count|sum)$", "", name.partition("{")[0])


def test_every_metric_is_one_of_recorded_vllm_with_its_type_labels_and_buckets() -> None:
    recorded, page = (GOLDEN / "metrics.txt").read_text(), Metrics(Options(model="demo")).page()
    assert {line for line in page.splitlines() if "# TYPE" in line} <= set(recorded.splitlines())
    theirs = {(family(name), *sorted(re.findall(r"(\w+)=", name))) for name in series(recorded)}
    for name in series(page):
        if "cache_config_info" not in name and "_bucket" not in name:
            assert (family(name), *sorted(re.findall(r"(\w+)=", name))) in theirs, name
    edges = [re.findall(r'time_to_first_token_seconds_bucket{.*le="([^"]+)"', text) for text in (recorded, page)]
    assert edges[0] == edges[1]


def test_it_sleeps_and_wakes_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_thread(replace(INSTANT, enable_sleep_mode=True)) as closed:
        assert exchange(closed, "POST", "/sleep?level=1&mode=wait")[0] == 404, "only in the development mode"
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with in_thread(replace(INSTANT, enable_sleep_mode=True)) as engine:

        def post_to(path: str, body: str | None = None) -> tuple[int, Any]:
            status, answer = exchange(engine, "POST", path, body)
            return status, json.loads(answer)

        assert post_to("/sleep?level=2&mode=wait") == (200, {"status": "sleeping", "level": 2})
        assert json.loads(exchange(engine, "GET", "/is_sleeping")[1]) == {"is_sleeping": True}
        page = series(exchange(engine, "GET", "/metrics")[1].decode())
        states = {name: value for name, value in page.items() if "sleep" in name}
        assert sorted(states.values()) == [0, 0, 1]
        assert [value for name, value in states.items() if "discard_all" in name] == [1]
        assert post_to("/wake_up?tags=weights")[1]["status"] == "sleeping"
        with pytest.raises(HttpError, match="dropped"):
            Client(engine.url).chat(HI)
        assert post_to("/collective_rpc", '{"method": "reload_weights"}')[0] == 200
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Client(engine.url).chat, HI, max_tokens=3)
            assert eventually(engine, lambda: [row.path for row in engine.seen].count("/v1/chat/completions") == 2)
            assert engine.metrics.n_waiting == 0
            assert post_to("/wake_up?tags=kv_cache")[1]["status"] == "awake"
            assert waiting.result(5).text == expected_text("tell me a story", 3)
    with in_thread(INSTANT) as without:
        assert exchange(without, "POST", "/sleep?level=1&mode=wait")[0] == 500


def eventually(engine: InThread, is_so: Callable[[], bool]) -> bool:
    """Gives the engine's loop up to 200 turns until `is_so`; reads no clock."""
    for _ in range(200):
        if is_so():
            return True
        exchange(engine, "GET", "/health")
    return False


def test_requests_beyond_max_num_seqs_wait_and_a_client_that_leaves_aborts_its_own() -> None:
    with in_thread(Options(model="m", max_num_seqs=1, ttft_s=0.0, tokens_per_s=100.0)) as engine:
        first = Client(engine.url).stream_chat(HI, max_tokens=1000)
        next(first)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(Client(engine.url).chat, HI, max_tokens=1)
            assert eventually(engine, lambda: engine.metrics.n_waiting == 1)
            assert engine.metrics.n_running == 1 and engine.metrics.kv_tokens > 8
            first.close()
            assert second.result(5).text == "1:tell"
        assert eventually(engine, lambda: engine.metrics.finished["abort"] == 1)
        metrics = engine.metrics
        assert (metrics.n_waiting, metrics.n_running, metrics.kv_tokens) == (0, 0, 0)


# --- Faults -------------------------------------------------------------------------------------------------------


def test_a_hung_engine_stays_healthy_and_makes_no_token() -> None:
    with in_thread(replace(INSTANT, hang_after_requests=1)) as engine:
        client = Client(engine.url, timeout_s=0.03)
        assert client.chat(HI, max_tokens=1).text == "1:tell"
        with pytest.raises(PenstockError, match="no answer"):
            next(client.stream_chat(HI))
        assert engine.metrics.generation_tokens == 1
        assert exchange(engine, "GET", "/health") == (200, b"")


def test_a_crash_mid_stream_comes_after_exactly_that_many_tokens() -> None:
    texts = []
    with in_thread(replace(INSTANT, crash_mid_stream=3)) as engine:
        with pytest.raises(PenstockError, match="lost the connection"):
            for item in Client(engine.url).stream_chat(HI, max_tokens=100):
                assert isinstance(item, Chunk)
                texts.append(item.text)
        with pytest.raises(PenstockError, match="connection refused"):
            Client(engine.url).models()
    assert engine.has_crashed and "".join(texts) == expected_text("tell me a story", 3)


def test_a_crash_after_requests_gives_no_byte_and_may_happen_only_once(tmp_path: Path) -> None:
    options = replace(INSTANT, crash_after_requests=1, fault_once=str(tmp_path / "done"))
    with in_thread(options) as engine:
        client = Client(engine.url)
        client.chat(HI, max_tokens=1)
        client.models()  # only generations count
        with pytest.raises(PenstockError, match="lost the connection"):
            client.chat(HI)
    with in_thread(options) as engine:
        assert [Client(engine.url).chat(HI, max_tokens=1).text for _ in range(2)] == ["1:tell"] * 2


# --- Log and flags ------------------------------------------------------------------------------------------------


def worn(line: str) -> str:
    """A log line without what differs between two runs: numbers, names, and what follows the milestone."""
    line = re.sub(r"(args|config): .*", r"\1", line)
    line = re.sub(r"version .*|\S*ForCausalLM|file:\S+|http:\S+|/\S+\.\.\.|\[\d+:\S+ \S*it\]", "", line)
    line = re.sub(r"(model) \S+\.\.\.", r"\1", line)
    return re.sub(r"[\d.,:]+", "#", line).strip("\r\n█▄▀ ")


def test_the_start_log_is_a_thinned_recording_in_the_same_order() -> None:
    recorded = [worn(line) for line in (GOLDEN / "start.log").read_text().splitlines()]
    options = Options(model="/models/demo", served_model_name=("demo",), shards=1)
    lines = [*startup_log.start(options, 8000), *startup_log.ready(7)]
    at = 0
    for line in (line.render(7, "11-20 12:00:00") for line in lines):
        is_bar = "[" in line and "checkpoint shards" in line
        start = worn(line.partition("[")[0] if is_bar else line)
        later = range(at, len(recorded))
        at = next(i for i in later if recorded[i] == start or (is_bar and recorded[i].startswith(start)))
    bars = [line for line in startup_log.start(Options(load_s=4.08, shards=4), 1) if "shards" in line.text]
    assert [line.wait_s for line in bars] == [0.0, 1.02, 1.02, 1.02, 1.02]
    assert bars[1].text == "\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.02s/it]"


@pytest.mark.parametrize(("oom", "name"), [("no-blocks", "no_blocks"), ("memory", "memory")])
def test_a_refused_start_gives_the_cause_of_recorded_vllm_and_hides_it_last(oom: Any, name: str) -> None:
    recorded = {worn(line) for line in (GOLDEN / f"start_refused_{name}.log").read_text().splitlines()}
    lines = [line.render(7, "11-20 12:00:00") for line in startup_log.refuse(Options(oom=oom), 8000)]
    causes = {worn(line) for line in lines if "ValueError: " in line}
    assert causes and causes <= recorded
    assert worn(lines[-1]).startswith("RuntimeError# Engine core initialization failed")


def test_every_flag_is_an_option_in_the_manual_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--host 127.0.0.1 --port 1 --model m --served-model-name a b --tokens-per-s inf --oom --child"
    options = parse([*argv.split(), "--shutdown-timeout", "3"])
    assert options.names == ("a", "b") and options.oom == "kv-cache" and options.child
    assert (options.tokens_per_s, options.shutdown_timeout) == (float("inf"), 3)
    assert parse(["--model", "m"]) == Options(model="m")
    with pytest.raises(SystemExit) as seen:
        parse(["--model", "m", "--crash-mid-steam", "3"])
    assert seen.value.code == 2
    assert "unrecognized arguments: --crash-mid-steam" in capsys.readouterr().err
    manual = (Path(__file__).parents[1] / "docs" / "how-to" / "testing.md").read_text()
    assert not [f.name for f in fields(Options) if f"`--{f.name.replace('_', '-')}" not in manual]


CHOSEN = {
    "hostile": "<img src=x onerror=alert(1)> **bold**\n\n`code`",
    "think": {"reasoning": "Let me see. ", "text": "Yes, 4."},
    "call": {"tool_calls": [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "time"}]},
    "no system": {"status": 400, "text": "System role not supported"},
}


@pytest.fixture
def chosen(tmp_path: Path) -> Iterator[Client]:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(CHOSEN))
    options = replace(INSTANT, answers=str(path), enable_prompt_tokens_details=True, accepts_images=True)
    with in_thread(options) as running:
        yield Client(running.url, timeout_s=5)


def ask(client: Client, text: object, **fields: Any) -> tuple[Reply, Reply]:
    messages: list[Message] = [{"role": "user", "content": text}]
    *_, streamed = client.stream_chat(messages, None, None, **fields)
    assert isinstance(streamed, Reply)
    return streamed, client.chat(messages, **fields)


def test_a_test_chooses_text_reasoning_and_tool_calls_streamed_and_whole(chosen: Client) -> None:
    for reply in ask(chosen, "hostile"):
        assert (reply.text, reply.finish_reason) == (CHOSEN["hostile"], "stop")
    for reply in ask(chosen, [{"type": "text", "text": "think"}]):
        assert (reply.reasoning, reply.text) == ("Let me see. ", "Yes, 4.")
    for reply in ask(chosen, "call"):
        assert reply.tool_calls == (ToolCall("weather", '{"city": "Rome"}'), ToolCall("time", "{}"))
        assert (reply.finish_reason, reply.text) == ("tool_calls", "")
    streamed, _ = ask(chosen, "hostile", max_tokens=3)
    assert (streamed.text, streamed.finish_reason) == ("<img src=x onerror=alert(1)>", "length")
    assert streamed.output_tokens == 3
    with pytest.raises(HttpError, match="System role not supported"):
        ask(chosen, "no system")
    other, _ = ask(chosen, "tell me", max_tokens=2)
    assert other.text == expected_text("tell me", 2)


def test_images_are_taken_or_refused_and_the_beginning_of_a_chat_is_cached(engine: InThread, chosen: Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [image, {"type": "text", "text": "think"}]
    assert [reply.prompt_tokens for reply in ask(chosen, content)] == [261, 261]
    with pytest.raises(HttpError, match="demo is not a multimodal model"):
        ask(Client(engine.url), content)
    first: list[Message] = [{"role": "user", "content": "one two"}]
    more: list[Message] = [*first, {"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
    replies = [chosen.chat(messages, max_tokens=1) for messages in (first, first, more, more)]
    assert [(reply.prompt_tokens, reply.cached_tokens) for reply in replies] == [(6, 0), (6, 5), (16, 6), (16, 15)]
