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


def ended(env: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.llamacpp
def test_the_demo_answers_twice_and_leaves_the_model_running(home: Path) -> None:
    env = {**os.environ, "PENSTOCK_HOME": str(home)}
    try:
        done = ended(env, EXAMPLES / "demo.py")
        assert done.returncode == 0, done.stderr
        for words in ("It stands on vLLM and Ray.", "welcome home.", "first token after"):
            assert words in done.stdout
        for verb in ("chat", "status", "down"):
            assert f"penstock {verb}" in done.stdout
        assert ended(env, "-m", "penstock.cli.main", "status").stdout.startswith("penstock-demo is ready")
        assert "runs already" in ended(env, EXAMPLES / "demo.py").stdout
    finally:
        down = ended(env, "-m", "penstock.cli.main", "down")
    assert down.returncode == 0, down.stderr


@pytest.mark.llamacpp
def test_the_library_starts_asks_scales_and_ends(home: Path) -> None:
    done = ended({**os.environ, "PENSTOCK_HOME": str(home)}, EXAMPLES / "library.py")
    assert done.returncode == 0, done.stderr
    assert "Llama 3.1 8B on 1 H100: " in done.stdout
    assert "library-demo is ready with 2 replicas" in done.stdout
    assert done.stdout.endswith("library-demo is down\n")
