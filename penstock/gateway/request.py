"""What the gateway reads of a request: who should serve it, and how. Pure. Bodies are never changed."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from penstock.gateway.body_fields import LongRequestBody, RequestBody
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


_read_body = msgspec.json.Decoder(RequestBody).decode
_read_long_body = msgspec.json.Decoder(LongRequestBody).decode
_read_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Request:
    """A whole request. `received_at` (monotonic): when its last byte came."""

    __slots__ = ("body", "head", "received_at", "request_id")

    def __init__(self, head: RequestHead, body: bytes, request_id: bytes, received_at: float) -> None:
        self.head = head
        self.body = body
        self.request_id = request_id
        self.received_at = received_at


class RequestFacts:
    """A request as the gateway understands it, for routing and for the ledger.

    Without its body, which may have 32 MiB and is gone when the answer begins; and a plain class, because compiled code
    reads its fields in 1 ns and those of a msgspec.Struct in 40.

    `model`: the name in the request. Lower `priority` goes first, as in vLLM. `session`: the key of policy "sticky",
    `prefix` that of "prefix". `response_id`: an earlier response that only its replica knows. `replica`: named by the
    client. `output_tokens_max`: the client's limit of one choice.
    """

    # Defaults stay with the class: most requests set few of them.
    model: str | None = None
    streams = False
    stream_options: Any = None
    n_choices = 1
    output_tokens_max: int | None = None
    priority = 0
    session = b""
    prefix = b""
    response_id = b""
    timeout_s: float | None = None
    replica: str | None = None

    def __init__(self, path: bytes, request_id: bytes, received_at: float, n_body_bytes: int) -> None:
        self.path = path
        self.request_id = request_id
        self.received_at = received_at
        self.n_body_bytes = n_body_bytes

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the usage of a stream."""
        options = self.stream_options
        return isinstance(options, dict) and options.get("include_usage") is True


def read_facts(request: Request, *, wants_prefix: bool = False) -> RequestFacts:
    """Raises UnreadableError."""
    head, body = request.head, request.body
    facts = RequestFacts(head.path, request.request_id, request.received_at, len(body))
    headers = head.pick(_READ_HEADERS)
    if headers:
        _read_headers(facts, headers)
    if not body and head.method != b"POST":
        return facts
    kind = headers.get(b"content-type", b"")
    if kind[:10].lower() == b"multipart/":
        facts.model = read_form_model(kind, body)
        return facts
    try:
        fields = _read_long_body(body) if wants_prefix else _read_body(body)
    except msgspec.DecodeError as error:
        raise UnreadableError(f"the request body cannot be routed: {error}") from error
    if isinstance(fields, LongRequestBody):
        facts.prefix = _first_bytes(fields)
    _take_fields(facts, fields, has_priority=b"x-penstock-priority" in headers)
    return facts


def _read_headers(facts: RequestFacts, headers: dict[bytes, bytes]) -> None:
    facts.session = headers.get(b"x-session-id", b"")[:SESSION_BYTES]
    replica, timeout = headers.get(b"x-penstock-replica"), headers.get(b"x-request-timeout")
    if replica:
        facts.replica = replica.decode("latin-1")
    if timeout is not None:
        facts.timeout_s = read_timeout_s(timeout)
    priority = headers.get(b"x-penstock-priority")
    if priority is not None:
        if not _INTEGER.fullmatch(priority):
            raise UnreadableError("x-penstock-priority is not a whole number")
        facts.priority = _bound(int(priority))


def _take_fields(facts: RequestFacts, fields: RequestBody, has_priority: bool) -> None:
    """Copies what matters: a raw part would keep the whole body as long as the response lives. Headers come first."""
    facts.model = fields.model
    facts.streams = fields.stream is True
    facts.stream_options = fields.stream_options
    if type(fields.n) is int and 0 < fields.n <= 1024:
        facts.n_choices = fields.n
    for limit in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if type(limit) is int and limit > 0:
            facts.output_tokens_max = limit
            break
    user, priority, previous = bytes(fields.user), bytes(fields.priority), bytes(fields.previous_response_id)
    if priority and not has_priority and _INTEGER.fullmatch(priority):
        facts.priority = _bound(int(priority))
    if not facts.session and user[:1] == b'"':
        facts.session = user[:SESSION_BYTES]
    if previous:
        facts.response_id = previous.strip(b'"')[:SESSION_BYTES]


def read_timeout_s(value: bytes) -> float:
    """Seconds: 1.5 for "1.5", "1.5s" and "1500ms". Raises UnreadableError for anything else, and for 0."""
    match = _TIMEOUT.fullmatch(value)
    timeout_s = float(match.group(1)) / (1000 if match.group(2) == b"ms" else 1) if match else 0.0
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise UnreadableError("x-request-timeout is not a time like 30, 1.5s or 1500ms")
    return timeout_s


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


def _first_bytes(fields: LongRequestBody) -> bytes:
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
