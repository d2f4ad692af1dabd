"""Install VESSL's SDK and CLI, which judge penstock's YAML and the fake of its API, into a cache outside the clone.

Not into .venv: it brings 30 packages (324 MB) and needs Python below 3.13. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bootstrap

# Kept in step with tests/vessl_judge.py.
VERSION = "0.1.199"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "vessl"
PLACE = CACHE / VERSION
TRIES = 3
NEEDS = "3.11" if sys.version_info >= (3, 13) else sys.executable


def is_complete() -> bool:
    return (PLACE / "bin" / "vessl").exists()


def bring() -> str | None:
    """Fill the cache, where it is empty: None, or the reason why it could not be."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second installation waits, and finds everything
        if is_complete():
            return None
        build = CACHE / f"{VERSION}.new"
        problem = ""
        for attempt in range(TRIES):
            time.sleep(5 * attempt)
            shutil.rmtree(build, ignore_errors=True)
            into = ["--compile-bytecode", "--python", str(build / "bin" / "python")]
            steps = [["venv", "--quiet", "--relocatable", "--python", NEEDS, str(build)]]
            steps.append(["pip", "install", "--quiet", *into, f"vessl=={VERSION}"])
            for words in steps:
                done = subprocess.run(
                    [bootstrap.UV, *words], env=bootstrap.environment(), capture_output=True, text=True
                )
                problem = done.stderr.strip()[-500:]
                if done.returncode:
                    break
            else:
                build.rename(PLACE)
                return None
        shutil.rmtree(build, ignore_errors=True)
        return problem
