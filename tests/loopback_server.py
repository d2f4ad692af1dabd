"""What HTTP servers of tests have in common: they listen on loopback, or on an address of a rig."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import TypeVar

ServerT = TypeVar("ServerT", bound=BaseServer)


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), handler)
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.server_address[1]}"


class LoopbackHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """`headers` may have another Content-Length."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # a client that was killed
                self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running(server: ServerT) -> Iterator[ServerT]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
