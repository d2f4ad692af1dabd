"""HTTP/1.1 without I/O: bytes in, heads and body bytes out; and heads and chunks back to bytes.

The rules are RFC 9112's, https://www.rfc-editor.org/rfc/rfc9112. Where the RFC lets a server be lenient (repeated
Content-Length, Content-Length beside Transfer-Encoding, bare CR or LF, folded lines, blank lines first), this one
refuses and the caller closes: two parsers that are lenient in different ways are how requests are smuggled. Only
origin-form targets are taken. A `Reader` gives the same events however the bytes are cut.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Generic, Literal, Protocol, TypeVar

import msgspec

from penstock.units import KIB

MAX_HEAD_BYTES = 32 * KIB
MAX_HEADERS = 100
MAX_CHUNK_LINE_BYTES = 256

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

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_FIELD = re.compile(rb"(%s):(%s)" % (_TOKEN, _TEXT))
_REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/(\d\.\d)" % _TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/(1\.[01]) ([1-5]\d\d)(?: %s)?" % _TEXT)
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;%s)?" % _TEXT)
_LENGTH = re.compile(rb"\d{1,18}")
_HOST = re.compile(rb"[A-Za-z0-9.\-_~%!$&'()*+,;=:\[\]]*")
# A line end that is not CR LF. A CR that ends the bytes so far may still become one.
_BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")


class ProtocolError(Exception):
    """The peer broke HTTP: `status` is the answer it gets, after which the connection must be closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class End(enum.Enum):
    """The event after the last body byte of a message."""

    END = enum.auto()


END: Final = End.END


class RequestHead(msgspec.Struct, frozen=True):
    """Header names are in lower case. `length` is 0 without a body and None when `is_chunked`."""

    method: bytes
    target: bytes
    headers: Headers
    is_http_10: bool
    keeps_alive: bool
    expects_continue: bool
    length: int | None
    is_chunked: bool

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def get(self, name: bytes) -> bytes | None:
        return find_header(self.headers, name)


class ResponseHead(msgspec.Struct, frozen=True):
    """Header names are in lower case. `length` None without `is_chunked`: the body ends with the connection."""

    status: int
    headers: Headers
    keeps_alive: bool
    length: int | None
    is_chunked: bool

    def get(self, name: bytes) -> bytes | None:
        return find_header(self.headers, name)


def find_header(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name` (lower case)."""
    for key, value in headers:
        if key == name:
            return value
    return None


def parse_request(head: bytes) -> RequestHead:
    """The request head in `head`, without its closing blank line. Raises ProtocolError."""
    first, headers = _split_head(head)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise ProtocolError(400, "malformed request line")
    method, target, version = line.groups()
    if version not in (b"1.1", b"1.0"):
        raise ProtocolError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    if method == b"CONNECT" or not target.startswith(b"/"):
        raise ProtocolError(400, "the request target must be a path")
    is_http_10 = version == b"1.0"
    _check_host(headers, is_http_10)
    length, is_chunked = _find_framing(headers)
    if is_chunked and is_http_10:
        raise ProtocolError(400, "transfer-encoding in an HTTP/1.0 request")
    expect = find_header(headers, b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise ProtocolError(417, "unknown expectation")
    return RequestHead(
        method=method,
        target=target,
        headers=headers,
        is_http_10=is_http_10,
        keeps_alive=not is_http_10 and b"close" not in _connection_options(headers),
        expects_continue=expect is not None and not is_http_10,
        length=None if is_chunked else length or 0,
        is_chunked=is_chunked,
    )


def parse_response(head: bytes) -> ResponseHead:
    """The response head in `head`, without its closing blank line. Raises ProtocolError."""
    first, headers = _split_head(head)
    line = _STATUS_LINE.fullmatch(first)
    if line is None:
        raise ProtocolError(502, "malformed status line")
    status = int(line.group(2))
    length, is_chunked = _find_framing(headers)
    if status < 200 or status in (204, 304):
        length, is_chunked = 0, False
    keeps_alive = line.group(1) == b"1.1" and b"close" not in _connection_options(headers)
    ends_by_itself = is_chunked or length is not None
    return ResponseHead(status, headers, keeps_alive and ends_by_itself, length, is_chunked)


def _split_head(head: bytes) -> tuple[bytes, Headers]:
    first, *lines = head.split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise ProtocolError(431, f"more than {MAX_HEADERS} header lines")
    headers = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise ProtocolError(400, "malformed header line")
        headers.append((field.group(1).lower(), field.group(2).strip(b" \t")))
    return first, tuple(headers)


def _check_host(headers: Headers, is_http_10: bool) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and not is_http_10):
        raise ProtocolError(400, "exactly one host header is needed")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise ProtocolError(400, "malformed host header")


def _find_framing(headers: Headers) -> tuple[int | None, bool]:
    """The announced body length, if any, and whether the body is chunked."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise ProtocolError(400, "more than one content-length or transfer-encoding")
    if codings and codings[0].lower() != b"chunked":
        raise ProtocolError(501, "transfer-encoding other than chunked")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise ProtocolError(400, "malformed content-length")
    return (int(lengths[0]) if lengths else None), bool(codings)


def _connection_options(headers: Headers) -> set[bytes]:
    return {
        option.strip(b" \t").lower() for name, value in headers if name == b"connection" for option in value.split(b",")
    }


class BodyReader:
    """The body bytes of one message. `length` None without `is_chunked`: until the connection ends."""

    def __init__(self, length: int | None, is_chunked: bool) -> None:
        self._is_chunked = is_chunked
        self._n_left = length
        # Chunked only: what comes next, and how many trailer bytes there were.
        self._next: Literal["size", "data", "data end", "trailer"] = "size"
        self._n_trailer_bytes = 0
        self.is_complete = length == 0

    @property
    def ends_with_connection(self) -> bool:
        return self._n_left is None and not self._is_chunked

    def take(self, buffer: bytearray) -> bytes:
        """All body bytes at the front of `buffer`, which loses them. Raises ProtocolError."""
        if self._is_chunked:
            return self._take_chunks(buffer)
        n_bytes = len(buffer) if self._n_left is None else min(self._n_left, len(buffer))
        if self._n_left is not None:
            self._n_left -= n_bytes
            self.is_complete = self._n_left == 0
        return _cut(buffer, n_bytes)

    def _take_chunks(self, buffer: bytearray) -> bytes:
        pieces: list[bytes] = []
        while not self.is_complete and buffer:
            if self._next == "data":
                assert self._n_left is not None
                piece = _cut(buffer, min(self._n_left, len(buffer)))
                pieces.append(piece)
                self._n_left -= len(piece)
                if self._n_left == 0:
                    self._next = "data end"
                continue
            line = _cut_line(buffer, 0 if self._next == "data end" else MAX_CHUNK_LINE_BYTES)
            if line is None:
                break
            self._on_line(line)
        return b"".join(pieces)

    def _on_line(self, line: bytes) -> None:
        if self._next == "size":
            match = _CHUNK_LINE.fullmatch(line)
            if match is None:
                raise ProtocolError(400, "malformed chunk size")
            self._n_left = int(match.group(1), 16)
            self._next = "data" if self._n_left else "trailer"
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


def _cut(buffer: bytearray, n_bytes: int) -> bytes:
    piece = bytes(buffer[:n_bytes])
    del buffer[:n_bytes]
    return piece


def _cut_line(buffer: bytearray, limit: int) -> bytes | None:
    """The line of at most `limit` bytes at the front, without its CR LF; None while it is incomplete."""
    end = buffer.find(b"\r\n", 0, limit + 2)
    if end >= 0:
        line = _cut(buffer, end)
        del buffer[:2]
        return line
    if len(buffer) >= limit + 2 or _BARE_LINE_END.search(buffer):
        raise ProtocolError(400, "malformed line in a chunked body")
    return None


class Head(Protocol):
    @property
    def length(self) -> int | None: ...
    @property
    def is_chunked(self) -> bool: ...


HeadT = TypeVar("HeadT", bound=Head)


class Reader(Generic[HeadT]):
    """Messages out of one connection's bytes: for each a head, body bytes in any number of pieces, END.

    >>> reader = Reader(parse_request)
    >>> reader.feed(b"GET /health HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    >>> reader.next_event().path, reader.next_event(), reader.next_event()
    (b'/health', <End.END: 1>, None)
    """

    def __init__(self, parse_head: Callable[[bytes], HeadT]) -> None:
        self._parse_head = parse_head
        self._buffer = bytearray()
        self._n_scanned = 0
        self._body: BodyReader | None = None

    @property
    def n_buffered(self) -> int:
        """Bytes fed that no event has given back yet."""
        return len(self._buffer)

    @property
    def is_between_messages(self) -> bool:
        return self._body is None and not self._buffer

    @property
    def may_end_here(self) -> bool:
        """Whether the peer's closing would end the present message properly."""
        return self._body is not None and self._body.ends_with_connection

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_event(self) -> HeadT | bytes | Literal[End.END] | None:
        """The next event, or None when more bytes are needed. Raises ProtocolError; then the reader is spent."""
        if self._body is None:
            return self._next_head()
        data = self._body.take(self._buffer)
        if data:
            return data
        if self._body.is_complete:
            self._body = None
            return END
        return None

    def _next_head(self) -> HeadT | None:
        end = self._buffer.find(b"\r\n\r\n", max(0, self._n_scanned - 3), MAX_HEAD_BYTES + 4)
        if end < 0:
            if _BARE_LINE_END.search(self._buffer, max(0, self._n_scanned - 1)):
                raise ProtocolError(400, "line ends other than CR LF")
            if len(self._buffer) >= MAX_HEAD_BYTES + 4:
                raise ProtocolError(431, f"head of more than {MAX_HEAD_BYTES} bytes")
            self._n_scanned = len(self._buffer)
            return None
        head = self._parse_head(_cut(self._buffer, end))
        del self._buffer[:4]
        self._n_scanned = 0
        self._body = BodyReader(head.length, head.is_chunked)
        return head


def write_response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head's bytes. Headers must come from a parsed head, or be known to hold no line end."""
    return STATUS_LINE[status] + b"".join([b"%s: %s\r\n" % header for header in headers]) + b"\r\n"


def write_request_head(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """As write_response_head, for a request."""
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (
        method,
        target,
        b"".join([b"%s: %s\r\n" % header for header in headers]),
    )


def write_chunk(data: bytes) -> bytes:
    """`data` as one chunk. Must not be empty: an empty chunk ends a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def keep_end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers a proxy passes on: neither hop-by-hop nor named by Connection."""
    options = _connection_options(headers)
    return [header for header in headers if header[0] not in HOP_BY_HOP and header[0] not in options]
