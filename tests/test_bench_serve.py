"""`penstock bench serve`, end to end against the fake engine, and its wire against servers of every habit."""

from __future__ import annotations

import csv
import io
import itertools
import json
import signal
import socket
import socketserver
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from golden_files import cases
from launching import Done, call, started
from loopback_server import LoopbackHandler, LoopbackServer, running
from waiting import until

from penstock.bench import serve
from penstock.bench.datasets.tokenizers import FileTokens
from penstock.bench.load.arrivals import Pace, PlannedRequest
from penstock.bench.load.connections import Address
from penstock.bench.load.run import Load, Outcome
from penstock.bench.load.run import run as run_load
from penstock.bench.results import folder as record
from penstock.bench.results import validity
from penstock.bench.results.parse import parse_exchange
from penstock.bench.serve import Report, Run, Service
from penstock.errors import PenstockError, UserError
from penstock.models import files
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import InThread, in_thread

pytestmark = pytest.mark.loopback

CLOSED = Pace(concurrency=4, n_requests=12)
INSTANT = Options(model="m", ttft_s=0, tokens_per_s=float("inf"))
NAMED = Options(model="penstock-demo", ttft_s=0, tokens_per_s=float("inf"))


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    with in_thread(INSTANT) as running:
        yield running


@pytest.fixture(autouse=True)
def own_time_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are threads of this process, whose CPU time and lateness would be the generator's."""
    monkeypatch.setattr(validity, "MAX_CPU_SHARE", 1e9)
    monkeypatch.setattr(validity, "MAX_LATENESS_MS", 1e9)


def service(url: str, **fields: object) -> Service:
    return Service(**{"url": url, "model": "m", **fields})  # type: ignore[arg-type]


def load(
    target: Service,
    requests: list[PlannedRequest],
    pace: Pace,
    bounds: dict[str, float] | None = None,
    n_warmup: int = 1,
) -> Report:
    return serve.run(Run(target, pace, bounds or {}, n_warmup), requests)


def bench(words: str, *more: str, code: int = 0) -> Done:
    """`penstock bench serve` with these words, which ends so."""
    done = call("bench", "serve", *words.split(), *more)
    assert done.code == code, done
    return done


def asked(prompt: str, output_tokens: int) -> list[PlannedRequest]:
    """The request that is sent again and again."""
    return [PlannedRequest(prompt, None, output_tokens)]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("streams", [True, False])
def test_every_request_is_answered_and_counted(engine: InThread, endpoint: str, streams: bool) -> None:
    target = service(engine.url, endpoint=endpoint, streams=streams)
    found = load(target, asked("tell me", 6), CLOSED, n_warmup=2).summary
    assert (found.completed, found.failed, found.total_output_tokens) == (12, 0, 72)
    assert ("ttft" in found.spreads) is streams
    assert found.tokens_per_event == (1.0 if streams else None)


def test_an_open_loop_sends_by_its_clock(engine: InThread) -> None:
    pace = Pace(rate=200.0, arrival="constant", n_requests=20)
    report = load(service(engine.url), asked("a", 3), pace, {"ttft": 5000.0})
    assert [round(request.intended_s, 6) for request in report.requests] == [index / 200 for index in range(20)]
    assert all(request.asked_s >= request.intended_s for request in report.requests)
    assert report.summary.goodput_share == 1.0 and report.rows[0].kind == "vllm"
    timed = load(service(engine.url), asked("a", 2), Pace(concurrency=2, duration_s=1.0), {}, 0)
    assert timed.summary.completed > 2
    assert report.result["engine"][f"{engine.url}/metrics"]["generation_tokens"] >= 0


def test_a_rate_with_a_bound_keeps_its_clock_and_its_bound(engine: InThread) -> None:
    with in_thread(Options(model="m", ttft_s=0.02, tokens_per_s=float("inf"))) as slow:
        pace = Pace(rate=1000.0, concurrency=2, arrival="constant", n_requests=10)
        report = load(service(slow.url), asked("a", 1), pace, n_warmup=0)
    assert report.summary.completed == 10 and report.summary.max_concurrent_requests == 2 and report.is_open
    last = report.requests[-1]
    assert last.intended_s == pytest.approx(0.009) and last.sent_s > 0.07  # the wait for a place counts
    ttft_ms = report.summary.spreads["ttft"].max
    assert ttft_ms > 70 and report.generator.lateness_p99_ms < ttft_ms, "a wait for a place is not the generator's"


def test_every_line_may_have_its_model_and_headers(engine: InThread, tmp_path: Path) -> None:
    requests = [PlannedRequest("a", None, 1, model=name, headers={"x-user": "7"}) for name in ("m", "other")]
    report = load(service(engine.url), requests, Pace(concurrency=1, n_requests=2), n_warmup=0)
    seen = [request for request in engine.seen if request.method == "POST"][-2:]
    assert [(json.loads(each.body)["model"], each.headers["x-user"]) for each in seen] == [("m", "7"), ("other", "7")]
    assert report.summary.errors == {"http 404": 1}


def test_all_at_once_with_chosen_percentiles_and_vllms_file(engine: InThread, tmp_path: Path) -> None:
    words = f"--url {engine.url} --num-prompts 9 --request-rate inf --max-tokens 4 --save-result --out {tmp_path}"
    shown = bench(words, "--metric-percentiles", "50,99.9").out
    assert "P99.9 TTFT (ms):" in shown and "P95 TTFT" not in shown
    assert "Maximum request concurrency:             9" in shown
    result, saved = (json.loads((tmp_path / name).read_text()) for name in ("result.json", "vllm.json"))
    assert result["p99.9_itl_ms"] == saved["p99.9_itl_ms"]
    assert "<th>p99.9</th>" in (tmp_path / "report.html").read_text()
    assert (saved["num_prompts"], saved["request_rate"], saved["max_concurrency"]) == (9, "inf", 9)
    assert saved["output_lens"] == [4] * 9 and [len(gaps) for gaps in saved["itls"]] == [3] * 9
    assert sum(saved["ttfts"]) / 9 == pytest.approx(saved["mean_ttft_ms"] / 1000, abs=1e-5)
    assert saved["errors"] == [""] * 9 and saved["total_output_tokens"] == 36


def test_a_turn_waits_for_the_turn_before(engine: InThread) -> None:
    asks = [PlannedRequest("a", None, 4, wait_for=before) for before in (None, 0, 1)]
    report = load(service(engine.url), asks, Pace(rate=1e5, arrival="constant", n_requests=6), {}, 0)
    requests = report.requests
    assert all(requests[index].sent_s >= requests[index - 1].end_s for index in (1, 2, 4, 5))
    assert report.summary.completed == 6


def test_a_first_request_that_fails_ends_it_with_the_servers_words(engine: InThread) -> None:
    with pytest.raises(UserError, match=r"http 404.*nobody"):
        load(service(engine.url, model="nobody"), asked("a", 1), CLOSED)
    with pytest.raises(PenstockError, match="connection refused"):
        load(service(f"http://127.0.0.1:{free_port()}"), asked("a", 1), CLOSED)
    report = load(service(engine.url, model="nobody"), asked("a", 1), CLOSED, {}, 0)  # without a warm-up
    assert report.summary.errors == {"http 404": 12} and not report.verdict.valid
    assert report.result["warmup_requests"] == 0


def test_an_address_may_have_a_path_and_no_password() -> None:
    assert serve.parts_of("http://h/@a").path == "/@a"
    assert serve.resolve("127.0.0.1:80/api/v1/") == Address("http", "127.0.0.1", 80, "127.0.0.1", "/api")
    assert (serve.resolve("https://127.0.0.1").authority, serve.resolve("https://127.0.0.1").port) == ("127.0.0.1", 443)
    for url in ("ftp://a", "http://", "http://a:b", "http://.foo", f"http://{'a' * 70}.b"):
        with pytest.raises(UserError, match="cannot use base URL"):
            serve.resolve(url)
    for url in ("http://u:sekret@host/v1", "u:sekret@host", "http://u:sek/ret@host", "https://k@h"):
        with pytest.raises(UserError, match="password") as caught:
            serve.resolve(url)
        assert "sek" not in caught.value.message and "OPENAI_API_KEY" in str(caught.value.hint)


def test_the_key_is_sent_and_told_to_nobody(engine: InThread) -> None:
    report = load(service(engine.url, key="sk-secret"), asked("a", 1), CLOSED)
    assert engine.seen[-2].headers["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in json.dumps(report.result)
    with pytest.raises(UserError, match="API key"):
        load(service(engine.url, key="a\r\nb"), asked("a", 1), CLOSED)


# -- the command


def bodies(engine: InThread) -> list[dict[str, Any]]:
    """What it was asked."""
    return [json.loads(seen.body) for seen in engine.seen if seen.method == "POST"]


def test_the_command_prints_vllms_names_and_writes_the_folder(engine: InThread, tmp_path: Path) -> None:
    words = f"--url {engine.url} --requests 9 --concurrency 3 --input-tokens 5 --output-tokens 4 --json"
    words += f" --goodput ttft:9000 e2el:9000 --out {tmp_path}"
    result = bench(words.replace("http://", "")).json
    assert result["service"]["url"] == engine.url
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (9, 0, 36)
    names = {f"{word}_{name}_ms" for word in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    names |= {"duration", "request_throughput", "output_throughput", "total_token_throughput", "valid", "generator"}
    assert names <= result.keys() and {"cpu_share", "lateness_p99_ms"} <= result["generator"].keys()
    assert (result["goodput_share"], result["flags"]["requests"]) == (1.0, 9)
    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 9
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [(row["index"], row["output_tokens"]) for row in rows] == [(str(index), "4") for index in range(9)]
    gaps = list(csv.DictReader((tmp_path / "itl.csv").open()))
    assert (tmp_path / "engine.csv").read_text().startswith("time_s,source,kind,running,waiting,kv_use")
    read = record.load(tmp_path)
    assert (len(read.done), len(read.gaps), read.gaps[0]) == (9, 27, float(gaps[0]["itl_ms"]))
    assert read.engine and "running" in read.engine[0].values


def test_people_get_the_blocks_they_know(engine: InThread, home: Path) -> None:
    words = f"--url {engine.url} --model m --requests 20 --rate 1000 --max-tokens 3 --no-stream --formulas"
    shown = bench(f"{words} --burstiness 0.2", "--prompt", "Singapore is a").out
    for line in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     20",
        "Request rate configured (RPS):           1000.00",
        "Total generated tokens:                  60",
        "----------------End-to-end Latency----------------",
        *("Response time histogram:", "Latency distribution:", "  [200]\t20 responses", "tpot:"),
    ):
        assert line in shown
    assert "Time to First Token" not in shown.split("tpot:")[0]
    (folder,) = (home / "bench").iterdir()
    pace = json.loads((folder / "result.json").read_text())["pace"]
    assert (pace["arrival"], pace["burstiness"]) == ("gamma", 0.2)  # a burstiness alone means gamma


NOT_UTF_8 = ("--requests 1 --rate 1 --prompt \udcff --warmup 0", "not UTF-8")


@pytest.mark.parametrize(("words", "said"), [*cases("bench_serve_mistakes.txt"), NOT_UTF_8])
def test_what_cannot_be_run_is_refused(words: str, said: str, home: Path) -> None:
    refused = bench(f"--url http://127.0.0.1:1 --model m --json {words}", code=2)
    assert said in refused.json["error"]["message"]
    assert not [*home.glob("bench/*")]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_random_prompts_are_exact_where_the_models_tokenizer_is_here(
    engine: InThread, endpoint: str, tmp_path: Path, home: Path
) -> None:
    demo = FileTokens(files.BUNDLED / "tokenizer.json")
    words = "--requests 5 --concurrency 2 --warmup 0 --max-tokens 2 --input-tokens 37"
    with in_thread(NAMED) as named:
        to_named = f"--url {named.url} --endpoint {endpoint} {words}"
        assert "prompts of exactly 37 tokens, counted by" in bench(to_named).err
        sent = bodies(named)
        is_chat = endpoint == "chat"
        texts = [body["messages"][0]["content"] if is_chat else body["prompt"] for body in sent]
        assert [demo.count(text, special=not is_chat) for text in texts] == [37] * 5 and len(set(texts)) == 5
        assert "no tokenizer.json" in bench(f"{to_named} --tokenizer {tmp_path / 'none'}", code=2).err
    unknown = bench(f"--url {engine.url} {words}")  # a model whose tokenizer is not here
    assert "prompts of about 37 tokens, random words: no tokenizer.json on this machine" in unknown.err
    bench(f"--url {engine.url} {words} --dataset sharegpt:x --prompt y", code=2)


@pytest.mark.parametrize("words", ["", "--dataset random", "--dataset turns:turns=2", "--dataset prefix:n=2,prefix=9"])
def test_the_warm_ups_prompts_are_not_sent_again(words: str, home: Path) -> None:
    shape = "--requests 6 --concurrency 2 --warmup 3 --input-tokens 9 --max-tokens 2"
    with in_thread(NAMED) as engine:
        bench(f"--url {engine.url} {shape} {words}")
        sent = [body["messages"][-1]["content"] for body in bodies(engine)]
    assert len(sent) == 9 and not {*sent[:3]} & {*sent[3:]} and len({*sent[:3]}) == 3


def test_a_second_run_asks_something_else_unless_the_seed_is_given(home: Path) -> None:
    prompts, seeds = [], []
    with in_thread(INSTANT) as engine:
        words = f"--url {engine.url} --requests 3 --concurrency 1 --warmup 0 --max-tokens 1 --json"
        for seed in ("", "", "--seed 5", "--seed 5"):
            seeds.append(bench(f"{words} {seed}").json["flags"]["seed"])
            prompts.append([str(body) for body in bodies(engine)[-3:]])
    assert not {*prompts[0]} & {*prompts[1]} and prompts[2] == prompts[3]
    assert seeds[0] != seeds[1] and seeds[2:] == [5, 5]


@pytest.fixture
def behind_tls(certificate: tuple[Path, Path]) -> Iterator[str]:
    """A server of whole answers that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    class Handler(LoopbackHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            usage = {"prompt_tokens": 1, "completion_tokens": 5}
            self.answer({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": usage})

        def answer(self, value: object) -> None:
            self.send(200, json.dumps(value).encode(), {"content-type": "application/json"})

    tls = LoopbackServer(Handler)
    tls.socket = context.wrap_socket(tls.socket, server_side=True)
    with running(tls):
        yield f"https://localhost:{tls.server_port}"


def test_tls_is_spoken_and_the_certificate_checked(
    behind_tls: str, certificate: tuple[Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--url {behind_tls} --requests 9 --concurrency 3 --max-tokens 5 --json"
    assert "certificate" in bench(f"{words} --model m", code=1).json["error"]["message"]
    result = bench(f"{words} --insecure").json
    assert (result["model"], result["completed"], result["failed"], result["total_output_tokens"]) == ("m", 9, 0, 45)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert bench(f"{words} --model m").json["completed"] == 9


def test_without_an_address_a_deployment_must_run(home: Path) -> None:
    assert 'cannot find deployment "one"' in bench("one --requests 1 --rate 1", code=2).err
    assert "cannot choose a deployment: none runs" in bench("--requests 1 --rate 1", code=2).err


def test_a_run_that_is_not_valid_exits_with_1(engine: InThread, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validity, "MAX_LATENESS_MS", -1.0)
    words = "--model m --requests 2 --concurrency 1 --warmup 0 --max-tokens 1 --json --url"
    result = bench(words, engine.url, code=1).json
    assert (result["completed"], result["valid"]) == (2, False)
    assert "late at p99" in result["invalid_because"][0]


def test_a_trace_is_replayed_to_its_end(engine: InThread, tmp_path: Path, home: Path) -> None:
    timed = [{"timestamp": index * 20, "input_length": 5, "output_length": 1} for index in range(7)]
    asks = [{"prompt": "a", "max_tokens": 1, "offset_s": index * 1e-4} for index in range(1200)]
    for name, rows in (("timed", timed), ("asks", asks)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    words = f"--url {engine.url} --model m --json"
    result = bench(f"{words} --dataset replay:{tmp_path}/timed --tokenizer {files.BUNDLED}").json
    assert (result["completed"], result["pace"]["arrival"], result["pace"]["n_requests"]) == (7, "replay", 7)
    result = bench(f"{words} --dataset jsonl:{tmp_path}/asks --arrival replay --no-stream").json
    assert result["completed"] + result["failed"] == 1200


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_leave_the_result_so_far(number: signal.Signals, tmp_path: Path) -> None:
    reads, is_killed = tmp_path / record.RAW, number == signal.SIGKILL
    with in_thread(Options(model="m", ttft_s=0, tokens_per_s=50)) as slow:
        words = f"--url {slow.url} --model m --requests 1000 --concurrency 4 --output-tokens 5 --warmup 0 --json"
        with started("bench", "serve", *words.split(), "--out", tmp_path) as running:
            until(lambda: len(slow.seen) >= 20 and reads.stat().st_size >= 1000, "some answers")
            running.send_signal(number)
            running.communicate()
    assert running.returncode == (-number if is_killed else 130) and reads.exists() is is_killed
    assert call("bench", "report", tmp_path).code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["completed"] < 1000 and not result["valid"]
    assert result["unfinished"] == (0 if is_killed else 4)


# -- the wire

BODY = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def server(answer: Callable[[socket.socket, int], None]) -> Iterator[Address]:
    """Calls `answer(connection, number of the request on it)` for each request, one connection after the other."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                for number in itertools.count():
                    if not self.request.recv(65536):
                        return
                    answer(self.request, number)

    listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    with running(listener):
        yield Address("http", "127.0.0.1", int(listener.server_address[1]), "127.0.0.1")


def pieces(*parts: bytes, close: bool = False) -> Callable[[socket.socket, int], None]:
    def answer(sock: socket.socket, _: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            sock.sendall(part)
            time.sleep(0.003)
        if close:
            sock.shutdown(socket.SHUT_RDWR)

    return answer


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY)
ENDING = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CRLF = BODY.replace(b"\n", b"\r\n")
HABITS = {
    "length": pieces(WHOLE + BODY),
    "length in parts": pieces(WHOLE[:9], WHOLE[9:] + BODY[:5], BODY[5:]),
    "chunks": pieces(CHUNKED, chunk(BODY[:20]), chunk(BODY[20:]), b"0\r\n\r\n"),
    "end with the last chunk": pieces(CHUNKED + chunk(BODY) + b"0\r\n\r\n"),
    "end cut anywhere": pieces(CHUNKED + chunk(BODY), b"0", b"\r", b"\n\r", b"\n"),
    "end cut in the chunk": pieces(CHUNKED + chunk(BODY)[:-1], b"\n0\r\n", b"\r\n"),
    "trailers": pieces(CHUNKED + chunk(BODY), b"0\r\nx: y\r\n\r\n"),
    "CR LF": pieces(CHUNKED, chunk(CRLF[:30]), chunk(CRLF[30:]), b"0\r\n\r\n"),
    "a 100 before": pieces(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunk(BODY) + b"0\r\n\r\n"),
    "an early hint": pieces(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n", CHUNKED, chunk(BODY) + b"0\r\n\r\n"),
    "until closed": pieces(ENDING, BODY, close=True),
    "closes after": pieces(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + WHOLE[17:] + BODY, close=True),
}
REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"


def errors(outcome: Outcome) -> list[str | None]:
    return [raw.error for raw in outcome.exchanges.read()]


@pytest.mark.parametrize("habit", HABITS)
def test_an_answers_end_is_found_whatever_the_servers_habit(habit: str) -> None:
    with server(HABITS[habit]) as address:
        outcome = run_load(address, Load([REQUEST], concurrency=1, n_requests=3, timeout_s=5))
    assert errors(outcome) == [None] * 3
    for raw in outcome.exchanges.read():
        request, _ = parse_exchange(raw, True)
        assert (request.error, request.n_events) == (None, 1)
        assert raw.times == sorted(raw.times) and 0 <= raw.times[0] <= outcome.ended_s - outcome.began_s


def test_a_connection_closed_while_idle_costs_nothing() -> None:
    def answer(sock: socket.socket, number: int) -> None:
        if number:  # takes the second request on each connection, and hangs up instead of answering
            sock.shutdown(socket.SHUT_RDWR)
        else:
            sock.sendall(WHOLE + BODY)

    with server(answer) as address:
        outcome = run_load(address, Load([REQUEST], concurrency=1, n_requests=5))
    assert errors(outcome) == [None] * 5
    assert outcome.n_connections > 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (pieces(close=True), "connection closed"),
        (pieces(CHUNKED + chunk(BODY), close=True), "connection closed"),
        (pieces(b"nonsense\r\n\r\n"), "malformed HTTP"),
    ],
)
def test_a_broken_connection_is_an_error_of_its_kind(answer: Callable[[socket.socket, int], None], error: str) -> None:
    with server(answer) as address:
        outcome = run_load(address, Load([REQUEST], concurrency=2, n_requests=4))
    assert errors(outcome) == [error] * 4


def test_an_answer_over_the_timeout_is_no_success() -> None:
    with server(pieces(CHUNKED + chunk(BODY))) as address:  # it never ends
        outcome = run_load(address, Load([REQUEST], concurrency=2, n_requests=2, timeout_s=0.05))
    assert errors(outcome) == ["timeout"] * 2

    def late(sock: socket.socket, _: int) -> None:
        time.sleep(0.015)  # over before the first look at what is late
        sock.sendall(WHOLE + BODY)

    with server(late) as address:
        outcome = run_load(address, Load([REQUEST], concurrency=1, n_requests=1, timeout_s=0.01))
    assert parse_exchange(next(outcome.exchanges.read()), True)[0].error == "timeout"
    with socket.socket() as listener, socket.socket() as first:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)  # it never accepts
        first.connect(listener.getsockname())  # its backlog is full: what is sent to it further gets no answer
        address = Address("http", "127.0.0.1", listener.getsockname()[1], "127.0.0.1")
        outcome = run_load(address, Load([REQUEST], concurrency=100, n_requests=100, timeout_s=0.05))
    assert {*errors(outcome)} == {"timeout"}


def test_refused_connections_do_not_use_up_the_requests_and_a_server_that_is_gone_ends_the_run() -> None:
    address = Address("http", "127.0.0.1", free_port(), "127.0.0.1")
    outcome = run_load(address, Load([REQUEST], concurrency=4, n_requests=10_000, give_up_s=0.05))
    assert {*errors(outcome)} == {"connection refused"} and len(errors(outcome)) < 60
    assert "the server was gone" in outcome.cut_short and not outcome.was_interrupted


def test_a_server_that_comes_back_is_measured_on(engine: InThread) -> None:
    def answer(sock: socket.socket, number: int) -> None:
        status = b"503 Service Unavailable" if number < 3 else b"200 OK"
        sock.sendall(WHOLE.replace(b"200 OK", status) + BODY)

    with server(answer) as address:
        outcome = run_load(address, Load([REQUEST], concurrency=1, n_requests=6))
    ends = [raw.end_s for raw in outcome.exchanges.read()]
    assert [later - earlier > 0.015 for earlier, later in itertools.pairwise(ends)] == [True] * 3 + [False] * 2


def test_a_killed_run_leaves_what_was_measured(engine: InThread, tmp_path: Path) -> None:
    what = Run(service(engine.url, key="sk-secret"), CLOSED, flags={"requests": 12})
    report = serve.run(what, asked("tell me", 6), out=tmp_path)
    assert record.is_unfinished(tmp_path) and b"sk-secret" not in (tmp_path / record.RUN).read_bytes()
    reads = tmp_path / record.RAW
    reads.write_bytes(reads.read_bytes()[:-400])  # a kill in the middle of a write
    for name in (record.REQUESTS, record.GAPS):
        (tmp_path / name).unlink()
    assert call("bench", "report", tmp_path).code == 0
    result = record.load(tmp_path)
    n = len(result.done)
    assert 0 < n <= 12 and result.number("completed") == n
    assert result.summary["invalid_because"][-1].startswith("the run was killed") and result.summary["flags"]
    assert not reads.exists() and "not valid" in (tmp_path / "report.html").read_text()
    assert [request.input_tokens for request in result.done] == [row.input_tokens for row in report.requests][:n]


def test_a_full_disk_ends_the_run_with_what_was_written(engine: InThread) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            if self.tell() > 5000:
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    address = serve.resolve(engine.url)
    message = serve.encode(service(engine.url), address, *asked("tell me", 6))
    outcome = run_load(address, Load([message], concurrency=4, n_requests=10_000), file=Full())
    assert outcome.cut_short == "could not write what was read: No space left on device"
    assert 0 < len(errors(outcome)) < 20


def test_a_page_of_metrics_gets_its_own_key_and_no_other() -> None:
    pages = [f"http://127.0.0.1:{port}/metrics" for port in (8000, 9000, 9)]
    keys = dict(zip(pages, ("scrape", "engine"), strict=False))
    service = serve.Service("http://127.0.0.1:8000", "m", key="k", metrics_urls=tuple(pages), page_keys=keys)
    heads = [source.request for _, source in serve._sources(service, serve.resolve(service.url))]
    assert [b"Bearer scrape" in heads[0], b"Bearer engine" in heads[1], b"uthorization" in heads[2]] == [
        True,
        True,
        False,
    ]
