"""The error family: message, detail, hint, and whether a retry is sensible. Only `cli` prints them.

A message is one line, lower case, without a full stop. "cannot" is for ever, "could not" may work next time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

EXIT_OURS, EXIT_USER, EXIT_NOT_MODELLED = 1, 2, 4


@dataclass(frozen=True)
class Problem:
    """One thing wrong in what the user gave: `path` is where ("engine.max_model_len"), empty for the whole."""

    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return where + self.message + (f" ({self.hint})" if self.hint else "")


State = Literal["ok", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`. `node` is None for this machine, the file, or all nodes together."""

    check: str
    state: State
    found: str
    cure: str | None = None
    node: str | None = None


class PenstockError(Exception):
    """A failure we can explain. `exit_code` is 2 for the user's mistake and 1 for ours or the machine's."""

    exit_code = EXIT_OURS

    def __init__(
        self, message: str, *, detail: str | None = None, hint: str | None = None, is_retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.is_retryable = is_retryable

    def facts(self) -> dict[str, object]:
        fields = ("message", "detail", "hint", "is_retryable", "exit_code")
        return {"error": {field: getattr(self, field) for field in fields}}


class UserError(PenstockError):
    """The user can fix it: bad input, a missing engine, a port in use."""

    exit_code = EXIT_USER


class SpecError(UserError):
    """Everything wrong with a deployment file, together."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"cannot use {source}: {count}",
            # A problem of several lines is one still: the others stand below it.
            detail="\n".join(str(problem).replace("\n", "\n  ") for problem in problems),
            hint=None if any(problem.hint for problem in problems) else "docs/reference/spec.md lists every field",
        )

    def facts(self) -> dict[str, object]:
        return super().facts() | {"problems": [asdict(problem) for problem in self.problems]}


def together(source: str, errors: Sequence[PenstockError]) -> PenstockError:
    """One error for all of them: itself when it is the only one."""
    problems: list[Problem] = []
    for error in errors:
        shown = error.message + (f": {error.detail}" if error.detail else "")
        problems += error.problems if isinstance(error, SpecError) else [Problem("", shown, error.hint)]
    return errors[0] if len(errors) == 1 else SpecError(source, problems)


class PlanError(UserError):
    """The model does not fit, or cannot be cut as asked; the detail carries the numbers."""


class EngineError(PenstockError):
    """The engine did not start, or died; the detail carries its last lines."""


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The legal name closest to `word`, or None when nothing is close."""
    names = {name.replace("_", "-"): name for name in legal}
    close = difflib.get_close_matches(word.replace("_", "-"), names, 1, 0.6)
    return names[close[0]] if close else None


class NotModelled(UserError):
    """An architecture, a weight format or an option whose memory we cannot state. Exit code 4."""

    exit_code = EXIT_NOT_MODELLED


def not_modelled(kind: str, name: str, why: str, hint: str | None = None) -> NotModelled:
    return NotModelled(f'cannot plan {kind} "{name}": {why}', hint=hint)
