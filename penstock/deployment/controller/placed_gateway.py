"""A gateway that its target places (a job of Slurm): kept up, and moved before its machine is taken away.

The controller's part of it: how many there are, when another is started, when the old one drains. The newest that
listens has written its address into the run's folder, which is where nodes and verbs find it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from penstock.deployment.observe import Observation
from penstock.errors import PenstockError
from penstock.run_folder import Part, Run
from penstock.targets import Placement, Target

_MAX_PAUSE_S = 30.0
_UNSEEN_S = 10.0  # in which a job that was just sent may be absent from an answer that was on its way
_HUNG_S = 20.0
_SILENT_START_S = 180.0
_LEAD_S = 120.0
_HANDOVER_S = 60.0
_RETRY_S = 5.0


class Keeper:
    """Acts on one observation after another; what blocks runs in threads."""

    def __init__(self, run: Run, target: Target, drain_s: float) -> None:
        self._run, self._target, self._drain_s = run, target, drain_s
        self._starts: list[float] = []
        self._sent: str | None = None
        self._sender: threading.Thread | None = None
        self._ending: set[str] = set()
        self._life_s: dict[str, float] = {}
        self._silent_since: float | None = None
        self._next_since: float | None = None
        self._n_ready = 0

    def tend(self, seen: Observation) -> Part:
        """The next step. The gateway's part as it is then."""
        part, jobs, now = seen.gateway or Part("gone"), seen.gateway_jobs, time.monotonic()
        if jobs is None or (self._sender is not None and self._sender.is_alive()):
            return part
        jobs = {job: place for job, place in jobs.items() if job not in self._ending}
        alive = [job for job, place in jobs.items() if place.state in ("queued", "placed")]
        if self._sent is not None and self._sent not in jobs and now - self._starts[-1] < _UNSEEN_S:
            return part
        if not alive:
            return self._again(part, jobs, now)
        self._end_silent(seen, part, alive[-1], now)
        serving = part.job if part.state == "running" else None
        if serving == alive[-1]:
            self._hand_over(seen, alive[:-1], now)
            if self._is_leaving(serving, jobs[serving]) and self._may_start(now):
                self._run.add_event(
                    "gateway leaving", f"the machine of job {serving} is taken away soon: the next is sent"
                )
                self._start(now)
        elif part.job not in alive and part.state == "gone" and self._may_start(now):
            self._start(now)  # the next one took over and died; the one before it cannot take the address back
        return part

    def _again(self, part: Part, jobs: dict[str, Placement], now: float) -> Part:
        if not self._may_start(now):
            return part
        if part.job is not None:
            reason = (jobs[part.job].reason if part.job in jobs else None) or f"its job {part.job} is gone"
            self._run.add_event("gateway restarted", reason)
            part = msgspec.structs.replace(part.restarted(reason), job=None)
        self._start(now)
        return part

    def _may_start(self, now: float) -> bool:
        self._starts = [at for at in self._starts if now - at < 60]
        pause_s = min(_MAX_PAUSE_S, 2.0 ** (len(self._starts) - 1))
        return not self._starts or now - self._starts[-1] > pause_s

    def _start(self, now: float) -> None:
        self._starts.append(now)
        self._sender = self._aside("gateway not placed", self._send)

    def _send(self) -> None:
        self._sent = self._target.start_gateway(self._run)
        self._run.add_event("gateway placed", f"job {self._sent}")

    def _is_leaving(self, job: str, place: Placement) -> bool:
        if place.ends_at is None:
            return False
        left_s = place.ends_at - time.time()
        # At most half of its life: one whose limit is short must not be replaced for ever.
        lead_s = min(self._drain_s + (place.lead_s or _LEAD_S), self._life_s.setdefault(job, left_s) / 2)
        return left_s < lead_s

    def _hand_over(self, seen: Observation, older: list[str], now: float) -> None:
        """The older ones drain once the newest knows the replicas that they knew."""
        n_ready = sum(
            row.is_alive and row.announcement.state == "ready" for row in (seen.view.replicas if seen.view else ())
        )
        if not older:
            self._n_ready, self._next_since = n_ready, None
            return
        self._next_since = self._next_since or now
        if n_ready >= self._n_ready or now - self._next_since > _HANDOVER_S:
            self._run.add_event("gateway moved", f"job {', '.join(older)} drains")
            self._end(older, self._drain_s + 2.0)

    def _end_silent(self, seen: Observation, part: Part, newest: str, now: float) -> None:
        """One that runs and does not answer is ended; the next tick starts another."""
        if seen.view is not None or part.state not in ("running", "starting"):
            self._silent_since = None
            return
        self._silent_since = self._silent_since or now
        if now - self._silent_since > (_HUNG_S if part.state == "running" else _SILENT_START_S):
            self._run.add_event("gateway hung", f"job {part.job or newest} did not answer")
            self._silent_since = None
            self._end([part.job or newest], 0.0)

    def _end(self, jobs: list[str], grace_s: float) -> None:
        self._ending |= {*jobs}
        self._aside("gateway not ended", lambda: self._end_now(jobs, grace_s))

    def _end_now(self, jobs: list[str], grace_s: float) -> None:
        try:
            self._target.end_gateway(self._run, jobs, grace_s)
        except PenstockError:
            time.sleep(_RETRY_S)
            self._ending.difference_update(jobs)  # so that the next tick tries again
            raise

    def _aside(self, failure: str, act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                act()
            except PenstockError as exc:
                self._run.add_event(failure, exc.message)

        thread = threading.Thread(target=run, name="gateway", daemon=True)
        thread.start()
        return thread
