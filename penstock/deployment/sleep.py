"""The verbs `sleep` and `wake`: all replicas of a deployment free their GPUs' memory, or take it again."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from penstock import run_folder, targets
from penstock.deployment import observe
from penstock.deployment.events import asked_by
from penstock.deployment.start import OnState, revive, watch
from penstock.errors import PenstockError, UserError
from penstock.run_folder import Order, ReplicaStatus, Run, State
from penstock.wire.announcement import ASLEEP, SERVING, SLEEPLESS

_IN_BETWEEN = ("sleeping", "waking")


def order(run: Run, word: Literal["sleep", "wake"]) -> None:
    """Ask every replica to sleep when no request runs on it, or to wake.  Raises UserError where none can sleep."""
    with run_folder.locked(run.name):
        desired, plan = run.desired(), run.plan()
        if desired.state == "down":
            raise UserError(f'cannot {word} deployment "{run.name}": it is down', hint=f"penstock up {run.name}")
        if plan.sleep is None:
            raise UserError(
                f'cannot {word} deployment "{run.name}": it was started without engine.sleep',
                hint="Write `sleep: {level: auto}` into the block engine of its file, and `penstock up --replace`.",
            )
        serving = [row.replica for row in observe.now_state(run, time.time()).replicas if row.state in SERVING]
        if not serving:
            raise UserError(
                f'cannot {word} deployment "{run.name}": no replica is ready', hint=f"penstock status {run.name}"
            )
        new = msgspec.structs.replace(desired, order=Order(word, time.time()))
        targets.load(run.record().target).order(run, new)
        run.add_event(word, f"{word}: every replica", who=asked_by())
        revive(run)


def wait(run: Run, word: Literal["sleep", "wake"], on_state: OnState, timeout_s: float | None = None) -> State:
    """Block until every replica that was ready sleeps, or is awake.

    Raises PenstockError for one that does not sleep, and for one that a request woke before all slept.
    """
    were_asleep: set[str] = set()

    def is_done(state: State) -> bool:
        rows = [row for row in state.replicas if row.state in SERVING]
        if word == "wake":
            return all(row.state not in _IN_BETWEEN for row in rows)
        were_asleep.update(row.replica for row in rows if is_asleep(row))
        return all(is_asleep(row) or _why_awake(row, were_asleep) is not None for row in rows)

    state = watch(run, on_state, is_done, timeout_s)
    awake = {row.replica: why for row in state.replicas if (why := _why_awake(row, were_asleep)) is not None}
    if word == "sleep" and awake:
        name, why = next(iter(awake.items()))
        raise PenstockError(f'replica {name} of "{run.name}" {why}', is_retryable=True)
    return state


def is_asleep(row: ReplicaStatus) -> bool:
    progress = row.announcement.progress if row.announcement is not None else None
    return row.state == "sleeping" and progress is not None and progress.stage.startswith(ASLEEP)


def _why_awake(row: ReplicaStatus, were_asleep: set[str]) -> str | None:
    if row.state == "ready" and row.reason is not None and row.reason.startswith(SLEEPLESS):
        return row.reason
    return "was woken by a request" if row.state == "ready" and row.replica in were_asleep else None
