"""A conversation as curl and as Python: what is copied is what was sent, whatever people typed."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.chat.snippets import api, as_curl, as_python, elsewhere
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.running import InThread, in_thread

HOSTILE = (
    "it's \"quoted\" $HOME `id` $(id) !! \\ \\\\ \\' %s %n\n'; touch pwned; '\nEOF\n~ # ${PENSTOCK_KEY} ü 漢字 🙂 "
    "\x1b[201~\x9b31m\u202e\u2028\U000e0041\x00\t\r\n'''\"\"\"{{}} {0}\n"
)
BODY: dict[str, object] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}, {"type": "text", "text": "x " * 200}]},
    ],
    "temperature": 0.0,
    "max_tokens": 3,
    "stop": ["\\", "'"],
    "top_k": 5,
    "chat_template_kwargs": {"enable_thinking": False},
    "stream": True,
}
WEB = "https://llm.example.org/ui"


def body_of_curl(command: str) -> Any:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["printf", "%s"] and words[3:5] == ["|", "curl"]
    return json.loads(words[2])


def call_in(program: str) -> dict[str, Any]:
    """The arguments of `create(...)`, read without running the program."""
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    create = next(call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "create")
    return {str(argument.arg): ast.literal_eval(argument.value) for argument in create.keywords}


def test_curl_carries_the_request_as_it_is() -> None:
    command = as_curl("http://h:8000", BODY)
    assert body_of_curl(command) == BODY
    assert "http://h:8000/v1/chat/completions" in command
    assert '-H "authorization: Bearer $PENSTOCK_KEY"' in command
    assert "authorization" not in as_curl("http://h:8000", BODY, has_key=False)
    quoted = command.split("' |")[0].removeprefix("printf '%s' '")
    assert "'" not in quoted and "\\\\" not in quoted, "nothing ends the quotes"
    assert all(char.isprintable() or char == "\n" for char in quoted), "or drives a terminal"
    words = shlex.split(as_curl("http://h/$(id);'x", BODY).replace("\\\n", " "))
    assert "http://h/$(id);'x/v1/chat/completions" in words, "an address adds no command"


def test_python_carries_the_request_as_it_is() -> None:
    program = as_python("http://h:8000/v1/", BODY)
    assert max(map(len, program.splitlines())) <= 110
    call = call_in(program)
    assert call.pop("extra_body") == {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    assert call == {name: value for name, value in BODY.items() if name not in ("top_k", "chat_template_kwargs")}


def test_the_address_ends_in_v1_once() -> None:
    assert {api(f"http://h:8000{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://h:8000/v1"}


def test_configurations_of_other_programs_are_well_formed() -> None:
    name = 'org/it\'s "m": {x}'
    texts = {snippet.name: snippet.text for snippet in elsewhere(WEB, name, 4096)}
    endpoint = yaml.safe_load(texts["LibreChat"])["endpoints"]["custom"][0]
    assert (endpoint["baseURL"], endpoint["apiKey"]) == (f"{WEB}/v1", "${PENSTOCK_KEY}")
    assert endpoint["models"]["default"] == [name]
    model = yaml.safe_load(texts["Continue"])["models"][0]
    assert (model["apiBase"], model["model"], model["provider"]) == (f"{WEB}/v1", name, "openai")
    assert model["apiKey"] == "${{ secrets.PENSTOCK_KEY }}"
    zed = json.loads(texts["Zed"])["language_models"]["openai_compatible"]["penstock"]
    assert zed["api_url"] == f"{WEB}/v1"
    assert (zed["available_models"][0]["name"], zed["available_models"][0]["max_tokens"]) == (name, 4096)
    assert call_in(texts["OpenAI, Python"])["model"] == name
    assert f"model: {json.dumps(name)}," in texts["OpenAI, JavaScript"]


@pytest.mark.parametrize(
    ("url", "network"),
    [
        ("http://127.0.0.1:8000", "--network=host"),
        ("http://localhost/v1", "--network=host"),
        ("http://127.0.0.1.example.org", "-p 8080:8080"),
        (WEB, "-p 8080:8080"),
    ],
)
def test_a_container_reaches_a_gateway_on_loopback_by_the_network_of_its_host(url: str, network: str) -> None:
    snippets = {snippet.name: snippet.text for snippet in elsewhere(url, "m", has_key=False)}
    assert network in snippets["Open WebUI"]
    assert not any("PENSTOCK_KEY" in text for text in snippets.values()), "without keys no snippet asks for one"


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    with in_thread(Options(model="m", ttft_s=0.0, tokens_per_s=float("inf"), max_model_len=100_000)) as running:
        yield running


def run(argv: list[str], folder: Path, script: str) -> str:
    env = {**os.environ, "PENSTOCK_KEY": "sk-test", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(argv, cwd=folder, env=env, input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [], "the text of a message was run"
    return done.stdout


def assert_sent(engine: InThread, body: dict[str, object]) -> None:
    request = engine.seen[-1]
    assert json.loads(request.body) == body and request.headers["authorization"] == "Bearer sk-test"


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_curl_runs_with_hostile_and_long_text(engine: InThread, shell: str, tmp_path: Path) -> None:
    body = BODY | {"messages": [{"role": "user", "content": HOSTILE}, {"role": "user", "content": "long " * 40_000}]}
    out = run([shell], tmp_path, as_curl(engine.url, body))
    assert out.rstrip().endswith("data: [DONE]")
    assert_sent(engine, body)


@pytest.mark.processes
def test_python_runs_and_sends_the_same_request(engine: InThread, tmp_path: Path) -> None:
    out = run([sys.executable, "-"], tmp_path, as_python(engine.url, BODY))
    assert len(out.split()) >= 1
    assert_sent(engine, BODY)
    whole = run([sys.executable, "-"], tmp_path, as_python(engine.url, BODY | {"stream": False}))
    assert whole.split() == out.split()
