"""The bundled model on the embedded engine and on real vLLM, behind the real gateway. One model load an engine.

Commands run as the user runs them: each in a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from dashboard_queries import all_queries, queries
from launching import Place, a_place, call, measured, replica_of
from loopback_server import running
from prometheus_rig import Prometheus
from trace_collector import TraceCollector
from waiting import left_s, until

from penstock import run_folder
from penstock.deployment import metrics
from penstock.engines.vllm.names import RUNNING
from penstock.observe.boards.operations import OPERATIONS
from penstock.run_folder import Run
from penstock.testing.demo_prompts import DEMO_PROMPTS, MAX_TOKENS, TEMPERATURE, DemoPrompt
from penstock.wire.announcement import engine_key
from penstock.wire.answers import HttpError, Reply
from penstock.wire.client import Client
from penstock.wire.model_list import ReplicaCount

TRUTH_S = 60.0  # 10 s are promised, on a machine that is not as busy as one that runs tests
CAPITAL: Any = [{"role": "user", "content": "What is the capital of South Korea?"}]


class Live:
    """A running deployment: its client, its commands, its processes."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.run = Run(home / "runs" / name)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PENSTOCK_HOME": str(self.home)}
        argv = [sys.executable, "-m", "penstock.cli.main", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=left_s())

    def status(self) -> dict[str, Any]:
        done = self.command("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert isinstance(facts, dict)
        return facts

    def wait(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        return until(lambda: [facts] if is_so(facts := self.status()) else [], f"{what} in {self.name}")[0]

    @property
    def client(self) -> Client:
        return Client(self.run.url, timeout_s=left_s())

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.run.url}/v1", api_key="unused", max_retries=0)

    def seoul(self) -> str:
        return self.client.chat(CAPITAL, model=self.name, max_tokens=40, temperature=0).text


@contextlib.contextmanager
def deployed(engine: str, name: str, *flags: str) -> Iterator[Live]:
    """`penstock up` of the bundled model; at the end `penstock down`, and nothing of it may be left."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-home-") as folder,
        a_place(Path(folder)) as place,
    ):
        live = Live(Path(folder) / "home", name)
        done = live.command("up", "--name", name, "--engine", engine, "--port", "0", *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        place.note(live.run)
        yield live


def ask(client: Client, row: DemoPrompt, model: str) -> Reply:
    if row.kind == "chat":
        messages = [{"role": "user", "content": row.prompt}]
        return client.chat(messages, model=model, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
    return client.complete(row.prompt, model=model, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)


# For the dashboards.
SETTINGS = (
    "gateway.hold_s=600",  # a start of vLLM beside other tests takes more than a minute
    "observe={prometheus: true, grafana: true}",
    "workload={ttft_ms: 30000, tpot_ms: 10000}",
    "engine.env.OTEL_BSP_SCHEDULE_DELAY=200",  # milliseconds, in place of 5 s
    # Accepted by vLLM, as `engine.load: auto` passes them.
    "engine.load=safetensors",
    "engine.args.safetensors-load-strategy=prefetch",
)
FLAGS = {"vllm": tuple(word for setting in SETTINGS for word in ("--set", setting))}
ENGINES = [pytest.param("llamacpp", marks=pytest.mark.llamacpp), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with running(TraceCollector()) as collector:
        yield collector


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest, collector: TraceCollector) -> Iterator[Live]:
    traces = ("--set", f"gateway.traces.endpoint={collector.url}")
    with deployed(request.param, f"real-{request.param}", *FLAGS.get(request.param, ()), *traces) as running:
        yield running


def test_greedy_answers_are_the_reference_texts(live: Live) -> None:
    wrong = {
        row.prompt: reply.text for row in DEMO_PROMPTS if (reply := ask(live.client, row, live.name)).text != row.text
    }
    assert not wrong


def test_the_engine_itself_asks_for_its_key(live: Live) -> None:
    announcement, body = replica_of(live.run).announcement, {"model": live.run.name, "prompt": "hi", "max_tokens": 1}
    assert announcement is not None and announcement.url is not None
    with pytest.raises(HttpError) as refused:
        Client(announcement.url).post_json("/v1/completions", body)
    assert refused.value.status == 401
    key = engine_key(live.run.admin_token())
    assert Client(announcement.url, key).post_json("/v1/completions", body)["choices"]


def test_the_openai_client_works(live: Live) -> None:
    """The official Python client: chat, streamed chat, completions, models."""
    client = live.openai
    assert [model.id for model in client.models.list()] == [live.name]
    chat = client.chat.completions.create(model=live.name, messages=CAPITAL, temperature=0)
    assert "Seoul" in str(chat.choices[0].message.content)
    stream = client.chat.completions.create(
        model="penstock-demo", messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    pieces = [choice.delta.content for event in events for choice in event.choices if choice.delta.content]
    assert len(pieces) > 1 and "".join(pieces) == chat.choices[0].message.content
    assert chat.usage and events[-1].usage
    assert events[-1].usage.completion_tokens == chat.usage.completion_tokens
    row = next(row for row in DEMO_PROMPTS if row.prompt == "Singapore is a")
    text = client.completions.create(model=live.name, prompt=row.prompt, temperature=0, max_tokens=MAX_TOKENS)
    assert text.choices[0].text == row.text
    assert text.usage is not None and text.usage.prompt_tokens > 1


@pytest.mark.nightly
def test_a_repeated_prompt_is_counted_as_cached_and_the_row_of_its_model_says_how_long_one_may_be(live: Live) -> None:
    prompt = "What is penstock? " * 40  # vLLM without a GPU caches blocks of 128 tokens
    first, second = (live.client.complete(prompt, max_tokens=1) for _ in range(2))
    assert first.prompt_tokens and first.cached_tokens is not None and second.cached_tokens is not None
    assert first.cached_tokens < 16 < second.cached_tokens < first.prompt_tokens
    (card,) = live.client.models()
    assert (card.max_model_len, card.input_modalities, card.replicas) == (1024, ("text",), ReplicaCount(1, 1))


@pytest.mark.nightly
def test_a_load_test_measures_it(live: Live) -> None:
    """The same prompts again are in the engine's prefix cache, and the result says so."""
    words = "--requests 4 --concurrency 2 --input-tokens 400 --output-tokens 4 --seed 7"
    first, again = (live.command("bench", "serve", live.name, *words.split(), *more) for more in (["--json"], []))
    result, engine = measured(first.returncode, first.stdout), live.name.removeprefix("real-")
    assert (result["completed"], result["failed"]) == (4, 0)
    assert sorted(page["kind"] for page in result["engine"].values()) == sorted(["gateway", engine])
    if engine == "vllm":
        assert "TTFT is that of a warm cache" in again.stdout


# What is not there without a GPU, keys and prices, and where nothing went wrong.
NOT_HERE = re.compile(
    r"penstock_gpu_|DCGM_|penstock_key_|penstock_tokens_total|penstock_request_hold_|penstock_ejections_total"
    r'|ALERTS|code=~"5'
)


@pytest.mark.vllm
@pytest.mark.parametrize("live", ENGINES[1:], indirect=True)
def test_every_query_of_the_dashboards_has_an_answer(live: Live) -> None:
    """The deployment's own Prometheus reads its gateway and its engine every 5 s."""
    prometheus = Prometheus(metrics.prometheus_url(live.run))
    source = live.run.path / "grafana" / "provisioning" / "datasources" / "penstock.yaml"
    assert yaml.safe_load(source.read_text("utf-8"))["datasources"][0]["url"] == prometheus.url
    river = next(row for row in DEMO_PROMPTS if "river" in row.prompt)
    messages = [{"role": "user", "content": river.prompt}]

    def is_measured() -> bool:
        assert "Seoul" in live.seoul()
        list(live.client.stream_chat(messages, model=live.name, max_tokens=MAX_TOKENS, temperature=0))
        rates = (f"{name}[30s]" for name in ("penstock_requests_total", "penstock_time_per_output_token_seconds_count"))
        return bool(prometheus.ask(f"rate({RUNNING}[30s])")) and all(prometheus.ask(f"rate({of}) > 0") for of in rates)

    until(is_measured, "two scrapes with requests between")
    assert prometheus.ask(RUNNING)[0][0].items() >= {"deployment": live.name, "model_name": live.name}.items()
    # The promised latencies are bounds of the engine's own histograms.
    assert prometheus.ask('vllm:inter_token_latency_seconds_bucket{le="0.002"}')
    assert prometheus.ask('vllm:time_to_first_token_seconds_bucket{le="30.0"}')
    asked = [(title, expr.replace("[5m]", "[30s]").replace("[1h:1m]", "[20s:1s]")) for title, expr in all_queries()]
    for title, expr in asked:
        if not NOT_HERE.search(expr):
            until(lambda: prometheus.ask(expr), f"{title}: an answer to {expr}")  # noqa: B023 - called at once
    tiles = [each for each in asked[: len(queries(OPERATIONS))] if each[0] in ("Replicas", "TTFT kept", "Failed")]
    assert [(title, prometheus.ask(expr)[0][1]) for title, expr in tiles] == [
        *(("Replicas", 1.0), ("Replicas", 1.0), ("Failed", 0.0), ("TTFT kept", 1.0))
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("live", ENGINES[1:], indirect=True)
def test_the_span_of_vllm_hangs_below_that_of_the_gateway(live: Live, collector: TraceCollector) -> None:
    trace_id = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    live.openai.completions.create(model=live.name, prompt="Singapore is a", max_tokens=4, extra_headers=headers)
    until(lambda: len(collector.spans(trace_id)) == 2, "both spans")
    (ours,) = [span for span in collector.spans(trace_id) if span.parent_id == "00f067aa0ba902b7"]
    (theirs,) = [span for span in collector.spans(trace_id) if span != ours]
    assert (ours.name, theirs.parent_id) == (f"text_completion {live.name}", ours.span_id)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("live", "role"),
    [
        pytest.param("llamacpp", "engine", marks=pytest.mark.llamacpp),
        *(pytest.param("vllm", role, marks=pytest.mark.vllm) for role in ("engine", "EngineCore")),
    ],
    indirect=["live"],
)
def test_a_killed_engine_comes_back(live: Live, role: str) -> None:
    """kill -9 of one process: status names it within ten seconds, it comes back, and a request until then is held."""

    def n_restarts(facts: dict[str, Any]) -> int:
        return int(facts["replicas"][0]["n_restarts"])

    facts = live.status()
    before = n_restarts(facts)
    (pid, *_) = [row["pid"] for row in facts["replicas"][0]["announcement"]["processes"] if row["role"] == role]
    os.kill(pid, 9)
    began = time.monotonic()
    live.wait(lambda facts: n_restarts(facts) > before or facts["phase"] != "ready", "its death is noticed")
    assert time.monotonic() - began < TRUTH_S
    assert "Seoul" in live.seoul(), "a request sent while the engine was away"
    facts = live.wait(lambda facts: facts["phase"] == "ready" and n_restarts(facts) > before, "it is back")
    assert facts["replicas"][0]["restarts"][-1]["reason"]
    assert "Seoul" in live.seoul()


@pytest.mark.nightly
@pytest.mark.vllm
def test_vllm_that_refuses_its_settings_says_why(place: Place) -> None:
    """A start that cannot work: exit code 1, our reading, vLLM's last lines, and nothing left."""
    flags = ("--port", "0", "--set", "engine.args.dtype=float99")
    done = call("up", "--name", "refused", "--engine", "vllm", *flags)
    assert done.code == 1
    assert 'could not start replica 0 of "refused": vLLM exited with code 2: vLLM refused' in done.err
    assert "float99" in done.err
    assert "hint: Check engine.args" in done.err
    assert call("status", "refused", "--json").json["phase"] == "failed"
    place.note(run_folder.find("refused"))
    place.assert_nothing_left()
