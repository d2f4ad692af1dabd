"""What `penstock top` costs while it is watched: its CPU time as a share of one core.

    python benchmarks/top_cost.py [--seconds 20] [--replicas 8] [--columns 160] [--rows 40] [--clients 4]

Starts a deployment with fake engines in a home of its own and clients that stream, then `penstock top` in a
pseudo-terminal. The CPU time of its process is read from the kernel after 4 s and again `--seconds` later. Prints JSON;
exits 1 above 2%, the bar. `start_cpu_s`: until the first reading, most of it imports.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from penstock.wire.client import Client

_BAR = 0.02
_WARM_S = 4.0
_FILE = """
name: top-cost
model: penstock-demo
replicas: {replicas}
engine: {{kind: fake, args: {{tokens-per-s: 40}}}}
gateway: {{port: 0, auth: none}}
"""


def penstock(env: dict[str, str], *words: str) -> str:
    argv = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def deployment(folder: Path, env: dict[str, str], n_replicas: int) -> Iterator[str]:
    """The URL of a gateway with that many fake replicas, until the block ends."""
    file = folder / "top-cost.yaml"
    file.write_text(_FILE.format(replicas=n_replicas), "utf-8")
    try:
        penstock(env, "up", str(file))
        yield str(json.loads(penstock(env, "status", "top-cost", "--json"))["url"])
    finally:
        penstock(env, "down", "top-cost", "--now")


@contextlib.contextmanager
def clients(url: str, n_clients: int) -> Iterator[None]:
    """So many clients that ask for one stream after another."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            for _ in Client(url).stream_chat([{"role": "user", "content": "hello"}], max_tokens=60):
                pass

    threads = [threading.Thread(target=ask) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def cpu_s(pid: int) -> float:
    """User and system time of a process (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(env: dict[str, str], rows: int, columns: int, seconds: float) -> dict[str, float]:
    """CPU seconds of `penstock top` in a terminal of that size."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "penstock", "top"], env | {"TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    n_bytes = 0

    def drain() -> None:
        nonlocal n_bytes
        with contextlib.suppress(OSError):  # its end
            while data := os.read(terminal, 65536):
                n_bytes += len(data)

    threading.Thread(target=drain, daemon=True).start()
    try:
        time.sleep(_WARM_S)
        began, before, n_before = time.monotonic(), cpu_s(pid), n_bytes
        time.sleep(seconds)
        used, wall = cpu_s(pid) - before, time.monotonic() - began
        return {
            "share": round(used / wall, 4), "cpu_s": round(used, 3), "wall_s": round(wall, 2),
            "start_cpu_s": round(before, 3), "bytes_per_s": round((n_bytes - n_before) / wall),
        }  # fmt: skip
    finally:
        os.write(terminal, b"q")
        os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    for name, default in (("replicas", 8), ("columns", 160), ("rows", 40), ("clients", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = {**os.environ, "PENSTOCK_HOME": str(folder / "home")}
        url = stack.enter_context(deployment(folder, env, options.replicas))
        stack.enter_context(clients(url, options.clients))
        figures = watch(env, options.rows, options.columns, options.seconds)
    print(json.dumps({"replicas": options.replicas, "columns": options.columns, **figures}))
    return int(figures["share"] > _BAR)


if __name__ == "__main__":
    sys.exit(main())
