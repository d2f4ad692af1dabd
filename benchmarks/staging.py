"""How much longer four machines take than one to get the same weights, and how much of it the source sends.

    python benchmarks/staging.py [--nodes 4] [--mib 256] [--shards 8] [--mbit 200] [--rounds 2] [--source hub|folder]

Each machine is a set of namespaces with a cable of --mbit outwards (`tc`), as is the one that serves the model: a hub,
or a folder that only the first node sees. The time is from the start of the nodes to the last one that
is ready, with a fake engine. Rounds take turns, so that other work on the machine hits both. Needs what the tests on
hosts need (`make hosts`, root).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import msgspec
from hosts import ROOT, Host, Hosts, Inside
from hub_server import COMMIT, HubServer
from nodes_rig import Rig
from samples import demo_plan

from penstock.planner import Plan
from penstock.text import MIB
from penstock.wire.announcement import GatewayView

NAME = "org/big"
PORT = 8123


def weights(n_mib: int, n_shards: int) -> dict[str, bytes]:
    source = random.Random(1)
    sizes = [n_mib * MIB // n_shards] * n_shards
    shards = {f"model-{i:05d}-of-{n_shards:05d}.safetensors": source.randbytes(size) for i, size in enumerate(sizes, 1)}
    return {"config.json": b"{}", **shards}


def serve(address: str, n_mib: int, n_shards: int) -> None:
    """The hub, on a machine of its own."""
    server = HubServer(NAME, weights(n_mib, n_shards), address, PORT)
    server.serve_forever()


def plan(path: str, reference: str) -> Plan:
    whole = demo_plan("fake")
    return msgspec.structs.replace(whole, model=msgspec.structs.replace(whole.model, path=path, reference=reference))


def limit(host: Host, mbit: int) -> None:
    """A cable of so many Mbit/s, out of the host."""
    name = host.run(["sh", "-c", "ip -o link | grep -v ' lo:' | head -1 | cut -d: -f2 | cut -d@ -f1"]).stdout.strip()
    shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
    host.run(["tc", "qdisc", "replace", "dev", name, "root", *shape])


def sent_bytes(host: Host) -> int:
    rows = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
    return sum(int(row.split()[9]) for row in rows if not row.strip().startswith("lo:"))


class Measured(msgspec.Struct, frozen=True):
    seconds: float
    n_sent: int


def measure(hosts: Hosts, options: argparse.Namespace, n_nodes: int) -> Measured:
    """Seconds until `n_nodes` machines are ready, and what the one that serves the model sent meanwhile."""
    source = hosts[-1]
    with tempfile.TemporaryDirectory(dir=hosts.shared) as name, contextlib.ExitStack() as stack:
        folder, env = Path(name), {"HF_ENDPOINT": f"http://{source.address}:{PORT}", "HF_HUB_CACHE": "/tmp/hub"}
        path = f"/elsewhere/models--org--big/snapshots/{COMMIT}"
        if options.source == "folder":
            path = "/root/big"
            giver, stage = hosts[0], "/tmp/copies"
        else:
            giver, stage = source, "none"
        rig = Rig(folder, plan(path, NAME if options.source == "hub" else path), hosts.own_address, stage=stage)
        stack.callback(rig.close)
        if options.source == "folder":
            (giver.home / "big").mkdir(exist_ok=True)
            for file, body in weights(options.mib, options.shards).items():
                (giver.home / "big" / file).write_bytes(body)
        before, began = sent_bytes(giver), time.monotonic()
        for number in range(n_nodes):
            rig.node(0, "--replica", str(number), popen=starter(hosts[number], env))

        def are_ready() -> bool:
            rows = msgspec.convert(rig.admin.get_json("/admin/replicas"), GatewayView).replicas
            failed = [row.announcement.reason for row in rows if row.announcement.state == "failed"]
            assert not failed, failed
            return sum(row.announcement.state == "ready" for row in rows) == n_nodes

        rig.until(are_ready, "all are ready")
        seconds = time.monotonic() - began
        sent = sent_bytes(giver) - before
        rig.stop()
    for host in hosts:
        for place in ("tmp/hub", "tmp/copies"):
            shutil.rmtree(hosts.base / "hosts" / host.name / place, ignore_errors=True)
    return Measured(seconds, sent)


def starter(host: Host, more: dict[str, str]) -> Callable[..., Inside]:
    """Starts programs there with more variables."""

    def start(argv: list[str], env: dict[str, str], **rest: Any) -> Inside:
        return host.popen(argv, env=env | more, **rest)

    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 4), ("mib", 256), ("shards", 8), ("mbit", 200), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--source", choices=("hub", "folder"), default="hub")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.mib, options.shards)
    with Hosts(options.nodes + 1) as hosts:
        for host in hosts:
            limit(host, options.mbit)
        words = ["--serve", hosts[-1].address, "--mib", str(options.mib), "--shards", str(options.shards)]
        hosts[-1].service(["env", f"PYTHONPATH={ROOT}", sys.executable, __file__, *words])
        first = 1 if options.source == "hub" else 2  # the one that has the folder needs no cable
        rows: dict[int, list[Measured]] = {first: [], options.nodes: []}
        for _ in range(options.rounds):
            for n_nodes, row in rows.items():
                row.append(measure(hosts, options, n_nodes))
                print(f"{n_nodes} node(s): {row[-1].seconds:.1f} s, sent {row[-1].n_sent / MIB:.0f} MiB", flush=True)
        one, many = (statistics.median(measured.seconds for measured in row) for row in rows.values())
        sent = statistics.median(measured.n_sent for measured in rows[options.nodes])
        print(f"{options.nodes} nodes / {first} node(s): {many / one:.2f} (asked at most 1.5)")
        print(f"the source sent {sent / MIB / options.mib:.2f} x the model (asked at most 2)")
    return None


if __name__ == "__main__":
    main()
