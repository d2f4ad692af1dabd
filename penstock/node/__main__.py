"""The program of a node: `python -m penstock.node LAUNCH.json --replica 0`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock import engines, processes
from penstock.engines import Engine
from penstock.node.announcer import Admin
from penstock.node.group.addresses import Formation
from penstock.node.group.follower import Follower
from penstock.node.group.rendezvous import Group
from penstock.node.local_processes import Footing, Parts, Seat
from penstock.node.supervisor import _END_S, Node, _facts
from penstock.run_folder import Launch


def _follow(launch: Launch, seat: Seat, engine: Engine, admin: Admin, claims_gpus: bool) -> Follower:
    """The part of a node that is not the first of its replica."""
    plan, footing = launch.plan, Footing(launch.plan, seat, claims_gpus)
    group = Group(admin, seat.replica, seat.rank)
    group.start()

    def start(made: Formation) -> Parts:
        parts = Parts(plan, engine, seat, lambda: False)
        parts.settle(*footing.find())
        if plan.executor == "ray":
            parts.start_ray(made)
        else:
            parts.start_engine(made.spots[seat.rank].address, None, made, None)
        return parts

    return Follower(plan, group, engine, lambda: _facts(footing.find()[1]), start)


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one node of a replica of a launch; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="penstock.node")
    parser.add_argument("launch", type=Path)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--rank", type=int, default=0, help="of this node among those of the replica")
    parser.add_argument("--hosts", default="", help="names of the replica's nodes by rank, with commas")
    parser.add_argument("--port", type=int, help="where the engine listens (default: a free port)")
    parser.add_argument("--url", help="how the gateway calls the engine (default: where it listens)")
    parser.add_argument("--announce", action="append", help="the gateway's admin address as seen from here")
    parser.add_argument(
        "--kill-after", type=float, help="SIGTERM is followed by SIGKILL after so many seconds: be done before"
    )
    parser.add_argument("--claim-gpus", action="store_true", help="take free GPUs that no other node has")
    options = parser.parse_args(argv)
    launch = msgspec.json.decode(options.launch.read_bytes(), type=Launch)
    os.environ.setdefault(processes.MARK_RUN, str(options.launch.parent.parent))
    os.environ[processes.MARK_REPLICA] = options.replica
    if launch.plan.n_nodes > 1:
        os.environ[processes.MARK_RANK] = str(options.rank)
    hosts = tuple(name for name in options.hosts.split(",") if name)
    seat = Seat(options.replica, options.rank, options.port, options.url, hosts)
    file = Path(launch.announce_file) if launch.announce_file and not options.announce else None
    admin = Admin(options.announce or launch.announce_urls, Path(launch.token_file).read_text("utf-8").strip(), file)
    engine = engines.load(launch.plan.engine)
    make = Node if seat.rank == 0 else _follow
    supervisor = make(launch, seat, engine, admin, options.claim_gpus)
    handler: Callable[..., None] = supervisor.stop

    terms = []

    def on_term(*_: object) -> None:
        terms.append(1)
        handler()
        if options.kill_after is not None:
            # A stop that does not wait any more, while there is time to end the engine.
            timer = threading.Timer(max(0.5, options.kill_after - _END_S), handler)
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, handler)
    code = supervisor.run()
    # Who reads it knows then that a scheduler ended this node, and not who asked it to drain.
    return 128 + signal.SIGTERM if terms and options.kill_after is not None and code == 0 else code


if __name__ == "__main__":
    sys.exit(main())
