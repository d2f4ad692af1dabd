"""What tests of a real `penstock gateway` share: an engine, a gateway, and questions to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import waiting

FAKE = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self): self.say(b"ok")
    def do_POST(self): self.rfile.read(int(self.headers["content-length"])); self.say(b'{"by": "fake"}')
    def say(self, body):
        self.send_response(200); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    # Killed, it leaves the folder of its admin socket: that goes with ours.
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        env = {**os.environ, "TMPDIR": folder}
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, process_group=0, env=env)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a worker that outlived it would hold its pipes
            process.communicate()


def ask(url: str, body: object = None, token: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=waiting.left_s()) as answer:
        return json.loads(answer.read())


def until(condition: Callable[[], bool]) -> None:
    code = condition.__code__
    waiting.until(condition, f"what {Path(code.co_filename).name}:{code.co_firstlineno} waits for")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_until(gateway: subprocess.Popen[str], words: str, n_lines: int) -> None:
    """Reads standard error until so many lines hold the words."""
    assert gateway.stderr is not None
    for line in gateway.stderr:
        n_lines -= words in line
        if n_lines == 0:
            return
    raise AssertionError(f"it ended before it said {words!r}")


@dataclass
class Workers:
    """A gateway with several workers in front of one engine, with the admin token "secret"."""

    process: subprocess.Popen[str]
    listen: str
    admin: str
    replica: str  # the engine's name

    @property
    def pids(self) -> list[int]:
        return children(self.process.pid)

    def chat(self, key: str | None = None) -> Any:
        """By a connection of its own."""
        return ask(f"{self.listen}/v1/chat/completions", {"model": "m"}, key)

    def call(self, path: str, body: object = None) -> Any:
        return ask(f"{self.admin}/admin/{path}", body, "secret")

    def ready(self) -> set[int]:
        """What the workers say of the replicas that are ready."""
        return {ask(f"{self.listen}/health")["ready_replicas"] for _ in range(20)}


def begin(process: subprocess.Popen[str]) -> Any:
    """The first line of standard output, decoded."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def gateway_argv(*more: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "gateway", "--listen", "127.0.0.1:0", "--json", *more]


@contextlib.contextmanager
def workers(folder: Path, n_workers: int, *more: str) -> Iterator[Workers]:
    """It serves, and all its workers know the engine."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text("secret")
    with running([sys.executable, "-c", FAKE]) as engine:
        engine_url = f"http://127.0.0.1:{begin(engine)}"
        argv = gateway_argv("--workers", str(n_workers), "--upstream", f"m={engine_url}", "--admin", "127.0.0.1:0")
        with running([*argv, "--admin-token-file", str(token), *more]) as process:
            addresses = begin(process)
            gateway = Workers(process, addresses["listen"], addresses["admin"], "upstream-1")
            until(lambda: gateway.ready() == {1})
            yield gateway
