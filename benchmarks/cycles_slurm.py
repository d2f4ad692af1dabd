"""Up and down again and again on a real Slurm with the fake engine, and what is left afterwards, counted.

    python benchmarks/cycles_slurm.py [--cycles 20] [--nodes 1] [--executor mp|ray] [--proctrack linuxproc] [--kill]

Needs what the tests on hosts need (`make hosts`, root). With --kill every second cycle kills the node's supervisor
before `down`. Prints one line a cycle and, in the end, what is left on all hosts: it should be nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hosts import Hosts
from hosts_slurm import Slurm
from slurm_cluster import Desk


def cycle(desk: Desk, file: str, is_killed: bool) -> tuple[float, float]:
    """Seconds of `up` and of `down`."""
    began = time.monotonic()
    desk.call("up", file)
    up_s = time.monotonic() - began
    assert desk.answer().startswith("1:tell 2:me")
    if is_killed:
        for _, one in desk.marked():
            if one.env.get("PENSTOCK_ROLE") == "node":
                os.kill(one.outer_pid, signal.SIGKILL)
    began = time.monotonic()
    desk.call("down", "one")
    return up_s, time.monotonic() - began


def listening(desk: Desk) -> set[tuple[str, str]]:
    """Host and address of everything that listens."""
    found = set()
    for host in [desk.slurm.login, *desk.slurm.hosts]:
        rows = Path(f"/proc/{host.pid}/net/tcp").read_text("utf-8").splitlines()[1:]
        found |= {(host.name, row.split()[1]) for row in rows if row.split()[3] == "0A"}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--executor", choices=("mp", "ray"), default="mp", help="ray: a real Ray cluster each time")
    parser.add_argument("--proctrack", default="linuxproc", choices=("linuxproc", "cgroup"))
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    times: list[tuple[float, float]] = []
    with Hosts(2, login=True, shared_home=True) as hosts:
        desk = Desk(Slurm(hosts, options.proctrack))
        before = listening(desk)
        file = desk.write(
            hardware={"nodes": options.nodes}, engine={"executor": options.executor}, args={"child": True}
        )
        for number in range(options.cycles):
            times.append(cycle(desk, file, options.kill and number % 2 == 1))
            print(f"cycle {number + 1}: up {times[-1][0]:.1f} s, down {times[-1][1]:.1f} s", flush=True)
        left = [*desk.left(), *map(str, sorted(listening(desk) - before))]
    ups, downs = zip(*times, strict=True)
    print(f"{len(times)} cycles: up {statistics.median(ups):.1f} s, down {statistics.median(downs):.1f} s (medians)")
    print(f"left: {left or 'nothing'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
