"""Requests that the literature on request smuggling cuts in two, and neighbours of them that are only malformed.

Sources: J. Kettle, "HTTP Desync Attacks" (https://portswigger.net/research/http-desync-attacks-request-smuggling-reborn);
A. Klein, "HTTP Request Smuggling in 2020"; narfindustries/http-garden; defparam/smuggler's list of mutated
Transfer-Encoding headers; RFC 9112 section 11.2. None may get a byte of its own to an engine: each is refused, with the
connection closed, before a request in it is complete.
"""

from __future__ import annotations

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
_OBFUSCATED_TE = {
    "identity": b"Transfer-Encoding: identity",
    "gzip": b"Transfer-Encoding: gzip",
    "list": b"Transfer-Encoding: chunked, identity",
    "list reversed": b"Transfer-Encoding: identity, chunked",
    "chunked twice": b"Transfer-Encoding: chunked, chunked",
    "empty": b"Transfer-Encoding:",
    "comma": b"Transfer-Encoding: ,chunked",
    "trailing comma": b"Transfer-Encoding: chunked,",
    "semicolon": b"Transfer-Encoding: chunked;q=1",
    "prefixed": b"Transfer-Encoding: xchunked",
    "suffixed": b"Transfer-Encoding: chunkedx",
    "quoted": b'Transfer-Encoding: "chunked"',
    "single quotes": b"Transfer-Encoding: 'chunked'",
    "space before colon": b"Transfer-Encoding : chunked",
    "tab before colon": b"Transfer-Encoding\t: chunked",
    "leading space": b" Transfer-Encoding: chunked",
    "leading tab": b"\tTransfer-Encoding: chunked",
    "folded": b"Transfer-Encoding:\r\n chunked",
    "folded by tab": b"Transfer-Encoding:\r\n\tchunked",
    "vertical tab": b"Transfer-Encoding:\x0bchunked",
    "form feed": b"Transfer-Encoding:\x0cchunked",
    "NUL before": b"Transfer-Encoding: \x00chunked",
    "NUL after": b"Transfer-Encoding: chunked\x00",
    "NUL in name": b"Transfer-Encoding\x00: chunked",
    "no-break space": b"Transfer-Encoding:\xa0chunked",
    "high byte in value": b"Transfer-Encoding: chun\xffked",
    "high byte in name": b"Transfer\xffEncoding: chunked",
    "DEL": b"Transfer-Encoding: chunked\x7f",
    "backspace": b"Transfer-Encoding: x\x08chunked",
    "LF before": b"X: y\nTransfer-Encoding: chunked",
    "CR before": b"X: y\rTransfer-Encoding: chunked",
    "LF in value": b"Transfer-Encoding:\n chunked",
    "CR after": b"Transfer-Encoding: chunked\r",
    "colon twice": b"Transfer-Encoding:: chunked",
    "no colon": b"Transfer-Encoding chunked",
    "twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "twice, other case": b"Transfer-Encoding: chunked\r\ntransfer-encoding: cow",
    "twice, mixed": b"Transfer-Encoding: cow\r\nTransfer-Encoding: chunked",
}
# These a strict parser may read as chunked; only the Content-Length beside them is wrong.
_PLAIN_TE = {
    "CL.TE": b"Transfer-Encoding: chunked",
    "TE upper case": b"TRANSFER-ENCODING: CHUNKED",
    "TE without a space": b"Transfer-Encoding:chunked",
    "TE with tabs": b"Transfer-Encoding:\t chunked \t",
}
_LENGTHS = {
    "repeated": b"Content-Length: 16\r\nContent-Length: 16",
    "conflicting": b"Content-Length: 16\r\nContent-Length: 0",
    "conflicting, zero first": b"Content-Length: 0\r\nContent-Length: 16",
    "other case repeated": b"Content-Length: 16\r\ncontent-length: 15",
    "list": b"Content-Length: 16, 16",
    "list of two": b"Content-Length: 0, 16",
    "plus": b"Content-Length: +16",
    "minus": b"Content-Length: -16",
    "minus zero": b"Content-Length: -0",
    "underscore": b"Content-Length: 1_6",
    "hexadecimal": b"Content-Length: 0x10",
    "octal prefix": b"Content-Length: 0o20",
    "exponent": b"Content-Length: 16e0",
    "decimal point": b"Content-Length: 16.0",
    "empty": b"Content-Length:",
    "words": b"Content-Length: sixteen",
    "space inside": b"Content-Length: 1 6",
    "quoted": b'Content-Length: "16"',
    "semicolon": b"Content-Length: 16;",
    "NUL": b"Content-Length: 16\x00",
    "vertical tab": b"Content-Length: \x0b16",
    "arabic digits": "Content-Length: \u0661\u0666".encode(),
    "superscript": b"Content-Length: \xb2",
    "over 64 bits": b"Content-Length: 18446744073709551632",
    "huge": b"Content-Length: " + b"9" * 100,
    "space before colon": b"Content-Length : 16",
    "folded": b"Content-Length:\r\n 16",
    "LF before": b"X: y\nContent-Length: 16",
    "leading space": b" Content-Length: 16",
}
_CHUNK_DATA = {
    "0x size": b"0x10\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "plus size": b"+10\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "minus size": b"-10\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "minus zero": b"-0\r\n\r\n",
    "underscore in size": b"1_0\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "empty size": b"\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "size in words": b"ten\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "leading space": b" 10\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "trailing space": b"10 \r\n" + _BODY + b"\r\n0\r\n\r\n",
    "trailing tab": b"10\t\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "overlong size": b"00000000000000010\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "size over 64 bits": b"10000000000000010\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "size over 32 bits": b"100000010\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "LF after size": b"10\n" + _BODY + b"\r\n0\r\n\r\n",
    "CR after size": b"10\r" + _BODY + b"\r\n0\r\n\r\n",
    "LF after data": b"10\r\n" + _BODY + b"\n0\r\n\r\n",
    "nothing after data": b"10\r\n" + _BODY + b"0\r\n\r\n",
    "two bytes after data": b"10\r\n" + _BODY + b"XX0\r\n\r\n",
    "longer than said": b"f\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "LF in extension": b"10;a\nb\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "CR in extension": b"10;a\rb\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "NUL in extension": b"10;\x00\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "endless extension": b"10;" + b"a" * 1000 + b"\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "NUL after size": b"10\x00\r\n" + _BODY + b"\r\n0\r\n\r\n",
    "LF ends the last chunk": b"10\r\n" + _BODY + b"\r\n0\n\r\n",
    "LF ends the body": b"10\r\n" + _BODY + b"\r\n0\r\n\n",
    "folded trailer": b"10\r\n" + _BODY + b"\r\n0\r\nX: y\r\n z\r\n\r\n",
    "trailer without colon": b"10\r\n" + _BODY + b"\r\n0\r\nsmuggled\r\n\r\n",
    "trailer with LF": b"10\r\n" + _BODY + b"\r\n0\r\nX: y\nZ: z\r\n\r\n",
    "trailer with NUL": b"10\r\n" + _BODY + b"\r\n0\r\nX: \x00\r\n\r\n",
    "request as trailer": b"10\r\n" + _BODY + b"\r\n0\r\nGET /v1/models HTTP/1.1\r\n\r\n",
}
_HEADS = {
    "host twice": b"Host: b",
    "host twice, other case": b"HOST: a",
    "space before colon": b"X : y",
    "no name": b": y",
    "no colon": b"X",
    "folded": b"X: y\r\n z",
    "folded by tab": b"X: y\r\n\tz",
    "NUL": b"X: \x00",
    "NUL in name": b"X\x00: y",
    "LF": b"X: y\nZ: z",
    "CR": b"X: y\rZ: z",
    "two CR": b"X: y\r",
    "escape": b"X: \x1b[2J",
    "parenthesis in name": b"X(y): z",
    "slash in name": b"X/y: z",
    "at in name": b"X@y: z",
    "braces in name": b"X{y}: z",
    "quote in name": b'X"y: z',
    "high byte in name": b"X\xe9: z",
    "unknown expectation": b"Expect: 200-maybe",
    "100-continue and more": b"Expect: 100-continue, more",
}
_FIRST_LINES = {
    "absolute URI": b"POST http://a/v1/chat/completions HTTP/1.1",
    "absolute URI of another host": b"POST http://evil/v1/chat/completions HTTP/1.1",
    "network path": b"POST a/v1/chat/completions HTTP/1.1",
    "CONNECT": b"CONNECT a:443 HTTP/1.1",
    "CONNECT a path": b"CONNECT /v1/chat/completions HTTP/1.1",
    "asterisk": b"POST * HTTP/1.1",
    "HTTP/0.9": b"POST /v1/chat/completions",
    "HTTP/2": b"POST /v1/chat/completions HTTP/2.0",
    "HTTP/1.2": b"POST /v1/chat/completions HTTP/1.2",
    "HTTP/11.1": b"POST /v1/chat/completions HTTP/11.1",
    "HTTP/1.10": b"POST /v1/chat/completions HTTP/1.10",
    "HTTP/1": b"POST /v1/chat/completions HTTP/1",
    "lower case": b"POST /v1/chat/completions http/1.1",
    "no version": b"POST /v1/chat/completions ",
    "two spaces": b"POST  /v1/chat/completions HTTP/1.1",
    "two spaces later": b"POST /v1/chat/completions  HTTP/1.1",
    "space at the end": b"POST /v1/chat/completions HTTP/1.1 ",
    "space at the start": b" POST /v1/chat/completions HTTP/1.1",
    "tab": b"POST\t/v1/chat/completions HTTP/1.1",
    "vertical tab": b"POST /v1/chat/completions\x0bHTTP/1.1",
    "space in target": b"POST /v1/chat/completions x HTTP/1.1",
    "NUL in target": b"POST /v1/chat/completions\x00 HTTP/1.1",
    "high byte in target": b"POST /v1/chat/completions\xff HTTP/1.1",
    "LF in target": b"POST /v1/chat\nX: y HTTP/1.1",
    "CR in target": b"POST /v1/chat\rX: y HTTP/1.1",
    "colon in method": b"PO:ST /v1/chat/completions HTTP/1.1",
    "no method": b"/v1/chat/completions HTTP/1.1",
    "blank line first": b"\r\nPOST /v1/chat/completions HTTP/1.1",
    "LF first": b"\nPOST /v1/chat/completions HTTP/1.1",
    "NUL first": b"\x00POST /v1/chat/completions HTTP/1.1",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "PROXY protocol": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2",
}
_WHOLE = {
    "LF only": b"POST /v1/chat/completions HTTP/1.1\nHost: a\nContent-Length: 16\n\n" + _BODY,
    "LF ends the head": _POST + b"Content-Length: 16\r\n\n" + _BODY + b"\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "TE in HTTP/1.0": b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + _CHUNKED_BODY,
    "no host": b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 16\r\n\r\n" + _BODY,
    "host with a path": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a/b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    "host with a space": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    "host with credentials": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a@b\r\nContent-Length: 16\r\n\r\n" + _BODY,
    "many headers": _POST + b"X: y\r\n" * 200 + b"Content-Length: 16\r\n\r\n" + _BODY,
    "long head": _POST + b"X: " + b"y" * 40_000 + b"\r\nContent-Length: 16\r\n\r\n" + _BODY,
}

CORPUS: dict[str, bytes] = {
    **{f"CL beside TE: {name}": _te(line) for name, line in (_PLAIN_TE | _OBFUSCATED_TE).items()},
    **{f"TE: {name}": _te_alone(line) for name, line in _OBFUSCATED_TE.items()},
    **{f"TE first, then CL: {name}": _te_alone(line + b"\r\nContent-Length: 4") for name, line in _PLAIN_TE.items()},
    **{f"CL: {name}": _length(line) for name, line in _LENGTHS.items()},
    **{f"chunks: {name}": _chunks(data) for name, data in _CHUNK_DATA.items()},
    **{f"head: {name}": _head(line) for name, line in _HEADS.items()},
    **{f"first line: {name}": _first(line) for name, line in _FIRST_LINES.items()},
    **_WHOLE,
}
