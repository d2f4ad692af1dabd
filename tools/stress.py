"""Run tests many times beside busy loops, to find those that depend on time: `python tools/stress.py TEST...`.

    python tools/stress.py tests/test_life.py            # 20 times, two busy loops
    python tools/stress.py tests/test_life.py::test_x --times 50 --loops 4

Each run is a pytest process, so that nothing warm hides a fault. It prints a line a run, keeps the output of those
that failed, and exits with 1 when one did. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = "while True: pass"


@contextlib.contextmanager
def busy(n_loops: int) -> Iterator[None]:
    """Processes that each keep a core busy while the block lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(n_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def stress(tests: list[str], n_times: int, n_loops: int, folder: Path) -> int:
    """The number of runs that failed; `folder` keeps their output."""
    n_failed = 0
    argv = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", *tests]
    with busy(n_loops):
        for number in range(1, n_times + 1):
            output = folder / f"run-{number}.txt"
            began = time.monotonic()
            with output.open("wb") as stream:
                code = subprocess.run(argv, cwd=ROOT, stdout=stream, stderr=stream).returncode
            n_failed += code != 0
            verdict = "passed" if code == 0 else f"failed, exit code {code}: {output}"
            print(f"run {number} of {n_times}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
            if code == 0:
                output.unlink()
    return n_failed


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/stress.py", description=str(__doc__).partition("\n")[0])
    parser.add_argument("tests", nargs="+", metavar="TEST", help="as pytest takes it: a file, or FILE::NAME")
    parser.add_argument("--times", type=int, default=20, help="runs (default: 20)")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside them (default: 2)")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="penstock-stress-"))
    n_failed = stress(options.tests, options.times, options.loops, folder)
    print(f"{options.times - n_failed} of {options.times} runs passed beside {options.loops} busy loops")
    if not n_failed:
        folder.rmdir()
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
