"""Values that many tests start from: model facts, machines, a plan, a run folder. Nothing here runs."""

from __future__ import annotations

from typing import Any

import msgspec
from golden_files import table

from penstock import run_folder as runs
from penstock.deployment import planning
from penstock.hardware import Gpu, Machine
from penstock.models import Facts, ModelFacts, catalog
from penstock.planner import Plan, launch
from penstock.planner.launch import Sized
from penstock.run_folder import Artifact, Desired, Draft, GatewayFile, Run, State
from penstock.spec import reading
from penstock.spec.deployment import Deployment
from penstock.text import GIB
from penstock.wire.announcement import Announcement, GatewayView, Process, ReplicaView

NOW = 1_800_000_000.0

LLAMA_70B, DEMO = msgspec.convert(table("plan/models.yaml"), list[ModelFacts])


def cpu_machine(free_gib: float = 16, n_cpus: int = 8, memory_gib: float = 32) -> Machine:
    return Machine("desk", n_cpus, int(memory_gib * GIB), int(free_gib * GIB))


def gpu_machine(n_gpus: int, gpu_gib: float = 80) -> Machine:
    gpus = tuple(Gpu(i, "NVIDIA H100 80GB HBM3", int(gpu_gib * GIB), int(gpu_gib * GIB)) for i in range(n_gpus))
    return Machine("box", 64, 1024 * GIB, 1000 * GIB, gpus)


def deployment(model: str = "penstock-demo", **fields: Any) -> Deployment:
    return reading.from_mapping({"model": model, **fields})


def sized(wanted: Deployment, machine: Machine, model: str = "llama-3.1-70b", n_replicas: int = 1) -> Sized:
    """What the planner says of a deployment, the catalogue's `model` in it, with vLLM 0.33.0."""
    facts = Facts(wanted.model, catalog.model_config(model), "the catalogue")
    return planning.size(wanted, facts, machine, "0.33.0", n_replicas)


def demo_plan(engine: str = "llamacpp", **changes: Any) -> Plan:
    made = launch.make(deployment(), DEMO, cpu_machine(), engine, "1.0", 1)
    return msgspec.structs.replace(made, **changes)


def gpu_plan() -> Plan:
    """Llama-3.1-8B on one H100 with vLLM 0.33.0."""
    wanted, box = deployment("meta-llama/Llama-3.1-8B"), gpu_machine(1)
    return launch.make_on_gpus(wanted, LLAMA_70B, box, "0.33.0", 1, sized(wanted, box, "llama-3.1-8b"))


def draft(wanted: Deployment | None = None) -> Draft:
    return Draft(
        wanted or deployment(),
        demo_plan(),
        Artifact(("python", "-m", "penstock.node"), {"launch.json": "{}\n"}),
        GatewayFile("127.0.0.1:8000", "127.0.0.1:8001"),
        "secret-token",
    )


def run_folder(wanted: Deployment | None = None, now: float = NOW) -> Run:
    """A run folder under PENSTOCK_HOME, as `up` writes it before anything is started."""
    return runs.create(draft(wanted), now)


def end(run: Run) -> None:
    """As the end of `down` leaves it."""
    run.write_desired(Desired("down", 0))
    run.write_state(State(NOW, "down", 0))


def told(replica: str, state: Any = "ready", **facts: Any) -> Announcement:
    facts.setdefault("processes", (Process(100 + int(replica), 1.0, "engine"),))
    return Announcement(replica=replica, model="penstock-demo", state=state, lease_s=6.0, **facts)


def view(*rows: Announcement | ReplicaView, requests_total: int = 0) -> GatewayView:
    """The gateway's table: an announcement stands for a living row without requests."""
    whole = tuple(row if isinstance(row, ReplicaView) else ReplicaView(row, 0.1, True, False, 0) for row in rows)
    return GatewayView(whole, sum(row.in_flight for row in whole), 0, requests_total)
