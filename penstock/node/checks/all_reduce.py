"""A measured all-reduce between nodes, printed as JSON.

Start `python -m penstock.node.checks.all_reduce` on all of them at once.

torch.distributed does it, as in an engine: gloo between CPUs, NCCL between GPUs, one process for each GPU. Sizes grow
from what a decoding step sends to what shows the bandwidth. Bus bandwidth is that of nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): bytes / time * 2(n-1)/n over n ranks. What a
whole machine sends is bytes / time * 2(m-1)/m over m machines; both are equal with one rank on each.

Whatever hangs is ended by a watch, which says how far it came.
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

# The first is what the planner's measured hops are for (plan/comm.py): 8 requests x 5120 x 2 bytes.
_SIZES: dict[Backend, tuple[int, ...]] = {
    "gloo": (80 * KIB, MIB, 8 * MIB, 64 * MIB),
    "nccl": (80 * KIB, MIB, 16 * MIB, 256 * MIB),
}
_N_WARM = 3
_N_MAX = 2000
_HUNG = 3
# What NCCL says with NCCL_DEBUG=INFO: "Using network Socket", or IB, AWS Libfabric. Its line "NET/IB : Using [RO]"
# comes also where there is no InfiniBand (seen with 2.28 on two H200s).
_NET = re.compile(r"Using network ([^\n]+)")


class Timed(msgspec.Struct, frozen=True):
    """One size: `took_s` is the mean time of one all-reduce of `n_bytes`."""

    n_bytes: int
    took_s: float
    n_times: int


class Collective(msgspec.Struct, frozen=True):
    """What was measured, or how far it came (`error`). `network`: what NCCL says it goes over."""

    backend: Backend
    n_nodes: int
    ranks_each: int
    sizes: tuple[Timed, ...] = ()
    network: str | None = None
    error: str | None = None

    @property
    def n_ranks(self) -> int:
        return self.n_nodes * self.ranks_each

    def bus_gbs(self, one: Timed) -> float:
        """GB/s as nccl-tests counts. 64 MiB in 0.1 s over 2 ranks: 67.1e6 / 0.1 * 2 * 1/2 = 0.67 GB/s."""
        return one.n_bytes / one.took_s * 2 * (self.n_ranks - 1) / self.n_ranks / 1e9

    def node_gbs(self, one: Timed) -> float:
        """GB/s that a machine sends to the others; 0 with one machine."""
        return one.n_bytes / one.took_s * 2 * (self.n_nodes - 1) / self.n_nodes / 1e9


class Seat(msgspec.Struct, frozen=True):
    """The place of one process: where rank 0 listens, which interface is taken, how long it may take."""

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


def measure(seat: Seat) -> Collective:
    """All-reduces of growing sizes for `seconds`. Blocks; every rank must call it at about the same time."""
    progress = ["import torch"]
    watch = threading.Timer(seat.timeout_s, _give_up, (seat, progress))
    watch.daemon = True
    watch.start()
    try:
        # One device is all that a process sees of the GPUs, so that no other can be taken by mistake.
        import torch
        import torch.distributed as dist

        progress[0] = f"join: waiting for the others at {seat.address}:{seat.port}"
        device = torch.device("cuda", seat.local) if seat.backend == "nccl" else torch.device("cpu")
        if seat.backend == "nccl":
            torch.cuda.set_device(device)
        dist.init_process_group(
            seat.backend,
            init_method=f"tcp://{seat.address}:{seat.port}",
            rank=seat.rank,
            world_size=seat.n_nodes * seat.ranks_each,
            timeout=timedelta(seconds=seat.timeout_s),
        )
        sizes = tuple(_timed(seat, torch, dist, device, progress))
        progress[0] = "leave"
        dist.destroy_process_group()
    except Exception as exc:  # noqa: BLE001 - torch raises what it likes; the words are all that can be told
        said = " ".join(str(exc).split())[:300]
        return Collective(seat.backend, seat.n_nodes, seat.ranks_each, error=f"{progress[0]}: {said}")
    finally:
        watch.cancel()
    return Collective(seat.backend, seat.n_nodes, seat.ranks_each, sizes)


def _timed(seat: Seat, torch: Any, dist: Any, device: Any, progress: list[str]) -> Iterator[Timed]:
    """Each size for its part of the seconds. How often is rank 0's word: all must call equally often."""
    share_s = seat.seconds / len(_SIZES[seat.backend])
    for n_bytes in _SIZES[seat.backend]:
        progress[0] = f"all-reduce of {n_bytes // KIB} KiB over {seat.interface or 'any interface'}"
        data = torch.zeros(n_bytes // 4, dtype=torch.float32, device=device)
        for _ in range(_N_WARM):
            dist.all_reduce(data)
        _settle(torch, seat)
        began = time.monotonic()
        dist.all_reduce(data)
        _settle(torch, seat)
        n_times = torch.tensor([min(_N_MAX, max(1, int(share_s / (time.monotonic() - began))))], device=device)
        dist.broadcast(n_times, 0)
        n = int(n_times.item())
        began = time.monotonic()
        for _ in range(n):
            dist.all_reduce(data)
        _settle(torch, seat)
        yield Timed(n_bytes, (time.monotonic() - began) / n, n)


def _settle(torch: Any, seat: Seat) -> None:
    if seat.backend == "nccl":
        torch.cuda.synchronize()


def _give_up(seat: Seat, progress: list[str]) -> None:
    error = f"{progress[0]}: no end after {seat.timeout_s:.0f} s"
    _tell(Collective(seat.backend, seat.n_nodes, seat.ranks_each, error=error))
    os._exit(_HUNG)


def _tell(found: Collective) -> None:
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()


def environment(seat: Seat) -> dict[str, str]:
    """What makes Gloo and NCCL take the interface, and NCCL tell what it goes over."""
    chosen = {f"{name}_SOCKET_IFNAME": seat.interface for name in ("GLOO", "NCCL", "TP") if seat.interface}
    if seat.backend == "nccl":
        # NVLink multicast needs a fabric manager that containers often lack; its absence hangs the first all-reduce.
        chosen |= {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    return chosen


def _start(seat: Seat) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "penstock.node.checks.all_reduce", "--seat", msgspec.json.encode(seat).decode()]
    more = environment(seat)
    if seat.backend == "nccl":
        more["NCCL_DEBUG_FILE"] = _debug_file(seat)
    return subprocess.Popen(argv, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _debug_file(seat: Seat) -> str:
    return str(Path(tempfile.gettempdir()) / f"penstock-nccl-{os.getpid()}-{seat.local}")


def run_node(seats: Sequence[Seat]) -> Collective:
    """One process for each rank of this node; the answer of its first one, or the first error."""
    children = [_start(seat) for seat in seats]
    told = []
    for seat, child in zip(seats, children, strict=True):
        try:
            out, err = child.communicate(timeout=seat.timeout_s + 15.0)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
        told.append(_answer(seat, out, err))
    failed = next((one for one in told if one.error), None)
    return msgspec.structs.replace(failed or told[0], network=_network(seats))


def _answer(seat: Seat, out: str, err: str) -> Collective:
    lines = out.strip().splitlines()
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, IndexError):
        return msgspec.json.decode(lines[-1], type=Collective)
    error = last_words(err.splitlines(), signs=()) or "it printed nothing"
    return Collective(seat.backend, seat.n_nodes, seat.ranks_each, error=error)


def _network(seats: Sequence[Seat]) -> str | None:
    """What NCCL's own log says; the log is removed."""
    found = None
    for seat in seats:
        path = Path(_debug_file(seat))
        with contextlib.suppress(OSError):
            match = _NET.search(path.read_text("utf-8", "replace"))
            found = found or (match[1].strip()[:60] if match else None)
            path.unlink()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was measured as JSON, on one line. `--ranks`: the places of the nodes that take part, in order."""
    parser = argparse.ArgumentParser(prog="python -m penstock.node.checks.all_reduce")
    parser.add_argument("--seat", type=lambda text: msgspec.json.decode(text, type=Seat))
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
    if options.seat is not None:
        _tell(measure(options.seat))
        return 0
    if options.rank not in options.ranks:
        return 0
    node = options.ranks.index(options.rank)
    seats = [
        Seat(
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
    _tell(run_node(seats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
