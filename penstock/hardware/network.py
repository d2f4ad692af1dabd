"""Interfaces, addresses and ports of this machine.

`python -m penstock.hardware.network [ADDRESS ...]` prints this machine's addresses, first those that lead there.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import psutil

from penstock.errors import UserError
from penstock.hardware import Interface

# Below the ports that Linux gives to outgoing connections (ip_local_port_range: 32768 and up).
_LASTING_PORTS = range(21000, 32000)
# Interfaces of containers and virtual machines on this host: other machines do not reach them.
_VIRTUAL = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap", "podman", "kube", "lxc")
_NET = Path("/sys/class/net")


def free_port(host: str, besides: Collection[int] = ()) -> int:
    """A port that is free now, and none of `besides`. Another process may take it before the engine does: that start is
    repeated."""
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in besides:
            return port


def free_lasting_ports(count: int) -> list[int]:
    """Different ports of loopback that are free now, outside the range of outgoing connections."""
    ports: list[int] = []
    for port in random.sample(_LASTING_PORTS, len(_LASTING_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no free port")


def check_port(host: str, port: int, field: str = "gateway.port") -> None:
    """Nothing when the port of that host can be listened on; 0 is any free one. `field`: where the file names it.
    Raises UserError that names the process that holds the port, or the host when this machine does not have it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, ValueError) as exc:  # a host that is no name at all is a ValueError
        message = f"cannot listen on {host}:{port}: {(getattr(exc, 'strerror', None) or str(exc)).lower()}"
        if not isinstance(exc, OSError) or isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
            hint = "Set gateway.host to an address of this machine: 127.0.0.1, or 0.0.0.0 for all it has."
            raise UserError(message, hint=hint) from exc
        hint = f"End that process, or choose another port: --set {field}=PORT (0 takes any free one)."
        raise UserError(message, detail=_holder(port), hint=hint) from exc


def _holder(port: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_here = connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
            if is_here and connection.pid is not None:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:120]
                return f"Process {connection.pid} listens there: {command}"
    return None


def interfaces() -> list[Interface]:
    """Interfaces that are up and have an IPv4 address, loopback last."""
    state = psutil.net_if_stats()
    rows = []
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses if name in state and state[name].isup else ():
            if entry.family.name == "AF_INET":
                row = _interface(name, entry.address, entry.netmask, state[name].speed)
                rows.append(msgspec.structs.replace(row, mtu=state[name].mtu or None))
    return sorted(rows, key=lambda row: (row.is_loopback, row.is_virtual, row.name))


def _interface(name: str, address: str, netmask: str | None, speed: int) -> Interface:
    prefix_length = sum(bin(int(part)).count("1") for part in (netmask or "255.255.255.255").split("."))
    kind = ""
    with contextlib.suppress(OSError):
        kind = (_NET / name / "type").read_text().strip()
    # https://www.kernel.org/doc/html/latest/networking/netdevices.html: 32 is ARPHRD_INFINIBAND
    return Interface(name, address, prefix_length, speed or None, kind == "32", name.startswith(_VIRTUAL))


def own_addresses(seen_from: Sequence[str]) -> list[str]:
    """This machine's addresses, first those from which it reaches one of these."""
    addresses = []
    for address in seen_from:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only asks the routes
            addresses.append(str(probe.getsockname()[0]))
    addresses += [interface.address for interface in interfaces() if not interface.is_virtual]
    return [address for address in dict.fromkeys(addresses) if not address.startswith("127.")] or ["127.0.0.1"]


if __name__ == "__main__":
    sys.stdout.write(" ".join(own_addresses(sys.argv[1:])) + "\n")
