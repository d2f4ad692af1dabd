"""What the gateway reads of a request: who should serve it, and how. Pure. Bodies are never changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from penstock.gateway.body_fields import Key, RequestBody, replace_field
from penstock.wire.http1 import RequestHead

PREFIX_BYTES: Final = 1024  # about 256 tokens
SESSION_BYTES: Final = 256
PRIORITY_LIMIT = 1000
OUTPUT_TOKENS_MAX: Final = 10**18
TIMEOUT_S_MAX = 86400.0

# Forms are read as strictly as requests: what two parsers may read in two ways is refused.
# https://www.rfc-editor.org/rfc/rfc7578, https://www.rfc-editor.org/rfc/rfc2046#section-5.1.1
_FORM_TYPE: Final = re.compile(
    rb"multipart/form-data(?:; ?charset=\"?utf-8\"?)?; ?boundary=(\"?)([A-Za-z0-9'()+_,\-./:=?]{1,70})\1"
    rb"(?:; ?charset=\"?utf-8\"?)?",
    re.IGNORECASE,
)
_PART_TYPE: Final = re.compile(rb"[^\s;,]+(?:; ?charset=\"?utf-8\"?)?", re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb"form-data; ?name=(\"?)([^\"\\;\s]{1,100})\1(?:; ?filename(?:=\"[^\"]*\"|=[^\s;\"]+|\*=[^\s;\"]+))*",
    re.IGNORECASE,
)
_PART_HEAD_BYTES: Final = 4096
_NAME_BYTES: Final = 512
_MAX_PARTS: Final = 256
_TIMEOUT: Final = re.compile(rb"(\d{1,9}(?:\.\d{1,9})?)[ ]?(ms|s|)")
_INTEGER: Final = re.compile(rb"-?\d{1,9}")
_READ_HEADERS: Final = frozenset(
    (b"content-type", b"x-session-id", b"x-penstock-priority", b"x-penstock-replica", b"x-request-timeout")
    + (b"x-penstock-progress",)
)
_MAX_KEYS: Final = 256
_ABSENT: Final = msgspec.Raw()
_DECIDING: Final = frozenset(RequestBody.__struct_fields__)
_BRACKET: Final = re.compile(rb'[^"\[\]{}]*+(?:"(?:[^"\\]|\\.)*+"[^"\[\]{}]*+)*+([\[\]{}])', re.DOTALL)
_FIRST_TURN: Final = (b'"system"', b'"developer"')


class UnreadableError(ValueError):
    """The request cannot be understood; the text says why."""


# What reading JSON raises; RecursionError at about 1,000 levels.
BODY_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_keys: Final[list[str]] = []  # of the body that is read now, their escapes decoded


def _note_key(_: type, key: str) -> Key:
    if len(_keys) == _MAX_KEYS:
        raise ValueError(f"it has more than {_MAX_KEYS} fields")
    _keys.append(key)
    return Key()


_read_fields = msgspec.json.Decoder(dict[Key, msgspec.Raw], dec_hook=_note_key).decode
_read_body = msgspec.json.Decoder(RequestBody).decode


class Request:
    """A whole request. `received_at` (monotonic): when its last byte came."""

    __slots__ = ("body", "head", "received_at", "request_id")

    def __init__(self, head: RequestHead, body: bytes, request_id: bytes, received_at: float) -> None:
        self.head = head
        self.body = body
        self.request_id = request_id
        self.received_at = received_at


class RequestFacts:
    """A request as the gateway understands it, without its body, which is gone when the answer begins.

    A plain class: compiled code reads its fields in 1 ns and those of a msgspec.Struct in 40. `model`: the name in the
    request. Lower `priority` goes first, as in vLLM. `session`, `prefix`: keys of policies "sticky" and "prefix".
    `response_id`: an earlier response that only its replica knows. `output_tokens_max`: the limit of one choice.
    `wants_usage`: the client asked for the usage of a stream; `has_options`: it has `stream_options`.
    `wants_progress`: comments of a waiting stream are of `wire/waiting.py`, more often.
    """

    # Defaults stay with the class: most requests set few of them.
    model: str | None = None
    streams = False
    has_options = False
    wants_usage = False
    n_choices = 1
    output_tokens_max: int | None = None
    priority = 0
    session = b""
    prefix = b""
    response_id = b""
    timeout_s: float | None = None
    replica: str | None = None
    wants_progress = False

    def __init__(self, path: bytes, request_id: bytes, received_at: float, n_body_bytes: int) -> None:
        self.path = path
        self.request_id = request_id
        self.received_at = received_at
        self.n_body_bytes = n_body_bytes


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
    if kind and sum(name == b"content-type" for name, _ in head.headers) > 1:
        raise UnreadableError("more than one content-type")
    if kind[:10].lower() == b"multipart/":
        facts.model = read_form_model(kind, body)
        return facts
    try:
        values = _split_fields(body)
        if wants_prefix:
            facts.prefix = _first_bytes(values)
        _take_fields(facts, values, has_priority=b"x-penstock-priority" in headers)
    except BODY_ERRORS as error:
        raise UnreadableError(f"the request body cannot be routed: {error}") from error
    return facts


def rename_model(request: Request, name: str) -> bytes:
    """The body, which `read_facts` took, with another value of its model where that stands. Raises BODY_ERRORS."""
    kind = request.head.get(b"content-type") or b""
    if kind[:10].lower() == b"multipart/":
        place = _find_form_model(kind, request.body)
        if place is None:
            return request.body
        return request.body[: place[0]] + name.encode() + request.body[place[1] :]
    return replace_field(request.body, "model", lambda _: msgspec.json.encode(name))


def _read_headers(facts: RequestFacts, headers: dict[bytes, bytes]) -> None:
    facts.session = headers.get(b"x-session-id", b"")[:SESSION_BYTES]
    replica, timeout = headers.get(b"x-penstock-replica"), headers.get(b"x-request-timeout")
    if replica:
        facts.replica = replica.decode("latin-1")
    if timeout is not None:
        facts.timeout_s = read_timeout_s(timeout)
    if headers.get(b"x-penstock-progress") == b"1":
        facts.wants_progress = True
    priority = headers.get(b"x-penstock-priority")
    if priority is not None:
        if not _INTEGER.fullmatch(priority):
            raise UnreadableError("x-penstock-priority is not a whole number")
        facts.priority = _bound(int(priority))


def _split_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields, raw: 30 MiB of `[],[],...` in one of them would become 900 MB of objects, in 2 s.

    None stands twice: the engine may take the other one. Raises BODY_ERRORS.
    """
    _keys.clear()
    values = dict(zip(_keys, _read_fields(body).values(), strict=True))
    if len(values) < len(_keys):
        raise msgspec.DecodeError(f"two of its fields are named {max(_keys, key=_keys.count)!r}")
    return values


def _take_fields(facts: RequestFacts, values: dict[str, msgspec.Raw], has_priority: bool) -> None:
    """Copies what matters: a raw part would keep the whole body as long as the response lives. Headers come first."""
    fields = _read_body(msgspec.json.encode({name: value for name, value in values.items() if name in _DECIDING}))
    options, n_choices, priority = fields.stream_options, fields.n, fields.priority
    facts.model = fields.model
    facts.streams = fields.stream is True
    facts.has_options = "stream_options" in values
    facts.wants_usage = options is not None and options.include_usage is True
    if n_choices is not None and 0 < n_choices <= 1024:
        facts.n_choices = n_choices
    for limit in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if limit is not None and limit > 0:
            facts.output_tokens_max = min(limit, OUTPUT_TOKENS_MAX)
            break
    if priority is not None and not has_priority:
        facts.priority = _bound(priority)
    user, previous = bytes(values.get("user", _ABSENT)), bytes(values.get("previous_response_id", _ABSENT))
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
    """The value of the form part named "model"; None when there is none. Raises UnreadableError."""
    place = _find_form_model(content_type, body)
    return None if place is None else _read_name(body[place[0] : place[1]])


def _find_form_model(content_type: bytes, body: bytes) -> tuple[int, int] | None:
    """Where the value of the part named "model" begins and ends. Raises UnreadableError."""
    form = _FORM_TYPE.fullmatch(content_type)
    if form is None:
        raise UnreadableError("the content-type is not multipart/form-data with one boundary")
    delimiter = b"\r\n--" + form.group(2)
    place: tuple[int, int] | None = None
    if not body.startswith(delimiter[2:]):
        raise UnreadableError("the form does not begin with its boundary")
    start = len(delimiter) - 2
    for _ in range(_MAX_PARTS):
        if body[start : start + 2] == b"--":
            return place
        head_end = body.find(b"\r\n\r\n", start + 2, start + _PART_HEAD_BYTES)  # mypyc: no slice may end too early
        if head_end < 0 or body[start : start + 2] != b"\r\n" or body.startswith(delimiter[2:], head_end + 4):
            raise UnreadableError("a part of the form is malformed")
        at = body.find(delimiter, head_end + 4)
        if at < 0:
            raise UnreadableError("the form has no end")
        if _read_part_name(body[start + 2 : head_end]) == b"model":
            if place is not None:
                raise UnreadableError("the form has two parts named model")
            place = head_end + 4, at
        start = at + len(delimiter)
    raise UnreadableError(f"the form has more than {_MAX_PARTS} parts")


def _read_part_name(head: bytes) -> bytes:
    fields: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name in fields or name[:1] in (b" ", b"\t"):
            raise UnreadableError("a part of the form has a malformed head")
        fields[name] = value.strip(b" \t")
    disposition = _DISPOSITION.fullmatch(fields.get(b"content-disposition", b""))
    if disposition is None:
        raise UnreadableError("a part of the form has no readable name")
    part_name = disposition.group(2)
    if part_name == b"model":
        plain = _PART_TYPE.fullmatch(fields.get(b"content-type", b"text/plain"))
        if plain is None or b"content-transfer-encoding" in fields or b"filename" in disposition.group().lower():
            raise UnreadableError("the form's model is no plain text")
    return part_name


def _read_name(value: bytes) -> str:
    try:
        if len(value) <= _NAME_BYTES:
            return value.decode()
    except UnicodeDecodeError:
        pass
    raise UnreadableError("the form's model is no name")


def _first_bytes(values: dict[str, msgspec.Raw]) -> bytes:
    """The bytes that later requests of a conversation begin with too: its instructions and first question."""
    messages = bytes(values.get("messages", _ABSENT))
    if messages[:1] != b"[":
        return bytes(values.get("prompt") or values.get("input", _ABSENT))[:PREFIX_BYTES]
    taken: list[bytes] = []
    for element in _split_messages(messages[: 4 * PREFIX_BYTES]):
        taken.append(element[:PREFIX_BYTES])
        if len(taken) == 4 or not any(role in element[:40] for role in _FIRST_TURN):
            break
    return b"".join(taken)[:PREFIX_BYTES]


def _split_messages(text: bytes) -> Iterator[bytes]:
    """The objects of a JSON array, one by one: decoding 30 MiB of tiny ones takes a second. `text` may be cut off."""
    depth = begin = at = 0
    while (mark := _BRACKET.match(text, at)) is not None:
        at = mark.end()
        if mark.group(1) in (b"]", b"}"):
            depth -= 1
            if depth == 1:
                yield text[begin:at]
                begin = 0
            elif depth == 0:
                return
        else:
            depth += 1
            if depth == 2:
                begin = at - 1
    if begin:
        yield text[begin:]
