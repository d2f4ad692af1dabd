"""Target "local": replicas are processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from penstock import processes
from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine, visible
from penstock.hardware.detect import this_machine
from penstock.planner.launch import usable_gpus
from penstock.run_folder import Artifact, Handle, Launch, Run, Unit, replica
from penstock.spec.deployment import Deployment
from penstock.targets import Placement, Surveyed, Target
from penstock.wire.announcement import Process


class Local(Target):
    name = "local"
    capabilities = frozenset({"survey"})
    is_this_machine = shares_files = True

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        nodes = deployment.hardware.nodes
        message = f"{nodes} nodes, but target local is one machine"
        return [Problem("hardware.nodes", message, "Set hardware.nodes: 1, or another target.")] if nodes > 1 else []

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        return [this_machine(deployment.hardware.gpu_ids)]

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        words = [sys.executable, *(word.replace("{rank}", "0") for word in argv)]
        host, env = socket.gethostname(), os.environ | visible(deployment.hardware.gpu_ids or ())
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env)
        except subprocess.TimeoutExpired:
            return [Surveyed(host, None, err=f"no answer within {timeout_s:.0f} s")]
        return [Surveyed(host, done.returncode, done.stdout, done.stderr)]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        text = msgspec.json.format(msgspec.json.encode(launch), indent=2).decode()
        argv = (python, "-m", "penstock.node", "{run}/artifact/launch.json", "--replica", "{replica}")
        return Artifact(argv, {"launch.json": text + "\n"})

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        entries, problems = run.handle().replicas, list[PenstockError]()
        before = dict(entries)
        for name in run.handle().ordered:
            entries |= _started_before(run, name)
        wanted = {unit.name for unit in units}
        for name in [name for name in entries if name not in wanted]:
            # After SIGTERM the node drains its engine, at most for as long as the plan says.
            processes.end([_process(entries.pop(name))], run.plan().drain_s + 15)
            processes.sweep(str(run.path), name)
        for name in sorted(wanted):
            if name in entries and _placement(entries[name]).state == "placed":
                continue
            processes.sweep(str(run.path), name)
            entries.pop(name, None)
            try:
                chosen = _choose_gpus(run, entries)
            except PenstockError as exc:
                problems.append(exc)
                continue
            entries[name] = {**msgspec.to_builtins(_start(run, name, chosen)), "gpus": chosen}
        if problems and entries == before:
            raise problems[0]
        return Handle(self.name, {replica(name).key: entry for name, entry in entries.items()})

    def status(self, run: Run) -> dict[Unit, Placement]:
        return {replica(name): _placement(entry) for name, entry in run.handle().replicas.items()}

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        return run.log_lines(f"replica-{unit.name}", follow, last)

    def end(self, run: Run, grace_s: float) -> None:
        # By their marks: a handle may be damaged, or not be written yet.
        processes.end([process for process in processes.find_marked(str(run.path)) if process.role == "node"], grace_s)
        for name in {process.replica for process in processes.find_marked(str(run.path))} - {""}:
            processes.sweep(str(run.path), name)


def _placement(entry: dict[str, object]) -> Placement:
    process = _process(entry)
    is_alive = processes.is_alive(process)
    return Placement("placed") if is_alive else Placement("gone", f"its node process {process.pid} is gone")


def _process(entry: dict[str, object]) -> Process:
    return msgspec.convert(entry, Process)


def _started_before(run: Run, name: str) -> dict[str, dict[str, Any]]:
    """The entry of a replica that a controller started and, killed, did not note."""
    for process in processes.find_marked(str(run.path), name):
        if process.role == "node":
            gpus = processes.environment(process).get("CUDA_VISIBLE_DEVICES", "") if run.plan().device == "cuda" else ""
            facts = Process(process.pid, process.started_at, process.role)
            return {name: {**msgspec.to_builtins(facts), "gpus": [int(index) for index in gpus.split(",") if index]}}
    return {}


def _choose_gpus(run: Run, entries: dict[str, dict[str, Any]]) -> list[int]:
    """The GPUs for one more replica: free ones that no replica of the run has. None on a machine without GPUs."""
    plan, ids = run.plan(), run.deployment().hardware.gpu_ids
    if plan.device != "cuda":
        return []
    taken = {index for entry in entries.values() for index in entry.get("gpus", ())}
    usable = usable_gpus(this_machine(ids), plan.gpu_memory_utilization)
    free = [gpu.index for gpu in usable if gpu.index not in taken]
    if len(free) < plan.layout.n_ranks:
        raise PenstockError(
            f'could not place a replica of "{run.name}": it needs {plan.layout.n_ranks} GPUs, {len(free)} are free',
            detail=None if ids is None else f"The file allows GPUs {', '.join(map(str, ids))} (hardware.gpu_ids).",
            hint="nvidia-smi shows what holds the others.",
            is_retryable=True,
        )
    return free[: plan.layout.n_ranks]


def _start(run: Run, replica: str, gpus: Sequence[int]) -> Process:
    artifact = run.artifact()
    # The replica first: a run's own path may have "{replica}" in it.
    argv = [word.replace("{replica}", replica).replace("{run}", str(run.path)) for word in artifact.argv]
    marks = processes.marks(str(run.path), run.record().id, "node") | {processes.MARK_REPLICA: replica}
    return processes.start_detached(argv, marks | visible(tuple(gpus)), run.log(f"replica-{replica}"))
