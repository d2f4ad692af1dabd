"""A deployment's whole life under a seed: real controller, scaler, supervisors and gateway, scripted faults.

    python tests/simulation.py --seeds 2000              # on all cores; exit code 1 and a line to replay what failed
    python tests/simulation.py --seed 17 --trace         # what happened in one
    python tests/simulation.py --plant "old lease counts as ready"   # until the first seed that finds it

A life: `up`, requests and faults for a minute of virtual time, a calm in which it must become ready, `down`. The seed
decides the order of all steps, what is killed, delayed, lost and repeated. `Broken` says which promise did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import samples
from simulation_faults import FAULTS, Fault
from simulation_gateway import MODEL, QUEUE, Client, Engine, Gateway
from simulation_node import (
    RUN,
    AdminAddress,
    GatewayClient,
    SimEngineClient,
    SimNodeProcesses,
    SimPrerequisites,
)
from simulation_place import Network, PlaceProcesses, ScriptedPlace
from simulation_world import EPOCH_S, Machine, SimProcess, SimProcesses, quiet_greenlets, rank_of

from penstock import engines, targets
from penstock.deployment import observe, stop
from penstock.deployment.controller import loop, news, scaler
from penstock.deployment.controller.loop import Controller
from penstock.node import supervisor
from penstock.node.group import leader
from penstock.node.group.member import GroupMember
from penstock.node.group.rendezvous import BoardClient
from penstock.node.local_processes import NodeArgs
from penstock.node.ready_file import ReadyFile
from penstock.node.supervisor import NodeSupervisor
from penstock.planner import Plan, launch
from penstock.processes import MARK_RANK, MARK_REPLICA, MARK_ROLE, MARK_RUN
from penstock.run_folder import Artifact, Desired, Handle, Launch, Record, Run
from penstock.spec.deployment import Deployment
from penstock.targets import local
from penstock.wire.live import Event

FAULTS_S, CALM_S = 60.0, 240.0
_SHARE = 10  # seeds that a worker process takes at once


class Broken(AssertionError):
    """A promise that did not hold."""


class MemoryRun(Run):
    """The records of a run in memory; every read and write is a switch point."""

    def __init__(self, machine: Machine, records: dict[str, Any], log: list[Event]) -> None:
        super().__init__(Path(RUN))
        self._machine, self.records, self.log_of_events = machine, records, log
        self.is_hidden = False  # its home is away for a while
        self.on_state: Callable[[Any], None] = lambda _: None
        self.scaling_file = cast(Path, _MemoryFile(records, "scaling.json"))
        self.events_file = cast(Path, _MemoryFile(records, "events.jsonl"))

    def exists(self) -> bool:
        return "run.json" in self.records and not self.is_hidden

    def deployment(self) -> Any:
        return self.records["spec.yaml"]

    def add_event(self, kind: str, text: str, replica: str | None = None, who: Any = None, seconds: Any = None) -> None:
        self._machine.note(f"event {kind}: {text}")
        self.log_of_events.append(Event(EPOCH_S + self._machine.time_s, kind, text, replica))

    def events(self, recent: bool = False) -> list[Event]:
        return list(self.log_of_events)

    def _read(self, name: str, kind: type[Any]) -> Any:
        if name not in self.records:
            raise self._unreadable(name, None)
        return self.records[name]

    def _write(self, name: str, value: object, mode: int = 0) -> None:
        self._machine.step()
        self.records[name] = value
        if name == "state.json":
            self.on_state(value)
        self._machine.step()


class _MemoryFile:
    def __init__(self, records: dict[str, Any], name: str) -> None:
        self._records, self._name = records, name

    def read_bytes(self) -> bytes:
        if self._name not in self._records:
            raise FileNotFoundError(self._name)
        return cast(bytes, self._records[self._name])

    def stat(self) -> Any:
        raise FileNotFoundError(self._name)


def _wanted(replicas: Any, nodes: int = 1) -> tuple[Deployment, Plan]:
    """A deployment and its plan; of two nodes each has a stage of the pipeline."""
    deployment = samples.deployment(
        name="one", engine={"drain_s": 8, "executor": "mp"}, gateway={"drain_s": 10}, replicas=replicas,
        hardware={"nodes": nodes}, parallel={"pipeline": nodes},
    )  # fmt: skip
    plan = launch.make(deployment, samples.DEMO, samples.cpu_machine(), "fake", "1.0", 1)
    limits = {"start_timeout_s": 40.0, "stall_s": 20.0, "drain_s": 8.0}
    return deployment, msgspec.structs.replace(plan, served_names=(MODEL,), **limits)


# One life of five has replicas of two nodes: it takes twice as long to play.
LIVES = (*2 * (_wanted(2), _wanted({"min": 1, "max": 3})), _wanted(2, nodes=2))


class Life:
    """One deployment under one seed."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.machine = machine = Machine(seed, trace)
        self.random = machine.random
        self.has_faults = True
        self.engines: dict[int, Engine] = {}
        self.gateways: list[Gateway] = []
        self.clients: list[Client] = []
        self.network = Network(self)
        self.place = ScriptedPlace(self)
        deployment, self.plan = LIVES[self.random.randrange(len(LIVES))]
        self.log: list[Event] = []
        self.records: dict[str, Any] = {
            "spec.yaml": deployment,
            "plan.json": self.plan,
            "artifact.json": Artifact(("python", "-m", "penstock.node"), {}),
            "run.json": Record("id", "one", "local", EPOCH_S, "1"),
            "desired.json": Desired("up", deployment.replicas.first),
            "handle.json": Handle("local"),
        }
        self.run = MemoryRun(machine, self.records, self.log)
        self.run.on_state = self.check_state
        machine.starters = [
            ("penstock.node", self._start_node),
            ("penstock.gateway", self._start_gateway),
            ("controller.watchdog", self._start_watchdog),
            ("penstock.deployment.controller", self._start_controller),
        ]

    # ---- programs ----------------------------------------------------------------------------------------------------

    def gateway(self) -> Gateway | None:
        """The one that has the address."""
        return next((row for row in reversed(self.gateways) if row.process.is_alive and row.is_serving), None)

    def _start_gateway(self, process: SimProcess, argv: Sequence[str]) -> None:
        gateway = Gateway(process, self.engines)
        self.gateways.append(gateway)

        def serve() -> None:
            if self.gateway() is not None:
                process.end(1)  # the port is taken
            else:
                gateway.main()

        self.machine.after(0.2 + self.random.random(), serve)

    def _start_watchdog(self, process: SimProcess, argv: Sequence[str]) -> None:
        controller = process.parent
        assert controller is not None

        def main() -> int:
            world = process.world
            began, is_over = world.now(), world.event()
            if controller.is_alive:
                controller.on_end.append(is_over.set)
                is_over.wait()
            world.sleep(0.5 if world.now() - began > 10.0 else 5.0)
            while self.run.is_hidden:
                world.sleep(0.5)
            if self.run.exists() and self.run.desired().state == "up":
                world.processes.start_detached(["penstock.deployment.controller"], self._marks("controller"), Path())
            return 0

        self.machine.program(process, main)

    def _start_controller(self, process: SimProcess, argv: Sequence[str] = ()) -> None:
        def main() -> int:
            if any(other is not process for other in self.machine.living("controller")):
                return 0  # the lock is held
            controller = Controller(self.run, world=process.world)
            process.on_term = controller.stop.set
            try:
                controller.run_until_stopped()
            finally:
                controller.end_children()
            return 0

        self.machine.program(process, main)

    def _start_node(self, process: SimProcess, argv: Sequence[str]) -> None:
        self._check_alone(process)
        if self.has_faults:
            self._disturb_start(process)
        self.machine.program(process, lambda: self._follow(process) if rank_of(process) else self._lead(process))

    def _check_alone(self, process: SimProcess) -> None:
        """No rank of a replica has two owners, nor two engines."""
        name, rank = process.marks[MARK_REPLICA], rank_of(process)
        for other in self.machine.living(process.role, name):
            if other is not process and rank_of(other) == rank:
                raise Broken(f"rank {rank} of replica {name} has two: {other} and {process}")

    def _lead(self, process: SimProcess) -> int:
        """As penstock/node/__main__.py of a replica's first node."""
        args = NodeArgs(process.marks[MARK_REPLICA])
        what = Launch("one", self.plan, ("http://127.0.0.1:2",), "token"), args, engines.load(self.plan.engine)
        needs, readings = SimPrerequisites(self.plan, args), SimpleNamespace(latest=lambda: None)
        around: Any = (AdminAddress(self.network), needs, readings, ReadyFile(None), process.world)
        node = NodeSupervisor(*what, *around)
        process.on_term = node.stop
        return node.run()

    def _follow(self, process: SimProcess) -> int:
        """As penstock/node/__main__.py of the others."""
        args, admin = NodeArgs(process.marks[MARK_REPLICA], rank_of(process)), AdminAddress(self.network)

        def start(_: object) -> Any:
            here = SimNodeProcesses(self, args)
            here.start_engine("127.0.0.1", "key")
            return here

        board = BoardClient(admin, args.replica, args.rank, lambda: member.leave(), world=process.world)
        needs = SimPrerequisites(self.plan, args)
        member = GroupMember(
            *(self.plan, board, engines.load(self.plan.engine), lambda show: needs.introduce(admin, show)),
            *(start, lambda: None, ReadyFile(None)),
        )
        process.on_term = member.stop
        board.start()
        return member.run()

    def start_engine(self, name: str, rank: int) -> Engine:
        """The part of a replica's engine on that node; it serves on rank 0, while all parts live."""
        machine = self.machine
        machine.step()
        marks = {MARK_RUN: RUN, MARK_REPLICA: name, MARK_ROLE: "engine", MARK_RANK: str(rank)}
        process = machine.process("engine", marks, machine.current)
        self._check_alone(process)
        port = 20_000 + process.pid
        engine = self.engines[port] = Engine(process, name, port, machine.time_s + 1.0 + 4.0 * self.random.random())
        if rank > 0:
            process.on_end.append(lambda: self._lose_part(name))
        engine.has_all_parts = lambda: {*map(rank_of, machine.living("engine", name))} == {*range(self.plan.n_nodes)}
        if self.has_faults and self.random.random() < 0.1:
            machine.after(3.0 * self.random.random(), lambda: machine.kill(process))
        return engine

    def _lose_part(self, name: str) -> None:
        """The others of an engine hang when one of its parts has ended, or they end soon."""
        for engine in self.engines.values():
            if engine.name == name and engine.process.is_alive:
                engine.is_hung = True
                if self.random.random() < 0.5:
                    self.machine.after(3.0 * self.random.random(), functools.partial(self.machine.kill, engine.process))

    def _marks(self, role: str) -> dict[str, str]:
        return SimProcesses(self.machine).marks(RUN, "id", role)

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start the controller, unless one lives."""
        if not any(self.machine.living("controller")):
            self._start_controller(self.machine.process("controller", self._marks("controller"), None))

    def _ask(self) -> None:
        """A request now, and the next one later."""
        gateway, machine = self.gateway(), self.machine
        if gateway is not None:
            client = Client(gateway, len(self.clients))
            self.clients.append(client)
            gateway.request(client)
            if self.random.random() < 0.1:
                machine.after(3.0 * self.random.random(), client.leave)
        if self.has_faults:
            machine.after(self.random.expovariate(0.5), self._ask)

    def _fault(self) -> None:
        """One fault now, and the next one later."""
        if not self.has_faults:
            return
        machine, draw = self.machine, self.random.random()
        living = list(machine.living())
        victim = self.random.choice(living) if living else None
        if draw < 0.15:
            self._scale()
        elif draw < 0.25 and victim is not None:
            self._cut(victim, 12.0)
        elif draw < 0.35 and (running := [row for row in self.engines.values() if row.is_up]):
            self.random.choice(running).is_hung = True
        elif draw < 0.45 and victim is not None and MARK_REPLICA in victim.marks:  # all of a replica at once
            for engine in self.engines.values():
                engine.is_off |= engine.process.is_alive and engine.name == victim.marks[MARK_REPLICA]
            for process in list(machine.living(replica=victim.marks[MARK_REPLICA])):
                self._kill(process)
        elif draw < 0.48 and victim is not None and (name := victim.marks.get(MARK_REPLICA)) is not None:
            if name not in self.place.reclaims:
                self.place.reclaim(name, 25.0 * self.random.random())
        elif draw < 0.52:  # the home of all runs is away
            self.run.is_hidden = True
            machine.after(8.0 * self.random.random(), self._show)
        elif draw < 0.57:
            for role in ("controller", "watchdog"):
                for process in list(machine.living(role)):
                    self._kill(process)
        elif victim is not None:
            self._kill(victim)
        machine.after(self.random.expovariate(0.15), self._fault)

    def _kill(self, process: SimProcess) -> None:
        """Kill it; a user types `up` when nothing is left that would bring the controller back."""
        self.machine.kill(process)
        watchers = [*self.machine.living("controller"), *self.machine.living("watchdog")]
        if process.role in ("controller", "watchdog") and not watchers:
            self.machine.after(5.0 * self.random.random(), self.up)

    def _disturb_start(self, node: SimProcess) -> None:
        """A node has been started and is not noted yet: its controller may die now, or its network be late."""
        draw, machine = self.random.random(), self.machine
        if draw < 0.1 and node.parent is not None:
            machine.at(machine.time_s, lambda: self._kill(cast(SimProcess, node.parent)))
            if draw < 0.05:
                machine.after(2.0 * self.random.random(), self._scale)
        elif draw < 0.15:
            self._cut(node, 8.0)

    def _cut(self, process: SimProcess, most_s: float) -> None:
        """Cut its way to the gateway for a while."""
        self.network.cut.add(process)
        self.machine.note(f"cut {process}")
        self.machine.after(most_s * self.random.random(), lambda: self.network.cut.discard(process))

    def _show(self) -> None:
        self.run.is_hidden = False

    def _scale(self) -> None:
        number = 1 + self.random.randrange(3)
        follows = self.records["spec.yaml"].replicas.follows_load
        self.machine.note(f"scale to {number}")
        self.records["desired.json"] = Desired("up", number, is_pinned=follows and self.random.random() < 0.5)

    # ---- promises ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every step."""
        for gateway in self.gateways[-2:]:
            if gateway.context.queue.waiting > QUEUE:
                raise Broken(f"{gateway.context.queue.waiting} requests wait, {QUEUE} may")

    def check_state(self, state: Any) -> None:
        """Each time that it is written: no replica is ready by what a node announced whose end is noted in it."""
        for row in state.replicas:
            nodes = [node for node in self.machine.processes.values() if node.marks.get(MARK_REPLICA) == row.replica]
            nodes = [node for node in nodes if node.role == "node" and rank_of(node) == 0]
            if row.state != "ready" or len(nodes) < 2:
                continue
            before, newest = nodes[-2:]
            is_of_before = row.announcement.started_at < EPOCH_S + newest.started_at - 0.1
            if is_of_before and any(restart.at > EPOCH_S + before.ended_s for restart in row.restarts):
                raise Broken(f"replica {row.replica} is called ready by what {before} announced, which has ended")

    def check_requests(self) -> None:
        for client in self.clients:
            tokens = client.tokens()
            if client.is_whole and client.ends not in (["complete"], ["left"], ["gateway died"]):
                raise Broken(f"request {client.number} had its last event, and then: {client.ends}")
            if len(client.ends) != 1:
                raise Broken(f"request {client.number} ended {len(client.ends)} times: {client.ends}")
            if tokens != list(range(len(tokens))):
                raise Broken(f"request {client.number} got tokens {tokens}")
            if client.ends == ["complete"] and not client.is_whole:
                raise Broken(f"request {client.number} is called complete after {tokens}")

    def why_not_ready(self) -> str | None:
        """None once it is as it must be when nothing disturbs it."""
        state = self.records.get("state.json")
        if state is None or state.phase != "ready":
            return f"its phase is {state and state.phase}: {state and [(r.replica, r.state) for r in state.replicas]}"
        handle = self.records["handle.json"]
        nodes = sorted((node.marks[MARK_REPLICA], rank_of(node)) for node in self.machine.living("node"))
        if nodes != [(name, rank) for name in sorted(handle.replicas) for rank in range(self.plan.n_nodes)]:
            return f"nodes {nodes} run, the handle has {sorted(handle.replicas)}"
        if handle.ordered:
            return f"the handle has {handle.ordered} that were ordered"
        if open_requests := [client.number for client in self.clients if not client.ends]:
            return f"requests {open_requests} have not ended"
        gateway = self.gateway()
        if gateway is not None and (left := gateway.leaks()):
            return f"its gateway keeps {left} of requests that have ended"
        if state.scaling is None and len(handle.replicas) != self.records["desired.json"].replicas:
            return f"{len(handle.replicas)} replicas run, {self.records['desired.json'].replicas} are wanted"
        return None

    # ---- the story ---------------------------------------------------------------------------------------------------

    def play(self) -> None:
        machine = self.machine
        self.up()
        machine.after(0.5, self._ask)
        machine.after(self.random.expovariate(0.2), self._fault)
        machine.run(machine.time_s + FAULTS_S, self.check)
        self.has_faults, machine.is_calm = False, True
        self.network.cut.clear()
        self._show()
        for engine in self.engines.values():
            engine.is_hung = False
        machine.note("calm")
        ends_at = machine.time_s + CALM_S
        while (why := self.why_not_ready()) is not None:
            if self._has_failed():
                return
            if machine.time_s > ends_at:
                raise Broken(f"not ready after {CALM_S:.0f} s without a fault: {why}")
            machine.run(machine.time_s + 2.0, self.check)
        self._end()

    def _has_failed(self) -> bool:
        """A replica failed for good, as its policy says; the state must say so."""
        state = self.records.get("state.json")
        return state is not None and any(row.state == "failed" for row in state.replicas)

    def _end(self) -> None:
        machine = self.machine
        verb = machine.process("down", {}, None)
        machine.program(verb, lambda: len(stop.end_run(self.run, False, None)) * 0)
        ends_at = machine.time_s + 120.0
        while verb.is_alive and machine.time_s < ends_at:
            machine.run(machine.time_s + 1.0, self.check)
        machine.run(machine.time_s + 20.0, self.check)
        if verb.is_alive:
            raise Broken("`down` did not end")
        left = [process for process in machine.living() if process.role != "down"]
        if left:
            raise Broken(f"after `down` these live: {left}")
        self.check_requests()

    def discard(self) -> None:
        self.machine.discard()
        for gateway in self.gateways:
            gateway.discard()


@contextlib.contextmanager
def patched(life: Life, fault: Fault | None) -> Iterator[None]:
    """The modules under simulation with this life's processes, network and engines in them, and a planted fault."""
    machine = life.machine
    processes = SimProcesses(machine)
    clock = SimpleNamespace(monotonic=lambda: machine.time_s, time=lambda: EPOCH_S + machine.time_s)
    clients = lambda *_: [GatewayClient(life.network)]  # noqa: E731
    rows: list[tuple[Any, str, Any]] = [
        (targets, "load", lambda _: life.place),
        (local, "processes", PlaceProcesses(machine)),
        (local, "_start", life.place.start_all),
        *([(local, "_placement", life.place.placement)] if life.plan.n_nodes > 1 else []),
        (leader, "free_port", lambda *_: 29_500),
        *((module, "gateways", clients) for module in (loop, observe, news)),
        (loop, "Sight", lambda _: SimpleNamespace(is_hidden=lambda: life.run.is_hidden)),
        (loop, "measured", SimpleNamespace(keep=lambda *_: None, keep_start=lambda *_: None)),
        (scaler, "write_atomically", lambda file, data: life.records.__setitem__("scaling.json", data)),
        (scaler, "append", lambda *_: None),
        (supervisor, "NodeProcesses", lambda plan, engine, args, is_stopped: SimNodeProcesses(life, args)),
        (supervisor, "EngineClient", lambda url, key, metrics, plan: SimEngineClient(life, url)),
        (stop, "processes", processes),
        (stop, "time", clock),
        (stop, "gpu_memory", SimpleNamespace(wait_released=lambda _: None)),
        (stop, "remove_temporary", lambda _: None),
    ]
    if fault is not None:
        rows += fault.patches
    before = [(module, name, getattr(module, name)) for module, name, _ in rows]
    for module, name, value in rows:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def simulate(seed: int, trace: Callable[[str], None] | None = None, fault: Fault | None = None) -> str | None:
    """Play one life; which promise broke, or None."""
    logging.disable()
    life = Life(seed, trace)
    with patched(life, fault), contextlib.redirect_stdout(io.StringIO()):
        try:
            life.play()
        except Broken as exc:
            return str(exc)
        except Exception as exc:  # noqa: BLE001 - a fault of the code under simulation is a finding too
            return f"{type(exc).__name__}: {exc}"
        finally:
            life.discard()
    return None


def _play_share(share: tuple[Sequence[int], str | None]) -> list[tuple[int, str]]:
    seeds, fault = share
    quiet_greenlets()
    return [(seed, why) for seed in seeds if (why := simulate(seed, None, FAULTS.get(fault or ""))) is not None]


def broken_lives(seeds: Sequence[int], fault: str | None = None) -> Iterator[tuple[int, str]]:
    """Play all seeds on all cores: those that broke a promise, with the promise, in no order."""
    shares = [(tuple(seeds[start : start + _SHARE]), fault) for start in range(0, len(seeds), _SHARE)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for rows in pool.imap_unordered(_play_share, shares):
            yield from rows


def replay_line(seed: int) -> str:
    return f"python tests/simulation.py --seed {seed} --trace"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--plant", choices=FAULTS, help="a fault of the past; it ends at the first seed that finds it")
    parser.add_argument("--trace", action="store_true", help="print every step of --seed")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a life
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    if options.seed is not None:
        quiet_greenlets()
        out = sys.stdout
        trace = (lambda line: print(line, file=out)) if options.trace else None
        why = simulate(options.seed, trace, FAULTS.get(options.plant or ""))
        print(why or "all promises held")
        return int(why is not None)
    began = time.perf_counter()
    lives = broken_lives(range(options.first, options.first + options.seeds), options.plant)
    if options.plant is not None:
        found = next(lives, None)
        print(f"seed {found[0]} finds it: {found[1]}" if found else f"none of {options.seeds} seeds finds it")
        return int(found is None)
    broken = sorted(lives)
    for seed, why in broken:
        print(f"{replay_line(seed)}  # {why}")
    seconds = time.perf_counter() - began
    print(f"{options.seeds - len(broken)} of {options.seeds} lives kept all promises ({seconds:.0f} s)")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
