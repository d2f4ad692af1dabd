"""Which replica holds a stored response: engines keep them in their own memory. Pure."""

from __future__ import annotations

import re
from typing import Final

MAX_KEPT = 65536
SEARCHED_BYTES = 4096

_RESPONSE_ID: Final = re.compile(rb"\"id\"\s*:\s*\"(resp_[A-Za-z0-9_\-]{1,128})\"")


class Memory:
    """The last MAX_KEPT response ids with the model and replica they came from. One per gateway process."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[str, str]] = {}

    def keep(self, response_id: bytes, model: str, replica: str) -> None:
        self._places[response_id] = (model, replica)
        if len(self._places) > MAX_KEPT:
            del self._places[next(iter(self._places))]

    def find(self, response_id: bytes) -> tuple[str, str] | None:
        """Model and replica."""
        return self._places.get(response_id)


def find_response_id(body: bytes) -> bytes | None:
    """The id in the beginning of a /v1/responses answer, streamed or not."""
    found = _RESPONSE_ID.search(body, 0, SEARCHED_BYTES)
    return found.group(1) if found else None
