"""This machine as it is now: CPUs, memory that a new process could get, NVIDIA GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

import psutil

from penstock.hardware import Gpu, Links, Machine
from penstock.hardware.topology import links_of, parse_matrix, parse_rate
from penstock.text import MIB

# https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files: what a container may use.
_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> tuple[int, int]:
    """(all, free) memory of this machine, or of the container."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and limit < total:
        total, free = limit, max(0, min(free, limit - (used or 0)))
    return total, free


def this_machine() -> Machine:
    total, free = memory_bytes()
    cards = tuple(gpus())
    return Machine(
        host=socket.gethostname(),
        n_cpus=len(psutil.Process().cpu_affinity() or [1]),
        memory_bytes=total,
        memory_free_bytes=free,
        gpus=cards,
        links=links([gpu.index for gpu in cards]) if cards else None,
    )


def _cgroup_bytes(name: str) -> int | None:
    """A number of this process's own cgroup; None without a limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def gpus() -> list[Gpu]:
    """NVIDIA GPUs as nvidia-smi lists them, those of CUDA_VISIBLE_DEVICES where it is set; none when it fails."""
    text = nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
    return parse_gpus(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def links(indices: Collection[int]) -> Links | None:
    """How these GPUs are joined; None when the driver does not report it. Blocks for a second or two."""
    if len(indices) == 1:
        return Links(1, 1)
    topology, peers = (parse_matrix(nvidia_smi("topo", *words)) for words in (("-m",), ("-p2p", "r")))
    return links_of(topology, peers, parse_rate(nvidia_smi("nvlink", "--status")), indices)


def nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; "" when it is absent, fails or hangs."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def parse_gpus(text: str, visible: str | None) -> list[Gpu]:
    """The rows of nvidia-smi ("0, GPU-4f1c..., NVIDIA H200, 143771, 143000": MiB) that `visible` names, all when None.
    `visible` is CUDA_VISIBLE_DEVICES: indices or (beginnings of) UUIDs, separated by commas."""
    asked = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    rows = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 5 or not words[0].isdigit():
            continue  # a message of the driver between the rows
        index, uuid, name, total, free = words
        is_asked = asked is None or any(word == index or uuid.startswith(word) for word in asked)
        if total.isdigit() and free.isdigit() and is_asked:
            rows.append(Gpu(int(index), name, int(total) * MIB, int(free) * MIB))
    return rows
