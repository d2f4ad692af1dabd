"""A stub of the API of Kubernetes for faults: answers as told, over a Unix socket or with TLS on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from penstock.targets.kubernetes.access import UnixConnection
from penstock.targets.kubernetes.api import Api

NAMESPACE = "team"


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    peer: object  # the connection


class Answer(NamedTuple):
    """`body`: an object, text, or bytes that come piece by piece (chunked). `cut`: ends without the last chunk."""

    status: int = 200
    body: object = None
    closes: bool = False
    cut: bool = False


class Hangup(NamedTuple):
    """The connection ends without an answer."""


# Or a function of the request that returns an answer.
Reply = Answer | Hangup | FunctionType


class Stub:
    """`on` says what the next requests get: one answer each, the last one for ever. `requests`: those that came."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[Request] = []
        self._replies: dict[tuple[str, str], list[Reply]] = {}
        self.socket = folder / "api"
        self._server = self._serve(str(self.socket), socket.AF_UNIX)

    def on(self, method: str, path: str, *replies: object) -> None:
        """A `path` without query. What is no reply is the JSON of a 200."""
        is_reply = (Answer, Hangup, FunctionType)
        self._replies[method, path] = [row if isinstance(row, is_reply) else Answer(200, row) for row in replies]

    def api(self) -> Api:
        return Api(StubWay(self.socket), NAMESPACE, "test")

    def close_connections(self) -> None:
        """As a server does that ends idle ones."""
        self._server.close_connections()

    def end(self) -> None:
        self._server.close_connections()
        self._server.shutdown()
        self._server.server_close()

    def reply_to(self, request: Request) -> Answer | Hangup:
        self.requests.append(request)
        replies = self._replies.get((request.method, request.path))
        if not replies:
            return status(404, "NotFound", "the server could not find the requested resource")
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        return reply if isinstance(reply, Answer | Hangup) else reply(request)

    def _serve(self, address: Any, family: int, tls: ssl.SSLContext | None = None) -> _Server:
        server = _Server(self, address, family, tls)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server


class TlsStub(Stub):
    """The same on a port of loopback, as a pod sees the API."""

    def __init__(self, folder: Path, certificate: tuple[Path, Path]) -> None:
        super().__init__(folder)
        self.end()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self._server = self._serve(("127.0.0.1", 0), socket.AF_INET, context)
        self.port = int(self._server.server_address[1])


class StubWay:
    where = 'context "test"'

    def __init__(self, path: Path) -> None:
        self._path = path
        self.said: str | None = None

    def connection(self, timeout_s: float) -> UnixConnection:
        return UnixConnection(self._path, timeout_s)

    def headers(self) -> dict[str, str]:
        return {}

    def complaint(self) -> str | None:
        return self.said


def status(code: int, reason: str, message: str, **details: object) -> Answer:
    """A failure as the API says it."""
    return Answer(code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details})


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, stub: Stub, address: Any, family: int, tls: ssl.SSLContext | None) -> None:
        self.stub, self.address_family, self._tls = stub, family, tls
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        accepted, peer = self.socket.accept()
        connection = self._tls.wrap_socket(accepted, server_side=True) if self._tls else accepted
        self._open.add(connection)
        return connection, peer or ("unix", 0)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away is what is tested

    def close_connections(self) -> None:
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length)
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(data) if data else None
        request = Request(self.command, parts.path, query, headers, body, self.connection)
        reply = self.server.stub.reply_to(request)
        if isinstance(reply, Hangup):
            self.close_connection = True
            return
        self._answer(reply)

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def _answer(self, reply: Answer) -> None:
        self.send_response(reply.status)
        if reply.closes:
            self.send_header("connection", "close")
        if isinstance(reply.body, Iterator):
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in reply.body:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if reply.cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")
            return
        is_text = isinstance(reply.body, str)
        data = str(reply.body).encode() if is_text else json.dumps(reply.body).encode()
        self.send_header("content-type", "text/plain" if is_text else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
