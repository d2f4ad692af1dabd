"""The page of GET /, and that of GET /dashboard: one document with its style and script inside, and a policy that
allows no other. It holds no secret: its script reads /dashboard/live with the key of whoever looks.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Final

from penstock.gateway.responses import Answer
from penstock.wire.http1 import Headers

_STYLES: Final = ("uPlot.min.css", "page.css")
_SCRIPTS: Final = ("uPlot.iife.min.js", "stream.js", "elements.js", "charts.js", "tables.js", "page.js")
_HTML: Final = b"text/html; charset=utf-8"


@functools.lru_cache(maxsize=1)
def landing_answer() -> Answer:
    """The page of GET /, which links to the others. Reads a file the first time."""
    return Answer(200, resources.files(__package__).joinpath("landing.html").read_bytes(), _HTML)


def page_answer(if_none_match: bytes | None) -> Answer:
    """The page, or 304 where the browser has it. Reads files the first time."""
    page, etag = _page()
    if if_none_match is not None and etag in if_none_match:
        return Answer(304, b"", _HTML, page.headers)
    return page


@functools.lru_cache(maxsize=1)
def _page() -> tuple[Answer, bytes]:
    licence = f"/*! {_read('uPlot.LICENSE.txt')} */"
    style = "\n".join([licence, *map(_read, _STYLES)])
    script = "\n".join([licence, *map(_read, _SCRIPTS)])
    document = _read("page.html").replace("{{style}}", style).replace("{{script}}", script).encode()
    etag = b'"%s"' % hashlib.sha256(document).hexdigest()[:32].encode()
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers: Headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
        (b"etag", etag),
    )
    return Answer(200, document, _HTML, headers), etag


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8").strip()


def _source(text: str) -> str:
    """How a policy names an inline script or style: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
