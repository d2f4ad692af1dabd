"""The tunnels of a run: one tunnel process for each node, found again by a file next to its settings."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
import time
from pathlib import Path

import msgspec

from penstock import processes
from penstock.processes import Marked
from penstock.targets.openssh import Ssh, reading
from penstock.wire.announcement import Process

_MOMENT_S = 3.0


class Tunnel(msgspec.Struct, frozen=True):
    """A tunnel of a node: to our admin address from `announce` there, and from `local` here to the engine's `port`.

    `local` None: the engine is called on another node.
    """

    host: str
    replica: str
    rank: int
    python: str
    announce: int
    admin: int
    local: int | None = None
    port: int = 0


class Tunnels:
    """Of one run. `folder`: where the tunnel processes keep their files, made when absent."""

    def __init__(self, ssh: Ssh, folder: Path, marks: dict[str, str]) -> None:
        self._ssh, self._folder, self._marks = ssh, folder, marks
        self._lock = threading.Lock()
        self._processes: dict[str, Process] = {}

    def keep(self, tunnel: Tunnel) -> None:
        """Start the process of this tunnel, unless it lives."""
        name = f"{tunnel.replica}-{tunnel.rank}"
        with self._lock:
            known = self._processes.get(name)
            if known is not None and processes.is_alive(known):
                return
            marked = self._marked(tunnel.replica, str(tunnel.rank))
            started = [process for process in marked if "tunnel_process" in process.command]
            if known is None and started:  # by an earlier controller
                self._processes[name] = started[0]
                return
            # A tunnel process that was killed leaves its ssh, which holds the ports.
            processes.end(marked, 1.0)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            settings = self._folder / f"{name}.json"
            settings.write_text(json.dumps({"argv": self._argv(tunnel)}), "utf-8")
            marks = {**self._marks, processes.MARK_ROLE: "tunnel", processes.MARK_REPLICA: tunnel.replica}
            marks[processes.MARK_RANK] = str(tunnel.rank)
            argv = [sys.executable, "-m", "penstock.targets.ssh.tunnel_process", str(settings)]
            self._processes[name] = processes.start_detached(argv, marks, self._folder / f"{name}.log")

    def end(self, replica: str | None = None) -> None:
        """End the tunnels of a replica, or all. Safe to repeat."""
        with self._lock:
            processes.end(self._marked(replica), 1.0)
            for path in self._folder.glob(f"{replica}-*" if replica is not None else "*"):
                path.unlink(missing_ok=True)
            for name in [name for name in self._processes if replica in (None, name.rpartition("-")[0])]:
                del self._processes[name]
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def trouble(self, replica: str, rank: int) -> str | None:
        """Why that tunnel is down; None for a moment."""
        try:
            state = json.loads((self._folder / f"{replica}-{rank}.state").read_bytes())
        except (OSError, ValueError):
            return None
        if state["is_up"] or (time.time() - state["at"] < _MOMENT_S and not state["why"]):
            return None
        return reading(str(state["why"]))[0]

    def _marked(self, replica: str | None, rank: str | None = None) -> list[Marked]:
        """Tunnel processes and their ssh."""
        found = processes.find_marked(self._marks[processes.MARK_RUN], replica, rank)
        return [process for process in found if process.role == "tunnel"]

    def _argv(self, tunnel: Tunnel) -> list[str]:
        *words, dashes, host = self._ssh.argv(tunnel.host, shares=False)
        words += ["-o", "ExitOnForwardFailure=yes"]
        words += ["-R", f"127.0.0.1:{tunnel.announce}:127.0.0.1:{tunnel.admin}"]
        if tunnel.local is not None:
            words += ["-L", f"127.0.0.1:{tunnel.local}:127.0.0.1:{tunnel.port}"]
        return [*words, dashes, host, f"exec {shlex.quote(tunnel.python)} -m penstock.targets.ssh.agent hold"]
