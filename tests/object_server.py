"""An object store on loopback, with as much of S3's protocol as listing and ranged reads need."""

from __future__ import annotations

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "2026-01-02T03:04:05.000Z"


class ObjectServer(ThreadingHTTPServer):
    """One bucket, `objects` by key, two in a page of a list. `asked`: method, key and range of each request, in any
    order. `status`: answers everything with it. `n_failures`: so many reads are answered with 503 first."""

    daemon_threads = True

    def __init__(self, bucket: str, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket, self.objects = bucket, objects
        self.asked: list[str] = []
        self.status: int | None = None
        self.n_failures = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def ranges(self) -> list[str]:
        return sorted(words for words in self.asked if "bytes=" in words)


def tag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def do_GET(self) -> None:
        store, parts = self.server, urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        store.asked.append(f"GET {key} {self.headers.get('Range', '')}".strip())
        if store.status is not None:
            return self._send(store.status, b"<Error><Code>AccessDenied</Code></Error>")
        if bucket != store.bucket or (key and key not in store.objects):
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if not key:
            return self._list({name: values[0] for name, values in parse_qs(parts.query).items()})
        with store.lock:
            fails = store.n_failures > 0
            store.n_failures -= fails
        return self._send(503, b"slow down") if fails else self._read(store.objects[key])

    def _read(self, data: bytes) -> None:
        if self.headers.get("If-Match") not in (None, tag_of(data)):
            return self._send(412, b"")
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            return self._send(200, data, data)
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        return self._send(206, data[first : last + 1], data, f"bytes {first}-{last}/{len(data)}")

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
        self._send(200, text.encode())

    def _send(self, status: int, body: bytes, whole: bytes | None = None, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if whole is not None:
            self.send_header("ETag", tag_of(whole))
            self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
