"""Checks before anything is sent: what this version cannot do, the port, the engine to use; `doctor`'s list."""

from __future__ import annotations

import errno
import math
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import psutil

from penstock import catalog, engines, runs
from penstock.errors import Problem, SpecError, UserError
from penstock.machine import gpus, this_machine
from penstock.plan import Gpu, Machine
from penstock.spec import Deployment
from penstock.units import GIB, MIB, show_bytes

_MIN_DISK_BYTES = 2 * GIB
_MIN_MEMORY_BYTES = GIB


def unsupported(deployment: Deployment) -> list[Problem]:
    """Fields that the file may hold but this version does not act on: refused, not ignored."""
    found = []
    if deployment.ui:
        found.append(Problem("ui", "this version has no browser chat yet", "use: penstock chat"))
    for field in ("prometheus", "grafana"):
        if getattr(deployment.observe, field):
            hint = "scrape the gateway's /metrics yourself"
            found.append(Problem(f"observe.{field}", "this version does not set it up yet", hint))
    if deployment.engine.executor == "ray":
        found.append(
            Problem("engine.executor", "ray is not available on one machine in this version", "use mp or auto")
        )
    if deployment.replicas.max > max(1, deployment.replicas.min):
        hint = "set replicas to a number, and change it with `penstock scale`"
        found.append(Problem("replicas.max", "this version does not scale by itself yet", hint))
    return found


def as_named(deployment: Deployment, machine: Machine, is_rehearsal: bool) -> Machine:
    """The machine, when it has what `hardware` says, else SpecError; without its GPUs where the file says 0 of them.

    A rehearsal on a machine without GPUs gets those of the file, of the catalogue's size and free.
    """
    hardware = deployment.hardware
    n_said, gpus = hardware.gpus_per_node, machine.gpus
    if is_rehearsal and not gpus and hardware.gpu is not None:
        card = catalog.gpu(hardware.gpu)
        n_bytes = (card.memory.nvidia_smi_mib or math.ceil(card.memory.torch_total_gib * 1024)) * MIB
        name = card.names[0] if card.names else card.id
        gpus = tuple(Gpu(index, name, n_bytes, n_bytes) for index in range(1 if n_said is None else n_said))
    problems = []
    others = sorted({gpu.name for gpu in gpus if hardware.gpu and not _is_card(gpu, hardware.gpu)})
    if hardware.gpu and n_said != 0 and (others or not gpus):
        found = ", ".join(others) or "no GPU"
        problems.append(Problem("hardware.gpu", f'"{hardware.gpu}", but {machine.host} has {found}', "remove it"))
    if n_said is not None and n_said > len(gpus):
        problems.append(Problem("hardware.gpus_per_node", f"{n_said}, but {machine.host} has {len(gpus)}", "remove it"))
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)
    return msgspec.structs.replace(machine, gpus=() if n_said == 0 else gpus)


def _is_card(gpu: Gpu, name: str) -> bool:
    """Whether a driver's GPU is the card of that name, in the driver's or the catalogue's words."""
    return gpu.name == name or catalog.gpu_of_machine(gpu.name, gpu.memory_bytes).id == catalog.gpu(name).id


def choose_engine(kind: str, has_gpus: bool, forms: Sequence[str]) -> str:
    """The engine for `kind: auto`: vllm on NVIDIA GPUs, else llamacpp, or vllm where the model has no GGUF file."""
    if kind != "auto":
        return kind
    if has_gpus or ("gguf" not in forms and "safetensors" in forms):
        return "vllm"
    return "llamacpp"


def check_port(host: str, port: int) -> None:
    """Nothing when the port of that host can be listened on; 0 is any free one.

    Raises UserError that names who holds the port, or the host when it is none of this machine.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, ValueError) as exc:  # a host that is no name at all is a ValueError
        message = f"cannot listen on {host}:{port}: {(getattr(exc, 'strerror', None) or str(exc)).lower()}"
        if not isinstance(exc, OSError) or isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
            hint = "Set gateway.host to an address of this machine: 127.0.0.1, or 0.0.0.0 for all it has."
            raise UserError(message, hint=hint) from exc
        raise UserError(
            message,
            detail=_holder(port),
            hint="End that process, or choose another port: --set gateway.port=PORT (0 takes any free one).",
        ) from exc


def _holder(port: int) -> str | None:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                command = " ".join(psutil.Process(connection.pid).cmdline())[:120]
                return f"Process {connection.pid} listens there: {command}"
    except psutil.Error:
        pass
    return None


class Finding(msgspec.Struct, frozen=True):
    """One line of `doctor`: a check, how it went, what was found, and the cure."""

    check: str
    state: Literal["ok", "warning", "bad"]
    found: str
    cure: str | None = None


def doctor(deployment: Deployment | None) -> list[Finding]:
    """Every check on this machine, all of them also after a bad one. Changes nothing."""
    checks: list[Callable[[], Finding]] = [_python, _memory, _disk, _shared_memory, _open_files, _gpu]
    findings = [check() for check in checks]
    findings += [_engine(name) for name in ("llamacpp", "vllm")]
    findings.append(_port(deployment))
    return findings


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
    folder = runs.home() / "runs"
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
    try:
        check_port(host, port)
    except UserError as exc:
        return Finding("port", "warning", exc.message + (f" ({exc.detail})" if exc.detail else ""), exc.hint)
    return Finding("port", "ok", f"{host}:{port} is free")
