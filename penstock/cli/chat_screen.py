"""What a chat writes: answers as Markdown while they come, what they wait for, dim notes. A pipe gets plain text."""

from __future__ import annotations

import os
import shutil
import time
from typing import TextIO

_REDRAW_S = 0.05  # a long block takes some milliseconds to draw
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# A model may print anything; escape sequences would let it drive the terminal.
_HARMLESS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


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


class Screen:
    """The terminal or the pipe that a chat writes to. `writes_json`: a program reads it, so that no text is shown."""

    def __init__(self, out: TextIO, writes_json: bool = False) -> None:
        self._out = out
        self._writes_json = writes_json
        self._is_terminal = out.isatty()
        self._has_colour = self._is_terminal and not os.environ.get("NO_COLOR")
        is_drawn = self._has_colour and not writes_json and os.environ.get("TERM") != "dumb"
        self._markdown = _MarkdownScreen(out) if is_drawn else None
        self._n_waiting_chars = 0
        self._ends_line = False

    def wait(self, words: str) -> None:
        """Shows what the answer waits for until it begins, in place of what was shown before; on a terminal only."""
        if self._writes_json or not self._is_terminal:
            return
        self._end_waiting()
        shown = words.translate(_HARMLESS)[: shutil.get_terminal_size().columns - 1]
        self._out.write(self._dim(shown))
        self._out.flush()
        self._n_waiting_chars = len(shown)

    def add(self, text: str, is_reasoning: bool = False) -> None:
        """Shows a piece of the answer. A script wants the answer, not the way to it: a pipe gets no reasoning."""
        if self._writes_json or not text or (is_reasoning and not self._is_terminal):
            return
        self._end_waiting()
        text = text.translate(_HARMLESS) if self._is_terminal else text
        self._ends_line = text.endswith("\n")
        if self._markdown is not None:
            self._markdown.add(text, is_reasoning)
            return
        self._out.write(self._dim(text) if is_reasoning else text)
        self._out.flush()

    def end(self, has_answer: bool = True) -> None:
        """Ends the line of an answer."""
        self._end_waiting()
        if self._markdown is not None:
            self._markdown.end()
        elif has_answer and not self._writes_json and not self._ends_line:
            self._out.write("\n")
        self._ends_line = False

    def line(self, text: str) -> None:
        """A whole line, dim."""
        self._out.write(self._dim(text) + "\n")
        self._out.flush()

    def _end_waiting(self) -> None:
        if self._n_waiting_chars:
            self._out.write("\r" + " " * self._n_waiting_chars + "\r")
        self._n_waiting_chars = 0

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self._has_colour and text else text


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
