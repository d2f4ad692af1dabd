"""kubectl for tests of faults, without a cluster: `fake_kubectl.py FOLDER words...`. Standard library only.

FOLDER/config.json: what `config view` prints. FOLDER/complaint: `proxy` and `port-forward` print this and fail.
FOLDER/pids: the pid of each that serves, one a line.
"""

from __future__ import annotations

import os
import socketserver
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers the API's version, with our pid as the minor one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"major": "1", "minor": "%d"}' % os.getpid()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


class TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True


def main(folder: Path, words: list[str]) -> int:
    if "config" in words:
        print((folder / "config.json").read_text("utf-8"))
        return 0
    if "exec" in words:
        print(words)
        return 3
    complaint = folder / "complaint"
    if complaint.exists():
        sys.stderr.write(complaint.read_text("utf-8"))
        return 1
    with (folder / "pids").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    if "proxy" in words:
        path = words[-1].partition("=")[2]
        with UnixServer(path, Handler) as proxy:
            proxy.serve_forever()
    near, _, far = words[-1].partition(":")
    with TcpServer(("127.0.0.1", int(near)), Handler) as server:
        print(f"Forwarding from 127.0.0.1:{near} -> {far}", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
