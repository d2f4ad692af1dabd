"""Which web pages may ask, and read answers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from penstock.spec.gateway import is_loopback
from penstock.wire.http1 import Headers

SITE_HEADERS: Final = frozenset((b"host", b"origin", b"sec-fetch-site"))
_MAX_KNOWN_HOSTS: Final = 64
# https://www.rfc-editor.org/rfc/rfc9110#section-7.2, https://www.rfc-editor.org/rfc/rfc6454#section-6.2
_HOST: Final = re.compile(rb"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|([A-Za-z0-9._\-]+))(?::(\d{0,5}))?")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*://")
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"x-request-id, x-penstock-replica, server-timing, retry-after, x-ratelimit-limit-requests,"
    b" x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens,"
    b" x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
)


def origin_headers(origin: bytes | None, needs_key: bool, allowed: frozenset[bytes] = frozenset()) -> Headers:
    """The headers that let a web page of `origin` read an answer, if it may. `allowed` names origins, b"*" for all.

    With keys and no names any page may: it has to bring a key. Without keys pages of this machine may too, no others.
    """
    if origin is None:
        return ()
    if b"*" in allowed or (needs_key and not allowed):
        return ((b"access-control-allow-origin", b"*"), _EXPOSED)
    if origin in allowed or (not needs_key and is_local_host(_host_of_origin(origin))):
        return ((b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED)
    return ()


def _host_of_origin(origin: bytes) -> str | None:
    scheme = _SCHEME.match(origin)
    return None if scheme is None else _read_host(origin[scheme.end() :])


def _read_host(value: bytes) -> str | None:
    """The name or address of `host[:port]`; None for anything else, which two readers may understand in two ways."""
    match = _HOST.fullmatch(value)
    if match is None or int(match.group(3) or 0) > 65_535:
        return None
    return (match.group(1) or match.group(2)).decode().lower()


def is_local_host(host: str | None) -> bool:
    return host is not None and (is_loopback(host) or host.endswith(".localhost"))


class SiteRule:
    """Without keys: which requests a web page may not have sent. Any page that the user visits can name this machine.

    A page of another origin sends Origin, or Sec-Fetch-Site, with what changes something. A name that its owner lets
    point here (DNS rebinding) makes a page of the same origin, so Host must be loopback or a configured name.
    """

    def __init__(self, listen_host: str, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed
        names = [name for origin in allowed if (name := _host_of_origin(origin)) is not None]
        self._hosts = {listen_host, *names}
        self._known_hosts: set[bytes] = set()

    def refuse(self, method: bytes, headers: Mapping[bytes, bytes]) -> str | None:
        """Why the request is refused. `headers`: those of SITE_HEADERS that it has."""
        host = headers.get(b"host")
        if host is not None and host not in self._known_hosts:  # browsers always send it
            host_name = _read_host(host)
            if host_name not in self._hosts and not is_local_host(host_name):
                name = host.decode("latin-1")
                return f"without keys Host must be loopback or that of an allowed origin, not {name!r}: use keys"
            if len(self._known_hosts) < _MAX_KNOWN_HOSTS:
                self._known_hosts.add(host)
        if len(headers) == 1 or method in (b"GET", b"HEAD", b"OPTIONS"):
            return None
        origin = headers.get(b"origin")
        if origin is None and headers.get(b"sec-fetch-site") != b"cross-site":
            return None
        is_allowed = origin in self._allowed or b"*" in self._allowed
        if origin is None or not (is_allowed or is_local_host(_host_of_origin(origin))):
            return f"without keys a page of {(origin or b'another site').decode('latin-1')} may not use the engines"
        return None


def preflight_headers(requested: bytes | None) -> Headers:
    """For a preflight, next to its origin's; `requested` is its Access-Control-Request-Headers."""
    return (
        (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", requested or b"authorization, content-type, x-api-key"),
        (b"access-control-max-age", b"600"),
    )
