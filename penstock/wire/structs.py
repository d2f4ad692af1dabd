"""Types made ready for several threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec


def prepare_loaded() -> None:
    """Builds what msgspec keeps of every struct that is imported so far. To be called before threads decode.

    msgspec builds it when a type is used for the first time, and crashes the process (0.22: a null pointer) when two
    threads do that at the same time.
    """
    for struct in _subclasses(msgspec.Struct):
        with contextlib.suppress(TypeError, NameError):  # no type to decode
            msgspec.json.Decoder(struct)


def _subclasses(struct: Any) -> Iterator[Any]:
    for each in struct.__subclasses__():
        yield each
        yield from _subclasses(each)
