"""A measured all-reduce between nodes, printed as JSON: `python -m penstock.node.checks.all_reduce` on all at once.

torch.distributed as in an engine: gloo between CPUs, NCCL between GPUs, one process for each GPU. Sizes grow from those
of a decoding step to those that show the bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.log_lines import last_words
from penstock.text import KIB, MIB

Backend = Literal["gloo", "nccl"]

# The first size is that of the planner's measured hops (planner/speed/collectives.py): 8 requests x 5120 x 2 bytes.
_SIZES: dict[Backend, tuple[int, ...]] = {
    "gloo": (80 * KIB, MIB, 8 * MIB, 64 * MIB),
    "nccl": (80 * KIB, MIB, 16 * MIB, 256 * MIB),
}
_N_WARM = 3
_N_MAX = 2000
_HUNG = 3
# NCCL_DEBUG=INFO prints "Using network Socket", or IB, AWS Libfabric. It prints "NET/IB : Using [RO]" also where there
# is no InfiniBand (2.28 on two H200s).
_NET = re.compile(r"Using network ([^\n]+)")


class Timed(msgspec.Struct, frozen=True):
    """One size: `took_s` is the mean time of one all-reduce of `n_bytes`."""

    n_bytes: int
    took_s: float
    n_times: int


class Collective(msgspec.Struct, frozen=True):
    """The measurement, or how far it came (`error`). `network`: as NCCL names it."""

    backend: Backend
    n_nodes: int
    ranks_each: int
    sizes: tuple[Timed, ...] = ()
    network: str | None = None
    error: str | None = None

    @property
    def n_ranks(self) -> int:
        return self.n_nodes * self.ranks_each

    def bus_gbs(self, timed: Timed) -> float:
        """GB/s as nccl-tests counts: bytes / time * 2(n-1)/n. 64 MiB in 0.1 s over 2 ranks: 0.67 GB/s.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        return timed.n_bytes / timed.took_s * 2 * (self.n_ranks - 1) / self.n_ranks / 1e9

    def node_gbs(self, timed: Timed) -> float:
        """GB/s that a machine sends to the others; 0 with one machine."""
        return timed.n_bytes / timed.took_s * 2 * (self.n_nodes - 1) / self.n_nodes / 1e9


class RankArgs(msgspec.Struct, frozen=True):
    """One process: its place among all, where rank 0 listens, which interface it uses, how long it may take."""

    node: int
    n_nodes: int
    local: int
    ranks_each: int
    address: str
    port: int
    interface: str
    backend: Backend
    seconds: float
    timeout_s: float

    @property
    def rank(self) -> int:
        return self.node * self.ranks_each + self.local

    def failed(self, error: str) -> Collective:
        return Collective(self.backend, self.n_nodes, self.ranks_each, error=error)


def measure(args: RankArgs) -> Collective:
    """All-reduces of growing sizes for `seconds`. Blocks; every rank must call it at about the same time.

    What hangs ends the process after `timeout_s`, and prints how far it came.
    """
    progress = ["import torch"]
    watch = threading.Timer(args.timeout_s, _give_up, (args, progress))
    watch.daemon = True
    watch.start()
    try:
        import torch
        import torch.distributed as dist

        progress[0] = f"join: waiting for the others at {args.address}:{args.port}"
        device = torch.device("cpu")
        if args.backend == "nccl":
            device = torch.device("cuda", args.local)
            torch.cuda.set_device(device)
        dist.init_process_group(
            args.backend,
            init_method=f"tcp://{args.address}:{args.port}",
            rank=args.rank,
            world_size=args.n_nodes * args.ranks_each,
            timeout=timedelta(seconds=args.timeout_s),
        )
        sizes = tuple(_timed(args, torch, dist, device, progress))
        progress[0] = "leave"
        dist.destroy_process_group()
    except Exception as exc:  # noqa: BLE001 - torch raises errors of any type
        message = " ".join(str(exc).split())[:300]
        return args.failed(f"{progress[0]}: {message}")
    finally:
        watch.cancel()
    return Collective(args.backend, args.n_nodes, args.ranks_each, sizes)


def _timed(args: RankArgs, torch: Any, dist: Any, device: Any, progress: list[str]) -> Iterator[Timed]:
    """Each size for its part of the seconds. Rank 0 decides how often: all must call equally often."""
    share_s = args.seconds / len(_SIZES[args.backend])
    for n_bytes in _SIZES[args.backend]:
        progress[0] = f"all-reduce of {n_bytes // KIB} KiB over {args.interface or 'any interface'}"
        data = torch.zeros(n_bytes // 4, dtype=torch.float32, device=device)
        for _ in range(_N_WARM):
            dist.all_reduce(data)
        _settle(torch, args)
        began = time.monotonic()
        dist.all_reduce(data)
        _settle(torch, args)
        n_times = torch.tensor([min(_N_MAX, max(1, int(share_s / (time.monotonic() - began))))], device=device)
        dist.broadcast(n_times, 0)
        n = int(n_times.item())
        began = time.monotonic()
        for _ in range(n):
            dist.all_reduce(data)
        _settle(torch, args)
        yield Timed(n_bytes, (time.monotonic() - began) / n, n)


def _settle(torch: Any, args: RankArgs) -> None:
    if args.backend == "nccl":
        torch.cuda.synchronize()


def _give_up(args: RankArgs, progress: list[str]) -> None:
    _print(args.failed(f"{progress[0]}: no end after {args.timeout_s:.0f} s"))
    os._exit(_HUNG)


def _print(result: Collective) -> None:
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()


def environment(args: RankArgs) -> dict[str, str]:
    """Makes Gloo and NCCL use the interface, and NCCL log its network."""
    chosen = {f"{name}_SOCKET_IFNAME": args.interface for name in ("GLOO", "NCCL", "TP") if args.interface}
    if args.backend == "nccl":
        # NVLink multicast needs a fabric manager that containers often lack; its absence hangs the first all-reduce.
        chosen |= {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    return chosen


def _start(args: RankArgs, logs: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "penstock.node.checks.all_reduce", "--rank-args", msgspec.json.encode(args).decode()]
    more = environment(args)
    if args.backend == "nccl":
        more["NCCL_DEBUG_FILE"] = str(logs / str(args.local))
    return subprocess.Popen(argv, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_node(all_args: Sequence[RankArgs]) -> Collective:
    """One process for each rank of this node; the answer of its first one, or the first error."""
    with tempfile.TemporaryDirectory(prefix="penstock-nccl-") as logs:
        children = [_start(args, Path(logs)) for args in all_args]
        answers = [_answer(args, child) for args, child in zip(all_args, children, strict=True)]
        failed = next((answer for answer in answers if answer.error), None)
        return msgspec.structs.replace(failed or answers[0], network=_network(Path(logs)))


def _answer(args: RankArgs, child: subprocess.Popen[str]) -> Collective:
    try:
        out, err = child.communicate(timeout=args.timeout_s + 15.0)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
    with contextlib.suppress(msgspec.DecodeError, IndexError):
        return msgspec.json.decode(out.strip().splitlines()[-1], type=Collective)
    return args.failed(last_words(err.splitlines(), signs=()) or "it printed nothing")


def _network(logs: Path) -> str | None:
    """The network in NCCL's logs."""
    for path in sorted(logs.iterdir()):
        if match := _NET.search(path.read_text("utf-8", "replace")):
            return match[1].strip()[:60]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the measurement as JSON, on one line. `--ranks`: the nodes that take part, in order."""
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.all_reduce")
    parser.add_argument("--rank-args", type=lambda text: msgspec.json.decode(text, type=RankArgs))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--interfaces", type=lambda text: text.split(","), help="one for each of the ranks")
    parser.add_argument("--address")
    parser.add_argument("--port", type=int)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--each", type=int, default=1, help="processes on a node")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args(argv)
    if options.rank_args is not None:
        _print(measure(options.rank_args))
        return 0
    if options.rank not in options.ranks:
        return 0
    node = options.ranks.index(options.rank)
    all_args = [
        RankArgs(
            node=node,
            n_nodes=len(options.ranks),
            local=local,
            ranks_each=options.each,
            address=options.address,
            port=options.port,
            interface=options.interfaces[node],
            backend=options.backend,
            seconds=options.seconds,
            timeout_s=options.timeout,
        )
        for local in range(options.each)
    ]
    _print(run_node(all_args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
