"""What penstock does on a host that it reaches by ssh: starts nodes, ends them, prints their logs, holds a tunnel.

ssh HOST PYTHON -m penstock.targets.ssh.agent start|end < JSON
ssh HOST PYTHON -m penstock.targets.ssh.agent logs FILE [--follow] [--last N]
ssh HOST PYTHON -m penstock.targets.ssh.agent hold
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock import processes
from penstock.hardware.network import free_lasting_ports
from penstock.log_lines import file_lines
from penstock.paths import remove_temporary, write_atomically
from penstock.wire.announcement import Process

_SILENCE_S = 15.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Start(msgspec.Struct, frozen=True):
    """A node to start. `folder`: of the run on this host; `files` are relative to it, those in secrets/ only for us.

    In `argv` "{port}" and "{announce}" are the two `ports`; free ones are taken when there are none. `local`: the port
    that leads to its engine where it is started from, which `argv` and files name.
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
    local: int | None = None


class Started(msgspec.Struct, frozen=True):
    """The node, the boot of its host, and its ports: the engine's, the one that leads to our admin address, and
    `local` as in its `Start`."""

    process: Process
    boot: str
    host: str
    port: int
    announce: int
    local: int | None = None


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


def start(asked: Start) -> Started:
    """Start a node, detached, in place of whatever is left of an earlier one; without `ports` one that lives is it: a
    controller that was killed started it."""
    folder, boot = Path(asked.folder), _BOOT_ID.read_text().strip()
    note = folder / "nodes" / f"{asked.replica}-{asked.rank}.json"
    before = _read(note) if asked.ports is None else None
    if before is not None and before.boot == boot and processes.is_alive(before.process):
        return before
    for part in ("artifact", "logs", "nodes", "secrets"):
        (folder / part).mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in asked.files.items():
        write_atomically(folder / name, text.encode(), 0o600 if name.startswith("secrets/") else 0o644)
    processes.sweep(str(folder), asked.replica, str(asked.rank))
    port, announce = asked.ports or free_lasting_ports(2)
    argv = [word.replace("{port}", str(port)).replace("{announce}", str(announce)) for word in asked.argv]
    marks = processes.marks(str(folder), asked.run_id, "node")
    marks |= {processes.MARK_REPLICA: asked.replica, processes.MARK_RANK: str(asked.rank), **asked.environment}
    child = processes.start_detached(argv, marks, folder / asked.log)
    started = Started(child, boot, socket.gethostname(), port, announce, asked.local)
    write_atomically(note, msgspec.json.encode(started))
    return started


def _read(note: Path) -> Started | None:
    try:
        return msgspec.json.decode(note.read_bytes(), type=Started)
    except (OSError, msgspec.MsgspecError):
        return None


def end(asked: End) -> Ended:
    """End nodes: politely, then by force what carries the mark; then remove what they left on the disk."""
    processes.end(asked.nodes, asked.grace_s)
    processes.sweep(asked.folder, asked.replica)
    remove_temporary(asked.run_id, asked.replica or "")
    return Ended(tuple(f"process {found.pid}" for found in processes.find_marked(asked.folder, asked.replica)))


def logs(path: Path, follow: bool, last: int | None) -> None:
    """Print a log. With `follow` until our input ends: ssh closes it when the reader has gone."""
    if follow:
        threading.Thread(target=_leave_with_input, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        for line in file_lines(path, follow, last):
            sys.stdout.write(line + "\n")
            if follow:
                sys.stdout.flush()
        sys.stdout.flush()


def _leave_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def hold() -> None:
    """Keep a tunnel's end until its other end is silent, then end the connection that we came by.

    When a link breaks silently, sshd would keep the tunnel's port for hours, and no new tunnel could have it.
    """
    parent = os.getppid()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while select.select([0], [], [], _SILENCE_S)[0]:
        if not os.read(0, 4096):
            return
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().startswith("sshd"):
            os.kill(parent, signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    """Do what the first word says; the exit code of the process."""
    verb, *words = argv
    if verb == "hold":
        hold()
    elif verb == "logs":
        logs(Path(words[0]), "--follow" in words, int(words[words.index("--last") + 1]) if "--last" in words else None)
    else:
        sys.stdout.write(_answer(verb, sys.stdin.buffer.read()) + "\n")
    return 0


def _answer(verb: str, message: bytes) -> str:
    answer: Mapping[str, str] | Started | Ended
    try:
        if verb == "start":
            answer = start(msgspec.json.decode(message, type=Start))
        else:
            answer = end(msgspec.json.decode(message, type=End))
    except OSError as exc:
        answer = {"problem": f"{exc.strerror or exc}{f': {exc.filename}' if exc.filename else ''}"}
    return msgspec.json.encode(answer).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
