"""The folder of what an engine compiles, kept between starts: engine-cache/<engine version>/<GPU and driver>.

What lies there is code that the next start executes, so only this user may write to it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock import paths
from penstock.engines import Engine
from penstock.hardware.detect import nvidia_smi
from penstock.planner import Plan


def gpus_and_driver() -> str:
    """This machine's kinds of GPU and its driver, "" when nvidia-smi does not report them."""
    return ", ".join(sorted(set(nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines())))


def folder_for(
    engine: Engine, plan: Plan, environment: Mapping[str, str], hardware: Callable[[], str] = gpus_and_driver
) -> str | None:
    """This node's folder for the engine's caches, made where absent; None where the user has set another, on the CPU,
    where little is compiled, and with a printed note where it cannot be used."""
    if plan.device != "cuda" or engine.cache_variable in (None, *environment) or not (kind := hardware()):
        return None
    name, version = (re.sub(r"[^\w.+-]+", "-", text) for text in (kind, f"{plan.engine}-{plan.engine_version}"))
    path = paths.home() / "engine-cache" / version / name
    try:
        for place in (path.parents[1], path.parent, path):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o700)
        problem = _unsafe(path)
    except OSError as exc:
        problem = f"{exc.filename}: {exc.strerror}"
    if problem is not None:
        print(f"penstock: the engine's caches are not kept in {path}: {problem}", flush=True)
        return None
    return str(path)


def _unsafe(path: Path) -> str | None:
    """Which folder of the path another user could replace, with how to change that. A sticky folder is safe."""
    for place in (path, *path.parents):
        status = place.lstat()
        if status.st_uid not in (0, os.geteuid()) or not stat.S_ISDIR(status.st_mode):
            return f"{place} belongs to another user, or is no folder"
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            return f"other users can write to {place} (chmod go-w {place})"
    return None
