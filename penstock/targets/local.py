"""Target "local": replicas are processes on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock import processes
from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine
from penstock.hardware.detect import this_machine
from penstock.planner.launch import usable_gpus
from penstock.run_folder import Artifact, Handle, Launch, Run
from penstock.spec.deployment import Deployment
from penstock.targets import Placement, Surveyed, Target
from penstock.wire.announcement import Process


class Local(Target):
    name = "local"
    features = frozenset({"resize", "logs-follow"})

    def check(self, deployment: Deployment) -> list[Problem]:
        if deployment.hardware.nodes > 1:
            hint = "Set hardware.nodes: 1, or another target."
            return [
                Problem("hardware.nodes", f"{deployment.hardware.nodes} nodes, but target local is one machine", hint)
            ]
        return []

    def machines(self, deployment: Deployment) -> list[Machine]:
        return [this_machine()]

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        words = [sys.executable, *(word.replace("{rank}", "0") for word in argv)]
        host = socket.gethostname()
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return [Surveyed(host, None, err=f"no answer within {timeout_s:.0f} s")]
        return [Surveyed(host, done.returncode, done.stdout, done.stderr)]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        text = msgspec.json.format(msgspec.json.encode(launch), indent=2).decode()
        argv = (python, "-m", "penstock.node", "{run}/artifact/launch.json", "--replica", "{replica}")
        return Artifact(argv, {"launch.json": text + "\n"})

    def submit(self, run: Run, replicas: Sequence[str]) -> Handle:
        try:
            return self.resize(run, Handle(self.name), replicas)
        except BaseException:
            processes.sweep(str(run.path))
            raise

    def status(self, run: Run, handle: Handle) -> dict[str, Placement]:
        return {replica: _placement(entry) for replica, entry in handle.replicas.items()}

    def logs(self, run: Run, handle: Handle, replica: str, follow: bool, last: int | None = None) -> Iterator[str]:
        return run.log_lines(f"replica-{replica}", follow, last)

    def resize(self, run: Run, handle: Handle, replicas: Sequence[str]) -> Handle:
        entries = dict(handle.replicas)
        for replica in [replica for replica in entries if replica not in replicas]:
            # The node drains its engine by itself after SIGTERM; the plan says for how long at most.
            _end(run, replica, entries.pop(replica), grace_s=run.plan().drain_s + 15)
        for replica in replicas:
            if replica in entries and _placement(entries[replica]).state == "placed":
                continue
            processes.sweep(str(run.path), replica)
            entries.pop(replica, None)
            chosen = _choose_gpus(run, entries)
            entries[replica] = {**msgspec.to_builtins(_start(run, replica, chosen)), "gpus": chosen}
        return Handle(self.name, entries)

    def cancel(self, run: Run, handle: Handle, grace_s: float) -> None:
        nodes = [_process(entry) for entry in handle.replicas.values()]
        processes.end(nodes, grace_s)
        for replica in handle.replicas:
            processes.sweep(str(run.path), replica)


def _placement(entry: dict[str, object]) -> Placement:
    process = _process(entry)
    if processes.is_alive(process):
        return Placement("placed")
    return Placement("gone", f"its node process {process.pid} is gone")


def _process(entry: dict[str, object]) -> Process:
    return msgspec.convert(entry, Process)


def _choose_gpus(run: Run, entries: dict[str, dict[str, Any]]) -> list[int]:
    """The GPUs for one more replica: free ones that no replica of the run has. None on a machine without GPUs."""
    made = run.plan()
    if made.device != "cuda":
        return []
    taken = {index for entry in entries.values() for index in entry.get("gpus", ())}
    usable = usable_gpus(this_machine(), made.gpu_memory_utilization)
    free = [gpu.index for gpu in usable if gpu.index not in taken]
    if len(free) < made.layout.n_ranks:
        raise PenstockError(
            f'could not place a replica of "{run.name}": it needs {made.layout.n_ranks} GPUs, {len(free)} are free',
            hint="nvidia-smi shows what holds the others.",
            is_retryable=True,
        )
    return free[: made.layout.n_ranks]


def _start(run: Run, replica: str, gpus: Sequence[int]) -> Process:
    artifact = run.artifact()
    # The replica first: a run's own path may have "{replica}" in it.
    argv = [word.replace("{replica}", replica).replace("{run}", str(run.path)) for word in artifact.argv]
    marks = processes.marks(str(run.path), run.record().id, "node") | {processes.MARK_REPLICA: replica}
    if gpus:
        marks["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return processes.start_detached(argv, marks, run.log(f"replica-{replica}"))


def _end(run: Run, replica: str, entry: dict[str, object], grace_s: float) -> None:
    processes.end([_process(entry)], grace_s)
    processes.sweep(str(run.path), replica)
