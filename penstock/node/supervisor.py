"""Runs beside every engine: starts it, watches it, announces it, brings it back, ends it.

    python -m penstock.node LAUNCH.json --replica 0

Life of an engine: starting -> loading -> warming (its /health answers) -> ready (it also gave a token). A ready
engine that dies, answers /health with an error, or has requests running but makes no step for `stall_s` is ended with
all it forked and started again after a pause; the reason is kept and announced. An engine that never became ready and
cannot is "failed": the node says why and leaves. SIGTERM drains; a second one does not wait.
"""

from __future__ import annotations

import threading
import time

import msgspec

from penstock import engines, processes
from penstock.engines import Diagnosis, Engine, Seen
from penstock.errors import PenstockError
from penstock.hardware import NodeFacts
from penstock.hardware.node_facts import this_node
from penstock.node.announcer import Admin, Announcer
from penstock.node.engine_process import EngineProcess
from penstock.node.group import addresses
from penstock.node.group.addresses import Formation
from penstock.node.group.leader import Lead
from penstock.node.group.rendezvous import Group
from penstock.node.local_processes import Footing, Parts, Seat
from penstock.node.ready_file import ReadyFile
from penstock.run_folder import Launch
from penstock.text import show_seconds
from penstock.wire import prometheus
from penstock.wire.announcement import Announcement, EngineLoad, NodeView, Process, Progress, ReplicaState, Restart
from penstock.wire.client import Client, HttpError, NoAnswer

_TICK_S = 0.25
_HEALTH_EVERY_S = 1.0
_METRICS_EVERY_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 120.0
_NO_SUCH_ROUTE = (404, 405, 501)  # an embedding or reranking model has no /v1/completions
_MISSED_HEALTH = 3  # timeouts in a row; an error answer or a refused connection counts at once
_STARTS_BEFORE_FAILED = 3
_ENGINE_GRACE_S = 5.0
_CALM_AFTER_S = 600.0
_KEPT_RESTARTS = 10
_TAIL_SHOWN = 20
_ADAPTERS_MAX = 1024
_END_S = _ENGINE_GRACE_S + 3.0  # what ending an engine takes, with what it left
_LAST_WORD_S = 30.0  # a failed start is announced for this long: its gateway may still be starting


class StallWatch:
    """Says for how long requests have been running without the engine making a step. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self._iterations = -1.0
        self._since_s: float | None = None

    def observe(self, running: float, iterations: float, now_s: float) -> float:
        """Seconds since the last step, 0 while nothing runs. `now_s` is monotonic."""
        if running <= 0 or iterations != self._iterations:
            self._iterations, self._since_s = iterations, now_s
            return 0.0
        assert self._since_s is not None
        return now_s - self._since_s


class Node:
    """Supervises one engine until told to stop."""

    def __init__(
        self, launch: Launch, seat: Seat, engine: Engine, admin: Admin, claims_gpus: bool, ready_file: ReadyFile
    ) -> None:
        self.launch, self.plan, self.replica, self.engine = launch, launch.plan, seat.replica, engine
        self.announcer = Announcer(admin, self.leave)
        self.stops = 0
        self._seat, self._admin, self._ready_file = seat, admin, ready_file
        self._footing = Footing(self.plan, seat, claims_gpus)
        self._wake = threading.Event()
        self._parts = Parts(self.plan, engine, seat, self._is_stopped)
        self._lead: Lead | None = None
        if self.plan.n_nodes > 1 or self.plan.executor == "ray":
            group = Group(admin, seat.replica, seat.rank, self.leave)
            group.start()
            self._lead = Lead(self.plan, group, seat.hosts, self._is_stopped)
        self._nodes: tuple[NodeView, ...] = ()
        self._state: ReplicaState = "starting"
        self._reason: str | None = None
        self._hint: str | None = None
        self._restarts: list[Restart] = []
        self._n_restarts = 0
        self._was_ready = False
        self._ready_after_s: float | None = None
        self._started_at = time.time()
        self._own_url = ""  # how we call the engine ourselves
        self._key: str | None = None
        self._url: str | None = None
        self._seen = Seen(Progress("imports", fraction=0.0))
        self._process: EngineProcess | None = None
        self._processes: tuple[Process, ...] = ()
        self._vital: tuple[Process, ...] = ()
        self._segments: tuple[str, ...] = ()
        self._tail: tuple[str, ...] = ()
        self._load: EngineLoad | None = None
        self._adapters: tuple[str, ...] = ()

    def stop(self, *_: object) -> None:
        self.stops += 1
        self._wake.set()

    def leave(self) -> None:
        """The gateway's order to leave: as a first stop, however often it is repeated."""
        if not self.stops:
            self.stop()

    def _is_stopped(self) -> bool:
        return self.stops > 0

    def run(self) -> int:
        """Until a stop (0) or a failed start (1)."""
        self.announcer.start()
        n_failures, backoff = 0, processes.Backoff(1.0, 60.0, _CALM_AFTER_S)
        while not self.stops:
            diagnosis = self._one_life()
            if diagnosis is None:
                break
            n_failures += 1
            print(f"penstock: {diagnosis.reason}", flush=True)
            is_same = diagnosis.line is not None and diagnosis.reason == self._reason
            if not self._was_ready and (diagnosis.is_final or is_same or n_failures >= _STARTS_BEFORE_FAILED):
                self._fail(diagnosis)
                return 1
            self._note_restart(diagnosis)
            self._pause(backoff.next(time.monotonic()))
        self._announce("stopping")
        self.announcer.wait_told(2.0)
        self._end_crew("stopping")
        return 0

    def _one_life(self) -> Diagnosis | None:
        """One engine from its start to its end: why it ended, or None when we were told to stop."""
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
            self._parts.end(_ENGINE_GRACE_S if self._state == "stopping" and self._ready_after_s else 0.0)
            if self._lead is not None and not self.stops:
                self._lead.over()
            # What it mapped when it was last seen: it may have been killed together with its children.
            processes.unlink_shared_memory(self._segments)
            self._url = self._load = None

    def _start(self) -> Diagnosis | None:
        """Start the engine, on all its nodes; why that cannot be, or None."""
        self._seen = Seen(Progress("imports", fraction=0.0))
        self._started_at, self._ready_after_s = time.time(), None
        problem = self._find_footing()
        if problem is not None:
            return problem
        made: Formation | None = None
        if self._lead is not None:
            found = self._form(self._lead)
            if not isinstance(found, Formation):
                return found
            made = found
        host = "127.0.0.1"
        if self.launch.listen == "network":
            address = made.head.address if made else self._own_address()
            if address is None:
                return None
            host = address
        key = self._admin.engine_key if self.launch.listen == "network" else None
        where = self._parts.start_engine(host, key, made, self._on_line)
        self._process, self._key = self._parts.engine, key
        self._own_url, self._url = where, self._seat.url or where
        self._announce("starting")
        return None

    def _own_address(self) -> str | None:
        """Where the gateway's host reaches this machine; None when we were told to stop.

        The gateway may start after us, and until it answers nobody can say which address that is.
        """
        is_told = False
        where = self.launch.announce_file or ", ".join(self.launch.announce_urls)
        while not self.stops:
            found = self._admin.own_address()
            if found is not None:
                return found
            if not is_told:
                print(f"penstock: waiting for the gateway at {where}", flush=True)
            is_told = True
            self._pause(_TICK_S)
        return None

    def _find_footing(self) -> Diagnosis | None:
        """The model and the GPUs, found once; why not, or None."""
        if self._state != "restarting":
            self._announce("starting")
        try:
            plan, self._seat = self._footing.find()
        except PenstockError as exc:
            return Diagnosis(exc.message, exc.hint, is_final=not exc.is_retryable)
        self._parts.settle(plan, self._seat)
        return None

    def _form(self, lead: Lead) -> Formation | Diagnosis | None:
        """All nodes together, with Ray over them where the plan says so."""

        def on_wait(what: str, nodes: tuple[NodeView, ...]) -> None:
            self._seen, self._nodes = Seen(Progress(what, fraction=0.0)), nodes
            self._announce("restarting" if self._n_restarts else "starting")

        # Nodes that were together once come back some time; at a first start somebody waits and wants to know.
        patience_s = None if self._was_ready else self.plan.join_timeout_s
        made = lead.form(_facts(self._seat), patience_s, on_wait)
        if not isinstance(made, Formation):
            return made
        self._nodes = lead.views()
        print("\n".join(f"penstock: {line}" for line in addresses.table(self._nodes)), flush=True)
        if self.plan.executor != "ray":
            lead.tell_go(made)  # they start while we do, and vLLM's own processes wait for each other
            return made
        self._seen = Seen(Progress("ray", fraction=0.0))
        self._announce("starting")
        self._parts.start_ray(made)
        problem = self._parts.wait_ray_head(made) or lead.go(made) or self._parts.check_ray(made)
        return problem or (None if self.stops else made)

    def _end_crew(self, phase: str) -> None:
        if self._lead is not None:
            self._lead.over(phase)
            self._lead.wait_said(2.0)

    def _on_line(self, line: str) -> None:
        seen = self.engine.read(line, self._seen, self.plan)
        if seen is not self._seen:
            self._seen = seen
            if self._state in ("starting", "loading"):
                self._announce("loading")

    def _until_ready(self) -> Diagnosis | None:
        assert self._process is not None and self._own_url is not None
        deadline = time.monotonic() + self.plan.start_timeout_s
        while not self.stops:
            code = self._process.exit_code()
            if code is not None:
                return self._death(code)
            trouble = self._trouble()
            if trouble is not None:
                return trouble
            if time.monotonic() > deadline:
                limit = show_seconds(self.plan.start_timeout_s)
                return Diagnosis(f"it was not ready after {limit} (engine.start_timeout_s)")
            if self._answers() and self._probe():
                self._ready_after_s = round(time.time() - self._started_at, 2)
                self._was_ready = True
                self._seen = Seen(Progress("ready", fraction=1.0), self._seen.measured)
                self._reason = None
                self._adapters = self._find_adapters()
                self._announce("ready")
                print(f"penstock: ready after {show_seconds(self._ready_after_s)} at {self._own_url}", flush=True)
                return None
            self._pause(_TICK_S)
        return None

    def _while_ready(self) -> Diagnosis | None:
        assert self._process is not None
        self._vital = tuple(p for p in self._processes if p.role.startswith(self.engine.vital_roles))
        missed, watch, next_health, next_metrics = 0, StallWatch(), 0.0, 0.0
        while not self.stops:
            code = self._process.exit_code()
            if code is not None:
                return self._death(code)
            # Every tick (0.1 ms): its server lives on for a moment, and answers every request with an error.
            lost = self._lost_process() or self._trouble()
            if lost:
                return lost
            now = time.monotonic()
            if now >= next_health:
                next_health = now + _HEALTH_EVERY_S
                missed, problem = self._check_health(missed)
                if problem:
                    return problem
            if now >= next_metrics:
                next_metrics = now + _METRICS_EVERY_S
                self._look_at_processes()
                stalled_s, running = self._stalled(watch)
                if stalled_s >= self.plan.stall_s:
                    waited = show_seconds(stalled_s)
                    return Diagnosis(f"stalled: {running:.0f} request(s) running and no step for {waited}")
            self._announce("ready")
            self._pause(_TICK_S)
        return None

    def _check_health(self, missed: int) -> tuple[int, Diagnosis | None]:
        assert self._process is not None
        try:
            Client(self._own_url, self._key, timeout_s=_HEALTH_TIMEOUT_S).get_text("/health")
        except PenstockError as exc:
            if self._process.exit_code() is not None:
                return missed, None  # the loop reads its death, which says more
            if isinstance(exc, NoAnswer) and missed + 1 < _MISSED_HEALTH:
                return missed + 1, None
            return missed, self._lost_process() or Diagnosis(f"its health check failed: {exc.message}")
        return 0, None

    def _trouble(self) -> Diagnosis | None:
        """What ended a part of the engine that is not its own process: another node, or Ray."""
        if self._parts.ray_has_ended():
            return Diagnosis(f"Ray ended on this node: {self._parts.ray_words()}")
        return self._lead.trouble() if self._lead is not None else None

    def _lost_process(self) -> Diagnosis | None:
        """A process that the engine cannot live without is gone, often seconds before the engine notices."""
        assert self._process is not None
        gone = [process for process in self._vital if not processes.is_alive(process)]
        if not gone:
            return None
        told = self.engine.diagnose(1, list(self._process.tail)[-_TAIL_SHOWN * 3 :])
        why = f": {told.reason.partition(': ')[2]}" if told.line else ""
        return Diagnosis(f"its process {gone[0].role} (pid {gone[0].pid}) is gone{why}", told.hint)

    def _stalled(self, watch: StallWatch) -> tuple[float, float]:
        samples = self._metrics()
        if samples is None:
            return 0.0, 0.0
        names = self.engine.metrics
        running = samples.get(names.running, 0.0)
        # The sum over data-parallel ranks.
        kv_use = samples.get(names.kv_use, 0.0) / self.plan.layout.data if names.kv_use else 0.0
        self._load = EngineLoad(running, samples.get(names.waiting, 0.0), round(kv_use, 3))
        iterations = sum(samples.get(name, 0.0) for name in names.iterations)
        return watch.observe(running, iterations, time.monotonic()), running

    def _look_at_processes(self) -> None:
        """Walks the process table: not on every tick."""
        self._processes = self._parts.look()
        self._segments = tuple(sorted(self._parts.segments))

    def _metrics(self) -> dict[str, float] | None:
        try:
            return prometheus.parse(Client(self._own_url, self._key, timeout_s=_HEALTH_TIMEOUT_S).get_text("/metrics"))
        except PenstockError:
            return None

    def _find_adapters(self) -> tuple[str, ...]:
        """The names that the engine serves beside the model's own."""
        try:
            rows = (
                Client(self._own_url, self._key, timeout_s=_HEALTH_TIMEOUT_S).get_json("/v1/models").get("data") or []
            )
        except PenstockError:
            return ()
        names = [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        return tuple(name for name in names if name not in self.plan.served_names)[:_ADAPTERS_MAX]

    def _answers(self) -> bool:
        try:
            Client(self._own_url, self._key, timeout_s=_HEALTH_TIMEOUT_S).get_text("/health")
        except PenstockError:
            return False
        return True

    def _probe(self) -> bool:
        """One token: an engine may be healthy and die of its first request (vLLM with a pipeline did)."""
        if self._state != "warming":
            self._announce("warming")
        body = {"model": self.plan.served_names[0], "prompt": "1", "max_tokens": 1, "temperature": 0}
        try:
            answer = Client(self._own_url, self._key, timeout_s=_PROBE_TIMEOUT_S).post_json("/v1/completions", body)
        except PenstockError as exc:
            if isinstance(exc, HttpError) and exc.status in _NO_SUCH_ROUTE:
                print("penstock: this model generates no text, so its health alone makes it ready", flush=True)
                return True
            print(f"penstock: the probe request failed: {exc.message}", flush=True)
            return False
        return bool(answer.get("choices"))

    def _drain(self) -> None:
        """Let running requests finish: no new ones come, since the gateway knows that we are stopping."""
        self._announce("stopping")
        self.announcer.wait_told(2.0)
        if self._ready_after_s is None:
            return
        deadline, idle = time.monotonic() + self.plan.drain_s, 0
        while self.stops < 2 and time.monotonic() < deadline and idle < 2:
            samples = self._metrics()
            if samples is None:
                return
            names = self.engine.metrics
            busy = samples.get(names.running, 0.0) + samples.get(names.waiting, 0.0)
            idle = 0 if busy else idle + 1
            self._wake.clear()
            self._wake.wait(_TICK_S)

    def _death(self, code: int) -> Diagnosis:
        assert self._process is not None
        time.sleep(0.1)  # its last lines may still be on the way through the pipe
        return self.engine.diagnose(code, list(self._process.tail))

    def _note_restart(self, diagnosis: Diagnosis) -> None:
        self._n_restarts += 1
        self._restarts = [*self._restarts, Restart(round(time.time(), 2), diagnosis.reason)][-_KEPT_RESTARTS:]
        self._reason = diagnosis.reason
        self._seen = Seen(Progress("waiting to start again", fraction=0.0), self._seen.measured)
        self._announce("restarting")

    def _fail(self, diagnosis: Diagnosis) -> None:
        if self._process is not None:
            self._tail = tuple(engines.telling_lines(self._process.tail, diagnosis.line, _TAIL_SHOWN))
        self._reason, self._hint = diagnosis.reason, diagnosis.hint
        self._announce("failed")
        self._end_crew("failed")
        deadline = time.monotonic() + _LAST_WORD_S
        while time.monotonic() < deadline and not self.stops and not self.announcer.is_told():
            self.announcer.wait_told(1.0)
            self._pause(_TICK_S)

    def _pause(self, seconds: float) -> None:
        if not self.stops:
            self._wake.wait(seconds)

    def _announce(self, state: ReplicaState) -> None:
        if state != self._state:
            self._look_at_processes()
        self._state = state
        self._ready_file.set(is_ready=state == "ready")
        self.announcer.tell(
            Announcement(
                replica=self.replica,
                model=self.plan.served_names[0],
                state=state,
                lease_s=self.launch.lease_s,
                url=self._url,
                progress=self._seen.progress,
                reason=self._reason,
                hint=self._hint,
                n_restarts=self._n_restarts,
                restarts=tuple(self._restarts),
                processes=self._processes,
                shared_memory=self._segments,
                log_tail=self._tail,
                started_at=round(self._started_at, 2),
                ready_after_s=self._ready_after_s,
                engine=f"{self.plan.engine} {self.plan.engine_version}",
                measured=self._seen.measured,
                load=self._load if state == "ready" else None,
                adapters=self._adapters,
                nodes=self._lead.views() or self._nodes if self._lead else (),
            )
        )


def _facts(seat: Seat) -> NodeFacts:
    """This node, with the GPUs that it gives."""
    facts = this_node()
    if not seat.gpus:
        return facts
    gpus = tuple(gpu for gpu in facts.machine.gpus if gpu.index in seat.gpus)
    return msgspec.structs.replace(facts, machine=msgspec.structs.replace(facts.machine, gpus=gpus))
