"""`penstock doctor`: why a deployment would not start, all reasons at once, each with its cure.

Without a file it looks at this machine. With one it asks the nodes that the file's target would use, three times: what
they are (`node_check`), whom they reach (`reach_check`), and how fast they are together (`collective`). A node that is
silent is one finding and takes no other check away. Nothing is started and nothing stays.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import msgspec

from penstock import __version__, engines, paths, targets
from penstock.deployment import preflight, prepare
from penstock.deployment.doctor import model as model_check
from penstock.deployment.doctor import network
from penstock.deployment.doctor import nodes as findings
from penstock.deployment.doctor.model import ModelSeen
from penstock.deployment.doctor.network import Way
from penstock.deployment.doctor.nodes import Seen
from penstock.deployment.preflight import Finding
from penstock.errors import PenstockError, SpecError, UserError
from penstock.hardware import Interface
from penstock.hardware import network as hardware_network
from penstock.hardware.detect import gpus, this_machine
from penstock.node.checks.all_reduce import Collective
from penstock.node.checks.machine import NodeCheck
from penstock.node.checks.reachability import Reached, peers_text
from penstock.planner import Plan
from penstock.spec.deployment import Deployment
from penstock.targets import Surveyed, Target
from penstock.text import GIB, show_bytes

_MIN_DISK_BYTES = 2 * GIB
_MIN_MEMORY_BYTES = GIB
_SURVEY_S = 90.0
_REACH_S = 6.0
_MEASURE_S = 5.0
# Python and torch from a cold network file system take tens of seconds.
_MEASURE_TIMEOUT_S = 60.0
_N_PORTS = 3
# Below what Linux gives out by itself (net.ipv4.ip_local_port_range begins at 32768).
_PORTS = range(20000, 32000)

OnStep = Callable[[str], None]
Told = TypeVar("Told")


def examine(deployment: Deployment, is_quick: bool = False, on_step: OnStep | None = None) -> list[Finding]:
    """Every check of a deployment on the nodes it would use. Blocks 10 to 30 s; `is_quick` leaves the all-reduce out.

    Raises UserError for a target that this version does not have; all else is a finding.
    """
    say = on_step or (lambda _: None)
    target = targets.load(deployment.target)
    say("asking the nodes what they are, and the hub for the model")
    with ThreadPoolExecutor(3) as pool:
        asked = pool.submit(_survey_nodes, target, deployment)
        model = pool.submit(model_check.check, deployment)
        here = pool.submit(_here, target, deployment)
        nodes, found = asked.result()
        seen_model = model.result()
        found = [*here.result(), *seen_model.findings, *found]
    found += _judge(target, nodes, deployment, seen_model)
    found += findings.of_environment(deployment.engine.env, "engine.env")
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(_plan, deployment, seen_model)
        way, more = _reach(target, deployment, nodes, say)
        plan, plan_findings = planned.result()
    found += more
    if way is not None and not is_quick:
        found += _measure(target, deployment, way, (plan, seen_model), say)
    return [*found, *_last(deployment, plan_findings, found)]


# ---- this machine ----------------------------------------------------------------------------------------------------


def examine_here(deployment: Deployment | None = None) -> list[Finding]:
    """Every check on this machine, all of them also after a bad one. Changes nothing."""
    checks: list[Callable[[], Finding]] = [_python, _memory, _disk, _shared_memory, _open_files, _gpu]
    found = [check() for check in checks]
    found += [_engine(name) for name in ("llamacpp", "vllm")]
    found.append(_port(deployment))
    return found


def _python() -> Finding:
    # Older Pythons cannot import this file; what can be wrong is a Python nobody meant to use.
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _memory() -> Finding:
    machine = this_machine()
    found = f"{show_bytes(machine.memory_free_bytes)} free of {show_bytes(machine.memory_bytes)}, {machine.n_cpus} CPUs"
    if machine.memory_free_bytes < _MIN_MEMORY_BYTES:
        return Finding("memory", "bad", found, "end what holds the memory")
    return Finding("memory", "ok", found)


def _disk() -> Finding:
    folder = paths.home() / "runs"
    place = next(path for path in (folder, *folder.parents) if path.exists())  # `up` makes what is absent below it
    if not place.is_dir() or not os.access(place, os.W_OK):
        found = f'cannot write run folder "{folder}"'
        return Finding("disk", "bad", found, "Set PENSTOCK_HOME to a folder you may write.")
    free = shutil.disk_usage(place).free
    found = f"{show_bytes(free)} free at {folder}"
    if free < _MIN_DISK_BYTES:
        return Finding("disk", "warning", found, "free space, or set PENSTOCK_HOME to a larger disk")
    return Finding("disk", "ok", found)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "warning", "absent", "vLLM on several GPUs needs it")
    if free < GIB:
        return Finding("/dev/shm", "warning", f"{show_bytes(free)} free", "start the container with --shm-size 8g")
    return Finding("/dev/shm", "ok", f"{show_bytes(free)} free")


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return Finding("open files", "warning", f"limit {soft} (hard {hard})", f"ulimit -n {min(hard, 65536)}")
    return Finding("open files", "ok", f"limit {soft}")


def _gpu() -> Finding:
    found = gpus()
    if not found:
        return Finding("gpu", "ok", "none found: the engine is llamacpp, or vllm on the CPU when asked")
    names = ", ".join(f"{gpu.name} {show_bytes(gpu.memory_free_bytes)} free" for gpu in found)
    busy = [gpu for gpu in found if gpu.memory_free_bytes < 0.5 * gpu.memory_bytes]
    if busy:
        return Finding("gpu", "warning", names, f"GPU {busy[0].index} is more than half full: see nvidia-smi")
    return Finding("gpu", "ok", names)


def _engine(name: str) -> Finding:
    engine = engines.load(name)
    missing = engine.missing()
    if missing is None:
        return Finding(f"engine {name}", "ok", engine.version())
    needed = bool(gpus()) == (name == "vllm")
    return Finding(f"engine {name}", "bad" if needed else "warning", missing.reason, missing.install)


def _port(deployment: Deployment | None) -> Finding:
    host, port = (deployment.gateway.host, deployment.gateway.port) if deployment else ("127.0.0.1", 8000)
    if deployment is not None and prepare.holds_port(deployment):
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
    """What `up` itself needs of this machine, and what of the file this version or its target refuses."""
    found = [_python(), _disk(), _port(deployment)]
    if target.is_this_machine:
        found += [_engine(name) for name in ("llamacpp", "vllm")]
    problems = preflight.unsupported(deployment, target)
    try:
        problems += target.check(deployment)
        if deployment.engine.kind != "auto":
            problems += engines.load(deployment.engine.kind).problems(deployment.engine.args)
    except PenstockError as error:
        found.append(_of_error("target", error))
    for problem in problems:
        where = f"{problem.path}: " if problem.path else ""
        found.append(Finding("file", "bad", where + problem.message, problem.hint))
    return found


def _survey_nodes(target: Target, deployment: Deployment) -> tuple[list[Seen], list[Finding]]:
    """The nodes that answered, and a finding for each that did not."""
    argv = ["-m", "penstock.node.checks.machine", "--model", deployment.model]
    if deployment.cache.weights:
        argv += ["--cache", deployment.cache.weights]
    began = time.time()
    rows, found = _ask(target, deployment, argv, _SURVEY_S, NodeCheck)
    ended = time.time()
    nodes = []
    for rank, (name, told) in rows.items():
        # The answer was made at some time between our question and its end.
        behind_s, error_s = (began + ended) / 2 - told.at, (ended - began) / 2
        nodes.append(Seen(rank, name, told, behind_s, error_s))
    if nodes:
        found.append(Finding("nodes", "ok", f"{len(nodes)} answered within {ended - began:.1f} s"))
    return nodes, found


def _ask(
    target: Target, deployment: Deployment, argv: Sequence[str], timeout_s: float, kind: type[Told]
) -> tuple[dict[int, tuple[str, Told]], list[Finding]]:
    """What a program of ours printed on each node, by rank, with its name; and a finding for each failure."""
    try:
        if "survey" not in target.capabilities:
            return {}, [Finding("nodes", "warning", f"target {target.name} cannot be asked for its nodes")]
        surveyed = target.survey(deployment, argv, timeout_s)
    except PenstockError as error:
        return {}, [_of_error("nodes", error)]
    told: dict[int, tuple[str, Told]] = {}
    found = []
    for rank, row in enumerate(surveyed):
        answer = _parsed(row, kind)
        if isinstance(answer, Finding):
            found.append(answer)
        elif answer is not None:
            told[rank] = (row.host, answer)
    return told, found


def _parsed(row: Surveyed, kind: type[Told]) -> Told | Finding | None:
    """The last line as JSON; None where the program had nothing to do."""
    if row.exit_code is None:
        return findings.unreachable(row.host, row.err)
    lines = row.out.strip().splitlines()
    if row.exit_code != 0 and not (lines and lines[-1].startswith("{")):
        # ssh itself ends with 255 (ssh(1), EXIT STATUS): then nothing ran there.
        return findings.unreachable(row.host, row.err) if row.exit_code == 255 else (
            findings.broken(row.host, row.exit_code, row.err)
        )  # fmt: skip
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[-1], type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        return findings.broken(row.host, row.exit_code, f"its answer is not ours: {exc} (another version of penstock?)")


def _judge(target: Target, nodes: Sequence[Seen], deployment: Deployment, model: ModelSeen) -> list[Finding]:
    found = [finding for seen in nodes for finding in findings.of_node(seen, deployment)]
    found += [finding for seen in nodes for finding in findings.of_weights(seen, model.download_bytes)]
    if nodes:
        found += findings.of_all(nodes, deployment, __version__)
    found += findings.of_loading(nodes, deployment, target.time_limit_s(deployment))
    if not target.is_this_machine:
        return found
    # This machine is the node; of engines it was asked itself.
    return [msgspec.structs.replace(finding, node=None) for finding in found if finding.check != "engine"]


def _reach(
    target: Target, deployment: Deployment, nodes: Sequence[Seen], say: OnStep
) -> tuple[Way | None, list[Finding]]:
    """The way between the nodes. One node alone has it by itself."""
    if not nodes:
        return None, []
    if len(nodes) == 1:
        return Way((nodes[0],), (Interface("lo", "127.0.0.1", 8),)), []
    say(f"{len(nodes)} nodes look for each other ({_REACH_S:.0f} s)")
    peers = {seen.rank: [one.address for one in seen.check.facts.interfaces if not one.is_loopback] for seen in nodes}
    secret = secrets.token_hex(8)
    for port in random.sample(_PORTS, _N_PORTS):
        argv = ["-m", "penstock.node.checks.reachability", "--rank", "{rank}", "--port", str(port), "--secret", secret]
        argv += ["--peers", peers_text(peers), "--seconds", str(_REACH_S)]
        rows, failed = _ask(target, deployment, argv, _SURVEY_S, Reached)
        if not any(told.error for _, told in rows.values()):
            break
    known = {seen.name for seen in nodes}
    failed = [finding for finding in failed if finding.node in known]
    errors = [Finding("network", "bad", told.error, None, name) for name, told in rows.values() if told.error]
    if failed or errors:
        return None, [*failed, *errors]
    times = {rank: told.by_rank for rank, (_, told) in rows.items()}
    found, way = network.of_reach(nodes, times, deployment)
    return way, found


def _measure(
    target: Target, deployment: Deployment, way: Way, known: tuple[Plan | None, ModelSeen], say: OnStep
) -> list[Finding]:
    """The all-reduce over the chosen interfaces, and what the planner makes of it."""
    checks = [seen.check for seen in way.nodes]
    n_gpus = min(len(check.facts.machine.gpus) for check in checks)
    backend = "nccl" if n_gpus and all(check.torch_cuda for check in checks) else "gloo"
    each = n_gpus if backend == "nccl" else 1
    if each * len(checks) < 2:
        return []
    without = [seen.name for seen in way.nodes if "torch" not in seen.check.facts.machine.versions]
    if without:
        said = f"not measured: torch is not installed on {', '.join(without)}"
        return [Finding("all-reduce", "warning", said, "It comes with vLLM.")]
    say(f"measuring an all-reduce between {len(checks)} node(s) with {backend} ({_MEASURE_S:.0f} s)")
    argv = ["-m", "penstock.node.checks.all_reduce", "--rank", "{rank}", "--backend", backend, "--each", str(each)]
    argv += ["--ranks", ",".join(str(seen.rank) for seen in way.nodes)]
    argv += ["--interfaces", ",".join(one.name for one in way.interfaces)]
    argv += ["--address", way.interfaces[0].address, "--port", str(random.choice(_PORTS))]
    argv += ["--seconds", str(_MEASURE_S), "--timeout", str(_MEASURE_TIMEOUT_S)]
    rows, failed = _ask(target, deployment, argv, _MEASURE_TIMEOUT_S + 60.0, Collective)
    names = {seen.name for seen in way.nodes}
    failed = [finding for finding in failed if finding.node in names or finding.node is None]
    errors = [(name, told) for name, told in rows.values() if told.error]
    if failed or errors:
        return [
            *failed,
            *(msgspec.structs.replace(network.of_collective(told, way), node=name) for name, told in errors),
        ]
    measured = rows[way.nodes[0].rank][1]
    found = [network.of_collective(measured, way)]
    effect = _effect(deployment, way, known, measured)
    return [*found, *([effect] if effect is not None else [])]


def _effect(
    deployment: Deployment, way: Way, known: tuple[Plan | None, ModelSeen], measured: Collective
) -> Finding | None:
    plan, model = known
    machine = preflight.least([seen.check.facts.machine for seen in way.nodes])
    if len(way.nodes) < 2:
        return network.inside(measured, machine)
    version = machine.versions.get("vllm")
    if machine.gpus and model.whole is not None and version is not None:
        n_replicas = prepare.sharing(
            targets.load(deployment.target), deployment, len(way.nodes), deployment.replicas.min
        )
        return network.planned(deployment, model.whole, machine, version, max(1, n_replicas), measured)
    if plan is None:
        return None
    return network.on_cpus(measured, plan.layout, plan.model.n_layers)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _plan(deployment: Deployment, model: ModelSeen) -> tuple[Plan | None, list[Finding]]:
    """The plan that `up` would make, or its refusal as a finding. Downloads nothing."""
    if model.is_absent:
        said = "not planned to the end: `up` downloads the model first"
        return None, [Finding("deployment", "warning", said, "penstock plan sizes it from its headers alone.")]
    try:
        plan = prepare.plan_now(deployment)
    except PenstockError as error:
        return None, [_of_error("deployment", error)]
    found = [Finding("plan", "warning", warning) for warning in plan.warnings]
    return plan, found


def _last(deployment: Deployment, planned: Sequence[Finding], found: Sequence[Finding]) -> list[Finding]:
    """What the planner said, and in the end whether `up` would accept the deployment."""
    told = {finding.found for finding in found}
    new = [finding for finding in planned if finding.found not in told]
    if any(finding.check == "deployment" for finding in new):
        return new
    bad = [finding for finding in found if finding.state == "bad"]
    if bad:
        said = f"`up` would refuse it, or it would fail: {len(bad)} problem(s) above"
        return [*new, Finding("deployment", "bad", said, "Mend those first.")]
    return [*new, prepare.check_deployment(deployment)]


def _of_error(check: str, error: PenstockError) -> Finding:
    hint = error.hint
    if isinstance(error, SpecError):
        hint = "; ".join(problem.hint for problem in error.problems if problem.hint) or hint
        return Finding(check, "bad", "; ".join(f"{p.path}: {p.message}" for p in error.problems), hint)
    return Finding(check, "bad", error.message + (f": {error.detail}" if error.detail else ""), hint)
