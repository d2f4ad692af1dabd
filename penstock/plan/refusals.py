"""What planning does not model, as an error of its own: never a guess."""

from __future__ import annotations

from penstock.errors import UserError

EXIT_NOT_MODELLED = 4


class NotModelled(UserError):
    """An architecture, a weight format or an option whose memory we cannot state. Exit code 4."""

    exit_code = EXIT_NOT_MODELLED


def not_modelled(kind: str, name: str, why: str, hint: str | None = None) -> NotModelled:
    """The refusal for one unknown thing: `cannot plan architecture "X": why`."""
    return NotModelled(f'cannot plan {kind} "{name}": {why}', hint=hint)
