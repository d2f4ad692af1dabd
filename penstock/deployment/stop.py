"""The verb `down`."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from penstock import processes, run_folder, targets
from penstock.deployment.events import asked_by
from penstock.errors import PenstockError, UserError
from penstock.node import gpu_memory
from penstock.paths import remove_temporary
from penstock.processes import Marked
from penstock.run_folder import Desired, Run, State
from penstock.spec import deployment
from penstock.targets import LeftBehind
from penstock.text import show_seconds

_CONTROLLER_GRACE_S = 3.0
_NOW_GRACE_S = 1.0
_CHILDREN = ("prometheus", "ui")  # of the controller
_CHILDREN_GRACE_S = 5.0  # Prometheus writes what it has in memory

OnStep = Callable[[str], None]
T = TypeVar("T")


def down(
    run: Run, now: bool = False, on_step: OnStep | None = None, forget: bool = False, with_weights: bool = False
) -> list[Marked]:
    """End everything of a run: requests in flight finish first, unless `now`. Blocks; safe to repeat.

    Needs nothing alive: a crash leaves a folder from which this still works. `forget`: give up what cannot be reached,
    on machines that are gone for good. `with_weights`: also what the target keeps for the next start; raises UserError
    where it keeps none. Returns what had to be ended by force.
    """
    target = targets.load(run.handle().target)
    if with_weights and "keeps-weights" not in target.capabilities:
        message = f'cannot remove the weights of "{run.name}": target {target.name} keeps none for a deployment'
        raise UserError(message, hint=f"Without them: penstock down {run.name}")
    with run_folder.locked(run.name):
        run.add_event("stopping", f"penstock down {run.name}{' --now' if now else ''}", who=asked_by())
        swept = end_run(run, now, on_step, forget=forget)
        if with_weights:
            target.end_weights(run)
        return swept


def end_run(
    run: Run, now: bool, on_step: OnStep | None, failure: State | None = None, forget: bool = False
) -> list[Marked]:
    """As `down`, for a caller that holds the lock. `failure`: the state that stays, of a start that failed."""
    say, began = on_step or (lambda _: None), time.monotonic()
    last, before, was_ended = failure or run.state(), run.desired(), run.is_ended()
    unwritten = _why_unwritten(run.write_desired, Desired("down", 0))
    say("ending the controller")
    marked = processes.find_marked(str(run.path))
    processes.end([process for process in marked if process.role in ("watchdog", "controller")], _CONTROLLER_GRACE_S)
    gateways = [p for p in processes.find_marked(str(run.path)) if p.role == "gateway"]
    gateway_s, engine_s = _drains_s(run)
    if gateways:
        say("ending the gateway" if now else f"draining the gateway (at most {gateway_s:.0f} s)")
        processes.end(gateways, _NOW_GRACE_S if now else gateway_s + 2.0)
    say("ending the replicas")
    grace_s = engine_s + 10.0  # a gateway has drained then, so this is for the engines' own tidy end
    if run.places("gateway"):
        grace_s = max(grace_s, gateway_s + 2.0)
    try:
        targets.load(run.handle().target).end(run, _NOW_GRACE_S if now else grace_s)
    except PenstockError as exc:
        if not forget and not isinstance(exc, LeftBehind):
            if run.places("controller"):  # it was not told: the deployment goes on
                _why_unwritten(run.write_desired, before)
            raise
        say(f"{exc.message}. {'It is forgotten.' if forget else exc.hint}")  # the rest still ends
        run.add_event("forgotten" if forget else "left behind", exc.message)
    if forget:
        run_folder.forget_every_left(run)
    children = [process for process in processes.find_marked(str(run.path)) if process.role in _CHILDREN]
    processes.end(children, _NOW_GRACE_S if now else _CHILDREN_GRACE_S)
    swept = processes.sweep(str(run.path))
    held = gpu_memory.wait_released({process.pid for process in marked if process.role == "engine"})
    if held is not None:
        say(f"GPU memory is still held after the end: {held}")
    # What an engine mapped when it was last seen: its own helpers may have been killed with it.
    announcements = [replica.announcement for replica in (last.replicas if last else ()) if replica.announcement]
    processes.unlink_shared_memory(segment for announcement in announcements for segment in announcement.shared_memory)
    with contextlib.suppress(PenstockError):  # without its id, its temporary folders are for `clean` to find
        remove_temporary(run.record().id)
    unwritten = _why_unwritten(run.write_state, _end_state(last, failure)) or unwritten
    if unwritten is not None:
        hint = f"Free some space, then: penstock down {run.name}"
        raise PenstockError(f'ended "{run.name}", but could not write that down: {unwritten}', hint=hint)
    took = f"everything ended after {show_seconds(time.monotonic() - began)}"
    if failure:
        run.add_event("failed", failure.reason or "")
    elif not was_ended:  # an `up` ends the last launch in any case
        run.add_event("down", took)
    return swept


def _drains_s(run: Run) -> tuple[float, float]:
    """Of its gateway and of its engines; a damaged folder ends too."""
    gateway_s, engine_s = deployment.GatewaySpec().drain_s, deployment.EngineSpec().drain_s
    with contextlib.suppress(PenstockError):
        gateway_s = run.deployment().gateway.drain_s
    with contextlib.suppress(PenstockError):
        engine_s = run.plan().drain_s
    return gateway_s, engine_s


def _end_state(last: State | None, failure: State | None) -> State:
    state = State(time.time(), "failed" if failure else "down", 0)
    if failure is not None and last is not None:
        state = msgspec.structs.replace(state, replicas=last.replicas, reason=failure.reason)
    return state


def _why_unwritten(write: Callable[[T], None], value: T) -> str | None:
    """None when it was written: a full disk must not keep `down` from ending what runs."""
    try:
        write(value)
    except OSError as exc:
        return exc.strerror or str(exc)
    return None


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ctrl-C does nothing in this block: pressed twice, it must not leave half a deployment."""
    if threading.current_thread() is not threading.main_thread():  # there it never interrupts
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
