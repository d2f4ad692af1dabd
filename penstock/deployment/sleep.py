"""The verbs `sleep` and `wake`: all replicas of a deployment free their GPUs' memory, or take it again."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
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
_AWAKE = ("ready", "draining", "failed", "gone")


def order(run: Run, word: Literal["sleep", "wake"]) -> dict[str, str]:
    """Ask every replica to sleep when no request runs on it, or to wake; the states of those that can, by name.

    Raises UserError where none can sleep.
    """
    with run_folder.locked(run.name):
        desired, plan = run.desired(), run.plan()
        if desired.state == "down":
            raise UserError(f'cannot {word} deployment "{run.name}": it is down', hint=f"penstock up {run.name}")
        if plan.sleep is None:
            raise UserError(
                f'cannot {word} deployment "{run.name}": it was started without engine.sleep',
                hint="Write `sleep: {level: auto}` into the block engine of its file, and `penstock up --replace`.",
            )
        rows = observe.now_state(run, time.time()).replicas
        asked = {row.replica: row.state for row in rows if row.state in SERVING}
        if not asked:
            raise UserError(
                f'cannot {word} deployment "{run.name}": no replica is ready', hint=f"penstock status {run.name}"
            )
        new = msgspec.structs.replace(desired, order=Order(word, time.time()))
        targets.load(run.record().target).order(run, new)
        run.add_event(word, "every replica", who=asked_by())
        revive(run)
        return asked


def wait(
    run: Run,
    word: Literal["sleep", "wake"],
    asked: Mapping[str, str],
    on_state: OnState,
    timeout_s: float | None = None,
) -> State:
    """Block until each replica that `order` asked sleeps, or is awake.

    Raises PenstockError for one that does not sleep: it cannot, its engine was lost, or a request woke it.
    """
    were_asleep = {name for name, state in asked.items() if state in _IN_BETWEEN}

    def is_done(state: State) -> bool:
        rows = [row for row in state.replicas if row.replica in asked]
        if word == "wake":
            return all(row.state in _AWAKE for row in rows)
        were_asleep.update(row.replica for row in rows if is_asleep(row))
        return all(is_asleep(row) or _why_awake(row, were_asleep) is not None for row in rows)

    state = watch(run, on_state, is_done, timeout_s)
    rows = [row for row in state.replicas if row.replica in asked]
    awake = {row.replica: why for row in rows if (why := _why_awake(row, were_asleep)) is not None}
    if word == "sleep" and awake:
        name, why = next(iter(awake.items()))
        raise PenstockError(f'replica {name} of "{run.name}" {why}', is_retryable=True)
    return state


def is_asleep(row: ReplicaStatus) -> bool:
    progress = row.announcement.progress if row.announcement is not None else None
    return row.state == "sleeping" and progress is not None and progress.stage.startswith(ASLEEP)


def _why_awake(row: ReplicaStatus, were_asleep: Collection[str]) -> str | None:
    """Why a replica that was asked to sleep will not; None while it may."""
    if row.state not in SERVING:
        return f"is {row.state}" + (f": {row.reason}" if row.reason else "")
    if row.state == "ready" and row.reason is not None and row.reason.startswith(SLEEPLESS):
        return row.reason
    return "was woken by a request" if row.state == "ready" and row.replica in were_asleep else None
