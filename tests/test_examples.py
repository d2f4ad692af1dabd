"""The examples work: every file is a good deployment, and the demo does what `make demo` promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.spec import reading

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_is_a_good_deployment(file: Path) -> None:
    deployment = reading.load(file)
    assert reading.parse(reading.to_yaml(deployment)) == deployment


@pytest.mark.llamacpp
def test_the_demo_answers_twice_and_leaves_the_model_running(home: Path) -> None:
    env = {**os.environ, "PENSTOCK_HOME": str(home)}
    penstock = [sys.executable, "-m", "penstock.cli.main"]
    try:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "demo.py")], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "It stands on vLLM and Ray." in done.stdout
        assert "welcome home." in done.stdout
        assert "first token after" in done.stdout
        for verb in ("chat", "status", "down"):
            assert f"penstock {verb}" in done.stdout
        status = subprocess.run([*penstock, "status"], env=env, capture_output=True, text=True, timeout=30)
        assert status.stdout.startswith("penstock-demo is ready")
        again = subprocess.run(
            [sys.executable, str(EXAMPLES / "demo.py")], env=env, capture_output=True, text=True, timeout=60
        )
        assert "runs already" in again.stdout
    finally:
        ended = subprocess.run([*penstock, "down"], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.llamacpp
def test_the_library_starts_asks_scales_and_ends(home: Path) -> None:
    env = {**os.environ, "PENSTOCK_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "library.py")], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Llama 3.1 8B on 1 H100: " in done.stdout
    assert "library-demo is ready with 2 replicas" in done.stdout
    assert done.stdout.endswith("library-demo is down\n")
