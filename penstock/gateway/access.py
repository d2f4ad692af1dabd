"""Who may ask: API keys by their hash, the admin token, and web pages by their origin. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from penstock.gateway.http1 import Headers

_LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, x-penstock-replica, server-timing, retry-after")


def bearer(authorization: bytes | None) -> bytes | None:
    """The credential in an Authorization header's value, when it is a bearer one."""
    scheme, _, credential = (authorization or b"").partition(b" ")
    return credential.strip(b" ") if scheme.lower() == b"bearer" and credential else None


def has_key(authorization: bytes | None, key_hashes: Sequence[str]) -> bool:
    """Whether the header carries a key with one of these SHA-256 hashes (lower-case hex).

    Every hash is compared, each in constant time, so that the time taken tells nothing about which one matched.
    """
    key = bearer(authorization)
    if key is None:
        return False
    digest = hashlib.sha256(key).hexdigest()
    return sum(hmac.compare_digest(digest, key_hash) for key_hash in key_hashes) > 0


def has_token(authorization: bytes | None, token: str) -> bool:
    """Whether the header carries the admin token."""
    return hmac.compare_digest(bearer(authorization) or b"", token.encode())


def origin_headers(origin: bytes | None, needs_key: bool) -> Headers:
    """What lets a web page of `origin` read an answer.

    With keys any page may: it has to bring one. Without, only pages of this machine: else any page that the user
    visits could talk to the engine behind the user's back.
    """
    if origin is None:
        return ()
    if needs_key:
        return ((b"access-control-allow-origin", b"*"), _EXPOSED)
    try:
        host = urlsplit(origin.decode("latin-1")).hostname
    except ValueError:
        return ()
    if host not in _LOOPBACK_HOSTS:
        return ()
    return ((b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED)


def preflight_headers(asked: bytes | None) -> Headers:
    """What a preflight is told beside its origin; `asked` is its Access-Control-Request-Headers."""
    return (
        (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
        (b"access-control-allow-headers", asked or b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    )
