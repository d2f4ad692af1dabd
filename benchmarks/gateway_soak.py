"""Whether the gateway's memory stays flat: `python benchmarks/gateway_soak.py requests|aborts|streams [N]`.

Exit code 1 when it does not. `requests`: N one after the other, 64 at a time. `aborts`: N streams whose client leaves
after their first bytes. `streams`: N open at once, and what they hold. The gateway is compiled where it can be, and has
keys, quotas and a ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import uvloop
from gateway import ROOT, Contender, _allow_many_files, compile_gateway, free_port, running, start_penstock
from gateway_load import Load, rss_mb, run_load

N_DEFAULT = {"requests": 1_000_000, "aborts": 100_000, "streams": 2_000}
N_ROUNDS = 20
# Of the first two rounds' end: until then buffers and pools reach their size.
GROWTH_MB_MAX = 5.0
STREAMS_MB_MAX = 150.0


class Leaver(asyncio.Protocol):
    """Asks for streams, each on a connection of its own, and leaves after the first bytes of it."""

    def __init__(self, wire: bytes, left: asyncio.Future[None]) -> None:
        self._wire, self._left = wire, left
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._wire)

    def data_received(self, data: bytes) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._left.done():
            self._left.set_result(None)


async def abort_streams(ours: Contender, n_streams: int, concurrency: int = 100) -> None:
    loop = asyncio.get_running_loop()
    wire = Load(ours.port, 1, 1, True, ours.key).request()

    async def one_after_the_other() -> None:
        for _ in range(n_streams // concurrency):
            leaver = Leaver(wire, loop.create_future())
            await loop.create_connection(lambda leaver=leaver: leaver, "127.0.0.1", ours.port)  # type: ignore[misc]
            await leaver._left

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


def soak(what: str, n_units: int, ours: Contender) -> bool:
    baseline = 0.0
    begun = time.monotonic()
    for number in range(N_ROUNDS):
        n_round = n_units // N_ROUNDS
        if what == "aborts":
            uvloop.run(abort_streams(ours, n_round))
        else:
            outcome = uvloop.run(run_load(Load(ours.port, n_round, 64, False, ours.key)))
            if outcome.n_errors:
                print(f"{outcome.n_errors} errors")
                return False
        now = rss_mb(ours.pid)
        print(f"{time.monotonic() - begun:6.0f} s {(number + 1) * n_round:9} {what}: {now:.1f} MB", flush=True)
        if number == 1:
            baseline = now
    print(f"grown by {now - baseline:.1f} MB, at most {GROWTH_MB_MAX:g}")
    return now - baseline <= GROWTH_MB_MAX


async def hold_streams(n_streams: int, ours: Contender) -> bool:
    task = asyncio.create_task(run_load(Load(ours.port, n_streams, n_streams, True, ours.key)))
    most = 0.0
    while not task.done():
        await asyncio.sleep(0.1)
        most = max(most, rss_mb(ours.pid))
    print(f"{n_streams} open streams: {most:.1f} MB, at most {STREAMS_MB_MAX:g}; {task.result().n_errors} errors")
    return most <= STREAMS_MB_MAX and not task.result().n_errors


def main() -> int:
    what = sys.argv[1] if len(sys.argv) > 1 else "requests"
    n_units = int(sys.argv[2]) if len(sys.argv) > 2 else N_DEFAULT[what]
    _allow_many_files()
    compile_gateway(ROOT)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-")))
        upstream = free_port()
        mock = [sys.executable, str(Path(__file__).with_name("gateway_mock.py")), str(upstream)]
        stack.enter_context(running(mock, upstream, folder))
        ours = start_penstock(stack, folder, upstream, argparse.Namespace(auth="keys", workers=1))
        uvloop.run(asyncio.sleep(1.5))
        is_flat = uvloop.run(hold_streams(n_units, ours)) if what == "streams" else soak(what, n_units, ours)
        print(f"ledger: {sum(path.stat().st_size for path in folder.glob('gateway.db*')) / 1e6:.1f} MB")
    return 0 if is_flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
