"""VESSL's own SDK and CLI (tools/vessl_sdk.py), kept from reporting to its makers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

# Kept in step with tools/vessl_sdk.py.
PLACE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "vessl" / "0.1.199"
SILENT = {"ENABLE_SENTRY": "false", "VESSL_DATA_COLLECTION_OPT_OUT": "true", "PYTHONWARNINGS": "ignore"}
_ANSWER_S = 60.0


def run(program: str, words: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """What the SDK's `python` or `vessl` prints, in a home of its own; AssertionError when it fails."""
    if not (PLACE / "bin" / program).exists():
        pytest.skip("VESSL's SDK is not installed: make vessl")
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **SILENT, **variables}
    done = subprocess.run(
        [PLACE / "bin" / program, *words], env=env, capture_output=True, text=True, timeout=_ANSWER_S,
        stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, f"{program} {words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
