"""What the live page's readings cost a gateway that serves nothing: CPU of its processes, for three replicas.

    python benchmarks/live_cost.py [--workers 2] [--replicas 3] [--seconds 30]

Three gateways run next to each other: one that gathers no readings, one that nobody watches, one with a stream open.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

CODE = """
import sys
from penstock.gateway.live.stream import LiveFeed
if sys.argv.pop(1) == "without":
    LiveFeed.start = lambda self: None
from penstock.cli.main import main
sys.exit(main())
"""


def busy_s(pid: int) -> float:
    """CPU seconds so far, from the scheduler's nanoseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text("utf-8").split()[0]) / 1e9


def processes_of(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split())]


def announce(admin: str, n_replicas: int) -> None:
    load = {"running": 1, "kv_use": 0.5, "prompt_tokens": 1000, "output_tokens": 1000}
    gpus = [{"index": n, "uuid": f"GPU-{n}", "utilization": 0.5, "power_watts": 300} for n in range(8)]
    for n in range(n_replicas):
        facts = {"replica": f"{n}", "model": "m", "state": "loading", "lease_s": 3600, "load": load}
        body = json.dumps(facts | {"machines": [{"host": "h", "gpus": gpus}]}).encode()
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{admin}/admin/announce", body, headers), timeout=5).close()


def watch(admin: str) -> None:
    connection = http.client.HTTPConnection(admin.removeprefix("http://"), timeout=60)
    connection.request("GET", "/dashboard/live", headers={"authorization": "Bearer secret"})
    response = connection.getresponse()
    while response.read1(65536):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    gateways: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text("secret", "utf-8")
        try:
            for kind in ("without", "nobody watches", "one watches"):
                argv = [
                    *("gateway", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--json"),
                    "--admin-token-file",
                ]
                argv += [str(token), "--workers", str(options.workers), "--upstream", "m=http://127.0.0.1:9"]
                command = [sys.executable, "-c", CODE, kind, *argv]
                gateway = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                gateways[kind] = gateway
                assert gateway.stdout is not None
                admin = json.loads(gateway.stdout.readline())["admin"]
                announce(admin, options.replicas)
                if kind == "one watches":
                    threading.Thread(target=watch, args=(admin,), daemon=True).start()
            time.sleep(3)
            pids = {kind: processes_of(gateway.pid) for kind, gateway in gateways.items()}
            before = {kind: [busy_s(pid) for pid in each] for kind, each in pids.items()}
            time.sleep(options.seconds)
            for kind, each in pids.items():
                shares = [(busy_s(pid) - s) / options.seconds for pid, s in zip(each, before[kind], strict=True)]
                print(
                    f"{kind:15} of a core: parent {shares[0]:.3%}, workers", *(f"{share:.3%}" for share in shares[1:])
                )
        finally:
            for gateway in gateways.values():
                gateway.terminate()
            for gateway in gateways.values():
                gateway.wait()


if __name__ == "__main__":
    main()
