"""Gives a model's files to other nodes of the deployment over HTTP, also while this node still receives them.

    GET /listing          what the model has (sources.Listing as JSON); 503 until this node knows
    GET /files/NAME       its bytes, from the first that the header Range names; waits for those that are not here yet
    GET /digests/NAME     its SHA-256, once the file is complete

Every request needs the key of the deployment's engines as a bearer token, and who has sent none gets few threads, for
a short time. Only regular files below the model's folder are read: a link may lead from one to another, not out of it.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, TypeVar

import msgspec

from penstock.models.fetch_files import Layout
from penstock.models.sources import Listing
from penstock.text import MIB

_T = TypeVar("_T")
_POLL_S = 0.02
WAIT_S = 10.0  # for the next byte of a file; then the connection ends, and the other node looks whom to ask
_PIECE_BYTES = 4 * MIB
_IDLE_S = 60.0
_STRANGER_S = 10.0  # for a connection without the key
_MOST, _MOST_STRANGERS = 128, 16  # connections: of all nodes, and without the key of one address


class FileServer:
    """Listens on a free port of every address from `start` on, and answers nothing but 503 until `give`."""

    def __init__(self, key: str) -> None:
        self._server = _Server(key)
        self.port = int(self._server.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="file-server", daemon=True).start()

    def give(self, listing: Listing, layout: Layout) -> None:
        self._server.given = (listing, layout)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class BoundedServer(ThreadingHTTPServer):
    """Serves `_MOST` connections at most. One is a stranger's until a handler calls `know`: few, for a short time."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.connections: dict[socket.socket, tuple[str, float]] = {}  # whose, and since when
        super().__init__(address, handler)

    def know(self, request: socket.socket) -> None:
        self.connections[request] = "", math.inf

    def process_request(self, request: Any, client_address: Any) -> None:
        same = [each for each, (address, _) in [*self.connections.items()] if address == client_address[0]]
        if len(same) >= _MOST_STRANGERS:
            self._end(same[0])
        if len(self.connections) < _MOST:
            self.connections[request] = client_address[0], time.monotonic()
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections whose request is late. Called twice a second."""
        for request, (_, since) in [*self.connections.items()]:
            if time.monotonic() - since > _STRANGER_S:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Its thread ends with the next read."""
        self.connections.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Nothing: a client that hangs up is no error of this process."""


class _Server(BoundedServer):
    def __init__(self, key: str) -> None:
        super().__init__(("0.0.0.0", 0), _Handler)
        self.authorization = f"Bearer {key}".encode()
        self.given: tuple[Listing, Layout] | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S  # of a connection that asks nothing
    disable_nagle_algorithm = True  # else a header waits 40 ms for the peer's acknowledgement
    server: _Server

    def do_GET(self) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.authorization):
            self._answer(401)
            return
        self.server.know(self.connection)
        if self.server.given is None:
            self._answer(503)
        else:
            self._give(*self.server.given)

    def _give(self, listing: Listing, layout: Layout) -> None:
        what, _, name = urllib.parse.unquote(self.path).lstrip("/").partition("/")
        if what == "listing":
            self._answer(200, msgspec.json.encode(listing))
        elif name not in listing.files:
            self._answer(404)
        elif what == "digests":
            digest = _until(lambda: _digest(listing, layout, name))
            self._answer(503 if digest is None else 200, (digest or "").encode())
        elif what == "files":
            self._send_file(listing, layout, name)
        else:
            self._answer(404)

    def _send_file(self, listing: Listing, layout: Layout, name: str) -> None:
        size = listing.files[name].size
        wanted = re.fullmatch(r"bytes=(\d{1,18})-", self.headers.get("Range", "bytes=0-"))
        offset = int(wanted[1]) if wanted else size
        stream = _until(lambda: _open(listing, layout, name)) if offset < size else None
        if stream is None:
            self._answer(503 if offset < size else 416)
            return
        with stream:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {offset}-{size - 1}/{size}")
            self.send_header("Content-Length", str(size - offset))
            self.end_headers()
            self._stream(stream, offset, size)

    def _stream(self, stream: BinaryIO, offset: int, size: int) -> None:
        """Send what is in the file, and what comes into it; breaks off when nothing comes, or it was thrown away."""
        last_at = time.monotonic()
        while offset < size:
            facts = os.fstat(stream.fileno())
            if facts.st_size > offset:
                offset += self.connection.sendfile(stream, offset, min(_PIECE_BYTES, facts.st_size - offset))
                last_at = time.monotonic()
            elif time.monotonic() - last_at > WAIT_S or facts.st_nlink == 0 or facts.st_size < offset:
                self.close_connection = True
                return
            else:
                time.sleep(_POLL_S)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a file of 100 GB is many requests."""


def _until(look: Callable[[], _T | None]) -> _T | None:
    deadline = time.monotonic() + WAIT_S
    while (seen := look()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return seen


def _open(listing: Listing, layout: Layout, name: str) -> BinaryIO | None:
    """The complete file, or the part of it that is here; a part may become the file between two looks."""
    for path in (layout.folder / name, layout.part(listing, name), layout.folder / name):
        with contextlib.suppress(OSError):
            real, root = path.resolve(strict=True), layout.root.resolve()
            if real.is_relative_to(root) and real.is_file():
                return open(real, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
    return None


def _digest(listing: Listing, layout: Layout, name: str) -> str | None:
    entry = layout.notes(listing.commit).get(name)
    return entry.sha256 if entry is not None else None
