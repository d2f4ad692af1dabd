"""The verb `up`: writes the run folder, places its units, starts the controller, and waits until it is ready.

Whatever fails after the folder is written is taken down again.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock import paths, processes, run_folder, targets
from penstock.deployment import gateway_config, live, observe
from penstock.deployment.events import asked_by
from penstock.deployment.place import bind, launch, sockets, start_controller
from penstock.deployment.prepare import UNSEEN, Fetching, Prepared, not_ended, prepare
from penstock.deployment.replace import keep, try_engine, undo, undone
from penstock.deployment.stop import OnStep, end_run
from penstock.errors import EngineError, PenstockError, UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore, hash_of, new_secret
from penstock.gateway.config import GatewayConfig
from penstock.paths import write_atomically
from penstock.run_folder import Desired, Draft, Run, State, Unit
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.targets import Target

_POLL_S = 0.15
_ENDED = ("down", "failed")

OnState = Callable[[State], None]


class Started(msgspec.Struct, frozen=True):
    """What `up` did. `key`: the client's, shown this once. `url` is None while the gateway waits in a queue. `rolls`:
    what it replaces serves until it is ready."""

    name: str
    url: str | None
    key: str | None = None
    was_running: bool = False
    rolls: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether nothing that served before ends with it."""
        return not (self.was_running or self.rolls)


def up(
    deployment: Deployment, replace: bool = False, on_step: OnStep | None = None, fetching: Fetching = UNSEEN
) -> Started:
    """Start a deployment, or find it running. Returns when everything is submitted; see `wait_ready`. Idempotent.

    Raises UserError when it runs with other settings and `replace` is false. `on_step`: the end of a failed start.
    `fetching` hears how the model comes to this machine, where it is fetched here.
    """
    with run_folder.locked(deployment.name):
        silence: PenstockError | None = None
        try:
            targets.discover(deployment.name, deployment)
        except PenstockError as exc:  # a target that does not answer is reported by its own checks, with all else
            silence = exc
        existing, refusals = _running(deployment.name), list[PenstockError]()
        if existing is not None:
            changes = reading.differences(existing.deployment(), deployment)
            if not changes:
                targets.load(deployment.target).fetch(existing)  # raises where nobody knows whether it runs
                revive(existing)
                return Started(existing.name, live.shown(existing).url, was_running=True)
            if not replace:
                hint = "Add --replace to end it and start the new one, or give another --name."
                message = f'deployment "{deployment.name}" runs with other settings'
                refusals.append(UserError(message, detail="\n".join(changes), hint=hint))
        with bind("127.0.0.1") as port:
            admin_port = port.getsockname()[1]
            last = not_ended(deployment.name)
            prepared = prepare(deployment, admin_port, last, refusals=refusals, fetching=fetching)
            if existing is None and silence is not None:
                raise silence  # one of that name may run there, which a start would end
            run, target = Run(paths.home() / "runs" / deployment.name), targets.load(deployment.target)
            is_roll = last is not None and last.record().target == target.name and target.rolls(last, deployment)
            replaced = None if existing is None or is_roll else existing.desired()
            if existing is not None:
                try_engine(prepared, target)
                existing.add_event("replace", "penstock up --replace", who=asked_by())
            host = "127.0.0.1" if target.listen == "loopback" else "0.0.0.0"
            addresses = ((deployment.gateway.host, deployment.gateway.port), (host, admin_port))

            def end() -> None:
                if run.exists() and not is_roll:
                    end_run(run, now=False, on_step=None)

            with (
                undone(run, replaced, on_step, is_roll),
                sockets(end, None if "gateway" in target.placed(deployment) else addresses) as held,
            ):
                return _start(prepared, held, replaced, is_roll)


def _running(name: str) -> Run | None:
    run = not_ended(name)
    return None if run is None or observe.now_state(run, time.time()).phase in (*_ENDED, "stopping") else run


def revive(run: Run) -> None:
    """Start a controller for a run whose controller and watchdog are both gone."""
    if run.places("controller"):
        target = targets.load(run.record().target)
        placements = target.status(run)
        if not any(unit.kind == "controller" and place.state != "gone" for unit, place in placements.items()):
            alive = {unit for unit, place in placements.items() if unit.kind != "controller"}
            names = [int(unit.name) for unit in placements if unit.kind == "controller"]
            new = Unit("controller", str(max(names, default=-1) + 1))
            run.write_handle(target.place(run, {*alive, new}))
        return
    roles = {process.role for process in processes.find_marked(str(run.path))}
    if not roles & {"controller", "watchdog"}:
        start_controller(run)


def _start(prepared: Prepared, held: Sequence[socket.socket], replaced: Desired | None, is_roll: bool) -> Started:
    """`held`: the public and the admin socket, unless the target places the gateway."""
    deployment, key, target = prepared.deployment, None, targets.load(prepared.deployment.target)
    run = write_run(prepared, [sock.getsockname()[1] for sock in held], replaced)
    run.add_event(
        "up", f"penstock up {deployment.name}: {deployment.model} on target {deployment.target}", who=asked_by()
    )
    place = run.gateway_file().store
    if run.places("gateway") and not target.shares_files:
        key = _carried_key(run) if deployment.gateway.auth == "keys" else None
    elif place is not None:
        if deployment.gateway.auth == "keys":
            with contextlib.closing(store.connect(place)) as database:
                keys = KeyStore(database)
                has_first = any(key.name == "first" and key.revoked_at is None for key in keys.all())
                key = None if has_first and replaced else keys.renew("first", 0.0, time.time())  # clients go on with it
        if run.places("gateway"):
            store.share(place)
    launch(run, held)
    if key is not None and run.places("gateway") and not target.shares_files and not run.first_key_file.exists():
        key = None  # it has the key of an earlier `up`
    return Started(run.name, live.shown(run).url, key, rolls=is_roll)


def _carried_key(run: Run) -> str:
    """A new key, whose hash the target brings to the gateway."""
    key = new_secret()
    write_atomically(run.first_key_file, hash_of(key).encode(), mode=0o600)
    return key


def write_run(prepared: Prepared, ports: Sequence[int] = (), replaced: Desired | None = None) -> Run:
    """The run folder of a deployment, whole; nothing is started. `ports`: those of `_start`'s sockets."""
    deployment, target = prepared.deployment, targets.load(prepared.deployment.target)
    config, token = _gateway_config(prepared, target, ports), secrets.token_urlsafe(24)
    config = msgspec.structs.replace(config, holds_while_loading=replaced is not None)
    draft = Draft(deployment, prepared.plan, prepared.artifact, config, token, target.placed(deployment))
    return run_folder.create(draft, time.time(), None if replaced is None else partial(keep, replaced))


def _gateway_config(prepared: Prepared, target: Target, ports: Sequence[int]) -> GatewayConfig:
    """Where the target places the gateway, it listens on any address of its machine."""
    deployment = prepared.deployment
    listen, admin = f"0.0.0.0:{deployment.gateway.port}", "0.0.0.0:0"
    if ports:
        listen = f"{deployment.gateway.host}:{ports[0]}"
        admin = f"{'127.0.0.1' if target.listen == 'loopback' else '0.0.0.0'}:{ports[1]}"
    return gateway_config.make(Run(paths.home() / "runs" / deployment.name), deployment, prepared.plan, listen, admin)


def watch(run: Run, on_state: OnState, is_done: Callable[[State], bool], timeout_s: float | None = None) -> State:
    """Call `on_state` with every new state until one is done.  Raises PenstockError when the time is over."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    before: State | None = None
    while True:
        state = observe.now_state(run, time.time())
        if state != before:
            on_state(state)
            before = state
        if is_done(state):
            return state
        if deadline is not None and time.monotonic() > deadline:
            raise PenstockError(
                f'deployment "{run.name}" is {state.phase} after {timeout_s:.0f} s',
                detail=state.reason,
                hint=f"It continues in the background: penstock status {run.name}",
                is_retryable=True,
            )
        time.sleep(_POLL_S)


def wait_listening(run: Run) -> None:
    """Block until the gateway listens; not where it, or its controller, may wait in a queue for hours."""
    if not run.places("gateway") and not run.places("controller"):
        state = watch(run, lambda _: None, lambda state: _is_lost(state) or observe.admin_view(run) is not None, 30)
        if _is_lost(state):
            raise _start_error(run, state)


def _is_lost(state: State) -> bool:
    return state.phase in _ENDED or observe.has_failed(state)


def wait_ready(run: Run, on_state: OnState, timeout_s: float | None = None, is_ours: bool = True) -> State:
    """Block until every replica is ready. Raises EngineError for a failed start, which is ended if `is_ours`."""
    own = run.launch
    refusal: PenstockError | None = None

    def is_over(state: State) -> bool:
        nonlocal refusal
        if state.phase == "ready" or _is_lost(state) or run.launch not in (own, None):
            return True
        refusal = _refusal(run)
        return refusal is not None

    state = watch(run, on_state, is_over, timeout_s)
    if run.launch != own:  # its controller gave it up
        state = Run(run.failed_folder).state() or state
    elif state.phase == "ready":
        shutil.rmtree(run.previous_folder, ignore_errors=True)
        return state
    error = refusal or _start_error(run, state)
    if is_ours and state.phase != "down":
        failure = msgspec.structs.replace(state, reason=state.reason or error.detail or error.message)
        outcome = undo(run, None, failure, own)
        if outcome is not None:
            error.detail = "\n".join(filter(None, (error.detail, outcome)))
            error.hint = f"The logs of the start that failed: {run.failed_folder / 'logs'}"
    raise error


def _refusal(run: Run) -> PenstockError | None:
    """Why a unit can never start, where a target says so of units that have not started: no controller would know."""
    if not run.places("controller"):
        return None
    for unit, place in targets.load(run.handle().target).status(run).items():
        if unit.kind != "ui" and place.state in ("queued", "broken") and place.is_final:  # nothing waits for the page
            name = f"replica {unit.name}" if unit.kind == "replica" else f"the {unit.kind}"
            message = f'could not start {name} of "{run.name}": {place.reason}'
            return PenstockError(message, hint="Correct that, and run `penstock up` again.")
    return None


def _start_error(run: Run, state: State) -> PenstockError:
    failed = next((replica for replica in state.replicas if replica.state == "failed"), None)
    if failed is None or failed.announcement is None:
        if state.phase == "down":
            why = state.reason or "it was stopped while it was starting"
            return PenstockError(f'could not start deployment "{run.name}": {why}')
        if state.phase == "failed" and state.reason is not None:
            return PenstockError(f'could not start deployment "{run.name}": {state.reason}')
        last = state.gateway.restarts[-1].reason if state.gateway.restarts else None
        return PenstockError(f'could not start deployment "{run.name}": its gateway is gone', detail=last)
    log = run.log(f"replica-{failed.replica}")
    return EngineError(
        f'could not start replica {failed.replica} of "{run.name}": {failed.reason}',
        detail="its last lines:\n" + "\n".join(f"  {line}" for line in failed.announcement.log_tail),
        hint=failed.announcement.hint or f"Full log: penstock logs {run.name} ({log})",
    )
