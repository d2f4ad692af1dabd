"""An object store on loopback, with as much of S3's protocol as listing and ranged reads need."""

from __future__ import annotations

import hashlib
import re
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from loopback_server import LoopbackHandler, LoopbackServer

_DATE = "2026-01-02T03:04:05.000Z"


class ObjectServer(LoopbackServer):
    """One bucket, `objects` by key, two in a page of a list. `asked`: method, key and range of each request, in any
    order. `status`: answers everything with it. `n_failures`: so many reads are answered with 503 first."""

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        super().__init__(_Handler)
        self.bucket, self.objects = bucket, objects
        self.asked: list[str] = []
        self.status: int | None = None
        self.n_failures = 0
        self.lock = threading.Lock()

    @property
    def ranges(self) -> list[str]:
        return sorted(words for words in self.asked if "bytes=" in words)


def tag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(LoopbackHandler):
    server: ObjectServer

    def do_GET(self) -> None:
        store, parts = self.server, urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        store.asked.append(f"GET {key} {self.headers.get('Range', '')}".strip())
        if store.status is not None:
            return self.send(store.status, b"<Error><Code>AccessDenied</Code></Error>")
        if bucket != store.bucket or (key and key not in store.objects):
            return self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if not key:
            return self._list({name: values[0] for name, values in parse_qs(parts.query).items()})
        with store.lock:
            fails = store.n_failures > 0
            store.n_failures -= fails
        return self.send(503, b"slow down") if fails else self._read(store.objects[key])

    def _read(self, data: bytes) -> None:
        if self.headers.get("If-Match") not in (None, tag_of(data)):
            return self.send(412)
        headers = {"ETag": tag_of(data), "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            return self.send(200, data, headers)
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.send(206, data[first : last + 1], headers)

    def _list(self, query: dict[str, str]) -> None:
        keys = sorted(key for key in self.server.objects if key.startswith(query.get("prefix", "")))
        begin = int(query.get("continuation-token", "0"))
        page, more = keys[begin : begin + 2], begin + 2 < len(keys)
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_DATE}</LastModified><Size>{len(data)}</Size>"
            f"<ETag>{escape(tag_of(data))}</ETag></Contents>"
            for key in page
            if (data := self.server.objects[key]) is not None
        )
        token = f"<NextContinuationToken>{begin + 2}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        self.send(200, text.encode())
