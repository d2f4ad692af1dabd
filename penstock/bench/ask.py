"""One request that a load test will send, whoever made it: the seam between data and generator."""

from __future__ import annotations

from typing import Any

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """What is asked of the server, and when.

    `prompt` is text, or chat messages.  `input_tokens` is the count by the model's tokenizer, None where nobody
    counted; `output_tokens` is the most that may be answered.  `wait_for` is the index of the ask whose answer must be
    complete before this one is sent (the turn before, in a conversation).  `offset_s` is when to send it, in seconds
    from the start of the run, where the times are replayed.
    """

    prompt: str | list[dict[str, Any]]
    input_tokens: int | None
    output_tokens: int
    session: str | None = None
    wait_for: int | None = None
    offset_s: float | None = None
