"""What of a node's facts is wrong, each with its cure. Pure: `doctor` asks the nodes, this judges what they said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.deployment.preflight import Finding
from penstock.hardware import Gpu
from penstock.node.checks.machine import Limits, NodeCheck
from penstock.node.group.addresses import variable_warnings, version_problems
from penstock.planner.launch import usable_gpus
from penstock.planner.speed.work import bytes_per_node, load_time_s
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
# Tokens and TLS do not mind; logs of several nodes side by side, and leases of other tools, do.
_CLOCK_S = 5.0
# Below this a model of 100 GB takes more than 8 minutes.
_SLOW_BYTES_PER_S = 200e6
_TOO_SMALL_BYTES = 32 * MIB
_SHOWN = 3


class Seen(msgspec.Struct, frozen=True):
    """What a node said. `behind_s`: its clock against ours, within `clock_error_s`. `name`: the target's for it."""

    rank: int
    name: str
    check: NodeCheck
    behind_s: float = 0.0
    clock_error_s: float = 0.0


def of_node(seen: Seen, deployment: Deployment) -> list[Finding]:
    """Everything about one node alone."""
    found = [
        *_memory(seen),
        *_shared_memory(seen),
        *_limits(seen),
        *_spaces(seen),
        *_gpus(seen, deployment),
        *_driver(seen),
        *_engine(seen, deployment),
        *_clock(seen),
        *_variables(seen),
        *_addresses(seen),
    ]
    return [msgspec.structs.replace(finding, node=seen.name) for finding in found]


def of_all(nodes: Sequence[Seen], deployment: Deployment, own_version: str) -> list[Finding]:
    """What only shows when nodes are compared."""
    return [*_versions(nodes, deployment, own_version), *_equal_gpus(nodes, deployment)]


def of_environment(environment: Mapping[str, str], where: str) -> list[Finding]:
    """Variables that nobody reads."""
    cure = f"Correct the name, or remove it from {where}."
    return [Finding("variables", "warning", warning, cure) for warning in variable_warnings(environment)]


def _memory(seen: Seen) -> Iterator[Finding]:
    machine = seen.check.facts.machine
    found = f"{show_bytes(machine.memory_free_bytes)} free of {show_bytes(machine.memory_bytes)}, {machine.n_cpus} CPUs"
    if machine.memory_free_bytes < _MIN_MEMORY_BYTES:
        yield Finding("memory", "bad", found, "end what holds the memory")
    else:
        yield Finding("memory", "ok", found)


def _shared_memory(seen: Seen) -> Iterator[Finding]:
    free, n_gpus = seen.check.facts.shm_bytes, len(seen.check.facts.machine.gpus)
    found = f"{show_bytes(free)} free of {show_bytes(seen.check.shm_total_bytes)}"
    cure = "start the container with --shm-size 8g (Kubernetes: an emptyDir of medium Memory), or empty /dev/shm"
    if free < _MIN_SHM_BYTES and n_gpus > 1:
        yield Finding("/dev/shm", "bad", f"{found}: NCCL between its {n_gpus} GPUs needs more", cure)
    elif free < _LITTLE_SHM_BYTES:
        yield Finding("/dev/shm", "warning", f"{found}: vLLM's ranks talk through it", cure)
    else:
        yield Finding("/dev/shm", "ok", found)


def _limits(seen: Seen) -> Iterator[Finding]:
    limits = seen.check.limits
    low = list(_low(limits, any(one.is_infiniband for one in seen.check.facts.interfaces)))
    if not low:
        yield Finding("ulimits", "ok", f"open files {_shown(limits.n_files)}, processes {_shown(limits.n_processes)}")
    for found, cure in low:
        yield Finding("ulimits", "warning", found, cure)


def _low(limits: Limits, has_infiniband: bool) -> Iterator[tuple[str, str]]:
    if limits.n_files is not None and limits.n_files < _MIN_FILES:
        most = 65536 if limits.n_files_hard is None else min(65536, limits.n_files_hard)
        yield (
            f"open files: {limits.n_files}, vLLM and Ray need some thousands",
            f"ulimit -n {most} before it is started (LimitNOFILE of systemd, --ulimit of a container)",
        )
    if limits.n_processes is not None and limits.n_processes < _MIN_PROCESSES:
        yield (f"processes: {limits.n_processes}, threads count too", "ulimit -u 65536, or the container's pids limit")
    if has_infiniband and limits.locked_bytes is not None and limits.locked_bytes < GIB:
        yield (
            f"locked memory: {show_bytes(limits.locked_bytes)}, InfiniBand pins its buffers",
            "ulimit -l unlimited (LimitMEMLOCK=infinity for the daemon that starts the node)",
        )


def _shown(number: int | None) -> str:
    return "unlimited" if number is None else str(number)


def _spaces(seen: Seen) -> Iterator[Finding]:
    for space in seen.check.spaces:
        found = f"{space.name}: {show_bytes(space.free_bytes)} free at {space.path}"
        if not space.is_writable:
            yield Finding("disk", "warning", f"{space.name}: cannot write {space.path}", "give the user that folder")
        elif space.free_bytes < _MIN_SPACE_BYTES:
            yield Finding("disk", "warning", found, "free space there: an engine compiles and caches in it")
        else:
            yield Finding("disk", "ok", found)


def _gpus(seen: Seen, deployment: Deployment) -> Iterator[Finding]:
    gpus = seen.check.facts.machine.gpus
    if not gpus:
        yield Finding("gpu", "ok", "none")
        return
    free = ", ".join(f"GPU {gpu.index} {show_bytes(gpu.memory_free_bytes)}" for gpu in gpus)
    utilization = deployment.engine.gpu_memory_utilization
    usable = {gpu.index for gpu in usable_gpus(seen.check.facts.machine, utilization)}
    full = [gpu for gpu in gpus if gpu.index not in usable]
    if not full:
        yield Finding("gpu", "ok", f"{len(gpus)} x {gpus[0].name}, free: {free}")
        return
    needed = deployment.hardware.gpus_per_node or 1
    for gpu in full:
        found = (
            f"GPU {gpu.index} has {show_bytes(gpu.memory_free_bytes)} of {show_bytes(gpu.memory_bytes)} free, "
            f"vLLM starts with {utilization:.0%} ({show_bytes(gpu.memory_bytes * utilization)}); {_held(seen, gpu)}"
        )
        cure = "End that process (penstock clean, where it is ours), or lower engine.gpu_memory_utilization."
        yield Finding("gpu", "bad" if len(usable) < needed else "warning", found, cure)


def _held(seen: Seen, gpu: Gpu) -> str:
    holders = [holder for holder in seen.check.holders if holder.gpu == gpu.index]
    if not holders:
        return "held by a process that the driver does not show here (another container, or one that just died)"
    told = [
        f"process {one.pid} ({one.name}, user {one.user or 'not seen from here'}) holds {show_bytes(one.n_bytes)}"
        for one in sorted(holders, key=lambda one: -one.n_bytes)
    ]
    return "; ".join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _driver(seen: Seen) -> Iterator[Finding]:
    check = seen.check
    torch, wanted = check.facts.machine.versions.get("torch"), check.wanted_torch
    if torch is not None and wanted is not None and torch.partition("+")[0] != wanted:
        found = f"torch {torch}, the installed vLLM was made for {wanted}"
        yield Finding(
            "torch", "bad", found, f"pip install torch=={wanted}, or vLLM anew: its compiled parts do not load"
        )
    if not check.facts.machine.gpus:
        return
    if check.torch_cuda is None:
        if torch is not None:
            found = f"torch {torch} was made without CUDA, but the node has GPUs"
            yield Finding("driver", "bad", found, "install the torch (and vLLM) wheel for CUDA")
        return
    major = int(check.torch_cuda.partition(".")[0])
    least, found = (
        _MIN_DRIVER.get(major),
        f"driver {check.driver or 'unknown'}, torch made with CUDA {check.torch_cuda}",
    )
    if check.driver is None or least is None:
        yield Finding("driver", "warning", found, "nvidia-smi there tells the driver; see NVIDIA's release notes")
    elif int(check.driver.partition(".")[0]) < least:
        cure = (
            f"Update the driver to {least} or newer, or install torch and vLLM made with CUDA {_runs_on(check.driver)}."
        )
        yield Finding("driver", "bad", f"{found}, which needs driver {least} or newer", cure)
    else:
        yield Finding("driver", "ok", found)


def _runs_on(driver: str) -> str:
    branch = int(driver.partition(".")[0])
    return str(max((major for major, least in _MIN_DRIVER.items() if least <= branch), default="10 or older"))


def _needs_ray(deployment: Deployment) -> bool:
    executor = deployment.engine.executor
    return executor == "ray" or (executor == "auto" and deployment.hardware.nodes > 1)


def _engine(seen: Seen, deployment: Deployment) -> Iterator[Finding]:
    versions, kind = seen.check.facts.machine.versions, deployment.engine.kind
    is_vllm = kind == "vllm" or (kind == "auto" and (seen.check.facts.machine.gpus or deployment.hardware.nodes > 1))
    if is_vllm and "vllm" not in versions:
        yield Finding("engine", "bad", "vLLM is not installed", "pip install vllm there, for the same Python")
    elif is_vllm:
        yield Finding("engine", "ok", f"vLLM {versions['vllm']}")
    if _needs_ray(deployment) and kind != "fake" and "ray" not in versions:
        yield Finding("engine", "bad", "Ray is not installed", "pip install ray there, or set engine.executor: mp")


def of_weights(seen: Seen, download_bytes: int | None) -> list[Finding]:
    """The model's files on a node: there, whole, room for them, and how fast they come.

    `download_bytes`: what a hub id takes, None where that is not known or the model is none of a hub's.
    """
    weights, found = seen.check.weights, list[Finding]()
    if weights is None:
        return found
    is_of_hub = download_bytes is not None
    if weights.absent and is_of_hub:
        found.append(_download(seen, download_bytes or 0))
    elif weights.absent:
        told = ", ".join(weights.absent[:_SHOWN]) + (" ..." if len(weights.absent) > _SHOWN else "")
        cure = "Put the model's folder at the same path on every node (a shared file system), or give a hub id."
        found.append(Finding("weights", "bad", f"{weights.path}: {told} not there", cure))
    else:
        found.append(Finding("weights", "ok", f"{show_bytes(weights.n_bytes)} in {weights.path}"))
    if weights.reading is not None:
        found.append(_reading(seen))
    return [msgspec.structs.replace(finding, node=seen.name) for finding in found]


def _download(seen: Seen, n_bytes: int) -> Finding:
    weights = seen.check.weights
    assert weights is not None
    left = n_bytes - weights.n_bytes
    if left > weights.free_bytes:
        found = f"{show_bytes(left)} to download, {show_bytes(weights.free_bytes)} free at {weights.path}"
        return Finding("weights", "bad", found, "Free space there, or set cache.weights to a folder on a larger disk.")
    found = f"not there yet: {show_bytes(left)} to download, {show_bytes(weights.free_bytes)} free at {weights.path}"
    return Finding("weights", "warning", found, "`up` downloads it before it starts: the read rate shows after that.")


def _reading(seen: Seen) -> Finding:
    weights = seen.check.weights
    assert weights is not None and weights.reading is not None
    reading = weights.reading
    rate = f"{reading.bytes_per_s / 1e9:.2f} GB/s"
    found = f"{rate} from {reading.path} ({show_bytes(reading.n_bytes)} read {_how(reading.is_direct)}{_cached(seen)})"
    if reading.n_bytes < _TOO_SMALL_BYTES:
        return Finding("read rate", "ok", f"{found}; too little to tell a disk's rate")
    if reading.bytes_per_s < _SLOW_BYTES_PER_S:
        cure = "Copy the weights to a local disk (cache.weights), or engine.args: {load-format: runai_streamer}."
        return Finding("read rate", "warning", found, cure)
    return Finding("read rate", "ok", found)


def _how(is_direct: bool) -> str:
    return "past the page cache" if is_direct else "by way of the page cache"


def _cached(seen: Seen) -> str:
    weights = seen.check.weights
    assert weights is not None and weights.reading is not None
    share = weights.reading.cached_share
    if not share or share < 0.1:
        return ""
    return f"; {share:.0%} of it is in memory already, so the first load may be faster than this"


def _clock(seen: Seen) -> Iterator[Finding]:
    if abs(seen.behind_s) > seen.clock_error_s + _CLOCK_S:
        way = "behind" if seen.behind_s > 0 else "ahead of"
        found = f"{show_seconds(abs(seen.behind_s))} {way} this machine"
        yield Finding("clock", "warning", found, "set it by NTP (timedatectl set-ntp true)")


def _variables(seen: Seen) -> Iterator[Finding]:
    yield from of_environment(seen.check.facts.environment, f"the environment on {seen.name}")


def _addresses(seen: Seen) -> Iterator[Finding]:
    shown = []
    for one in seen.check.facts.interfaces:
        kind = " InfiniBand" if one.is_infiniband else " virtual" if one.is_virtual else ""
        speed = f" {one.speed_mbps / 1000:g} Gb/s" if one.speed_mbps and one.speed_mbps > 0 else ""
        if not one.is_loopback:
            shown.append(f"{one.address} ({one.name}{kind}{speed})")
    cure = "connect it; IPv4 addresses are what vLLM and NCCL are given"
    if shown:
        yield Finding("addresses", "ok", ", ".join(shown))
    else:
        yield Finding("addresses", "warning" if seen.rank == 0 else "bad", "none but loopback", cure)


def _versions(nodes: Sequence[Seen], deployment: Deployment, own_version: str) -> Iterator[Finding]:
    facts = [seen.check.facts for seen in nodes]
    problems = version_problems(facts, is_ray=_needs_ray(deployment))
    for problem in problems:
        yield Finding("versions", "bad", problem.message, problem.hint)
    theirs = facts[0].machine.versions.get("penstock")
    if theirs != own_version:
        found = f"penstock is {own_version} here, {theirs} on {nodes[0].name}"
        yield Finding("versions", "bad", found, "install the same penstock here and on the nodes")
    elif not problems:
        told = ", ".join(f"{package} {version}" for package, version in facts[0].machine.versions.items())
        yield Finding("versions", "ok", f"the same on {_n_nodes(len(nodes))}: {told}")


def _n_nodes(n: int) -> str:
    return "1 node" if n == 1 else f"all {n} nodes"


def _equal_gpus(nodes: Sequence[Seen], deployment: Deployment) -> Iterator[Finding]:
    """A replica takes any of the nodes: one with fewer GPUs, or others, is the one that fails."""
    counts = {seen.name: len(seen.check.facts.machine.gpus) for seen in nodes}
    wanted = deployment.hardware.gpus_per_node
    most = max(counts.values(), default=0)
    needed = wanted if wanted is not None else 1 if deployment.hardware.gpu else most
    cure = "nvidia-smi there: its driver, CUDA_VISIBLE_DEVICES, or what the scheduler gave; or leave the node out"
    for name, count in counts.items():
        if count < needed:
            others = "" if wanted is not None or deployment.hardware.gpu else f", others have {most}"
            said = f"{needed} are needed" if not others else others.removeprefix(", ")
            yield Finding("gpu", "bad", f"shows {count} GPUs, {said}", cure, name)
    kinds = {seen.name: {gpu.name for gpu in seen.check.facts.machine.gpus} for seen in nodes}
    if len({kind for names in kinds.values() for kind in names}) > 1:
        told = "; ".join(f"{name}: {', '.join(sorted(kind)) or 'none'}" for name, kind in kinds.items())
        yield Finding("gpu", "warning", f"of several kinds ({told})", "the slowest decides: use nodes of one kind")


def of_loading(nodes: Sequence[Seen], deployment: Deployment, time_limit_s: tuple[str, float] | None) -> list[Finding]:
    """How long loading takes at best on the slowest node, against the times that the file allows.

    `time_limit_s`: how long a replica may run, with the field that says so.
    """
    times = []
    for seen in nodes:
        weights = seen.check.weights
        if weights is None or weights.reading is None or weights.absent:
            continue
        n_bytes = bytes_per_node(weights.n_bytes, deployment.hardware.nodes)
        times.append((load_time_s(n_bytes, weights.reading.bytes_per_s), n_bytes, seen))
    if not times:
        return []
    took_s, n_bytes, slowest = max(times, key=lambda row: row[0])
    found = f"at best {show_seconds(took_s)}: {show_bytes(n_bytes)} a node, the slowest read is that of {slowest.name}"
    limits = [("engine.start_timeout_s", deployment.engine.start_timeout_s)]
    if time_limit_s is not None:
        limits.append(time_limit_s)
    findings = [
        Finding(
            "loading", "bad", f"{found}; but {name} is {show_seconds(limit_s)}",
            f"Set {name} well above it (starting an engine takes a minute more), or put the weights on a faster disk.",
        )
        for name, limit_s in limits
        if took_s > limit_s
    ]  # fmt: skip
    return findings or [Finding("loading", "ok", found)]


def unreachable(name: str, why: str) -> Finding:
    """A node that could not be asked."""
    said = " ".join(why.split())[-300:] or "no answer"
    return Finding("node", "bad", f"could not be asked: {said}", "Is it on, and does this machine reach it?", name)


def broken(name: str, exit_code: int, err: str) -> Finding:
    """A node whose Python did not run our program."""
    lines = err.strip().splitlines()
    said = lines[-1][:300] if lines else f"exit code {exit_code}"
    cure = "Install the same penstock there, for the Python that the target uses."
    if not re.search(r"No module named '?penstock", said):
        cure = "Run `python -m penstock.node.checks.machine` there to see it whole."
    return Finding("node", "bad", f"penstock did not run there: {said}", cure, name)
