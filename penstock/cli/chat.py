"""Chat in a terminal: streamed answers, a history, a handful of commands. Without a terminal: lines in, answers out.

The conversation, its settings and statistics are those of the chat page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from penstock.chat import conversation as chats
from penstock.chat import files, statistics
from penstock.chat.conversation import Turn
from penstock.chat.failures import Failure, counted, failure_of, needs_count
from penstock.chat.settings import BOUNDS, SERVER_DEFAULTS, Limits, Settings, changed, fields, shown
from penstock.chat.waiting import show_waiting
from penstock.cli import arguments, keys
from penstock.cli.chat_screen import Screen
from penstock.errors import PenstockError, UserError
from penstock.spec.gateway import Price
from penstock.text import bare_flag
from penstock.wire.answers import HttpError, Reply
from penstock.wire.client import Client, Stream
from penstock.wire.model_list import ModelCard
from penstock.wire.waiting import Waiting

PROMPT, MORE = "> ", "... "
_QUOTES = '"""'
_HISTORY_LINES = 1000
HELP = """\
/retry            ask the last question again
/edit TEXT        ask TEXT in place of the last question
/shorten          leave out the oldest questions and answers, where all is too long for the model
/save FILE        write the conversation to a file: Markdown, or all of it where the name ends with .json
/load FILE        go on with the conversation of such a file, also of one that the chat page exported
/reset            forget the conversation
/system TEXT      set the system message; alone: show it
/model NAME       talk to another model; alone: list them
/set NAME VALUE   change a setting, such as temperature; without VALUE: back to the server's; alone: list them
/stats            show or hide statistics after each answer
/quit             leave (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; so does everything between \"\"\" and \"\"\".
A message that begins with / is sent with a space before it."""

ReadLine = Callable[[str], str]  # takes the prompt; raises EOFError at the end, as `input` does


@dataclass(frozen=True)
class ChatOptions:
    """How to chat. `completion` sends raw prompts, without a conversation; `as_json` prints one object per answer."""

    completion: bool = False
    as_json: bool = False
    history_file: Path | None = None
    price: Price | None = None


_PLAIN_CHAT = ChatOptions()


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("-m", "--message", metavar="TEXT", help="send one message, print the answer, and exit")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--model", help="a model name, when the address serves several")
    text = "any OpenAI-compatible address instead of a deployment ($OPENAI_BASE_URL)"
    parser.add_argument("--url", help=text)
    for name, bound in BOUNDS.items():
        read = (
            arguments.whole(int(bound.low), int(bound.high))
            if bound.is_whole
            else arguments.number(bound.low, bound.high)
        )
        parser.add_argument(f"--{bare_flag(name)}", type=read, metavar="N" if bound.is_whole else "X", help=bound.text)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    parser.add_argument("--json-mode", action="store_true", help="let the model answer with a JSON object")
    parser.add_argument("--thinking", choices=["on", "off"], help="of models that can think before they answer")
    parser.add_argument("--completion", action="store_true", help="send plain prompts to /v1/completions")
    arguments.add_json(parser, "print one JSON object per answer")
    examples = (
        "penstock chat",
        'penstock chat qwen -m "Why is the sky blue?" --temperature 0',
        "echo Hello | penstock chat --url https://api.example.com/v1 --model m --json",
    )
    arguments.complete(parser, _run, examples)


def _run(options: argparse.Namespace) -> int:
    from penstock import paths, run_folder

    url = options.url or (None if options.name else os.environ.get("OPENAI_BASE_URL"))
    key, price = os.environ.get("OPENAI_API_KEY"), None
    if url is None:
        run = run_folder.choose(options.name)
        url, key = keys.address_and_key(run)
        price = run.deployment().gateway.price
    settings = Settings(
        model=options.model,
        system=options.system,
        **{name: getattr(options, name) for name in BOUNDS},
        stop=tuple(options.stop),
        json_mode=options.json_mode,
        thinking=options.thinking or "default",
    )
    how = ChatOptions(options.completion, options.json, paths.home() / "chat-history", price)
    client = Client(url.removesuffix("/").removesuffix("/v1"), api_key=key)
    return chat(client, settings, how, once=options.message)


def chat(
    client: Client,
    settings: Settings = SERVER_DEFAULTS,
    options: ChatOptions = _PLAIN_CHAT,
    once: str | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
    read_line: ReadLine | None = None,
) -> int:
    """Talks until `once` is answered, or the input ends, or /quit; gives the exit code 0.
    With a terminal (or `read_line`) failures are shown and the chat goes on; otherwise the first one is raised."""
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    if once is not None:
        _Session(client, settings, options, stdout, is_interactive=False).ask(once)
        return 0
    if read_line is None and stdin.isatty():
        read_line = _keyboard(options.history_file)
    session = _Session(client, settings, options, stdout, is_interactive=read_line is not None)
    session.greet()
    session.run(read_line or _lines_of(stdin))
    return 0


def read_message(read_line: ReadLine) -> str:
    r"""One message, which may span lines: "a\" + "b" -> "a\nb"; everything between two \"\"\". EOFError at the end."""
    lines = [read_line(PROMPT)]
    is_quoted = lines[0].lstrip().startswith(_QUOTES)
    if is_quoted:
        lines = [lines[0].lstrip().removeprefix(_QUOTES)]
    with contextlib.suppress(EOFError):  # the end of the input ends a message, too
        while is_quoted and not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(read_line(MORE))
        while not is_quoted and lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(MORE))
    text = "\n".join(lines)
    return text.rstrip().removesuffix(_QUOTES) if is_quoted else text


class _Session:
    def __init__(
        self, client: Client, settings: Settings, options: ChatOptions, out: TextIO, is_interactive: bool
    ) -> None:
        self._client = client
        self._options = options
        self._out = out
        self._screen = Screen(out, options.as_json)
        self._is_interactive = is_interactive
        self._conversation = chats.begin(secrets.token_hex(12), time.time(), settings)
        self._n_turns = 0
        self._cards: tuple[ModelCard, ...] = ()
        self._shows_stats = False
        self._over_tokens = 1  # of the last question, where it was too long
        self._is_over = False

    @property
    def _settings(self) -> Settings:
        return self._conversation.settings

    @_settings.setter
    def _settings(self, settings: Settings) -> None:
        self._conversation = replace(self._conversation, settings=settings)

    def greet(self) -> None:
        if not self._is_interactive:
            return
        self._cards = self._client.models()
        if self._settings.model is None and self._cards:
            self._settings = replace(self._settings, model=self._cards[0].name)
        model = self._settings.model or "no model"
        self._note(f"{model} at {self._client.base_url} (/help lists commands, Ctrl-D leaves)")

    def run(self, read_line: ReadLine) -> None:
        while not self._is_over:
            try:
                text = read_message(read_line)
            except EOFError:
                self._note("")
                return
            except KeyboardInterrupt:
                self._note("\n(/quit or Ctrl-D leaves)")
                continue
            if text.startswith("/"):
                self._guard(self._command, text)
            elif text.strip():
                self._guard(self.ask, text.strip())

    def ask(self, text: str) -> None:
        self._conversation = chats.ask(self._conversation, self._new_id(), text, (), time.time())
        self._answer()

    def _new_id(self) -> str:
        while f"t{self._n_turns}" in self._conversation.turns:  # those of a loaded conversation
            self._n_turns += 1
        return f"t{self._n_turns}"

    def _answer(self) -> None:
        """Answers the last question, shows the answer as it comes, and keeps what there is of it."""
        question = chats.path(self._conversation)[-1]
        turn = Turn(self._new_id(), question.id, "assistant", model=self._settings.model)
        pieces: list[str] = []
        reply = None
        try:
            with contextlib.closing(self._stream(question)) as stream:
                for item in stream:
                    if isinstance(item, Reply):
                        reply = item
                        continue
                    self._screen.add(item.text, item.is_reasoning)
                    if not item.is_reasoning:
                        pieces.append(item.text)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._screen.end()
            self._note("(stopped)")
            self._keep(replace(turn, text="".join(pieces).strip()))
        except PenstockError as exc:
            self._screen.end(has_answer=bool(pieces))
            self._keep(replace(turn, text="".join(pieces).strip(), error=exc.message))
            raise
        if reply is not None:
            self._conclude(chats.answered(turn, reply, self._options.price), reply)

    def _stream(self, question: Turn) -> Stream:
        asked = fields(self._settings, is_chat=not self._options.completion)
        if self._options.completion:
            return self._client.stream_complete(question.text, on_wait=self._wait, **asked)
        return self._client.stream_chat(chats.messages(self._conversation), on_wait=self._wait, **asked)

    def _wait(self, waiting: Waiting) -> None:
        self._screen.wait(show_waiting(waiting))

    def _keep(self, turn: Turn) -> None:
        """Of an answer without text only the question stays; the next one takes its place."""
        if chats.spoken(turn):
            self._conversation = chats.answer(self._conversation, turn)

    def _conclude(self, turn: Turn, reply: Reply) -> None:
        self._keep(turn)
        if self._options.as_json:
            self._out.write(json.dumps(asdict(reply), ensure_ascii=False) + "\n")
            self._out.flush()
            return
        if not turn.text:
            self._screen.add(chats.spoken(turn))
        self._screen.end()
        if self._shows_stats and turn.statistics is not None:
            self._screen.line(statistics.line(turn.statistics))

    def _guard(self, act: Callable[[str], None], text: str) -> None:
        try:
            act(text)
        except PenstockError as exc:
            if not self._is_interactive:
                raise
            if self._options.as_json:
                self._out.write(json.dumps(exc.facts()) + "\n")
            elif isinstance(exc, HttpError) or exc.is_retryable:
                self._note(f"error: {self._failure(exc).text}")
            else:
                self._note(f"error: {exc.message}" + (f"\nhint: {exc.hint}" if exc.hint else ""))

    def _failure(self, error: PenstockError) -> Failure:
        leaf = self._conversation.turns.get(self._conversation.leaf or "")
        failure = failure_of(error, has_text=leaf is not None and leaf.role == "assistant")
        if needs_count(failure) and not self._options.completion:
            body = {"model": self._settings.model, "messages": chats.messages(self._conversation)}
            with contextlib.suppress(PenstockError):  # only vLLM counts
                failure = counted(failure, self._client.post_json("/tokenize", body), self._settings.max_tokens)
        self._over_tokens = failure.over_tokens or 1
        return failure

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        name = _COMMANDS.get(word.strip())
        if name is None:
            raise PenstockError(f"unknown command {word.strip()}", hint="/help lists them; a space before / sends it.")
        getattr(self, name)(rest.strip())

    def _quit(self, _: str) -> None:
        self._is_over = True

    def _help(self, _: str) -> None:
        self._note(HELP)

    def _reset(self, _: str) -> None:
        self._conversation = chats.begin(secrets.token_hex(12), time.time(), self._settings)
        self._note("(forgotten)")

    def _retry(self, _: str) -> None:
        self._conversation = chats.retry_from(self._conversation, self._last_question().id)
        self._answer()

    def _edit(self, text: str) -> None:
        question = self._last_question()
        if not text:
            raise UserError("cannot ask nothing", hint="/edit TEXT")
        self._conversation = chats.edit(self._conversation, question.id, self._new_id(), text, time.time())
        self._answer()

    def _shorten(self, _: str) -> None:
        self._conversation = chats.drop_oldest(self._conversation, self._over_tokens)
        self._note(f"(the model gets {len(chats.messages(self._conversation))} messages)")

    def _last_question(self) -> Turn:
        questions = [turn for turn in chats.path(self._conversation) if turn.role == "user"]
        if not questions:
            raise PenstockError("there is no question to ask again")
        return questions[-1]

    def _save(self, name: str) -> None:
        path = _path(name)
        if not name:
            raise PenstockError("cannot save without a file", hint="/save FILE")
        is_json = path.suffix == ".json"
        data = files.to_json(self._conversation) if is_json else files.to_markdown(self._conversation).encode()
        try:
            with path.open("xb") as file:
                file.write(data)
        except OSError as exc:
            raise PenstockError(f'could not write "{path}": {exc.strerror}', hint="Name another file.") from exc
        self._note(f"(saved to {path})")

    def _load(self, name: str) -> None:
        path = _path(name)
        try:
            read = files.from_file(path.read_bytes(), time.time())
        except OSError as exc:
            raise PenstockError(f'could not read "{name}": {exc.strerror}', hint="/load FILE") from exc
        if len(read) != 1:
            raise UserError(f'cannot go on with "{path}": it has {len(read)} conversations', hint="Export one of them.")
        system = read[0].settings.system if read[0].settings.has_system else None
        self._conversation = replace(read[0], settings=replace(self._settings, system=system))
        self._note(f"({read[0].title or 'untitled'}: {len(chats.path(read[0]))} messages)")

    def _set_system(self, text: str) -> None:
        if text:
            self._settings = replace(self._settings, system=text)
        self._note(f"(system: {self._settings.system or 'none'})")

    def _set_model(self, name: str) -> None:
        self._cards = self._client.models()
        if not name:
            for card in self._cards:
                mark = "*" if card.name == self._settings.model else " "
                self._note(f"{mark} {card.name}" + (f" ({card.state})" if card.state else ""))
            return
        if not any(name in (card.name, *card.aliases) for card in self._cards):
            hint = f"There are: {', '.join(card.name for card in self._cards)}."
            raise PenstockError(f'no model "{name}"', hint=hint)
        self._settings = replace(self._settings, model=name)
        self._note(f"(model: {name})")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            lengths = (card.max_model_len for card in self._cards if card.name == self._settings.model)
            self._settings = changed(self._settings, name, value.strip(), Limits(next(lengths, None)))
        self._note("\n".join(f"({line})" for line in shown(self._settings, name)))

    def _toggle_stats(self, _: str) -> None:
        self._shows_stats = not self._shows_stats
        self._note(f"(stats {'on' if self._shows_stats else 'off'})")

    def _note(self, text: str) -> None:
        if self._is_interactive and not self._options.as_json:
            self._screen.line(text)


def _path(name: str) -> Path:
    """Raises UserError for the home of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as exc:
        raise UserError(f'cannot use the file name "{name}": {exc}') from exc


_COMMANDS = {
    "/quit": "_quit",
    "/exit": "_quit",
    "/help": "_help",
    "/reset": "_reset",
    "/retry": "_retry",
    "/edit": "_edit",
    "/shorten": "_shorten",
    "/save": "_save",
    "/load": "_load",
    "/system": "_set_system",
    "/model": "_set_model",
    "/set": "_set",
    "/stats": "_toggle_stats",
}


def _lines_of(stdin: TextIO) -> ReadLine:
    def read_line(_: str) -> str:
        line = stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    return read_line


def _keyboard(history_file: Path | None) -> ReadLine:
    """`input` with line editing where Python has readline, and the history of earlier sessions.
    Each line is kept at once, so that it survives a terminal that is closed."""
    try:
        import readline
    except ImportError:
        return input
    if history_file is None:
        return input
    with contextlib.suppress(OSError):
        readline.read_history_file(history_file)
    readline.set_history_length(_HISTORY_LINES)

    def read_line(prompt: str) -> str:
        line = input(prompt)
        with contextlib.suppress(OSError):  # a full disk or a read-only home must not end the chat
            history_file.parent.mkdir(parents=True, exist_ok=True)
            history_file.touch(mode=0o600)
            readline.append_history_file(1, history_file)
        return line

    return read_line
