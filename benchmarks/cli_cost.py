"""What the command line itself costs: CPU seconds of `penstock --help`, `status` while one runs, and a large `plan`.

    python benchmarks/cli_cost.py [--rounds 7]

CPU time of the child processes from the kernel's own accounting (wait4), so that other work on the machine hardly
matters; beside it a Python that imports nothing, and each command as a ratio to that. Bars: help under 0.3 CPU-seconds,
status under 0.5 s of wall time, a model planned over 1,024 GPUs under a CPU-second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
# The catalogue's slowest model to plan: many experts, many layers.
PLAN = (
    *("plan", "qwen3-235b-a22b", "--gpu", "h100-sxm", "--gpus-per-node", "8"),
    *("--nodes", "128", "--network", "ib-ndr", "--json"),
)


def cost(argv: Sequence[str], env: dict[str, str], rounds: int) -> tuple[float, float]:
    """Median CPU seconds and median wall seconds of a command."""
    cpu, wall = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(argv)} exited with {child.returncode}")
        wall.append(time.perf_counter() - began)
        cpu.append(used.ru_utime + used.ru_stime)
    return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of the command line.")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
        env = {**os.environ, "PENSTOCK_HOME": home}
        up = [*PENSTOCK, "up", "--name", "bench", "--port", "0", "--json"]
        subprocess.run(up, env=env, check=True, stdout=subprocess.DEVNULL)
        try:
            rows = {
                "python -c pass": cost((sys.executable, "-c", "pass"), env, rounds),
                "penstock --help": cost((*PENSTOCK, "--help"), env, rounds),
                "penstock status": cost((*PENSTOCK, "status", "bench"), env, rounds),
                "penstock ls": cost((*PENSTOCK, "ls"), env, rounds),
                "plan, 1,024 GPUs": cost((*PENSTOCK, *PLAN), env, rounds),
            }
        finally:
            subprocess.run([*PENSTOCK, "down", "bench", "--json"], env=env, check=True, stdout=subprocess.DEVNULL)
    base = rows["python -c pass"][0]
    print(f"{'command':18} {'CPU s':>7} {'wall s':>7} {'x python':>9}   (median of {rounds})")
    for name, (cpu, wall) in rows.items():
        print(f"{name:18} {cpu:7.3f} {wall:7.3f} {cpu / base:9.1f}")


if __name__ == "__main__":
    main()
