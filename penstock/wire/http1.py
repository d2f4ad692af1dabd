"""HTTP/1.1 without I/O: bytes in, heads and body bytes out; and heads and chunks back to bytes.

The rules are RFC 9112's, https://www.rfc-editor.org/rfc/rfc9112. Where the RFC lets a server be lenient (repeated
Content-Length, Content-Length next to Transfer-Encoding, bare CR or LF, folded lines, blank lines first), this one
refuses and the caller closes: two parsers that are lenient in different ways are how requests are smuggled. Only
origin-form targets are taken. A `Reader` gives the same events however the bytes are cut.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Generic, Literal, TypeVar, cast

from penstock.text import KIB

MAX_HEAD_BYTES: Final = 32 * KIB
MAX_HEADERS: Final = 100
MAX_CHUNK_LINE_BYTES: Final = 256

Headers = tuple[tuple[bytes, bytes], ...]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
STATUS_LINE: Final = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode() if status in set(HTTPStatus) else b"")
    for status in range(100, 600)
}
# RFC 9110 section 7.6.1, plus Proxy-Connection, which old clients send.
HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te")
    + (b"trailer", b"transfer-encoding", b"upgrade")
)

_PLAIN_CONNECTION: Final = (b"keep-alive", b"close", b"Keep-Alive")
# Said by a gateway about its own clients: neither engines nor clients may say it for us.
_OURS: Final = (b"access-control-", b"x-forwarded-", b"x-penstock-")

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_FIELD: Final = re.compile(rb"(%s):(%s)" % (_TOKEN, _TEXT))
_REQUEST_LINE: Final = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/(\d\.\d)" % _TOKEN)
_STATUS_LINE: Final = re.compile(rb"HTTP/(1\.[01]) ([1-5]\d\d)(?: %s)?" % _TEXT)
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;%s)?" % _TEXT)
# The size lines of the chunks that engines send, one or a few tokens each; others go the long way.
CHUNK_SIZES: Final = {b"%x" % size: size for size in range(1, 4096)}
_SPECIAL: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"))
SECRET: Final = frozenset(
    (b"authorization", b"cookie", b"proxy-authorization", b"set-cookie", b"x-api-key", b"api-key")
)
_MAX_KNOWN: Final = 4096
_MAX_KNOWN_BYTES: Final = 256
_LENGTH: Final = re.compile(rb"\d{1,18}")
MAX_LENGTH_DIGITS: Final = 18
# As engines and most clients write it, and as HTTP/1.1 libraries of browsers do.
_LENGTH_LINE: Final = b"\r\ncontent-length: "
_LENGTH_LINE_TOO: Final = b"\r\nContent-Length: "
_MAX_KNOWN_HEAD_BYTES: Final = 2048
_HOST: Final = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+,;=:\[\]]*")
# A line end that is not CR LF. A CR that ends the bytes so far may still become one.
_BARE_LINE_END: Final = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")


class ProtocolError(Exception):
    """The peer broke HTTP: `status` is the answer it gets, after which the connection must be closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class End(enum.Enum):
    END = enum.auto()


END: Final = End.END


class Head:
    """What both kinds of message begin with. Header names are in lower case.

    Plain classes, because compiled code reads their fields in 1 ns and those of a msgspec.Struct in 40. What is made of
    the headers is kept: the next head is often the same but for its length.
    """

    __slots__ = ("_kept", "_picked", "headers", "is_chunked", "keeps_alive", "length")

    def __init__(self, headers: Headers, keeps_alive: bool, length: int | None, is_chunked: bool) -> None:
        self.headers = headers
        self.keeps_alive = keeps_alive
        self.length = length
        self.is_chunked = is_chunked
        self._kept: dict[frozenset[bytes], bytes] = {}
        self._picked: dict[frozenset[bytes], dict[bytes, bytes]] = {}

    def get(self, name: bytes) -> bytes | None:
        return find_header(self.headers, name)

    def pick(self, names: frozenset[bytes]) -> dict[bytes, bytes]:
        """Those of `names` that there are, with their last values. Not to be changed. Without content-length."""
        picked = self._picked.get(names)
        if picked is None:
            picked = self._picked[names] = {name: value for name, value in self.headers if name in names}
        return picked

    def keep(self, dropped: frozenset[bytes]) -> bytes:
        """The lines to pass on; `dropped` holds content-length and what HTTP/1.1 always drops."""
        lines = self._kept.get(dropped)
        if lines is None:
            lines = self._kept[dropped] = _write_kept(self.headers, dropped)
        return lines

    def with_length(self, length: int) -> Head:
        raise NotImplementedError


class RequestHead(Head):
    """`length` is 0 without a body and None when `is_chunked`."""

    __slots__ = ("expects_continue", "is_http_10", "method", "path", "target")

    def __init__(
        self,
        line: tuple[bytes, bytes, bool],
        headers: Headers,
        keeps_alive: bool,
        expects_continue: bool,
        length: int | None,
        is_chunked: bool,
    ) -> None:
        super().__init__(headers, keeps_alive, length, is_chunked)
        self.method, self.target, self.is_http_10 = line
        self.path = self.target.partition(b"?")[0]
        self.expects_continue = expects_continue

    def with_length(self, length: int) -> RequestHead:
        line = (self.method, self.target, self.is_http_10)
        headers = _put_length(self.headers, length)
        head = RequestHead(line, headers, self.keeps_alive, self.expects_continue, length, self.is_chunked)
        head._kept, head._picked = self._kept, self._picked
        return head


class ResponseHead(Head):
    """`length` None without `is_chunked`: the body ends with the connection."""

    __slots__ = ("status",)

    def __init__(self, status: int, headers: Headers, keeps_alive: bool, length: int | None, is_chunked: bool) -> None:
        super().__init__(headers, keeps_alive, length, is_chunked)
        self.status = status

    def with_length(self, length: int) -> ResponseHead:
        headers = _put_length(self.headers, length)
        head = ResponseHead(self.status, headers, self.keeps_alive, length, self.is_chunked)
        head._kept, head._picked = self._kept, self._picked
        return head


def _put_length(headers: Headers, length: int) -> Headers:
    return tuple([(name, b"%d" % length if name == b"content-length" else value) for name, value in headers])


def find_header(headers: Headers, name: bytes) -> bytes | None:
    for key, value in headers:
        if key == name:
            return value
    return None


# What known lines parse to: clients and engines send the same ones again and again. Bounded in number and in bytes,
# emptied when full, and without credentials. A head of the openai package: 11.5 us, now 5.2.
_known_headers: Final[dict[bytes, tuple[bytes, bytes]]] = {}
_known_request_lines: Final[dict[bytes, tuple[bytes, bytes, bool]]] = {}


def _read_header(line: bytes) -> tuple[bytes, bytes]:
    field = _FIELD.fullmatch(line)
    if field is None:
        raise ProtocolError(400, "malformed header line")
    header = (field.group(1).lower(), field.group(2).strip(b" \t"))
    if len(line) <= _MAX_KNOWN_BYTES and header[0] not in SECRET:
        if len(_known_headers) >= _MAX_KNOWN:
            _known_headers.clear()
        _known_headers[line] = header
    return header


def _read_request_line(line: bytes) -> tuple[bytes, bytes, bool]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise ProtocolError(400, "malformed request line")
    method, target, version = match.groups()
    if version not in (b"1.1", b"1.0"):
        raise ProtocolError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if method == b"CONNECT" or not target.startswith(b"/"):
        raise ProtocolError(400, "the request target must be a path")
    parts = (method, target, version == b"1.0")
    if len(line) <= _MAX_KNOWN_BYTES:
        if len(_known_request_lines) >= _MAX_KNOWN:
            _known_request_lines.clear()
        _known_request_lines[line] = parts
    return parts


def parse_request(head: bytes, max_headers: int = MAX_HEADERS) -> RequestHead:
    """The request head in `head`, without its closing blank line. Raises ProtocolError."""
    lines = head.split(b"\r\n")
    headers, special = _read_headers(lines, max_headers)
    line = _known_request_lines.get(lines[0]) or _read_request_line(lines[0])
    is_http_10 = line[2]
    hosts = special.get(b"host", ())
    if len(hosts) > 1 or (not hosts and not is_http_10):
        raise ProtocolError(400, "exactly one host header is needed")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise ProtocolError(400, "malformed host header")
    length, is_chunked = _find_framing(special)
    if is_chunked and is_http_10:
        raise ProtocolError(400, "transfer-encoding in an HTTP/1.0 request")
    expect = special.get(b"expect")
    if expect is not None and expect[0].lower() != b"100-continue":
        raise ProtocolError(417, "unknown expectation")
    keeps_alive = not is_http_10 and not _asks_to_close(special)
    expects_continue = expect is not None and not is_http_10
    return RequestHead(line, headers, keeps_alive, expects_continue, None if is_chunked else length or 0, is_chunked)


def parse_response(head: bytes) -> ResponseHead:
    lines = head.split(b"\r\n")
    headers, special = _read_headers(lines, MAX_HEADERS)
    line = _STATUS_LINE.fullmatch(lines[0])
    if line is None:
        raise ProtocolError(502, "malformed status line")
    status = int(line.group(2))
    length, is_chunked = _find_framing(special)
    if status < 200 or status in (204, 304):
        length, is_chunked = 0, False
    keeps_alive = line.group(1) == b"1.1" and not _asks_to_close(special)
    ends_by_itself = is_chunked or length is not None
    return ResponseHead(status, headers, keeps_alive and ends_by_itself, length, is_chunked)


_Special = dict[bytes, list[bytes]]


def _read_headers(lines: list[bytes], max_headers: int) -> tuple[Headers, _Special]:
    """All headers, and the values of those that say how to read the message."""
    if len(lines) - 1 > max_headers:
        is_broken = any(_BARE_LINE_END.search(line + b" ") for line in lines)
        raise ProtocolError(400 if is_broken else 431, f"more than {max_headers} header lines")
    get = _known_headers.get
    headers = tuple([get(line) or _read_header(line) for line in lines[1:]])
    special: _Special = {}
    for name, value in headers:
        if name in _SPECIAL:
            special.setdefault(name, []).append(value)
    return headers, special


def _find_framing(special: _Special) -> tuple[int | None, bool]:
    """The announced body length, if any, and whether the body is chunked."""
    lengths, codings = special.get(b"content-length", ()), special.get(b"transfer-encoding", ())
    if len(lengths) + len(codings) > 1:
        raise ProtocolError(400, "more than one content-length or transfer-encoding")
    if codings and codings[0].lower() != b"chunked":
        raise ProtocolError(501, "transfer-encoding other than chunked")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise ProtocolError(400, "malformed content-length")
    return (int(lengths[0]) if lengths else None), bool(codings)


def _asks_to_close(special: _Special) -> bool:
    values = special.get(b"connection")
    if values is None:
        return False
    return any(option.strip(b" \t").lower() == b"close" for value in values for option in value.split(b","))


class BodyReader:
    """The body bytes of one message. `length` None without `is_chunked`: until the connection ends."""

    __slots__ = ("_is_chunked", "_n_left", "_n_trailer_bytes", "_next", "is_complete")

    def __init__(self, length: int | None, is_chunked: bool) -> None:
        self._is_chunked = is_chunked
        self._n_left = length
        # Chunked only: what comes next, and how many trailer bytes there were.
        self._next: Literal["size", "data", "data end", "trailer"] = "size"
        self._n_trailer_bytes = 0
        self.is_complete = length == 0

    @property
    def is_between_chunks(self) -> bool:
        return self._is_chunked and self._next == "size" and not self.is_complete

    def take(self, data: bytes, at: int) -> tuple[bytes, int]:
        if self._is_chunked:
            return self._take_chunks(data, at)
        if self._n_left is None:
            return data[at:], len(data)
        end = min(at + self._n_left, len(data))
        self._n_left -= end - at
        self.is_complete = self._n_left == 0
        return data[at:end], end

    def _take_chunks(self, data: bytes, at: int) -> tuple[bytes, int]:
        pieces: list[bytes] = []
        n_bytes = len(data)
        while not self.is_complete and at < n_bytes:
            if self._next == "data":
                assert self._n_left is not None
                end = min(at + self._n_left, n_bytes)
                pieces.append(data[at:end])
                self._n_left -= end - at
                at = end
                if self._n_left == 0:
                    self._next = "data end"
                continue
            limit = 0 if self._next == "data end" else MAX_CHUNK_LINE_BYTES
            end = data.find(b"\r\n", at, at + limit + 2)
            if end < 0:
                rest = data[at : at + limit + 2]
                if len(rest) == limit + 2 or _BARE_LINE_END.search(rest):
                    raise ProtocolError(400, "malformed line in a chunked body")
                break
            self._on_line(data[at:end])
            at = end + 2
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), at

    def _on_line(self, line: bytes) -> None:
        if self._next == "size":
            size = CHUNK_SIZES.get(line)
            if size is None:
                match = _CHUNK_LINE.fullmatch(line)
                if match is None:
                    raise ProtocolError(400, "malformed chunk size")
                size = int(match.group(1), 16)
            self._n_left = size
            self._next = "data" if size else "trailer"
        elif self._next == "data end":
            self._next = "size"
        elif not line:
            self.is_complete = True
        else:
            self._n_trailer_bytes += len(line)
            if not _FIELD.fullmatch(line):
                raise ProtocolError(400, "malformed trailer line")
            if self._n_trailer_bytes > MAX_HEAD_BYTES:
                raise ProtocolError(431, "trailer too large")


HeadT = TypeVar("HeadT", bound=Head)


class Heads(Generic[HeadT]):
    """Parses heads, and finds those again that differ only in the digits of their content-length, as most do.

    `n_max`: how many it keeps, emptied when full. `keeps_secrets`: those with credentials too, for one connection.
    """

    __slots__ = ("_heads", "_keeps_secrets", "_n_max", "_parse")

    def __init__(self, parse: Callable[[bytes], HeadT], n_max: int = 2, *, keeps_secrets: bool = True) -> None:
        self._parse = parse
        self._n_max = n_max
        self._keeps_secrets = keeps_secrets
        self._heads: dict[bytes, HeadT] = {}

    def parse(self, text: bytes) -> HeadT:
        """The head in `text`, without its closing blank line. Raises ProtocolError."""
        at = text.find(_LENGTH_LINE)
        if at < 0:
            at = text.find(_LENGTH_LINE_TOO)
        if at < 0:
            return self._heads.get(text) or self._read(text, text)
        at += len(_LENGTH_LINE)
        end = text.find(b"\r\n", at)
        if end < 0:
            end = len(text)
        digits = text[at:end]
        key = text[:at] + text[end:]
        head = self._heads.get(key)
        if head is None or not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:
            return self._read(text, key)
        length = int(digits)
        return head if head.length == length else cast(HeadT, head.with_length(length))

    def _read(self, text: bytes, key: bytes) -> HeadT:
        head = self._parse(text)
        # Not a length that does not count (204, 304), and none that would be written in another way.
        is_plain = key is text or (head.length is not None and head.get(b"content-length") == b"%d" % head.length)
        is_short = len(key) <= _MAX_KNOWN_HEAD_BYTES
        if is_plain and is_short and (self._keeps_secrets or not head.pick(SECRET)):
            if len(self._heads) >= self._n_max:
                self._heads.clear()
            self._heads[key] = head
        return head


class Reader(Generic[HeadT]):
    """Messages out of one connection's bytes: for each a head, body bytes in any number of pieces, END.

    >>> reader = Reader(parse_request)
    >>> reader.feed(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    >>> reader.next_event().path, reader.next_event(), reader.next_event()
    (b'/health', <End.END: 1>, None)
    """

    __slots__ = ("_at", "_body", "_data", "_heads", "_max_head_bytes", "_n_scanned")

    def __init__(
        self,
        parse_head: Callable[[bytes], HeadT],
        max_head_bytes: int = MAX_HEAD_BYTES,
        heads: Heads[HeadT] | None = None,
    ) -> None:
        self._heads: Heads[HeadT] = Heads(parse_head) if heads is None else heads
        self._max_head_bytes = max_head_bytes
        # What was fed, and where in it the next event begins. Most reads bring whole messages, or whole chunks: then
        # nothing is copied but the pieces that are handed out.
        self._data = b""
        self._at = 0
        self._n_scanned = 0
        self._body: BodyReader | None = None

    @property
    def n_buffered(self) -> int:
        """Bytes fed that no event has given back yet."""
        return len(self._data) - self._at

    @property
    def is_between_messages(self) -> bool:
        return self._body is None and self._at == len(self._data)

    @property
    def is_between_chunks(self) -> bool:
        return self._body is not None and self._at == len(self._data) and self._body.is_between_chunks

    @property
    def may_end_here(self) -> bool:
        """Whether closing the connection now would end the message properly."""
        return self._body is not None and self._body._n_left is None and not self._body._is_chunked

    def feed(self, data: bytes) -> None:
        self._data = data if self._at == len(self._data) else self._data[self._at :] + data
        self._at = 0

    def take_whole(self, data: bytes) -> tuple[HeadT, bytes] | None:
        """Instead of `feed`, for a read that is one message with a length: 3.2 us, not 4.0. None takes nothing."""
        if self._body is not None or self._at < len(self._data):
            return None
        end = data.find(b"\r\n\r\n", 0, self._max_head_bytes + 4)
        if end < 0:
            return None
        head = self._heads.parse(data[:end])
        if head.length != len(data) - end - 4:
            return None
        return head, data[end + 4 :]

    def take_chunks(self, data: bytes) -> bool | None:
        """Instead of `feed`: for a read that is nothing but whole chunks of the present body, to be passed on as it is.

        True when the body's last chunk is its end, False when more will come. None for anything else (a cut chunk, an
        extension, a trailer): then nothing was taken, and `feed` must have it.
        """
        body = self._body
        if body is None or self._at < len(self._data) or not body.is_between_chunks:
            return None
        at, n_bytes = 0, len(data)
        while at < n_bytes:
            line_end = data.find(b"\r\n", at, at + 8)
            size = CHUNK_SIZES.get(data[at:line_end]) if line_end > 0 else None
            if size is None:
                if data[at:] != LAST_CHUNK:
                    return None
                self._body = None
                return True
            at = line_end + size + 4
            if data[at - 2 : at] != b"\r\n":
                return None
        return False

    def next_event(self) -> HeadT | bytes | Literal[End.END] | None:
        """The next event, or None when more bytes are needed. Raises ProtocolError; then the reader is spent."""
        body = self._body
        if body is None:
            return self._next_head()
        if not body.is_complete:
            piece, self._at = body.take(self._data, self._at)
            if piece:
                return piece
            if not body.is_complete:
                self._forget()
                return None
        self._body = None
        self._forget()
        return END

    def _forget(self) -> None:
        """A stream may be open for hours: what was taken of its last read must not stay with it."""
        if self._at == len(self._data):
            self._data, self._at = b"", 0

    def _next_head(self) -> HeadT | None:
        at = self._at
        if at == len(self._data):
            return None
        end = self._data.find(b"\r\n\r\n", at + max(0, self._n_scanned - 3), at + self._max_head_bytes + 4)
        if end < 0:
            rest = self._data[at:]
            if _BARE_LINE_END.search(rest, max(0, self._n_scanned - 1)):
                raise ProtocolError(400, "line ends other than CR LF")
            if len(rest) >= self._max_head_bytes + 4:
                raise ProtocolError(431, f"head of more than {self._max_head_bytes} bytes")
            self._n_scanned = len(rest)
            return None
        head = self._heads.parse(self._data[at:end])
        self._at = end + 4
        self._n_scanned = 0
        self._body = BodyReader(head.length, head.is_chunked)
        return head


def write_response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers must come from a parsed head, or be known to hold no line end."""
    return STATUS_LINE[status] + b"".join([b"%s: %s\r\n" % header for header in headers]) + b"\r\n"


def write_chunk(data: bytes) -> bytes:
    """`data` as one chunk. Must not be empty: an empty chunk ends a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def _write_kept(headers: Headers, dropped: frozenset[bytes]) -> bytes:
    if any(name == b"connection" and value not in _PLAIN_CONNECTION for name, value in headers):
        # It names further headers that are for the next hop only.
        named = b",".join([value for name, value in headers if name == b"connection"])
        dropped |= HOP_BY_HOP | {option.strip(b" \t").lower() for option in named.split(b",")}
    return b"".join(
        [b"%s: %s\r\n" % line for line in headers if line[0] not in dropped and not line[0].startswith(_OURS)]
    )
