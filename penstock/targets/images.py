"""The public image of an engine, for targets whose machines start images."""

from __future__ import annotations

from penstock.planner import Plan


def public_image(plan: Plan) -> str | None:
    """The image that the engine's project publishes for the planned version; None where only the user knows one.

    https://hub.docker.com/r/vllm/vllm-openai/tags: a tag is "v" and the version. Its user is root, its entrypoint
    `vllm serve`. It has python3, and vLLM itself needs msgspec, psutil and pyyaml.
    """
    if plan.engine == "vllm" and plan.device == "cuda":
        return f"vllm/vllm-openai:v{plan.engine_version.partition('+')[0]}"
    return None


def engine_words(plan: Plan) -> str:
    return plan.engine if plan.device == "cuda" else f"{plan.engine} on the CPU"
