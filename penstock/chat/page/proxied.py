"""A request as the browser sent it, behind reverse proxies that are trusted, and below any path. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PATH = re.compile(r"[A-Za-z0-9._~%@:+-]+(/[A-Za-z0-9._~%@:+-]+)*\Z")
_FOR = b"x-forwarded-for"
_FORWARDED = (b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-prefix")


class Proxies:
    """The addresses and networks of proxies. What any other peer forwards is not believed."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(each, strict=False) for each in networks]

    def trusts(self, address: str) -> bool:
        ip = _ip(address)
        return ip is not None and any(ip in network for network in self._networks)


def as_sent(scope: Mapping[str, Any], proxies: Proxies, root_path: str = "") -> dict[str, Any]:
    """The ASGI scope with the client, the host, the scheme and the path that a trusted proxy reports, and without its
    headers. Of several values of a header the last is the one that the proxy has added.

    `root_path`: where the proxy serves the page, if it does not report that. A proxy may remove the prefix or leave it.
    In the result `path` begins with `root_path`, as ASGI has it: https://asgi.readthedocs.io/en/latest/specs/www.html
    """
    address, port = scope.get("client") or ("", 0)
    is_trusted = proxies.trusts(address)
    host, scheme, prefix = (_values(scope, name)[-1] if is_trusted else "" for name in _FORWARDED)
    for earlier in reversed(_values(scope, _FOR)):
        if not earlier or not proxies.trusts(address):
            break
        address, port = earlier, 0
    prefix = clean_prefix(prefix or root_path)
    path = scope["path"]
    if prefix and path != prefix and not path.startswith(f"{prefix}/"):
        path = prefix + path
    kept = [(name, value) for name, value in scope["headers"] if name not in (*_FORWARDED, _FOR)]
    if host:
        kept = [(name, value) for name, value in kept if name != b"host"] + [(b"host", host.encode("latin-1"))]
    scheme = scheme if scheme in ("http", "https") else scope["scheme"]
    client = (address, port)
    return {**scope, "headers": kept, "scheme": scheme, "root_path": prefix, "path": path, "client": client}


def clean_prefix(path: str) -> str:
    """ "x/y/" -> "/x/y"; "" and "/" -> ""; only the path of a URL."""
    path = path.partition("://")[2].partition("/")[2] if "://" in path else path
    path = path.strip("/")
    return f"/{path}" if _PATH.match(path) else ""


def is_same_site(headers: Mapping[str, str]) -> bool:
    """Return whether a page of ours sent a request that changes something, as far as the browser reports.

    https://www.w3.org/TR/fetch-metadata/; a browser sends no Sec-Fetch-Site over plain HTTP, but Origin.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    """Those of all headers with that name, one at least."""
    lines = [value.decode("latin-1") for header, value in scope["headers"] if header == name]
    return [value.strip() for value in ",".join(lines).split(",")]


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if ip.version == 6 else ip
