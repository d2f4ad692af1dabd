"""The control port of a container that holds a whole deployment (`wire/container.py`): a small HTTP server.

The world may reach it, so it reads nothing of a request without the token, bounds what it reads, and serves few at a
time. The gateway, which takes the load, is another process.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Protocol, TypeVar

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.node.file_server import BoundedServer
from penstock.run_folder import Desired
from penstock.wire.command import Done, Verb
from penstock.wire.container import PATH, ContainerView, End, Named

_IDLE_S = 10.0  # that a client may take for each read
_BODY_BYTES = 64 * 1024
T = TypeVar("T")


class Holder(Protocol):
    """What answers."""

    def view(self) -> ContainerView: ...
    def place(self, wanted: Named) -> ContainerView: ...
    def order(self, desired: Desired) -> None: ...
    def end(self, order: End) -> None: ...
    def run_verb(self, verb: Verb) -> Done: ...


class ControlServer(BoundedServer):
    """Serves from a separate thread after `start`, until `close`."""

    def __init__(self, address: tuple[str, int], token: str, holder: Holder) -> None:
        self.token, self.holder = token, holder
        super().__init__(address, _Handler)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.1,), name="control", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ControlServer
    timeout = _IDLE_S
    protocol_version = "HTTP/1.0"  # a connection for each call: none is kept that idles
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        if self._may():
            if self.path == PATH:
                self._answer(self.server.holder.view())
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is no such call")

    def do_POST(self) -> None:
        if not self._may():
            return
        n_bytes = self.headers.get("content-length", "")
        if not (n_bytes.isascii() and n_bytes.isdigit() and int(n_bytes) <= _BODY_BYTES):
            self._refuse(HTTPStatus.BAD_REQUEST, f"the body needs a length of at most {_BODY_BYTES} bytes")
            return
        body = self.rfile.read(int(n_bytes))
        try:
            self._answer(self._call(self.path.removeprefix(f"{PATH}/"), body))
        except (msgspec.MsgspecError, UserError) as exc:
            self._refuse(HTTPStatus.BAD_REQUEST, str(exc))
        except PenstockError as exc:
            self._refuse(HTTPStatus.CONFLICT, str(exc))

    def _call(self, name: str, body: bytes) -> object:
        holder = self.server.holder
        if name == "replicas":
            return holder.place(msgspec.json.decode(body, type=Named))
        if name == "verb":
            return holder.run_verb(msgspec.json.decode(body, type=Verb))
        if name == "desired":
            holder.order(msgspec.json.decode(body, type=Desired))
        elif name == "end":
            holder.end(msgspec.json.decode(body, type=End))
        else:
            raise UserError("there is no such call")
        return {"ok": True}

    def _may(self) -> bool:
        given = (self.headers.get("authorization") or "").encode("utf-8", "replace")
        if hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self.server.know(self.connection)
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "the admin token is needed")
        return False

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._answer({"error": {"message": message}}, status)

    def _answer(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = msgspec.json.encode(value)
        lines: Mapping[str, str] = {"content-type": "application/json", "content-length": str(len(body))}
        self.send_response(status)
        for name, text in lines.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Its log is the container's, which is for the deployment."""


def listen(host: str, port: int, token: str, holder: Holder) -> ControlServer:
    """A server that answers.  Raises UserError when the port is taken."""
    try:
        server = ControlServer((host, port), token, holder)
    except OSError as exc:
        raise UserError(f"cannot listen on control port {host}:{port}: {exc.strerror}") from exc
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    server.start()
    return server
