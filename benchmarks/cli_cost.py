"""What the command line itself costs: CPU seconds of `penstock --help`, `status` while one runs, and a large `plan`.

    python benchmarks/cli_cost.py [--rounds 7] [--against DIR]

CPU time of the child processes from the kernel's own accounting (wait4), so that other work on the machine hardly
matters; beside it a Python that imports nothing, and each command as a ratio to that. Bars: help under 0.3 CPU-seconds,
status under 0.5 s of wall time, a model planned over 1,024 GPUs under a CPU-second. `--against` measures another
checkout of penstock (with its own .venv when it has one) in the same run, command by command: at most 1.05 of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The catalogue's slowest model to plan: many experts, many layers.
PLAN = (
    *("plan", "qwen3-235b-a22b", "--gpu", "h100-sxm", "--gpus-per-node", "8"),
    *("--nodes", "128", "--network", "ib-ndr", "--json"),
)


COMMANDS = {
    "penstock --help": ("--help",),
    "penstock status": ("status", "bench"),
    "penstock ls": ("ls",),
    "plan, 1,024 GPUs": PLAN,
}


def cost(argv: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """CPU seconds and wall seconds of a command."""
    began = time.perf_counter()
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(argv)} exited with {child.returncode}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


class Checkout:
    """A penstock to measure: its Python, its home with one running deployment."""

    def __init__(self, root: Path, home: Path) -> None:
        own = root / ".venv" / "bin" / "python"
        python = str(own) if own.exists() else sys.executable
        self.argv = (python, "-m", "penstock")
        self.env = {**os.environ, "PENSTOCK_HOME": str(home), "PYTHONPATH": str(root)}

    def run(self, *words: str) -> None:
        subprocess.run([*self.argv, *words], env=self.env, check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def deployed(self) -> Iterator[None]:
        self.run("up", "--name", "bench", "--port", "0", "--json")
        try:
            yield
        finally:
            self.run("down", "bench", "--json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of the command line.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of penstock, in the same run")
    options = parser.parse_args()
    roots = [ROOT, *([options.against.resolve()] if options.against else [])]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, ExitStack() as stack:
        checkouts = [Checkout(root, Path(folder, str(number))) for number, root in enumerate(roots)]
        for checkout in checkouts:
            stack.enter_context(checkout.deployed())
        bare = [cost((sys.executable, "-c", "pass"), checkouts[0].env) for _ in range(options.rounds)]
        rows: dict[str, list[list[tuple[float, float]]]] = {name: [[] for _ in checkouts] for name in COMMANDS}
        for _ in range(options.rounds):
            for name, words in COMMANDS.items():
                for number, checkout in enumerate(checkouts):
                    rows[name][number].append(cost((*checkout.argv, *words), checkout.env))
    base = statistics.median(cpu for cpu, _ in bare)
    print(f"{'command':18} {'CPU s':>7} {'wall s':>7} {'x python':>9} {'x before':>9}   (median of {options.rounds})")
    for name, runs in rows.items():
        cpus = [statistics.median(cpu for cpu, _ in samples) for samples in runs]
        wall = statistics.median(wall for _, wall in runs[0])
        before = f"{cpus[0] / cpus[1]:9.2f}" if len(cpus) > 1 else f"{'-':>9}"
        print(f"{name:18} {cpus[0]:7.3f} {wall:7.3f} {cpus[0] / base:9.1f} {before}")


if __name__ == "__main__":
    main()
