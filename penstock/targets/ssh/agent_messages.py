"""What `penstock.targets.ssh.agent` is asked to do on a host, and its answers: JSON over ssh."""

from __future__ import annotations

import msgspec

from penstock.wire.announcement import Process


class Start(msgspec.Struct, frozen=True):
    """A node to start. `folder`: of the run on this host; `files` are relative to it, those in secrets/ only for us.

    In `argv` "{port}" and "{announce}" are the two `ports`; free ones are taken when there are none.
    """

    folder: str
    run_id: str
    replica: str
    rank: int
    argv: tuple[str, ...]
    log: str
    files: dict[str, str] = {}
    environment: dict[str, str] = {}
    ports: tuple[int, int] | None = None


class Started(msgspec.Struct, frozen=True):
    """The node, the boot of its host, and its ports: the engine's, and the one that leads to our admin address."""

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
    """What is still there, in words."""

    left: tuple[str, ...] = ()
