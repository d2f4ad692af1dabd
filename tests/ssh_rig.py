"""Deployments over ssh on the tests' hosts: files, what is left on the hosts, and who runs there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hosts import Host, HostProcess, Hosts
from launching import Place


def write(place: Place, hosts: Hosts, name: str = "one", *, ssh: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A deployment file for the hosts. penstock is brought into a folder that all of them share, once a session."""
    block = {
        "hosts": hosts.names,
        "config": str(hosts.ssh_config),
        "python": sys.executable,
        "folder": str(hosts.base / "brought"),
        **(ssh or {}),
    }
    return place.write(name, target="ssh", ssh=block, **fields)


def ours(host: Host) -> list[HostProcess]:
    """Processes of runs on a host, and what holds their tunnels."""
    return [
        process
        for process in host.processes()
        if "PENSTOCK_RUN" in process.env or any("penstock" in word for word in process.argv[1:3])
        if "hosts_janitor" not in str(process.argv) and not process.argv[0].startswith(("bash", "sshd", "/usr/sbin"))
    ]


def node_of(host: Host, replica: str = "0") -> HostProcess:
    (found,) = [
        process
        for process in ours(host)
        if process.env.get("PENSTOCK_ROLE") == "node" and process.env.get("PENSTOCK_REPLICA") == replica
    ]
    return found


def left_on(hosts: Hosts) -> list[str]:
    """What runs of ours left on the hosts that are on: processes, folders, shared memory, listening ports."""
    found = []
    places = f"/tmp/penstock-* /dev/shm/* /root/.penstock/remote/* {hosts.base}/brought/remote/*"
    for host in hosts:
        if host.is_on:
            found += [f"{host.name}: {process.argv}" for process in ours(host)]
            listing = host.run(["sh", "-c", f"ls -d {places} 2>/dev/null; true"]).stdout.split()
            found += [f"{host.name}: {path}" for path in listing if not path.startswith(str(hosts.base / "."))]
            ports = host.run(["sh", "-c", "cat /proc/net/tcp"]).stdout.splitlines()[1:]
            listening = [int(row.split()[1].partition(":")[2], 16) for row in ports if row.split()[3] == "0A"]
            found += [f"{host.name}: port {port}" for port in listening if port != 22]
    return [line for line in found if not line.endswith(str(hosts.base))]
