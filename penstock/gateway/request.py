"""What the gateway reads of a request: whom it asks, and how it wants to be treated. Pure. Bodies are never changed."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from penstock.gateway.body_fields import Ask, Body, Fields, LongBody
from penstock.wire.http1 import RequestHead

PREFIX_BYTES: Final = 1024  # about 256 tokens
SESSION_BYTES: Final = 256
PRIORITY_LIMIT = 1000
TIMEOUT_S_MAX = 86400.0

_BOUNDARY: Final = re.compile(rb"boundary=(?:\"([^\"\r\n]{1,70})\"|([^\s;,\"]{1,70}))", re.IGNORECASE)
_MODEL_PART: Final = re.compile(
    rb"content-disposition:[^\r\n]*;[ \t]*name=\"?model\"?[ \t]*(?:;|\r\n|\Z)", re.IGNORECASE
)
_PART_HEAD_BYTES: Final = 1024
_NAME_BYTES: Final = 512
_TIMEOUT: Final = re.compile(rb"(\d{1,9}(?:\.\d{1,9})?)[ ]?(ms|s|)")
_INTEGER: Final = re.compile(rb"-?\d{1,9}")
_READ_HEADERS: Final = frozenset(
    (b"content-type", b"x-session-id", b"x-penstock-priority", b"x-penstock-replica", b"x-request-timeout")
)
_FIRST_TURN: Final = (b'"system"', b'"developer"')


class UnreadableError(ValueError):
    """The request cannot be understood; the text says why."""


_read_body = msgspec.json.Decoder(Body).decode
_read_long_body = msgspec.json.Decoder(LongBody).decode
_read_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


def read_ask(head: RequestHead, body: bytes, *, wants_prefix: bool = False) -> Ask:
    """What `head` and `body` ask for. Raises UnreadableError."""
    given = head.pick(_READ_HEADERS)
    session = given.get(b"x-session-id", b"")[:SESSION_BYTES]
    priority, timeout = given.get(b"x-penstock-priority"), given.get(b"x-request-timeout")
    pinned, kind = given.get(b"x-penstock-replica"), given.get(b"content-type", b"")
    replica = pinned.decode("latin-1") if pinned else None
    timeout_s = None if timeout is None else read_timeout_s(timeout)
    level = 0 if priority is None else _read_priority(priority)
    if not body and head.method != b"POST":
        return Ask(session=session, priority=level, timeout_s=timeout_s, replica=replica)
    if kind[:10].lower() == b"multipart/":
        return Ask(read_form_model(kind, body), False, level, session, timeout_s=timeout_s, replica=replica)
    try:
        fields = _read_long_body(body) if wants_prefix else _read_body(body)
    except msgspec.DecodeError as error:
        raise UnreadableError(f"the request body cannot be routed: {error}") from error
    user, urgency, previous = bytes(fields.user), bytes(fields.priority), bytes(fields.previous_response_id)
    if priority is None and urgency and _INTEGER.fullmatch(urgency):
        level = _bound(int(urgency))
    if not session and user[:1] == b'"':
        session = user[:SESSION_BYTES]
    return Ask(
        model=fields.model,
        streams=fields.stream is True,
        priority=level,
        session=session,
        prefix=_first_bytes(fields) if isinstance(fields, LongBody) else b"",
        response_id=previous.strip(b'"')[:SESSION_BYTES],
        timeout_s=timeout_s,
        replica=replica,
        fields=fields if type(fields) is Body and not (user or urgency or previous) else _copy(fields),
    )


def _copy(fields: Body) -> Fields:
    """The raw parts of a body would keep the whole of it as long as the response lives."""
    return Fields(
        *(fields.model, fields.stream, fields.stream_options, fields.max_tokens, fields.max_completion_tokens),
        *(fields.max_output_tokens, fields.n),
    )


def read_timeout_s(value: bytes) -> float:
    """Seconds: 1.5 for "1.5", "1.5s" and "1500ms". Raises UnreadableError for anything else, and for 0."""
    match = _TIMEOUT.fullmatch(value)
    timeout_s = float(match.group(1)) / (1000 if match.group(2) == b"ms" else 1) if match else 0.0
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise UnreadableError("x-request-timeout is not a time like 30, 1.5s or 1500ms")
    return timeout_s


def _read_priority(value: bytes) -> int:
    if not _INTEGER.fullmatch(value):
        raise UnreadableError("x-penstock-priority is not a whole number")
    return _bound(int(value))


def _bound(priority: int) -> int:
    return max(-PRIORITY_LIMIT, min(priority, PRIORITY_LIMIT))


def read_form_model(content_type: bytes, body: bytes) -> str | None:
    """The value of the form part named "model", found by its boundary; nothing else of the form is read.

    None when there is none. Raises UnreadableError when the type names no boundary or the value is no name.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise UnreadableError("the form has no boundary")
    delimiter = b"--" + (found.group(1) or found.group(2))
    at = body.find(delimiter)
    while at >= 0:
        start = at + len(delimiter)
        if body[start : start + 2] != b"\r\n":
            return None
        head_end = body.find(b"\r\n\r\n", start, start + _PART_HEAD_BYTES)
        if head_end >= 0 and _MODEL_PART.search(body, start, head_end):
            end = body.find(b"\r\n" + delimiter, head_end + 2, head_end + 4 + _NAME_BYTES + len(delimiter) + 2)
            if end < 0:
                raise UnreadableError("the form's model is no name")
            return _read_name(body[head_end + 4 : end])
        next_at = body.find(b"\r\n" + delimiter, start)
        at = next_at + 2 if next_at >= 0 else -1
    return None


def _read_name(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError("the form's model is no name") from error


def _first_bytes(fields: LongBody) -> bytes:
    """The bytes that later requests of the same conversation begin with too.

    Of messages: instructions and the first question, since what follows them is new in every turn.
    """
    messages = bytes(fields.messages)
    if messages[:1] != b"[":
        return bytes(fields.prompt or fields.input)[:PREFIX_BYTES]
    raws: list[Any] = _read_raws(messages)
    taken: list[bytes] = []
    for raw in raws[:4]:
        taken.append(bytes(raw)[:PREFIX_BYTES])
        if not any(role in taken[-1][:40] for role in _FIRST_TURN):
            break
    return b"".join(taken)[:PREFIX_BYTES]
