"""Models of ModelScope: a site on loopback is listed, read, and resumed."""

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

TENSORS = bytes(range(256)) * 4
FILES = {"config.json": b"{}", "model.safetensors": TENSORS, "README.md": b"words"}
SOURCE = sources.parse("ms://org/tiny")


class Site(LoopbackServer):
    """`asked`: paths, Range and Authorization of each request. `status`: answers everything with it. `cut`: sends so
    many bytes of a file. `elsewhere`: redirects to files there. `ranges`: obeys them."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.status, self.cut = 200, len(TENSORS)
        self.elsewhere: str | None = None
        self.obeys_ranges = True


class _Handler(LoopbackHandler):
    protocol_version = "HTTP/1.0"
    server: Site

    def do_GET(self) -> None:
        site, parts = self.server, urlsplit(self.path)
        site.asked.append((parts.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if site.status != 200 or "/org/tiny/" not in parts.path:
            return self.send(site.status if site.status != 200 else 404)
        if parts.path.endswith("/repo/files"):
            rows = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in FILES.items()
            ]
            rows.append({"Path": "sub", "Type": "tree"})
            return self.send(200, json.dumps({"Code": 200, "Data": {"Files": rows}}).encode())
        if site.elsewhere is not None:
            return self.send(302, b"", {"Location": f"{site.elsewhere}{self.path}"})
        data, begin = FILES[parse_qs(parts.query)["FilePath"][0]], 0
        if site.obeys_ranges and "Range" in self.headers:
            begin = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        length = {"Content-Length": str(len(data) - begin)}
        if begin:
            length["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return self.send(206 if begin else 200, data[begin : begin + site.cut], length)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, Site]]:
    """The site itself, and another host."""
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "hidden")
    with running(Site()) as site, running(Site()) as other:
        monkeypatch.setattr(modelscope, "endpoint", lambda: site.url)
        yield site, other


def test_a_repository_is_listed_with_sizes_and_hashes(sites: tuple[Site, Site]) -> None:
    listing = sources.resolve(SOURCE)
    digest = hashlib.sha256(TENSORS).hexdigest()
    assert listing.files["model.safetensors"] == sources.RemoteFile(1024, digest)
    assert set(listing.files) == {"config.json", "model.safetensors"} and len(listing.commit) == 40
    assert sites[0].asked == [("/api/v1/models/org/tiny/repo/files", None, "Bearer hidden")]


@pytest.mark.parametrize("obeys_ranges", [True, False])
def test_a_file_that_was_cut_is_continued(sites: tuple[Site, Site], tmp_path: Path, obeys_ranges: bool) -> None:
    listing, pieces = sources.resolve(SOURCE), list[int]()
    part = PartFile(tmp_path / "part", pieces.append)
    sites[0].cut, sites[0].obeys_ranges = 100, obeys_ranges
    with pytest.raises(PenstockError) as caught:
        modelscope.fetch_file(listing, "model.safetensors", part)
    assert caught.value.is_retryable and part.n_bytes == sum(pieces) == 100
    sites[0].cut = len(TENSORS)
    modelscope.fetch_file(listing, "model.safetensors", part)
    assert part.path.read_bytes() == TENSORS and sum(pieces) == 1024
    assert sites[0].asked[-1][1] == "bytes=100-"


def test_the_token_does_not_follow_to_another_host(sites: tuple[Site, Site], tmp_path: Path) -> None:
    site, other = sites
    listing = sources.resolve(SOURCE)
    site.elsewhere = other.url
    modelscope.fetch_file(listing, "config.json", PartFile(tmp_path / "part"))
    assert (tmp_path / "part").read_bytes() == b"{}"
    assert site.asked[-1][2] == "Bearer hidden" and [row[2] for row in other.asked] == [None]


def test_what_the_site_refuses_is_explained(sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such model or revision"):
        sources.resolve(sources.parse("ms://org/other"))
    sites[0].status = 403
    with pytest.raises(UserError, match="requires a token with access") as caught:
        sources.resolve(SOURCE)
    assert f"{sites[0].url}/models/org/tiny" in str(caught.value.hint)
    sites[0].status = 503
    with pytest.raises(PenstockError, match="HTTP 503") as busy:
        sources.resolve(SOURCE)
    assert busy.value.is_retryable
    monkeypatch.setattr(modelscope, "endpoint", lambda: "http://127.0.0.1:9")
    with pytest.raises(PenstockError, match=r"the connection to .* failed") as unreached:
        sources.resolve(SOURCE)
    assert unreached.value.is_retryable
