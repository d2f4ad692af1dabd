"""The program of a node: `python -m penstock.node LAUNCH.json --replica 0`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import msgspec

from penstock import engines, processes
from penstock.engines import Engine
from penstock.errors import UserError
from penstock.log_lines import bound_output
from penstock.node import leftovers
from penstock.node.announcer import AdminClient
from penstock.node.group.addresses import Formation
from penstock.node.group.member import GroupMember
from penstock.node.group.rendezvous import BoardClient
from penstock.node.local_processes import NodeArgs, NodeProcesses, Prerequisites
from penstock.node.readings import MachineReader, Readings
from penstock.node.ready_file import ReadyFile
from penstock.node.shared_cache import SharedCache
from penstock.node.staging import Stage
from penstock.node.supervisor import END_S, NodeSupervisor
from penstock.run_folder import Launch
from penstock.wire.structs import prepare_loaded


def _member(
    launch: Launch,
    args: NodeArgs,
    engine: Engine,
    admin: AdminClient,
    prerequisites: Prerequisites,
    readings: Readings,
    file: ReadyFile,
) -> GroupMember:
    """A node that is not the first of its replica."""
    plan = launch.plan

    def start(formation: Formation) -> NodeProcesses:
        local = NodeProcesses(plan, engine, args, lambda: False)
        local.use(*prerequisites.resolve(), prerequisites.cache_folder)
        if plan.executor == "ray":
            local.start_ray(formation)
        else:
            local.start_engine(formation.nodes[args.rank].address, None, formation, None)
        return local

    board = BoardClient(admin, args.replica, args.rank, lambda: member.leave(), readings.latest)
    introduce, on_ready = partial(prerequisites.introduce, admin), prerequisites.cache.give
    member = GroupMember(plan, board, engine, introduce, start, on_ready, file)
    board.start()
    return member


def parser() -> argparse.ArgumentParser:
    """The command line of a node."""
    arguments = argparse.ArgumentParser(prog="penstock.node")
    arguments.add_argument("launch", type=Path)
    arguments.add_argument("--replica", required=True)
    rank = arguments.add_mutually_exclusive_group()
    rank.add_argument("--rank", type=int, default=0, help="of this node among those of the replica")
    rank.add_argument(
        "--rank-from-hostname", action="store_true", help="the number at the end of the host name: NAME-3 is rank 3"
    )
    arguments.add_argument("--hosts", default="", help="names of the replica's nodes by rank, with commas")
    arguments.add_argument("--port", type=int, help="where the engine listens (default: a free port)")
    arguments.add_argument("--url", help="how the gateway calls the engine (default: where it listens)")
    arguments.add_argument("--announce", action="append", help="the gateway's admin address as this node reaches it")
    arguments.add_argument("--ready-file", type=Path, help="exists while this node is ready, for a readiness probe")
    arguments.add_argument(
        "--kill-after", type=float, help="SIGTERM is followed by SIGKILL after so many seconds: be done before"
    )
    arguments.add_argument("--claim-gpus", action="store_true", help="take free GPUs that no other node has")
    return arguments


def rank_of(host: str, n_nodes: int) -> int:
    """The number at the end of a host name, as in the pods of a StatefulSet.  Raises UserError."""
    number = re.search(r"-(\d+)\Z", host.partition(".")[0])
    if number is None:
        hint = "The host name must end in a hyphen and the rank (replica-0, replica-1), or use --rank."
        raise UserError(f'cannot take the rank from host name "{host}"', hint=hint)
    rank = int(number[1])
    if rank >= n_nodes:
        raise UserError(f'cannot take the rank from host name "{host}": rank {rank} of {n_nodes} node(s)')
    return rank


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one node of a replica; the exit code of the process."""
    options = parser().parse_args(argv)
    launch = msgspec.json.decode(options.launch.read_bytes(), type=Launch)
    rank = rank_of(socket.gethostname(), launch.plan.n_nodes) if options.rank_from_hostname else options.rank
    os.environ.setdefault(processes.MARK_RUN, str(options.launch.parent.parent))
    os.environ[processes.MARK_REPLICA] = options.replica
    if launch.plan.n_nodes > 1:
        os.environ[processes.MARK_RANK] = str(rank)
    hosts = tuple(name for name in options.hosts.split(",") if name)
    args = NodeArgs(options.replica, rank, options.port, options.url, hosts)
    file = Path(launch.announce_file) if launch.announce_file and not options.announce else None
    token = Path(launch.token_file).read_text("utf-8").strip()
    admin = AdminClient(options.announce or launch.announce_urls, token, file)
    leftovers.remove_lost_folders()
    ready_file = ReadyFile(options.ready_file)
    readings = Readings(MachineReader(options.launch.parent.parent).read)
    readings.start()
    stage = Stage(launch, admin, lambda: bool(supervisor.stops))
    cache = SharedCache(launch, rank, admin, lambda: bool(supervisor.stops))
    prerequisites = Prerequisites(launch.plan, args, options.claim_gpus, readings, stage, cache)
    prepare_loaded()
    make = NodeSupervisor if rank == 0 else _member
    supervisor = make(launch, args, engines.load(launch.plan.engine), admin, prerequisites, readings, ready_file)
    terms = _on_signals(supervisor.stop, options.kill_after)
    try:
        code = supervisor.run()
    finally:
        ready_file.set(is_ready=False)
        stage.close()
    # The exit code shows that the scheduler ended this node.
    return 128 + signal.SIGTERM if terms and options.kill_after is not None and code == 0 else code


class TimedLines(threading.local):
    """Standard output as a log: the time (UTC) before each line. A line that a full disk does not take is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> None:
        *whole, self._line = (self._line + text).split("\n")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            self._stream.write("".join(f"{at} {line}\n" for line in whole))
        bound_output()

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _on_signals(stop: Callable[[], None], kill_after_s: float | None) -> list[int]:
    """SIGTERM and SIGINT stop the node; each SIGTERM is added to the returned list."""
    terms: list[int] = []

    def on_term(number: int, _: object) -> None:
        terms.append(number)
        if kill_after_s is None or len(terms) == 1:  # a scheduler may repeat it
            stop()
        if kill_after_s is not None and len(terms) == 1:
            # A second stop ends the drain while there is time to end the engine.
            timer = threading.Timer(max(0.5, kill_after_s - END_S), stop)
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, lambda *_: stop())
    return terms


if __name__ == "__main__":
    sys.stdout = cast(TextIO, TimedLines(sys.stdout))
    try:
        sys.exit(main())
    except UserError as exc:
        sys.exit(f"penstock: {exc.message}. {exc.hint or ''}")
