"""A model hub on loopback, with as much of its protocol as a download of whole files needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download as file_download
import pytest
from loopback_server import LoopbackHandler, LoopbackServer, running

from penstock.models import fetch_files

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


def git_sha1(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def lfs(name: str, body: bytes) -> dict[str, dict[str, Any]]:
    """What a hub says of a file of weights."""
    facts = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
    return {"lfs": facts | {"oid": facts["sha256"]}} if name.endswith((".safetensors", ".gguf")) else {}


class HubServer(LoopbackServer):
    """One repository, `files` by name. `asked`: methods and paths; `ranges`: names and first bytes of ranges.

    `cut`: a file of which only the first so many bytes come. `is_open`: until it is set, whole files of weights wait.
    `token`: without it nothing is told. `status`: answers everything with it. `n_busy`: so many requests for files get
    429. `elsewhere`: another hub, to which whole files of weights are redirected. `commit`: of each file's answer.
    """

    def __init__(self, name: str, files: dict[str, bytes], address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(_Handler, address, port)
        self.name, self.files = name, files
        self.asked: list[str] = []
        self.ranges: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}
        self.token: str | None = None
        self.status: int | None = None
        self.n_busy = 0
        self.elsewhere: str | None = None
        self.commit = COMMIT
        self.tokens: list[str | None] = []
        self.is_open = threading.Event()
        self.is_open.set()

    @property
    def downloads(self) -> list[str]:
        return sorted(
            words.rpartition("/")[2] for words in self.asked if words.startswith("GET") and "resolve" in words
        )


class _Handler(LoopbackHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0].lstrip("/")
        hub.asked.append(f"{self.command} {path}")
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.status is not None:
            return self.send(hub.status)
        if hub.n_busy and "/resolve/" in path:
            hub.n_busy -= 1
            return self.send(429, b"slow down", {"RateLimit": '"resolvers";r=0;t=7'})
        if hub.elsewhere is not None and path.endswith(".safetensors"):
            return self.send(302, b"", {"Location": f"{hub.elsewhere}{self.path}", "X-Repo-Commit": hub.commit})
        api = f"api/models/{hub.name}"
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        facts = [(name, len(body), git_sha1(body), lfs(name, body)) for name, body in hub.files.items()]
        if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name, "size": size, "blobId": git} | more for name, size, git, more in facts]
            return self._json({"id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": siblings})
        if path == f"{api}/tree/{COMMIT}":
            return self._json([{"type": "file", "path": n, "size": s, "oid": git} | more for n, s, git, more in facts])
        for revision in ("main", COMMIT):
            name = path.removeprefix(f"{hub.name}/resolve/{revision}/")
            if name != path and name in hub.files:
                body = hub.files[name]
                etag = lfs(name, body)["lfs"]["sha256"] if lfs(name, body) else git_sha1(body)
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit}
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                if wanted:  # the header of a file of weights, for a plan, or the rest of a file
                    hub.ranges.append((name, int(wanted[1])))
                    last = int(wanted[2]) if wanted[2] else len(body) - 1
                    headers["Content-Range"] = f"bytes {int(wanted[1])}-{last}/{len(body)}"
                    cut = max(0, hub.cut[name] - int(wanted[1])) if name in hub.cut else None
                    return self._file(206, body[int(wanted[1]) : last + 1], headers, cut)
                if self.command == "GET" and name.endswith(".safetensors"):
                    hub.is_open.wait(60)
                return self._file(200, body, headers, hub.cut.get(name))
        return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, status: int, body: bytes, headers: dict[str, str], cut: int | None) -> None:
        """Of which only the first so many bytes come."""
        self.send(status, body[:cut], headers | {"Content-Length": str(len(body))})
        if cut is not None:
            self.close_connection = True


@contextlib.contextmanager
def serving(name: str, files: dict[str, bytes], address: str = "127.0.0.1") -> Iterator[HubServer]:
    with running(HubServer(name, files, address)) as server:
        yield server


@contextlib.contextmanager
def asked_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes], address: str = "127.0.0.1"
) -> Iterator[HubServer]:
    """A hub that huggingface_hub asks in this process, without a token and without pauses."""
    monkeypatch.setenv("NO_PROXY", address)
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(fetch_files, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    with serving(name, files, address) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        # The package reads the variable when it is imported.
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        yield server
