"""The sleep of this node's engine: when it begins, at which level, and the way there and back.

The gateway decides when it ends: its answers to the announcements of a sleeping replica order it to wake, as soon as a
request is held for the model or has slipped through. Asleep, the lease goes on; whatever fails on the way there or back
is a death like any other, after which the engine is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Literal

from penstock.engines import Call, Diagnosis, Engine, Seen
from penstock.errors import PenstockError
from penstock.hardware.detect import memory_bytes
from penstock.node.announcer import Announcer
from penstock.node.engine_client import EngineClient
from penstock.node.report import ReplicaReport
from penstock.planner import Plan
from penstock.processes import Backoff
from penstock.text import GIB, show_bytes, show_seconds
from penstock.wire.announcement import ASLEEP, SLEEPLESS, AnnounceAnswer, Progress
from penstock.wire.answers import HttpError
from penstock.world import REAL, World

_TICK_S = 0.25
_HEALTH_EVERY_S = 1.0
_POSTED_S = 2.0
_AGAIN_S = 10.0  # after a refusal, or a request that came in the moment of falling asleep
# After a sleep that the engine did not survive: an idle deployment must not be restarted again and again.
_FAILED_S, _FAILED_S_MAX, _CALM_S = 600.0, 6 * 3600.0, 24 * 3600.0
_MEMORY_SHARE = 0.9  # of the free memory, for the weights
# Announcements of a sleeper, whose answers bring the order to wake.
_ASK_EVERY_S, _ANNOUNCE_EVERY_S = 0.25, 1.0


class Sleeper:
    """Puts the engine to sleep and wakes it. `obey` is called from the announcer's thread, all else from one."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        report: ReplicaReport,
        announcer: Announcer,
        is_stopped: Callable[[], bool],
        world: World = REAL,
    ) -> None:
        self._world = world
        self._plan, self._engine, self._report, self._announcer = plan, engine, report, announcer
        self._is_stopped = is_stopped
        self._is_ordered = False
        self._wake = world.event()
        self._not_before, self._failure = 0.0, ""
        self._backoff = Backoff(_FAILED_S, _FAILED_S_MAX, _CALM_S)
        self._kept_level: int | None = None  # of this engine: memory that it took once stays its own
        self._wake_s: float | None = None

    def obey(self, answer: AnnounceAnswer) -> None:
        self._is_ordered = answer.sleep
        if answer.wake:
            self._wake.set()

    def begin(self) -> None:
        """A new engine is there."""
        self._kept_level = None

    def is_due(self, client: EngineClient, now: float) -> bool:
        """Whether the engine shall fall asleep now. `now`: monotonic seconds."""
        sleep = self._plan.sleep
        if sleep is None:
            return False
        if now < self._not_before:
            if self._is_ordered and self._failure:
                self._report.reason = f"{SLEEPLESS}: {self._failure}"
            return False
        is_due = self._is_ordered or (sleep.after_s is not None and client.idle_s >= sleep.after_s)
        return is_due and client.is_busy(self._world.now()) is False

    def run(self, client: EngineClient, lost: Callable[[], Diagnosis | None]) -> Diagnosis | None:
        """Falls asleep, sleeps and wakes. Returns when the engine is ready again or the node is stopped (None), or when
        the engine is lost, which `lost` tells at any time. Blocks."""
        choice = self._level()
        if isinstance(choice, str):
            self._refuse(choice)
            return None
        self._wake.clear()
        self._announce("sleeping", Progress("falling asleep"))
        self._announcer.wait_posted(_POSTED_S)
        # From here on gateways hold new requests. One that does not answer may still send.
        if self._wake.is_set() or not self._announcer.is_posted() or client.is_busy(self._world.now()) is not False:
            self._not_before = self._world.now() + _AGAIN_S
            self._serve(client)
            return None
        began_at = self._world.now()
        problem = self._make(client, self._engine.sleep_calls(choice), "put to sleep", lost)
        if isinstance(problem, HttpError):
            self._serve(client)
            self._refuse(f"the engine answered {problem.message}")
            return None
        if problem is not None or self._is_stopped():
            return self._failed(problem)
        self._kept_level = choice
        self._note("sleep_s", self._world.now() - began_at)
        self._announce("sleeping", Progress(f"{ASLEEP} at level {choice}", eta_s=self._wake_s))
        print(f"penstock: {ASLEEP} at level {choice} after {show_seconds(self._world.now() - began_at)}", flush=True)
        problem = self._until_woken(client, lost)
        if problem is not None or self._is_stopped():
            return problem
        return self._wake_up(client, choice, lost)

    def _until_woken(self, client: EngineClient, lost: Callable[[], Diagnosis | None]) -> Diagnosis | None:
        next_health = 0.0
        self._announcer.every_s = _ASK_EVERY_S
        try:
            while not self._wake.is_set() and not self._is_stopped():
                problem = lost()
                if problem is None and self._world.now() >= next_health:
                    next_health = self._world.now() + _HEALTH_EVERY_S
                    why = client.health_problem(self._world.now())
                    problem = (
                        None if why is None else lost() or Diagnosis(f"its health check failed in its sleep: {why}")
                    )
                if problem is not None:
                    return problem
                self._wake.wait(_TICK_S)
        finally:
            self._announcer.every_s = _ANNOUNCE_EVERY_S
        return None

    def _wake_up(self, client: EngineClient, level: int, lost: Callable[[], Diagnosis | None]) -> Diagnosis | None:
        began_at = self._world.now()
        source = "memory" if level == 1 else "the files"
        self._announce("waking", Progress(f"weights from {source}", eta_s=self._wake_s))
        problem = self._make(client, self._engine.wake_calls(level), "woken", lost)
        if isinstance(problem, HttpError):
            problem = Diagnosis(f"it could not be woken: {problem.message}")
        if problem is None and not self._is_stopped() and not client.gives_token():
            problem = lost() or Diagnosis("it was woken and gave no token")
        if problem is not None or self._is_stopped():
            return self._failed(problem)
        self._wake_s = round(self._world.now() - began_at, 2)
        self._note("wake_s", self._wake_s)
        print(f"penstock: awake after {show_seconds(self._wake_s)}", flush=True)
        self._serve(client)
        return None

    def _level(self) -> int | str:
        sleep, measured = self._plan.sleep, self._report.seen.measured
        assert sleep is not None
        if self._kept_level is not None:
            return self._kept_level
        planned = self._plan.need.weights_bytes or self._plan.model.weights_bytes
        # Each rank's, as the engine reports it.
        n_bytes = round(measured.get("weights_gib", 0.0) * GIB) * self._plan.layout.n_ranks or planned
        return choose_level(sleep.level, self._engine.sleep_levels(self._plan), n_bytes, memory_bytes()[1])

    def _refuse(self, why: str) -> None:
        self._not_before = self._world.now() + _AGAIN_S
        reason = f"{SLEEPLESS}: {why}"
        if self._report.reason != reason:
            print(f"penstock: {reason}", flush=True)
        self._report.reason = reason

    def _failed(self, problem: Diagnosis | None) -> Diagnosis | None:
        if problem is not None:
            self._failure = f"its engine was lost in the last attempt ({problem.reason})"
            self._not_before = self._world.now() + self._backoff.next(self._world.now())
        return problem

    def _make(
        self, client: EngineClient, calls: tuple[Call, ...], what: str, lost: Callable[[], Diagnosis | None]
    ) -> Diagnosis | HttpError | None:
        """Makes the calls, however long they take. None also when the node is stopped: the engine ends where it is.
        HttpError: the engine refused the first of them, and is as before."""
        failures: list[PenstockError] = []

        def make() -> None:
            try:
                client.make(calls)
            except PenstockError as exc:
                failures.append(exc)

        thread = self._world.thread(make, "sleep")
        while thread.is_alive() and not self._is_stopped():
            if (problem := lost()) is not None:
                return problem
            thread.join(_TICK_S)
        if not failures:
            return None
        error = failures[0]
        if isinstance(error, HttpError) and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return error
        return lost() or Diagnosis(f"it could not be {what}: {error.message}")

    def _serve(self, client: EngineClient) -> None:
        client.forget_idleness()
        self._is_ordered = False  # answered before it slept, perhaps
        self._report.reason = None
        self._announce("ready", Progress("ready", fraction=1.0))

    def _announce(self, state: Literal["sleeping", "waking", "ready"], progress: Progress) -> None:
        self._report.update(lambda seen: Seen(progress, seen.measured))
        self._report.announce(state)

    def _note(self, name: str, seconds: float) -> None:
        self._report.update(lambda seen: Seen(seen.progress, {**seen.measured, name: round(seconds, 2)}))


def choose_level(
    wanted: Literal["auto", 1, 2], possible: tuple[int, ...], weights_bytes: int, free_bytes: int
) -> int | str:
    """The level to sleep at, or why there is none. Pure."""
    if wanted == 2 or (wanted == "auto" and 2 in possible and weights_bytes > _MEMORY_SHARE * free_bytes):
        return 2 if 2 in possible else "the engine cannot load its weights again in this load format (level 2)"
    if weights_bytes > _MEMORY_SHARE * free_bytes:
        return (
            f"level 1 keeps the weights, {show_bytes(weights_bytes)}, in memory, of which {show_bytes(free_bytes)} "
            f"are free, and takes {_MEMORY_SHARE:.0%} of that at most"
        )
    return 1
