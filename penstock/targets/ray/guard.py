"""Beside every node on a Ray cluster: the node's parent, which outlives Ray's worker and ends the node for sure.

    python -m penstock.targets.ray.guard              # reads its order, then words, from its standard input
    python -m penstock.targets.ray.guard sweep RUN REPLICA RUN_ID

Ray ends the worker that keeps us without a word when its driver dies, and kills the worker's children with it. So the
guard leaves the worker's family, and takes the end of its input as the sign: nobody keeps the node any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock import processes
from penstock.paths import private_folder, remove_temporary

_ORPHAN_GRACE_S = 5.0  # nobody drains for us: Ray has given the node's GPUs away already
_OTHER_S = 60.0
_HERE = "{penstock}"


class Guard:
    """One node process, from its start to its end with all that it left."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._is_several = order["n_nodes"] > 1
        self._run: str = order["environment"][processes.MARK_RUN]
        at = f"n{order['rank']}" if self._is_several else ""
        self._folder = private_folder(order["run_id"], order["replica"], at + "j")
        self._seat = _alone(f"penstock-guard-{order['run_id']}-{order['replica']}-{order['rank']}")
        self._lock = threading.Lock()
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        order = self._order
        self._sweep()
        self._folder.mkdir(mode=0o700)
        token = self._folder / "admin-token"
        token.touch(0o600)
        token.write_text(order["token"], "utf-8")
        launch = self._folder / "launch.json"
        told = order["launch"] | {"token_file": str(token)}
        here = str(Path(penstock.__file__).parent)
        launch.write_text(json.dumps(told).replace(_HERE, here), "utf-8")
        argv = [sys.executable, "-m", "penstock.node", str(launch), "--replica", order["replica"]]
        env = {**order["environment"], processes.MARK_REPLICA: order["replica"], processes.MARK_ROLE: "node"}
        if self._is_several:
            argv += ["--rank", str(order["rank"]), "--hosts", order["hosts"]]
            env[processes.MARK_RANK] = str(order["rank"])
        return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True)

    def run(self) -> int:
        """Until the node has ended; its exit code."""
        threading.Thread(target=self._listen, daemon=True).start()
        code = self._child.wait()
        with self._lock:
            self._sweep()
        return code

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "stop":
                self._child.send_signal(signal.SIGTERM)
            if line.strip() == "kill":
                self._end(0.0)
        self._end(_ORPHAN_GRACE_S)

    def _end(self, grace_s: float) -> None:
        if grace_s:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(grace_s)
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        order = self._order
        rank = str(order["rank"]) if self._is_several else None
        processes.sweep(self._run, order["replica"], rank)
        at = f"n{order['rank']}" if self._is_several else ""
        remove_temporary(order["run_id"], order["replica"] + at)


def _alone(name: str) -> socket.socket:
    """Held by one process of this machine at a time: a guard that is still ending its node would end the next one too.

    A name in Linux's abstract namespace: it leaves no file, and goes with its process.
    """
    deadline = time.monotonic() + _OTHER_S
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0{name}")
            return held
        except OSError:
            held.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main(argv: Sequence[str]) -> int:
    """Guard one node, or sweep what a replica left on this machine; the exit code of the process."""
    if argv and argv[0] == "sweep":
        _, run, replica, run_id = argv
        processes.sweep(run, replica)
        remove_temporary(run_id, replica)
        return 0
    # Ray kills the direct children of a worker that ends, and then this session's: we are neither.
    if os.fork():
        os._exit(0)
    os.setsid()
    code = Guard(json.loads(sys.stdin.readline())).run()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"\0exit {code}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
