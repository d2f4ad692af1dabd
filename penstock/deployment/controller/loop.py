"""Keeps a deployment as it was asked for: observe -> decide -> act, once a tick, until `down`.

    python -m penstock.deployment.controller RUN_FOLDER

One detached process per deployment; it outlives the command line and finds everything again from the run folder, so
killing it loses nothing: its warden starts another. `decide` is pure. What blocks (a target) runs in one worker
thread, so that the state on disk stays fresh meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock import processes, targets
from penstock.deployment import measured
from penstock.deployment.controller.decide import decide, leaving
from penstock.deployment.controller.placed_gateway import Keeper
from penstock.deployment.observe import History, Observation, admin_client, look, summarise
from penstock.errors import PenstockError
from penstock.run_folder import KEPT_RESTARTS, Desired, Part, ReplicaStatus, Run, State
from penstock.wire.announcement import Announcement, Process, Restart

_TICK_S = 0.4
_WRITE_EVERY_S = 1.0
_MAX_PAUSE_S = 30.0
_GATEWAY_SILENCE_S = 8.0
_SILENT_NODES = 3  # a node that died this often before it said anything will not come
_TAIL_LINES = 20


class _Refusal(msgspec.Struct, frozen=True):
    """What the target would not do. `changes`: the replicas to place or to end; `again_at`: monotonic seconds."""

    changes: frozenset[str]
    message: str
    n_times: int
    again_at: float


class Controller:
    """The thin part that acts."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.target = targets.load(run.record().target)
        self.handle = run.handle()
        self.stop = threading.Event()
        last = run.state()
        self.history = History(
            controller=self._own_part(last),
            gateway=last.gateway if last else Part("gone"),
            replicas={row.replica: _seen_by_controller(row) for row in last.replicas} if last else {},
            failed={row.replica: row for row in last.replicas if row.state == "failed"} if last else {},
            was_ready=last is not None and last.phase in ("ready", "degraded"),
        )
        self._plan = run.plan()
        placed = run.is_gateway_placed
        self._keeper = Keeper(run, self.target, run.deployment().gateway.drain_s) if placed else None
        self._measured: set[tuple[str, float | None]] = set()
        self._drain_since: dict[str, float] = {}
        self._gateway_starts: list[float] = []
        self._gateway_silent_since: float | None = None
        self._leaving: frozenset[str] = frozenset()
        self._broken: set[str] = set()
        self._spoke: set[str] = set()
        self._place_times: dict[str, list[float]] = {}
        self._worker: threading.Thread | None = None
        self._refusal: _Refusal | None = None
        self._warden: Process | None = None
        self._written: tuple[float, State] | None = None

    def run_until_stopped(self) -> None:
        while not self.stop.is_set() and self.run.exists():
            self._tend_warden()
            desired = self.run.desired()
            if desired.state == "down":
                return
            seen = look(self.run, self.handle, self.history.gateway)
            self.target.tend(self.run, self.handle)
            self._note_failures(seen)
            self._keep_measured(seen)
            if self._keeper is not None:
                self.history = msgspec.structs.replace(self.history, gateway=self._keeper.tend(seen))
            else:
                self._end_hung_gateway(seen)
            self._act(desired, seen)
            self._note_refusal()
            state = summarise(desired, seen, self.history, time.time())
            self.history = msgspec.structs.replace(
                self.history, was_ready=self.history.was_ready or state.phase == "ready"
            )
            self._write(state)
            self.stop.wait(_TICK_S)

    def end_warden(self) -> None:
        if self._warden is not None:
            processes.end([self._warden], 1.0)

    def _own_part(self, last: State | None) -> Part:
        part = Part("running", processes.identify(os.getpid(), "controller"))
        if last is None or last.controller.process is None:
            return part
        reason = f"its process {last.controller.process.pid} was gone"
        self.run.add_event("controller restarted", reason)
        return msgspec.structs.replace(part, **_counts(last.controller)).restarted(reason)

    def _tend_warden(self) -> None:
        if self._warden is not None and processes.is_alive(self._warden):
            return
        if self._warden is not None:
            self.run.add_event("warden restarted", f"its process {self._warden.pid} was gone")
        argv = [sys.executable, "-m", "penstock.deployment.controller.warden", str(self.run.path), str(os.getpid())]
        self._warden = processes.start_detached(argv, self._marks("warden"), self.run.log("controller"))

    def _marks(self, role: str) -> dict[str, str]:
        return processes.marks(str(self.run.path), self.run.record().id, role)

    def _end_hung_gateway(self, seen: Observation) -> None:
        """A gateway that lives and does not answer is killed; the next tick starts another."""
        now = time.monotonic()
        if seen.view is not None or not seen.gateway_is_alive:
            self._gateway_silent_since = None
            return
        self._gateway_silent_since = self._gateway_silent_since or now
        if now - self._gateway_silent_since > _GATEWAY_SILENCE_S and self.history.gateway.process is not None:
            self.run.add_event("gateway hung", f"it did not answer for {_GATEWAY_SILENCE_S:.0f} s")
            processes.signal_process(self.history.gateway.process, signal.SIGKILL)

    def _note_failures(self, seen: Observation) -> None:
        for row in seen.view.replicas if seen.view else ():
            told = row.announcement
            self._spoke.add(told.replica)
            if told.state == "failed" and told.replica in seen.placements and told.replica not in self.history.failed:
                status = ReplicaStatus(
                    told.replica, "failed", "gone", told, n_restarts=told.n_restarts, restarts=told.restarts,
                    reason=told.reason,
                )  # fmt: skip
                self.history = msgspec.structs.replace(
                    self.history, failed={**self.history.failed, told.replica: status}
                )
                self.run.add_event("replica failed", told.reason or "", replica=told.replica)
        for name, placement in seen.placements.items():
            if placement.state == "placed":
                self._broken.discard(name)
            if placement.is_final and placement.state == "gone" and name not in self.history.failed:
                self._fail_ended_by_others(name, placement.reason or "it was ended from outside", seen)

    def _fail_ended_by_others(self, name: str, reason: str, seen: Observation) -> None:
        """Who cancels a job of ours means it: it is not placed again behind his back."""
        rows = seen.view.replicas if seen.view else ()
        told = next((row.announcement for row in rows if row.announcement.replica == name), None)
        status = ReplicaStatus(name, "failed", "gone", told, reason=reason)
        self.history = msgspec.structs.replace(self.history, failed={**self.history.failed, name: status})
        self.run.add_event("replica failed", reason, replica=name)

    def _keep_measured(self, seen: Observation) -> None:
        """What each start of an engine reported, once, for the next plan."""
        for row in seen.view.replicas if seen.view else ():
            told = row.announcement
            start = (told.replica, told.started_at)
            if told.state != "ready" or start in self._measured:
                continue
            self._measured.add(start)
            try:
                path = measured.keep(self._plan, told.measured, time.time())
            except OSError as exc:  # the next plan then estimates, as this one did
                self.run.add_event("measured values lost", str(exc), replica=told.replica)
                continue
            if path is not None:
                self.run.add_event("measured values kept", str(path), replica=told.replica)

    def _act(self, desired: Desired, seen: Observation) -> None:
        now = time.monotonic()
        failed = frozenset(self.history.failed)
        going = leaving(seen, time.time(), self._plan.drain_s)
        for name in sorted(going - self._leaving):
            self.run.add_event("replica leaving", "its machines are taken away soon: the next is placed", replica=name)
        self._leaving = going
        choice = decide(
            desired, seen, failed, lambda name: now - self._drain_since.get(name, now) > self._plan.drain_s, going
        )
        if choice.forget:
            kept = {name: row for name, row in self.history.failed.items() if name not in choice.forget}
            self.history = msgspec.structs.replace(self.history, failed=kept)
        if choice.start_gateway and self._keeper is None:
            self._start_gateway(now)
        for name in choice.drain:
            self._drain_since.setdefault(name, now)
            self._tell_gateway("/admin/drain", name)
        for name in choice.undrain:
            self._drain_since.pop(name, None)
            self._tell_gateway("/admin/undrain", name)
        if self._worker is not None and self._worker.is_alive():
            return
        placed = frozenset(self.handle.replicas)
        changes = placed ^ frozenset(placed if choice.place is None else choice.place)
        if self._refusal is not None and self._refusal.changes != changes:
            self._refusal = None
        if choice.place is None:
            return
        again = [name for name in choice.again if self._may_place(name, now)]
        is_due = bool(changes) and (self._refusal is None or now >= self._refusal.again_at)
        if not again and not is_due:
            return
        for name in again:
            if len(self._place_times.get(name, ())) >= _SILENT_NODES - 1 and seen.view and name not in self._spoke:
                self._fail_silent_node(name)
                return
            reason = seen.placements[name].reason or "it was gone"
            is_broken = seen.placements[name].state == "broken"
            if not (is_broken and name in self._broken):  # a lost node is told once, however often it is tried
                self._remember_restart(name, reason, seen)
            if is_broken:
                self._broken.add(name)
            self._place_times.setdefault(name, []).append(now)
        # What an engine mapped when it was last seen: it may have been killed together with its node.
        rows = seen.view.replicas if seen.view else ()
        segments = [
            path for row in rows if row.announcement.replica in again for path in row.announcement.shared_memory
        ]
        self._worker = threading.Thread(target=self._place, args=(choice.place, segments), name="place", daemon=True)
        self._worker.start()

    def _fail_silent_node(self, name: str) -> None:
        """A node that cannot even say that it fails: its log is all there is."""
        told = Announcement(
            replica=name,
            model=self._plan.served_names[0],
            state="failed",
            lease_s=0.0,
            reason=f"its node ended {_SILENT_NODES} times before its first report",
            log_tail=self._log_tail(name),
        )
        status = ReplicaStatus(name, "failed", "gone", told, reason=told.reason)
        self.history = msgspec.structs.replace(self.history, failed={**self.history.failed, name: status})
        self.run.add_event("replica failed", told.reason or "", replica=name)

    def _log_tail(self, name: str) -> tuple[str, ...]:
        lines = []
        try:
            for line in self.target.logs(self.run, self.handle, name, follow=False, last=_TAIL_LINES):
                lines.append(line)
        except PenstockError as exc:  # a part of it may be where nobody can look now
            lines.append(exc.message)
        return tuple(lines)

    def _note_refusal(self) -> None:
        """Status tells replicas that the target would not place, which are in no list of its own."""
        refusal = self._refusal
        refused = dict.fromkeys(refusal.changes - set(self.handle.replicas), refusal.message) if refusal else {}
        self.history = msgspec.structs.replace(self.history, refused=refused)

    def _may_place(self, name: str, now: float) -> bool:
        times = self._place_times.get(name, [])
        return not times or now - times[-1] > _pause_s(len(times))

    def _place(self, names: Sequence[str], segments: Sequence[str]) -> None:
        before = set(self.handle.replicas)
        try:
            self.handle = self.target.resize(self.run, self.handle, names)
            self.run.write_handle(self.handle)
        except PenstockError as exc:
            if self._refusal is None or self._refusal.message != exc.message:
                self.run.add_event("place failed", exc.message)
            n_times = self._refusal.n_times + 1 if self._refusal is not None else 1
            changes = frozenset(names) ^ before
            self._refusal = _Refusal(changes, exc.message, n_times, time.monotonic() + _pause_s(n_times))
            return
        self._refusal = None
        processes.unlink_shared_memory(segments)
        now_there = set(self.handle.replicas)  # not all that was asked for, where a host does not answer
        for name in sorted(before - now_there):
            self._drain_since.pop(name, None)
            self._tell_gateway("/admin/forget", name)
            self.run.add_event("replica ended", f"replica {name} drained and ended", replica=name)
        for name in sorted(now_there - before):
            self.run.add_event("replica placed", f"replica {name} placed", replica=name)

    def _tell_gateway(self, path: str, replica: str) -> None:
        try:
            admin_client(self.run).post_json(path, {"replica": replica})
        except PenstockError as exc:
            print(f"penstock: {path} {replica}: {exc.message}", flush=True)

    def _remember_restart(self, name: str, reason: str, seen: Observation) -> None:
        told = [
            restart
            for row in (seen.view.replicas if seen.view else ())
            if row.announcement.replica == name
            for restart in row.announcement.restarts
        ]
        earlier = [*self.history.replicas.get(name, ()), *told, Restart(round(time.time(), 2), reason)]
        self.history = msgspec.structs.replace(
            self.history, replicas={**self.history.replicas, name: tuple(earlier[-KEPT_RESTARTS:])}
        )
        self.run.add_event("replica restarted", reason, replica=name)

    def _start_gateway(self, now: float) -> None:
        recent = [at for at in self._gateway_starts if now - at < 60]
        if recent and now - recent[-1] < min(_MAX_PAUSE_S, 2.0 ** (len(recent) - 1)):
            return
        self._gateway_starts = [*recent, now]
        part, old = self.history.gateway, self.history.gateway.process
        if old is not None:
            reason = f"its process {old.pid} was gone{_last_words(self.run.log('gateway'))}"
            self.run.add_event("gateway restarted", reason)
            part = part.restarted(reason)
        argv = [sys.executable, "-m", "penstock.gateway", str(self.run.gateway_config)]
        process = processes.start_detached(argv, self._marks("gateway"), self.run.log("gateway"))
        part = msgspec.structs.replace(part, state="running", process=process)
        self.history = msgspec.structs.replace(self.history, gateway=part)

    def _write(self, state: State) -> None:
        now = time.monotonic()
        if self._written is not None:
            at, before = self._written
            same = msgspec.structs.replace(before, observed_at=0.0) == msgspec.structs.replace(state, observed_at=0.0)
            if same and now - at < _WRITE_EVERY_S:
                return
        self._written = (now, state)
        self.run.write_state(state)


def _pause_s(n_times: int) -> float:
    """How long a replica that was placed so often waits for the next time: 1, 3, 7, 15, then 30 s."""
    return min(_MAX_PAUSE_S, 2.0 ** min(n_times, 5) - 1)


def _seen_by_controller(row: ReplicaStatus) -> tuple[Restart, ...]:
    """A replica's restarts less those that its node tells by itself."""
    told = row.announcement.restarts if row.announcement else ()
    return tuple(restart for restart in row.restarts if restart not in told)


def _counts(part: Part) -> dict[str, object]:
    return {"n_restarts": part.n_restarts, "restarts": part.restarts}


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    explains = lines and any(word in lines[-1].lower() for word in ("error", "cannot "))
    return f"; its last line: {lines[-1][:200]}" if explains else ""
