"""A terminal as `top` uses it: keys as they are pressed; set back however the verb ends."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType
from typing import Any

_SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "[5~": "page up", "[6~": "page down", "[3~": "delete",
}  # fmt: skip
_SINGLE = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}
# Over ssh the bytes of one arrow may come apart; a lone escape waits so long before it counts as that key.
_ESCAPE_S = 0.05
_MOST_BYTES, _MOST_OF_A_KEY = 1024, 16


def keys_of(text: str) -> tuple[list[str], str]:
    """The keys in what a terminal sent, and the beginning of one that is not whole. Unknown sequences are left out."""
    keys: list[str] = []
    while text:
        char = text[0]
        if char != "\033":
            text = text[1:]
            if char in _SINGLE or char.isprintable():
                keys.append(_SINGLE.get(char, char))
            continue
        if text[1:2] not in ("", "[", "O"):  # escape, and then another key
            keys.append("esc")
            text = text[1:]
            continue
        end = next((at for at in range(2, len(text)) if "@" <= text[at] <= "~"), None)
        if end is None:
            return keys, text[:_MOST_OF_A_KEY]
        keys += filter(None, [_SEQUENCES.get(text[1 : end + 1])])
        text = text[end + 1 :]
    return keys, ""


class Keyboard:
    """The keys of standard input while the block lasts. "resize": the terminal has another size; "suspend": Ctrl-Z."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._letters = codecs.getincrementaldecoder("utf-8")("ignore")
        self._rest = ""
        self._signals: list[str] = []
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake, self._woken = os.pipe()

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._file)
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        # `select` goes on after a signal: this makes it return.
        self._wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        handlers = {signal.SIGWINCH: self._note, signal.SIGTSTP: self._note, signal.SIGHUP: _leave}
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        for end in (self._wake, self._woken):
            os.close(end)

    def take(self) -> None:
        """Each key at once, and not shown; Ctrl-C and Ctrl-Z stay signals."""
        tty.setcbreak(self._file, termios.TCSADRAIN)

    def give_back(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> list[str]:
        """The keys pressed since the last call, as soon as there is one; none after the timeout.

        Raises EOFError when the terminal is gone."""
        keys = self._read(timeout_s)
        if not keys and self._rest:
            keys = self._read(_ESCAPE_S)
            if not keys and self._rest == "\033":
                self._rest, keys = "", ["esc"]
        return keys

    def _read(self, timeout_s: float) -> list[str]:
        ready, _, _ = select.select([self._file, self._wake], [], [], max(0.0, timeout_s))
        keys: list[str] = []
        if self._wake in ready:
            os.read(self._wake, _MOST_BYTES)
        if self._file in ready:
            data = os.read(self._file, _MOST_BYTES)
            if not data:
                raise EOFError
            keys, self._rest = keys_of(self._rest + self._letters.decode(data))
        signals, self._signals = self._signals, []
        return [*signals, *keys]

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signals.append("resize" if number == signal.SIGWINCH else "suspend")


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
