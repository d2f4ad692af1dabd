"""The fake engine's HTTP/1.1: a buffer in, a request out; status and body in, bytes out. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

HEAD_BYTES_MAX = 64 * 2**10
BODY_BYTES_MAX = 64 * 2**20
EVENT_STREAM = "text/event-stream; charset=utf-8"


class Request(NamedTuple):
    """One request. `n_bytes` of the buffer were its; header names are lower case; `path` has no query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    is_http10: bool
    n_bytes: int

    @property
    def keeps_alive(self) -> bool:
        return not self.is_http10 and self.headers.get("connection", "").lower() != "close"


class BadRequest(Exception):
    """Bytes that are not a request we take; the connection is closed."""


def parse(buffer: bytes | bytearray) -> Request | None:
    """The first request in `buffer`, or None until it is whole. Raises BadRequest."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > HEAD_BYTES_MAX:
            raise BadRequest("the header is too long")
        return None
    lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("not an HTTP/1 request line")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    found = _body(buffer, end + 4, headers)
    if found is None:
        return None
    body, n_bytes = found
    return Request(words[0], words[1].partition("?")[0], headers, body, words[2] == "HTTP/1.0", n_bytes)


def waits_for_continue(buffer: bytes | bytearray) -> bool:
    """True when a whole header asks for "100 Continue" before its body comes."""
    end = buffer.find(b"\r\n\r\n")
    return end >= 0 and b"\r\nexpect: 100-continue" in bytes(buffer[:end]).lower()


def response(
    status: int, body: bytes, content_type: str | None, date: str, allow: str | None = None, is_last: bool = False
) -> bytes:
    """A whole response, with uvicorn's headers."""
    lines = [*_head(status, date)]
    if allow is not None:
        lines.append(f"allow: {allow}")
    lines.append(f"content-length: {len(body)}")
    if content_type is not None:
        lines.append(f"content-type: {content_type}")
    lines.append("vary: Origin")
    if is_last:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + body


def stream_head(date: str, is_chunked: bool) -> bytes:
    """The header of an event stream; without chunks (HTTP/1.0) the end of the connection ends it."""
    end = "transfer-encoding: chunked" if is_chunked else "connection: close"
    return "\r\n".join([*_head(200, date), f"content-type: {EVENT_STREAM}", "vary: Origin", end, "", ""]).encode()


def chunk(piece: bytes) -> bytes:
    """One chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _head(status: int, date: str) -> tuple[str, ...]:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"date: {date}", "server: uvicorn"


def _body(buffer: bytes | bytearray, start: int, headers: dict[str, str]) -> tuple[bytes, int] | None:
    """The body that starts at `start` and where it ends, or None until it is whole."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunked_body(buffer, start)
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > BODY_BYTES_MAX:
        raise BadRequest("the content-length is no number, or too large")
    end = start + int(length)
    return (bytes(buffer[start:end]), end) if len(buffer) >= end else None


def _chunked_body(buffer: bytes | bytearray, start: int) -> tuple[bytes, int] | None:
    body = bytearray()
    while True:
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            return None
        try:
            size = int(bytes(buffer[start:line_end]).partition(b";")[0], 16)
        except ValueError:
            raise BadRequest("a chunk has no size") from None
        start = line_end + 2
        if len(body) + size > BODY_BYTES_MAX:
            raise BadRequest("the body is too large")
        if len(buffer) < start + size + 2:
            return None
        body += buffer[start : start + size]
        start += size + 2
        if size == 0:
            return bytes(body), start
