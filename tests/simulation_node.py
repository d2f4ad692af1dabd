"""A node in a simulation: what the real supervisor finds around it, its way to the gateway, its engine's process."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from simulation_world import SimProcess, SimProcesses

from penstock.hardware import Interface, Machine, NodeFacts
from penstock.node.announcer import AdminClient
from penstock.node.engine_client import StandstillWatch
from penstock.node.group.addresses import Introduction
from penstock.node.load_choice import Chosen
from penstock.node.local_processes import NodeArgs
from penstock.planner import Plan
from penstock.text import GIB
from penstock.wire.announcement import EngineLoad, Process

if TYPE_CHECKING:
    from simulation import Life
    from simulation_place import Network

RUN = "/sim/runs/one"


class AdminAddress(AdminClient):
    """A node's way to the gateway."""

    def __init__(self, network: Network) -> None:
        self._network, self.engine_key = network, "key"

    def post_all(self, path: str, body: Any) -> list[dict[str, Any]]:
        return [self._network.call(path, body)]

    def own_address(self) -> str | None:
        return "127.0.0.1"


class GatewayClient:
    """The controller's way to the gateway."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def get_json(self, path: str) -> Any:
        return self._network.call(path, None)

    def post_json(self, path: str, body: object) -> Any:
        return self._network.call(path, body)


class _EngineHandle:
    def __init__(self, process: SimProcess) -> None:
        self.process, self.tail = process, deque[str]()

    def exit_code(self) -> int | None:
        return self.process.exit_code


class SimNodeProcesses:
    """The engine of a node, as `NodeProcesses` starts and ends it."""

    def __init__(self, life: Life, args: NodeArgs) -> None:
        self._life, self._args = life, args
        self.segments = set[str]()
        self.engine: _EngineHandle | None = None

    def use(self, *_: object) -> None:
        pass

    def start_engine(self, host: str, key: str | None, *_: object) -> str:
        assert (host, key) == ("127.0.0.1", "key"), "every engine asks for the key, also on loopback"
        engine = self._life.start_engine(self._args.replica, self._args.rank)
        self.engine = _EngineHandle(engine.process)
        return f"http://127.0.0.1:{engine.port}"

    def look(self) -> tuple[Process, ...]:
        alive = self.engine is not None and self.engine.process.is_alive
        return (self.engine.process.identity,) if alive and self.engine is not None else ()

    def exit_code(self) -> int | None:
        return self.engine.exit_code() if self.engine is not None else None

    def ray_has_ended(self) -> bool:
        return False

    def end(self, grace_s: float) -> None:
        if self.engine is not None:
            processes = SimProcesses(self._life.machine)
            processes.end([self.engine.process.identity], grace_s)
            processes.sweep(RUN, self._args.replica, str(self._args.rank))


class SimEngineClient:
    """`EngineClient` of a scripted engine."""

    unreachable = None

    def __init__(self, life: Life, url: str) -> None:
        self.url, self._machine = url, life.machine
        self._engine = life.engines[int(url.rpartition(":")[2])]
        self.load: EngineLoad | None = None
        self._stall, self._stall_s, self.is_silent, self.alive_at_s = StandstillWatch(), life.plan.stall_s, False, 0.0

    def _answers(self) -> bool:
        is_silent = self._engine.is_hung or self._engine.is_deaf
        self._machine.step(5.0 if is_silent else 0.001)
        return self._engine.is_up and not is_silent

    def is_up(self) -> bool:
        return self._answers()

    def gives_token(self) -> bool:
        return self._answers()

    def adapters(self) -> tuple[str, ...]:
        return ()

    def health_problem(self, now: float) -> str | None:
        self.is_silent = not self._answers()
        self.alive_at_s = now if not self.is_silent else self.alive_at_s or now
        return None if self._engine.is_up and now - self.alive_at_s < self._stall_s else "no answer"

    def stalled_s(self, now: float) -> float:
        if not self._answers():
            return 0.0
        n_running = float(len(self._engine.running))
        self.load = EngineLoad(n_running, 0.0, 0.1, at_s=now)
        return self._stall.observe(n_running > 0, self._engine.n_steps, now)

    def is_busy(self, now: float) -> bool | None:
        if not self._answers():
            return True if self._engine.is_up and now - self.alive_at_s < self._stall_s else None
        self.alive_at_s = now
        return bool(self._engine.running)


class SimPrerequisites:
    """A node has all that its engine needs."""

    cache_folder = None

    def __init__(self, plan: Plan, args: NodeArgs) -> None:
        self._plan, self._args, self.loading = plan, args, Chosen(plan)
        self.cache = SimpleNamespace(text="", give=lambda: None)

    def resolve(self, show: Any = None) -> tuple[Plan, NodeArgs]:
        return self._plan, self._args

    def introduce(self, admin: AdminClient, show: Any = None) -> Introduction:
        rank = self._args.rank
        machine = Machine(f"node{rank}", 8, 16 * GIB, 16 * GIB)
        return Introduction(NodeFacts(machine.host, machine, (Interface("eth0", f"10.0.0.{rank + 1}", 24),), GIB))

    def drop_format(self) -> bool:
        return False
