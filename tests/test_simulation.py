"""Lives of deployments on a virtual clock, by seeds: `tests/simulation.py` has them, and replays one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation_faults import FAULTS

ROOT = Path(__file__).parent.parent
# 2,000 in `make test`; `make nightly` sets 200,000.
SEEDS = os.environ.get("PENSTOCK_SIMULATION_SEEDS", "2000")

pytestmark = pytest.mark.simulation


def simulation(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tests/simulation.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_all_lives_keep_all_promises() -> None:
    done = simulation("--seeds", SEEDS)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{SEEDS} of {SEEDS} lives kept all promises")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_past_is_found_by_a_seed_that_replays_it(name: str) -> None:
    done = simulation("--plant", name, "--seeds", "2000")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    seed, _, why = done.stdout.strip().removeprefix("seed ").partition(" finds it: ")
    again = simulation("--plant", name, "--seed", seed)
    assert (again.returncode, again.stdout.strip()) == (1, why)


def test_the_same_seed_takes_the_same_steps() -> None:
    first, second = (simulation("--seed", "7", "--trace").stdout for _ in range(2))
    assert first == second
    assert first.splitlines()[-1] == "all promises held"
    assert first.count("\n") > 50
