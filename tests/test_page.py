"""The page of /dashboard as bytes. In a browser: test_page_browser."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from pathlib import Path

from penstock.gateway.live import page
from penstock.gateway.live.page import page_answer

ROOT = Path(__file__).parent.parent
BODY = page_answer(None).body.decode()
HEADERS = {name.decode(): value.decode() for name, value in page_answer(None).headers}


def source(tag: str) -> str:
    """The hash of the document's only element of this name."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", BODY, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_policy_names_the_script_and_style_of_the_document_and_no_host() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": source("script"),
        "style-src": source("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_document_is_whole_with_its_licence_and_without_inline_handlers_or_other_files() -> None:
    assert "{{" not in re.sub(r"<script>.*</script>", "", BODY, flags=re.DOTALL)
    markup = re.sub(r"<(script|style)>.*?</\1>", "", BODY, flags=re.DOTALL)
    assert not re.search(r"<[^>]+\s(on\w+|style)=", markup)
    assert re.findall(r'(?:href|src)="([^"]{0,20})', markup) == ["data:image/svg+xml,%", "#main", "metrics"]
    script = BODY[BODY.index("<script>") :]
    assert script.index("The MIT License") < script.index("var uPlot=")
    assert "Leon Sorokin" in script


def test_browser_that_has_the_page_gets_304() -> None:
    etag = HEADERS["etag"].encode()
    assert page_answer(etag).status == page_answer(b'"other", W/' + etag).status == 304
    assert page_answer(b'"other"').status == 200
    assert HEADERS["cache-control"] == "no-cache"
    assert HEADERS["referrer-policy"] == "no-referrer"
    assert HEADERS["x-content-type-options"] == "nosniff"


def test_wheel_has_the_files_of_the_page() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["penstock"]}  # all files of the package that git does not ignore
    folder = ROOT / "penstock/gateway/live"
    assert {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")} == {*page._STYLES, *page._SCRIPTS}
