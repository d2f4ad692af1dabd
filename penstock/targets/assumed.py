"""Machines that could not be asked, as the deployment file alone describes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.engines.vllm.images import versions_of
from penstock.errors import Problem, SpecError
from penstock.hardware import Gpu, Machine, catalog
from penstock.spec.deployment import Deployment
from penstock.text import MIB

_CPUS = 64


def gpus_of(card: str | None, n_gpus: int, ids: Sequence[int] | None = None) -> tuple[Gpu, ...]:
    """So many free GPUs of the catalogue's card, as its driver reports them; without a name their memory is 0."""
    name, n_bytes = "GPU", 0
    if card is not None:
        known = catalog.gpu(card)
        name = known.names[0] if known.names else known.id
        n_bytes = (known.memory.nvidia_smi_mib or math.ceil(known.memory.torch_total_gib * 1024)) * MIB
    return tuple(Gpu(index, name, n_bytes, n_bytes) for index in (ids or range(n_gpus))[:n_gpus])


def machines_of_file(
    deployment: Deployment,
    reason: str,
    names: Sequence[str] = (),
    n_gpus: int | None = None,
    n_cpus: int | None = None,
    memory_bytes: int | None = None,
) -> list[Machine]:
    """The machines of a replica, or those of these names, as the file describes them, where they cannot be asked for
    that reason. `n_gpus`, `n_cpus` and `memory_bytes` of each: where the target's block has them. Pure.

    Raises SpecError for GPUs without a name, since nothing tells how much memory they have.
    """
    card, n_said = deployment.hardware.gpu, deployment.hardware.n_gpus if n_gpus is None else n_gpus
    if card is None and n_said and deployment.engine.kind in ("auto", "vllm"):
        hint = "example: gpu: h100-sxm; `penstock plan --list` shows the names"
        message = f"is missing, and nothing else tells the memory of the GPUs: {reason}"
        raise SpecError(f'deployment "{deployment.name}"', [Problem("hardware.gpu", message, hint)])
    gpus = gpus_of(card, n_said if n_said is not None else 0 if card is None else 1, deployment.hardware.gpu_ids)
    versions = versions_of(deployment)
    return [
        Machine(name, n_cpus or _CPUS, memory_bytes, memory_bytes, gpus, versions=versions, assumed=reason)
        for name in names or [f"node-{rank + 1}" for rank in range(deployment.hardware.nodes)]
    ]
