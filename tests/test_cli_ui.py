"""`penstock ui`: what it opens, prints and serves, without a process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Place, a_place

from penstock.chat.page import __main__ as page
from penstock.chat.page import published
from penstock.chat.page.config import PageConfig
from penstock.cli.main import run as run_words
from penstock.errors import UserError
from penstock.run_folder import Part, Run, State

Shell = Callable[..., tuple[int, str, str]]
S3 = {
    "HOST": "http://vllm-openai:8000",
    "CONTEXT_PATH": "/v1/chat/completions",
    "LLM_ENGINE": "openai-chat",
    "MODEL_ID": "/data/models/gemma",
    "DISABLE_SYSTEM_MESSAGE": "true",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "SSH_CONNECTION", "OPENAI_BASE_URL", "OPENAI_API_KEY", *S3):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("penstock.cli.keys.SEEN_S", 0.0)
    with a_place(tmp_path) as place:
        yield place


@pytest.fixture
def shell(place: Place, capsys: pytest.CaptureFixture[str]) -> Shell:
    def call(*words: str) -> tuple[int, str, str]:
        code = run_words(list(words))
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[PageConfig]:
    """The pages that would be served here."""
    pages = list[PageConfig]()
    monkeypatch.setattr(page, "serve", lambda config, *_: pages.append(config))
    return pages


def written(place: Place, part: Part | None, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Run:
    run, _ = place.written(place.write("one", **fields))
    place.addresses.clear()
    state = State(time.time(), "ready", 1, ui=part)
    monkeypatch.setattr("penstock.deployment.observe.now_state", lambda run, now: state)
    return run


RUNNING = Part("running", url="http://127.0.0.1:7860")


@pytest.mark.loopback
def test_it_prints_the_page_of_a_deployment_with_a_key_or_says_why_there_is_none(
    place: Place, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(place, RUNNING, monkeypatch, ui=True, gateway={"auth": "keys"})
    code, out, err = shell("ui", "one", "--no-open")
    link, _, key = out.strip().partition("#key=")
    assert (code, link) == (0, "http://127.0.0.1:7860/login") and key.startswith("sk-")
    assert "opens the chat page" in err
    facts = json.loads(shell("ui", "--json")[1])
    assert facts["url"] == link and facts["key"].startswith("sk-") and len(facts) == 2
    written(place, RUNNING, monkeypatch, ui=True)
    assert shell("ui", "one", "--no-open")[1] == "http://127.0.0.1:7860/\n", "without a login it needs none"
    note = "the chat page is not installed: pip install 'penstock[ui]'"
    written(place, Part("gone", note=note), monkeypatch, ui=True)
    code, _, err = shell("ui", "one")
    assert code == 1 and note in err and "penstock logs one --part ui" in err


@pytest.mark.loopback
def test_a_deployment_without_a_page_gets_one_here(
    place: Place, shell: Shell, served: list[PageConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(place, None, monkeypatch, gateway={"auth": "keys"})
    assert shell("ui", "one", "--port", "7999", "--title", "T")[0] == 0
    config = served[0]
    assert (config.gateway, config.port, config.title, config.has_login) == (run.url, 7999, "T", True)
    file = Path(str(config.key_file))
    assert file.read_text().startswith("sk-") and file.stat().st_mode & 0o077 == 0


def test_any_address_is_served_with_the_key_of_the_environment(
    shell: Shell, served: list[PageConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("ui", "--url", "https://api.example.com/v1/")[0] == 0
    assert (served[0].gateway, served[0].has_login, served[0].port) == ("https://api.example.com", False, 7860)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    shell("ui", "--url", "api.example.com", "--system", "Be brief.")
    assert served[1].gateway == "http://api.example.com" and served[1].has_login and served[1].system == "Be brief."
    assert Path(str(served[1].key_file)).read_text() == "sk-mine"


@pytest.mark.parametrize(
    ("environment", "words", "refusals"),
    [
        ({}, "--url http://h --host 0.0.0.0", ("on 0.0.0.0 without a login", "OPENAI_API_KEY")),
        ({"OPENAI_API_KEY": "sk-\u00e9"}, "--url http://h", ("cannot use the API key",)),
        ({"HOST": "http://[h"}, "", ('cannot use base URL "http://[h"',)),
        (S3 | {"GRADIO_SERVER_NAME": "0.0.0.0"}, "", ("set OPENAI_API_KEY",)),
        (S3 | {"GRADIO_SERVER_PORT": "x"}, "", ('GRADIO_SERVER_PORT "x"',)),
        (
            {"HOST": "h", "LLM_ENGINE": "tgi", "CONTEXT_PATH": "/generate"},
            *("", ('cannot ask LLM_ENGINE "tgi" at CONTEXT_PATH "/generate"',)),
        ),
    ],
)
def test_what_cannot_be_served_or_asked_is_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str, refusals: tuple[str, ...]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = shell("ui", *words.split())
    assert code == 2 and all(refusal in err for refusal in refusals)
    assert words or page.main([]) == 2


def test_without_the_extra_it_says_what_to_install(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = shell("ui", "--url", "http://h")
    assert code == 2 and "pip install 'penstock[ui]'" in err


# ---- the variables of published pages --------------------------------------------------------------------------------


def test_published_variables_are_read(shell: Shell, served: list[PageConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3.items():
        monkeypatch.setenv(name, value)
    assert shell("ui")[0] == 0
    config = served[0]
    assert (config.gateway, config.model, config.has_system) == ("http://vllm-openai:8000", "/data/models/gemma", False)
    assert page.main([]) == 0 and served[1].gateway == config.gateway


@pytest.mark.parametrize(
    ("environment", "gateway"),
    [
        ({"HOST": "http://h:1"}, "http://h:1"),
        ({"HOST": "h:1", "CONTEXT_PATH": "/a/b/v1/chat/completions"}, "http://h:1/a/b"),
        ({"HOST": "https://h/", "CONTEXT_PATH": "/v1/completions", "LLM_ENGINE": "vllm"}, "https://h"),
    ],
)
def test_an_address_comes_from_host_and_path(environment: dict[str, str], gateway: str) -> None:
    assert published.names_a_server(environment)
    config = published.config_of(environment, "/f")
    assert (config.gateway, config.host, config.port, config.has_system) == (gateway, "127.0.0.1", 7860, True)
    assert not published.names_a_server({"HOST": "my-laptop"}), "shells set it"


def test_gradio_finds_no_variable_that_opens_something() -> None:
    config = PageConfig("http://g", "127.0.0.1", 1, "/f", False)
    settings = page.environment(config, {"GRADIO_SHARE": "True", "GRADIO_ALLOWED_PATHS": "/", "PATH": "/bin"})
    assert settings["GRADIO_ANALYTICS_ENABLED"] == "False" and settings["GRADIO_TEMP_DIR"] == "/f/uploads"
    assert settings["HF_HUB_OFFLINE"] == "1" and settings["PATH"] == "/bin"
    assert not {"GRADIO_SHARE", "GRADIO_ALLOWED_PATHS"} & settings.keys()


@pytest.mark.parametrize("text", ["{", '{"gateway": 1}'])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ui.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"ui\.json"):
        page.load(file)
    with pytest.raises(UserError, match="No such file"):
        page.load(tmp_path / "none.json")
