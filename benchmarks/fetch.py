"""How near `penstock fetch` comes to the slower of network and disk, at one core.

    python benchmarks/fetch.py [--gbits 1 2.5 10 0] [--gib 1 2 4 4] [--rounds 3] [--folder /tmp]

A hub on loopback has eight files of random bytes in memory and paces what it sends to so many Gbit/s (0: as fast as it
can), on core 0. On core 1, in turn: the same bytes from the same server to nowhere, by eight plain connections
(network); as many bytes written to the folder's disk and synced (disk); and `penstock fetch` into that folder. `fetch`
is its own rate from the first file to the last, which it keeps for the next estimate; `command` includes its start.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME, COMMIT, N_FILES = "bench/model", "c1899de289a04d12100db370d81485cdf75e47ca", 8
_PIECE_BYTES = 256 << 10
_BLOCK_BYTES = 1 << 20


class PacedHub(ThreadingHTTPServer):
    """Eight files by name, sent at `bytes_per_s` over all connections; 0 is without a limit."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path for path in sorted(folder.iterdir())}
        self.hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        self._bytes_per_s, self._lock, self._next_at = bytes_per_s, threading.Lock(), 0.0

    def wait(self, n_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            self._next_at = max(self._next_at, time.monotonic() - 0.01) + n_bytes / self._bytes_per_s
            at = self._next_at
        time.sleep(max(0.0, at - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    server: PacedHub

    def do_GET(self) -> None:
        if "/resolve/" not in self.path:
            rows = [
                {"rfilename": name, "size": path.stat().st_size, "lfs": _lfs(path, self.server.hashes[name])}
                for name, path in self.server.files.items()
            ]
            self._head(body := json.dumps({"id": NAME, "sha": COMMIT, "siblings": rows}).encode())
            self.wfile.write(body)
            return
        path = self.server.files[self.path.rpartition("/")[2]]
        begin = int((re.match(r"bytes=(\d+)-", self.headers.get("Range") or "") or (0, 0))[1])
        size = path.stat().st_size
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(size - begin))
        self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        self.end_headers()
        with path.open("rb") as stream:
            while begin < size:
                self.server.wait(min(_PIECE_BYTES, size - begin))
                begin += os.sendfile(self.connection.fileno(), stream.fileno(), begin, _PIECE_BYTES)

    def _head(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _lfs(path: Path, digest: str) -> dict[str, object]:
    return {"sha256": digest, "size": path.stat().st_size, "pointerSize": 130}


def serve(folder: str, gbits: float) -> None:
    server = PacedHub(Path(folder), gbits * 1e9 / 8)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def drain(port: int) -> None:
    """All files to nowhere; prints bytes per second."""

    def take(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", f"/{NAME}/resolve/{COMMIT}/m-{number}.safetensors")
        answer, buffer = connection.getresponse(), bytearray(_BLOCK_BYTES)
        while n_bytes := answer.readinto(buffer):
            counts[number] += n_bytes

    counts, began = [0] * N_FILES, time.monotonic()
    threads = [threading.Thread(target=take, args=(number,)) for number in range(N_FILES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(counts) / (time.monotonic() - began))


def fill(folder: str, n_bytes: int) -> None:
    """As many bytes in as many files, each synced; prints bytes per second."""
    block, began = os.urandom(_BLOCK_BYTES), time.monotonic()
    for number in range(N_FILES):
        with (Path(folder) / f"fill-{number}").open("wb", buffering=0) as stream:
            for _ in range(n_bytes // N_FILES // _BLOCK_BYTES):
                stream.write(block)
            os.fsync(stream.fileno())
    print(n_bytes / (time.monotonic() - began))


def on_core(core: int, *argv: str) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, *argv]


def one_round(port: int, folder: Path, n_bytes: int) -> dict[str, float]:
    """Bytes per second of each way. What one has written is removed and synced before the next."""
    rates = {}
    own = str(Path(__file__).resolve())
    for name, argv in (("network", ["drain", str(port)]), ("disk", ["fill", str(folder / "fill"), str(n_bytes)])):
        (folder / "fill").mkdir(exist_ok=True)
        rates[name] = float(subprocess.run(on_core(1, own, *argv), check=True, capture_output=True, text=True).stdout)
        shutil.rmtree(folder / "fill")
        os.sync()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "PENSTOCK_HOME": str(folder / "home")}
    environment |= {"HF_HUB_CACHE": str(folder / "hub"), "no_proxy": "127.0.0.1"}
    began = time.monotonic()
    subprocess.run(on_core(1, "-m", "penstock", "fetch", NAME), check=True, env=environment, capture_output=True)
    rates["command"] = n_bytes / (time.monotonic() - began)
    rates["fetch"] = json.loads((folder / "home" / "fetch_rates.json").read_bytes())[environment["HF_ENDPOINT"]]
    shutil.rmtree(folder / "hub")
    os.sync()
    return rates


def measure(gbits: float, gib: float, n_rounds: int, folder: Path) -> None:
    n_bytes = int(gib * 1024) // N_FILES * N_FILES << 20
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for number in range(N_FILES):
            with (Path(memory) / f"m-{number}.safetensors").open("wb") as stream:
                for _ in range(n_bytes // N_FILES >> 20):
                    stream.write(os.urandom(1 << 20))
        argv = on_core(0, str(Path(__file__).resolve()), "serve", memory, str(gbits))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            try:
                rows = [one_round(port, folder, n_bytes) for _ in range(n_rounds)]
            finally:
                server.kill()
    shares = [row["fetch"] / min(row["network"], row["disk"]) for row in rows]
    words = [f"{name} {statistics.median(row[name] for row in rows) / 1e6:.0f}" for name in rows[0]]
    spread = f"{min(shares):.2f} to {max(shares):.2f}"
    pace = f"{gbits:g} Gbit/s" if gbits else "no pace"
    print(f"{pace}: MB/s {', '.join(words)}; share {statistics.median(shares):.2f} ({spread})", flush=True)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "drain", "fill"):
        verb, *rest = sys.argv[1:]
        {"serve": lambda: serve(rest[0], float(rest[1])), "drain": lambda: drain(int(rest[0]))}.get(
            verb, lambda: fill(rest[0], int(rest[1]))
        )()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbits", type=float, nargs="+", default=[1, 2.5, 10, 0])
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 2, 4, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for gbits, gib in zip(options.gbits, options.gib, strict=True):
            measure(gbits, gib, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
