"""What is sent to the workbench: the bodies of applications and jobs, and the script that all pods run. Pure."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

import msgspec

from penstock.engines import load as load_engine
from penstock.hardware import Gpu
from penstock.models import ModelFacts, hub, sources
from penstock.planner import Plan
from penstock.run_folder import Artifact, Launch
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets.cloudera import amp, names
from penstock.targets.cloudera.names import (
    APPLICATION,
    NODE,
    PAGE,
    RANK,
    REPLICA,
    SCRIPT,
    WEIGHTS,
    WEIGHTS_PART,
    block_of,
)
from penstock.targets.code_archive import CodeArchive, code_archive
from penstock.text import GIB

# As a pod of Kubernetes (targets/kubernetes/replicas.py): a rank of vLLM on a GPU has 4 CPUs, 16 GiB for libraries,
# CUDA's context and pinned buffers; a node 8 GiB once.
_CPUS_PER_RANK, _RANK_BYTES, _NODE_BYTES, _CPU_SPARE_BYTES = 4, 16 * GIB, 8 * GIB, GIB
# /dev/shm of a project that nobody changed. vLLM's queue has ten parts of VLLM_MQ_MAX_CHUNK_BYTES_MB, 16 by default:
# "Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required" (vLLM 0.32).
_SHARED_MEMORY_MB, _SHARED_MEMORY_SPARE_MB = 64, 24
_QUEUE_PARTS, _QUEUE_PART_MB = 10, 16
_PAGE_CPU, _PAGE_MEMORY_GB = 1.0, 2.0
_FETCH_CPU, _FETCH_MEMORY_GB = 2.0, 4.0  # eight files at once, and their hashes
_HUB_CACHE = f"{names.PROJECT_FOLDER}/.cache/huggingface/hub"
# The longest that a workbench allows, in minutes; a site may allow less, which the pod then reads of its own variable.
# https://docs.cloudera.com/machine-learning/cloud/engines/topics/ml-environment-variables-engines.html
_LONGEST_MINUTES = "35000"
_REQUIREMENTS = ("msgspec>=0.19,<1", "psutil>=6,<8", "pyyaml>=6.0.1,<7", "uvloop>=0.21,<1")
_PAGE_REQUIREMENT, _RAY_REQUIREMENT = "gradio>=6.20,<7", "ray[default]>=2.52,<3"


class Choices(msgspec.Struct, frozen=True):
    """What `check` found in the workbench, where the file leaves it open. `most_gpus`: of one pod; `notes`: what is
    legal and may still surprise."""

    runtime: str = ""
    gpu_label: str | None = None
    gpu: Gpu = Gpu(0, "GPU", 0, 0)
    most_gpus: int = 1
    notes: tuple[str, ...] = ()


def artifact(launch: Launch, deployment: Deployment, choices: Choices) -> Artifact:
    """All that `up` sends, but for the token and penstock's code."""
    there = in_pods(launch, deployment)
    files = {
        "launch.json": _json(msgspec.to_builtins(there)),
        SCRIPT: script(deployment, there.plan),
        APPLICATION: _json(application(deployment, choices)),
        NODE: _json(node(deployment, there.plan, choices)),
    }
    if deployment.chat_page is not None:
        files[PAGE] = _json(page(deployment, choices))
    if comes_by_job(there.plan):
        files[WEIGHTS] = _json(weights(deployment, choices))
    return Artifact(("POST", "/api/v2/projects/PROJECT/jobs", NODE), files | amp.files(deployment))


def in_pods(launch: Launch, deployment: Deployment) -> Launch:
    """A launch with the paths that hold in the pods. Weights are not copied to a pod's own disk, which is small."""
    run = names.run_path(deployment.name)
    plan = msgspec.structs.replace(launch.plan, model=_model_in_pods(launch.plan.model, launch.cache.folder))
    return msgspec.structs.replace(
        launch,
        plan=plan,
        announce_urls=(),
        announce_file=f"{run}/gateway/address.json",
        token_file=f"{run}/secrets/admin-token",
        cache=msgspec.structs.replace(launch.cache, stage="none"),
    )


def _model_in_pods(model: ModelFacts, folder: str | None) -> ModelFacts:
    """A hub model at its path in the project; `folder`: where the file says that it is."""
    place = hub.in_cache(model.path)
    if place is None or folder is not None:
        return model
    path = PurePosixPath(_HUB_CACHE, place.folder, "snapshots", place.revision, place.inside)
    return msgspec.structs.replace(model, path=str(path))


def comes_by_job(plan: Plan) -> bool:
    """Whether a job fetches the model into the project before nodes start."""
    model = plan.model
    return model.reference != DEMO_MODEL and "://" not in model.path and sources.is_remote(model.reference)


def weights(deployment: Deployment, choices: Choices) -> dict[str, Any]:
    """The job that fetches the model: no GPU waits for a hub."""
    return {
        "description": f"penstock: weights of {deployment.name}",
        "script": _script_path(deployment),
        "cpu": _FETCH_CPU,
        "memory": _FETCH_MEMORY_GB,
        "runtime_identifier": choices.runtime,
        "environment": {"PENSTOCK_UNIT": WEIGHTS_PART, "JOB_MAXIMUM_MINUTES": _LONGEST_MINUTES},
    }


def application(deployment: Deployment, choices: Choices) -> dict[str, Any]:
    """The application with gateway and controller; its name and subdomain are added when it is created."""
    block = block_of(deployment)
    return {
        "description": f"penstock: gateway of {deployment.name}",
        "script": _script_path(deployment),
        "cpu": block.gateway_cpu,
        "memory": block.gateway_memory_gb,
        "runtime_identifier": choices.runtime,
        "bypass_authentication": block.public,
        "environment": {
            "PENSTOCK_UNIT": "gateway",
            # The workbench shows an application as running when this answers.
            "CDSW_APP_POLLING_ENDPOINT": "/health",
        },
    }


def page(deployment: Deployment, choices: Choices) -> dict[str, Any]:
    """The application with the chat page."""
    body = application(deployment, choices)
    body |= {"description": f"penstock: chat page of {deployment.name}", "cpu": _PAGE_CPU, "memory": _PAGE_MEMORY_GB}
    body["environment"] = {"PENSTOCK_UNIT": "ui", "CDSW_APP_POLLING_ENDPOINT": "/health"}
    return body


def node(deployment: Deployment, plan: Plan, choices: Choices) -> dict[str, Any]:
    """The job of one node: "{replica}" and "{rank}" stand for its numbers."""
    cpu, memory_gb = needs(deployment, plan)
    gpus: dict[str, Any] = {"nvidia_gpu": plan.ranks_each} if plan.device == "cuda" else {}
    if gpus and choices.gpu_label is not None:
        gpus["accelerator_label_id"] = choices.gpu_label
    environment = {"PENSTOCK_UNIT": names.node_part(REPLICA, RANK), "JOB_MAXIMUM_MINUTES": _LONGEST_MINUTES}
    if plan.n_nodes > 1:
        environment["NCCL_IB_DISABLE"] = "1"  # pods have no other network than TCP
    chunk_mb = message_chunk_mb(deployment, plan)
    if chunk_mb is not None:
        environment["VLLM_MQ_MAX_CHUNK_BYTES_MB"] = str(chunk_mb)
    return {
        "description": f"penstock: replica {REPLICA} of {deployment.name}, node {RANK}",
        "script": _script_path(deployment),
        "cpu": cpu,
        "memory": memory_gb,
        **gpus,
        "runtime_identifier": choices.runtime,
        "environment": environment,
    }


def message_chunk_mb(deployment: Deployment, plan: Plan) -> int | None:
    """The size of a part of vLLM's message queue that fits in a small /dev/shm; None where it need not be another.

    The first node of several has a queue also when each has one rank, and vLLM ends when it does not fit. Longer
    messages go over a socket. Several ranks in a pod need more than that, which `check` wants.
    """
    if plan.engine != "vllm" or plan.n_nodes == 1 or plan.ranks_each > 1:
        return None
    limit_mb = block_of(deployment).shared_memory_mb or _SHARED_MEMORY_MB
    fitting = max(1, (limit_mb - _SHARED_MEMORY_SPARE_MB) // _QUEUE_PARTS)
    return fitting if fitting < _QUEUE_PART_MB else None


def needs(deployment: Deployment, plan: Plan) -> tuple[float, float]:
    """CPUs and GB of the pod of a node, as the file says or the plan needs."""
    block = block_of(deployment)
    if plan.device == "cuda":
        n_cpus, n_bytes = _CPUS_PER_RANK * plan.ranks_each, _NODE_BYTES + _RANK_BYTES * plan.ranks_each
    else:
        n_cpus, n_bytes = plan.n_threads, -(-plan.need.total_bytes * 5 // 4 // plan.n_nodes) + _CPU_SPARE_BYTES
    return block.cpu or float(n_cpus), block.memory_gb or float(-(-n_bytes // GIB))


def instance(template: str, replica: str, rank: int) -> dict[str, Any]:
    """The body of one node's job."""
    body: dict[str, Any] = json.loads(template.replace(REPLICA, replica).replace(RANK, str(rank)))
    return body


def script(deployment: Deployment, plan: Plan) -> str:
    """The text of the script that every pod runs: the shipped one, below what it must know."""
    block, code = block_of(deployment), code_of(deployment)
    env = {name: value for name, value in deployment.engine.variables.items() if name.startswith("PIP_")}
    requirements = _requirements(deployment, plan)
    digest = hashlib.sha256(f"{block.runtime}{requirements}".encode()).hexdigest()[:10]
    facts = {
        "home": names.HOME,
        "run": names.run_path(deployment.name),
        "code": f"{names.HOME}/code/{code.hash}",
        "python": block.python,
        "nodes": block.nodes,
        "venv": f"{names.HOME}/python/{digest}",
        "requirements": requirements,
        "pip": env,
        # Viewers of the project reach this port, and Ray's dashboard runs code for those who have its token.
        "dashboard_port": "CDSW_READONLY_PORT" if plan.executor == "ray" else None,
    }
    text = resources.files("penstock.targets.cloudera").joinpath(SCRIPT).read_text("utf-8")
    return text.replace("FACTS: dict[str, Any] = {}", f"FACTS = {json.dumps(facts, indent=4).replace('null', 'None')}")


def code_of(deployment: Deployment) -> CodeArchive:
    """penstock's code, with the bundled model for those who ask for that."""
    return code_archive(with_model=deployment.model == DEMO_MODEL)


def _requirements(deployment: Deployment, plan: Plan) -> list[str]:
    engine = load_engine(plan.engine)
    of_engine = [f"{engine.package}=={plan.engine_version}"] if engine.package else []
    ray = [_RAY_REQUIREMENT] if plan.executor == "ray" else []
    return [*_REQUIREMENTS, *of_engine, *ray, *([_PAGE_REQUIREMENT] if deployment.chat_page is not None else [])]


def _script_path(deployment: Deployment) -> str:
    return names.in_project(f"{names.run_path(deployment.name)}/artifact/{SCRIPT}")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
