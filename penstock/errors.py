"""The error family: message, detail, hint, and whether a retry is sensible.

A message is one line, lower case, without a full stop; it names kind and value. "cannot" is for ever, "could not"
may work next time. `cli` prints them; nothing else does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXIT_OURS = 1
EXIT_USER = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong in what the user gave: `path` is where ("engine.max_model_len"), empty for the whole."""

    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return where + self.message + (f" ({self.hint})" if self.hint else "")


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
        """What `--json` prints for this error."""
        return {
            "error": {
                "message": self.message,
                "detail": self.detail,
                "hint": self.hint,
                "is_retryable": self.is_retryable,
                "exit_code": self.exit_code,
            }
        }


class UserError(PenstockError):
    """The user can mend it: bad input, a missing engine, a port in use."""

    exit_code = EXIT_USER


class SpecError(UserError):
    """Everything wrong with a deployment file, together."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"cannot use {source}: {count}",
            detail="\n".join(str(problem) for problem in problems),
            hint=None if any(problem.hint for problem in problems) else "docs/reference/spec.md lists every field",
        )

    def facts(self) -> dict[str, object]:
        facts = super().facts()
        facts["problems"] = [{"path": p.path, "message": p.message, "hint": p.hint} for p in self.problems]
        return facts


class PlanError(UserError):
    """The model does not fit, or cannot be cut as asked; the detail carries the numbers."""


class EngineError(PenstockError):
    """The engine would not start or died; the detail carries its last lines and our reading of them."""


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The legal name closest to `word`, or None when nothing is close."""
    names = {name.replace("_", "-"): name for name in legal}
    found = difflib.get_close_matches(word.replace("_", "-"), names, 1, 0.6)
    return names[found[0]] if found else None


EXIT_NOT_MODELLED = 4


class NotModelled(UserError):
    """An architecture, a weight format or an option whose memory we cannot state. Exit code 4."""

    exit_code = EXIT_NOT_MODELLED


def not_modelled(kind: str, name: str, why: str, hint: str | None = None) -> NotModelled:
    """The refusal for one unknown thing: `cannot plan architecture "X": why`."""
    return NotModelled(f'cannot plan {kind} "{name}": {why}', hint=hint)
