"""Fake engines for a test: one in a thread of this process, or one as a separate process.

with in_thread(Options(model="m", ttft_s=0)) as engine:
    ...  # engine.url answers; engine.seen holds the requests as they arrived

with as_process("--model", "m", "--child") as engine:
    ...  # engine.url answers; engine.process is its Popen, engine.log() what it printed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.testing.fake_engine.metrics import Metrics
from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import Request
from penstock.testing.fake_engine.server import Connection, Engine
from penstock.testing.fake_engine.startup_log import Line

_SEEN_MAX = 1000
_START_S = 20.0
_URL = re.compile(r"Starting vLLM server on (http://\S+)")


class InThread:
    """A fake engine in a thread. Its lists may grow while you look at them."""

    def __init__(self, options: Options) -> None:
        self.url = ""
        self.lines: list[str] = []
        self.has_crashed = False
        self._loop = asyncio.new_event_loop()
        self._engine = Engine(options, self._log, self._crash, keeps=_SEEN_MAX)
        self._server: asyncio.Server | None = None

    @property
    def seen(self) -> list[Request]:
        """Every request so far, oldest first: method, path, headers (lower case) and body as they came."""
        return list(self._engine.seen)

    @property
    def metrics(self) -> Metrics:
        return self._engine.metrics

    def crash(self) -> None:
        """Drops every connection and refuses new ones, as a killed process does. Returns when it is done."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._crash)
        self._loop.call_soon_threadsafe(self._loop.call_soon, done.set)  # after the transports have closed
        done.wait(_START_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def serve(self, listens: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        options = self._engine.options
        connect = self._loop.create_server(lambda: Connection(self._engine), options.host, options.port, backlog=1024)
        self._server = self._loop.run_until_complete(connect)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        listens.set()
        self._loop.run_forever()
        self._server.close()
        self._engine.hang_up()
        self._loop.run_until_complete(self._engine.stop(0))
        self._loop.run_until_complete(asyncio.sleep(0))  # the transports close one turn later
        self._loop.close()

    def _log(self, line: Line) -> None:
        self.lines.append(line.text)

    def _crash(self) -> None:
        self.has_crashed = True
        if self._server is not None:
            self._server.close()
        self._engine.hang_up()


@contextlib.contextmanager
def in_thread(options: Options) -> Iterator[InThread]:
    """A fake engine that listens, for as long as the block runs. Flags about loading and signals mean nothing here."""
    engine = InThread(options)
    listens = threading.Event()
    thread = threading.Thread(target=engine.serve, args=(listens,), name="fake engine", daemon=True)
    thread.start()
    assert listens.wait(_START_S), "the fake engine did not start"
    try:
        yield engine
    finally:
        engine.stop()
        thread.join(_START_S)


class AsProcess:
    def __init__(self, flags: tuple[str, ...], log_file: Path) -> None:
        self.url = ""
        self._log_file = log_file
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.testing.fake_engine", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log_file.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = _START_S) -> str:
        """Waits until the log contains `text` and returns the log. AssertionError when that does not happen."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.log()}"
            assert self.process.poll() is None or text in self.log(), f"it ended without {text!r}:\n{self.log()}"
            time.sleep(0.01)
        return self.log()

    def wait_until_ready(self) -> None:
        match = _URL.search(self.wait_for("Application startup complete."))
        self.url = match.group(1) if match else ""

    def kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_START_S)


@contextlib.contextmanager
def as_process(*flags: str, is_ready: bool = True) -> Iterator[AsProcess]:
    """A fake engine as a process, ready unless `is_ready` is False. Without --port it takes a free one."""
    with tempfile.TemporaryDirectory(prefix="fake-engine-") as folder:
        engine = AsProcess(flags, Path(folder) / "log")
        try:
            if is_ready:
                engine.wait_until_ready()
            yield engine
        finally:
            engine.kill_all()
