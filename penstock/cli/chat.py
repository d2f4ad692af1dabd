"""Chat in a terminal: streamed answers, a history, a handful of commands. Without a terminal: lines in, answers out."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from penstock.cli import arguments, keys
from penstock.errors import PenstockError
from penstock.text import show_seconds
from penstock.wire.answers import Chunk, Reply
from penstock.wire.client import Client, Message, Stream

PROMPT, MORE = "> ", "... "
_QUOTES = '"""'
_HISTORY_LINES = 1000
_REDRAW_S = 0.05  # a long block takes some milliseconds to draw
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# A model may print anything; escape sequences would let it drive the terminal.
_HARMLESS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
HELP = """\
/retry          ask the last question again
/save FILE      write the conversation to a file, as Markdown
/reset          forget the conversation
/system TEXT    set the system message; alone: show it
/model NAME     talk to another model; alone: list them
/stats          show or hide times after each answer
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; so does everything between \"\"\" and \"\"\".
A message that begins with / is sent with a space before it."""

ReadLine = Callable[[str], str]  # takes the prompt; raises EOFError at the end, as `input` does


@dataclass(frozen=True)
class ChatSettings:
    """How to chat. `completion` sends raw prompts, without a conversation; `as_json` prints one object per answer."""

    model: str | None = None
    system: str | None = None
    completion: bool = False
    as_json: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    history_file: Path | None = None


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("-m", "--message", metavar="TEXT", help="send one message, print the answer, and exit")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--model", help="a model name, when the address serves several")
    text = "any OpenAI-compatible address instead of a deployment ($OPENAI_BASE_URL)"
    parser.add_argument("--url", help=text)
    parser.add_argument("--max-tokens", type=arguments.count, metavar="N", help="tokens of an answer, at most")
    parser.add_argument("--temperature", type=arguments.not_negative, metavar="T", help="of sampling; 0 is greedy")
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
    key = os.environ.get("OPENAI_API_KEY")
    if url is None:
        url, key = keys.address_and_key(run_folder.choose(options.name))
    client = Client(url.removesuffix("/").removesuffix("/v1"), api_key=key)
    settings = ChatSettings(
        model=options.model,
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        completion=options.completion,
        as_json=options.json,
        history_file=paths.home() / "chat-history",
    )
    return chat(client, settings, once=options.message)


def chat(
    client: Client,
    settings: ChatSettings,
    once: str | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
    read_line: ReadLine | None = None,
) -> int:
    """Talks until `once` is answered, or the input ends, or /quit; gives the exit code 0.
    With a terminal (or `read_line`) failures are shown and the chat goes on; otherwise the first one is raised."""
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    if once is not None:
        _Session(client, settings, stdout, is_interactive=False).answer(once)
        return 0
    if read_line is None and stdin.isatty():
        read_line = _keyboard(settings.history_file)
    session = _Session(client, settings, stdout, is_interactive=read_line is not None)
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


def stats(reply: Reply) -> str:
    """ "(TTFT 12 ms, 34 tokens, 310 tokens/s)", without what the server did not say."""
    parts = []
    if reply.ttft_s is not None:
        parts.append(f"TTFT {show_seconds(reply.ttft_s)}")
    if reply.output_tokens is not None:
        parts.append(f"{reply.output_tokens} token{'' if reply.output_tokens == 1 else 's'}")
    if (rate := reply.tokens_per_s) is not None:
        parts.append(f"{rate:.3g} tokens/s" if rate < 100 else f"{rate:.0f} tokens/s")
    return f"({', '.join(parts)})"


def blocks_of(text: str) -> list[str]:
    """Markdown cut at empty lines, but for those of fenced code; the last block may still grow.
    "a\\n\\n```\\nb\\n\\nc" -> ["a", "```\\nb\\n\\nc"]."""
    blocks = [""]
    for line in text.splitlines(keepends=True):
        in_code = sum(part.lstrip().startswith("```") for part in blocks[-1].splitlines()) % 2
        if line.strip() or in_code:
            blocks[-1] += line
        elif blocks[-1]:
            blocks.append("")
    return blocks


class _MarkdownScreen:
    """An answer as Markdown on a terminal while it comes: the last block is drawn again until the next one begins."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out, force_terminal=True, highlight=False)
        self._live: Live | None = None
        self._text, self._is_reasoning, self._drawn_at = "", False, 0.0

    def add(self, text: str, is_reasoning: bool) -> None:
        if is_reasoning is not self._is_reasoning:
            self.end()
        self._is_reasoning = is_reasoning
        *done, self._text = blocks_of(self._text + text)
        for block in done:
            self._finish(block)
            self._console.print()
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw(self._text)

    def end(self) -> None:
        self._finish(self._text)
        self._text = ""

    def _finish(self, block: str) -> None:
        self._draw(block)
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _draw(self, block: str) -> None:
        from rich.live import Live
        from rich.markdown import Markdown
        from rich.text import Text

        if not block.strip():
            return
        shown = Text(block.rstrip("\n"), style="dim") if self._is_reasoning else Markdown(block)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(shown, refresh=True)
        self._drawn_at = time.monotonic()


class _Session:
    def __init__(self, client: Client, settings: ChatSettings, out: TextIO, is_interactive: bool) -> None:
        self._client = client
        self._settings = settings
        self._out = out
        self._is_interactive = is_interactive
        self._is_terminal = out.isatty()
        self._has_colour = self._is_terminal and not os.environ.get("NO_COLOR")
        is_drawn = self._has_colour and not settings.as_json and os.environ.get("TERM") != "dumb"
        self._screen = _MarkdownScreen(out) if is_drawn else None
        self._last: str | None = None
        self._model = settings.model
        self._system = settings.system
        self._shows_stats = False
        self._messages: list[Message] = []
        self._is_over = False

    def greet(self) -> None:
        if not self._is_interactive:
            return
        cards = self._client.models()
        if self._model is None and cards:
            self._model = cards[0].name
        self._note(f"{self._model or 'no model'} at {self._client.base_url} (/help lists commands, Ctrl-D leaves)")

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
                self._guard(self.answer, text.strip())

    def answer(self, text: str) -> None:
        """Asks, shows the answer as it comes, remembers both. A failed question is forgotten."""
        question: Message = {"role": "user", "content": text}
        self._last = text
        shown: list[str] = []
        reply = None
        try:
            with contextlib.closing(self._ask(text, question)) as stream:
                for item in stream:
                    if isinstance(item, Reply):
                        reply = item
                    else:
                        self._show(item, shown)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._end_line(shown)
            shown.append("\n")
            self._note("(stopped)")
        except PenstockError:
            if shown:
                self._end_line(shown)
            raise
        if reply is not None:
            self._conclude(reply, shown)
        answer = "".join(shown).strip() if reply is None else reply.text
        if answer:
            self._messages += [question, {"role": "assistant", "content": answer}]

    def _ask(self, text: str, question: Message) -> Stream:
        settings = self._settings
        fields = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        if settings.completion:
            return self._client.stream_complete(text, self._model, **fields)
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self._messages, question]
        return self._client.stream_chat(messages, self._model, on_wait=None, **fields)

    def _show(self, chunk: Chunk, shown: list[str]) -> None:
        if not chunk.is_reasoning:
            shown.append(chunk.text)
        if self._settings.as_json or (chunk.is_reasoning and not self._is_terminal):
            return  # a script wants the answer, not the way to it
        text = chunk.text.translate(_HARMLESS) if self._is_terminal else chunk.text
        if self._screen is not None:
            self._screen.add(text, chunk.is_reasoning)
            return
        self._out.write(self._dim(text) if chunk.is_reasoning else text)
        self._out.flush()

    def _conclude(self, reply: Reply, shown: list[str]) -> None:
        if self._settings.as_json:
            self._out.write(json.dumps(asdict(reply), ensure_ascii=False) + "\n")
        else:
            self._end_line(shown)
            if self._shows_stats:
                self._out.write(self._dim(stats(reply)) + "\n")
        self._out.flush()

    def _end_line(self, shown: list[str]) -> None:
        if self._screen is not None:
            self._screen.end()
        elif not self._settings.as_json and not "".join(shown).endswith("\n"):
            self._out.write("\n")

    def _guard(self, act: Callable[[str], None], text: str) -> None:
        try:
            act(text)
        except PenstockError as exc:
            if not self._is_interactive:
                raise
            if self._settings.as_json:
                self._out.write(json.dumps(exc.facts()) + "\n")
            else:
                self._note(f"error: {exc.message}" + (f"\nhint: {exc.hint}" if exc.hint else ""))

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
        self._messages = []
        self._note("(forgotten)")

    def _retry(self, _: str) -> None:
        if self._last is None:
            raise PenstockError("there is no question to ask again")
        if self._messages and self._messages[-2]["content"] == self._last:
            del self._messages[-2:]
        self.answer(self._last)

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        if not name:
            raise PenstockError("cannot save without a file", hint="/save FILE")
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        turns = (f"## {turn['role']}\n\n{turn['content']}\n" for turn in (*system, *self._messages))
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join(turns))
        except OSError as exc:
            raise PenstockError(f'could not write "{path}": {exc.strerror}', hint="Name another file.") from exc
        self._note(f"(saved to {path})")

    def _set_system(self, text: str) -> None:
        self._system = text or self._system
        self._note(f"(system: {self._system or 'none'})")

    def _set_model(self, name: str) -> None:
        cards = self._client.models()
        if not name:
            for card in cards:
                mark = "*" if card.name == self._model else " "
                self._note(f"{mark} {card.name}" + (f" ({card.state})" if card.state else ""))
            return
        if not any(name in (card.name, *card.aliases) for card in cards):
            raise PenstockError(f'no model "{name}"', hint=f"There are: {', '.join(card.name for card in cards)}.")
        self._model = name
        self._note(f"(model: {name})")

    def _toggle_stats(self, _: str) -> None:
        self._shows_stats = not self._shows_stats
        self._note(f"(stats {'on' if self._shows_stats else 'off'})")

    def _note(self, text: str) -> None:
        if self._is_interactive and not self._settings.as_json:
            self._out.write(self._dim(text) + "\n")
            self._out.flush()

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colour and text else text


_COMMANDS = {
    "/quit": "_quit",
    "/exit": "_quit",
    "/help": "_help",
    "/reset": "_reset",
    "/retry": "_retry",
    "/save": "_save",
    "/system": "_set_system",
    "/model": "_set_model",
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
