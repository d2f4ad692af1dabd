"""A gateway's page with a stream that a test writes: HTTP on loopback, in threads of the test's process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec
import waiting
from loopback_server import LoopbackHandler, LoopbackServer, running

from penstock.gateway.live.page import page_answer
from penstock.wire.live import History, Snapshot

Script = Callable[[], Iterator[History | Snapshot | float]]


class PageServer:
    """Each stream plays `script`, where a number is a pause in seconds, and stays open after its end.

    `key`: what the stream wants. `n_open`: streams that are open now.
    """

    def __init__(self, script: Script, key: str | None = None, prefix: str = "") -> None:
        self.script, self.key, self.prefix = script, key, prefix
        self.n_open = self.n_asked = 0
        self.holds_streams = self.is_down = False
        self.closing = threading.Event()
        self._n_ended = 0
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PageServer:
        server = self._stack.enter_context(running(LoopbackServer(self._handler())))
        self.url = f"{server.url}{self.prefix}/dashboard"
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._stack.close()

    def end_streams(self) -> None:
        self._n_ended += 1

    def wait_for_streams(self, n: int) -> None:
        waiting.until(lambda: self.n_open == n, f"{n} streams are open")

    def _handler(self) -> type[LoopbackHandler]:
        server = self

        class Handler(LoopbackHandler):
            protocol_version = "HTTP/1.0"  # a stream ends with its connection

            def do_GET(self) -> None:
                path = urlsplit(self.path)
                bare = path.path.removeprefix(server.prefix)
                is_open = server.key is None or self.headers["x-api-key"] == server.key
                if bare == "/dashboard":
                    page = page_answer(None)
                    headers = {name.decode(): value.decode() for name, value in page.headers}
                    self._answer(page.status, page.content_type.decode(), page.body, headers)
                elif bare not in ("/dashboard/live", "/metrics"):
                    self._answer(404, "text/plain", b"")
                elif server.is_down:
                    self._answer(503, "text/plain", b"")
                elif not is_open:
                    self._answer(401 if self.headers["x-api-key"] is None else 403, "application/json", b"{}")
                elif bare == "/metrics":
                    self._answer(200, "text/plain", b"penstock_replicas_ready 3\n")
                elif path.query == "once":
                    first = next(part for part in server.script() if isinstance(part, Snapshot))
                    self._answer(200, "application/json", msgspec.json.encode(first))
                else:
                    self._stream()

            def _answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send(status, body, {"content-type": kind, **(headers or {})})

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.flush()
                with server._lock:
                    server.n_open += 1
                    server.n_asked += 1
                try:
                    self._play()
                except OSError:  # the page closed it
                    pass
                finally:
                    with server._lock:
                        server.n_open -= 1

            def _play(self) -> None:
                for part in () if server.holds_streams else server.script():
                    if isinstance(part, float):
                        server.closing.wait(part)
                    else:
                        name = b"history" if isinstance(part, History) else b"snapshot"
                        self.wfile.write(b"event: %s\ndata: %s\n\n" % (name, msgspec.json.encode(part)))
                        self.wfile.flush()
                    if server.closing.is_set():
                        return
                n_ended = server._n_ended
                while not server.closing.wait(0.05) and server._n_ended == n_ended:
                    self.wfile.write(b"" if server.holds_streams else b": open\n\n")

        return Handler
