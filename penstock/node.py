"""Runs beside every engine: starts it, watches it, announces it, brings it back, ends it.

    python -m penstock.node LAUNCH.json --replica 0

Life of an engine: starting -> loading -> warming (its /health answers) -> ready (it also gave a token). A ready
engine that dies, answers /health with an error, or has requests running but makes no step for `stall_s` is ended with
all it forked and started again after a pause; the reason is kept and announced. An engine that never became ready and
cannot is "failed": the node says why and leaves. SIGTERM drains; a second one does not wait.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock import engines, metrics, processes
from penstock.announce import Announcement, EngineLoad, Process, Progress, ReplicaState, Restart
from penstock.client import Client, HttpError, NoAnswer
from penstock.engine_process import EngineProcess, free_port, private_folder
from penstock.engines import Diagnosis, Engine, Place, Seen
from penstock.errors import PenstockError
from penstock.targets import Launch
from penstock.units import show_seconds

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
_LAST_WORD_S = 30.0  # a failed start is announced for this long: its gateway may still be starting


def pause_s(n_failures: int) -> float:
    """Seconds to wait before start number n+1 after n failures in a row: 1, 2, 4 ... at most 60."""
    return float(min(60, 2 ** max(0, n_failures - 1)))


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


class Announcer(threading.Thread):
    """Tells the gateway the newest announcement: every second, and at once when it changes."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(name="announcer", daemon=True)
        token = Path(launch.token_file).read_text("utf-8").strip()
        self._client = Client(launch.announce_url, api_key=token, timeout_s=3.0)
        self._changed = threading.Condition()
        self._newest: Announcement | None = None
        self._told: Announcement | None = None
        self._refused: Announcement | None = None

    def tell(self, announcement: Announcement) -> None:
        with self._changed:
            if announcement != self._newest:
                self._newest = announcement
                self._changed.notify_all()

    def is_told(self) -> bool:
        with self._changed:
            return self._told == self._newest

    def wait_told(self, timeout_s: float) -> None:
        """Block until the gateway has the newest announcement or cannot be reached, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest in (self._told, self._refused), timeout_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None and self._newest != self._told, 1.0)
                newest = self._newest
            if newest is None:
                continue
            try:
                self._client.post_json("/admin/announce", msgspec.to_builtins(newest))
            except PenstockError:
                self._note(refused=newest)
                time.sleep(0.5)  # the gateway is down or starting: the controller sees to it
                continue
            self._note(told=newest)

    def _note(self, told: Announcement | None = None, refused: Announcement | None = None) -> None:
        with self._changed:
            self._told, self._refused = told or self._told, refused
            self._changed.notify_all()


class Node:
    """Supervises one engine until told to stop."""

    def __init__(self, launch: Launch, replica: str, engine: Engine) -> None:
        self.launch, self.plan, self.replica, self.engine = launch, launch.plan, replica, engine
        self.announcer = Announcer(launch)
        self.stops = 0
        self._wake = threading.Event()
        self._state: ReplicaState = "starting"
        self._reason: str | None = None
        self._hint: str | None = None
        self._restarts: list[Restart] = []
        self._n_restarts = 0
        self._was_ready = False
        self._ready_after_s: float | None = None
        self._started_at = time.time()
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

    def run(self) -> int:
        """Until a stop (0) or a failed start (1)."""
        self.announcer.start()
        failures = 0
        while not self.stops:
            began = time.monotonic()
            diagnosis = self._one_life()
            if diagnosis is None:
                break
            calm = self._ready_after_s is not None and time.monotonic() - began > _CALM_AFTER_S
            failures = 1 if calm else failures + 1
            print(f"penstock: {diagnosis.reason}", flush=True)
            is_same = diagnosis.line is not None and diagnosis.reason == self._reason
            if not self._was_ready and (diagnosis.is_final or is_same or failures >= _STARTS_BEFORE_FAILED):
                self._fail(diagnosis)
                return 1
            self._note_restart(diagnosis)
            self._pause(pause_s(failures))
        self._announce("stopping")
        self.announcer.wait_told(2.0)
        return 0

    def _one_life(self) -> Diagnosis | None:
        """One engine from its start to its end: why it ended, or None when we were told to stop."""
        self._start()
        assert self._process is not None
        try:
            diagnosis = self._until_ready()
            if diagnosis is None and not self.stops:
                diagnosis = self._while_ready()
            if diagnosis is None:
                self._drain()
            return diagnosis
        finally:
            # An engine that is still loading ignores SIGTERM (vLLM) and has nothing to lose.
            self._process.end(_ENGINE_GRACE_S if self._state == "stopping" and self._ready_after_s else 0.0)
            # What it mapped when it was last seen: it may have been killed together with its children.
            processes.unlink_shared_memory(self._segments)
            self._url = self._load = None

    def _start(self) -> None:
        host = "127.0.0.1"
        port = free_port(host)
        run_id = os.environ.get(processes.MARK_RUN_ID, str(os.getpid()))
        folder = private_folder(run_id, self.replica)
        command = self.engine.command(self.plan, Place(host, port, str(folder), sys.executable))
        print(f"penstock: starting {' '.join(command.argv)}", flush=True)
        self._seen = Seen(Progress("imports", fraction=0.0))
        self._started_at, self._ready_after_s = time.time(), None
        run = os.environ[processes.MARK_RUN]
        self._process = EngineProcess(command, folder, run, self.replica, self._on_line)
        self._url = f"http://{host}:{port}"
        self._announce("starting")

    def _on_line(self, line: str) -> None:
        seen = self.engine.read(line, self._seen, self.plan)
        if seen is not self._seen:
            self._seen = seen
            if self._state in ("starting", "loading"):
                self._announce("loading")

    def _until_ready(self) -> Diagnosis | None:
        assert self._process is not None and self._url is not None
        deadline = time.monotonic() + self.plan.start_timeout_s
        while not self.stops:
            code = self._process.exit_code()
            if code is not None:
                return self._death(code)
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
                print(f"penstock: ready after {show_seconds(self._ready_after_s)} at {self._url}", flush=True)
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
            lost = self._lost_process()
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
        assert self._url is not None and self._process is not None
        try:
            Client(self._url, timeout_s=_HEALTH_TIMEOUT_S).get_text("/health")
        except PenstockError as exc:
            if self._process.exit_code() is not None:
                return missed, None  # the loop reads its death, which says more
            if isinstance(exc, NoAnswer) and missed + 1 < _MISSED_HEALTH:
                return missed + 1, None
            return missed, self._lost_process() or Diagnosis(f"its health check failed: {exc.message}")
        return 0, None

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
        is_running = self._process is not None and self._process.exit_code() is None
        self._processes = self._process.processes() if self._process and is_running else ()
        self._segments = tuple(processes.shared_memory(self._processes))

    def _metrics(self) -> dict[str, float] | None:
        assert self._url is not None
        try:
            return metrics.parse(Client(self._url, timeout_s=_HEALTH_TIMEOUT_S).get_text("/metrics"))
        except PenstockError:
            return None

    def _find_adapters(self) -> tuple[str, ...]:
        """The names that the engine serves beside the model's own."""
        assert self._url is not None
        try:
            rows = Client(self._url, timeout_s=_HEALTH_TIMEOUT_S).get_json("/v1/models").get("data") or []
        except PenstockError:
            return ()
        names = [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        return tuple(name for name in names if name not in self.plan.served_names)[:_ADAPTERS_MAX]

    def _answers(self) -> bool:
        assert self._url is not None
        try:
            Client(self._url, timeout_s=_HEALTH_TIMEOUT_S).get_text("/health")
        except PenstockError:
            return False
        return True

    def _probe(self) -> bool:
        """One token: an engine may be healthy and die of its first request (vLLM with a pipeline did)."""
        assert self._url is not None
        if self._state != "warming":
            self._announce("warming")
        body = {"model": self.plan.served_names[0], "prompt": "1", "max_tokens": 1, "temperature": 0}
        try:
            answer = Client(self._url, timeout_s=_PROBE_TIMEOUT_S).post_json("/v1/completions", body)
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
        assert self._process is not None
        self._tail = tuple(engines.telling_lines(self._process.tail, diagnosis.line, _TAIL_SHOWN))
        self._reason, self._hint = diagnosis.reason, diagnosis.hint
        self._announce("failed")
        deadline = time.monotonic() + _LAST_WORD_S
        while time.monotonic() < deadline and not self.announcer.is_told():
            self.announcer.wait_told(1.0)
            self._pause(_TICK_S)

    def _pause(self, seconds: float) -> None:
        if not self.stops:
            self._wake.wait(seconds)

    def _announce(self, state: ReplicaState) -> None:
        if state != self._state:
            self._look_at_processes()
        self._state = state
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
            )
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one replica of a launch; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="penstock.node")
    parser.add_argument("launch", type=Path)
    parser.add_argument("--replica", required=True)
    options = parser.parse_args(argv)
    launch = msgspec.json.decode(options.launch.read_bytes(), type=Launch)
    os.environ.setdefault(processes.MARK_RUN, str(options.launch.parent.parent))
    os.environ.setdefault(processes.MARK_REPLICA, options.replica)
    node = Node(launch, options.replica, engines.load(launch.plan.engine))
    handler: Callable[..., None] = node.stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return node.run()


if __name__ == "__main__":
    sys.exit(main())
