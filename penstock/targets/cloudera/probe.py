"""The script that `doctor` runs in two jobs, or workers, and an application of a project. The workbench runs it inside
a Python kernel, as start.py: standard library only, any Python of a runtime.

The application launches the workers as it would those of a deployment. Each pod listens, tries to reach the others, and
writes what it found into the project. The application streams, and job-0 writes a beat ten times a second, which shows
how a stop ends it.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FACTS: dict[str, Any] = {}

PART, FOLDER = os.environ["PENSTOCK_PROBE"], Path(FACTS["folder"])
PARTS, PORTS = ("application", "job-0", "job-1"), [int(port) for port in FACTS["ports"]]
ADDRESS = os.environ.get("CDSW_IP_ADDRESS", "")
CONNECT_S, LOOK_S, BLOCK_BYTES = 3.0, 0.3, 4 * 2**20
BEATS = """
import signal, sys, time
out = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGTERM, lambda *_: out.write("SIGTERM\\n"))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    out.write("beat\\n")
    time.sleep(0.1)
"""


def listen() -> list[int]:
    """The ports on which this pod answers with its name."""
    served = []
    for port in PORTS:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((ADDRESS, port))
        except OSError:
            continue
        server.listen()
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        served.append(port)
    return served


def answer(server: socket.socket) -> None:
    while True:
        client, _ = server.accept()
        with client:
            client.sendall(f"{FACTS['id']} {PART}\n".encode())


def reach(other: str, note: dict[str, Any]) -> dict[str, Any]:
    """By port what came back: seconds until connected, or why not."""
    answers: dict[str, Any] = {}
    for port in note["ports"]:
        began = time.monotonic()
        try:
            with socket.create_connection((note["address"], port), CONNECT_S) as sock:
                took_s = time.monotonic() - began
                word = sock.makefile().readline().strip()
        except OSError as exc:
            answers[str(port)] = "no answer" if isinstance(exc, socket.timeout) else exc.strerror or str(exc)
            continue
        answers[str(port)] = took_s if word == f"{FACTS['id']} {other}" else "another program answers"
    return answers


def write_sample() -> None:
    """Bytes that another pod reads: what the project's file system gives to a first reader."""
    new = FOLDER / "sample.new"
    with new.open("wb") as stream:
        for _ in range(int(FACTS["sample_bytes"]) // BLOCK_BYTES):
            stream.write(os.urandom(BLOCK_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(FOLDER / "sample")


def read_sample() -> float | None:
    """Bytes per second of the other pod's sample, which is dropped from this machine's page cache first."""
    try:
        with (FOLDER / "sample").open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began, n_bytes = time.monotonic(), 0
            while piece := stream.read(BLOCK_BYTES):
                n_bytes += len(piece)
    except OSError:
        return None
    return n_bytes / max(time.monotonic() - began, 1e-6)


def weights_bytes() -> int:
    """What is in the project of the model's files."""
    folder = Path(FACTS["weights"]).expanduser()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) if folder.exists() else ()
    return sum(path.stat().st_size for path in files)


def note(facts: dict[str, Any]) -> None:
    new = FOLDER / f"{PART}.new"
    new.write_text(json.dumps(facts))
    new.rename(FOLDER / f"{PART}.json")


def others() -> dict[str, dict[str, Any]]:
    present = {path.name for path in FOLDER.iterdir()}  # a listing asks the server, where NFS keeps what is absent
    notes = {}
    for part in PARTS:
        if part != PART and f"{part}.json" in present:
            notes[part] = json.loads((FOLDER / f"{part}.json").read_text())
    return notes


class Streams(BaseHTTPRequestHandler):
    """/stream?seconds=40&every=1: events of the given pace, the last one "end"."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path != "/stream":
            self._start("application/json", ("content-length", "2"))
            self.wfile.write(b"{}")
            return
        query = parse_qs(parts.query)
        seconds, every_s = float(query["seconds"][0]), float(query["every"][0])
        self._start("text/event-stream", ("transfer-encoding", "chunked"))
        end = time.monotonic() + seconds
        try:
            self._event("begin")
            while (left_s := end - time.monotonic()) > 0:
                time.sleep(min(every_s, left_s))
                self._event("end" if time.monotonic() >= end else "more")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _start(self, content: str, length: tuple[str, str]) -> None:
        self.send_response(200)
        self.send_header("content-type", content)
        self.send_header(*length)
        self.end_headers()

    def _event(self, word: str) -> None:
        data = f"data: {word}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    deadline = time.monotonic() + float(FACTS["life_s"])
    facts: dict[str, Any] = {
        "address": ADDRESS,
        "ports": listen(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total,
        "free_bytes": shutil.disk_usage(FACTS["folder"]).free,
        "local_free_bytes": shutil.disk_usage("/tmp").free,
        "weights_bytes": weights_bytes(),
        "python": sys.version.split()[0],
        "reached": {},
    }
    launcher: Any = None
    if PART == "application":
        if FACTS["workers"]:
            launcher = runpy.run_path(str(FOLDER / "launcher.py"))["Launcher"](FOLDER, print)
        server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["CDSW_APP_PORT"])), Streams)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if PART == "job-0":
        write_sample()
        argv = [sys.executable, "-c", BEATS, str(FOLDER / "beats"), str(FACTS["life_s"])]
        subprocess.Popen(argv, start_new_session=True)  # as penstock's node below a pod's script
    note(facts)
    while time.monotonic() < deadline and not (FOLDER / "end").exists():
        if launcher is not None:
            launcher.step()
        for other, theirs in others().items():
            if other not in facts["reached"]:
                facts["reached"][other] = reach(other, theirs)
                if PART == "job-1" and other == "job-0":
                    facts["read_bytes_per_s"] = read_sample()
                note(facts)
        time.sleep(LOOK_S)


main()
