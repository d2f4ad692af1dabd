"""What the fake engine "compiles": a file in vLLM's own folder, which its next start loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.startup_log import Line


def compile_or_load(options: Options) -> Iterator[Line]:
    """vLLM 0.33.0's lines; `VLLM_CACHE_ROOT` says where, and without it nothing is kept."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    path = Path(root, "torch_compile_cache", "fake", "graph.py") if root is not None else None
    if path is not None and path.exists():
        yield Line(f"Directly load AOT compilation from path {path}", "EngineCore", "decorators.py:311")
        return
    yield Line("[backbone] Starting torch.compile", "EngineCore", "monitor.py:40")
    yield Line(
        f"[backbone] torch.compile took {options.compile_s:.2f} s in total",
        "EngineCore",
        "monitor.py:62",
        wait_s=options.compile_s,
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"graph = {'x' * 100_000!r}\n", "utf-8")
