"""The parent of every node on a Ray cluster: it outlives Ray's worker and ends the node for sure.

    python -m penstock.targets.ray.guard              # reads the node's arguments, then words, from its input
    python -m penstock.targets.ray.guard sweep RUN REPLICA RUN_ID

When its driver dies, Ray ends the worker and kills the worker's children. So the guard leaves the worker's session, and
ends the node when its input ends.
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
from penstock.paths import make_private, private_folder, remove_temporary

_ORPHAN_GRACE_S = 5.0  # no drain: Ray has given the node's GPUs away already
_OTHER_S = 60.0
_HERE = "{penstock}"


class NodeGuard:
    """One node process, from its start to its end with all that it left."""

    def __init__(self, node_args: dict[str, Any]) -> None:
        self._args = node_args
        self._run: str = node_args["environment"][processes.MARK_RUN]
        # The rank, and its part of the names of folders; None where one node is the whole replica.
        self._rank = str(node_args["rank"]) if node_args["n_nodes"] > 1 else None
        self._part = "" if self._rank is None else f"n{self._rank}"
        self._folder = private_folder(node_args["run_id"], node_args["replica"], self._part + "j")
        self._lock_socket = _alone(f"penstock-guard-{node_args['run_id']}-{node_args['replica']}-{node_args['rank']}")
        self._lock = threading.Lock()
        self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        args, here = self._args, str(Path(penstock.__file__).parent)
        self._sweep()
        make_private(self._folder, self._run)
        token, launch = self._folder / "admin-token", self._folder / "launch.json"
        token.touch(0o600)
        token.write_text(args["token"], "utf-8")
        launch.write_text(json.dumps(args["launch"] | {"token_file": str(token)}).replace(_HERE, here), "utf-8")
        argv = [sys.executable, "-m", "penstock.node", str(launch), "--replica", args["replica"]]
        env = {**args["environment"], processes.MARK_REPLICA: args["replica"], processes.MARK_ROLE: "node"}
        if self._rank is not None:
            argv += ["--rank", self._rank, "--hosts", args["hosts"]]
            env[processes.MARK_RANK] = self._rank
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
        processes.sweep(self._run, self._args["replica"], self._rank)
        remove_temporary(self._args["run_id"], self._args["replica"] + self._part)


def _alone(name: str) -> socket.socket:
    """Wait until no other process of this machine has this lock: a guard that still ends its node would end ours too.

    A name in Linux's abstract namespace: it leaves no file, and goes with its process.
    """
    deadline = time.monotonic() + _OTHER_S
    while True:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0{name}")
            return lock
        except OSError:
            lock.close()
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
    code = NodeGuard(json.loads(sys.stdin.readline())).run()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"\0exit {code}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
