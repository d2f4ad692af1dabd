"""A request as the browser sent it, behind any reverse proxy and below any path. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PATH = re.compile(r"[A-Za-z0-9._~%@:+-]+(/[A-Za-z0-9._~%@:+-]+)*\Z")
_FORWARDED = (b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-prefix")


def as_sent(scope: Mapping[str, Any], root_path: str = "") -> dict[str, Any]:
    """The ASGI scope with the host, the scheme and the path that a proxy tells of, and without its headers.

    `root_path`: where the proxy serves the page, if it does not tell. A proxy may take the prefix off or leave it.
    In the result `path` begins with `root_path`, as ASGI has it: https://asgi.readthedocs.io/en/latest/specs/www.html
    """
    headers = dict(reversed(scope["headers"]))
    host, scheme, prefix = (_first(headers.get(name)) for name in _FORWARDED)
    prefix = clean_prefix(prefix or root_path)
    path = scope["path"]
    if prefix and path != prefix and not path.startswith(f"{prefix}/"):
        path = prefix + path
    kept = [(name, value) for name, value in scope["headers"] if name not in _FORWARDED]
    if host:
        kept = [(name, value) for name, value in kept if name != b"host"] + [(b"host", host.encode("latin-1"))]
    scheme = scheme if scheme in ("http", "https") else scope["scheme"]
    return {**scope, "headers": kept, "scheme": scheme, "root_path": prefix, "path": path}


def clean_prefix(path: str) -> str:
    """ "x/y/" -> "/x/y"; "" and "/" -> ""; only the path of a URL."""
    path = path.partition("://")[2].partition("/")[2] if "://" in path else path
    path = path.strip("/")
    return f"/{path}" if _PATH.match(path) else ""


def is_same_site(headers: Mapping[str, str]) -> bool:
    """Whether a page of ours sent a request that changes something, as far as the browser tells.

    https://www.w3.org/TR/fetch-metadata/; a browser sends no Sec-Fetch-Site over plain HTTP, but Origin.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _first(value: bytes | None) -> str:
    return (value or b"").decode("latin-1").split(",")[0].strip()
