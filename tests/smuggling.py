"""Requests that the literature on request smuggling cuts in two, and neighbours of them that are only malformed.

Sources: J. Kettle, "HTTP Desync Attacks" (https://portswigger.net/research/http-desync-attacks-request-smuggling-reborn);
A. Klein, "HTTP Request Smuggling in 2020"; narfindustries/http-garden; defparam/smuggler's list of mutated
Transfer-Encoding headers; RFC 9112 section 11.2. None may get a byte of its own to an engine: each is refused, with the
connection closed, before a request in it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.wire.http1 import Reader


def read_all(reader: Reader[Any], pieces: Iterable[bytes], events: list[Any] | None = None) -> list[Any]:
    """Heads, whole bodies and ENDs; neighbouring body pieces are joined. `events`: where those before an error stay."""
    events = [] if events is None else events
    for piece in pieces:
        reader.feed(piece)
        while (event := reader.next_event()) is not None:
            if isinstance(event, bytes) and events and isinstance(events[-1], bytes):
                events[-1] += event
            else:
                events.append(event)
    return events


_POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_SMUGGLED = b"GET /v1/models?smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
_BODY = b'{"model":"demo"}'
_CHUNKED_BODY = b"10\r\n" + _BODY + b"\r\n0\r\n\r\n"


def _te(line: bytes) -> bytes:
    """CL beside a Transfer-Encoding that some read as chunked and some do not."""
    return _POST + b"Content-Length: 4\r\n" + line + b"\r\n\r\n" + _CHUNKED_BODY + _SMUGGLED


def _te_alone(line: bytes) -> bytes:
    return _POST + line + b"\r\n\r\n" + _CHUNKED_BODY + _SMUGGLED


def _length(line: bytes) -> bytes:
    return _POST + line + b"\r\n\r\n" + _BODY + _SMUGGLED


def _chunks(data: bytes) -> bytes:
    return _POST + b"Transfer-Encoding: chunked\r\n\r\n" + data + _SMUGGLED


def _head(line: bytes) -> bytes:
    return _POST + line + b"\r\nContent-Length: 16\r\n\r\n" + _BODY


def _first(line: bytes) -> bytes:
    return line + b"\r\nHost: localhost\r\nContent-Length: 16\r\n\r\n" + _BODY


# Beside a Content-Length (CL.TE, TE.CL, TE.TE), and alone: what one parser takes for chunked and another ignores.
_TE_VALUES = (
    *(b" identity", b" gzip", b" chunked, identity", b" identity, chunked", b" chunked, chunked", b"", b" ,chunked"),
    *(b" chunked,", b" chunked;q=1", b" xchunked", b" chunkedx", b' "chunked"', b" 'chunked'", b"\r\n chunked"),
    *(b"\r\n\tchunked", b"\x0bchunked", b"\x0cchunked", b" \x00chunked", b" chunked\x00", b"\xa0chunked"),
    *(b" chun\xffked", b" chunked\x7f", b" x\x08chunked", b"\n chunked", b" chunked\r", b": chunked"),
)
_OBFUSCATED_TE = (
    *(b"Transfer-Encoding:" + value for value in _TE_VALUES),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked", b" Transfer-Encoding: chunked"),
    *(b"\tTransfer-Encoding: chunked", b"Transfer-Encoding\x00: chunked", b"Transfer\xffEncoding: chunked"),
    *(b"X: y\nTransfer-Encoding: chunked", b"X: y\rTransfer-Encoding: chunked", b"Transfer-Encoding chunked"),
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: chunked\r\ntransfer-encoding: cow",
    b"Transfer-Encoding: cow\r\nTransfer-Encoding: chunked",
)
# These a strict parser may read as chunked; only the Content-Length beside them is wrong.
_PLAIN_TE = (
    *(b"Transfer-Encoding: chunked", b"TRANSFER-ENCODING: CHUNKED", b"Transfer-Encoding:chunked"),
    b"Transfer-Encoding:\t chunked \t",
)
# The last of the second row are digits in Arabic, and a superscript.
_LENGTH_VALUES = (
    *(b" 16, 16", b" 0, 16", b" +16", b" -16", b" -0", b" 1_6", b" 0x10", b" 0o20", b" 16e0", b" 16.0", b""),
    *(b" sixteen", b" 1 6", b' "16"', b" 16;", b" 16\x00", b" \x0b16", b" \xd9\xa1\xd9\xa6", b" \xb2"),
    b" 18446744073709551632",
    b" " + b"9" * 100,
    b"\r\n 16",
)
_LENGTHS = (
    *(b"Content-Length:" + value for value in _LENGTH_VALUES),
    *(b"Content-Length: 16\r\nContent-Length: 16", b"Content-Length: 16\r\nContent-Length: 0"),
    *(b"Content-Length: 0\r\nContent-Length: 16", b"Content-Length: 16\r\ncontent-length: 15"),
    *(b"Content-Length : 16", b"X: y\nContent-Length: 16", b" Content-Length: 16"),
)
# What stands before a chunk of 16 bytes.
_CHUNK_SIZES = (
    *(b"0x10\r\n", b"+10\r\n", b"-10\r\n", b"1_0\r\n", b"\r\n", b"ten\r\n", b" 10\r\n", b"10 \r\n", b"10\t\r\n"),
    *(b"00000000000000010\r\n", b"10000000000000010\r\n", b"100000010\r\n", b"10\n", b"10\r", b"f\r\n"),
    *(b"10;a\nb\r\n", b"10;a\rb\r\n", b"10;\x00\r\n", b"10\x00\r\n"),
    b"10;" + b"a" * 1000 + b"\r\n",
)
# And what follows a good one.
_CHUNK_ENDS = (
    *(b"\n0\r\n\r\n", b"0\r\n\r\n", b"XX0\r\n\r\n", b"\r\n0\n\r\n", b"\r\n0\r\n\n", b"\r\n0\r\nX: y\r\n z\r\n\r\n"),
    *(b"\r\n0\r\nsmuggled\r\n\r\n", b"\r\n0\r\nX: y\nZ: z\r\n\r\n", b"\r\n0\r\nX: \x00\r\n\r\n"),
    b"\r\n0\r\nGET /v1/models HTTP/1.1\r\n\r\n",
)
_CHUNK_DATA = (
    *(size + _BODY + b"\r\n0\r\n\r\n" for size in _CHUNK_SIZES),
    *(b"10\r\n" + _BODY + end for end in _CHUNK_ENDS),
    b"-0\r\n\r\n",
)
_HEADS = (
    *(b"Host: b", b"HOST: a", b"X : y", b": y", b"X", b"X: y\r\n z", b"X: y\r\n\tz", b"X: \x00", b"X\x00: y"),
    *(b"X: y\nZ: z", b"X: y\rZ: z", b"X: y\r", b"X: \x1b[2J", b"X(y): z", b"X/y: z", b"X@y: z", b"X{y}: z"),
    *(b'X"y: z', b"X\xe9: z", b"Expect: 200-maybe", b"Expect: 100-continue, more"),
)
_AFTER_POST = (
    *(b"", b" HTTP/2.0", b" HTTP/1.2", b" HTTP/11.1", b" HTTP/1.10", b" HTTP/1", b" http/1.1", b" ", b"  HTTP/1.1"),
    *(b" HTTP/1.1 ", b"\x0bHTTP/1.1", b" x HTTP/1.1", b"\x00 HTTP/1.1", b"\xff HTTP/1.1"),
)
# The one with bytes of control begins a TLS connection.
_FIRST_LINES = (
    *(b"POST /v1/chat/completions" + end for end in _AFTER_POST),
    *(b"POST http://a/v1/chat/completions HTTP/1.1", b"POST http://evil/v1/chat/completions HTTP/1.1"),
    *(b"POST a/v1/chat/completions HTTP/1.1", b"CONNECT a:443 HTTP/1.1", b"CONNECT /v1/chat/completions HTTP/1.1"),
    *(b"POST * HTTP/1.1", b"POST  /v1/chat/completions HTTP/1.1", b" POST /v1/chat/completions HTTP/1.1"),
    *(b"POST\t/v1/chat/completions HTTP/1.1", b"POST /v1/chat\nX: y HTTP/1.1", b"POST /v1/chat\rX: y HTTP/1.1"),
    *(b"PO:ST /v1/chat/completions HTTP/1.1", b"/v1/chat/completions HTTP/1.1"),
    *(b"\r\nPOST /v1/chat/completions HTTP/1.1", b"\nPOST /v1/chat/completions HTTP/1.1"),
    *(b"\x00POST /v1/chat/completions HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2",
)
_WHOLE = (
    b"POST /v1/chat/completions HTTP/1.1\nHost: a\nContent-Length: 16\n\n" + _BODY,
    _POST + b"Content-Length: 16\r\n\n" + _BODY + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNKED_BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 16\r\n\r\n" + _BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a/b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a@b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    _POST + b"X: y\r\n" * 200 + b"Content-Length: 16\r\n\r\n" + _BODY,
    _POST + b"X: " + b"y" * 40_000 + b"\r\nContent-Length: 16\r\n\r\n" + _BODY,
)

CORPUS: tuple[bytes, ...] = (
    *(_te(line) for line in (*_PLAIN_TE, *_OBFUSCATED_TE)),
    *(_te_alone(line) for line in _OBFUSCATED_TE),
    *(_te_alone(line + b"\r\nContent-Length: 4") for line in _PLAIN_TE),
    *(_length(line) for line in _LENGTHS),
    *(_chunks(data) for data in _CHUNK_DATA),
    *(_head(line) for line in _HEADS),
    *(_first(line) for line in _FIRST_LINES),
    *_WHOLE,
)
