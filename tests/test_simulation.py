"""Lives of deployments on a virtual clock, by seeds: `tests/simulation.py` has them, and replays one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulation
from simulation_faults import FAULTS

ROOT = Path(__file__).parent.parent
# 2,000 in `make test`; `make nightly` sets 200,000.
SEEDS = os.environ.get("PENSTOCK_SIMULATION_SEEDS", "2000")

pytestmark = pytest.mark.simulation


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tests/simulation.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_all_lives_keep_all_promises() -> None:
    done = simulate("--seeds", SEEDS)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert done.stdout.startswith(f"{SEEDS} of {SEEDS} lives kept all promises")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_past_is_found_by_a_seed_that_replays_it(name: str) -> None:
    done = simulate("--plant", name, "--seeds", "2000")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    seed, _, why = done.stdout.strip().removeprefix("seed ").partition(" finds it: ")
    again = simulate("--plant", name, "--seed", seed)
    assert (again.returncode, again.stdout.strip()) == (1, why)


def test_an_engine_whose_streams_go_on_is_not_ended_for_its_silent_health() -> None:
    life = simulation.Life(3)
    machine = life.machine

    def living(seconds: float) -> set[int]:
        machine.run(machine.time_s + seconds, life.check)
        return {port for port, engine in life.engines.items() if engine.process.is_alive}

    with simulation.patched(life, None), contextlib.redirect_stdout(io.StringIO()):
        life.up()
        machine.after(0.5, life._ask)
        engines = living(30.0)
        for port in engines:
            life.engines[port].is_deaf = True
        assert engines == living(4 * life.plan.stall_s) != set()
        assert {row.state for row in life.records["state.json"].replicas} == {"busy"}
        life.has_faults = False  # no request more
        assert not engines & living(2 * life.plan.stall_s), "hung, for all that is known"
        life.discard()


def test_the_same_seed_takes_the_same_steps() -> None:
    first, second = (simulate("--seed", "7", "--trace").stdout for _ in range(2))
    assert first == second
    assert first.splitlines()[-1] == "all promises held"
    assert first.count("\n") > 50
