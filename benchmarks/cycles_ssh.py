"""Up and down again and again over ssh with the fake engine, on two hosts, and what is left afterwards.

    python benchmarks/cycles_ssh.py [--cycles 20] [--replicas 2] [--nodes 1] [--executor mp|ray] [--kill]

Needs what the tests on hosts need (`make hosts`, root). With --kill every second cycle kills a node and a keeper of a
tunnel before `down`. Prints one line a cycle and, in the end, what is left here and on the hosts: it should be nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hosts import Hosts
from launching import Place, ask, call, port_is_free, private_folders
from ssh_rig import left_on, node_of, write

from penstock import processes


def cycle(place: Place, hosts: Hosts, file: Path, is_killed: bool) -> tuple[float, float]:
    """Seconds of `up` and of `down`."""
    began = time.monotonic()
    run = place.up(file)
    up_s = time.monotonic() - began
    ask(run)
    if is_killed:
        os.kill(node_of(hosts[0]).outer_pid, signal.SIGKILL)
        keepers = [process for process in processes.find_marked(str(run.path)) if "keeper" in process.command]
        os.kill(keepers[0].pid, signal.SIGKILL)
    began = time.monotonic()
    done = call("down", "one")
    assert done.code == 0, done
    return up_s, time.monotonic() - began


def left(place: Place, hosts: Hosts) -> list[str]:
    """What the cycles left, here and there."""
    time.sleep(1.0)  # the far end of a tunnel reads its end of file
    found = left_on(hosts)
    for path, run_id in place.run_paths.items():
        found += [f"here: {process.command}" for process in processes.find_marked(path)]
        found += [f"here: {folder}" for folder in private_folders(run_id)]
    return found + [f"here: {address}" for address in place.addresses if not port_is_free(address)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--executor", choices=("mp", "ray"), default="mp", help="ray: a real Ray cluster each time")
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    times: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts:
        os.environ["PENSTOCK_HOME"] = f"{folder}/home"
        place = Place(Path(folder))
        cut: dict[str, Any] = {"hardware": {"nodes": options.nodes}, "engine": {"executor": options.executor}}
        file = write(place, hosts, replicas=options.replicas, args={"child": True}, **cut)
        for number in range(options.cycles):
            times.append(cycle(place, hosts, file, options.kill and number % 2 == 1))
            print(f"cycle {number + 1}: up {times[-1][0]:.1f} s, down {times[-1][1]:.1f} s", flush=True)
        found = left(place, hosts)
    ups, downs = zip(*times, strict=True)
    print(f"{len(times)} cycles: up {statistics.median(ups):.1f} s, down {statistics.median(downs):.1f} s (medians)")
    print(f"left: {found or 'nothing'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
