"""Models of ModelScope: a site on loopback is listed and read. How files come by HTTP is in test_http_files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from loopback_server import LoopbackHandler, LoopbackServer, running

from penstock.errors import PenstockError, UserError
from penstock.models import modelscope, sources
from penstock.models.part_file import PartFile

pytestmark = pytest.mark.loopback

TENSORS = bytes(range(256)) * 4
FILES = {"config.json": b"{}", "model.safetensors": TENSORS, "README.md": b"words"}
SOURCE = sources.parse("ms://org/tiny")


class Site(LoopbackServer):
    """`asked`: path, Range and Authorization of each request. `status`: answers everything with it."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.status: int | None = None


class _Handler(LoopbackHandler):
    server: Site

    def do_GET(self) -> None:
        site, parts = self.server, urlsplit(self.path)
        site.asked.append((parts.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if site.status is not None or "/org/tiny/" not in parts.path:
            return self.send(site.status or 404)
        if parts.path.endswith("/repo/files"):
            rows = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in FILES.items()
            ]
            rows.append({"Path": "sub", "Type": "tree"})
            return self.send(200, json.dumps({"Code": 200, "Data": {"Files": rows}}).encode())
        data = FILES[parse_qs(parts.query)["FilePath"][0]]
        begin = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if "Range" in self.headers else 0
        content_range = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        return self.send(206 if begin else 200, data[begin:], content_range)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "hidden")
    with running(Site()) as server:
        monkeypatch.setattr(modelscope, "endpoint", lambda: server.url)
        yield server


def test_a_repository_is_listed_with_sizes_and_hashes_and_a_file_continued(site: Site, tmp_path: Path) -> None:
    listing = sources.resolve(SOURCE)
    digest = hashlib.sha256(TENSORS).hexdigest()
    assert listing.files["model.safetensors"] == sources.RemoteFile(1024, digest)
    assert set(listing.files) == {"config.json", "model.safetensors"} and len(listing.commit) == 40
    assert site.asked == [("/api/v1/models/org/tiny/repo/files", None, "Bearer hidden")]
    (tmp_path / "part").write_bytes(TENSORS[:100])
    modelscope.fetch_file(listing, "model.safetensors", PartFile(tmp_path / "part"))
    assert (tmp_path / "part").read_bytes() == TENSORS
    assert site.asked[-1] == ("/api/v1/models/org/tiny/repo", "bytes=100-", "Bearer hidden")


def test_what_the_site_refuses_is_explained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such model or revision"):
        sources.resolve(sources.parse("ms://org/other"))
    site.status = 403
    with pytest.raises(UserError, match="requires a token with access") as caught:
        sources.resolve(SOURCE)
    assert f"{site.url}/models/org/tiny" in str(caught.value.hint)
    site.status = 503
    with pytest.raises(PenstockError, match="HTTP 503") as busy:
        sources.resolve(SOURCE)
    assert busy.value.is_retryable
    monkeypatch.setattr(modelscope, "endpoint", lambda: "http://127.0.0.1:9")
    with pytest.raises(PenstockError, match=r"the connection to .* failed") as unreached:
        sources.resolve(SOURCE)
    assert unreached.value.is_retryable
