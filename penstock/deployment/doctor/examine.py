"""`penstock doctor`: every reason why a deployment would not start, each with its fix. Nothing is started.

With a file it surveys the nodes of its target three times: what they are (`node.checks.machine`), which of them reach
each other (`reachability`), and how fast they are together (`all_reduce`).
"""

from __future__ import annotations

import dataclasses
import os
import platform
import random
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, TypeVar

import msgspec

from penstock import __version__, engines, paths, targets
from penstock.deployment import preflight, prepare
from penstock.deployment.doctor import network
from penstock.deployment.doctor import nodes as node_findings
from penstock.deployment.doctor.model import ModelCheck, check_model
from penstock.deployment.doctor.network import Route
from penstock.deployment.doctor.nodes import SurveyedNode
from penstock.engines.vllm import images
from penstock.errors import Finding, PenstockError, SpecError, UserError
from penstock.hardware import Interface
from penstock.hardware import network as hardware_network
from penstock.hardware.detect import gpus
from penstock.node.checks.all_reduce import Collective
from penstock.node.checks.machine import NodeCheck, Space
from penstock.node.checks.reachability import Reached, peers_text
from penstock.planner import Plan
from penstock.spec import reading
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets import Surveyed, Target
from penstock.wire.structs import prepare_loaded

_MACHINE_CHECK = "penstock.node.checks.machine"
_ENGINES = ("llamacpp", "vllm")
_SURVEY_S = 90.0
_REACH_S = 6.0
_MEASURE_S = 5.0
# Python and torch from a cold network file system take tens of seconds.
_MEASURE_TIMEOUT_S = 60.0
_N_PORTS = 3
# Below what Linux gives out by itself (net.ipv4.ip_local_port_range begins at 32768).
_PORTS = range(20000, 32000)
# Older Pythons cannot import this file; what can be wrong is a Python that the user did not mean.
_PYTHON = Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")

OnStep = Callable[[str], None]
Answer = TypeVar("Answer")


def examine(deployment: Deployment, is_quick: bool = False, on_step: OnStep | None = None) -> list[Finding]:
    """Every check of a deployment on the nodes it would use. Blocks 10 to 30 s; `is_quick` leaves the all-reduce out.

    Raises UserError for a target that this version does not have; all else is a finding.
    """
    say = on_step or (lambda _: None)
    target = targets.load(deployment.target)
    cache = ["--cache", deployment.cache.folder] if deployment.cache.folder else []
    argv = ["-m", _MACHINE_CHECK, "--model", deployment.model, *cache]
    say("surveying the nodes, and looking up the model")
    prepare_loaded()
    with ThreadPoolExecutor(3) as pool:
        survey = pool.submit(_survey_nodes, target, deployment, argv)
        model_check = pool.submit(check_model, deployment)
        here = pool.submit(_here, target, deployment)
        nodes, survey_findings = survey.result()
        model = model_check.result()
        own = here.result()
        findings = [*own, *model.findings, *survey_findings]
    if "measures" in target.capabilities and not is_quick:
        findings += _place(target, deployment, own, model, say)
    findings += _judge(target, nodes, deployment, model)
    findings += node_findings.of_environment(deployment.engine.variables, "engine.env")
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(_plan, deployment, model)
        route, reach_findings = _reach(target, deployment, nodes, say)
        plan, plan_findings = planned.result()
    findings += reach_findings
    if route is not None and not is_quick:
        findings += _measure(target, deployment, route, (plan, model), say)
    return [*findings, *_conclusion(deployment, plan_findings, findings)]


# ---- this machine ----------------------------------------------------------------------------------------------------


def examine_here() -> list[Finding]:
    """Every check of this machine, as of a node."""
    deployment = reading.from_mapping({"model": DEMO_MODEL}, "the demo", [])
    target = targets.load(deployment.target)
    nodes, findings = _survey_nodes(target, deployment, ["-m", _MACHINE_CHECK])
    own = [_PYTHON, _disk(), _port(None), *map(_engine, _ENGINES)]
    return [*own, *findings, *_judge(target, nodes, deployment, ModelCheck())]


def _disk() -> Finding:
    folder = paths.home() / "runs"
    place = next(path for path in (folder, *folder.parents) if path.exists())  # `up` creates the rest
    is_writable = place.is_dir() and os.access(place, os.W_OK)
    return node_findings.of_run_folders(Space("run folders", str(folder), shutil.disk_usage(place).free, is_writable))


def _engine(name: str) -> Finding:
    engine = engines.load(name)
    missing = engine.missing()
    if missing is None:
        return Finding(f"engine {name}", "ok", engine.version())
    needed = bool(gpus()) == (name == "vllm")
    return Finding(f"engine {name}", "bad" if needed else "warning", missing.reason, missing.install)


def _port(deployment: Deployment | None) -> Finding:
    host, port = (deployment.gateway.host, deployment.gateway.port) if deployment else ("127.0.0.1", 8000)
    if deployment is not None and prepare.holds_port(deployment, prepare.not_ended(deployment.name)):
        return Finding("port", "ok", f"{host}:{port} is held by this deployment, which runs")
    try:
        hardware_network.check_port(host, port)
    except UserError as exc:
        # With a file it is that port or none; without one, 8000 is a guess.
        state: Literal["bad", "warning"] = "warning" if deployment is None else "bad"
        return Finding("port", state, exc.message + (f" ({exc.detail})" if exc.detail else ""), exc.hint)
    return Finding("port", "ok", f"{host}:{port} is free" if port else f"any free port of {host}")


# ---- the nodes -------------------------------------------------------------------------------------------------------


def _here(target: Target, deployment: Deployment) -> list[Finding]:
    """What `up` needs of this machine, and which fields of the file this version or its target refuses."""
    findings = [_PYTHON, _disk(), *([] if "gateway" in target.placed(deployment) else [_port(deployment)])]
    findings += map(_engine, _ENGINES) if target.is_this_machine else ()
    problems = [*preflight.unsupported(deployment, target)]
    try:
        problems += target.check(deployment)
        if deployment.engine.kind != "auto":
            engine, flags = engines.load(deployment.engine.kind), deployment.engine.flags
            problems += engine.problems(flags, images.named_version(deployment))
    except PenstockError as error:
        findings.append(_of_error("target", error))
    return [*findings, *(Finding("file", "bad", str(replace(each, hint=None)), each.hint) for each in problems)]


def _place(
    target: Target, deployment: Deployment, earlier: Sequence[Finding], model: ModelCheck, say: OnStep
) -> list[Finding]:
    """What small workloads of the target's place find."""
    if any(finding.state == "bad" for finding in earlier):
        why = f"target {target.name} was not measured: it, or the file, has the problems above"
        return [Finding("measured", "warning", why, "Fix them, and run `penstock doctor` again.")]
    try:
        return target.measure(deployment, model.download_bytes or None, say)
    except PenstockError as error:
        return [_of_error("measured", error)]


def _survey_nodes(
    target: Target, deployment: Deployment, argv: Sequence[str]
) -> tuple[list[SurveyedNode], list[Finding]]:
    """The nodes that answered, and a finding for each that did not."""
    if "survey" not in target.capabilities:
        return [], [_known_machines(target, deployment)]
    began = time.time()
    checks, findings = _run_on_nodes(target, deployment, argv, _SURVEY_S, NodeCheck)
    ended = time.time()
    nodes = []
    for rank, (name, check) in checks.items():
        # The node read its clock at some time between our question and its answer.
        behind_s, error_s = (began + ended) / 2 - check.at, (ended - began) / 2
        nodes.append(SurveyedNode(rank, name, check, behind_s, error_s))
    if nodes and not target.is_this_machine:
        findings.append(Finding("nodes", "ok", f"{len(nodes)} answered within {ended - began:.1f} s"))
    return nodes, findings


def _known_machines(target: Target, deployment: Deployment) -> Finding:
    """What a target says of machines on which it runs no programs."""
    try:
        machines = target.machines(deployment)
    except PenstockError as error:
        return _of_error("nodes", error)
    gpus = [gpu.name for machine in machines for gpu in machine.gpus]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "no GPU"
    what = "machine" if len(machines) == 1 else "machines"
    known = f"target {target.name} knows {len(machines)} {what} with {names}; no program was run on them"
    return Finding("nodes", "ok" if machines else "warning", known)


def _run_on_nodes(
    target: Target, deployment: Deployment, argv: Sequence[str], timeout_s: float, kind: type[Answer]
) -> tuple[dict[int, tuple[str, Answer]], list[Finding]]:
    """What one of our programs printed on each node, by rank, with its name; and a finding for each failure."""
    try:
        surveyed = target.survey(deployment, argv, timeout_s)
    except PenstockError as error:
        return {}, [_of_error("nodes", error)]
    answers: dict[int, tuple[str, Answer]] = {}
    findings = []
    for rank, row in enumerate(surveyed):
        answer = _parsed(row, kind)
        if isinstance(answer, Finding):
            findings.append(answer)
        elif answer is not None:
            answers[rank] = (row.host, answer)
    return answers, findings


def _parsed(row: Surveyed, kind: type[Answer]) -> Answer | Finding | None:
    """The last line as JSON; None where the program had nothing to do."""
    if row.exit_code is None:
        return node_findings.unreachable(row.host, row.err)
    lines = row.out.strip().splitlines()
    if row.exit_code != 0 and not (lines and lines[-1].startswith("{")):
        if row.exit_code == 255:  # of ssh itself (ssh(1), EXIT STATUS): nothing ran there
            return node_findings.unreachable(row.host, row.err)
        return node_findings.broken(row.host, row.exit_code, row.err)
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[-1], type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        why = f"its answer cannot be read: {exc} (another version of penstock?)"
        return node_findings.broken(row.host, row.exit_code, why)


def _judge(target: Target, nodes: Sequence[SurveyedNode], deployment: Deployment, model: ModelCheck) -> list[Finding]:
    findings = [finding for node in nodes for finding in node_findings.of_node(node, deployment, target.is_elastic)]
    findings += [finding for node in nodes for finding in node_findings.of_weights(node, model.download_bytes)]
    if nodes:
        findings += node_findings.of_all(nodes, deployment, __version__)
    findings += node_findings.of_loading(nodes, deployment, target.time_limit_s(deployment))
    if not target.is_this_machine:
        return findings
    # This machine is the node; its engines answer for themselves.
    return [dataclasses.replace(finding, node=None) for finding in findings if finding.check != "engine"]


def _reach(
    target: Target, deployment: Deployment, nodes: Sequence[SurveyedNode], say: OnStep
) -> tuple[Route | None, list[Finding]]:
    """The interfaces that the nodes use for each other. One node alone needs none but loopback."""
    if not nodes:
        return None, []
    if len(nodes) == 1:
        return Route((nodes[0],), (Interface("lo", "127.0.0.1", 8),)), []
    say(f"{len(nodes)} nodes connect to each other ({_REACH_S:.0f} s)")
    peers = {
        node.rank: [interface.address for interface in node.check.facts.interfaces if not interface.is_loopback]
        for node in nodes
    }
    secret = secrets.token_hex(8)
    for port in random.sample(_PORTS, _N_PORTS):
        argv = ["-m", "penstock.node.checks.reachability", "--rank", "{rank}", "--port", str(port), "--secret", secret]
        argv += ["--peers", peers_text(peers), "--seconds", str(_REACH_S)]
        answers, failures = _run_on_nodes(target, deployment, argv, _SURVEY_S, Reached)
        if not any(answer.error for _, answer in answers.values()):
            break
    known = {node.name for node in nodes}
    failures = [finding for finding in failures if finding.node in known]
    failures += [Finding("network", "bad", each.error, None, name) for name, each in answers.values() if each.error]
    if failures:
        return None, failures
    times = {rank: answer.by_rank for rank, (_, answer) in answers.items()}
    findings, route = network.of_reach(nodes, times, deployment)
    return route, findings


def _measure(
    target: Target, deployment: Deployment, route: Route, known: tuple[Plan | None, ModelCheck], say: OnStep
) -> list[Finding]:
    checks = [node.check for node in route.nodes]
    n_gpus = min(len(check.facts.machine.gpus) for check in checks)
    backend = "nccl" if n_gpus and all(check.torch_cuda for check in checks) else "gloo"
    each = n_gpus if backend == "nccl" else 1
    if each * len(checks) < 2:
        return []
    busy = [node.name for node in route.nodes if backend == "nccl" and node_findings.busy_gpus(node, deployment)]
    if busy:
        why = f"not measured: GPUs of {', '.join(busy)} are in use"
        return [Finding("all-reduce", "warning", why, "Run `penstock doctor` again when they are free.")]
    without = [node.name for node in route.nodes if "torch" not in node.check.facts.machine.versions]
    if without:
        why = f"not measured: torch is not installed on {', '.join(without)}"
        return [Finding("all-reduce", "warning", why, "It comes with vLLM.")]
    say(f"measuring an all-reduce between {len(checks)} node(s) with {backend} ({_MEASURE_S:.0f} s)")
    argv = ["-m", "penstock.node.checks.all_reduce", "--rank", "{rank}", "--backend", backend, "--each", str(each)]
    argv += ["--ranks", ",".join(str(node.rank) for node in route.nodes)]
    argv += ["--interfaces", ",".join(interface.name for interface in route.interfaces)]
    argv += ["--address", route.interfaces[0].address, "--port", str(random.choice(_PORTS))]
    argv += ["--seconds", str(_MEASURE_S), "--timeout", str(_MEASURE_TIMEOUT_S)]
    answers, failures = _run_on_nodes(target, deployment, argv, _MEASURE_TIMEOUT_S + 60.0, Collective)
    names = {node.name for node in route.nodes}
    failures = [finding for finding in failures if finding.node in names or finding.node is None]
    for name, answer in answers.values():
        if answer.error:
            failures.append(dataclasses.replace(network.of_collective(answer, route), node=name))
    if failures:
        return failures
    measured = answers[route.nodes[0].rank][1]
    effect = _effect(deployment, route, known, measured)
    return [network.of_collective(measured, route), *([effect] if effect is not None else [])]


def _effect(
    deployment: Deployment, route: Route, known: tuple[Plan | None, ModelCheck], measured: Collective
) -> Finding | None:
    plan, model = known
    machine = preflight.least([node.check.facts.machine for node in route.nodes])
    if len(route.nodes) < 2:
        return network.inside(measured, machine)
    version = machine.versions.get("vllm")
    if machine.gpus and model.whole is not None and version is not None:
        n_replicas = prepare.sharing(
            targets.load(deployment.target), deployment, len(route.nodes), deployment.replicas.min
        )
        return network.planned(deployment, model.whole, machine, version, max(1, n_replicas), measured)
    if plan is None:
        return None
    return network.on_cpus(measured, plan.layout, plan.model.n_layers)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _plan(deployment: Deployment, model: ModelCheck) -> tuple[Plan | None, list[Finding]]:
    """The plan that `up` would make, or its refusal as a finding. Downloads nothing."""
    if model.is_absent and not targets.load(deployment.target).has_own_caches:
        why = "not planned completely: `up` downloads the model first"
        return None, [Finding("deployment", "warning", why, "`penstock plan` sizes it from its headers alone.")]
    try:
        plan = prepare.plan_now(deployment)
    except PenstockError as error:
        return None, [_of_error("deployment", error)]
    return plan, [Finding("plan", "warning", warning) for warning in plan.warnings]


def _conclusion(deployment: Deployment, planned: Sequence[Finding], earlier: Sequence[Finding]) -> list[Finding]:
    """The planner's findings, and last whether `up` would accept the deployment."""
    known = {finding.found for finding in earlier}
    new = [finding for finding in planned if finding.found not in known]
    if any(finding.check == "deployment" for finding in new):
        return new
    n_bad = sum(finding.state == "bad" for finding in earlier)
    if n_bad:
        text = f"`up` would refuse it, or it would fail: {n_bad} problem{'s' if n_bad > 1 else ''} above"
        return [*new, Finding("deployment", "bad", text, "Fix the problems above first.")]
    return [*new, prepare.check_deployment(deployment)]


def _of_error(check: str, error: PenstockError) -> Finding:
    hint = error.hint
    if isinstance(error, SpecError):
        hint = "; ".join(problem.hint for problem in error.problems if problem.hint) or hint
        return Finding(check, "bad", "; ".join(f"{p.path}: {p.message}" for p in error.problems), hint)
    return Finding(check, "bad", error.message + (f": {error.detail}" if error.detail else ""), hint)
