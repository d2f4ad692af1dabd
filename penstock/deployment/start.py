"""The verbs: up, status, scale, down, clean. The only place that orders effects.

`prepare` collects everything that is wrong and changes nothing; `up` writes the run folder, then submits, then starts
the controller. Whatever fails after the folder is written is taken down again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from penstock import engines, paths, processes, run_folder, targets
from penstock.deployment import observe, planning, preflight
from penstock.deployment.preflight import Finding
from penstock.deployment.stop import OnStep, _end_run
from penstock.errors import EngineError, PenstockError, SpecError, UserError
from penstock.gateway.accounting import store
from penstock.hardware import Machine, network
from penstock.hardware.network import free_port
from penstock.models import facts, files
from penstock.node.group import addresses as formation
from penstock.planner import Plan, launch
from penstock.run_folder import Artifact, Draft, Launch, Listen, Run, State
from penstock.spec import reading
from penstock.spec.deployment import Deployment, GatewaySpec, store_file
from penstock.spec.gateway import GatewaySettings
from penstock.targets import Target
from penstock.text import show_bytes

_POLL_S = 0.15
_GATEWAY_STARTS = 3  # a gateway that died this often during `up` will not come
_ENDED = ("down", "failed")

OnState = Callable[[State], None]


class Prepared(msgspec.Struct, frozen=True):
    """A deployment that was found good: what `up` will write and send. `render` shows it and sends nothing.

    `machine` is the least of those that a replica may get.
    """

    deployment: Deployment
    machine: Machine
    plan: Plan
    artifact: Artifact


class Started(msgspec.Struct, frozen=True):
    """What `up` did. `key` is the client's key, shown this once; `was_running` says that nothing had to be started.

    `url` is None while the gateway waits in a queue.
    """

    name: str
    url: str | None
    key: str | None = None
    was_running: bool = False


def prepare(
    deployment: Deployment, admin_port: int = 0, existing: Run | None = None, is_rehearsal: bool = False
) -> Prepared:
    """Check, gather facts, plan and render. Changes nothing (but a hub model is downloaded to its cache).

    `existing` is a running deployment that this one would replace: its port and memory count as free. A rehearsal on a
    machine without GPUs takes those that the file names.
    Raises SpecError with all problems of the file, then UserError or PlanError.
    """
    target = targets.load(deployment.target)
    target = target.rehearsed() if is_rehearsal else target
    problems = [*preflight.unsupported(deployment), *target.check(deployment)]
    if not is_rehearsal and deployment.gateway.on == "login":
        problems += preflight.unreadable_files(deployment.gateway)
    if deployment.engine.kind != "auto":
        problems += engines.load(deployment.engine.kind).problems(deployment.engine.args)
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)
    if deployment.gateway.on == "login" and (existing is None or not _holds(existing, deployment)):
        network.check_port(deployment.gateway.host, deployment.gateway.port)
    machines = _machines(target, deployment, existing)
    found = preflight.least(machines)
    machine = preflight.as_named(deployment, found, is_rehearsal)
    made = make_plan(deployment, machine, sharing(target, deployment, len(machines), deployment.replicas.min))
    made = msgspec.structs.replace(made, warnings=(*made.warnings, *_unread_variables(deployment)))
    if machine.gpus and not found.gpus:
        warning = (
            f"{found.host} has no GPU: this is for {len(machine.gpus)} x {machine.gpus[0].name}, as the file requires"
        )
        made = msgspec.structs.replace(made, warnings=(*made.warnings, warning))
    run_path = paths.home() / "runs" / deployment.name
    told = Launch(
        deployment=deployment.name,
        plan=made,
        announce_urls=_announce_urls(target, admin_port),
        token_file=str(Run(run_path).admin_token_file),
        listen=target.listen,
        announce_file=str(Run(run_path).gateway_address_file) if deployment.gateway.on == "job" else None,
    )
    return Prepared(deployment, machine, made, target.render(told, sys.executable, deployment))


def _unread_variables(deployment: Deployment) -> list[str]:
    """Warnings about variables that the engine will have and nobody reads: the file's, and ours where it inherits."""
    inherited = dict(os.environ) if deployment.target == "local" else {}
    return formation.variable_warnings(inherited | deployment.engine.env)


def rehearse(deployment: Deployment) -> Prepared:
    """What `up` with these settings would send, beside or in place of what runs.  Raises as `prepare` does."""
    return prepare(deployment, existing=_not_ended(deployment.name), is_rehearsal=True)


def _announce_urls(target: Target, admin_port: int) -> tuple[str, ...]:
    """The gateway's admin address as nodes may reach it."""
    if target.listen == "loopback":
        return (f"http://127.0.0.1:{admin_port}",)
    addresses = [one.address for one in network.interfaces() if not one.is_virtual]
    beyond = [address for address in addresses if not address.startswith("127.")] or addresses
    return tuple(f"http://{address}:{admin_port}" for address in beyond)


def sharing(target: Target, deployment: Deployment, n_machines: int, n_replicas: int) -> int:
    """How many of the replicas share a machine, at most."""
    if "elastic" in target.features:
        return min(1, n_replicas)
    return -(-n_replicas * deployment.hardware.nodes // n_machines)


def make_plan(deployment: Deployment, machine: Machine, n_replicas: int) -> Plan:
    """The plan for this many new replicas that share a machine.  Raises UserError or PlanError."""
    path = files.locate(deployment)
    name = preflight.choose_engine(deployment.engine.kind, bool(machine.gpus), files.forms_of(path))
    engine = engines.load(name)
    missing = preflight.missing_engine(engine, machine)
    if missing is not None:
        raise UserError(f"cannot start engine {name}: {missing.reason}", hint=f"Install it: {missing.install}")
    problems = engine.problems(deployment.engine.args)
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)
    whole, model = facts.read_files(path, deployment.model, _form(engine.forms, path))
    if not engine.loads(model.form, deployment.engine.args):
        raise UserError(
            f'cannot serve model "{deployment.model}" on engine {name}: no *.{engine.forms[0]} in "{path}"',
            hint=f"Engine {name} loads {' or '.join(engine.forms)}.",
        )
    if launch.device_of(machine, name) == "cpu":
        return launch.make(deployment, model, machine, name, preflight.engine_version(engine, machine), n_replicas)
    version = preflight.engine_version(engine, machine)
    sized = planning.size(deployment, whole, machine, version, n_replicas)
    return launch.make_on_gpus(deployment, model, machine, version, n_replicas, sized)


def _form(loads: tuple[str, ...], path: Path) -> str:
    present = files.forms_of(path)
    return next((form for form in loads if form in present), loads[0])


def _machines(target: Target, deployment: Deployment, existing: Run | None) -> list[Machine]:
    """The target's machines; what `existing` holds of them counts as free."""
    machines = target.machines(deployment)
    if existing is None or "elastic" in target.features or existing.deployment().target != target.name:
        return machines
    n_nodes = target.spread(deployment, existing.handle())
    return [_freed(machine, existing, n) for machine, n in zip(machines, n_nodes, strict=True)]


def _freed(machine: Machine, existing: Run, n_nodes: int) -> Machine:
    """A machine without so many nodes of a run."""
    made = existing.plan()
    if made.device == "cuda":
        held = {index for entry in existing.handle().replicas.values() for index in entry.get("gpus", ())}
        if not held:  # a target that does not keep which they are: engines leave the least memory free
            fullest = sorted(machine.gpus, key=lambda gpu: gpu.memory_free_bytes)
            held = {gpu.index for gpu in fullest[: n_nodes * made.layout.n_ranks // made.n_nodes]}
        freed = [
            msgspec.structs.replace(gpu, memory_free_bytes=gpu.memory_bytes) if gpu.index in held else gpu
            for gpu in machine.gpus
        ]
        return msgspec.structs.replace(machine, gpus=tuple(freed))
    held_bytes = made.need.total_bytes * n_nodes // made.n_nodes
    free_bytes = min(machine.memory_bytes, machine.memory_free_bytes + held_bytes)
    return msgspec.structs.replace(machine, memory_free_bytes=free_bytes)


def _holds(existing: Run, deployment: Deployment) -> bool:
    wanted = f"{deployment.gateway.host}:{deployment.gateway.port}"
    return not existing.is_gateway_placed and existing.listen == wanted


def up(deployment: Deployment, replace: bool = False, on_step: OnStep | None = None) -> Started:
    """Start a deployment, or find that it runs already. Returns when everything is submitted; see `wait_ready`.

    Idempotent. Raises UserError when it runs with other settings and `replace` is false. `on_step` hears that a start
    which failed or was interrupted is being ended.
    """
    with run_folder.locked(deployment.name):
        existing = _running(deployment.name)
        if existing is not None:
            changes = reading.differences(existing.deployment(), deployment)
            if not changes:
                _revive(existing)
                return Started(existing.name, existing.known_url, was_running=True)
            if not replace:
                raise UserError(
                    f'deployment "{deployment.name}" runs with other settings',
                    detail="\n".join(changes),
                    hint="Add --replace to end it and start the new one, or give another --name.",
                )
        admin_port = free_port("127.0.0.1")
        prepared = prepare(deployment, admin_port, _not_ended(deployment.name))
        old = Run(paths.home() / "runs" / deployment.name)
        if old.exists():
            _end_run(old, now=False, on_step=None)
        return _start(prepared, admin_port, on_step)


def _not_ended(name: str) -> Run | None:
    """The run of that name that was not taken down whole: it holds its port and memory, also when it failed."""
    run = Run(paths.home() / "runs" / name)
    return run if run.exists() and not run.is_ended() else None


def _running(name: str) -> Run | None:
    run = _not_ended(name)
    return None if run is None or observe.now_state(run, time.time()).phase in (*_ENDED, "stopping") else run


def _revive(run: Run) -> None:
    """Start a controller for a run whose controller and warden are both gone."""
    roles = {process.role for process in processes.find_marked(str(run.path))}
    if not roles & {"controller", "warden"}:
        start_controller(run)


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile: who presses it twice does not leave half a deployment."""
    if threading.current_thread() is not threading.main_thread():  # there it never interrupts
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _start(prepared: Prepared, admin_port: int, on_step: OnStep | None) -> Started:
    deployment = prepared.deployment
    key = f"sk-{secrets.token_urlsafe(24)}" if deployment.gateway.auth == "keys" else None
    token = secrets.token_urlsafe(24)
    run_path = paths.home() / "runs" / deployment.name
    listens = targets.load(deployment.target).listen
    settings = {
        **_addresses(deployment, listens, admin_port),
        "admin_token_file": str(Run(run_path).admin_token_file),
        "models": [{"name": prepared.plan.served_names[0], "aliases": list(prepared.plan.served_names[1:])}],
        "auth": deployment.gateway.auth,
        "key_hashes": [hashlib.sha256(key.encode()).hexdigest()] if key else [],
        **_service_settings(deployment.gateway),
        "store": _store(deployment, Run(run_path)),
        "prices": _prices(prepared),
        "engines_need_key": listens == "network",
    }
    run = run_folder.create(Draft(deployment, prepared.plan, prepared.artifact, settings, token), time.time())
    run.add_event("up", f"penstock up {deployment.name}", model=deployment.model, target=deployment.target)
    try:
        if run.is_gateway_placed:
            store.share(_store(deployment, run))
        replicas = [str(number) for number in range(deployment.replicas.min)]
        run.write_handle(targets.load(deployment.target).submit(run, replicas))
        start_controller(run)
    except BaseException:
        with ctrl_c_ignored():
            if on_step is not None:
                on_step(f"ending {run.name} ...")
            _end_run(run, now=True, on_step=None)
        raise
    return Started(run.name, run.known_url, key)


def _addresses(deployment: Deployment, listens: Listen, admin_port: int) -> dict[str, str]:
    """Where the gateway listens. In a job that is any address of its node, which tells the ports that it got."""
    if deployment.gateway.on == "job":
        return {"listen": f"0.0.0.0:{deployment.gateway.port}", "admin": "0.0.0.0:0"}
    return {
        "listen": f"{deployment.gateway.host}:{deployment.gateway.port or free_port(deployment.gateway.host)}",
        "admin": f"{'127.0.0.1' if listens == 'loopback' else '0.0.0.0'}:{admin_port}",
    }


def _service_settings(gateway: GatewaySpec) -> dict[str, object]:
    """The settings that the file's block and the gateway share; files by their whole paths."""
    settings = {field: msgspec.to_builtins(getattr(gateway, field)) for field in GatewaySettings.__struct_fields__}
    for field in ("tls_cert", "tls_key"):
        settings[field] = _whole_path(getattr(gateway, field))
    for row in settings["upstreams"]:
        row["key_file"] = _whole_path(row["key_file"])
    return settings


def _whole_path(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def _store(deployment: Deployment, run: Run) -> str:
    place = deployment.gateway.store
    if place is None:
        return str(run.store_file)
    return str(store_file(place) or place)


def _prices(prepared: Prepared) -> dict[str, object]:
    price = prepared.deployment.gateway.price
    return {} if price is None else {prepared.plan.served_names[0]: msgspec.to_builtins(price)}


def start_controller(run: Run) -> None:
    """Start the controller of a run, detached. A second one leaves at once."""
    marks = processes.marks(str(run.path), run.record().id, "controller")
    argv = [sys.executable, "-m", "penstock.deployment.controller", str(run.path)]
    processes.start_detached(argv, marks, run.log("controller"))


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


def wait_ready(run: Run, on_state: OnState, timeout_s: float | None = None, is_ours: bool = True) -> State:
    """Block until every replica is ready. A start that failed is raised as EngineError, and taken down if `is_ours`."""

    def is_over(state: State) -> bool:
        gateway_failed = state.gateway.n_restarts >= _GATEWAY_STARTS and state.requests_total == 0
        return state.phase in ("ready", *_ENDED) or any(r.state == "failed" for r in state.replicas) or gateway_failed

    state = watch(run, on_state, is_over, timeout_s)
    if state.phase == "ready":
        return state
    error = _start_error(run, state)
    if is_ours and state.phase != "down":
        failure = msgspec.structs.replace(state, reason=state.reason or error.detail)
        # Who holds the lock is ending it, most likely; the reason of the failure must be told all the same.
        with contextlib.suppress(UserError), run_folder.locked(run.name):
            _end_run(run, now=True, on_step=None, failure=failure)
    raise error


def _start_error(run: Run, state: State) -> PenstockError:
    failed = next((replica for replica in state.replicas if replica.state == "failed"), None)
    if failed is None or failed.announcement is None:
        if state.phase == "down":
            return PenstockError(f'could not start deployment "{run.name}": it was stopped while it was starting')
        last = state.gateway.restarts[-1].reason if state.gateway.restarts else None
        return PenstockError(f'could not start deployment "{run.name}": its gateway is gone', detail=last)
    log = run.log(f"replica-{failed.replica}")
    return EngineError(
        f'could not start replica {failed.replica} of "{run.name}": {failed.reason}',
        detail="its last lines:\n" + "\n".join(f"  {line}" for line in failed.announcement.log_tail),
        hint=failed.announcement.hint or f"Full log: penstock logs {run.name} ({log})",
    )


def plan_now(deployment: Deployment) -> Plan:
    """The plan that `up` would make of the target's machines as they are; nothing else is checked.

    Raises UserError or PlanError.
    """
    target, existing = targets.load(deployment.target), _not_ended(deployment.name)
    machines = _machines(target, deployment, existing)
    machine = preflight.as_named(deployment, preflight.least(machines), is_rehearsal=False)
    return make_plan(deployment, machine, sharing(target, deployment, len(machines), deployment.replicas.min))


def holds_port(deployment: Deployment) -> bool:
    """Whether the port of a deployment is taken by its own gateway, which runs."""
    existing = _not_ended(deployment.name)
    return existing is not None and _holds(existing, deployment)


def check_deployment(deployment: Deployment) -> Finding:
    """`doctor`'s last line: whether `up` would accept this deployment now, and if not, why."""
    try:
        prepared = prepare(deployment, existing=_not_ended(deployment.name))
    except PenstockError as error:
        found = error.message + (f": {error.detail}" if error.detail else "")
        return Finding("deployment", "bad", found, error.hint)
    need = show_bytes(prepared.plan.need.total_bytes)
    return Finding("deployment", "ok", f"{deployment.name}: {prepared.plan.engine}, needs about {need} a replica")
