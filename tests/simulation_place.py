"""A scripted place in a simulation: what the real `local` target starts and ends, and the network to the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from simulation_world import EPOCH_S, SimProcess, SimProcesses, rank_of

from penstock.errors import PenstockError
from penstock.processes import MARK_RANK, MARK_REPLICA
from penstock.run_folder import Handle, Run, Unit
from penstock.targets import Placement, local
from penstock.targets.local import Local
from penstock.wire.announcement import Process

if TYPE_CHECKING:
    from simulation import Life

_TIMEOUT_S = 2.0
_START = local._start


class ScriptedPlace(Local):
    """The local target over simulated processes; it refuses, takes its time, sees late what happened, takes machines
    back after a notice, and has as many nodes for a replica as the plan says."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._seen: tuple[float, dict[Unit, Placement]] = (0.0, {})
        self.reclaims: dict[str, float] = {}  # replica -> when, in seconds of the machine

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        machine = self._life.machine
        machine.step(machine.random.random())
        if self._life.has_faults and machine.random.random() < 0.1:
            raise PenstockError("the place is busy", is_retryable=True)
        handle = super().place(run, units)
        machine.step(0.3 * machine.random.random())
        return handle

    def status(self, run: Run) -> dict[Unit, Placement]:
        machine = self._life.machine
        at, seen = self._seen
        fresh = super().status(run)
        if self._life.has_faults and machine.time_s - at < 0.9 and seen.keys() == fresh.keys():
            return seen
        for unit, placement in fresh.items():
            if unit.name in self.reclaims and placement.state == "placed":
                ends_at = EPOCH_S + self.reclaims[unit.name]
                fresh[unit] = msgspec.structs.replace(placement, ends_at=ends_at, lead_s=15.0)
        self._seen = (machine.time_s, fresh)
        return fresh

    def reclaim(self, name: str, notice_s: float) -> None:
        """The machines of a replica are taken away after so long a notice."""
        machine = self._life.machine
        machine.note(f"replica {name} loses its machines in {notice_s:.0f} s")
        self.reclaims[name] = machine.time_s + notice_s

        def take() -> None:
            del self.reclaims[name]
            for process in list(machine.living(replica=name)):
                machine.kill(process)

        machine.after(notice_s, take)

    # ---- replicas of several nodes: in place of functions of `local` -------------------------------------------------

    def start_all(self, run: Run, name: str, gpus: Sequence[int]) -> Process:
        """Start the nodes of a replica one after the other; its first one."""
        first = _START(run, name, gpus)
        processes = SimProcesses(self._life.machine)
        marks = {**processes.marks(str(run.path), "id", "node"), MARK_REPLICA: name}
        for rank in range(1, self._life.plan.n_nodes):
            processes.start_detached(["penstock.node"], marks | {MARK_RANK: str(rank)}, Path())
        return first

    def placement(self, entry: dict[str, Any]) -> Placement:
        """A replica is placed while all of its nodes live."""
        machine = self._life.machine
        first = machine.processes[entry["pid"]]
        living = {*map(rank_of, machine.living("node", first.marks[MARK_REPLICA]))}
        lost = {*range(self._life.plan.n_nodes)} - living
        if lost or not first.is_alive:
            return Placement("gone", f"its nodes {sorted(lost)} are gone")
        return Placement("placed")


class PlaceProcesses(SimProcesses):
    """As a place ends them: all nodes of a replica get a signal at the same time."""

    def end(self, processes: Sequence[Process], grace_s: float) -> list[Process]:
        names = dict.fromkeys(self._machine.processes[process.pid].marks[MARK_REPLICA] for process in processes)
        return super().end([node.identity for name in names for node in self._machine.living("node", name)], grace_s)


class Network:
    """Calls to the gateway's admin address: late, repeated, or lost on the way there or back."""

    def __init__(self, life: Life) -> None:
        self._life, self._machine = life, life.machine
        self.cut: set[SimProcess] = set()

    def call(self, path: str, body: object) -> Any:
        machine, draw = self._machine, self._machine.random.random()
        caller = machine.current
        machine.step(0.002)
        if caller in self.cut or (self._life.has_faults and draw < 0.03):
            return self._silence()
        gateway = self._life.gateway()
        if gateway is None:
            raise PenstockError("connection refused", is_retryable=True)
        answer = gateway.call(path, body)
        if self._life.has_faults and 0.03 < draw < 0.05:
            machine.step(0.1)
            with contextlib.suppress(PenstockError):
                gateway.call(path, body)
        machine.step(0.002)
        if self._life.has_faults and 0.05 < draw < 0.08:
            return self._silence()
        return answer

    def _silence(self) -> Any:
        self._machine.step(_TIMEOUT_S)
        raise PenstockError("no answer", is_retryable=True)
