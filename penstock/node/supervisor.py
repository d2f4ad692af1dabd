"""Runs next to every engine: starts, watches, announces, restarts and ends it.

Life of an engine: starting -> loading -> warming (its /health answers) -> ready (it also gave a token), and where the
file lets it sleep: ready -> sleeping -> waking -> ready. A ready engine
that dies, fails its health check, or makes no step for `stall_s` with requests running is ended with all it forked and
restarted after a pause. One that cannot become ready is "failed": the node announces why and exits. SIGTERM, or the
gateway's order to leave, drains; a second SIGTERM ends the drain.
"""

from __future__ import annotations

from penstock import engines, processes
from penstock.engines import Diagnosis, Engine
from penstock.errors import PenstockError
from penstock.models.fetch_files import Progress
from penstock.node.announcer import AdminClient, Announcer
from penstock.node.engine_client import EngineClient
from penstock.node.engine_process import EngineProcess
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation
from penstock.node.group.leader import GroupLeader
from penstock.node.group.rendezvous import BoardClient
from penstock.node.local_processes import NodeArgs, NodeProcesses, Prerequisites
from penstock.node.readings import Readings
from penstock.node.ready_file import ReadyFile
from penstock.node.report import ReplicaReport
from penstock.node.sleep import Sleeper
from penstock.run_folder import Launch
from penstock.text import show_seconds
from penstock.wire.announcement import AnnounceAnswer, MachineReading, NodeView, Process, ReplicaState
from penstock.world import REAL, World

_TICK_S = 0.25
_LOOK_EVERY_S = 1.0
_HEALTH_EVERY_S = 1.0
_METRICS_EVERY_S = 2.0
_STARTS_BEFORE_FAILED = 3
_ENGINE_GRACE_S = 5.0
END_S = _ENGINE_GRACE_S + 3.0  # what ending an engine takes, with all it forked
_CALM_AFTER_S = 600.0
_TAIL_SHOWN = 20
_FAILED_S = 30.0  # a failed start is announced for this long: its gateway may still be starting


class NodeSupervisor:
    """Supervises one engine until it is stopped."""

    def __init__(
        self,
        launch: Launch,
        args: NodeArgs,
        engine: Engine,
        admin: AdminClient,
        needs: Prerequisites,
        readings: Readings,
        file: ReadyFile,
        world: World = REAL,
    ) -> None:
        self.stops, self._world = 0, world
        self._launch, self._plan, self._engine = launch, launch.plan, engine
        self._args, self._admin, self._prerequisites = args, admin, needs
        self._readings = readings
        self._announcer = Announcer(admin, self._obey, self._machines, world)
        self._report = ReplicaReport(launch, args.replica, self._announcer, file, world)
        self._sleeper = Sleeper(launch.plan, engine, self._report, self._announcer, self._is_stopped, world)
        self._wake = world.event()
        self._local = NodeProcesses(launch.plan, engine, args, self._is_stopped)
        self._leader: GroupLeader | None = None
        if launch.plan.n_nodes > 1 or launch.plan.executor == "ray":
            board = BoardClient(admin, args.replica, args.rank, self.leave, world=world)
            board.start()
            self._leader = GroupLeader(launch.plan, board, args.hosts, self._is_stopped)
        self._vital: tuple[Process, ...] = ()
        self._client: EngineClient | None = None
        self._unreachable: str | None = None

    def stop(self) -> None:
        self.stops += 1
        self._wake.set()

    def leave(self) -> None:
        """The gateway's order to leave: a first stop, never a second one."""
        if not self.stops:
            self.stop()

    def _obey(self, answer: AnnounceAnswer) -> None:
        if answer.leave:
            self.leave()
        if answer.heard and self._client is not None:
            self._client.alive_at_s = self._world.now()
        self._sleeper.obey(answer)

    def _machines(self) -> tuple[MachineReading, ...]:
        """This node's first, then those of the other nodes."""
        own = self._readings.latest()
        return (*((own,) if own else ()), *(self._leader.machines() if self._leader is not None else ()))

    def _is_stopped(self) -> bool:
        return self.stops > 0

    def run(self) -> int:
        """Until a stop (0) or a failed start (1)."""
        self._announcer.start()
        n_failures, backoff = 0, processes.Backoff(1.0, 60.0, _CALM_AFTER_S)
        while not self.stops and (diagnosis := self._run_engine()) is not None:
            n_failures += 1
            print(f"penstock: {diagnosis.reason}", flush=True)
            is_same = diagnosis.line is not None and diagnosis.reason == self._report.reason
            is_loading = self._report.seen.progress.stage == "weights"
            if is_loading and not self._report.was_ready and self._prerequisites.drop_format():
                print("penstock: the next start loads the weights in the engine's default way", flush=True)
            elif not self._report.was_ready and (diagnosis.is_final or is_same or n_failures >= _STARTS_BEFORE_FAILED):
                self._fail(diagnosis)
                return 1
            self._refresh()
            self._report.restarting(diagnosis)
            self._pause(backoff.next(self._world.now()))
        self._announce("stopping")
        self._announcer.wait_posted(2.0)
        self._end_group("stopping")
        return 0

    def _run_engine(self) -> Diagnosis | None:
        """One engine from its start to its end: why it ended, or None when the node is stopped."""
        try:
            diagnosis = self._start()
            if diagnosis is None and not self.stops:
                diagnosis = self._until_ready()
            if diagnosis is None and not self.stops:
                diagnosis = self._while_ready()
            if diagnosis is None:
                self._drain()
            return diagnosis
        finally:
            # An engine that is still loading ignores SIGTERM (vLLM) and has nothing to lose.
            is_polite = self._report.state == "stopping" and self._report.ready_after_s
            self._local.end(_ENGINE_GRACE_S if is_polite else 0.0)
            if self._leader is not None and not self.stops:
                self._leader.over()
            # What it mapped when last looked at: it may have been killed together with its children.
            self._world.processes.unlink_shared_memory(self._report.segments)
            self._report.url = self._report.load = None

    def _start(self) -> Diagnosis | None:
        """Start the engine, on all its nodes; why that failed, or None."""
        self._report.begin()
        if self._report.state != "restarting":
            self._announce("starting")
        try:
            plan, self._args = self._prerequisites.resolve(self._show)
        except PenstockError as exc:
            if self.stops:
                return None
            return Diagnosis(exc.message, exc.hint, is_final=not exc.is_retryable)
        self._report.loading, self._report.carried = self._prerequisites.loading, self._prerequisites.cache.text
        self._local.use(plan, self._args, self._prerequisites.cache_folder)
        formation: Formation | None = None
        if self._leader is not None:
            if not isinstance(formed := self._form(self._leader), Formation):
                return formed
            formation = formed
        host, key = "127.0.0.1", self._admin.engine_key
        if self._launch.listen == "network":
            address = formation.head.address if formation else self._own_address()
            if address is None:
                return None
            host = address
        self._report.stage("imports")
        url = self._local.start_engine(host, key, formation, self._on_line)
        self._client = EngineClient(url, key, self._engine.metrics, self._plan)
        self._report.url = self._args.url or url
        self._announce("starting")
        return None

    def _show(self, progress: Progress) -> None:
        """How far the model's files are, here and on the other nodes."""
        if self._leader is not None:
            self._report.nodes = self._leader.preparing()
        self._report.show(progress)

    def _own_address(self) -> str | None:
        """This machine's address as the gateway sees it. Waits for the gateway; None when the node is stopped."""
        address = self._admin.own_address()
        if address is None:
            where = self._launch.announce_file or ", ".join(self._launch.announce_urls)
            print(f"penstock: waiting for the gateway at {where}", flush=True)
        while address is None and not self.stops:
            self._pause(_TICK_S)
            address = self._admin.own_address()
        return address

    def _form(self, leader: GroupLeader) -> Formation | Diagnosis | None:
        """Form the group of all nodes, with Ray where the plan says so."""

        def on_wait(stage: str, nodes: tuple[NodeView, ...]) -> None:
            self._report.stage(stage, timed_as="nodes")
            self._report.nodes = nodes
            self._report.announce("restarting" if self._report.n_restarts else "starting")

        # Nodes that formed before will come back; a user waits for a first start.
        patience_s = None if self._report.was_ready else self._plan.join_timeout_s
        formation = leader.form(self._prerequisites.introduce(self._admin), patience_s, on_wait)
        if not isinstance(formation, Formation):
            return formation
        self._report.nodes = leader.views()
        print("\n".join(f"penstock: {line}" for line in addresses.table(self._report.nodes)), flush=True)
        if self._plan.executor != "ray":
            leader.post_go(formation)  # all start together: vLLM's processes wait for each other
            return formation
        self._report.stage("ray")
        self._announce("starting")
        self._local.start_ray(formation)
        problem = self._local.wait_ray_head(formation) or leader.go(formation) or self._local.check_ray(formation)
        return problem or (None if self.stops else formation)

    def _end_group(self, phase: str) -> None:
        if self._leader is not None:
            self._leader.over(phase, wait_s=2.0)

    def _on_line(self, line: str) -> None:
        if self._report.update(lambda seen: self._engine.read(line, seen, self._plan)):
            if self._report.state in ("starting", "loading"):
                self._announce("loading")
            elif self._report.state == "waking":  # from level 2 it loads its weights
                self._report.announce("waking")

    def _until_ready(self) -> Diagnosis | None:
        process, client = self._running()
        deadline, next_look = self._world.now() + self._plan.start_timeout_s, 0.0
        while not self.stops:
            if self._world.now() >= next_look:  # what it maps, in case that it dies
                next_look = self._world.now() + _LOOK_EVERY_S
                self._local.look()
            if (code := process.exit_code()) is not None:
                return self._death(process, code)
            if (trouble := self._trouble()) is not None:
                return trouble
            if self._world.now() > deadline and client.unreachable is None:
                limit = show_seconds(self._plan.start_timeout_s)
                return Diagnosis(f"it was not ready after {limit} (engine.start_timeout_s)")
            if client.is_up():
                if self._report.state != "warming":
                    self._announce("warming")
                if client.gives_token():
                    self._refresh()
                    self._report.ready(client.adapters())
                    self._prerequisites.cache.give()
                    if self._leader is not None:
                        self._leader.post_ready()
                    after = show_seconds(self._report.ready_after_s or 0.0)
                    print(f"penstock: ready after {after} at {client.url}", flush=True)
                    return None
            self._report_address(client)
            self._pause(_TICK_S)
        return None

    def _report_address(self, client: EngineClient) -> None:
        """A loaded engine whose address cannot be reached is kept: loading it again would not help."""
        if client.unreachable != self._unreachable:
            self._unreachable = self._report.reason = client.unreachable
            print(f"penstock: {client.unreachable or 'its address can be reached again'}", flush=True)
            self._announce(self._report.state)

    def _while_ready(self) -> Diagnosis | None:
        process, client = self._running()
        self._sleeper.begin()
        self._vital = tuple(part for part in self._report.processes if part.role.startswith(self._engine.vital_roles))
        next_health, next_metrics = 0.0, 0.0
        while not self.stops:
            # Every tick (0.1 ms): its server lives on for a moment and answers every request with an error.
            if lost := self._loss():
                return lost
            now = self._world.now()
            if self._sleeper.is_due(client, now):
                if lost := self._sleeper.run(client, self._loss):
                    return lost
                next_health = next_metrics = 0.0
                continue
            if now >= next_health:
                next_health = now + _HEALTH_EVERY_S
                problem = client.health_problem(now)
                if problem is not None and process.exit_code() is None:  # its death says more
                    return self._lost_process(process) or Diagnosis(f"its health check failed: {problem}")
                self._report_address(client)
            if now >= next_metrics:
                next_metrics = now + _METRICS_EVERY_S
                self._refresh()
                stalled_s = client.stalled_s(self._world.now())
                self._report.load = client.load
                if stalled_s >= self._plan.stall_s and client.load is not None:
                    running, waited = client.load.running, show_seconds(stalled_s)
                    return Diagnosis(f"stalled: {running:.0f} request(s) running and no step for {waited}")
            self._announce("busy" if client.is_silent else "ready")
            self._pause(_TICK_S)
        return None

    def _loss(self) -> Diagnosis | None:
        """Why the engine, or a part of it, is gone; None while all of it lives."""
        process = self._running()[0]
        code = process.exit_code()
        return self._death(process, code) if code is not None else self._lost_process(process) or self._trouble()

    def _running(self) -> tuple[EngineProcess, EngineClient]:
        assert self._local.engine is not None and self._client is not None
        return self._local.engine, self._client

    def _trouble(self) -> Diagnosis | None:
        """Why a part of the engine outside its own process ended: another node, or Ray."""
        if self._local.ray_has_ended():
            return Diagnosis(f"Ray ended on this node: {self._local.ray_last_words()}")
        return self._leader.trouble() if self._leader is not None else None

    def _lost_process(self, process: EngineProcess) -> Diagnosis | None:
        """A vital process of the engine is gone, often seconds before the engine notices."""
        gone = [part for part in self._vital if not self._world.processes.is_alive(part)]
        if not gone:
            return None
        death = self._engine.diagnose(1, list(process.tail)[-_TAIL_SHOWN * 3 :])
        why = f": {death.reason.partition(': ')[2]}" if death.line else ""
        return Diagnosis(f"its process {gone[0].role} (pid {gone[0].pid}) is gone{why}", death.hint)

    def _refresh(self) -> None:
        """Update processes and nodes in the report. Walks the process table: not for every tick."""
        self._report.processes = self._local.look()
        self._report.segments = tuple(sorted(self._local.segments))
        if self._leader is not None:
            self._report.nodes = self._leader.views() or self._report.nodes

    def _drain(self) -> None:
        """Let running requests finish; the gateway sends no new ones to a node that is stopping."""
        self._announce("stopping")
        self._announcer.wait_posted(2.0)
        if self._report.ready_after_s is None:
            return
        client = self._running()[1]
        deadline, n_idle = self._world.now() + self._plan.drain_s, 0
        while self.stops < 2 and self._world.now() < deadline and n_idle < 2:
            if (is_busy := client.is_busy(self._world.now())) is None:  # it died, or hangs
                return
            n_idle = 0 if is_busy else n_idle + 1
            self._wake.clear()
            self._wake.wait(_TICK_S)

    def _death(self, process: EngineProcess, code: int) -> Diagnosis:
        self._world.sleep(0.1)  # its last lines may still be on the way through the pipe
        return self._engine.diagnose(code, list(process.tail))

    def _fail(self, diagnosis: Diagnosis) -> None:
        tail = self._local.engine.tail if self._local.engine is not None else ()
        self._refresh()
        self._report.failed(diagnosis, tuple(engines.telling_lines(tuple(tail), diagnosis.line, _TAIL_SHOWN)))
        self._end_group("failed")
        deadline = self._world.now() + _FAILED_S
        while self._world.now() < deadline and not self.stops and not self._announcer.is_posted():
            self._announcer.wait_posted(1.0)
            self._pause(_TICK_S)

    def _pause(self, seconds: float) -> None:
        if not self.stops:
            self._wake.wait(seconds)

    def _announce(self, state: ReplicaState) -> None:
        if state != self._report.state:
            self._refresh()
        self._report.announce(state)
