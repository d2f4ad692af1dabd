"""The terminal chat, driven by scripts: lines in, text out, against the fake engine."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.cli.chat import ChatSettings, ReadLine, blocks_of, chat, read_message, stats
from penstock.errors import PenstockError
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import expected_text
from penstock.testing.fake_engine.running import InThread, in_thread
from penstock.wire.answers import Chunk, Reply
from penstock.wire.client import Client, Message, Stream

SHORT = ChatSettings(max_tokens=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[InThread]:
    options = Options(model="m", served_model_name=("m", "other"), ttft_s=0.0, tokens_per_s=float("inf"))
    with in_thread(options) as running:
        yield running


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


def talk(engine: InThread, *lines: str | type[BaseException], settings: ChatSettings = SHORT, tty: bool = False) -> str:
    out = Terminal() if tty else io.StringIO()
    chat(Client(engine.url, timeout_s=5), settings, stdout=out, read_line=typing(*lines))
    return out.getvalue()


def pipe(engine: InThread, text: str, settings: ChatSettings = SHORT) -> str:
    out = io.StringIO()
    chat(Client(engine.url, timeout_s=5), settings, stdin=io.StringIO(text), stdout=out)
    return out.getvalue()


class Scripted(Client):
    """A client whose answers are given; a function among the items is called when its turn comes."""

    def __init__(self, *items: Chunk | Reply | Callable[[], None]) -> None:
        super().__init__("http://127.0.0.1:9")
        self.items = items
        self.is_closed = False

    def stream_chat(self, *_: object, **__: object) -> Stream:
        try:
            for item in self.items:
                if callable(item):
                    item()
                else:
                    yield item
        finally:
            self.is_closed = True


def reply(text: str, n_tokens: int | None = None) -> Reply:
    return Reply(text, "stop", 1, n_tokens, 0.012, 0.5, 310.4, None, None)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_one_question_or_lines_from_a_pipe_give_answers_only(engine: InThread) -> None:
    out = io.StringIO()
    chat(Client(engine.url), SHORT, once="hello there", stdout=out)
    assert out.getvalue() == "1:hello 2:there 3:hello\n"
    assert pipe(engine, "tell me\n", ChatSettings(max_tokens=20)) == expected_text("tell me", 20) + "\n"
    assert pipe(engine, "a b\n\n  \nc\n") == "1:a 2:b 3:a\n1:c 2:c 3:c\n"


TALKS: dict[str, tuple[ChatSettings, tuple[str | type[BaseException], ...]]] = {
    "conversation": (
        ChatSettings(system="whisper", max_tokens=3),
        ("a b", "", "  ", "c", "/system", "/system shout", "d", "/reset", "e", " /etc/passwd", "/quit", "never sent"),
    ),
    "again-and-saved": (SHORT, ("/retry", "a", "b", "/retry", "/save talk.md", "/save talk.md", "/save")),
    "models-times-help": (
        SHORT,
        (
            "/model",
            "/model nope",
            "/model other",
            "a",
            "/stats",
            "b",
            "/stats",
            "c",
            "/help",
            "/nope",
            KeyboardInterrupt,
        ),
    ),
    "failures": (ChatSettings(max_tokens=100_000), ("a", "b")),
}


@pytest.mark.parametrize("name", TALKS)
def test_a_talk_is_the_golden_one(name: str, engine: InThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person sees of typed lines, and the messages that are sent. PENSTOCK_WRITE_GOLDEN=1 writes the file."""
    monkeypatch.chdir(tmp_path)
    (settings, lines), n_before = TALKS[name], len(engine.seen)
    shown = talk(engine, *lines, settings=settings).replace(engine.url, "URL")
    shown = re.sub(r"\(TTFT [^)]*3 tokens[^)]*\)", "(times of 3 tokens)", shown)
    bodies = [json.loads(request.body) for request in engine.seen[n_before:] if request.body]
    shown += "\n".join(f"sent to {body['model']}: {json.dumps(body['messages'])}" for body in bodies)
    saved = "".join(f"\n\nsaved:\n{path.read_text('utf-8')}" for path in tmp_path.iterdir())
    path = Path(__file__).parent / "golden" / "chat" / f"{name}.txt"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{shown}{saved}\n", "utf-8")
    assert f"{shown}{saved}\n" == path.read_text("utf-8")


def test_times_show_what_is_known() -> None:
    assert stats(reply("x", 34)) == "(TTFT 12 ms, 34 tokens, 310 tokens/s)"
    assert stats(Reply("x", None, None, 1, None, 1.0, None, None, None)) == "(1 token)"
    assert stats(Reply("x", None, None, 9, 2.0, 1.0, 4.567, None, None)) == "(TTFT 2.0 s, 9 tokens, 4.57 tokens/s)"


def test_completion_sends_raw_prompts_without_a_conversation(engine: InThread) -> None:
    settings = ChatSettings(completion=True, max_tokens=2)
    assert pipe(engine, "Singapore is a\nFrance is a\n", settings) == "1:Singapore 2:is\n1:France 2:is\n"
    assert json.loads(engine.seen[-1].body)["prompt"] == "France is a"


def test_json_gives_one_line_for_each_answer(engine: InThread) -> None:
    lines = pipe(engine, "/stats\na b\nc\n", ChatSettings(as_json=True, max_tokens=3)).splitlines()
    first, second = map(json.loads, lines)
    assert (first["text"], second["text"]) == ("1:a 2:b 3:a", "1:c 2:c 3:c")
    assert (first["output_tokens"], first["finish_reason"], first["model"]) == (3, "length", "m")
    assert first["ttft_s"] > 0


def test_a_failure_in_a_script_is_raised(engine: InThread) -> None:
    with pytest.raises(PenstockError, match="does not exist"):
        pipe(engine, "a\nb\n", ChatSettings(model="nope"))
    with pytest.raises(PenstockError, match="unknown command /nope"):
        pipe(engine, "/nope\n")


def test_ctrl_c_stops_the_answer_closes_the_stream_and_keeps_what_was_said() -> None:
    client = Scripted(Chunk("half", 0.1), interrupt, Chunk(" never", 0.2))
    out = io.StringIO()
    asked: list[list[Message]] = []
    original = client.stream_chat

    def remember(messages: list[Message], *rest: object, **fields: object) -> Stream:
        asked.append(list(messages))
        return original(messages, *rest, **fields)

    client.stream_chat = remember  # type: ignore[method-assign, assignment]
    client.models = lambda: ()  # type: ignore[method-assign]
    chat(client, ChatSettings(), stdout=out, read_line=typing("one", "two"))
    assert client.is_closed
    assert "half\n(stopped)\n" in out.getvalue()
    assert "never" not in out.getvalue()
    assert asked[1][:2] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "half"}]
    script = Scripted(Chunk("half", 0.1), interrupt)
    with pytest.raises(KeyboardInterrupt):  # a script ends
        chat(script, ChatSettings(), once="x", stdout=io.StringIO())
    assert script.is_closed


def test_stopping_a_real_stream_stops_the_engine() -> None:
    class Impatient(Terminal):
        is_stopped = False

        def write(self, text: str) -> int:
            if "3:" in text and not self.is_stopped:
                self.is_stopped = True
                raise KeyboardInterrupt
            return super().write(text)

    with in_thread(Options(model="m", ttft_s=0.0, tokens_per_s=500.0)) as engine:
        client = Client(engine.url, timeout_s=5)
        chat(client, ChatSettings(max_tokens=1000), stdout=Impatient(), read_line=typing("a"))
        for _ in range(200):
            if engine.metrics.finished["abort"]:
                break
            client.models()
        assert engine.metrics.finished["abort"] == 1


def test_only_a_terminal_gets_colour_and_no_color_takes_it_away(
    engine: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[2m(TTFT" in talk(engine, "/stats", "a", tty=True)
    assert "\x1b" not in talk(engine, "/stats", "a")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in talk(engine, "/stats", "a", tty=True)


OWNED = "a\x1b]0;owned\x07\tb\x9b2J\n"  # a model cannot drive the terminal, but a pipe gets its bytes


@pytest.mark.parametrize(
    ("chunks", "on_terminal", "in_pipe"),
    [
        ((Chunk(OWNED, 0.1), reply(OWNED)), "a]0;owned\tb2J\n", OWNED),
        ((Chunk("hm ", 0.1, is_reasoning=True), Chunk("yes", 0.2), reply("yes")), "hm yes\n", "yes\n"),
    ],
)
def test_control_characters_and_reasoning(
    chunks: tuple[Chunk | Reply, ...], on_terminal: str, in_pipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for out, expected in ((Terminal(), on_terminal), (io.StringIO(), in_pipe)):
        chat(Scripted(*chunks), ChatSettings(), once="x", stdout=out)
        assert out.getvalue() == expected


def test_a_message_may_span_lines() -> None:
    assert read_message(typing("a\\", "b\\", "c")) == "a\nb\nc"
    assert read_message(typing('"""a', "", 'b"""')) == "a\n\nb"
    assert read_message(typing('"""', "a", '"""')) == "\na\n"
    assert read_message(typing('"""one line"""')) == "one line"
    assert read_message(typing("a\\")) == "a"
    with pytest.raises(EOFError):
        read_message(typing())


def test_an_answer_that_breaks_off_ends_its_line_before_the_error() -> None:
    def fail() -> None:
        raise PenstockError("the answer broke off: gone", hint="Look at the log.")

    client = Scripted(Chunk("half", 0.1), fail)
    client.models = lambda: ()  # type: ignore[method-assign]
    out = io.StringIO()
    chat(client, ChatSettings(), stdout=out, read_line=typing("x"))
    assert "half\nerror: the answer broke off: gone\nhint: Look at the log.\n" in out.getvalue()


def test_history_is_kept_in_the_file_it_is_given(
    tmp_path: Path, engine: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    history = tmp_path / "deep" / "history"
    remembered = []

    def type_once(_: str) -> str:
        remembered.append(readline.get_history_item(1))
        readline.add_history("a typed line")
        return "/quit"

    monkeypatch.setattr("builtins.input", type_once)
    for _ in range(2):
        readline.clear_history()
        chat(Client(engine.url), ChatSettings(history_file=history), stdin=Terminal(), stdout=io.StringIO())
    assert remembered == [None, "a typed line"] and history.stat().st_mode & 0o777 == 0o600

    def close_terminal(_: str) -> str:
        monkeypatch.setattr("builtins.input", typing(SystemExit))  # as SIGHUP would, without a goodbye
        readline.add_history("before the end")
        return "/help"

    monkeypatch.setattr("builtins.input", close_terminal)
    with pytest.raises(SystemExit):
        chat(Client(engine.url), ChatSettings(history_file=history), stdin=Terminal(), stdout=io.StringIO())
    assert history.read_text().splitlines()[-1] == "before the end"
    readline.clear_history()


def test_markdown_is_cut_into_blocks_at_empty_lines_but_not_in_code() -> None:
    code = "```py\na\n\nb\n```\n"
    assert blocks_of(f"one\ntwo\n\n\n{code}\nlast") == ["one\ntwo\n", code, "last"]
    assert blocks_of("```\na\n\n") == ["```\na\n\n"] and blocks_of("a\n\n") == ["a\n", ""] and blocks_of("") == [""]


def test_a_terminal_shows_markdown_wrapped_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    text = "# Title\n\nSome **bold** words that go on for more than one line of forty columns.\n\n```\ncode\n```\n"
    out = Terminal()
    chat(Scripted(*(Chunk(letter, 0.1) for letter in text), reply(text)), ChatSettings(), once="x", stdout=out)
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue().replace("\r", "\n"))
    lines = [line.strip() for line in drawn.splitlines()]
    assert "Some bold words that go on for more than" in lines and "one line of forty columns." in lines
    assert "Title" in drawn and "code" in lines and "**" not in drawn.rpartition("Some bold words")[2]
    assert "\x1b[1mbold\x1b[0m" in out.getvalue()
