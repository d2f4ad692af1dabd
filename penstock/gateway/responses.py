"""Answers the gateway gives itself; errors have OpenAI's shape plus "source": "gateway". Pure."""

from __future__ import annotations

import functools
from email.utils import formatdate

import msgspec

from penstock.wire.http1 import Headers


class Answer(msgspec.Struct, frozen=True):
    """A whole response. The server adds framing, x-request-id and connection headers."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: Headers = ()


@functools.lru_cache(maxsize=2)
def http_date(second: int) -> bytes:
    """ "Sun, 06 Nov 1994 08:49:37 GMT" of a Unix time."""
    return formatdate(second, usegmt=True).encode()


def json_answer(value: object) -> Answer:
    return Answer(200, msgspec.json.encode(value))


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """The JSON of an error: {"error": {"message", "type", "param", "code", "source"}}."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    facts = {"message": message, "type": kind, "param": param, "code": code, "source": "gateway"}
    return msgspec.json.encode({"error": facts})


def error_answer(status: int, message: str, code: str, param: str | None = None, headers: Headers = ()) -> Answer:
    return Answer(status, error_body(status, message, code, param), headers=headers)


def own_headers(own_s: float, replica: bytes = b"none") -> Headers:
    """Which replica answered, and the milliseconds that the request spent in the gateway."""
    return ((b"x-penstock-replica", replica), (b"server-timing", b"gateway;dur=%.3f" % (own_s * 1000)))
