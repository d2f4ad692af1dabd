"""What `up` would write and send: checks, facts, plan and artifact. Changes nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock import engines, paths, targets
from penstock.deployment import planning, preflight, ui
from penstock.deployment.doctor.model import check_model
from penstock.engines.vllm import images
from penstock.errors import Finding, PenstockError, PlanError, Problem, SpecError, UserError, together
from penstock.hardware import Machine, network
from penstock.models import facts, fetch, files, sources
from penstock.node.checks.machine import find_weights
from penstock.node.group import addresses as formation
from penstock.planner import Plan, launch
from penstock.run_folder import Artifact, Launch, Run
from penstock.spec.deployment import Deployment
from penstock.targets import Target
from penstock.text import show_bytes

_SURVEY_S = 60.0


class Fetching(NamedTuple):
    """Who hears of a fetch: its progress twice a second, and lines about waiting."""

    show: Callable[[fetch.Progress], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None


UNSEEN = Fetching()


class Prepared(msgspec.Struct, frozen=True):
    """What `up` will write and send, and `render` shows. `machine` is the least of those that a replica may get."""

    deployment: Deployment
    machine: Machine
    plan: Plan
    artifact: Artifact


def prepare(
    deployment: Deployment,
    admin_port: int = 0,
    existing: Run | None = None,
    is_rehearsal: bool = False,
    refusals: Sequence[PenstockError] = (),
    fetching: Fetching = UNSEEN,
) -> Prepared:
    """Check, gather facts, plan and render. Changes nothing; the model is fetched to this machine where that is the
    one that loads it, but not in a rehearsal, which takes the GPUs of the file on a machine without.

    `existing` is a running deployment that this one would replace: its port and memory count as free. `fetching` hears
    of the fetch. Raises all problems of file, target, machines, disk, port and model, after the caller's `refusals`.
    """
    errors, is_gateway_here, is_controller_here = [*refusals], True, False
    with _kept(errors):
        target = targets.load(deployment.target)
        placed = target.placed(deployment)
        is_gateway_here, is_controller_here = "gateway" not in placed, "controller" not in placed
        with _kept(errors):
            _check_file(deployment, target, is_rehearsal)
            machines = _machines(target, deployment, existing, is_rehearsal)
            least = preflight.least(machines)
            machine = preflight.as_named(deployment, least, is_rehearsal)
            gpu_hour_usd = preflight.gpu_price(deployment.hardware, machine)
    with _kept(errors):
        if is_gateway_here and not holds_port(deployment, existing):
            network.check_port(deployment.gateway.host, deployment.gateway.port)
    with _kept(errors):
        before, observe = None if existing is None else existing.deployment().observe, deployment.observe
        is_held = before is not None and before.prometheus and before.port == observe.port
        if is_controller_here and observe.prometheus and not is_held:
            network.check_port("127.0.0.1", observe.port, "observe.port")
    with _kept(errors):
        if not is_rehearsal:
            preflight.check_space(paths.home() / "runs")
    if errors:  # the model is looked at, and not downloaded
        bad = [finding for finding in check_model(deployment).findings if finding.state == "bad"]
        errors += [UserError(finding.found, hint=finding.cure) for finding in bad]
        raise together(f'deployment "{deployment.name}"', errors)
    plan = _plan_of_most(target, deployment, machine, len(machines), is_rehearsal, fetching)
    inherited = os.environ if target.is_this_machine else {}
    children = (preflight.prometheus_warning(observe), ui.warning(deployment, existing)) if is_controller_here else ()
    warnings = (
        *plan.warnings,
        *target.warnings(deployment, plan),
        *(engines.load(plan.engine).warnings(plan) if target.is_this_machine else ()),
        *formation.variable_warnings({**inherited, **deployment.engine.variables}),
        *filter(None, children),
        *_assumed(deployment, plan, least, machine, len(machines)),
    )
    plan = msgspec.structs.replace(plan, warnings=warnings, gpu_hour_usd=gpu_hour_usd)
    run_path = paths.home() / "runs" / deployment.name
    instructions = Launch(
        deployment=deployment.name,
        plan=plan,
        announce_urls=_announce_urls(target, admin_port),
        token_file=str(Run(run_path).admin_token_file),
        listen=target.listen,
        announce_file=None if is_gateway_here else str(Run(run_path).gateway_address_file),
        cache=deployment.cache,
        is_spread=not target.is_this_machine,
    )
    return Prepared(deployment, machine, plan, target.render(instructions, sys.executable, deployment))


def _assumed(deployment: Deployment, plan: Plan, least: Machine, machine: Machine, n_machines: int) -> Iterator[str]:
    """What is taken for granted of the machines, or left out: `least` is theirs, `machine` as the plan has it."""
    yield from (f"not used: {text}" for text in least.unread if machine.gpus)
    if machine.assumed is not None:
        those = f"{n_machines} machine{'s' if n_machines > 1 else ''} as the file describes them"
        those += f", of {machine.n_cpus} CPUs" if plan.device == "cpu" else ""
        unknown = ": their memory is not known, and nothing is fitted to it" if machine.memory_bytes is None else ""
        yield f"not asked: {machine.assumed}; this is for {those}{unknown}"
    elif machine.gpus and not least.gpus:
        yield f"{least.host} has no GPU: this is for {len(machine.gpus)} x {machine.gpus[0].name}, as the file requires"
    if (image := images.image_of(deployment)) and plan.engine == "vllm" and not images.named_version(deployment):
        yield f'image "{image}" names no version of vLLM: {plan.engine_version} is assumed (engine.version)'


@contextlib.contextmanager
def _kept(errors: list[PenstockError]) -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        errors.append(error)


def _check_file(deployment: Deployment, target: Target, is_rehearsal: bool) -> None:
    problems = [*preflight.unsupported(deployment, target), *target.check(deployment, is_rehearsal)]
    if not is_rehearsal and "gateway" not in target.placed(deployment):
        problems += preflight.gateway_problems(deployment.gateway)
    if not is_rehearsal and "controller" not in target.placed(deployment):
        problems += preflight.prometheus_problems(deployment.observe)
    if deployment.engine.kind != "auto":
        engine, version = engines.load(deployment.engine.kind), images.named_version(deployment)
        problems += engine.problems(deployment.engine.flags, version)
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)


def rehearse(deployment: Deployment) -> Prepared:
    """What `up` with these settings would send, next to or in place of what runs.  Raises as `prepare` does."""
    return prepare(deployment, existing=not_ended(deployment.name), is_rehearsal=True)


def _announce_urls(target: Target, admin_port: int) -> tuple[str, ...]:
    if target.listen == "loopback":
        return (f"http://127.0.0.1:{admin_port}",)
    return tuple(f"http://{address}:{admin_port}" for address in network.own_addresses(()))


def sharing(target: Target, deployment: Deployment, n_machines: int, n_replicas: int) -> int:
    if target.is_elastic:
        return min(1, n_replicas)
    return -(-n_replicas * deployment.hardware.nodes // n_machines)


def _plan_of_most(
    target: Target,
    deployment: Deployment,
    machine: Machine,
    n_machines: int,
    is_rehearsal: bool = False,
    fetching: Fetching = UNSEEN,
) -> Plan:
    """The plan with which as many replicas fit as there may be, at least those that `up` starts; a warning says where
    fewer than `replicas.max` do.  Raises UserError or PlanError."""
    first, most = deployment.replicas.first, deployment.replicas.max
    has_room = n_machines * (len(machine.gpus) or machine.n_cpus) // deployment.hardware.nodes
    for n_replicas in range(first if target.is_elastic else max(first, min(most, has_room)), first - 1, -1):
        try:
            n_here = sharing(target, deployment, n_machines, n_replicas)
            plan = make_plan(deployment, machine, n_here, is_rehearsal, fetching)
        except PlanError:
            if n_replicas == first:
                raise
            continue
        if target.is_elastic or n_replicas == most:
            return plan
        warning = f"replicas.max is {most}, and {n_replicas} fit here"
        return msgspec.structs.replace(plan, warnings=(*plan.warnings, warning))
    raise AssertionError("the first is tried always")


def make_plan(
    deployment: Deployment,
    machine: Machine,
    n_replicas: int,
    is_rehearsal: bool = False,
    fetching: Fetching = UNSEEN,
) -> Plan:
    """The plan for this many new replicas that share a machine.  Raises UserError or PlanError."""
    if deployment.engine.executor == "auto":
        engine_spec = msgspec.structs.replace(deployment.engine, executor=targets.load(deployment.target).executor)
        deployment = msgspec.structs.replace(deployment, engine=engine_spec)
    there = _model_elsewhere(deployment, is_rehearsal)
    path = Path(deployment.model) if there is not None else fetch.locate(deployment, fetching.show, fetching.say)
    present = tuple(there) if there is not None else files.forms_of(path)
    name = preflight.choose_engine(deployment.engine.kind, bool(machine.gpus), present)
    engine = engines.load(name)
    missing = preflight.missing_engine(engine, machine)
    if missing is not None:
        raise UserError(f"cannot start engine {name}: {missing.reason}", hint=f"Install it: {missing.install}")
    version = machine.versions.get(engine.package or "") or engine.version()
    problems = engine.problems(deployment.engine.flags, version)
    if deployment.engine.version not in (None, version, version.partition("+")[0]):
        message = f'"{deployment.engine.version}", but {machine.host} has {version}'
        problems.append(Problem("engine.version", message, "remove it"))
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)
    form = next((form for form in engine.forms if form in present), engine.forms[0])
    if there is None:
        whole, model = facts.read_files(path, deployment.model, form)
    else:
        whole, model = there.get(form) or next(iter(there.values()))
    is_pickled = deployment.cache.allow_pickle and model.form == "none" and model.n_shards
    if not is_pickled and not engine.loads(model.form, deployment.engine.flags):
        raise UserError(
            f'cannot serve model "{deployment.model}" on engine {name}: no *.{engine.forms[0]} in "{path}"',
            hint=f"Engine {name} loads {' or '.join(engine.forms)}.",
        )
    if name != "vllm" or not machine.gpus:
        plan = launch.make(deployment, model, machine, name, version, n_replicas)
    else:
        sized = planning.size(deployment, whole, machine, version, n_replicas)
        plan = launch.make_on_gpus(deployment, model, machine, version, n_replicas, sized)
    preflight.refuse_sleepless(engine, plan)
    return plan


def _model_elsewhere(deployment: Deployment, is_rehearsal: bool) -> facts.FactsByForm | None:
    """The facts of a model that this machine need not have; None for any other.

    A folder is read by the first node that has it. Of a hub model that is not here, the headers are read where the
    nodes download it, and in a rehearsal; what the catalogue says of it is enough where the target finds its commit.
    """
    target = targets.load(deployment.target)
    cache = deployment.cache.folder
    is_read = (target.has_own_caches or is_rehearsal) and deployment.engine.kind != "llamacpp"
    if is_read and sources.is_remote(deployment.model):
        folder, allows_pickle = Path(cache).expanduser() if cache else None, deployment.cache.allow_pickle
        if target.fetches_models:  # the plan is the same on every machine
            return facts.read_remote(deployment.model, folder, True, from_catalog=True, allow_pickle=allows_pickle)
        if not find_weights(deployment.model, cache, is_read=False).absent:
            return None
        return facts.read_remote(deployment.model, folder, is_rehearsal, allow_pickle=allows_pickle)
    is_here = not deployment.model.startswith(("/", "~")) or Path(deployment.model).expanduser().exists()
    if is_here or target.shares_files or "survey" not in target.capabilities:
        return None
    answers = target.survey(deployment, ["-m", "penstock.models.facts", deployment.model], _SURVEY_S)
    for answer in answers:
        if answer.exit_code == 0:
            return msgspec.json.decode(answer.out.strip().splitlines()[-1], type=facts.FactsByForm)
    lines = [f"{answer.host}: {(answer.err.strip().splitlines() or ['no answer'])[-1]}" for answer in answers]
    raise UserError(
        f'cannot use model "{deployment.model}": neither this machine nor its nodes have it',
        detail="\n".join(lines),
        hint="Check the path, or give a hub id such as Qwen/Qwen3-0.6B.",
    )


def _machines(
    target: Target, deployment: Deployment, existing: Run | None, is_rehearsal: bool = False
) -> list[Machine]:
    """The target's machines; what `existing` holds of them counts as free."""
    machines, hardware = target.machines(deployment, is_rehearsal), deployment.hardware
    seen = [machine for machine in machines if machine.gpus or not (is_rehearsal and hardware.gpu)]
    if absent := [problem for each in seen for problem in planning.absent_gpus(hardware, each.host, each.gpus)]:
        raise SpecError(f'deployment "{deployment.name}"', absent)
    if existing is None or target.is_elastic or existing.deployment().target != target.name:
        return machines
    n_nodes = target.nodes_per_machine(deployment, existing.handle())
    return [_freed(machine, existing, n) for machine, n in zip(machines, n_nodes, strict=True)]


def _freed(machine: Machine, existing: Run, n_nodes: int) -> Machine:
    plan = existing.plan()
    if plan.device == "cuda":
        held = {index for entry in existing.handle().replicas.values() for index in entry.get("gpus", ())}
        if not held:  # a target that does not keep which they are: engines leave the least memory free
            ids = existing.deployment().hardware.gpu_ids or [gpu.index for gpu in machine.gpus]
            fullest = sorted((gpu for gpu in machine.gpus if gpu.index in ids), key=lambda gpu: gpu.memory_free_bytes)
            held = {gpu.index for gpu in fullest[: n_nodes * plan.layout.n_ranks // plan.n_nodes]}
        freed = [
            msgspec.structs.replace(gpu, memory_free_bytes=gpu.memory_bytes) if gpu.index in held else gpu
            for gpu in machine.gpus
        ]
        return msgspec.structs.replace(machine, gpus=tuple(freed))
    held_bytes = plan.need.total_bytes * n_nodes // plan.n_nodes
    free_bytes = min(machine.memory_bytes or 0, (machine.memory_free_bytes or 0) + held_bytes)
    return msgspec.structs.replace(machine, memory_free_bytes=free_bytes)


def not_ended(name: str) -> Run | None:
    """The run of that name that was not ended whole: it holds its port and memory, also when it failed."""
    run = Run(paths.home() / "runs" / name)
    return run if run.exists() and not run.is_ended() else None


def plan_now(deployment: Deployment) -> Plan:
    """The plan that `up` would make of the target's machines now.  Raises UserError or PlanError."""
    target, existing = targets.load(deployment.target), not_ended(deployment.name)
    machines = _machines(target, deployment, existing)
    machine = preflight.as_named(deployment, preflight.least(machines), is_rehearsal=False)
    return _plan_of_most(target, deployment, machine, len(machines))


def holds_port(deployment: Deployment, existing: Run | None) -> bool:
    """Return whether a run that this one would replace has its port."""
    wanted = f"{deployment.gateway.host}:{deployment.gateway.port}"
    return existing is not None and not existing.places("gateway") and existing.listen == wanted


def check_deployment(deployment: Deployment) -> Finding:
    """`doctor`'s last line: whether `up` would accept this deployment now, and if not, why."""
    try:
        prepared = prepare(deployment, existing=not_ended(deployment.name))
    except PenstockError as error:
        refusal = error.message + (f": {error.detail}" if error.detail else "")
        return Finding("deployment", "bad", refusal, error.hint)
    need = show_bytes(prepared.plan.need.total_bytes)
    return Finding("deployment", "ok", f"{deployment.name}: {prepared.plan.engine}, needs about {need} a replica")
