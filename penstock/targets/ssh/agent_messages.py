"""What `penstock.targets.ssh.agent` is told to do on a host, and what it answers: JSON over ssh."""

from __future__ import annotations

import msgspec

from penstock.wire.announcement import Process


class Start(msgspec.Struct, frozen=True):
    """A node to start. `folder`: of the run on this host. `files`: relative to it; `secrets` too, for our eyes only.

    In `argv` "{port}" and "{announce}" are the ports: those of `ports`, or free ones where that has none.
    """

    folder: str
    run_id: str
    replica: str
    rank: int
    argv: tuple[str, ...]
    log: str
    files: dict[str, str] = {}
    secrets: dict[str, str] = {}
    environment: dict[str, str] = {}
    ports: dict[str, int] = {}


class Started(msgspec.Struct, frozen=True):
    """Who the node is, on which boot of which host, and its ports: the engine's, and the one that leads to us."""

    process: Process
    boot: str
    host: str
    port: int
    announce: int


class End(msgspec.Struct, frozen=True):
    """What to end of a run: one replica, or all (None)."""

    folder: str
    run_id: str
    nodes: tuple[Process, ...]
    grace_s: float
    replica: str | None = None


class Ended(msgspec.Struct, frozen=True):
    """What had to be ended by force, and what is still there."""

    swept: tuple[int, ...] = ()
    left: tuple[str, ...] = ()
