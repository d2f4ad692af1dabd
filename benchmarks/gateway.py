"""What the gateway costs next to nginx and vllm-router, on one mock upstream: `python benchmarks/gateway.py [--quick]`.

`--against DIR` adds another checkout of penstock (its own .venv is used when it has one) to the same run.

Every round sends the same load through each contender in turn, so that a noisy machine is noisy for all. CPU is the
kernel's own accounting of each contender's process tree; a chunk's cost is that of a stream, less nothing, divided by
its events. Added latency is over the upstream asked directly, at concurrency 1. nginx comes from Debian's nginx-light,
vllm-router from PyPI; what is absent is left out with a line that says so.

Exit codes: 0 every bar holds, 1 one does not (with --check; else always 0).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from gateway_load import Load, Outcome, cpu_s, process_tree, rss_mb, run_load

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0
MAX_FILES = 20_000

# (what, against, at most). figures.md E.1 and the issue of the gateway.
BARS = (
    ("request", "before", 1.05),
    ("chunk", "before", 1.05),
    ("request", "vllm-router", 0.75),
    ("request", "nginx", 2.0),
    ("chunk", "vllm-router", 0.85),
    ("chunk", "nginx", 1.3),
)
ADDED_P50_MS_MAX, ADDED_P99_MS_MAX, RSS_MB_MAX = 0.2, 1.0, 150.0

NGINX_CONFIG = """
daemon off; master_process on; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 4096; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 100000000;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; {buffering} }}
  }}
}}
"""


@dataclass
class Contender:
    """A proxy that runs. `samples`: microseconds of CPU by what was sent; latencies in ms."""

    name: str
    pid: int
    port: int
    key: str | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    rss_mb: float | None = None
    n_errors: int = 0

    def cost(self, what: str) -> float:
        return statistics.median(self.samples[what])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def running(argv: list[str], port: int, folder: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """The pid of a program that listens on `port`; its whole tree is ended with the context."""
    with (folder / f"{Path(argv[0]).name}-{port}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | (environment or {}))
        try:
            wait_for(port, process, Path(log.name))
            yield process.pid
        finally:
            tree = process_tree(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                for pid in tree:
                    os.kill(pid, signal.SIGKILL)
                process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"{process.args!r} does not listen:\n{log.read_text(errors='replace')[-2000:]}")


def start_nginx(stack: ExitStack, folder: Path, upstream: int, streams: bool) -> Contender | None:
    """Plain proxy_pass; for streams without buffering, or nginx would hold events back."""
    path = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if path is None:
        print("nginx: not installed (apt-get install nginx-light), left out")
        return None
    port = free_port()
    config = folder / f"nginx-{port}.conf"
    inside = folder / f"nginx-{port}"
    inside.mkdir()
    buffering = "proxy_buffering off;" if streams else ""
    config.write_text(NGINX_CONFIG.format(folder=inside, upstream=upstream, port=port, buffering=buffering))
    return Contender("nginx", stack.enter_context(running([path, "-c", str(config)], port, folder)), port)


def start_vllm_router(stack: ExitStack, folder: Path, upstream: int, program: str | None) -> Contender | None:
    path = program or shutil.which("vllm-router")
    if path is None:
        print("vllm-router: not on PATH (pip install vllm-router, or --vllm-router PATH), left out")
        return None
    port = free_port()
    argv = [path, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{upstream}"]
    argv += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "warning"]
    return Contender("vllm-router", stack.enter_context(running(argv, port, folder)), port)


def start_penstock(
    stack: ExitStack,
    folder: Path,
    upstream: int,
    options: argparse.Namespace,
    name: str = "penstock",
    root: Path = ROOT,
) -> Contender:
    port = free_port()
    python = python_of(root)
    argv = [python, "-m", "penstock", "gateway", "--listen", f"127.0.0.1:{port}"]
    argv += [
        "--upstream",
        f"m=http://127.0.0.1:{upstream}",
        "--policy",
        "least-load",
        "--workers",
        str(options.workers),
    ]
    environment = {"PYTHONPATH": str(root)}
    key = None
    if options.auth == "keys":
        store = str(folder / f"{name}.db")
        make = [python, "-m", "penstock", "keys", "create", "--name", "bench", "--store", store]
        key = subprocess.run(make, env=os.environ | environment, check=True, capture_output=True, text=True).stdout
        argv += ["--auth", "keys", "--store", store]
    pid = stack.enter_context(running(argv, port, folder, environment))
    return Contender(name, pid, port, key.strip() if key else None)


def python_of(root: Path) -> str:
    own = root / ".venv" / "bin" / "python"
    return str(own) if root != ROOT and own.exists() else sys.executable


def send(contender: Contender, n_requests: int, concurrency: int, streams: bool) -> Outcome:
    load = Load(contender.port, n_requests, concurrency, streams, contender.key)
    outcome: Outcome = uvloop.run(run_load(load))
    contender.n_errors += outcome.n_errors
    return outcome


def measure_cpu(contender: Contender, options: argparse.Namespace, streams: bool) -> None:
    """One round: CPU per request, or per streamed event, in microseconds."""
    n_requests = options.streams if streams else options.requests
    before = cpu_s(contender.pid)
    outcome = send(contender, n_requests, 64 if streams else 32, streams)
    spent_s = cpu_s(contender.pid) - before
    n_units = outcome.n_chunks if streams else n_requests
    contender.samples.setdefault("chunk" if streams else "request", []).append(spent_s / max(1, n_units) * 1e6)


def measure_latency(contender: Contender, options: argparse.Namespace) -> None:
    outcome = send(contender, options.latencies, 1, streams=False)
    contender.p50_ms.append(outcome.latency_ms(0.5))
    contender.p99_ms.append(outcome.latency_ms(0.99))


def measure_rss(contender: Contender, n_streams: int) -> None:
    """Memory in the middle of `n_streams` open streams."""

    async def hold() -> None:
        load = Load(contender.port, n_streams, n_streams, True, contender.key)
        task = asyncio.create_task(run_load(load))
        most = 0.0
        while not task.done():
            await asyncio.sleep(0.2)
            most = max(most, rss_mb(contender.pid))
        contender.n_errors += task.result().n_errors
        contender.rss_mb = most

    uvloop.run(hold())


def report(contenders: dict[str, list[Contender]]) -> bool:
    """Prints all figures; whether every bar that could be measured holds."""
    requests = {contender.name: contender for contender in contenders["request"]}
    chunks = {contender.name: contender for contender in contenders["chunk"]}
    direct = requests["direct"]
    print(f"{'':14}{'us/request':>12}{'us/chunk':>12}{'p50 ms':>10}{'p99 ms':>10}{'RSS MB':>10}{'errors':>8}")
    for name, contender in requests.items():
        other = chunks[name]
        costs = "".join(
            f"{row.cost(what):12.1f}" if what in row.samples else f"{'-':>12}"
            for what, row in (("request", contender), ("chunk", other))
        )
        rss = "-" if other.rss_mb is None else f"{other.rss_mb:.0f}"
        p50, p99 = statistics.median(contender.p50_ms), statistics.median(contender.p99_ms)
        n_errors = contender.n_errors + (other.n_errors if other is not contender else 0)
        print(f"{name:14}{costs}{p50:10.3f}{p99:10.3f}{rss:>10}{n_errors:8}")
    ours = {"request": requests["penstock"], "chunk": chunks["penstock"]}
    rows = [
        (f"CPU per {what} / {name}", ours[what].cost(what) / contenders_of[name].cost(what), bar, "x")
        for what, name, bar in BARS
        if name in (contenders_of := requests if what == "request" else chunks)
    ]
    for word, bar in (("p50", ADDED_P50_MS_MAX), ("p99", ADDED_P99_MS_MAX)):
        # Of each round by itself, so that a slow round of the machine is not ours.
        ours_ms, direct_ms = (getattr(row, f"{word}_ms") for row in (ours["request"], direct))
        added = statistics.median(a - b for a, b in zip(ours_ms, direct_ms, strict=True))
        rows.append((f"added {word} at concurrency 1", added, bar, " ms"))
    rows.append(("memory with open streams", ours["chunk"].rss_mb or 0.0, RSS_MB_MAX, " MB"))
    for what, value, bar, unit in rows:
        print(f"{what:32}{value:8.2f}{unit:4} at most {bar:g}{unit:4} {'holds' if value <= bar else 'DOES NOT HOLD'}")
    return all(value <= bar for _, value, bar, _ in rows) and not sum(row.n_errors for row in ours.values())


def compile_gateway(root: Path) -> None:
    """As an installation for speed would; where it cannot be, the figures are those of the Python it runs as."""
    module = "penstock.gateway.compiled" if (root / "penstock/gateway/compiled.py").exists() else "penstock.native"
    done = subprocess.run(
        [python_of(root), "-m", module],
        env=os.environ | {"PYTHONPATH": str(root)}, check=False, capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    print((done.stdout + done.stderr).strip())


def run(options: argparse.Namespace) -> bool:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        upstream = free_port()
        mock = [sys.executable, str(Path(__file__).with_name("gateway_mock.py")), str(upstream)]
        direct = Contender("direct", stack.enter_context(running(mock, upstream, folder)), upstream)
        shared = [direct, start_penstock(stack, folder, upstream, options)]
        if options.against:
            shared.append(start_penstock(stack, folder, upstream, options, "before", options.against.resolve()))
        router = start_vllm_router(stack, folder, upstream, options.vllm_router)
        shared += [router] if router else []
        plain = start_nginx(stack, folder, upstream, streams=False)
        unbuffered = start_nginx(stack, folder, upstream, streams=True)
        contenders = {
            "request": shared + ([plain] if plain else []),
            "chunk": shared + ([unbuffered] if unbuffered else []),
        }
        time.sleep(2)  # for the first health checks
        for contender in {id(row): row for rows in contenders.values() for row in rows}.values():
            send(contender, 500, 8, streams=False)
        for number in range(options.rounds):
            for what, rows in contenders.items():
                for contender in rows[number % len(rows) :] + rows[: number % len(rows)]:
                    measure_cpu(contender, options, what == "chunk")
            for contender in contenders["request"]:
                measure_latency(contender, options)
        for contender in contenders["chunk"][1:]:
            measure_rss(contender, options.open_streams)
        return report(contenders)


def main() -> int:
    parser = argparse.ArgumentParser(description="The gateway's cost beside nginx's and vllm-router's.")
    parser.add_argument("--vllm-router", metavar="PATH", help="its program, when it is not on PATH")
    parser.add_argument("--auth", choices=("none", "keys"), default="keys", help="keys: with a store and a ledger")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of penstock, in the same run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10_000, help="a round")
    parser.add_argument("--streams", type=int, default=640, help="a round")
    parser.add_argument("--latencies", type=int, default=2_000, help="a round")
    parser.add_argument("--open-streams", type=int, default=2_000)
    parser.add_argument("--quick", action="store_true", help="2 short rounds")
    parser.add_argument("--native", action=argparse.BooleanOptionalAction, default=True, help="compile the gateway")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar does not hold")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.streams, options.latencies = 2, 4_000, 320, 1_000
    _allow_many_files()
    if options.native:
        for root in [ROOT, *([options.against.resolve()] if options.against else [])]:
            compile_gateway(root)
    else:
        os.environ["PENSTOCK_NATIVE"] = "0"
    holds = run(options)
    return 1 if options.check and not holds else 0


def _allow_many_files() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    raise SystemExit(main())
