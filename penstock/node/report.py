"""What a node announces of its replica."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from penstock import engines
from penstock.engines import Diagnosis, Seen
from penstock.models.fetch_files import Progress as FetchProgress
from penstock.node.announcer import Announcer
from penstock.node.load_choice import Chosen
from penstock.node.ready_file import ReadyFile
from penstock.run_folder import Launch
from penstock.wire.announcement import (
    ACTIVE,
    SERVING,
    Announcement,
    EngineLoad,
    NodeView,
    Process,
    Progress,
    ReplicaState,
    Restart,
)
from penstock.world import REAL, World

_KEPT_RESTARTS = 10


class StageTimes:
    """Seconds of each stage of a start, from its begin to its end. Pure: `now` in seconds of any clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage, self._since = "", None  # type: tuple[str, float | None]

    def begin(self, stage: str, now: float) -> None:
        self._seconds, self._stage, self._since = {}, stage, now

    def enter(self, stage: str, now: float) -> None:
        """Nothing before a begin and after an end. A stage may come again."""
        if self._since is not None and stage != self._stage:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
            self._stage, self._since = stage, now

    def end(self, now: float) -> dict[str, float]:
        self.enter("", now)
        self._since = None
        return {stage: round(seconds, 2) for stage, seconds in self._seconds.items()}


class ReplicaReport:
    """The supervisor sets the fields; `announce` hands them to the announcer and keeps the ready file."""

    def __init__(
        self, launch: Launch, replica: str, announcer: Announcer, ready_file: ReadyFile, world: World = REAL
    ) -> None:
        self._world = world
        self._launch, self._plan, self._replica = launch, launch.plan, replica
        self._announcer, self._ready_file = announcer, ready_file
        self.state: ReplicaState = "starting"
        self.reason: str | None = None
        self.hint: str | None = None
        self.url: str | None = None
        self._seen, self._seen_lock = Seen(Progress("files", fraction=0.0)), threading.Lock()
        self._times = StageTimes()
        self.start_s: dict[str, float] = {}
        self.n_restarts = 0
        self.processes: tuple[Process, ...] = ()
        self.segments: tuple[str, ...] = ()
        self.tail: tuple[str, ...] = ()
        self.load: EngineLoad | None = None
        self.adapters: tuple[str, ...] = ()
        self.nodes: tuple[NodeView, ...] = ()
        self.loading, self.carried = Chosen(launch.plan), ""
        self._input_modalities = engines.load(self._plan.engine).input_modalities(self._plan)
        self.was_ready = False
        self.ready_after_s: float | None = None
        self._restarts: list[Restart] = []
        self._started_at = self._world.unix()

    @property
    def seen(self) -> Seen:
        return self._seen

    @seen.setter
    def seen(self, seen: Seen) -> None:
        self.update(lambda _: seen)

    def update(self, change: Callable[[Seen], Seen]) -> bool:
        """Change what was seen, also from the thread that reads the engine's log; whether that is another object."""
        with self._seen_lock:
            seen = change(self._seen)
            is_new, self._seen = seen is not self._seen, seen
            if is_new and self.state != "warming":  # its last lines may still be on the way through the pipe
                self._times.enter(seen.progress.stage, self._world.now())
        return is_new

    def begin(self) -> None:
        self._times.begin("files", self._world.now())
        self.stage("files")
        self._started_at, self.ready_after_s = self._world.unix(), None

    def stage(self, stage: str, timed_as: str | None = None) -> None:
        """Set progress that the engine's log does not show. `timed_as`: where `stage` names more than the stage."""
        self._times.enter(timed_as or stage, self._world.now())
        self._seen = Seen(Progress(stage, fraction=0.0))

    def show(self, progress: FetchProgress) -> None:
        """Announce how far the model's files are."""
        self._times.enter("fetch", self._world.now())
        fraction = progress.n_bytes / progress.total_bytes if progress.total_bytes else 1.0
        words = f"fetching {progress.done}" + (f", {progress.note}" if progress.note else "")
        self._seen = Seen(
            Progress(words, bytes_per_s=progress.rate_bytes_per_s, eta_s=progress.left_s, fraction=fraction)
        )
        self.announce(self.state)

    def ready(self, adapters: tuple[str, ...]) -> None:
        self.ready_after_s = round(self._world.unix() - self._started_at, 2)
        self.start_s = self._times.end(self._world.now())
        self.was_ready, self.reason, self.adapters = True, None, adapters
        self.seen = Seen(Progress("ready", fraction=1.0), self.seen.measured)
        self.announce("ready")

    def restarting(self, diagnosis: Diagnosis) -> None:
        self.n_restarts += 1
        self._restarts = [*self._restarts, Restart(round(self._world.unix(), 2), diagnosis.reason)][-_KEPT_RESTARTS:]
        self.reason = diagnosis.reason
        self.seen = Seen(Progress("waiting to start again", fraction=0.0), self.seen.measured)
        self.announce("restarting")

    def failed(self, diagnosis: Diagnosis, tail: tuple[str, ...]) -> None:
        self.reason, self.hint, self.tail = diagnosis.reason, diagnosis.hint, tail
        self.announce("failed")

    def announce(self, state: ReplicaState) -> None:
        if state == "warming":
            self._times.enter("warming", self._world.now())
        self.state = state
        self._ready_file.set(is_ready=state in SERVING)  # a probe must not end one that sleeps
        # The engine's numbers, with the load that was expected next to what it took.
        expected = {} if self.loading.expected_s is None else {"load_expected_s": self.loading.expected_s}
        self._announcer.announce(
            Announcement(
                replica=self._replica,
                model=self._plan.served_names[0],
                state=state,
                lease_s=self._launch.lease_s,
                url=self.url,
                host=socket.gethostname(),
                progress=self.seen.progress,
                reason="no answer to /health" if state == "busy" else self.reason,
                hint=self.hint,
                n_restarts=self.n_restarts,
                restarts=tuple(self._restarts),
                processes=self.processes,
                shared_memory=self.segments,
                log_tail=self.tail,
                started_at=round(self._started_at, 2),
                ready_after_s=self.ready_after_s,
                engine=f"{self._plan.engine} {self._plan.engine_version}",
                measured=self.seen.measured | expected,
                load=self.load if state in ACTIVE else None,
                adapters=self.adapters,
                nodes=self.nodes,
                start_s=self.start_s,
                max_model_len=self._plan.max_model_len,
                input_modalities=self._input_modalities,
                loading=self.loading.text,
                carried=self.carried,
            )
        )
