"""The verb `up`: writes the run folder, places its units, starts the controller, and waits until it is ready.

Whatever fails after the folder is written is taken down again.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from penstock import paths, processes, run_folder, targets
from penstock.deployment import gateway_config, live, observe
from penstock.deployment.events import asked_by
from penstock.deployment.prepare import UNSEEN, Fetching, Prepared, not_ended, prepare
from penstock.deployment.stop import OnStep, end_run
from penstock.errors import EngineError, PenstockError, UserError
from penstock.gateway.accounting import store
from penstock.gateway.accounting.key_store import KeyStore, hash_of, new_secret
from penstock.gateway.config import GatewayConfig
from penstock.gateway.connections.listener import open_socket
from penstock.paths import write_atomically
from penstock.run_folder import Draft, Run, State, Unit
from penstock.spec import reading
from penstock.spec.deployment import Deployment, GatewaySpec
from penstock.targets import Target

_POLL_S = 0.15
_RETRY_S = 0.005
_GATEWAY_STARTS = 3  # a gateway that died this often during `up` will not come
_ENDED = ("down", "failed")

OnState = Callable[[State], None]


class Started(msgspec.Struct, frozen=True):
    """What `up` did. `key`: the client's, shown this once. `url` is None while the gateway waits in a queue."""

    name: str
    url: str | None
    key: str | None = None
    was_running: bool = False


def up(
    deployment: Deployment, replace: bool = False, on_step: OnStep | None = None, fetching: Fetching = UNSEEN
) -> Started:
    """Start a deployment, or find it running. Returns when everything is submitted; see `wait_ready`. Idempotent.

    Raises UserError when it runs with other settings and `replace` is false. `on_step`: the end of a failed start.
    `fetching` hears how the model comes to this machine, where it is fetched here.
    """
    with run_folder.locked(deployment.name):
        silence = _look_elsewhere(deployment)
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
        with bind("127.0.0.1") as held:
            admin_port = held.getsockname()[1]
            prepared = prepare(deployment, admin_port, not_ended(deployment.name), refusals=refusals, fetching=fetching)
            if existing is None and silence is not None:
                raise silence  # one of that name may run there, which a start would end
            if existing is not None:
                existing.add_event("replace", "penstock up --replace", who=asked_by())
            old, target = Run(paths.home() / "runs" / deployment.name), targets.load(deployment.target)
            if "gateway" in target.placed(deployment):
                is_roll = rolls(deployment)
                if old.exists() and not is_roll:
                    end_run(old, now=False, on_step=None)
                return _start(prepared, (), on_step, is_roll)
            host = "127.0.0.1" if target.listen == "loopback" else "0.0.0.0"
            with bind(host, admin_port) as admin, _replace(old, deployment.gateway) as public:
                return _start(prepared, (public, admin), on_step)


def _look_elsewhere(deployment: Deployment) -> PenstockError | None:
    """Why it is not known whether one of that name runs that another machine started; None where it is."""
    try:
        targets.discover(deployment.name, deployment)
    except PenstockError as exc:  # a target that does not answer is reported by its own checks, with all else
        return exc
    return None


def rolls(deployment: Deployment) -> bool:
    """Whether one of that name runs that its target replaces without a pause: it serves until the new one does.

    One that another machine started gets its run folder here first.
    """
    _look_elsewhere(deployment)
    existing = not_ended(deployment.name)
    if existing is None or existing.record().target != deployment.target:
        return False
    return targets.load(deployment.target).rolls(existing, deployment)


def bind(host: str, port: int = 0) -> socket.socket:
    """The admin socket of a gateway that starts later: until it listens, others of ours may bind the port too."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.bind((host, port))
    return sock


def _replace(old: Run, spec: GatewaySpec) -> socket.socket:
    """Ends a run, and listens for its successor from the moment on in which its gateway does not: clients wait."""
    is_over = threading.Event()

    def listen() -> socket.socket:
        while not is_over.is_set():
            with contextlib.suppress(UserError):
                return open_socket((spec.host, spec.port))
            is_over.wait(_RETRY_S)
        return open_socket((spec.host, spec.port))

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        try:
            if old.exists():
                end_run(old, now=False, on_step=None)
        finally:
            is_over.set()
    return listening.result()


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


def _start(
    prepared: Prepared, sockets: Sequence[socket.socket], on_step: OnStep | None, is_roll: bool = False
) -> Started:
    """`sockets`: the public and the admin one, unless the target places the gateway."""
    deployment, key, target = prepared.deployment, None, targets.load(prepared.deployment.target)
    run = write_run(prepared, [sock.getsockname()[1] for sock in sockets])
    run.add_event(
        "up", f"penstock up {deployment.name}: {deployment.model} on target {deployment.target}", who=asked_by()
    )
    try:
        place = run.gateway_file().store
        if run.places("gateway") and not target.shares_files:
            key = _carried_key(run) if deployment.gateway.auth == "keys" else None
        elif place is not None:
            if deployment.gateway.auth == "keys":
                with contextlib.closing(store.connect(place)) as database:
                    key = KeyStore(database).renew("first", 0.0, time.time())
            if run.places("gateway"):
                store.share(place)
        place_units(run, target)
        if key is not None and run.places("gateway") and not target.shares_files and not run.first_key_file.exists():
            key = None  # it has the key of an earlier `up`
        if not run.places("controller"):
            start_controller(run, sockets)
    except BaseException:
        if is_roll:  # what served before still does
            raise
        with ctrl_c_ignored():
            if on_step is not None:
                on_step(f"ending {run.name} ...")
            end_run(run, now=True, on_step=None)
        raise
    return Started(run.name, live.shown(run).url, key)


def _carried_key(run: Run) -> str:
    """A new key, whose hash the target brings to the gateway."""
    key = new_secret()
    write_atomically(run.first_key_file, hash_of(key).encode(), mode=0o600)
    return key


def write_run(prepared: Prepared, ports: Sequence[int] = ()) -> Run:
    """The run folder of a deployment, whole; nothing is started. `ports`: those of `_start`'s sockets."""
    deployment, target = prepared.deployment, targets.load(prepared.deployment.target)
    config, token = _gateway_config(prepared, target, ports), secrets.token_urlsafe(24)
    draft = Draft(deployment, prepared.plan, prepared.artifact, config, token, target.placed(deployment))
    return run_folder.create(draft, time.time())


def place_units(run: Run, target: Target) -> None:
    """Place every unit of a new run.  Raises PenstockError when not all could be."""
    units = {Unit("replica", str(number)) for number in range(run.desired().replicas)}
    units |= {Unit(kind, "0") for kind in run.record().placed if kind != "replica"}
    run.write_handle(target.place(run, units))
    if run.handle().units.keys() != {unit.key for unit in units}:
        run.write_handle(target.place(run, units))  # raises what kept it from placing the others


def _gateway_config(prepared: Prepared, target: Target, ports: Sequence[int]) -> GatewayConfig:
    """Where the target places the gateway, it listens on any address of its machine."""
    deployment = prepared.deployment
    listen, admin = f"0.0.0.0:{deployment.gateway.port}", "0.0.0.0:0"
    if ports:
        listen = f"{deployment.gateway.host}:{ports[0]}"
        admin = f"{'127.0.0.1' if target.listen == 'loopback' else '0.0.0.0'}:{ports[1]}"
    run, addresses = Run(paths.home() / "runs" / deployment.name), gateway_config.Addresses(listen, admin)
    return gateway_config.make(run, deployment, prepared.plan, addresses)


def start_controller(run: Run, sockets: Sequence[socket.socket] = ()) -> None:
    """Start the controller of a run, detached. A second one leaves at once. `sockets` are for its gateway."""
    marks = processes.marks(str(run.path), run.record().id, "controller")
    files = [sock.fileno() for sock in sockets]
    argv = [sys.executable, "-m", "penstock.deployment.controller", str(run.path)]
    argv += ["--sockets", ",".join(map(str, files))] if files else []
    processes.start_detached(argv, marks, run.log("controller"), files=files)


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
        state = watch(
            run, lambda _: None, lambda state: _is_gateway_lost(state) or observe.admin_view(run) is not None, 30
        )
        if _is_gateway_lost(state):
            raise _start_error(run, state)


def _is_gateway_lost(state: State) -> bool:
    return state.phase == "down" or (state.gateway.n_restarts >= _GATEWAY_STARTS and state.requests_total == 0)


def wait_ready(run: Run, on_state: OnState, timeout_s: float | None = None, is_ours: bool = True) -> State:
    """Block until every replica is ready. Raises EngineError for a failed start, which is ended if `is_ours`."""

    refusal: PenstockError | None = None

    def is_over(state: State) -> bool:
        nonlocal refusal
        is_settled = state.phase in ("ready", *_ENDED) or any(row.state == "failed" for row in state.replicas)
        if is_settled or _is_gateway_lost(state):
            return True
        refusal = _refusal(run)
        return refusal is not None

    state = watch(run, on_state, is_over, timeout_s)
    if state.phase == "ready":
        return state
    error = refusal or _start_error(run, state)
    if is_ours and state.phase != "down":
        failure = msgspec.structs.replace(state, reason=state.reason or error.detail or error.message)
        # Another command that holds the lock is most likely ending it; the failure is reported in any case.
        with contextlib.suppress(UserError), run_folder.locked(run.name):
            end_run(run, now=True, on_step=None, failure=failure)
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
