"""The problems of a node, each with its fix. Pure: `examine` surveys the nodes, this judges their answers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.deployment.planning import absent_gpus
from penstock.deployment.preflight import MIN_FREE_BYTES, UNREAD
from penstock.errors import Finding, State
from penstock.hardware import Gpu
from penstock.log_lines import last_words
from penstock.models.read_rate import Reading
from penstock.node.checks.machine import Limits, NodeCheck, Space, Weights
from penstock.node.group.addresses import variable_warnings, version_problems
from penstock.planner.launch import usable_gpus
from penstock.spec.deployment import Deployment
from penstock.text import GIB, MIB, show_bytes, show_seconds

# The oldest driver branch on which a CUDA major version runs ("CUDA Toolkit and Minimum Required Driver Version for
# CUDA Minor Version Compatibility", https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html, 2025-12).
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
_MIN_FILES = 4096
# Ray and vLLM start some hundred threads each, and each counts.
_MIN_PROCESSES = 4096
# NCCL takes about 10 MB of /dev/shm for each pair of GPUs, vLLM's ranks tens of MB; containers have 64 MB by default.
_MIN_SHM_BYTES, _LITTLE_SHM_BYTES = 128 * MIB, GIB
_MIN_MEMORY_BYTES = GIB
# vLLM's compiled graphs and Triton's kernels: 1 to 3 GB in the home, some hundred MB in /tmp.
_MIN_SPACE_BYTES = GIB
# Tokens and TLS tolerate it; reading the logs of several nodes together, and leases of other tools, do not.
_CLOCK_S = 5.0
# Below this a model of 100 GB takes more than 8 minutes.
_SLOW_BYTES_PER_S = 200e6
_LONG_LOAD_S = 600.0
_FASTER = (
    "Copy the weights to a local NVMe disk of each node and set model to that folder; every start reads them again."
)
_TOO_SMALL_BYTES = 32 * MIB
_SHOWN = 3


class SurveyedNode(msgspec.Struct, frozen=True):
    """A node's answer. `behind_s`: its clock against ours, within `clock_error_s`. `name`: the target's for it."""

    rank: int
    name: str
    check: NodeCheck
    behind_s: float = 0.0
    clock_error_s: float = 0.0


def of_node(node: SurveyedNode, deployment: Deployment, is_elastic: bool = False) -> list[Finding]:
    """`is_elastic`: the target waits for free machines, so memory that other jobs hold is no problem."""
    findings = [
        *_memory(node),
        shared_memory(node.check.facts.shm_bytes, node.check.shm_total_bytes, len(node.check.facts.machine.gpus)),
        *_limits(node),
        *_spaces(node),
        *_gpus(node, deployment),
        *_driver(node),
        *_engine(node, deployment),
        *_clock(node),
        *of_environment(node.check.facts.environment, f"the environment on {node.name}"),
        *_addresses(node),
    ]
    if is_elastic:
        findings = [_held_now(finding) if finding.check in ("memory", "gpu") else finding for finding in findings]
    return [dataclasses.replace(finding, node=node.name) for finding in findings]


def _held_now(finding: Finding) -> Finding:
    if finding.state == "ok":
        return finding
    cure = "A replica waits until that is free: if no job of the cluster holds it, end the process."
    return dataclasses.replace(finding, state="warning", cure=cure)


def of_all(nodes: Sequence[SurveyedNode], deployment: Deployment, own_version: str) -> list[Finding]:
    """Problems that show when nodes are compared."""
    return [*_versions(nodes, deployment, own_version), *_equal_gpus(nodes, deployment)]


def of_environment(environment: Mapping[str, str], where: str) -> list[Finding]:
    """Variables that no program reads."""
    cure = f"Correct the name, or remove it from {where}."
    return [Finding("variables", "warning", warning, cure) for warning in variable_warnings(environment)]


def _memory(node: SurveyedNode) -> Iterator[Finding]:
    machine = node.check.facts.machine
    free_bytes, cure = machine.memory_free_bytes or 0, "End the processes that hold the memory."
    text = f"{show_bytes(free_bytes)} free of {show_bytes(machine.memory_bytes or 0)}, {machine.n_cpus} CPUs"
    yield Finding("memory", "bad" if free_bytes < _MIN_MEMORY_BYTES else "ok", text, cure)


def shared_memory(free_bytes: int, total_bytes: int, n_gpus: int) -> Finding:
    """Of a machine whose replicas take that many GPUs together. Pure."""
    text = f"{show_bytes(free_bytes)} free of {show_bytes(total_bytes)}"
    cure = "Start the container with --shm-size 8g (Kubernetes: an emptyDir of medium Memory), or empty /dev/shm."
    if free_bytes < _MIN_SHM_BYTES and n_gpus > 1:
        return Finding("/dev/shm", "bad", f"{text}: NCCL between {n_gpus} GPUs needs more", cure)
    if free_bytes < _LITTLE_SHM_BYTES:
        return Finding("/dev/shm", "warning", f"{text}: vLLM's ranks communicate through it", cure)
    return Finding("/dev/shm", "ok", text)


def _limits(node: SurveyedNode) -> Iterator[Finding]:
    limits = node.check.limits
    low = list(_low(limits, any(interface.is_infiniband for interface in node.check.facts.interfaces)))
    if not low:
        yield Finding("ulimits", "ok", f"open files {_shown(limits.n_files)}, processes {_shown(limits.n_processes)}")
    for text, cure in low:
        yield Finding("ulimits", "warning", text, cure)


def _low(limits: Limits, has_infiniband: bool) -> Iterator[tuple[str, str]]:
    if limits.n_files is not None and limits.n_files < _MIN_FILES:
        most = 65536 if limits.n_files_hard is None else min(65536, limits.n_files_hard)
        cure = f"Run ulimit -n {most} before the start (systemd: LimitNOFILE; a container: --ulimit)."
        if limits.n_files >= most:  # the hard limit, which only root may raise
            cure = f"The hard limit is {most}: an administrator raises it (nofile in /etc/security/limits.conf, the "
            cure += "LimitNOFILE of the service that starts jobs, a container's --ulimit nofile=65536)."
        yield f"open files: {limits.n_files}, vLLM and Ray need thousands", cure
    if limits.n_processes is not None and limits.n_processes < _MIN_PROCESSES:
        cure = "Run ulimit -u 65536, or raise the container's pids limit."
        yield f"processes: {limits.n_processes}, threads count too", cure
    if has_infiniband and limits.locked_bytes is not None and limits.locked_bytes < GIB:
        yield (
            f"locked memory: {show_bytes(limits.locked_bytes)}, InfiniBand pins its buffers",
            "Run ulimit -l unlimited (systemd: LimitMEMLOCK=infinity for the service that starts the node).",
        )


def _shown(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def of_run_folders(space: Space) -> Finding:
    room = "Free space, or set PENSTOCK_HOME to a larger disk."
    finding = _of_space(space, room, "Set PENSTOCK_HOME to a folder you may write.")
    is_usable = space.is_writable and space.free_bytes >= MIN_FREE_BYTES
    return finding if is_usable else dataclasses.replace(finding, state="bad")


def _spaces(node: SurveyedNode) -> Iterator[Finding]:
    room = "Free space there: the engine writes compiled kernels to it."
    for space in node.check.spaces:
        yield _of_space(space, room, "Give the user write access to that folder.")


def _of_space(space: Space, room: str, access: str) -> Finding:
    """`room`, `access`: what to do where it lacks that."""
    if not space.is_writable:
        return Finding("disk", "warning", f"{space.name}: cannot write {space.path}", access)
    state: State = "ok" if space.free_bytes >= _MIN_SPACE_BYTES else "warning"
    return Finding("disk", state, f"{space.name}: {show_bytes(space.free_bytes)} free at {space.path}", room)


def busy_gpus(node: SurveyedNode, deployment: Deployment) -> list[Gpu]:
    """GPUs without the memory that an engine needs."""
    machine = node.check.facts.machine
    usable = {gpu.index for gpu in usable_gpus(machine, deployment.engine.gpu_memory_utilization)}
    return [gpu for gpu in machine.gpus if gpu.index not in usable]


def _gpus(node: SurveyedNode, deployment: Deployment) -> Iterator[Finding]:
    gpus, unread = node.check.facts.machine.gpus, node.check.facts.machine.unread
    is_on_cpu = deployment.hardware.gpus_per_node == 0 or deployment.engine.kind not in ("auto", "vllm")
    state: State = "warning" if gpus or is_on_cpu else "bad"
    absent = absent_gpus(deployment.hardware, node.name, gpus)
    yield from (Finding("gpu", "bad", f"{each.path}: {each.message}", each.hint) for each in absent)
    yield from (Finding("gpu", state, text, UNREAD) for text in unread if not absent)
    if not gpus:
        yield from () if unread or absent else (Finding("gpu", "ok", "none found"),)
        return
    free = ", ".join(f"GPU {gpu.index} {show_bytes(gpu.memory_free_bytes)}" for gpu in gpus)
    utilization = deployment.engine.gpu_memory_utilization
    full = busy_gpus(node, deployment)
    if not full:
        yield Finding("gpu", "ok", f"{len(gpus)} x {gpus[0].name}, free: {free}")
        return
    needed = deployment.hardware.gpus_per_node or 1
    for gpu in full:
        text = (
            f"GPU {gpu.index} has {show_bytes(gpu.memory_free_bytes)} of {show_bytes(gpu.memory_bytes)} free, "
            f"vLLM needs {utilization:.0%} ({show_bytes(gpu.memory_bytes * utilization)}); {_held(node, gpu)}"
        )
        cure = "End that process (`penstock clean` ends ours), or lower engine.gpu_memory_utilization."
        yield Finding("gpu", "bad" if len(gpus) - len(full) < needed else "warning", text, cure)


def _held(node: SurveyedNode, gpu: Gpu) -> str:
    holders = [holder for holder in node.check.holders if holder.gpu == gpu.index]
    if not holders:
        return "the driver does not show the process that holds it (another container, or a process that just ended)"
    words = [
        f"process {holder.pid} ({holder.name}, user {holder.user or 'unknown'}) holds {show_bytes(holder.n_bytes)}"
        for holder in sorted(holders, key=lambda holder: -holder.n_bytes)
    ]
    return "; ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")


def _driver(node: SurveyedNode) -> Iterator[Finding]:
    check = node.check
    torch, wanted = check.facts.machine.versions.get("torch"), check.wanted_torch
    if torch is not None and wanted is not None and torch.partition("+")[0] != wanted:
        text = f"torch {torch}, but the installed vLLM was built for {wanted}"
        cure = f"Run pip install torch=={wanted}, or install vLLM again: its compiled modules do not load."
        yield Finding("torch", "bad", text, cure)
    if not check.facts.machine.gpus:
        return
    if check.torch_cuda is None:
        if torch is not None:
            text = f"torch {torch} was built without CUDA, but the node has GPUs"
            yield Finding("driver", "bad", text, "Install the torch (and vLLM) wheel for CUDA.")
        return
    major = int(check.torch_cuda.partition(".")[0])
    least = _MIN_DRIVER.get(major)
    text = f"driver {check.driver or 'unknown'}, torch built with CUDA {check.torch_cuda}"
    if check.driver is None or least is None:
        cure = "nvidia-smi prints the driver's version; compare it with NVIDIA's release notes."
        yield Finding("driver", "warning", text, cure)
    elif (branch := int(check.driver.partition(".")[0])) < least:
        cuda = max((major for major, oldest in _MIN_DRIVER.items() if oldest <= branch), default="10 or older")
        cure = f"Update the driver to {least} or newer, or install torch and vLLM built with CUDA {cuda}."
        yield Finding("driver", "bad", f"{text}, which needs driver {least} or newer", cure)
    else:
        yield Finding("driver", "ok", text)


def _engine(node: SurveyedNode, deployment: Deployment) -> Iterator[Finding]:
    versions, kind = node.check.facts.machine.versions, deployment.engine.kind
    is_vllm = kind == "vllm" or (kind == "auto" and (node.check.facts.machine.gpus or deployment.hardware.nodes > 1))
    if is_vllm and "vllm" not in versions:
        yield Finding("engine", "bad", "vLLM is not installed", "Run pip install vllm there, for the same Python.")
    elif is_vllm:
        yield Finding("engine", "ok", f"vLLM {versions['vllm']}")
    is_ray = deployment.engine.executor == "ray" or (
        deployment.engine.executor == "auto" and deployment.hardware.nodes > 1 and kind != "fake"
    )
    if is_ray and "ray" not in versions:
        cure = "Run pip install ray on that node, or set engine.executor: mp."
        yield Finding("engine", "bad", "Ray is not installed", cure)


def of_weights(node: SurveyedNode, download_bytes: int | None) -> list[Finding]:
    """The model's files on a node: present, complete, space for them, and their read rate.

    `download_bytes`: the size of a hub model; None where it is not known or the model is a folder.
    """
    weights, findings = node.check.weights, list[Finding]()
    if weights is None:
        return findings
    is_of_hub = download_bytes is not None
    if weights.absent and is_of_hub:
        findings.append(_download(weights, download_bytes or 0))
    elif weights.absent:
        absent = ", ".join(weights.absent[:_SHOWN]) + (" ..." if len(weights.absent) > _SHOWN else "")
        cure = "Put the model's folder at the same path on every node (a shared file system), or give a hub id."
        findings.append(Finding("weights", "bad", f"{weights.path}: {absent} not there", cure))
    else:
        findings.append(Finding("weights", "ok", f"{show_bytes(weights.n_bytes)} in {weights.path}"))
    if weights.reading is not None:
        findings.append(_read_rate(weights.reading))
    return [dataclasses.replace(finding, node=node.name) for finding in findings]


def _download(weights: Weights, n_bytes: int) -> Finding:
    left = n_bytes - weights.n_bytes
    text = f"{show_bytes(left)} to download, {show_bytes(weights.free_bytes)} free at {weights.path}"
    if left > weights.free_bytes:
        return Finding("weights", "bad", text, "Free space there, or set cache.weights to a folder on a larger disk.")
    return Finding("weights", "warning", text, "`up` downloads it first; doctor can measure the read rate after that.")


def _read_rate(reading: Reading) -> Finding:
    rate = f"{reading.bytes_per_s / 1e9:.2f} GB/s"
    how = "past the page cache" if reading.is_direct else "through the page cache"
    if reading.cached_share is not None and reading.cached_share >= 0.1:
        how += f"; {reading.cached_share:.0%} of it was in memory, so a cold load may be slower"
    where = f" on {reading.file_system}" if reading.file_system else ""
    text = f"{rate} from {reading.path}{where} ({show_bytes(reading.n_bytes)} read {how})"
    if reading.n_bytes < _TOO_SMALL_BYTES:
        return Finding("read rate", "ok", f"{text}; too little to measure a disk")
    cure = "Copy the weights to a local disk (cache.weights), or set engine.load: runai_streamer."
    return Finding("read rate", "warning" if reading.bytes_per_s < _SLOW_BYTES_PER_S else "ok", text, cure)


def _clock(node: SurveyedNode) -> Iterator[Finding]:
    if abs(node.behind_s) > node.clock_error_s + _CLOCK_S:
        way = "behind" if node.behind_s > 0 else "ahead of"
        text = f"{show_seconds(abs(node.behind_s))} {way} this machine"
        yield Finding("clock", "warning", text, "Synchronise it by NTP (timedatectl set-ntp true).")


def _addresses(node: SurveyedNode) -> Iterator[Finding]:
    shown = []
    for interface in node.check.facts.interfaces:
        kind = " InfiniBand" if interface.is_infiniband else " virtual" if interface.is_virtual else ""
        speed = f" {interface.speed_mbps / 1000:g} Gb/s" if interface.speed_mbps and interface.speed_mbps > 0 else ""
        if not interface.is_loopback:
            shown.append(f"{interface.address} ({interface.name}{kind}{speed})")
    state: State = "ok" if shown else "warning" if node.rank == 0 else "bad"
    cure = "Connect the node to an IPv4 network: vLLM and NCCL get IPv4 addresses."
    yield Finding("addresses", state, ", ".join(shown) or "none but loopback", cure)


def _versions(nodes: Sequence[SurveyedNode], deployment: Deployment, own_version: str) -> Iterator[Finding]:
    facts = [node.check.facts for node in nodes]
    is_ray = deployment.engine.executor == "ray" or (
        deployment.engine.executor == "auto" and deployment.hardware.nodes > 1
    )
    problems = version_problems(facts, is_ray=is_ray)
    for problem in problems:
        yield Finding("versions", "bad", problem.message, problem.hint)
    theirs = facts[0].machine.versions.get("penstock")
    if theirs != own_version:
        text = f"penstock is {own_version} here, {theirs} on {nodes[0].name}"
        yield Finding("versions", "bad", text, "Install the same penstock here and on the nodes.")
    elif not problems:
        text = ", ".join(f"{package} {version}" for package, version in facts[0].machine.versions.items())
        yield Finding("versions", "ok", text if len(nodes) == 1 else f"the same on all {len(nodes)} nodes: {text}")


def _equal_gpus(nodes: Sequence[SurveyedNode], deployment: Deployment) -> Iterator[Finding]:
    """A replica may get any of the nodes, and fails on one with fewer or other GPUs."""
    counts = {node.name: len(node.check.facts.machine.gpus) for node in nodes}
    wanted = deployment.hardware.gpus_per_node
    most = max(counts.values(), default=0)
    needed = wanted if wanted is not None else 1 if deployment.hardware.gpu else most
    cure = "Check nvidia-smi, CUDA_VISIBLE_DEVICES and the scheduler's allocation there, or leave the node out."
    for name, count in counts.items():
        if count < needed:
            is_asked = wanted is not None or deployment.hardware.gpu
            reason = f"{needed} are needed" if is_asked else f"others have {most}"
            yield Finding("gpu", "bad", f"has {count} GPUs, {reason}", cure, name)
    kinds = {node.name: {gpu.name for gpu in node.check.facts.machine.gpus} for node in nodes}
    if len({kind for names in kinds.values() for kind in names}) > 1:
        text = "; ".join(f"{name}: {', '.join(sorted(kind)) or 'none'}" for name, kind in kinds.items())
        yield Finding("gpu", "warning", f"several kinds ({text})", "Use nodes of one kind: the slowest sets the speed.")


def of_loading(
    nodes: Sequence[SurveyedNode], deployment: Deployment, time_limit_s: tuple[str, float] | None
) -> list[Finding]:
    """The least time that loading takes on the slowest node, against the limits of the file.

    `time_limit_s`: how long a replica may run, after the field that says so.
    """
    times = []
    for node in nodes:
        weights = node.check.weights
        if weights is None or weights.reading is None or weights.absent:
            continue
        # vLLM maps the files and copies what its ranks keep: a node reads its share at least.
        n_bytes = -(-weights.n_bytes // deployment.hardware.nodes)
        times.append((n_bytes / weights.reading.bytes_per_s, n_bytes, node))
    if not times:
        return []
    took_s, n_bytes, slowest = max(times, key=lambda row: row[0])
    text = f"at best {show_seconds(took_s)}: {show_bytes(n_bytes)} per node, {slowest.name} reads slowest"
    limits = [("engine.start_timeout_s", deployment.engine.start_timeout_s)]
    if time_limit_s is not None:
        limits.append(time_limit_s)
    findings = [
        Finding(
            "loading", "bad", f"{text}; but {name} is {show_seconds(limit_s)}",
            f"Set {name} well above it (an engine needs another minute to start), or put the weights on a faster disk.",
        )
        for name, limit_s in limits
        if took_s > limit_s
    ]  # fmt: skip
    if not findings and took_s > _LONG_LOAD_S:
        findings = [Finding("loading", "warning", text, _FASTER)]
    return findings or [Finding("loading", "ok", text)]


def unreachable(name: str, why: str) -> Finding:
    reason = " ".join(why.split())[-300:] or "no answer"
    cure = "Check that it is on and reachable."
    if re.search(r"\bsrun: |no node free", reason):  # the scheduler refused, or has nothing free
        cure = "Change what the file requests of the scheduler, or wait until that is free."
    return Finding("node", "bad", f"could not be checked: {reason}", cure, name)


def broken(name: str, exit_code: int, err: str) -> Finding:
    reason = last_words(err.splitlines(), signs=()) or f"exit code {exit_code}"
    cure = "Install the same penstock there, for the Python that the target uses."
    if not re.search(r"No module named '?penstock", reason):
        cure = "Run `python -m penstock.node.checks.machine` there to see the whole error."
    return Finding("node", "bad", f"penstock did not run there: {reason}", cure, name)
