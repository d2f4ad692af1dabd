"""The image of a deployment that has vLLM, and the version of vLLM in it."""

from __future__ import annotations

import re

from penstock.errors import UserError
from penstock.hardware import detect
from penstock.planner import Plan
from penstock.planner.engine_versions import NEWEST
from penstock.spec.deployment import Deployment

# All versions begin with 0, so that "cu12.9" or "25.09-py3" of a tag is none.
_VERSION = re.compile(r"(?<![\d.])0\.\d+(\.\d+)?((rc|a|b|\.?post|\.?dev)\d+)?(?![\d.]*\d)")


def image(deployment: Deployment, plan: Plan) -> str:
    """The file's image, or the public one of the planned version.  Raises UserError where only the user knows one."""
    named = image_of(deployment)
    if named is None and (plan.engine != "vllm" or plan.device != "cuda"):
        words = plan.engine if plan.device == "cuda" else f"{plan.engine} on the CPU"
        hint = f"Set {deployment.target}.image to one with the engine, Python 3.11, msgspec, psutil and pyyaml."
        raise UserError(f"cannot choose an image for engine {words}", hint=hint)
    return named or public_image(plan.engine_version)


def image_of(deployment: Deployment) -> str | None:
    """The image that the file names for its engine."""
    if deployment.slurm is not None:
        return deployment.slurm.container
    block = deployment.kubernetes or deployment.vessl  # only that of the target is there
    return block.image if block is not None else None


def named_version(deployment: Deployment) -> str | None:
    """The version of vLLM by the file: its own word, or its image's tag."""
    image = image_of(deployment)
    return deployment.engine.version or (version_in(image) if image is not None else None)


def versions_of(deployment: Deployment) -> dict[str, str]:
    """Of a machine that runs an image, or that is not asked: those of this machine, with the file's vLLM."""
    return {**detect.versions(), "vllm": named_version(deployment) or NEWEST}


def public_image(version: str) -> str:
    """Of https://hub.docker.com/r/vllm/vllm-openai/tags; it has python3, msgspec, psutil and pyyaml."""
    return f"vllm/vllm-openai:v{version.partition('+')[0]}"


def version_in(image: str) -> str | None:
    """The version of vLLM by an image's tag or its file's name, such as HOST:5000/NAME:v0.11.0-cu129@sha256:..."""
    match = _VERSION.search(re.sub(r"@sha256:\w+\Z", "", image).rpartition("/")[2].rpartition(":")[2])
    return match[0] if match else None
