"""What traces and the access log cost a request: `python benchmarks/gateway_tracing.py [--quick] [--no-native]`.

Gateways that differ in this alone stand before one mock engine and get the same load in turn, so that a noisy machine
is noisy for all. CPU is the scheduler's own count of all threads, the sending of spans and the later work of the ledger
included; the collector is another process. What is more is compared with the smallest request, answered at once, and
with a stream of 50 events, whose own cost differs more from round to round than all of this does: so it is measured
without traces only. The bar is that of streams.

Exit codes: 0, with --check 1 when a bar does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import uvloop
from gateway import ROOT, compile_gateway, free_port, running
from gateway_load import Load, process_tree, run_load

KEY = "sk-bench"
RATIO_MAX = 1.03
SETTLE_S = 1.5  # the ledger's thread has its turn every 0.5 s, and unfolds rows when it is calm


def settings(name: str, collector: int, folder: Path) -> dict[str, object]:
    log = {"access_log": str(folder / f"{name}.log")}
    endpoint = f"http://127.0.0.1:{collector}"
    return {
        "off": {},
        "off again": {},
        "traces 1.0": {"traces": {"endpoint": endpoint}},
        "traces 0.1": {"traces": {"endpoint": endpoint, "sample": 0.1}},
        "access log": log,
        "all": {"traces": {"endpoint": endpoint}, **log},
    }[name]  # type: ignore[return-value]


NAMES = ("off", "off again", "traces 1.0", "traces 0.1", "access log", "all")


def start(stack: ExitStack, folder: Path, name: str, upstream: int, collector: int) -> tuple[int, int]:
    """The gateway's process and port."""
    port = free_port()
    (folder / "token").write_text("token")
    (folder / "token").chmod(0o600)
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{free_port()}",
        "admin_token_file": str(folder / "token"),
        "models": [{"name": "m"}],
        "auth": "keys",
        "key_hashes": [hashlib.sha256(KEY.encode()).hexdigest()],
        "store": str(folder / f"{name}.db"),
        "upstreams": [{"url": f"http://127.0.0.1:{upstream}", "model": "m"}],
        **settings(name, collector, folder),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "penstock.gateway", str(path)]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    return stack.enter_context(running(argv, port, folder, environment)), port


def spent_s(pid: int) -> float:
    """CPU of a process tree's threads. https://docs.kernel.org/scheduler/sched-stats.html#proc-pid-schedstat"""
    files = [file for each in process_tree(pid) for file in Path(f"/proc/{each}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(pid: int, port: int, n_requests: int, streams: bool) -> float:
    """Microseconds of CPU a request."""
    before = spent_s(pid)
    outcome = uvloop.run(run_load(Load(port, n_requests, 64 if streams else 32, streams, KEY)))
    if outcome.n_errors:
        sys.exit(f"{outcome.n_errors} requests failed")
    time.sleep(SETTLE_S)
    return (spent_s(pid) - before) / n_requests * 1e6


def run(options: argparse.Namespace) -> bool:
    samples: dict[str, list[float]] = {}
    streams: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        upstream, collector = free_port(), free_port()
        mock = str(Path(__file__).with_name("gateway_mock.py"))
        for port in (upstream, collector):
            stack.enter_context(running([sys.executable, mock, str(port)], port, folder))
        gateways = {name: start(stack, folder, name, upstream, collector) for name in NAMES}
        time.sleep(2)
        for pid, port in gateways.values():
            measure(pid, port, 1000, streams=False)
        for number in range(options.rounds):
            names = list(gateways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                samples.setdefault(name, []).append(measure(*gateways[name], options.requests, streams=False))
            streams.append(measure(*gateways["off"], options.streams, streams=True))
    return report(samples, statistics.median(streams))


def report(samples: dict[str, list[float]], stream_us: float) -> bool:
    """Prints all figures; whether the bar holds for each."""
    holds = True
    print(f"{'':14}{'us/request':>12}{'more us':>10}{'a request':>12}{'a stream of':>14} {stream_us:.0f} us")
    for name, values in samples.items():
        more_us = statistics.median(mine - theirs for mine, theirs in zip(values, samples["off"], strict=True))
        median_us = statistics.median(values)
        of_request, of_stream = 1 + more_us / statistics.median(samples["off"]), 1 + more_us / stream_us
        print(f"{name:14}{median_us:12.1f}{more_us:10.1f}{of_request:11.2f}x{of_stream:13.3f}x")
        holds = holds and of_stream <= RATIO_MAX
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description="What traces and the access log cost a request.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8000, help="a round")
    parser.add_argument("--streams", type=int, default=640, help="a round")
    parser.add_argument("--quick", action="store_true", help="2 short rounds")
    parser.add_argument("--native", action=argparse.BooleanOptionalAction, default=True, help="compile the gateway")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar does not hold")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.streams = 2, 3000, 192
    if options.native:
        compile_gateway(ROOT)
    else:
        os.environ["PENSTOCK_NATIVE"] = "0"
    return 1 if not run(options) and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
