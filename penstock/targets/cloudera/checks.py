"""Why a deployment could not be placed in a workbench, and what its pods would be. Asks; changes nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.engines.vllm.images import versions_of
from penstock.errors import PenstockError, Problem, nearest
from penstock.hardware import Gpu, Machine, catalog
from penstock.models import fetch, sources
from penstock.spec.deployment import Deployment
from penstock.targets.assumed import gpus_of, machines_of_file
from penstock.targets.cloudera import names, session, words
from penstock.targets.cloudera.api import Object, Workbench
from penstock.targets.cloudera.findings import LEAST_SHARED_MEMORY_MB
from penstock.targets.cloudera.names import block_of
from penstock.targets.cloudera.workloads import Choices
from penstock.text import GIB
from penstock.wire.answers import HttpError

_OLDEST_PYTHON = (3, 11)
_RAY_SHARED_MEMORY_MB = 512
_RANK_CPUS, _RANK_BYTES = 4, 24 * GIB
_MOST_CPUS, _MOST_BYTES = 64, 512 * GIB  # of a pod whose label does not say


def file_problems(deployment: Deployment) -> list[Problem]:
    """What is wrong with the file alone."""
    return list(_file_problems(deployment))


def _file_problems(deployment: Deployment) -> Iterator[Problem]:
    block = block_of(deployment)
    if block.workbench is None and not session.is_in_pod():
        yield Problem("cloudera.workbench", "is not set", "the URL: https://ml-1234abcd-5678.site.example")
    if block.workbench is not None:
        parts = urlsplit(block.workbench)
        if parts.scheme not in ("https", "http") or not parts.hostname or parts.path.strip("/"):
            message = f'"{block.workbench}" is no URL of a workbench'
            yield Problem("cloudera.workbench", message, "https://HOST, no path")
    if block.project is None and not session.is_in_pod():
        yield Problem("cloudera.project", "is not set", "the name of a project in which you may run jobs")
    if block.public and deployment.gateway.auth == "none":
        hint = "remove it; clients then need a key of the gateway"
        yield Problem("gateway.auth", '"none", and with cloudera.public everyone could use the engines', hint)
    for field in ("cpu", "memory_gb", "gateway_cpu", "gateway_memory_gb", "shared_memory_mb"):
        value = getattr(block, field)
        if value is not None and value <= 0:
            yield Problem(f"cloudera.{field}", f"{value:g} is not above 0")
    if deployment.gateway.tls_cert is not None:
        yield Problem("gateway.tls_cert", "the workbench ends TLS in front of applications", "remove it")


def examine(workbench: Workbench, deployment: Deployment) -> tuple[list[Problem], Choices]:
    """All problems that the workbench knows of, and what it has where the file leaves it open."""
    problems: list[Problem] = []
    choices = Choices()
    with _noted(problems):
        found, choices = _gpus(workbench, deployment)
        problems += found
    with _noted(problems):
        found, runtime = _runtime(workbench.runtimes(), deployment, needs_gpu=choices.gpu_label is not None)
        problems += found
        choices = msgspec.structs.replace(
            choices, runtime=runtime, notes=_notes(workbench, deployment, choices, runtime)
        )
    with _noted(problems):
        problems += _bodies(workbench, deployment)
    with _noted(problems):
        project = workbench.project()
        problems += [*_project(project, deployment), *_ray_memory(project, deployment)]
        unknown = tuple(_unknown(workbench, deployment, project))
        choices = msgspec.structs.replace(choices, notes=(*choices.notes, *unknown))
    with _noted(problems):
        problems += _weights(workbench, deployment)
    with _noted(problems):
        problems += _rights(workbench, deployment)
    return problems, choices


@contextlib.contextmanager
def _noted(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except HttpError as exc:
        hint = "ask an administrator of the workbench, or the project's owner" if exc.status == 403 else exc.hint
        problems.append(Problem("target", exc.message, hint))
    except PenstockError as exc:
        problems.append(Problem("target", exc.message, exc.hint))


# ---- what the pods get -----------------------------------------------------------------------------------------------


def _gpus(workbench: Workbench, deployment: Deployment) -> tuple[list[Problem], Choices]:
    """The label that the pods ask for: that of the file, or the only one."""
    wanted, hardware = block_of(deployment).gpu_type, deployment.hardware
    is_asked = bool(hardware.gpu or hardware.gpus_per_node or wanted) or deployment.engine.kind == "vllm"
    if hardware.gpus_per_node == 0 or not is_asked:
        return [], Choices(most_gpus=0)
    rows = {str(row.get("label_value")): row for row in workbench.gpu_labels()}
    if not rows:
        return [Problem("cloudera.gpu_type", f"{workbench.url} has no GPUs", "hardware.gpus_per_node: 0")], Choices()
    if wanted is not None and wanted not in rows:
        close = nearest(wanted, list(rows))
        hint = f'did you mean "{close}"?' if close else f"it has: {', '.join(sorted(rows))}"
        return [Problem("cloudera.gpu_type", f'{workbench.url} has no GPU label "{wanted}"', hint)], Choices()
    named = [label for label in rows if hardware.gpu is None or _is_card(label, hardware.gpu)]
    if wanted is None and not named:
        hint = f"it has: {', '.join(sorted(rows))}"
        return [Problem("hardware.gpu", f'{workbench.url} has no GPU label for "{hardware.gpu}"', hint)], Choices()
    if wanted is None and len(named) != 1:
        hint = f"one of: {', '.join(sorted(rows))}"
        return [Problem("cloudera.gpu_type", f"{workbench.url} has {len(rows)} kinds of GPU", hint)], Choices()
    label = wanted or named[0]
    row, most = rows[label], _number(rows[label].get("max_gpu_per_workload"))
    choices = _choices_of(label, row, most, hardware.gpu or label)
    return list(_gpu_problems(workbench, deployment, choices.gpu, row, most)), choices


def _gpu_problems(workbench: Workbench, deployment: Deployment, gpu: Gpu, row: Object, most: int) -> Iterator[Problem]:
    hardware, label = deployment.hardware, row.get("label_value")
    if not gpu.memory_bytes:
        message = f'is missing: nothing tells the memory of a GPU of label "{label}"'
        yield Problem("hardware.gpu", message, "example: gpu: l4; `penstock plan --list` shows the names")
    each = hardware.gpus_per_node or 1
    if row.get("availability") is False:
        yield Problem("cloudera.gpu_type", f'GPUs of label "{label}" are not available in the workbench now')
    if most == 0:
        yield Problem("hardware.gpus_per_node", "the site lets no workload have a GPU", "Site Administration > Runtime")
    elif each > most:
        hint = f"gpus_per_node: {most}, and more nodes"
        yield Problem("hardware.gpus_per_node", f"{each}, but a workload gets at most {most} of {label}", hint)
    n_needed, n_there = each * hardware.nodes * deployment.replicas.first, _number(row.get("max_gpu_count"))
    if 0 < n_there < n_needed:
        yield Problem("hardware.nodes", f"needs {n_needed} GPUs of {label}, the workbench has {n_there}")
    quota = next((q for q in workbench.gpu_quotas() if str(q.get("accelerator_id")) == str(row.get("id"))), None)
    if quota is not None and (allowed := _number(quota.get("gpu_quota"))) < n_needed:
        hint = "ask an administrator: Site Administration > Quotas"
        yield Problem("hardware.nodes", f"needs {n_needed} GPUs of {label}, your quota is {allowed}", hint)


def _choices_of(label: str, row: Object, most: int, card: str) -> Choices:
    """`label` is one of NVIDIA's device plugin ("NVIDIA-L4", "NVIDIA-A100-SXM4-80GB"), `card` a name for it."""
    cards, told_gib = catalog.gpus_named(card), float(row.get("gpu_memory") or 0.0)
    gpu = Gpu(0, label.replace("-", " "), int(told_gib * GIB), int(told_gib * GIB))
    gpu = gpus_of(cards[0].id, 1)[0] if len(cards) == 1 else gpu
    return Choices(gpu_label=str(row["id"]), gpu=gpu, most_gpus=most)


def _is_card(label: str, wanted: str) -> bool:
    return catalog.gpu(wanted) in catalog.gpus_named(label)


def machine(deployment: Deployment, choices: Choices) -> Machine:
    """A pod of a node: with as many GPUs as the site lets a workload have, or as the file says."""
    block, hardware = block_of(deployment), deployment.hardware
    n_gpus = min(choices.most_gpus, hardware.gpus_per_node or choices.most_gpus)
    cards = tuple(msgspec.structs.replace(choices.gpu, index=index) for index in range(n_gpus))
    n_cpus = int(block.cpu or (_RANK_CPUS * n_gpus or _MOST_CPUS))
    n_bytes = int(block.memory_gb * GIB) if block.memory_gb else (_RANK_BYTES * n_gpus or _MOST_BYTES)
    host = f"a pod of {urlsplit(block.workbench or '').hostname or 'the workbench'}"
    return Machine(host, max(1, n_cpus), n_bytes, n_bytes, cards, versions=versions_of(deployment))


def of_file(deployment: Deployment, reason: str) -> list[Machine]:
    """The pods of a replica's nodes as the file describes them, which for that reason are not known."""
    block = block_of(deployment)
    n_cpus, n_bytes = int(block.cpu or 0), int(block.memory_gb * GIB) if block.memory_gb else None
    return machines_of_file(deployment, reason, n_cpus=n_cpus, memory_bytes=n_bytes)


# ---- runtime, project, rights ----------------------------------------------------------------------------------------


def _runtime(rows: Sequence[Object], deployment: Deployment, needs_gpu: bool) -> tuple[list[Problem], str]:
    """The file's runtime, or the newest that fits: with CUDA where GPUs are wanted and it is there."""
    wanted, field = block_of(deployment).runtime, "cloudera.runtime"
    by_image = {str(row.get("image_identifier")): row for row in rows}
    if wanted is not None:
        row = by_image.get(wanted)
        if row is None:
            fitting = [image for image, other in by_image.items() if _fits(other)]
            hint = f"it has: {', '.join(sorted(fitting)[:3])}" if fitting else "an administrator can add one"
            return [Problem(field, f'the workbench has no runtime "{wanted}"', hint)], wanted
        problems = []
        if _upper(row, "status") == "DISABLED":
            problems.append(Problem(field, f'"{wanted}" is disabled in the workbench'))
        if not _has_python(row):
            hint = f"one with Python {'.'.join(map(str, _OLDEST_PYTHON))} or later"
            problems.append(Problem(field, f'"{wanted}" has {row.get("kernel") or "no Python"}', hint))
        return problems, wanted
    fitting_rows = [row for row in rows if _fits(row)]
    if not fitting_rows:
        hint = "ask an administrator for one: Runtime Catalog > Add Runtime"
        return [Problem(field, "the workbench has no enabled runtime with Python 3.11 or later", hint)], ""
    best = max(fitting_rows, key=lambda row: (needs_gpu and _has_cuda(row), _python(row) <= (3, 12), _version(row)))
    return [], str(best["image_identifier"])


def _notes(workbench: Workbench, deployment: Deployment, choices: Choices, runtime: str) -> tuple[str, ...]:
    rows = [row for row in workbench.runtimes() if row.get("image_identifier") == runtime]
    notes = ["the workbench is asked over plain http: its API key can be read on the way"] * workbench.is_plain
    limits = session.time_limits()
    notes += [limits] if limits is not None else []
    if choices.gpu_label is not None and rows and not _has_cuda(rows[0]):
        edition = rows[0].get("edition") or "no"
        notes.append(
            f"runtime of the {edition} edition: CUDA's libraries come with vLLM's wheels, the driver with the node"
        )
    if block_of(deployment).nodes == "workers":
        notes.append("nodes: workers: they end with the application, so its restart loads every model again")
        if rows and "PBJ" not in f"{rows[0].get('editor')} {runtime}".upper():
            notes.append(
                "only a PBJ runtime is known to have cml.workers_v1, by which the application launches workers"
            )
        if choices.gpu_label is not None:
            notes.append(
                "the API does not tell whether workers take a GPU label; older workbenches refuse it at launch"
            )
    return tuple(notes)


def _upper(row: Object, field: str) -> str:
    return str(row.get(field) or "").upper()


def _fits(row: Object) -> bool:
    return _has_python(row) and _upper(row, "status") in ("", "ENABLED")


def _has_python(row: Object) -> bool:
    return _python(row) >= _OLDEST_PYTHON


def _python(row: Object) -> tuple[int, ...]:
    match = re.search(r"python *(\d+)\.(\d+)", str(row.get("kernel") or ""), re.IGNORECASE)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _has_cuda(row: Object) -> bool:
    return "gpu" in str(row.get("edition") or "").lower() or "cuda" in str(row.get("edition") or "").lower()


def _version(row: Object) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(row.get("full_version") or ""))))


def _project(row: Object, deployment: Deployment) -> Iterator[Problem]:
    """/dev/shm: ranks of one pod talk over it."""
    limit_mb = _shared_memory_mb(row)
    wanted_mb = LEAST_SHARED_MEMORY_MB
    if limit_mb is not None and limit_mb < wanted_mb and _needs_shared_memory(deployment):
        why = f"the project's pods have {limit_mb} MB of /dev/shm, and several GPUs of a pod need {wanted_mb} MB"
        hint = f"set it to {wanted_mb}, and `up` raises the project's limit, or do so under Project Settings > Advanced"
        yield Problem("cloudera.shared_memory_mb", why, hint)


def _needs_shared_memory(deployment: Deployment) -> bool:
    return (deployment.hardware.gpus_per_node or 1) > 1 and block_of(deployment).shared_memory_mb is None


def _shared_memory_mb(row: Object) -> int | None:
    """The project's limit; None where the workbench does not tell it."""
    return _number(row.get("shared_memory_limit")) or None


def _weights(workbench: Workbench, deployment: Deployment) -> Iterator[Problem]:
    """Whether the model's files fit into the project, which only its own pods can see."""
    if not sources.is_remote(deployment.model) or not session.is_in_project(workbench):
        return
    try:
        listing = sources.resolve(sources.parse(deployment.model), deployment.cache.allow_pickle)
    except PenstockError:
        return  # planning says why
    cache = deployment.cache.weights
    try:
        fetch.prepare(listing, cache=Path(cache).expanduser() if cache else None)
    except PenstockError as exc:
        yield Problem("model", f"{exc.message}: {exc.detail}", exc.hint)


def _unknown(workbench: Workbench, deployment: Deployment, project: Object) -> Iterator[str]:
    """What `check` cannot learn, and does not guess."""
    how = "`penstock doctor FILE` measures it"
    if _shared_memory_mb(project) is None and _needs_shared_memory(deployment):
        yield f"not known: /dev/shm of the project's pods; several GPUs need {LEAST_SHARED_MEMORY_MB} MB; {how}"
    if sources.is_remote(deployment.model) and not session.is_in_project(workbench):
        yield f"not known: free space of the project's files for the weights, which the API does not tell; {how}"


def _ray_memory(row: Object, deployment: Deployment) -> Iterator[Problem]:
    """vLLM's ranks on Ray have queues of a fixed size, also where each pod has one: 240 MiB, and 160 MiB on the first
    node (vLLM 0.32: "Insufficient space in /dev/shm for shared-memory allocation: 240 MiB required")."""
    engine, wanted_mb = deployment.engine, block_of(deployment).shared_memory_mb
    if engine.executor != "ray" or engine.kind not in ("auto", "vllm"):
        return
    limit_mb = max(_shared_memory_mb(row) or 64, wanted_mb or 0)
    if limit_mb < _RAY_SHARED_MEMORY_MB:
        words_ = f"pods have {limit_mb} MB of /dev/shm, and vLLM on Ray needs {_RAY_SHARED_MEMORY_MB} MB"
        hint = f"set it to {_RAY_SHARED_MEMORY_MB}, and `up` raises the project's limit, or use engine.executor: mp"
        yield Problem("cloudera.shared_memory_mb", words_, hint)


def raise_shared_memory(workbench: Workbench, deployment: Deployment) -> None:
    """As the file says. Pods that run already keep what they have."""
    wanted_mb = block_of(deployment).shared_memory_mb
    if wanted_mb is not None and (_shared_memory_mb(workbench.project()) or 0) < wanted_mb:
        workbench.change_project(shared_memory_limit=wanted_mb)


def _bodies(workbench: Workbench, deployment: Deployment) -> Iterator[Problem]:
    """What this version of the API lacks of what `up` would send."""
    judge, project = workbench.judge(), f"/projects/{workbench.project_id}"
    for path in (f"{project}/applications", f"{project}/jobs"):
        for field in ("script", "cpu", "memory", "runtime_identifier", "environment"):
            if not judge.takes("POST", path, field):
                yield Problem("target", f"this version of the workbench takes no {field} in POST {path}")
    knows_labels = judge.takes("POST", f"{project}/jobs", "accelerator_label_id")
    if block_of(deployment).gpu_type is not None and not knows_labels:
        yield Problem("cloudera.gpu_type", "this version of the workbench knows no GPU labels", "remove it")


def _rights(workbench: Workbench, deployment: Deployment) -> Iterator[Problem]:
    """Whether we may see what we would create, and whether the subdomain is free."""
    workbench.jobs()
    parts = ("", "ui") if deployment.chat_page is not None else ("",)
    domains = {names.subdomain(deployment.name, part) for part in parts}
    for row in workbench.applications():
        is_ours, domain = names.is_of(str(row.get("name")), deployment.name), row.get("subdomain")
        if domain in domains and not is_ours and words.life(row) != "gone":
            why = f'the application "{row.get("name")}" has the subdomain {domain}'
            yield Problem("name", why, "give another name")


def _number(value: object) -> int:
    """A number, which is text where it has 64 bits."""
    text = str(value if value is not None else 0)
    return int(float(text)) if re.fullmatch(r"-?\d+(\.\d+)?", text) else 0
