"""Checks before anything is sent: what this version cannot do, the machines, the engine to use; a line of `doctor`."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.deployment import planning
from penstock.engines import Engine, Missing
from penstock.errors import PenstockError, Problem, SpecError, UserError
from penstock.gateway.accounting import store
from penstock.gateway.connections.listener import open_tls
from penstock.hardware import Gpu, Machine, catalog
from penstock.observe import prometheus
from penstock.paths import free_bytes, read_token
from penstock.planner import Plan
from penstock.spec.deployment import Deployment, GatewaySpec, Hardware, Observe
from penstock.spec.gateway import STDERR
from penstock.targets import Target
from penstock.targets.assumed import gpus_of
from penstock.text import MIB, show_bytes

MIN_FREE_BYTES = 64 * MIB
_PRICES_HINT = "It has lines like `h100-sxm: 2.50`: a GPU of the catalogue, and US dollars an hour."
UNREAD = (
    "Set CUDA_VISIBLE_DEVICES there to whole GPUs whose memory nvidia-smi prints (no MIG), or run on the CPU: "
    "--set hardware.gpus_per_node=0"
)


def unsupported(deployment: Deployment, target: Target) -> Iterator[Problem]:
    """Fields that the file may hold but this version, or its target, does not act on."""
    if deployment.gateway.on == "job" and "places-gateway" not in target.capabilities:
        yield Problem("gateway.on", f'"job", but target {target.name} places no gateway', "remove it")
    if deployment.replicas.actuator != "penstock" and "actuators" not in target.capabilities:
        message = f'"{deployment.replicas.actuator}", but on target {target.name} penstock sets the number'
        yield Problem("replicas.actuator", message, "remove it")
    if deployment.cache.weights != deployment.cache.folder and not target.fetches_models:
        message = f'"{deployment.cache.weights}", but target {target.name} takes a folder'
        yield Problem("cache.weights", message, "give the folder where models from a hub are kept")
    if not planning.can_launch(deployment.hardware.gpu):
        message = f'"{deployment.hardware.gpu}": penstock starts engines on NVIDIA GPUs alone'
        hint = "penstock plan sizes it; start its engine yourself and name it in gateway.upstreams"
        yield Problem("hardware.gpu", message, hint)


def refuse_sleepless(engine: Engine, plan: Plan) -> None:
    """Raises UserError when the file lets an engine sleep that cannot."""
    why = engine.why_sleepless(plan) if plan.sleep is not None else None
    if why is not None:
        raise UserError(
            f'cannot let deployment "{plan.deployment}" sleep: {why}',
            hint="Remove engine.sleep (docs/how-to/sleep.md).",
        )


def check_space(folder: Path) -> None:
    """Raises UserError when the folder of run folders has no room for another and its logs."""
    n_free = free_bytes(folder)
    if n_free < MIN_FREE_BYTES:
        raise UserError(
            f'cannot write to "{folder}": {show_bytes(n_free)} of its disk are free',
            detail=f"A deployment needs {show_bytes(MIN_FREE_BYTES)} for its folder and logs.",
            hint="Free some space, or set PENSTOCK_HOME to a folder on a larger disk.",
        )


def prometheus_problems(observe: Observe) -> Iterator[Problem]:
    """What keeps Prometheus from starting next to a controller on this machine, where the file asks for the impossible.

    That it is not installed is none: the deployment serves without it.
    """
    binary, remote = observe.prometheus_binary, observe.remote_write
    if binary is not None and shutil.which(binary) is None:
        yield Problem("observe.prometheus_binary", f'there is no program "{binary}"', prometheus.INSTALL)
    if remote is not None and remote.token_file is not None:
        try:
            read_token(Path(remote.token_file).expanduser(), "remote_write token")
        except UserError as error:
            yield Problem("observe.remote_write.token_file", error.message, error.hint)


def prometheus_warning(observe: Observe) -> str | None:
    if not observe.prometheus or observe.prometheus_binary or shutil.which(prometheus.PROGRAM):
        return None
    return f"observe.prometheus: the program is not installed, so nothing is recorded ({prometheus.INSTALL})"


def gateway_problems(gateway: GatewaySpec) -> list[Problem]:
    """What the gateway will need, on the machine that starts it: files, variables, its store."""
    files = {"tls_cert": gateway.tls_cert, "tls_key": gateway.tls_key}
    problems = []
    for index, upstream in enumerate(gateway.upstreams):
        files[f"upstreams[{index}].key_file"] = upstream.key_file
        if upstream.key_env is not None and not os.environ.get(upstream.key_env):
            problems.append(Problem(f"gateway.upstreams[{index}].key_env", f"{upstream.key_env} is not set"))
    for field, name in files.items():
        if name is not None and not os.access(Path(name).expanduser(), os.R_OK):
            problems.append(Problem(f"gateway.{field}", f'cannot read "{name}"', "check the path"))
    log = gateway.access_log
    if log is not None and log != STDERR:
        path = Path(log).expanduser()
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            problems.append(Problem("gateway.access_log", f'cannot write "{log}"', "make its folder, or use stderr"))
    field = "tls_cert"
    try:
        if gateway.tls_cert and gateway.tls_key and not problems:
            open_tls(*(str(Path(name).expanduser()) for name in (gateway.tls_cert, gateway.tls_key)))
        field = "store"
        if gateway.store and "://" in gateway.store:
            store.check(gateway.store)
    except PenstockError as error:
        problems.append(Problem(f"gateway.{field}", error.message, error.hint))
    return problems


def as_named(deployment: Deployment, machine: Machine, is_rehearsal: bool) -> Machine:
    """The machine, when it has what `hardware` says, else SpecError; without its GPUs where the file says 0 of them.

    A rehearsal on a machine without GPUs gets those of the file, of the catalogue's size and free.
    """
    hardware = deployment.hardware
    n_said, gpus = hardware.n_gpus, machine.gpus
    if is_rehearsal and not gpus and hardware.gpu is not None:
        gpus = gpus_of(hardware.gpu, 1 if n_said is None else n_said, hardware.gpu_ids)
    if machine.unread and not gpus and n_said != 0 and deployment.engine.kind in ("auto", "vllm"):
        message = f"cannot use the GPUs of {machine.host}: it has some, and their memory is not known"
        raise UserError(message, detail="\n".join(machine.unread), hint=UNREAD)
    problems = []
    others = sorted({gpu.name for gpu in gpus if hardware.gpu and not _is_card(gpu, hardware.gpu)})
    if hardware.gpu and n_said != 0 and (others or not gpus):
        present = ", ".join(others) or "no GPU"
        problems.append(Problem("hardware.gpu", f'"{hardware.gpu}", but {machine.host} has {present}', "remove it"))
    if n_said is not None and n_said > len(gpus):
        problems.append(Problem("hardware.gpus_per_node", f"{n_said}, but {machine.host} has {len(gpus)}", "remove it"))
    if problems:
        raise SpecError(f'deployment "{deployment.name}"', problems)
    return msgspec.structs.replace(machine, gpus=() if n_said == 0 else gpus)


def _is_card(gpu: Gpu, name: str) -> bool:
    return gpu.name == name or catalog.gpu_of_machine(gpu.name, gpu.memory_bytes).id == catalog.gpu(name).id


def least(machines: Sequence[Machine]) -> Machine:
    """What every one of the machines has: a replica may get any of them."""
    if not machines:
        hint = "See which of its nodes are up: penstock doctor FILE"
        raise UserError("cannot plan: the target has no machine", hint=hint)
    smallest = min(machines, key=lambda machine: len(machine.gpus))
    return msgspec.structs.replace(
        min(machines, key=lambda machine: machine.memory_free_bytes or 0),
        n_cpus=min(machine.n_cpus for machine in machines),
        gpus=smallest.gpus,
        links=smallest.links,
        unread=smallest.unread,
        versions=machines[0].versions,
    )


def missing_engine(engine: Engine, machine: Machine) -> Missing | None:
    """None when the engine can start on that machine; of this one the engine itself knows more."""
    if not machine.versions or machine.host == socket.gethostname():
        return engine.missing()
    package = engine.package
    if package is None or package in machine.versions:
        return None
    return Missing(f"the package {package} is not installed on {machine.host}", f"pip install {package} there")


def choose_engine(kind: str, has_gpus: bool, forms: Sequence[str]) -> str:
    """The engine for `kind: auto`: vllm on NVIDIA GPUs, else llamacpp, or vllm where the model has no GGUF file."""
    if kind != "auto":
        return kind
    if has_gpus or ("gguf" not in forms and "safetensors" in forms):
        return "vllm"
    return "llamacpp"


def gpu_price(hardware: Hardware, machine: Machine) -> float | None:
    """US dollars for an hour of one of the machine's GPUs; None without GPUs, or where no price is given.

    Reads hardware.price_file. Raises UserError.
    """
    if hardware.price_file is None:
        return hardware.price_per_gpu_hour if machine.gpus else None
    prices = _prices(Path(hardware.price_file).expanduser())
    if not machine.gpus:
        return None
    card = planning.card_of(machine.gpus)
    price = prices.get(card.id)
    if price is None:
        known = "hardware.price_per_gpu_hour" if card.stands_in else f"a line such as `{card.id}: 2.50`"
        raise UserError(
            f'cannot find a price for GPU "{card.id}" in "{hardware.price_file}"',
            detail=f"It has prices for {', '.join(prices) or 'no GPU'}.",
            hint=f"Add {known}.",
        )
    return price


def _prices(path: Path) -> dict[str, float]:
    """Prices by the catalogue's ids. A name that it does not have is refused: nobody would see why it is not found."""
    import yaml

    try:
        raw: Any = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f'cannot read price file "{path}": {why}', hint=_PRICES_HINT) from error
    if not isinstance(raw, dict):
        raise UserError(f'cannot use price file "{path}": it is no list of GPUs and prices', hint=_PRICES_HINT)
    prices: dict[str, float] = {}
    for name, price in raw.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise UserError(f'cannot use price file "{path}": the price of {name} is {price!r}', hint=_PRICES_HINT)
        try:
            prices[catalog.gpu(str(name)).id] = float(price)
        except UserError as error:
            raise UserError(f'cannot use price file "{path}": {error.message}', hint=error.hint) from error
    return prices
