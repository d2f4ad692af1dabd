"""Which layers stand on which pipeline stage."""

from __future__ import annotations

from functools import cache


@cache
def stage_layers(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """How many layers each stage has, as vLLM cuts them (`distributed/utils.py`, `get_pp_indices`).

    n_layers // n_stages each; the remainder goes one by one to the stages from the second-last backwards, never to the
    last, which has the head. 61 layers over 4 stages: 15, 15, 16, 15; 10 over 4: 2, 3, 3, 2.
    """
    counts = [n_layers // n_stages] * n_stages
    for index in range(2, n_layers % n_stages + 2):
        counts[-index] += 1
    return tuple(counts)


@cache
def split_layers(n_layers: int, pipeline: int) -> tuple[range, ...]:
    """The layers of each stage, by index: 61 over 2 is (range(0, 31), range(31, 61))."""
    sizes = stage_layers(n_layers, pipeline)
    ends = [sum(sizes[: stage + 1]) for stage in range(pipeline)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
