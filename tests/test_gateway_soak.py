"""ResponseOwners over a million requests, 100,000 aborted streams and 2,000 open ones: `make nightly`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "benchmarks" / "gateway_soak.py"


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("what", ["requests", "aborts", "streams"])
def test_memory_stays_flat(what: str) -> None:
    assert subprocess.run([sys.executable, str(SOAK), what], check=False).returncode == 0
