"""The processes of a replica on one node: the engine, and Ray where Ray spreads it over machines."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import engines, processes
from penstock.engines import Among, Command, Diagnosis, Engine, Place
from penstock.hardware import visible
from penstock.hardware.detect import this_node
from penstock.hardware.network import free_port
from penstock.log_lines import last_words
from penstock.node import engine_cache, gpu_locks, load_choice, model_files
from penstock.node.announcer import AdminClient
from penstock.node.engine_process import EngineProcess
from penstock.node.gpu_memory import GpuMemory
from penstock.node.group import addresses, ray
from penstock.node.group.addresses import Formation, Introduction
from penstock.node.readings import Readings
from penstock.node.shared_cache import SharedCache
from penstock.node.staging import Show, Stage
from penstock.paths import private_folder
from penstock.planner import Plan
from penstock.wire.announcement import Process

_RAY_HEAD_S = 60.0
_RAY_JOIN_S = 60.0
_POLL_S = 0.1

OnLine = Callable[[str], None]


class NodeArgs(msgspec.Struct, frozen=True):
    """A node's command line. `port`, `url`: where the engine listens and how the gateway calls it, if decided before.

    `hosts`: names of the replica's nodes by rank, for messages. `gpus`: those that it claimed.
    """

    replica: str
    rank: int = 0
    port: int | None = None
    url: str | None = None
    hosts: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()


class Prerequisites:
    """What an engine's start needs: model files, and GPUs where no scheduler assigns them. Resolved once.

    From then on `readings` has the GPUs too.
    """

    def __init__(
        self,
        plan: Plan,
        args: NodeArgs,
        claims_gpus: bool,
        readings: Readings,
        stage: Stage,
        cache: SharedCache,
    ) -> None:
        self.cache = cache
        self.cache_folder: str | None = None  # for what the engine compiles, once resolved
        self._plan, self._args, self._claims_gpus, self._readings = plan, args, claims_gpus, readings
        self._stage, self._lock = stage, threading.Lock()
        self._resolved: tuple[Plan, NodeArgs] | None = None
        self.loading = load_choice.Chosen(plan)  # how the weights are loaded, once resolved
        self._claim: gpu_locks.Claim | None = None

    def resolve(self, show: Show = lambda _: None) -> tuple[Plan, NodeArgs]:
        """The plan with this machine's paths, the arguments with its GPUs. May fetch the model, and shows it.
        Raises PenstockError."""
        with self._lock:
            if self._resolved is None:
                self._resolved = self._resolve(show)
            return self._resolved

    def _resolve(self, show: Show) -> tuple[Plan, NodeArgs]:
        engine, environment = engines.load(self._plan.engine), os.environ | self._plan.env
        self.cache_folder = engine_cache.folder_for(engine, self._plan, environment)
        self.cache.begin(self.cache_folder)
        self.loading = load_choice.choose(model_files.on_this_node(self._plan, self._stage, show))
        plan, args = self.loading.plan, self._args
        if self.loading.text:
            print(f"penstock: weights: {self.loading.text}", flush=True)
        if self._claims_gpus and plan.device == "cuda":
            self._claim = gpu_locks.claim(plan.ranks_each, plan.gpu_memory_utilization)
            args = msgspec.structs.replace(args, gpus=self._claim.indices)
        if plan.device == "cuda":
            self._readings.use_gpus(os.environ | plan.env | visible(args.gpus), plan.ranks_each)
        self.cache.wait()
        return plan, args

    def drop_format(self) -> bool:
        """Let the next start load in the engine's default way; whether a load format had been chosen here."""
        if self._resolved is None or not self.loading.has_format:
            return False
        plan = msgspec.structs.replace(self._resolved[0], args=self._plan.args)
        text = "the engine's default, since the start with a chosen load format failed"
        self.loading, self._resolved = load_choice.Chosen(plan, text), (plan, self._resolved[1])
        return True

    def introduce(self, admin: AdminClient, show: Show = lambda _: None) -> Introduction:
        """This node's introduction to its group, with its GPUs. Blocks, as `resolve`.  Raises PenstockError."""
        args, facts = self.resolve(show)[1], this_node()
        if args.gpus:
            gpus = tuple(gpu for gpu in facts.machine.gpus if gpu.index in args.gpus)
            facts = msgspec.structs.replace(facts, machine=msgspec.structs.replace(facts.machine, gpus=gpus))
        return Introduction(facts, admin.own_address())


class NodeProcesses:
    """The processes of this node, from a start to its end. Safe to end twice."""

    def __init__(self, plan: Plan, engine: Engine, args: NodeArgs, is_stopped: Callable[[], bool]) -> None:
        self._plan, self._engine, self._args, self._is_stopped = plan, engine, args, is_stopped
        self.segments: set[str] = set()  # files in /dev/shm
        self._ray: EngineProcess | None = None
        self._gpu_memory: GpuMemory | None = None
        self._cache: str | None = None
        self.engine: EngineProcess | None = None

    def use(self, plan: Plan, args: NodeArgs, cache: str | None) -> None:
        """The resolved prerequisites, and the folder for what the engine compiles; before anything is started."""
        self._plan, self._args, self._cache = plan, args, cache
        self._gpu_memory = GpuMemory(args.gpus) if plan.device == "cuda" else None

    def start_engine(self, host: str, key: str | None, formation: Formation | None, on_line: OnLine | None) -> str:
        """Start this node's engine process; the base URL where it will listen (rank 0 only serves)."""
        port = self._args.port or free_port(host)
        place = self._place("", host, port, key, formation)
        command = self._engine.command(self._plan, place)
        print(f"penstock: starting {' '.join(command.argv)}", flush=True)
        self.engine = self._run(command, place.folder, on_line)
        return f"http://{host}:{port}"

    def start_ray(self, formation: Formation) -> None:
        """Start Ray on this node: the head on rank 0, else one that joins it."""
        node = formation.nodes[self._args.rank]
        # Not the engine's folder: each is made and removed with its process.
        place = self._place("r", node.address, 0, None, formation)
        base = self._engine.command(self._plan, place)
        if node.rank == 0 and (words := ray.dashboard_words()):
            print(f"penstock: {words}", flush=True)
        self._ray = self._run(ray.start(self._plan, formation, node.rank, place.folder, base), place.folder)

    def wait_ray_head(self, formation: Formation) -> Diagnosis | None:
        """Wait until the head of Ray accepts connections; why it does not, or None."""
        assert self._ray is not None
        deadline = time.monotonic() + _RAY_HEAD_S
        while not self._is_stopped():
            if self._ray.exit_code() is not None:
                return Diagnosis(f"Ray did not start: {self.ray_last_words()}")
            try:
                socket.create_connection((formation.head.address, formation.ray_port), 1.0).close()
                return None
            except OSError:
                if time.monotonic() > deadline:
                    return Diagnosis(f"the head of Ray did not answer within {_RAY_HEAD_S:.0f} s")
            time.sleep(_POLL_S)
        return None

    def check_ray(self, formation: Formation) -> Diagnosis | None:
        """Why Ray lacks a node or would not place one rank on each planned GPU, or None."""
        address = f"{formation.head.address}:{formation.ray_port}"
        command = ray.check(address, self._plan.n_nodes, self._plan.ranks_each, _RAY_JOIN_S)
        env = ray.environment(formation, str(self._folder("r")))
        check = self._run(Command(command.argv, env), str(self._folder("c")))
        try:
            while check.exit_code() is None and not self._is_stopped():
                time.sleep(_POLL_S)
            if self._is_stopped():
                return None
            check.join_output()
            placement = ray.placement("\n".join(check.tail))
        finally:
            check.end_alone()
        if "problem" in placement:
            return Diagnosis(placement["problem"])
        expected = sorted(node.address for node in formation.nodes for _ in range(self._plan.ranks_each))
        if sorted(placement["hosts"]) != expected:
            return Diagnosis(f"Ray would place the ranks on {placement['hosts']}, expected {expected}")
        return None

    def look(self) -> tuple[Process, ...]:
        """The engine and all it forked. Remembers what they and Ray's workers map: a killed process has no maps."""
        own = self.engine.processes() if self.engine is not None and self.engine.exit_code() is None else ()
        workers = self._ray.processes() if self._ray is not None else ()
        self.segments |= set(processes.shared_memory([*own, *workers]))
        return own

    def exit_code(self) -> int | None:
        """Of the engine, or of Ray; None while both run."""
        codes = [part.exit_code() for part in (self.engine, self._ray) if part is not None]
        return next((code for code in codes if code is not None), None)

    def ray_has_ended(self) -> bool:
        return self._ray is not None and self._ray.exit_code() is not None

    def ray_last_words(self) -> str:
        return (last_words(self._ray.tail) if self._ray is not None else None) or "it printed nothing"

    def end(self, grace_s: float) -> None:
        """The engine first: it may still be talking over Ray. Blocks."""
        self.look()
        if self.engine is not None:
            self.engine.end(grace_s)
        if self._ray is not None:
            self._ray.end(0.0)
        processes.unlink_shared_memory(self.segments)
        self.segments.clear()
        held = self._gpu_memory.wait_free() if self._gpu_memory is not None else None
        self._gpu_memory = None
        if held is not None:
            print(f"penstock: memory is still held after the end of the engine: {held} (nvidia-smi)", flush=True)

    def _folder(self, part: str) -> Path:
        run_id = os.environ.get(processes.MARK_RUN_ID, str(os.getpid()))
        at = f"n{self._args.rank}" if self._plan.n_nodes > 1 else ""
        return private_folder(run_id, self._args.replica, at + part)

    def _place(self, part: str, host: str, port: int, key: str | None, formation: Formation | None) -> Place:
        env, among = visible(self._args.gpus), None
        if formation is not None:
            node = formation.nodes[self._args.rank]
            among = Among(node.rank, self._plan.n_nodes, formation.head.address, formation.master_port)
            env |= addresses.network_environment(node)
            if self._plan.executor == "ray":
                env |= ray.environment(formation, str(self._folder("r")))
        return Place(host, port, str(self._folder(part)), sys.executable, key, among, env, self._cache)

    def _run(self, command: Command, folder: str, on_line: OnLine | None = None) -> EngineProcess:
        rank = str(self._args.rank) if self._plan.n_nodes > 1 else None
        marks = processes.Marks(os.environ[processes.MARK_RUN], self._args.replica, rank)
        return EngineProcess(command, Path(folder), marks, on_line)
