"""What a scrape of /metrics/engines costs the gateway: CPU seconds of its process for 100 replicas of vLLM.

    python benchmarks/engine_scrape.py [--replicas 100] [--scrapes 10]

The engines are one process that answers with a page of vLLM 0.32 (tests/golden), its histograms with all buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "tests/golden/vllm-0.32.0/metrics.txt"
SERVER = """
import asyncio, sys
page = open(sys.argv[1], "rb").read()
answer = b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(page) + page
class Engine(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data): self.transport.write(answer)
async def main():
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(int(sys.argv[2]))]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def whole_page() -> bytes:
    """The recorded page with the buckets that were left out of it, some 600 lines."""
    text, lines = GOLDEN.read_text("utf-8"), []
    for line in text.splitlines():
        match = re.match(r"(vllm:\w+)_count\{(.*)\} ", line)
        if match and f"{match[1]}_bucket" not in text:
            edges = [f"{0.001 * 2**power:g}" for power in range(28)]
            bucket = f'{match[1]}_bucket{{engine="0",model_name="demo",le='
            lines += [f'{bucket}"{edge}"}} 10.0' for edge in (*edges, "+Inf")]
        lines.append(line)
    return "\n".join((*lines, "")).encode()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--scrapes", type=int, default=10)
    options = parser.parse_args()
    page = whole_page()
    file = Path(f"/tmp/penstock-page-{os.getpid()}")
    file.write_bytes(page)
    engines = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(file), str(options.replicas)], stdout=subprocess.PIPE, text=True
    )
    assert engines.stdout is not None
    ports = engines.stdout.readline().split()
    file.unlink()
    upstreams = [part for port in ports for part in ("--upstream", f"demo=http://127.0.0.1:{port}")]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listen = f"127.0.0.1:{sock.getsockname()[1]}"
    argv = [sys.executable, "-m", "penstock", "gateway", "--json", "--listen", listen, *upstreams]
    gateway = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert gateway.stdout is not None
        url = json.loads(gateway.stdout.readline())["listen"]
        time.sleep(3)

        def measure(path: str) -> tuple[float, float, int]:
            began, cpu, n_bytes = time.monotonic(), cpu_s(gateway.pid), 0
            for _ in range(options.scrapes):
                with urllib.request.urlopen(url + path) as answer:
                    n_bytes = len(answer.read())
                time.sleep(1.2)  # the page is kept for a second
            took_s = time.monotonic() - began - 1.2 * options.scrapes
            return (cpu_s(gateway.pid) - cpu) / options.scrapes, took_s / options.scrapes, n_bytes

        idle_s, _, _ = measure("/health")  # its probes of the engines, once a second
        busy_s, took_s, n_bytes = measure("/metrics/engines")
        facts = {
            "replicas": options.replicas,
            "lines_per_page": page.count(b"\n"),
            "bytes_per_page": len(page),
            "bytes_of_the_answer": n_bytes,
            "cpu_s_per_scrape": round(busy_s - idle_s, 4),
            "wall_s_per_scrape": round(took_s, 3),
        }
        print(json.dumps(facts, indent=1))
    finally:
        for process in (gateway, engines):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
