"""What a replica asks of Ray's nodes, what is short when it waits, and where it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.hardware import Machine, catalog
from penstock.log_lines import last_words
from penstock.planner import Plan
from penstock.spec.deployment import Deployment
from penstock.targets import Placement
from penstock.targets.ray.jobs_api import Job, RayNode

WAITS = "Ray waits for free machines"
LOST = "Ray lost a node of it, and waits for another"
_KIND = "accelerator_type:"


def bundle(plan: Plan) -> dict[str, float]:
    """What Ray reserves on each node; the driver lowers CPU to what the largest node has."""
    if plan.device == "cuda":
        return {"GPU": float(plan.ranks_each), "CPU": float(plan.ranks_each + 1)}
    return {"CPU": float(plan.n_threads + 1)}


def gpu_kind(deployment: Deployment, nodes: Sequence[RayNode]) -> dict[str, float]:
    """What to reserve so that the GPUs are those of `hardware.gpu`; nothing where all nodes are alike.
    https://docs.ray.io/en/latest/ray-core/scheduling/accelerators.html: a node with H100s has "accelerator_type:H100".
    """
    if deployment.hardware.gpu is None:
        return {}
    card = catalog.gpu(deployment.hardware.gpu)
    kinds = {name for node in nodes for name in node.resources if name.startswith(_KIND)}
    named = [name for name in sorted(kinds) if card in catalog.gpus_named(name.removeprefix(_KIND))]
    return {named[0]: 0.001} if named and len(kinds) > 1 else {}


def as_ray_gives(machine: Machine, n_gpus: int) -> Machine:
    """A machine with as many GPUs as Ray gives out there. Those that others hold now are free when ours are placed."""
    gpus = tuple(msgspec.structs.replace(gpu, memory_free_bytes=gpu.memory_bytes) for gpu in machine.gpus[:n_gpus])
    return msgspec.structs.replace(machine, gpus=gpus)


def in_words(wanted: Mapping[str, Any]) -> str:
    """`wanted` is {"n_nodes", "bundle"}."""
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in wanted["bundle"].items())
    return f"{wanted['n_nodes']} node(s) with {amounts} free on each"


def shortage(
    wanted: Mapping[str, Any], nodes: Sequence[RayNode], free: Mapping[str, Mapping[str, float]], is_lost: bool = False
) -> str:
    """Why a replica, or its node that `is_lost`, is not placed: what it needs on each node, and what is free there."""
    most_cpus = max((node.resources.get("CPU", 0.0) for node in nodes), default=1.0)
    needed = {name: min(n, most_cpus) if name == "CPU" else n for name, n in wanted["bundle"].items()}
    lacks, n_fit = [], 0
    for node in nodes:
        here = free.get(node.id, node.resources)
        short = [name for name, amount in needed.items() if here.get(name, 0.0) < amount]
        n_fit += not short
        lacks += [
            f"{node.address} has {here.get(name, 0.0):g} of {node.resources.get(name, 0):g}" for name in short[:1]
        ]
    needs = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    what = "a node" if is_lost else f"{wanted['n_nodes']} node(s)"
    return f"needs {what} with {needs} free, {n_fit} of {len(nodes)} have it: {', '.join(lacks[:8])}"


class ClusterView(msgspec.Struct, frozen=True):
    """What a cluster reported, and when. `away`: why this is not new. `nodes` and `free`: asked while a group waits."""

    at: float
    jobs: dict[str, Job]
    groups: dict[str, str]
    nodes: tuple[RayNode, ...] = ()
    free: dict[str, dict[str, float]] = {}
    away: str | None = None


def placement_of(view: ClusterView, job: str, is_ending: bool) -> Placement:
    """Where a replica is, by its job and that job's placement group. Pure."""
    row, group = view.jobs.get(job), view.groups.get(job)
    if row is None:
        if view.away is not None:
            return Placement("placed", view.away)
        return Placement("gone", f"Ray does not know its job {job}")
    if row.state == "PENDING":
        return Placement("queued", "Ray prepares its job")
    if row.state == "STOPPED":
        return Placement("gone", "its job was stopped", is_final=not is_ending)
    if row.state != "RUNNING":
        return Placement("gone", f"its job has ended: {last_word(row)}")
    if group == "CREATED":
        return Placement("placed", view.away)
    if group == "RESCHEDULING":
        return Placement("broken", LOST, is_repaired_by_target=True)
    if group == "REMOVED":
        return Placement("placed", "its nodes have ended")
    return Placement("queued", "its driver starts" if group is None else WAITS)


def last_word(job: Job) -> str:
    return last_words(job.message.splitlines(), signs=("Error", "penstock: ")) or job.state.lower()
