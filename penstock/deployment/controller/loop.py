"""Keeps a deployment as it was asked for: observe -> decide -> act, once a tick, until `down`.

One detached process per deployment; it finds everything again from the run folder, so killing it loses nothing: its
watchdog starts another. What blocks (a target) runs in one worker thread, so that the state on disk stays fresh.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence

import msgspec

from penstock import targets
from penstock.deployment import measured
from penstock.deployment.controller.changes import changes, noted_of
from penstock.deployment.controller.chat_page import ChatPage
from penstock.deployment.controller.child import Child
from penstock.deployment.controller.decide import Decision, Event, Memory, decide
from penstock.deployment.controller.news import NewsPoster
from penstock.deployment.controller.prometheus import Prometheus
from penstock.deployment.controller.scaler import Look, Scaler
from penstock.deployment.controller.watchdog import Sight
from penstock.deployment.observe import History, Observation, gateways, look, summarise
from penstock.deployment.replace import settle
from penstock.errors import PenstockError
from penstock.log_lines import bound_output
from penstock.paths import is_full
from penstock.processes import Backoff, marks
from penstock.run_folder import (
    KEPT_RESTARTS,
    Desired,
    Part,
    ReplicaStatus,
    Run,
    State,
    Unit,
    order,
    replica,
    unit_of,
)
from penstock.wire.announcement import Announcement, Process, Restart
from penstock.wire.gateways import post_each
from penstock.wire.scaling import Scaling
from penstock.world import REAL, Thread, World

_TICK_S = 0.4
_WRITE_EVERY_S = 1.0
_SILENT_NODES = 3  # a node that died this often before its first report will not come
_TAIL_LINES = 20
_SAME_S = 3.0  # what the target tells of a restart that we asked for


class _Refusal(msgspec.Struct, frozen=True):
    """What the target would not do. `changes`: the units to place or to end; `again_at`: monotonic seconds."""

    changes: frozenset[Unit]
    message: str
    backoff: Backoff
    again_at: float


class Controller:
    """The thin part that acts. `own`: its name, where the target placed it. `sockets`: for its first gateway."""

    def __init__(self, run: Run, own: str | None = None, sockets: Sequence[int] = (), world: World = REAL) -> None:
        self.run, self._world, self._processes = run, world, world.processes
        record, deployment = run.record(), run.deployment()
        self.target = targets.load(record.target)
        self.stop = world.event()
        self._placed = frozenset(record.placed)
        self._own = own
        self._sockets = tuple(sockets)
        last = run.state()
        self.history = History(
            controller=self._own_part(last),
            gateway=self._gateway_part(last),
            replicas={row.replica: _seen_by_controller(row) for row in last.replicas} if last else {},
            failed={row.replica: row for row in last.replicas if row.state == "failed"} if last else {},
            was_ready=last is not None and last.phase in ("ready", "degraded"),
            ui=last.ui if last else None,
        )
        self._plan = run.plan()
        self._memory = Memory(self._plan.drain_s, deployment.gateway.drain_s, own=own)
        self._measured: set[tuple[str, float | None]] = set()
        self._reported: set[str] = set()
        self._broken: set[str] = set()
        self._gateway_backoff = Backoff(1.0, 30.0, 60.0)
        self._replica_backoffs: dict[str, Backoff] = {}
        self._due_at: dict[str, float] = {}
        self._n_deaths: dict[str, int] = {}
        self._worker: Thread | None = None
        self._refusal: _Refusal | None = None
        self._watchdog: Process | None = None
        self._written: tuple[float, State] | None = None
        follows = deployment.replicas.follows_load
        self._scaler = Scaler(run, deployment, self._plan, last, world.unix()) if follows else None
        self._news = NewsPoster(run, world)
        self._sight = Sight(run.path)
        self._noted = noted_of(last)
        self._replaces = run.previous_folder.exists()
        self._passed_on = run.desired().order if last is not None else None  # by the controller before this one
        self._children: list[Child] = []
        self._prometheus: Prometheus | None = None
        is_placed, has_folder = own is not None, own is None or self.target.shares_files
        if deployment.observe.prometheus and has_folder:  # in a cluster, the cluster's own watches
            self._prometheus = Prometheus(run)
            self._children.append(Child(run, self._prometheus, last.prometheus if last else None, is_placed, world))
        if deployment.chat_page is not None and has_folder and "ui" not in self._placed:
            self._children.append(Child(run, ChatPage(run, is_placed), last.ui if last else None, is_placed, world))

    def run_until_stopped(self) -> None:
        for child in self._children:
            child.start()
        while self._is_wanted():
            try:
                if self._tick(self.run.desired()).hands_over:
                    return
            except OSError as exc:
                if not is_full(exc) and self.run.exists():  # else the next tick tries again
                    raise
            self.stop.wait(_TICK_S)

    def _is_wanted(self) -> bool:
        """Blocks while the run's folder is hidden."""
        while self._sight.is_hidden() and not self.stop.wait(_TICK_S):
            pass
        return not self.stop.is_set() and self.run.exists() and self.run.desired().state == "up"

    def _tick(self, desired: Desired) -> Decision:
        if self._own is None:
            self._keep_watchdog()
        was_placing = self._worker is not None and self._worker.is_alive()  # then `seen` may be from before its end
        seen = look(self.run, self.history.gateway, self._world.processes)
        self.history = msgspec.structs.replace(self.history, gateway=seen.gateway)
        self.target.keep_up(self.run)
        bound_output()
        self._note_failures(seen)
        self._note_repairs(seen)
        self._keep_measured(seen)
        scaling = self._scale(desired, seen)
        if scaling is not None:
            desired = msgspec.structs.replace(desired, replicas=scaling.replicas)
        self._pass_on(desired, seen)
        decision = self._act(desired, seen, may_place=not was_placing)
        self._note_refusal()
        self._note_children(seen)
        state = summarise(desired, seen, self.history, self._world.unix(), scaling)
        was_ready = self.history.was_ready or state.phase == "ready"
        self.history = msgspec.structs.replace(self.history, was_ready=was_ready)
        events, self._noted = changes(state, self._noted)
        self._add_events(events)
        self._write(state)
        self._news.post(state)
        self._replaces = self._replaces and not settle(self.run, state, self._processes)
        return decision

    def _scale(self, desired: Desired, seen: Observation) -> Scaling | None:
        """How many replicas there shall be now, where that follows the load."""
        if self._scaler is None:
            return None
        asked = self.target.asked_replicas(self.run)
        leaving = self._memory.leaving | self._memory.drain_since.keys()
        look = Look(seen, self.history.failed, self.history.refused, leaving, asked)
        scaling = self._scaler.step(desired, look, self._world.unix())
        self._post_each("/admin/forget", self._scaler.retried)
        failed = {name: row for name, row in self.history.failed.items() if name not in self._scaler.retried}
        self.history = msgspec.structs.replace(self.history, failed=failed)
        self._add_events(self._scaler.events)
        self._scaler.events.clear()
        return scaling

    def _add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self.run.add_event(event.kind, event.text, event.replica, seconds=event.seconds)

    def end_children(self) -> None:
        """The watchdog; the others only where the target placed us: next to `up`, `down` ends them."""
        if self._watchdog is not None:
            self._processes.end([self._watchdog], 1.0)
        for child in self._children:
            child.stop(ends=self._own is not None)

    def _note_children(self, seen: Observation) -> None:
        if self._prometheus is not None:
            rows = seen.view.replicas if seen.view else ()
            self._prometheus.machines = tuple(machine for row in rows for machine in row.announcement.machines)
        parts = {child.service.role: child.part for child in self._children}
        self.history = msgspec.structs.replace(self.history, **parts)

    def _own_part(self, last: State | None) -> Part:
        before, own = last.controller if last is not None else Part("gone"), self._own
        process = self._processes.identify(os.getpid(), "controller")
        part = Part("running", process, before.n_restarts, before.restarts, unit=own)
        if before.process is None or before.unit != own:
            return part
        reason = f"its process {before.process.pid} was gone"
        self.run.add_event("controller restarted", reason)
        return part.restarted(reason)

    def _gateway_part(self, last: State | None) -> Part:
        """The gateway as the controller before this one had it, or one that it started and, killed, did not note."""
        part = last.gateway if last is not None else Part("gone")
        if "gateway" in self._placed or (part.process is not None and self._processes.is_alive(part.process)):
            return part
        unnoted = [process for process in self._processes.find_marked(str(self.run.path)) if process.role == "gateway"]
        if not unnoted:
            return part
        first = min(unnoted, key=lambda process: process.started_at)  # it starts its workers
        process = Process(first.pid, first.started_at, first.role)
        return msgspec.structs.replace(part, state="running", process=process)

    def _keep_watchdog(self) -> None:
        if self._watchdog is not None and self._processes.is_alive(self._watchdog):
            return
        if self._watchdog is not None:
            self.run.add_event("watchdog restarted", f"its process {self._watchdog.pid} was gone")
        argv = [sys.executable, "-m", "penstock.deployment.controller.watchdog", str(self.run.path), str(os.getpid())]
        self._watchdog = self._processes.start_detached(argv, self._marks("watchdog"), self.run.log("controller"))

    def _marks(self, role: str) -> dict[str, str]:
        return marks(str(self.run.path), self.run.record().id, role)

    # ---- replicas that fail ------------------------------------------------------------------------------------------

    def _note_failures(self, seen: Observation) -> None:
        rows = {row.announcement.replica: row.announcement for row in (seen.view.replicas if seen.view else ())}
        self._reported |= rows.keys()
        for name, announcement in rows.items():
            if announcement.state == "failed" and replica(name) in seen.placements:
                self._fail(name, announcement.reason or "", announcement)
        serving = {row.announcement.replica for row in (seen.view.replicas if seen.view else ()) if row.is_alive}
        for unit, placement in seen.placements.items():
            if placement.state == "placed" and unit.name in serving:
                self._broken.discard(unit.name)
            if placement.is_final and placement.state == "gone":  # a job cancelled by hand stays cancelled
                self._fail(unit.name, placement.reason or "it was ended from outside", rows.get(unit.name))

    def _note_repairs(self, seen: Observation) -> None:
        """What the target brought back by itself counts as a restart too."""
        for unit, placement in seen.placements.items():
            restart = placement.restart
            part = self.history.gateway if unit.kind == "gateway" else self.history.ui or Part("gone")
            if restart is None or unit.kind == "controller":  # that one notes its own
                continue
            known = self.history.replicas.get(unit.name, ()) if unit.kind == "replica" else part.restarts
            if any(abs(row.at - restart.at) < _SAME_S or row.at > restart.at for row in known):
                continue
            if unit.kind == "replica":
                self._remember_restart(unit.name, restart, seen)
            else:
                self.run.add_event(f"{unit.kind} restarted", restart.reason)
                self.history = msgspec.structs.replace(self.history, **{unit.kind: part.restarted(restart.reason)})

    def _fail(self, name: str, reason: str, announcement: Announcement | None) -> None:
        if name in self.history.failed:
            return
        restarts = announcement.restarts if announcement is not None else ()
        status = ReplicaStatus(
            name, "failed", "gone", announcement, reason=reason or None, restarts=restarts,
            n_restarts=announcement.n_restarts if announcement is not None else 0,
        )  # fmt: skip
        self.history = msgspec.structs.replace(self.history, failed={**self.history.failed, name: status})
        self.run.add_event("replica failed", reason, replica=name)

    def _fail_silent_node(self, name: str, why: str | None) -> None:
        reason = f"its node ended {_SILENT_NODES} times before its first report{f': {why}' if why else ''}"
        model, tail = self._plan.served_names[0], self._log_tail(name)
        last = Announcement(replica=name, model=model, state="failed", lease_s=0.0, reason=reason, log_tail=tail)
        self._fail(name, reason, last)

    def _log_tail(self, name: str) -> tuple[str, ...]:
        lines: list[str] = []
        try:
            lines.extend(self.target.logs(self.run, replica(name), follow=False, last=_TAIL_LINES))
        except PenstockError as exc:  # a part of it may be on a host that is away now
            lines.append(exc.message)
        return tuple(lines)

    def _keep_measured(self, seen: Observation) -> None:
        """What each start of an engine reported, once, for the next plan."""
        for row in seen.view.replicas if seen.view else ():
            announcement = row.announcement
            start = (announcement.replica, announcement.started_at)
            if announcement.state != "ready" or start in self._measured:
                continue
            self._measured.add(start)
            if self._scaler is not None:
                self._scaler.note_ready()
            try:
                measured.keep_start(self._plan, announcement)
                path = measured.keep(self._plan, announcement.measured, self._world.unix())
            except OSError as exc:  # the next plan then estimates, as this one did
                self.run.add_event("measured values lost", str(exc), replica=announcement.replica)
                continue
            if path is not None:
                self.run.add_event("measured values kept", str(path), replica=announcement.replica)

    def _pass_on(self, desired: Desired, seen: Observation) -> None:
        """What all replicas shall do once goes to the gateways, whose answers to announcements order it."""
        if desired.order is None or desired.order == self._passed_on or seen.view is None:
            return
        self._passed_on = desired.order
        self._post_each(f"/admin/{desired.order.word}", [row.announcement.replica for row in seen.view.replicas])

    # ---- acting ------------------------------------------------------------------------------------------------------

    def _act(self, desired: Desired, seen: Observation, *, may_place: bool) -> Decision:
        now = self._world.now()
        memory = msgspec.structs.replace(self._memory, failed=frozenset(self.history.failed), due_at=self._due_at)
        decision, self._memory = decide(desired, seen, memory, now, self._world.unix())
        self._add_events(decision.events)
        failed = {name: row for name, row in self.history.failed.items() if name not in decision.forget}
        self.history = msgspec.structs.replace(self.history, failed=failed)
        self._post_each("/admin/drain", decision.drain)
        self._post_each("/admin/undrain", decision.undrain)
        if "gateway" not in self._placed:
            self._run_gateway_here(decision, seen, now)
        if may_place:
            self._start_placing(decision, seen, now)
        return decision

    def _start_placing(self, decision: Decision, seen: Observation, now: float) -> None:
        placed = _placed_units(self.run)
        units = placed if decision.place is None else frozenset(u for u in decision.place if u.kind in self._placed)
        if self._refusal is not None and self._refusal.changes != placed ^ units:
            self._refusal = None
        is_unnoted = bool(self.run.handle().ordered)  # by a controller that was killed while it placed
        if decision.place is None and not is_unnoted:
            return
        if decision.starts_gateway and "gateway" in self._placed:
            self._note_gateway(decision, seen, now)
        if not self._note_restarts(decision, seen, now):
            return
        # The target is asked at once, but later each time that it refuses the same.
        is_due = (units != placed or is_unnoted) and (self._refusal is None or now >= self._refusal.again_at)
        if not (decision.again or is_due):
            return
        self._post_each("/admin/forget", decision.evict)
        # What an engine mapped when it was last seen: it may have been killed together with its node.
        rows = seen.view.replicas if seen.view else ()
        lost = [row.announcement for row in rows if row.announcement.replica in decision.again]
        segments = [path for announcement in lost for path in announcement.shared_memory]
        self._worker = self._world.thread(lambda: self._place(units, segments), "place")

    def _note_restarts(self, decision: Decision, seen: Observation, now: float) -> bool:
        """Note the replicas that are placed again as restarts; False when one of them failed."""
        for name in decision.again:
            if self._n_deaths.get(name, 0) >= _SILENT_NODES - 1 and seen.view and name not in self._reported:
                self._fail_silent_node(name, seen.placements[replica(name)].reason)
                return False
            placement = seen.placements[replica(name)]
            is_broken = placement.state == "broken"
            restart = Restart(round(self._world.unix(), 2), placement.reason or "it was gone")
            if not (is_broken and name in self._broken):  # a lost node is reported once, however often it is tried
                self._remember_restart(name, restart, seen)
            if is_broken:
                self._broken.add(name)
            self._n_deaths[name] = self._n_deaths.get(name, 0) + 1
            backoff = self._replica_backoffs.setdefault(name, Backoff(1.0, 30.0, 300.0))
            self._due_at[name] = now + backoff.next(now)
        return True

    def _place(self, units: Collection[Unit], segments: Sequence[str]) -> None:
        before = _placed_units(self.run)
        try:
            self._note_ordered(units)  # what a full disk cannot keep is not placed
            self.run.write_handle(self.target.place(self.run, units))
        except (PenstockError, OSError) as exc:
            self._refuse(frozenset(units) ^ before, str(exc))
            return
        self._refusal = None
        self._processes.unlink_shared_memory(segments)
        after = _placed_units(self.run)  # not all that was asked for, where a host does not answer
        for unit in sorted(before - after, key=order):
            if unit.kind == "replica":
                self._post_each("/admin/forget", [unit.name])
                self.run.add_event("replica ended", f"replica {unit.name} drained and ended", replica=unit.name)
        for unit in sorted(after - before, key=order):
            name = unit.name if unit.kind == "replica" else None
            self.run.add_event(f"{unit.kind} placed", f"{unit.kind} {unit.name} placed", name)

    def _note_ordered(self, units: Collection[Unit]) -> None:
        """A controller that takes over finds what this one starts now, also when its target has not told it yet."""
        handle = self.run.handle()
        new = {unit.name for unit in units if unit.kind == "replica" and unit.key not in handle.units}
        self.run.write_handle(msgspec.structs.replace(handle, ordered=tuple(sorted({*handle.ordered, *new}))))

    def _refuse(self, changes: frozenset[Unit], message: str) -> None:
        if self._refusal is None or self._refusal.message != message:
            self.run.add_event("place failed", message)
        now = self._world.now()
        backoff = self._refusal.backoff if self._refusal is not None else Backoff(1.0, 30.0, 300.0)
        self._refusal = _Refusal(changes, message, backoff, now + backoff.next(now))

    def _note_refusal(self) -> None:
        """`status` shows replicas that the target would not place, although no handle has them."""
        refused = {}
        if self._refusal is not None:
            new = self._refusal.changes - _placed_units(self.run)
            refused = {unit.name: self._refusal.message for unit in new if unit.kind == "replica"}
        self.history = msgspec.structs.replace(self.history, refused=refused)

    def _post_each(self, path: str, replicas: Collection[str]) -> None:
        for name in replicas:
            try:
                post_each(gateways(self.run), path, {"replica": name})
            except PenstockError as exc:
                print(f"penstock: {path} {name}: {exc.message}", flush=True)

    def _remember_restart(self, name: str, restart: Restart, seen: Observation) -> None:
        rows = seen.view.replicas if seen.view else ()
        reported = [each for row in rows if row.announcement.replica == name for each in row.announcement.restarts]
        earlier = [*self.history.replicas.get(name, ()), *reported, restart]
        replicas = {**self.history.replicas, name: tuple(earlier[-KEPT_RESTARTS:])}
        self.history = msgspec.structs.replace(self.history, replicas=replicas)
        self.run.add_event("replica restarted", restart.reason, replica=name)

    # ---- the gateway -------------------------------------------------------------------------------------------------

    def _run_gateway_here(self, decision: Decision, seen: Observation, now: float) -> None:
        process = self.history.gateway.process
        wanted = decision.place is None or any(unit.kind == "gateway" for unit in decision.place)
        if not wanted and process is not None and seen.gateway.state == "running":
            self._processes.signal_process(process, signal.SIGKILL)
        if not decision.starts_gateway:
            return
        self._note_gateway(decision, seen, now)
        argv = [sys.executable, "-m", "penstock.gateway", str(self.run.gateway_config)]
        files, self._sockets = self._sockets, ()
        argv += ["--sockets", ",".join(map(str, files))] if files else []
        process = self._processes.start_detached(argv, self._marks("gateway"), self.run.log("gateway"), files=files)
        for file in files:
            os.close(file)
        part = msgspec.structs.replace(self.history.gateway, state="running", process=process)
        self.history = msgspec.structs.replace(self.history, gateway=part)

    def _note_gateway(self, decision: Decision, seen: Observation, now: float) -> None:
        due_at = now + self._gateway_backoff.next(now)
        self._memory = msgspec.structs.replace(self._memory, gateway_due_at=due_at)
        part = self.history.gateway
        if not decision.is_restart or part.unit is None:
            return
        placement = seen.placements.get(Unit("gateway", part.unit))
        reason = (placement.reason if placement is not None else None) or f"gateway {part.unit} is gone"
        self.run.add_event("gateway restarted", reason)
        part = msgspec.structs.replace(part.restarted(reason), unit=None)
        self.history = msgspec.structs.replace(self.history, gateway=part)

    def _write(self, state: State) -> None:
        now = self._world.now()
        if self._written is not None:
            at, before = self._written
            same = msgspec.structs.replace(before, observed_at=0.0) == msgspec.structs.replace(state, observed_at=0.0)
            if same and now - at < _WRITE_EVERY_S:
                return
        self._written = (now, state)
        self.run.write_state(state)


def _placed_units(run: Run) -> frozenset[Unit]:
    return frozenset(map(unit_of, run.handle().units))


def _seen_by_controller(row: ReplicaStatus) -> tuple[Restart, ...]:
    reported = row.announcement.restarts if row.announcement else ()
    return tuple(restart for restart in row.restarts if restart not in reported)
