"""A verb of penstock that another machine asks for next to a gateway's store, and its answer."""

from __future__ import annotations

import msgspec


class Verb(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`words`: without the program's name."""

    words: tuple[str, ...]


class Done(msgspec.Struct, frozen=True):
    """What the command printed; `code`: its exit code."""

    code: int
    out: str
    err: str
