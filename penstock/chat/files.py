"""Conversations as files: JSON with all of one, Markdown with the branch that is shown, messages of OpenAI's API.

What is read is untrusted: a file, or what a browser sends.
"""

from __future__ import annotations

import hashlib
import re
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.chat.conversation import VERSION, Conversation, Turn, path, title_of
from penstock.chat.settings import Settings
from penstock.errors import UserError
from penstock.text import MIB, show_bytes, show_seconds
from penstock.wire.answers import ToolCall

_FILE_BYTES_MAX = 64 * MIB
_TURNS_MAX = 10_000
_DATE_S_MAX = 8.64e12  # https://tc39.es/ecma262/#sec-time-values-and-time-range
# JavaScript puts keys that are indices of an array first: https://tc39.es/ecma262/#sec-ordinaryownpropertykeys
_ID = re.compile(r"(?![0-9]{1,10}\Z)[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_IMAGE = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*\Z")
_HEADING = re.compile(r"^## (system|user|assistant)[ \t]*$", re.MULTILINE)
_LIKE_HEADING = re.compile(r"^(\\*## (?:system|user|assistant)[ \t]*)$", re.MULTILINE)
_ESCAPE, _ESCAPED = r"\\\1", re.compile(r"^\\(\\*## (?:system|user|assistant)[ \t]*)$", re.MULTILINE)
_REASONING = re.compile(r"\s*<details><summary>Reasoning[^<\n]*</summary>\n\n(.*?)\n\n</details>\n", re.DOTALL)
_READABLE = 'It is JSON that this page exported, or has OpenAI\'s messages: {"messages": [...]}.'


def to_markdown(conversation: Conversation) -> str:
    """The branch that is shown, a heading for each message, with reasoning and tool calls as they were."""
    settings = conversation.settings
    system = (
        [f"## system\n\n{_LIKE_HEADING.sub(_ESCAPE, settings.system)}\n"]
        if settings.has_system and settings.system
        else []
    )
    return "\n".join([*system, *map(_turn_as_markdown, path(conversation))])


def to_json(conversation: Conversation) -> bytes:
    """What `from_json` reads."""
    return msgspec.json.encode(conversation)


def from_json(data: bytes | str, now: float = 0.0) -> list[Conversation]:
    """The conversations of an untrusted file: one or a list, ours or with OpenAI's messages, which are dated `now`.

    Raises UserError for anything else. What it gives is sound: parents stand before children, questions and answers
    alternate, images are data URLs.
    """
    if len(data) > _FILE_BYTES_MAX:
        raise UserError(f"cannot read conversations of more than {show_bytes(_FILE_BYTES_MAX)}")
    try:
        rows = msgspec.json.decode(data)
        if not isinstance(rows, list) or (rows and isinstance(rows[0], dict) and "role" in rows[0]):
            rows = [{"messages": rows} if isinstance(rows, list) else rows]
        if len(rows) > _TURNS_MAX:  # small ones become ten times as large
            raise _unsound(f"more than {_TURNS_MAX:,} conversations")
        has_messages = [isinstance(row, dict) and isinstance(row.get("messages"), list) for row in rows]
        return [
            _of_request(row, now) if is_request else _sound(msgspec.convert(row, Conversation))
            for row, is_request in zip(rows, has_messages, strict=True)
        ]
    except (msgspec.DecodeError, RecursionError, UnicodeError) as exc:
        reason = "too many levels" if isinstance(exc, RecursionError) else str(exc)
        raise UserError("cannot read the conversations", detail=reason, hint=_READABLE) from exc


def from_file(data: bytes, now: float) -> list[Conversation]:
    """As `from_json`, also of Markdown that `to_markdown` wrote: headings `## user` and `## assistant`."""
    text = data[: _FILE_BYTES_MAX + 1].decode("utf-8", "replace").replace("\r\n", "\n")
    _, *parts = _HEADING.split(text)  # no JSON has such a line
    if not parts or len(data) > _FILE_BYTES_MAX:
        return from_json(data, now)
    rows = []
    for role, block in zip(parts[::2], parts[1::2], strict=True):
        reasoning = _REASONING.match(block)
        said = block[reasoning.end() :] if reasoning else block
        said = _ESCAPED.sub(r"\1", said).strip()
        rows.append(_Message(role, said, reasoning=reasoning[1] if reasoning else ""))
    return [_of_messages(rows, now)]


def _turn_as_markdown(turn: Turn) -> str:
    parts = [f"## {turn.role}"]
    if turn.reasoning:
        title = "Reasoning" + (f", {show_seconds(turn.reasoning_s)}" if turn.reasoning_s is not None else "")
        parts.append(f"<details><summary>{title}</summary>\n\n{turn.reasoning}\n\n</details>")
    parts += [f"Tool call `{call.name}`:\n\n```json\n{call.arguments}\n```" for call in turn.tool_calls]
    if turn.images:
        parts.append(f"({len(turn.images)} image{'' if len(turn.images) == 1 else 's'})")
    if turn.text:
        parts.append(_LIKE_HEADING.sub(_ESCAPE, turn.text))
    return "\n\n".join(parts) + "\n"


def _sound(conversation: Conversation) -> Conversation:
    """The same, its turns with parents first. Raises UserError for what no function of conversation.py makes."""
    turns = conversation.turns
    if conversation.version > VERSION:
        raise UserError(f"cannot read a conversation of version {conversation.version}", hint="Update penstock.")
    dates = (conversation.created_at, conversation.updated_at)
    if not all(0 <= date <= _DATE_S_MAX for date in dates) or len(turns) > _TURNS_MAX or not _ID.match(conversation.id):
        raise _unsound(f"its id, a date, or more than {_TURNS_MAX:,} messages")
    for key, turn in turns.items():
        parent = turns.get(turn.parent or "")
        if turn.id != key or not _ID.match(key):
            raise _unsound(f"message {key[:64]!r} has a bad id")
        if (parent is None and turn.parent is not None) or (parent.role if parent else "assistant") == turn.role:
            raise _unsound(f"message {key!r} follows none that it may follow")
        if not all(map(_IMAGE.match, turn.images)):
            raise _unsound(f"an image of message {key!r} is no PNG, JPEG, WebP or GIF as a data URL")
    if conversation.leaf is not None and conversation.leaf not in turns:
        raise _unsound("its last message is missing")
    return replace(conversation, turns=_parents_first(turns))


def _parents_first(turns: dict[str, Turn]) -> dict[str, Turn]:
    ordered: dict[str, Turn] = {}
    for turn in turns.values():
        chain: dict[str, Turn] = {}
        link: Turn | None = turn
        while link is not None and link.id not in ordered:
            if link.id in chain:
                raise _unsound(f"message {link.id!r} follows itself")
            chain[link.id] = link
            link = turns.get(link.parent or "")
        ordered.update(reversed(chain.items()))
    return ordered


def _unsound(what: str) -> UserError:
    return UserError("cannot use the conversation", detail=what, hint=_READABLE)


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""
    image_url: dict[str, Any] = {}


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Said(msgspec.Struct):
    """One message of https://platform.openai.com/docs/api-reference/chat/create."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class _Request(msgspec.Struct):
    messages: list[_Said]
    model: str | None = None
    title: str = ""


class _Message(NamedTuple):
    role: str
    text: str
    images: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


def _of_request(row: object, now: float) -> Conversation:
    """A request body, or its messages alone."""
    request = msgspec.convert(row, _Request)
    rows = []
    for said in request.messages:
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in said.tool_calls or ())
        rows.append(_Message(said.role, *_text_and_images(said.content), calls))
    conversation = _of_messages(rows, now, request.title)
    return replace(conversation, settings=replace(conversation.settings, model=request.model))


def _of_messages(rows: list[_Message], now: float, title: str = "") -> Conversation:
    """One branch. Messages of one role in a row become one turn; answers of tools are left out."""
    if len(rows) > _TURNS_MAX:
        raise _unsound(f"more than {_TURNS_MAX:,} messages")
    shown = [row for row in rows if row.role in ("user", "assistant")]
    if shown and shown[0].role == "assistant":
        shown.insert(0, _Message("user", ""))
    # All messages of a turn are joined at once: one after the other would take the square of their number.
    turns = [_turn_of(n, list(group)) for n, (_, group) in enumerate(groupby(shown, lambda row: row.role))]
    digest = hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:16]  # the same file is the same conversation
    title = title or title_of(next((turn.text for turn in turns if turn.text), ""))
    by_id = {turn.id: turn for turn in turns}
    settings = Settings(system="\n\n".join(row.text for row in rows if row.role in ("system", "developer")) or None)
    leaf = turns[-1].id if turns else None
    return _sound(Conversation(f"import-{digest}", title, now, now, by_id, leaf, settings))


def _turn_of(n: int, rows: list[_Message]) -> Turn:
    return Turn(
        f"m{n}",
        f"m{n - 1}" if n else None,
        "user" if rows[0].role == "user" else "assistant",
        text="\n\n".join(row.text for row in rows if row.text),
        images=tuple(image for row in rows for image in row.images),
        tool_calls=tuple(call for row in rows for call in row.tool_calls),
        reasoning="".join(row.reasoning for row in rows),
    )


def _text_and_images(content: str | list[_Part] | None) -> tuple[str, tuple[str, ...]]:
    """Images elsewhere are not fetched: their address stays, as text."""
    if not isinstance(content, list):
        return content or "", ()
    urls = [str(part.image_url.get("url")) for part in content if part.image_url]
    texts = [part.text for part in content if part.text]
    images = tuple(url for url in urls if _IMAGE.match(url))
    return "\n\n".join([*texts, *(url for url in urls if not _IMAGE.match(url))]), images
