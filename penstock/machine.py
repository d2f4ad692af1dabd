"""This machine as it is now: CPUs, memory that a new process could get, NVIDIA GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from penstock.plan import Gpu, Machine
from penstock.units import MIB

# https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files: what a container may use.
_CGROUP = Path("/sys/fs/cgroup")


def this_machine() -> Machine:
    """This machine's CPUs, memory and GPUs as they are now."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and limit < total:
        total, free = limit, max(0, min(free, limit - (used or 0)))
    return Machine(
        host=socket.gethostname(),
        n_cpus=len(psutil.Process().cpu_affinity() or [1]),
        memory_bytes=total,
        memory_free_bytes=free,
        gpus=tuple(gpus()),
    )


def _cgroup_bytes(name: str) -> int | None:
    """A number of this process's own cgroup as a container sees it (its root); None without a limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def gpus() -> list[Gpu]:
    """NVIDIA GPUs as nvidia-smi lists them; of those in CUDA_VISIBLE_DEVICES where it is set. None when it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    argv = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str, visible: str | None) -> list[Gpu]:
    """The rows of nvidia-smi ("0, GPU-4f1c..., NVIDIA H200, 143771, 143000": MiB) that `visible` names, all when None.

    `visible` is CUDA_VISIBLE_DEVICES: indices or (beginnings of) UUIDs, separated by commas.
    """
    asked = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    found = []
    for line in text.splitlines():
        index, uuid, name, total, free = (word.strip() for word in line.split(","))
        is_asked = asked is None or any(word == index or uuid.startswith(word) for word in asked)
        if total.isdigit() and free.isdigit() and is_asked:
            found.append(Gpu(int(index), name, int(total) * MIB, int(free) * MIB))
    return found
