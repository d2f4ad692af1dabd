"""Answers that a test chose, from the file of --answers: JSON, by the text of the last message. Pure, but for `load`.

{"hi": "Hello!",
 "think": {"reasoning": "Hm.", "text": "Yes."},
 "call": {"tool_calls": [{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}]},
 "refuse": {"status": 400, "text": "System role not supported"},
 "*": "for all other messages"}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

Delta = dict[str, object]  # of a chunk, as vLLM writes it

_ANY = "*"
_TOKEN = re.compile(r"\s*\S+|\s+")


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to say, word by word: reasoning, then text, then calls. `status` of 400 and more refuses, with `text`."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()
    status: int = 200

    def deltas(self) -> tuple[Delta, ...]:
        """One for each token."""
        return (
            *({"reasoning": piece} for piece in _TOKEN.findall(self.reasoning)),
            *({"content": piece} for piece in _TOKEN.findall(self.text)),
            *(delta for index, call in enumerate(self.tool_calls) for delta in _call_deltas(index, call)),
        )

    def message(self) -> Delta:
        """The message of an answer that is not streamed."""
        calls = [
            {"id": _call_id(index), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for index, call in enumerate(self.tool_calls)
        ]
        return {"content": self.text or None, "reasoning": self.reasoning or None, "tool_calls": calls}


_decode = msgspec.json.Decoder(dict[str, str | Answer]).decode


def load(path: str) -> dict[str, str | Answer]:
    """The file's content. It is read for each request, so a test may change it."""
    return _decode(Path(path).read_bytes())


def choose(answers: dict[str, str | Answer], prompt: str) -> Answer | None:
    answer = answers.get(prompt.strip(), answers.get(_ANY))
    return Answer(answer) if isinstance(answer, str) else answer


def _call_id(index: int) -> str:
    return f"chatcmpl-tool-{index:016x}"


def _call_deltas(index: int, call: Call) -> Iterator[Delta]:
    begin: Delta = {"id": _call_id(index), "type": "function", "index": index}
    yield {"tool_calls": [begin | {"function": {"name": call.name, "arguments": ""}}]}
    for piece in _TOKEN.findall(call.arguments):
        yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
