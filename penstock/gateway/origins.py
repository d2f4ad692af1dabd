"""Which web pages may read answers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol). Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from penstock.wire.http1 import Headers

_LOOPBACK_HOSTS: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_LIMITS: Final = b", ".join(
    b"x-ratelimit-%s-%s" % (what, kind)
    for kind in (b"requests", b"tokens")
    for what in (b"limit", b"remaining", b"reset")
)
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"x-request-id, x-penstock-replica, server-timing, retry-after, " + _LIMITS,
)


def origin_headers(origin: bytes | None, needs_key: bool, allowed: frozenset[bytes] = frozenset()) -> Headers:
    """The headers that let a web page of `origin` read an answer, if it may.

    `allowed` names origins, b"*" for all. With keys and no names any page may: it has to bring a key. Without keys also
    pages of this machine may, and no others: any page that the user visits could reach the engines behind the user's
    back.
    """
    if origin is None:
        return ()
    if b"*" in allowed or (needs_key and not allowed):
        return ((b"access-control-allow-origin", b"*"), _EXPOSED)
    if origin in allowed or (not needs_key and _is_of_this_machine(origin)):
        return ((b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED)
    return ()


def _is_of_this_machine(origin: bytes) -> bool:
    try:
        return urlsplit(origin.decode("latin-1")).hostname in _LOOPBACK_HOSTS
    except ValueError:
        return False


def preflight_headers(requested: bytes | None) -> Headers:
    """For a preflight, next to its origin's; `requested` is its Access-Control-Request-Headers."""
    return (
        (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
        (b"access-control-allow-headers", requested or b"authorization, content-type, x-api-key"),
        (b"access-control-max-age", b"600"),
    )
