"""What a job of target "ray" runs on the cluster: the driver of one replica, and a survey of the nodes.

    python -m penstock.targets.ray.driver drive KEY          # KEY: of the replica's arguments in Ray's key-value store
    python -m penstock.targets.ray.driver survey QUESTION    # {"argv", "python", "timeout_s"} as base64 of JSON

The driver reserves a placement group (one bundle a node, each on another machine) and keeps one actor on each bundle;
the actor keeps the node process by a guard. Ray's own Python runs this file: it needs Ray and the standard library.

The arguments hold the admin token. The driver reads them once and deletes them, so that the token is in no runtime
environment, metadata, entrypoint or log, all of which the dashboard shows.
"""

from __future__ import annotations

import base64
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

ENDED = "penstock: every node of this replica has ended"
LOST = " is lost: "
ANSWER = "penstock-survey: "
_READ_S = 20.0
_LOOP_S = 0.5
_KILL_S = 20.0
_WORKER_START_S = 60.0
_AGAIN_S = 2.0
_KEPT_LINES = 20_000
# Ray gives its workers a thread count, which an engine would take for its own.
_NOT_FOR_NODES = ("RAY_", "OMP_NUM_THREADS")


def stop_note(job: str) -> str:
    """The key of what `down` writes: how long the stop may take."""
    return f"gcs://penstock-stop-{job}.zip"


def _say(text: str) -> None:
    sys.stdout.write(f"penstock: {text}\n")
    sys.stdout.flush()


def _node_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_NODES)}


class NodeActor:
    """The actor on one bundle: starts the guard and hands its output on. When it dies, the guard ends the node."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._news = threading.Condition()
        self._code: int | None = None
        self._stdin: Any = None

    def start(self, node_args: dict[str, Any]) -> str:
        """Start the node; the name of this host."""
        python = node_args.pop("python") or sys.executable
        node_args["environment"] = _node_environment() | node_args["environment"]
        guard = subprocess.Popen(
            [python, "-m", "penstock.targets.ray.guard"],
            env=_node_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
        )
        self._stdin = guard.stdin
        threading.Thread(target=self._read, args=(guard,), daemon=True).start()
        self.send(json.dumps(node_args))
        return socket.gethostname()

    def read(self, wait_s: float) -> tuple[list[str], int | None]:
        """What was printed since the last call, after a wait; and the exit code once the node has ended."""
        with self._news:
            self._news.wait_for(lambda: self._lines or self._code is not None, wait_s)
            lines = list(self._lines)
            self._lines.clear()
            return lines, self._code

    def send(self, line: str) -> None:
        """ "stop" asks the node to end, "kill" ends it."""
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except OSError:  # it has ended, and `read` says so
            pass

    def _read(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdout is not None
        code = None
        for raw in guard.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            if line.startswith("\0exit "):
                code = int(line[6:])
                continue
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        first = guard.wait()  # of the process that became the guard
        with self._news:
            self._code = code if code is not None else first or 1
            self._news.notify_all()


class _Rank:
    """One node of the replica, as the driver sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None
        self.ref: Any = None
        self.is_over = False
        self.start_at: float | None = 0.0  # when to start it (again); None while it runs


class Driver:
    """Keeps the nodes of one replica until its job is stopped or the first node has ended."""

    def __init__(self, replica_args: dict[str, Any], group: Any) -> None:
        self._args, self._group = replica_args, group
        self._ranks = [_Rank(number) for number in range(replica_args["n_nodes"])]
        self._hosts: list[str] = []
        self._bundles: list[int] = []  # by rank, in the order of the nodes' addresses
        self._stop_by: float | None = None
        self._is_killing = False
        self.is_stopped = False

    def stop(self, *_: object) -> None:
        self.is_stopped = True

    def run(self) -> int:
        """The exit code of the job."""
        self._wait_placed()
        code = None
        while True:
            self._check_stop()
            self._start_due()
            for rank in self._ready():
                ended = self._read(rank)
                if ended is not None and rank.number == 0 and not self.is_stopped:
                    _say(f"its first node ended with {ended}")
                    code, self.is_stopped = ended, True
                if ended is not None and self.is_stopped:
                    rank.is_over = True
            if self.is_stopped and all(rank.is_over for rank in self._ranks):
                return code or 0
            if self._is_killing and self._stop_by is not None and time.monotonic() > self._stop_by + _KILL_S:
                _say("not every node could be ended")
                return 1

    def _wait_placed(self) -> None:
        began = time.monotonic()
        if not self._group.wait(_LOOP_S):
            _say(f"waits for {self._args['wanted']}")
        while not self.is_stopped and not self._group.wait(_LOOP_S):
            pass
        if not self.is_stopped:
            self._bundles, self._hosts = _order_of(self._group)
            _say(f"placed on {', '.join(self._hosts)} after {time.monotonic() - began:.1f} s")

    def _start_due(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            if rank.start_at is None or now < rank.start_at:
                continue
            rank.start_at = None
            if self.is_stopped:
                rank.is_over = True
                continue
            rank.actor = _actor(self._group, self._bundles[rank.number], self._args["bundle"])
            rank.ref = rank.actor.start.remote(self._node_args(rank.number))

    def _node_args(self, number: int) -> dict[str, Any]:
        keys = ("launch", "token", "python", "environment", "run_id", "replica", "n_nodes")
        return {key: self._args[key] for key in keys} | {"rank": number, "hosts": ",".join(self._hosts)}

    def _ready(self) -> list[_Rank]:
        import ray

        waiting = {rank.ref: rank for rank in self._ranks if rank.ref is not None and not rank.is_over}
        if not waiting:
            time.sleep(_LOOP_S)
            return []
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOP_S)
        return [waiting[ref] for ref in done]

    def _read(self, rank: _Rank) -> int | None:
        """Print a node's output and ask again; its exit code when it has ended (None: it runs, or is lost)."""
        import ray

        try:
            answer = ray.get(rank.ref)
        except ray.exceptions.RayError as exc:
            _say(f"node {rank.number}{LOST}{' '.join(str(exc).split())[:300]}")
            self._again(rank)
            return 1 if self.is_stopped else None
        if isinstance(answer, str):
            _say(f"node {rank.number} starts on {answer}")
            answer = [], None
        lines, code = answer
        if lines:
            prefix = f"[{rank.number}] " if len(self._ranks) > 1 else ""
            sys.stdout.write("".join(f"{prefix}{line}\n" for line in lines))
            sys.stdout.flush()
        if code is None:
            rank.ref = rank.actor.read.remote(_READ_S)
            return None
        if not self.is_stopped and rank.number:
            _say(f"node {rank.number} ended with {code}")
        self._again(rank)
        return int(code)

    def _again(self, rank: _Rank) -> None:
        """A node that is lost is started again as soon as Ray has a machine for its bundle."""
        import ray

        if rank.actor is not None:
            ray.kill(rank.actor)
        rank.ref = rank.actor = None
        rank.start_at = time.monotonic() + _AGAIN_S

    def _check_stop(self) -> None:
        if not self.is_stopped:
            return
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self._args["drain_s"]
            self._send("stop")
        note = _take(stop_note(self._args["job"]))
        if note is not None:
            self._stop_by = min(self._stop_by, time.monotonic() + json.loads(note)["grace_s"])
        if time.monotonic() > self._stop_by and not self._is_killing:
            self._is_killing = True
            self._send("kill")

    def _send(self, word: str) -> None:
        for rank in self._ranks:
            if rank.actor is not None:
                rank.actor.send.remote(word)


def _actor(group: Any, number: int, bundle: dict[str, float]) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    options = {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "resources": custom or None,
        "max_concurrency": 4,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        # Ray's workers run at a niceness of 15, and so would the engine.
        "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
    }
    return ray.remote(NodeActor).options(**options).remote()


def _take(key: str) -> bytes | None:
    """An entry of Ray's key-value store, deleted; None when there is none."""
    from ray.experimental import internal_kv

    value: bytes | None = internal_kv._internal_kv_get(key)
    if value is not None:
        internal_kv._internal_kv_del(key)
    return value


def _order_of(group: Any) -> tuple[list[int], list[str]]:
    """The bundles in the order of their nodes' addresses, and the names of those nodes."""
    import ray
    from ray.util import placement_group_table

    nodes = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerHostname"]) for node in ray.nodes()}
    where = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(where, key=lambda bundle: nodes.get(where[bundle], ("", ""))[0])
    return order, [nodes.get(where[bundle], ("", "?"))[1] for bundle in order]


def _connect() -> None:
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)


def drive(key: str) -> int:
    """Run one replica to its end; the exit code of the job."""
    import ray
    from ray.util import placement_group, remove_placement_group

    _connect()
    raw = _take(key)
    if raw is None:
        _say("the launch instructions of this replica are gone: its job waited too long, or another process read them")
        return 1
    replica_args = json.loads(raw)
    most_cpus = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=1)
    replica_args["bundle"]["CPU"] = min(replica_args["bundle"]["CPU"], most_cpus)
    strategy = "STRICT_SPREAD" if replica_args["n_nodes"] > 1 else "PACK"
    group = placement_group(
        [dict(replica_args["bundle"])] * replica_args["n_nodes"], strategy=strategy, name=replica_args["job"]
    )
    driver = Driver(replica_args, group)
    # After `ray.init`, which sets a handler of its own that leaves at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, driver.stop)
    code = driver.run()
    remove_placement_group(group)
    if code == 0 or not driver._is_killing:
        sys.stdout.write(ENDED + "\n")
        sys.stdout.flush()
    return code


class SurveyActor:
    """The actor on each node of a survey."""

    def is_there(self) -> bool:
        return True

    def ask(self, argv: list[str], python: str | None, rank: int, timeout_s: float) -> dict[str, Any]:
        words = [python or sys.executable, *(word.replace("{rank}", str(rank)) for word in argv)]
        answer: dict[str, Any] = {"host": socket.gethostname(), "exit_code": None, "out": "", "err": ""}
        environment = _node_environment()
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides all GPUs from an actor that reserves none
        try:
            done = subprocess.run(words, capture_output=True, timeout=timeout_s, env=environment, cwd="/")
        except subprocess.TimeoutExpired:
            return answer | {"err": f"no answer within {timeout_s:.0f} s"}
        except OSError as exc:
            return answer | {"err": f"could not start {words[0]}: {exc.strerror}"}
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        return answer | {"exit_code": done.returncode, "out": out, "err": err}


def survey(encoded: str) -> int:
    """Run a command once on every node, all at the same time, and print the answers as one line."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    question = json.loads(base64.b64decode(encoded))
    _connect()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    actors = [
        ray.remote(SurveyActor)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in nodes
    ]
    # Workers take seconds to start on a busy node, and programs that look for each other must run at the same time.
    ray.wait([actor.is_there.remote() for actor in actors], num_returns=len(actors), timeout=_WORKER_START_S)
    refs = [
        actor.ask.remote(question["argv"], question["python"], rank, question["timeout_s"])
        for rank, actor in enumerate(actors)
    ]
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=question["timeout_s"] + 10.0)
    answers = []
    for node, ref in zip(nodes, refs, strict=True):
        answer = {"host": node["NodeManagerHostname"], "exit_code": None, "out": ""}
        try:
            answer = ray.get(ref) if ref in done else answer | {"err": "Ray started nothing there in time"}
        except ray.exceptions.RayError as exc:
            answer |= {"err": " ".join(str(exc).split())[:500]}
        answers.append(answer | {"address": node["NodeManagerAddress"], "resources": node["Resources"]})
    sys.stdout.write(ANSWER + json.dumps(answers) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    """Drive a replica or survey the nodes; the exit code of the job."""
    if sys.version_info < (3, 11):  # noqa: UP036 - Ray chooses the Python here, not our package
        sys.stdout.write(f"penstock needs Python 3.11 or newer, this job runs on {sys.version.split()[0]}\n")
        return 3
    verb, given = argv
    return {"drive": drive, "survey": survey}[verb](given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
