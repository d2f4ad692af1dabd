"""The terminal chat, driven by scripts: lines in, text out, against the fake engine."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_files import table
from msgspec.structs import replace

from penstock.chat.settings import SERVER_DEFAULTS, Settings
from penstock.cli.chat import ChatOptions, ReadLine, chat, read_message
from penstock.errors import PenstockError
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import InThread, in_thread
from penstock.wire.answers import Chunk, Reply, ToolCall
from penstock.wire.client import Client, Message, Stream
from penstock.wire.model_list import ModelCard
from penstock.wire.waiting import Waiting

SHORT = Settings(max_tokens=3)
PLAIN = ChatOptions()


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    options = Options(model="m", served_model_name=("m", "other"), ttft_s=0.0, tokens_per_s=float("inf"))
    with in_thread(options) as running:
        yield running


@pytest.fixture
def client(engine: InThread) -> Client:
    return Client(engine.url, timeout_s=5)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def typing(*lines: str | type[BaseException]) -> ReadLine:
    """Somebody at the keyboard: lines, then Ctrl-D; an exception is a key that raises it."""
    script = iter(lines)

    def read_line(_: str) -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def talk(client: Client, *lines: str | type[BaseException], settings: Settings = SHORT, tty: bool = False) -> str:
    out = Terminal() if tty else io.StringIO()
    chat(client, settings, stdout=out, read_line=typing(*lines))
    return out.getvalue()


def pipe(client: Client, text: str, settings: Settings = SHORT, options: ChatOptions = PLAIN) -> str:
    out = io.StringIO()
    chat(client, settings, options, stdin=io.StringIO(text), stdout=out)
    return out.getvalue()


def once(client: Client, text: str = "x", settings: Settings = SERVER_DEFAULTS, tty: bool = False) -> str:
    out = Terminal() if tty else io.StringIO()
    chat(client, settings, once=text, stdout=out)
    return out.getvalue()


class Scripted(Client):
    """A client whose answers are given; an error among the items is raised."""

    def __init__(self, *items: Chunk | Reply | Waiting | BaseException) -> None:
        super().__init__("http://127.0.0.1:9")
        self.items, self.is_closed = items, False
        self.asked: list[list[Message]] = []

    def models(self) -> tuple[ModelCard, ...]:
        return ()

    def stream_chat(self, messages: list[Message], *_: object, on_wait: Any, **__: object) -> Stream:  # type: ignore[override]
        self.asked.append([*messages])
        try:
            for item in self.items:
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Waiting):
                    on_wait(item)
                else:
                    yield item
        finally:
            self.is_closed = True


def reply(text: str, n_tokens: int | None = None) -> Reply:
    return Reply(text, "stop", 1, n_tokens, 0.012, 0.5, 310.4, None, None)


@pytest.mark.loopback
def test_one_question_or_lines_from_a_pipe_give_answers_only(client: Client) -> None:
    assert once(client, "hello there", SHORT) == "1:hello 2:there 3:hello\n"
    assert pipe(client, "tell me\n", Settings(max_tokens=20)) == expected_text("tell me", 20) + "\n"
    assert pipe(client, "a b\n\n  \nc\n") == "1:a 2:b 3:a\n1:c 2:c 3:c\n"


TALKS: dict[str, dict[str, Any]] = table("chat/talks.yaml")


def chosen(body: dict[str, object]) -> str:
    """The settings in a request that few talks have."""
    usual = ("model", "messages", "max_tokens", "stream", "stream_options")
    rest = {name: value for name, value in body.items() if name not in usual}
    return f" {json.dumps(rest)}" if rest else ""


@pytest.mark.loopback
@pytest.mark.parametrize("name", TALKS)
def test_a_talk_is_the_golden_one(
    name: str, engine: InThread, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a person sees of typed lines, and the messages that are sent. PENSTOCK_WRITE_GOLDEN=1 writes the file."""
    monkeypatch.chdir(tmp_path)
    settings, n_before = Settings(**TALKS[name]["settings"]), len(engine.seen)
    lines = (re.sub(r"(\w )\.\.\. ", lambda word: 600 * word[1], line) for line in TALKS[name]["typed"])
    typed = (KeyboardInterrupt if line == "^C" else line for line in lines)
    shown = talk(client, *typed, settings=settings).replace(engine.url, "URL")
    shown = re.sub(r"TTFT .*(?=· 3 tokens)", "TTFT and speed ", shown)
    bodies = [json.loads(request.body) for request in engine.seen[n_before:] if request.body]
    shown += "\n".join(f"sent to {body['model']}: {json.dumps(body['messages'])}{chosen(body)}" for body in bodies)
    shown = re.sub(r"(\w )\1{99,}", r"\1... ", shown)
    saved = "".join(f"\n\nsaved:\n{path.read_text('utf-8')}" for path in tmp_path.iterdir())
    path = Path(__file__).parent / "golden" / "chat" / f"{name}.txt"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.write_text(f"{shown}{saved}\n", "utf-8")
    assert f"{shown}{saved}\n" == path.read_text("utf-8")


@pytest.mark.loopback
def test_completion_sends_raw_prompts_without_a_conversation(engine: InThread, client: Client) -> None:
    said = pipe(client, "Singapore is a\nFrance is a\n", Settings(max_tokens=2), ChatOptions(completion=True))
    assert said == "1:Singapore 2:is\n1:France 2:is\n"
    assert json.loads(engine.seen[-1].body)["prompt"] == "France is a"


@pytest.mark.loopback
def test_json_gives_one_line_for_each_answer(client: Client) -> None:
    lines = pipe(client, "/stats\na b\nc\n", SHORT, ChatOptions(as_json=True)).splitlines()
    first, second = map(json.loads, lines)
    assert (first["text"], second["text"]) == ("1:a 2:b 3:a", "1:c 2:c 3:c")
    assert (first["output_tokens"], first["finish_reason"], first["model"]) == (3, "length", "m")
    assert first["ttft_s"] > 0


@pytest.mark.loopback
def test_a_conversation_goes_on_from_a_file(engine: InThread, client: Client, tmp_path: Path) -> None:
    path, n_before = tmp_path / "talk.json", len(engine.seen)
    talk(client, "a", "b", "/retry", f"/save {path}", settings=replace(SHORT, system="whisper"))
    shown = talk(client, "x", f"/load {path}", "c", f"/load {path}x", f"/load {tmp_path}", "/load")
    assert "(a: 4 messages)\n1:c 2:c 3:c\n" in shown and shown.count("error: could not read") == 3
    last = [json.loads(request.body)["messages"] for request in engine.seen[n_before:] if request.body][-1]
    assert [message["content"] for message in last] == ["whisper", "a", "1:a 2:a 3:a", "b", "1:b 2:b 3:b", "c"]
    path.write_bytes(b"[" + path.read_bytes() + b"," + path.read_bytes() + b"]")
    assert "it has 2 conversations" in talk(client, f"/load {path}")
    for verb in ("load", "save"):
        assert 'cannot use the file name "~nobody-here/x"' in talk(client, f"/{verb} ~nobody-here/x")


@pytest.mark.loopback
def test_a_failure_in_a_script_is_raised(client: Client) -> None:
    with pytest.raises(PenstockError, match="does not exist"):
        pipe(client, "a\nb\n", Settings("nope"))
    with pytest.raises(PenstockError, match="unknown command /nope"):
        pipe(client, "/nope\n")


def test_ctrl_c_stops_the_answer_closes_the_stream_and_keeps_what_was_said() -> None:
    client = Scripted(Chunk("half", 0.1), KeyboardInterrupt(), Chunk(" never", 0.2))
    shown = talk(client, "one", "two", settings=SERVER_DEFAULTS)
    assert client.is_closed
    assert "half\n(stopped)\n" in shown and "never" not in shown
    assert client.asked[1][:2] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "half"}]
    client = Scripted(Chunk("half", 0.1), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):  # a script ends
        once(client)
    assert client.is_closed


@pytest.mark.loopback
def test_only_a_terminal_gets_colour_and_no_color_takes_it_away(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[2mTTFT" in talk(client, "/stats", "a", tty=True)
    assert "\x1b" not in talk(client, "/stats", "a")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in talk(client, "/stats", "a", tty=True)


OWNED = "a\x1b]0;owned\x07\tb\x9b2J\n"  # a model cannot drive the terminal, but a pipe gets its bytes
YES = Chunk("yes", 0.2), reply("yes")
WAITS = Waiting("queue", ahead=3), Waiting("prompt")
CALLS = (ToolCall("find", '{"x": 1}'),)
CALL = Chunk("", 0.1, tool_calls=CALLS), dataclasses.replace(reply(""), tool_calls=CALLS)


@pytest.mark.parametrize(
    ("items", "on_terminal", "in_pipe"),
    [
        ((Chunk(OWNED, 0.1), reply(OWNED)), "a]0;owned\tb2J\n", OWNED),
        ((Chunk("hm ", 0.1, is_reasoning=True), *YES), "hm yes\n", "yes\n"),
        ((*WAITS, *YES), "in the queue: 3 before you\rprocessing prompt\ryes\n", "yes\n"),
        (CALL, 'find({"x": 1})\n', 'find({"x": 1})\n'),
    ],
    ids=["control characters", "reasoning", "waits", "tool calls"],
)
def test_a_terminal_shows_more_than_a_pipe_gets(
    items: tuple[Chunk | Reply | Waiting, ...], on_terminal: str, in_pipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert re.sub("\r *\r", "\r", once(Scripted(*items), tty=True)) == on_terminal
    assert once(Scripted(*items)) == in_pipe


def test_a_message_may_span_lines() -> None:
    assert read_message(typing("a\\", "b\\", "c")) == "a\nb\nc"
    assert read_message(typing('"""a', "", 'b"""')) == "a\n\nb"
    assert read_message(typing('"""', "a", '"""')) == "\na\n"
    assert read_message(typing('"""one line"""')) == "one line"
    assert read_message(typing("a\\")) == "a"
    with pytest.raises(EOFError):
        read_message(typing())


LOST = PenstockError("lost the connection to X: reset", is_retryable=True)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (
            (Chunk("half", 0.1), PenstockError("the answer broke off: gone", hint="Look at the log.")),
            "half\nerror: the answer broke off: gone\nhint: Look at the log.\n",
        ),
        ((Chunk("half", 0.1), LOST), "half\nerror: The answer broke off."),
        ((LOST,), "error: Lost the"),
    ],
)
def test_an_answer_that_breaks_off_ends_its_line_before_the_error(
    items: tuple[Chunk | PenstockError, ...], expected: str
) -> None:
    assert expected in talk(Scripted(*items), "x", settings=SERVER_DEFAULTS)


def test_history_is_kept_in_the_file_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    history, remembered = tmp_path / "deep" / "history", []

    def begin() -> None:
        chat(Scripted(), options=ChatOptions(history_file=history), stdin=Terminal(), stdout=io.StringIO())

    def type_once(_: str) -> str:
        remembered.append(readline.get_history_item(1))
        readline.add_history("a typed line")
        return "/quit"

    monkeypatch.setattr("builtins.input", type_once)
    for _ in range(2):
        readline.clear_history()
        begin()
    assert remembered == [None, "a typed line"] and history.stat().st_mode & 0o777 == 0o600

    def close_terminal(_: str) -> str:
        monkeypatch.setattr("builtins.input", typing(SystemExit))  # as SIGHUP would, without a goodbye
        readline.add_history("before the end")
        return "/help"

    monkeypatch.setattr("builtins.input", close_terminal)
    with pytest.raises(SystemExit):
        begin()
    assert history.read_text().splitlines()[-1] == "before the end"
    readline.clear_history()


def test_a_terminal_shows_markdown_wrapped_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    text = "# Title\n\nSome **bold** words that go on for more than one line of forty columns.\n\n"
    text += "```\ncode\n\n**in code**\n```\n"
    shown = once(Scripted(*(Chunk(letter, 0.1) for letter in text), reply(text)), tty=True)
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.replace("\r", "\n"))
    lines = [line.strip() for line in drawn.splitlines()]
    assert "Some bold words that go on for more than" in lines and "one line of forty columns." in lines
    assert "Title" in drawn and "code" in lines
    assert "**" not in drawn.rpartition("Some bold words")[2].replace("**in code**", "")
    assert "**in code**" in lines, "an empty line does not end the code"
    assert "\x1b[1mbold\x1b[0m" in shown
